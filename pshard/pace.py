"""What a plan is predicted to do for its user: time to the first token, tokens per second, seconds of a whole round."""

from pshard.plan import Variant


def tier_seconds(variant: Variant) -> dict[int, float]:
    """Predicted seconds of a micro-batch by tier."""
    return {tier.tokens: tier.prediction.seconds for tier in variant.ranks[0].tiers}


def first_token_seconds(variant: Variant) -> float:
    """Seconds to prefill the expected prompts: full micro-batches of the largest tier and a tail."""
    seconds = tier_seconds(variant)
    largest = max(seconds)
    full, tail = divmod(variant.prompt * variant.sequences, largest)
    return full * seconds[largest] + (seconds[min(t for t in seconds if t >= tail)] if tail else 0.0)


def decode_seconds(variant: Variant) -> float:
    """Seconds of a decode step of all sequences."""
    seconds = tier_seconds(variant)
    return seconds[min(t for t in seconds if t >= variant.sequences)]


def round_seconds(variant: Variant) -> float:
    """Seconds in which all sequences bring a prompt and decode their answers."""
    return first_token_seconds(variant) + variant.generated * decode_seconds(variant)
