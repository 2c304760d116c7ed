"""How many rows an accelerator computes for small micro-batches: few sizes, so that a graph serves many. No torch."""

from pshard.batch_sizes import SMALL_BATCH, next_rung


def fill_rows(rows: int, tier: int, exact: bool) -> int:
    """Rows that are computed for so many of a micro-batch, SMALL_BATCH at most, in the tier for `tier` tokens.

    exact: as many as the tier has for any, so that all kernels are the same whatever else is in the step.
    """
    most = min(tier, SMALL_BATCH)
    if exact or not rows:
        return most if rows else 0
    return min(most, next_rung(rows))
