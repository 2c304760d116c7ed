"""What the interface hands to the scheduler, and what comes back: nouns that both sides share. No torch, no HTTP."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pshard.runtime.sampling import Constraint, Sampling
    from pshard.server.snapshot import Snapshot


@dataclass(frozen=True)
class Likely:
    """A token of a text with its natural log-probability under the model's unmodified logits, and the likeliest tokens
    in its place, the best first."""

    token: int
    logprob: float
    best: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Job:
    """One text to be continued: one choice of a request. Choices of a request are jobs of their own.

    prompt: ids, at least one. most: tokens to make at most; 0 scores the prompt only. stops: ids that end the text and
    are no part of it. likely: how many likeliest tokens are wanted beside each token's own log-probability; None: no
    log-probabilities. scored: those of the prompt's tokens too. constrain: makes what the answer is to follow, on the
    scheduler's thread. key: who asks; keys take turns. salt: texts share computed prefixes only with an equal one.
    drafts: of a step at most; None: as many as the plan has.
    """

    id: str
    prompt: tuple[int, ...]
    most: int
    sampling: "Sampling"
    stops: frozenset[int] = frozenset()
    likely: int | None = None
    scored: bool = False
    constrain: "Callable[[], Constraint] | None" = None
    key: str = ""
    salt: str = ""
    drafts: int | None = None


@dataclass(frozen=True)
class Progress:
    """The prompt is computed up to `done` of `total` tokens; `cached` of them were there before. scored: with
    `Job.scored`, at the end of the prompt, one a token, the first without a log-probability (nan)."""

    done: int
    total: int
    cached: int
    scored: tuple[Likely, ...] = ()


@dataclass(frozen=True)
class Made:
    """New tokens; `likely` has one entry each where the job wants log-probabilities."""

    tokens: tuple[int, ...]
    likely: tuple[Likely, ...] = ()


@dataclass(frozen=True)
class Ended:
    """The last event of a job. reason: "stop" (a stop id, or the grammar's end), "length" (`most` tokens, or the
    context is full), "cancelled", or "error" with a message for the one who asked; `retry`: whether it may be tried
    again; `asked`: what was asked for cannot be done, and the server has not failed."""

    reason: str
    message: str = ""
    retry: bool = False
    asked: bool = False


Event = Progress | Made | Ended


class Listener(Protocol):
    """Where the scheduler leaves a job's events; called on its thread, and never waits."""

    def put(self, event: Event) -> None:
        """Leave an event for whoever reads."""

    def wake(self) -> None:
        """Have what was left be read. A step leaves events of many jobs and wakes once, when reading disturbs it
        least."""


class Refused(Exception):
    """A job is not taken. status: of HTTP, 400 (it can never run), 429 (too many wait) or 503 (loading, stopping).
    retry_after: seconds until it is worth trying again. code: as clients know it ("context_length_exceeded")."""

    def __init__(self, status: int, message: str, code: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after = status, code, retry_after


class Service(Protocol):
    """What runs jobs. All of it may be called from any thread, and all but `find_budget` returns at once."""

    def submit(self, job: Job, listener: Listener) -> None:
        """Queue a job; every event goes to the listener, `Ended` last and exactly once. Raises Refused."""

    def cancel(self, job_id: str) -> None:
        """End a job at the border of the step that runs; nothing happens to one that has ended."""

    def snapshot(self) -> "Snapshot":
        """What the server is and does now, without prompts."""

    def find_budget(self, mib: int, plan: bool) -> None:
        """See whether there is a plan of that budget by now; `plan`: else make one, beside what runs. Raises Refused
        with what makes one, or why none could be made."""

    def move_budget(self, mib: int) -> "Future[str]":
        """Move to the planned budget of so many MiB between steps; running texts go on. The future says under which
        plan, or raises UserError. Raises Refused when no plan has such a budget."""
