"""What a tier's micro-batch looks like in the expected workload, and how often it runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pshard.batch import VERIFY, Batch
from pshard.batch_sizes import DELTA_STEPS
from pshard.workload import Workload

LEAST = 0.02  # share of the round's time that every tier counts for, also one that the round never enters


@dataclass(frozen=True)
class TierLoad:
    """One micro-batch, whose texts have equally many new tokens and cached cells.

    `weight` is how many such micro-batches one round of the workload (all its sequences, prompt and answer) takes.
    `rare`: the round hardly enters this tier, if ever; its weight only keeps it from being planned badly.
    """

    batch: Batch
    weight: float = 1.0
    rare: bool = False

    @property
    def tokens(self) -> int:
        """New tokens of all texts."""
        return self.batch.tokens

    @property
    def sequences(self) -> int:
        """How many texts have some."""
        return self.batch.texts

    @property
    def past(self) -> int:
        """Cached cells of each."""
        return self.batch.spans[0].past

    @property
    def logit_rows(self) -> int:
        """Rows of logits that are wanted."""
        return self.batch.rows

    @property
    def is_decode(self) -> bool:
        """Whether every text has one token."""
        return self.batch.is_decode

    @property
    def takes_chunks(self) -> bool:
        """Whether a delta net takes tokens of a text together instead of one after the other."""
        return not self.is_answer or self.tokens > DELTA_STEPS * self.sequences

    @property
    def verifies(self) -> bool:
        """Whether some texts verify drafts."""
        return any(span.kind == VERIFY for span in self.batch.spans)

    @property
    def is_answer(self) -> bool:
        """Whether every text decodes or verifies drafts."""
        return self.batch.is_answer


def tier_loads(workload: Workload, tiers: tuple[int, ...] | None = None) -> tuple[TierLoad, ...]:
    """The expected load of every tier, ascending in tokens.

    Decode tiers (tokens <= sequences) see the prompt and half of the answer as past. A prefill tier sees the mean
    past of the prompt's chunks of its size. Weights: the answer's steps on the tier of all sequences, or of as many as
    run in a server's load, with their drafts where there are some; the prompt is so many full micro-batches of the
    largest tier and a tail on the smallest tier that covers it.
    """
    tiers = workload.tiers() if tiers is None else tiers
    weights = dict.fromkeys(tiers, 0.0)
    for rows, steps in workload.answer_steps():
        weights[min((t for t in tiers if t >= rows), default=tiers[-1])] += steps
    full, tail = divmod(workload.prompt_tokens, tiers[-1])
    weights[tiers[-1]] += full * workload.rounds_of_prompts
    if tail:
        weights[min(t for t in tiers if t >= tail)] += workload.rounds_of_prompts
    return tuple(_load(workload, tokens, weights[tokens]) for tokens in tiers)


def raise_weights(loads: tuple[TierLoad, ...], seconds: Sequence[float]) -> tuple[TierLoad, ...]:
    """The loads with weights such that every tier, at `seconds` each, counts for at least LEAST of the whole round.

    Those whose weight had to be raised are rare.
    """
    whole = sum(load.weight * s for load, s in zip(loads, seconds))
    least = [LEAST * whole / s for s in seconds]
    return tuple(replace(load, weight=max(load.weight, w), rare=load.weight < w) for load, w in zip(loads, least))


def _load(workload: Workload, tokens: int, weight: float) -> TierLoad:
    def share(sequences: int) -> int:
        """Cells of each of so many: of those of a server only as many run as there are."""
        return workload.context // sequences if workload.concurrency else workload.share

    middle = workload.prompt + workload.generated // 2
    if texts := workload.count_verifying(tokens):
        past = max(0, min(middle, share(texts) - workload.drafting.rows))
        return TierLoad(Batch.even(tokens, texts, past, VERIFY), weight)
    if tokens <= workload.sequences:
        past = max(0, min(middle, share(tokens) - 1))
        return TierLoad(Batch.even(tokens, tokens, past), weight)
    longest = max(1, min(share(1), workload.prompt))  # new tokens that one sequence can bring
    sequences = min(workload.sequences, -(-tokens // longest))
    each = -(-tokens // sequences)
    chunks = max(1, -(-workload.prompt // each))
    past = max(0, min((chunks - 1) * each // 2, share(sequences) - each))
    return TierLoad(Batch.even(tokens, sequences, past), weight)
