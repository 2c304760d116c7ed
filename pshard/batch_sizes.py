"""Where micro-batches of few and of many tokens part: other kernels, other limits. No torch."""

SMALL_BATCH = 64  # up to here kernels read packed weights in place; above, tiles are dequantised for a library GEMM
# above, a CPU's AMX tiles are faster than its vectors; 16 tokens took 1.31 ms against 1.13 (25600x5120 Q4_0, 16 cores)
TILE_TOKENS = 16
# rows that a GPU computes for small micro-batches: few sizes, so that a graph serves many; never beyond the power of
# two that kernels are compiled for
RUNGS = (1, 2, 4, 8, 12, 16, 24, 32, 48, SMALL_BATCH)
LOGIT_ROWS = 64  # rows of logits computed at once
# a GPU computes a gated delta net token by token up to so many of a sequence, above in chunks, of so many rows at once
DELTA_STEPS, DELTA_CHUNK, DELTA_ROWS = 16, 64, 2048


def next_rung(rows: int) -> int:
    """The rows that are computed for so many, SMALL_BATCH at most."""
    return next(rung for rung in RUNGS if rung >= rows)
