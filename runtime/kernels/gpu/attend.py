"""Attention's launches: few rows with their cells cut into splits, also beside prompts; those segment by segment."""

from dataclasses import replace
from typing import Any

import torch
import triton

from pshard.runtime.kernels.api import LayerKV, RowIndex, Scoring
from pshard.runtime.kernels.gpu import triton_attention
from pshard.runtime.kernels.gpu.activations import NOT_QUANTISED, Activations
from pshard.runtime.kernels.gpu.default_tiles import share_programs
from pshard.runtime.kernels.gpu.tiles.attention_tiles import decode_tiles, number_bytes, prompt_tiles, sum_piece
from pshard.runtime.kernels.gpu.tiles.pick_tiles import TilePicker
from pshard.runtime.kernels.row_index import part_rows
from pshard.runtime.memory.kv_cache import KV_DTYPES
from pshard.times.gpu_tiles import ANY_BATCH, Tile
from pshard.units.attention import DECODE_PROGRAMS, decode_pieces

NAMES = {kind: name for name, kind in KV_DTYPES.items()}  # of cells
COMBINED = 4096  # numbers of partial sums that a warp's registers hold: of twice as many a thread spills 1472 bytes


def attend_rows(
    qkv: torch.Tensor,
    heads: tuple[int, int, int],
    kv: LayerKV,
    rows: RowIndex,
    scale: float,
    out: torch.Tensor,
    partial: torch.Tensor,
    picker: TilePicker,
    activations: Activations | None,
    sinks: torch.Tensor | None,
    bent: Scoring,
) -> None:
    """`Kernels.attention` of few rows, each against the splits of its cells; hands `out` over to `activations` where it
    can."""
    n_heads, groups, d = heads
    cells, index = (kv.k, kv.v, *kv.k.stride()[:2], *kv.v.stride()[:2]), (rows.begin, rows.position, rows.blocks)
    tokens, padded = qkv.shape[0], max(16, triton.next_power_of_2(d))
    share = max(16, triton.next_power_of_2(n_heads // groups))
    room = partial.numel() // (tokens * n_heads * (d + 2))  # a rank's layer may have fewer KV heads than most
    seen = min(rows.cells, rows.window + kv.k.shape[1] - 1) if rows.window else rows.cells
    wanted = max(1, share_programs(DECODE_PROGRAMS, picker.limits) // (tokens * groups))
    most = min(decode_pieces(tokens, groups), room, wanted)
    splits = most

    def start(tile: Tile) -> None:
        nonlocal splits
        splits = min(most, triton.cdiv(seen, tile.depth))
        triton_attention.decode_kernel[(splits, groups, tokens)](
            qkv, qkv.stride(0), *cells, *index, partial, scale, splits, HEADS=n_heads, GROUPS=groups, SHARE=share, D=d,
            DP=padded, BLOCK=tile.depth, CELLS=kv.k.shape[1], WINDOW=rows.window, **_scores(bent), STAGES=tile.stages,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    kind, each = _cells_of(kv)
    key = f"decode {padded}x{share}", kind, ANY_BATCH
    picker.launch(key, picker.ways(key, lambda: decode_tiles(picker.limits, padded, each, share)), start)
    ready = activations.hand_over(out) if activations and d == padded and d % 32 == 0 else None
    together = triton.next_power_of_2(splits)
    triton_attention.decode_combine_kernel[(n_heads, tokens)](
        partial, out, out.stride(0), splits, sinks, *(ready or NOT_QUANTISED), HEADS=n_heads, D=d, DP=padded,
        SPLITS=together, SINKS=sinks is not None, QUANTISE=ready is not None,
        num_warps=max(4, together * padded // COMBINED),
    )  # fmt: skip


def attend_prompts(
    qkv: torch.Tensor,
    heads: tuple[int, int, int],
    kv: LayerKV,
    rows: RowIndex,
    scale: float,
    out: torch.Tensor,
    partial: torch.Tensor | None,
    picker: TilePicker,
    sinks: torch.Tensor | None,
    bent: Scoring,
) -> None:
    """`Kernels.attention` of many rows: a launch for each segment; with `partial` one for all texts with one token."""
    runs, prompts = part_rows(rows, partial is not None)
    for new, index in runs:
        assert partial is not None
        given = qkv[new], heads, kv, index, scale, out[new], partial
        attend_rows(*given, picker=picker, activations=None, sinks=sinks, bent=_of_rows(bent, new))
    n_heads, groups, d = heads
    padded = max(16, triton.next_power_of_2(d))
    kind, each = _cells_of(kv)
    key = f"prompt {padded}", kind, ANY_BATCH
    ways = picker.ways(key, lambda: prompt_tiles(picker.limits, padded, each))
    cells = (kv.k, kv.v, *kv.k.stride()[:2], *kv.v.stride()[:2])
    sees = {"WINDOW": rows.window, "SINKS": sinks is not None}

    def start(tile: Tile) -> None:
        for new, begin in prompts:
            tokens = new.stop - new.start
            triton_attention.prefill_kernel[(triton.cdiv(tokens, tile.rows), n_heads)](
                qkv[new], qkv.stride(0), *cells, rows.blocks, begin, rows.position[new], out[new], out.stride(0),
                sinks=sinks, tokens=tokens, scale=scale, HEADS=n_heads, GROUPS=groups, D=d, DP=padded, BM=tile.rows,
                BN=tile.depth, CELLS=kv.k.shape[1], **sees, **_scores(_of_rows(bent, new)),
                PIECE=sum_piece(tile, tile.rows, padded, picker.limits), num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip

    if prompts:
        picker.launch(key, ways, start)


def _scores(bent: Scoring) -> dict[str, Any]:
    """What kernels take of scores that change, and what they are compiled for."""
    forms = {"CAPPED": bent.cap != 0, "SLOPED": bent.slopes is not None, "CHUNKED": bent.chunked}
    chosen = {"EACH": 0 if bent.seen is None else bent.each, "words": bent.seen}
    return {"cap": bent.cap, "slopes": bent.slopes, **forms, **chosen, "words_stride": _width(bent)}


def _width(bent: Scoring) -> int:
    """Words of a row."""
    return 0 if bent.seen is None else bent.seen.stride(0)


def _of_rows(bent: Scoring, rows: slice) -> Scoring:
    """The same of some rows."""
    return bent if bent.seen is None else replace(bent, seen=bent.seen[rows])


def _cells_of(kv: LayerKV) -> tuple[str, float]:
    """The types of a layer's cells as tiles are kept by, and bytes of a number of k and of one of v."""
    k, v = kv.k.dtype, kv.v.dtype
    return NAMES[k] if k == v else f"{NAMES[k]} {NAMES[v]}", number_bytes(NAMES[k]) + number_bytes(NAMES[v])
