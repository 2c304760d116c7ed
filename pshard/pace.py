"""What a plan is predicted to do for its user: time to the first token, tokens per second, seconds of a whole round."""

from collections.abc import Mapping, Sequence

from pshard.pipeline import join_seconds
from pshard.plan import Variant


def rank_seconds(variant: Variant) -> dict[int, tuple[float, ...]]:
    """Predicted seconds of a micro-batch by tier, on every rank."""
    return {
        tier.tokens: tuple(rank.tiers[i].prediction.seconds for rank in variant.ranks)
        for i, tier in enumerate(variant.ranks[0].tiers)
    }


def tier_seconds(variant: Variant) -> dict[int, float]:
    """Predicted seconds of a micro-batch by tier, when no other one is under way."""
    return {tokens: join_seconds(variant.split_mode, [each]) for tokens, each in rank_seconds(variant).items()}


def prefill_seconds(mode: str, seconds: Mapping[int, Sequence[float]], tokens: int, largest: int) -> float:
    """Seconds to prefill `tokens` tokens: full micro-batches of the tier `largest` and a tail on the smallest that
    covers it.

    mode: how the model is split; seconds: of a micro-batch by tier, on every rank.
    """
    full, tail = divmod(tokens, largest)
    last = [seconds[min(t for t in seconds if t >= tail)]] if tail else []
    return join_seconds(mode, [seconds[largest]] * full + last)


def first_token_seconds(variant: Variant) -> float:
    """Seconds to prefill the expected prompts."""
    seconds = rank_seconds(variant)
    return prefill_seconds(variant.split_mode, seconds, variant.prompt * variant.sequences, max(seconds))


def decode_seconds(variant: Variant) -> float:
    """Seconds of a decode step of all sequences."""
    seconds = tier_seconds(variant)
    return seconds[min(t for t in seconds if t >= variant.sequences)]


def round_seconds(variant: Variant) -> float:
    """Seconds in which all sequences bring a prompt and decode their answers."""
    return first_token_seconds(variant) + variant.generated * decode_seconds(variant)
