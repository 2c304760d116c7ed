"""What a server promises those who ask, and how it says that it cannot."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pshard.server.jobs import Job, Refused

if TYPE_CHECKING:
    from pshard.server.scheduling.served_machine import PlanFacts

LONGEST_WAIT = 120.0  # seconds that a client is told to wait: more is not obeyed


@dataclass(frozen=True)
class Promises:
    """gap: seconds between the tokens of a text at most, where the tiers allow it. queue: jobs that may wait. patience:
    seconds that a job waits before it is given up. whole: seconds that a job may take in all; None: any."""

    gap: float = 1.0
    queue: int = 64
    patience: float = 600.0
    whole: float | None = None


def check_job(job: Job, facts: "PlanFacts") -> None:
    """Raise Refused (400) for a job that can never run."""
    if not job.prompt:
        raise Refused(400, "the prompt has no tokens; it needs at least one", "invalid_prompt")
    if not 0 <= min(job.prompt) <= max(job.prompt) < facts.vocab:
        raise Refused(
            400,
            f"token ids are 0 to {facts.vocab - 1}; the prompt has {min(job.prompt)} to {max(job.prompt)}",
            "invalid_prompt",
        )
    needed = len(job.prompt) + min(1, job.most)
    if needed > facts.longest:
        raise Refused(
            400,
            f"the prompt has {len(job.prompt)} tokens; the context is {facts.longest}, the answer included",
            "context_length_exceeded",
        )


def estimate_wait(waiting_tokens: int, waiting: int, facts: "PlanFacts", mean_whole: float) -> float:
    """Seconds until jobs that wait have begun: their prompts at the rate of the largest tier, and a job's usual time
    for each of them, so many at once."""
    prompts = waiting_tokens * facts.seconds[-1] / facts.tiers[-1]
    return min(LONGEST_WAIT, max(1.0, prompts + mean_whole * waiting / facts.sequences))
