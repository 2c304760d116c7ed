"""What a plan is predicted to do for its user: time to the first token, tokens per second, seconds of a whole round."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from pshard.cuts.layer_cuts import join_seconds
from pshard.plan import Prediction, Variant
from pshard.speculation import PROGRAMS
from pshard.workload import Workload

S = TypeVar("S")  # seconds, maybe of each rank


def rank_seconds(variant: Variant) -> dict[int, tuple[float, ...]]:
    """Predicted seconds of a micro-batch by tier, on every rank."""
    return {
        tier.tokens: tuple(rank.tiers[i].prediction.seconds for rank in variant.ranks)
        for i, tier in enumerate(variant.ranks[0].tiers)
    }


def tier_seconds(variant: Variant) -> dict[int, float]:
    """Predicted seconds of a micro-batch by tier, when no other one is under way."""
    return {tokens: join_seconds(variant.workload.split_mode, [each]) for tokens, each in rank_seconds(variant).items()}


def prefill_seconds(mode: str, seconds: Mapping[int, Sequence[float]], tokens: int, largest: int) -> float:
    """Seconds to prefill `tokens` tokens: full micro-batches of the tier `largest` and a tail on the smallest that
    covers it.

    mode: how the model is split; seconds: of a micro-batch by tier, on every rank.
    """
    full, tail = divmod(tokens, largest)
    last = [seconds_covering(seconds, tail)] if tail else []
    return join_seconds(mode, [seconds[largest]] * full + last)


def first_token_seconds(variant: Variant) -> float:
    """Seconds to prefill the expected prompts, or that of one request to a server."""
    swept = _swept_seconds(variant)
    return sum_first_token(variant.workload, rank_seconds(variant)) if swept is None else swept


def count_swept(workload: Workload, tokens: int) -> int:
    """Micro-batches of up to so many tokens that the expected prompts are cut into, where these may go in sweeps; 0
    where there is one, or where what drafts computes after each."""
    batches = -(-workload.prompt_tokens // tokens)
    return 0 if workload.drafting.kind in PROGRAMS or batches < 2 else batches


def _swept_seconds(variant: Variant) -> float | None:
    """Seconds to prefill the expected prompts in sweeps; None where they are not."""
    tier = variant.ranks[0].tiers[-1]
    batches = count_swept(variant.workload, tier.tokens)
    return batches * tier.sweep.seconds if tier.sweep and batches else None


def decode_seconds(variant: Variant) -> float:
    """Seconds in which all sequences get a token of their answers: a decode step, or with drafts less than a step; of a
    server's load, the mean."""
    return _answer_seconds(variant) / variant.workload.generated


def decode_rate(variant: Variant) -> float:
    """Tokens per second of all sequences that decode."""
    w = variant.workload
    return w.answer_tokens / _answer_seconds(variant)


def step_seconds(variant: Variant, rows: int) -> float:
    """Seconds of a step in which every text that is answered has so many rows, in the mean over how many run."""
    return _sum_steps(variant.workload, rank_seconds(variant), _mean_load(variant.workload, rows))


def step_bound(variant: Variant, rows: int) -> float:
    """What no plan's such step can be below."""
    bounds = {
        tier.tokens: tuple(rank.tiers[i].prediction.bound_seconds for rank in variant.ranks)
        for i, tier in enumerate(variant.ranks[0].tiers)
    }
    return _sum_steps(variant.workload, bounds, _mean_load(variant.workload, rows))


def round_seconds(variant: Variant) -> float:
    """Seconds in which all sequences bring a prompt and decode their answers; of a server's load, as many as run."""
    w = variant.workload
    return (
        w.rounds_of_prompts * first_token_seconds(variant) + _decode(w, rank_seconds(variant)) + _beside_steps(variant)
    )


def sum_round(workload: Workload, seconds: Mapping[int, Sequence[float]]) -> float:
    """The same of a micro-batch's seconds by tier, on every rank; those of tiers that the round does not enter do not
    count."""
    return workload.rounds_of_prompts * sum_first_token(workload, seconds) + _decode(workload, seconds)


def sum_first_token(w: Workload, seconds: Mapping[int, Sequence[float]]) -> float:
    """Seconds to prefill the expected prompts, of a micro-batch's by tier, on every rank."""
    return prefill_seconds(w.split_mode, seconds, w.prompt_tokens, max(seconds))


def seconds_covering(seconds: Mapping[int, S], rows: int) -> S:
    """What the smallest tier that covers so many rows takes; seconds: by tier. Raises ValueError where none does."""
    return seconds[min(tier for tier in seconds if tier >= rows)]


def _mean_load(w: Workload, rows: int) -> tuple[tuple[int, float], ...]:
    """Steps in which every text that is answered has so many rows: (rows of all, their share)."""
    return tuple((texts * rows, share) for texts, share in w.running())


def _sum_steps(w: Workload, seconds: Mapping[int, Sequence[float]], load: Iterable[tuple[int, float]]) -> float:
    """Of so many steps of so many rows: (rows, steps)."""
    return sum(steps * join_seconds(w.split_mode, [seconds_covering(seconds, rows)]) for rows, steps in load)


def _decode(w: Workload, seconds: Mapping[int, Sequence[float]]) -> float:
    """Of all decode steps of a round."""
    return _sum_steps(w, seconds, w.answer_steps())


def _answer_seconds(variant: Variant) -> float:
    """Of all that answers take in a round."""
    return _decode(variant.workload, rank_seconds(variant)) + _beside_steps(variant)


def _beside_steps(variant: Variant) -> float:
    """Of what drafts take in a round beside steps: making them, and taking back what did not hold."""
    said, w = variant.speculation, variant.workload
    return w.draft_steps * said.beside(w.drafting.drafts) if said else 0.0


def as_profiled(variant: Variant) -> Variant:
    """The variant with what the profile alone predicts, whatever running plans has taught since."""
    return _with_seconds(variant, lambda p: p.profile_seconds)


def as_measured(variant: Variant) -> Variant:
    """The variant with measured seconds in place of predicted ones, where it was run."""
    return _with_seconds(variant, lambda p: p.measured_seconds)


def _with_seconds(variant: Variant, seconds: Callable[[Prediction], float | None]) -> Variant:
    """Other seconds of every tier; those that it has where there are no others."""
    ranks = tuple(
        replace(
            rank,
            tiers=tuple(
                replace(t, prediction=replace(t.prediction, seconds=seconds(t.prediction) or t.prediction.seconds))
                for t in rank.tiers
            ),
        )
        for rank in variant.ranks
    )
    return replace(variant, ranks=ranks)
