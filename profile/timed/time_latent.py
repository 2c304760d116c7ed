"""Times attention over latents through the kernels that the runtime calls."""

from collections.abc import Sequence

import torch

from pshard.batch_sizes import SMALL_BATCH
from pshard.machine import AttentionTiming
from pshard.profile.timed.time_kernels import KernelBench, index_rows, time_series
from pshard.units.kv_cells import KV_BLOCK, kv_blocks
from pshard.units.latent_attention import latent_pieces
from pshard.units.operations import AttendLatent
from pshard.units.state import LatentState, StateShape


def time_latent(
    bench: KernelBench, shape: AttendLatent, kv_type: str, tokens: int, contexts: Sequence[int], sequences: int = 1
) -> list[AttentionTiming]:
    """As `time_attention`. The rows look like those of attention with one KV head as wide as a cell."""
    if sequences > 1:
        block = LatentState(shape.heads[2], kv_type).nbytes(StateShape(KV_BLOCK, 1, kv_type, kv_type))
        contexts = [c for c in contexts if sequences * kv_blocks(c, 1) * block <= bench.pool.nbytes]
    series = time_series(contexts, bench.slow, lambda c: _time_one(bench, shape, kv_type, tokens, c, sequences))
    return [
        AttentionTiming(bench.side, *shape.heads, kv_type, tokens, context, seconds, sequences)
        for context, seconds in series
    ]


def _time_one(
    bench: KernelBench, shape: AttendLatent, kv_type: str, tokens: int, context: int, sequences: int
) -> float:
    heads, _, width = shape.heads
    rows = sequences * tokens
    cells = bench.pool.rotate_latents(sequences * kv_blocks(context, 1) * KV_BLOCK, width, kv_type)
    q, out = (bench.activations(rows, heads * width).view(rows, heads, width) for _ in range(2))
    partial = None
    if rows <= SMALL_BATCH:
        partial = torch.empty(rows * latent_pieces(rows, heads), heads, shape.rank + 2, device=bench.device)
    index, scale = index_rows(bench.device, tokens, context, sequences), width**-0.5
    attend = bench.kernels.attend_latent
    return bench.seconds(lambda i: attend(q, shape.rank, cells[i % len(cells)], index, scale, out, partial), rows)
