"""Attention's launches: few rows with their cells cut into splits, also beside prompts; those segment by segment."""

import torch
import triton

from pshard.runtime.kernels.api import LayerKV, RowIndex
from pshard.runtime.kernels.gpu import triton_attention
from pshard.runtime.kernels.gpu.activations import NOT_QUANTISED, Activations
from pshard.runtime.kernels.gpu.default_tiles import TUNING
from pshard.runtime.kernels.row_index import part_rows
from pshard.units.attention import decode_pieces


def attend_rows(
    qkv: torch.Tensor,
    heads: tuple[int, int, int],
    kv: LayerKV,
    rows: RowIndex,
    scale: float,
    out: torch.Tensor,
    partial: torch.Tensor,
    activations: Activations | None,
    sinks: torch.Tensor | None,
) -> None:
    """`Kernels.attention` of few rows, each against the splits of its cells; hands `out` over to `activations` where it
    can."""
    n_heads, groups, d = heads
    tokens, tile = qkv.shape[0], TUNING["decode", 0]
    room = partial.numel() // (tokens * n_heads * (d + 2))  # a rank's layer may have fewer KV heads than most
    seen = min(rows.cells, rows.window + kv.k.shape[1] - 1) if rows.window else rows.cells
    splits = min(decode_pieces(tokens, groups), room, triton.cdiv(seen, tile.depth))
    padded = max(16, triton.next_power_of_2(d))
    cells = (kv.k, kv.v, *kv.k.stride()[:2], *kv.v.stride()[:2])
    index = (rows.begin, rows.position, rows.blocks)
    triton_attention.decode_kernel[(splits, groups, tokens)](
        qkv, qkv.stride(0), *cells, *index, partial, scale, splits, HEADS=n_heads, GROUPS=groups,
        SHARE=max(16, triton.next_power_of_2(n_heads // groups)), D=d, DP=padded, BLOCK=tile.depth,
        CELLS=kv.k.shape[1], WINDOW=rows.window, STAGES=tile.stages, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    ready = activations.hand_over(out) if activations and d == padded and d % 32 == 0 else None
    triton_attention.decode_combine_kernel[(n_heads, tokens)](
        partial, out, out.stride(0), splits, sinks, *(ready or NOT_QUANTISED), HEADS=n_heads, D=d, DP=padded,
        SPLITS=triton.next_power_of_2(splits), SINKS=sinks is not None, QUANTISE=ready is not None, num_warps=4,
    )  # fmt: skip


def attend_prompts(
    qkv: torch.Tensor,
    heads: tuple[int, int, int],
    kv: LayerKV,
    rows: RowIndex,
    scale: float,
    out: torch.Tensor,
    partial: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """`Kernels.attention` of many rows: a launch for each segment; with `partial` one for all texts with one token."""
    runs, prompts = part_rows(rows, partial is not None)
    for new, index in runs:
        assert partial is not None
        attend_rows(qkv[new], heads, kv, index, scale, out[new], partial, activations=None, sinks=sinks)
    n_heads, groups, d = heads
    padded = max(16, triton.next_power_of_2(d))
    tile = TUNING["prefill", max(64, padded)]
    cells = (kv.k, kv.v, *kv.k.stride()[:2], *kv.v.stride()[:2])
    sees = {"WINDOW": rows.window, "SINKS": sinks is not None}
    for new, at in prompts:
        tokens = new.stop - new.start
        triton_attention.prefill_kernel[(triton.cdiv(tokens, tile.rows), n_heads)](
            qkv[new], qkv.stride(0), *cells, rows.blocks, at, rows.position[new], out[new], out.stride(0),
            sinks=sinks, tokens=tokens, scale=scale, HEADS=n_heads, GROUPS=groups, D=d, DP=padded, BM=tile.rows,
            BN=tile.depth, CELLS=kv.k.shape[1], **sees, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
