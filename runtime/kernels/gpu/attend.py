"""Attention's launches: few rows with their cells cut into splits, and prompts segment by segment."""

import torch
import triton

from pshard.runtime.kernels.api import LayerKV, RowIndex
from pshard.runtime.kernels.gpu import triton_attention
from pshard.runtime.kernels.gpu.activations import NOT_QUANTISED, Activations
from pshard.runtime.kernels.gpu.default_tiles import TUNING
from pshard.runtime.kernels.gpu.early import launch_early
from pshard.units.attention import decode_pieces

COMBINED = 8192  # numbers of splits that the last program of a KV head combines at once: it keeps them in registers
MOST_TURNS = 2  # so often; beyond, programs of a launch of their own are faster


def attend_rows(
    qkv: torch.Tensor,
    heads: tuple[int, int, int],
    kv: LayerKV,
    rows: RowIndex,
    scale: float,
    out: torch.Tensor,
    partial: torch.Tensor,
    activations: Activations,
    counters: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    """`Kernels.attention` of few rows, each against the splits of its cells; hands `out` over where it can. One launch
    for short contexts, else two. counters: int32, zero."""
    n_heads, groups, d = heads
    tokens, tile = qkv.shape[0], TUNING["decode", 0]
    room = partial.numel() // (tokens * n_heads * (d + 2))  # a rank's layer may have fewer KV heads than most
    seen = min(rows.cells, rows.window + kv.k.shape[1] - 1) if rows.window else rows.cells
    splits = min(decode_pieces(tokens, groups), room, triton.cdiv(seen, tile.depth))
    padded = max(16, triton.next_power_of_2(d))
    cells = (kv.k, kv.v, *kv.k.stride()[:2], *kv.v.stride()[:2])
    index = (rows.begin, rows.position, rows.blocks)
    ready = activations.hand_over(out) if d == padded and d % 32 == 0 else None
    heads_together = triton.next_power_of_2(n_heads // groups)
    at_once = max(1, min(triton.next_power_of_2(splits), COMBINED // (heads_together * padded)))
    combines = splits <= MOST_TURNS * at_once and tokens * groups <= counters.numel()
    given = (out, out.stride(0), sinks, *(ready or NOT_QUANTISED))
    how = {"HEADS": n_heads, "D": d, "DP": padded, "SPLITS": triton.next_power_of_2(splits),
           "SINKS": sinks is not None, "QUANTISE": ready is not None, **launch_early()}  # fmt: skip
    triton_attention.decode_kernel[(splits, groups, tokens)](
        qkv, qkv.stride(0), *cells, *index, partial, scale, splits, *given, counters=counters, **how, GROUPS=groups,
        SHARE=max(16, heads_together), BLOCK=tile.depth, CELLS=kv.k.shape[1], WINDOW=rows.window, STAGES=tile.stages,
        TOGETHER=heads_together if combines else 0, AT_ONCE=at_once, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if not combines:
        triton_attention.decode_combine_kernel[(n_heads, tokens)](
            partial, out, out.stride(0), splits, *given[2:], **how, num_warps=4
        )


def attend_prompts(
    qkv: torch.Tensor,
    heads: tuple[int, int, int],
    kv: LayerKV,
    rows: RowIndex,
    scale: float,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    """`Kernels.attention`, one launch for each segment."""
    n_heads, groups, d = heads
    padded = max(16, triton.next_power_of_2(d))
    tile = TUNING["prefill", max(64, padded)]
    cells = (kv.k, kv.v, *kv.k.stride()[:2], *kv.v.stride()[:2])
    sees = {"WINDOW": rows.window, "SINKS": sinks is not None}
    at = 0
    for segment in rows.segments:
        new = slice(segment.start, segment.start + segment.tokens)
        triton_attention.prefill_kernel[(triton.cdiv(segment.tokens, tile.rows), n_heads)](
            qkv[new], qkv.stride(0), *cells, rows.blocks, at, rows.position[new], out[new], out.stride(0),
            sinks=sinks, tokens=segment.tokens, scale=scale, HEADS=n_heads, GROUPS=groups, D=d, DP=padded, BM=tile.rows,
            BN=tile.depth, CELLS=kv.k.shape[1], **sees, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        at += len(segment.blocks)
