"""Products of more than SMALL_BATCH rows in int8, straight from packed weights: see triton_many."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton

from pshard.runtime.kernels.api import Packed
from pshard.runtime.kernels.gpu.products import triton_many
from pshard.runtime.kernels.gpu.products.places import places
from pshard.runtime.kernels.gpu.products.triton_decode import ENCODINGS
from pshard.runtime.kernels.gpu.products.triton_fragments import FACTORS
from pshard.times.gpu_tiles import INT8_TYPES, Tile

GROUP = 32  # tokens whose activations lie together
CHUNK_NBYTES = GROUP * (32 + 4 + 4)  # of a group's 32 columns: codes, scales, sums
BAND = 8  # tiles of rows that share their activations in L2
WITH_ADDENDS = ("Q4_1", "Q5_1")  # eight chunks of theirs at a time


class Target(NamedTuple):
    """A product's weights, where its results go, and its bias."""

    weight: Packed
    out: torch.Tensor
    bias: torch.Tensor | None


def fits(weight: Packed, tile: Tile, scratch: torch.Tensor) -> bool:
    """Whether such a product can be computed in int8 with so much scratch."""
    whole = weight.qtype not in WITH_ADDENDS or weight.cols % 256 == 0
    return weight.qtype in INT8_TYPES and whole and _tokens_at_once(weight.cols, tile, scratch) > 0


def multiply(
    x: torch.Tensor, targets: Sequence[Target], tile: Tile, scratch: torch.Tensor, accumulate: bool = False
) -> None:
    """out[M, rows] (+)= x @ W.T for each of the targets, which have the columns of x [M, cols]; no bias.

    The activations are quantised once, into `scratch` (uint8): as many tokens at a time as have room there.
    """
    chunks = x.shape[1] // 32
    step = _tokens_at_once(x.shape[1], tile, scratch)
    for first in range(0, x.shape[0], step):
        some = x[first : first + step]
        tokens = some.shape[0]
        groups = -(-tokens // tile.tokens) * (tile.tokens // GROUP)
        room = _cut(scratch, groups * chunks)
        triton_many.quantise_many_kernel[(chunks, groups)](some, some.stride(0), *room, tokens, chunks)
        for target in targets:
            _launch(room, target.weight, target.out[first : first + step], tile, chunks, accumulate)


def _launch(
    room: tuple[torch.Tensor, ...], weight: Packed, out: torch.Tensor, tile: Tile, chunks: int, accumulate: bool
) -> None:
    encoding, across = ENCODINGS[weight.qtype], tile.rows // 32
    along = tile.warps // across
    grid = (triton.cdiv(weight.rows, tile.rows) * triton.cdiv(out.shape[0], tile.tokens),)
    triton_many.many_rows_kernel[grid](
        weight.data, *room, out, *out.shape, chunks, out.stride(0), *places(weight),
        WR=across, WT=along, GROUPS=tile.tokens // GROUP // along, UNIT=tile.depth, AHEAD=tile.stages > 1, BAND=BAND,
        QTYPE=weight.qtype, LOW=encoding.low,
        HIGH=encoding.high, FACTOR=FACTORS.get(weight.qtype, 1), ACCUMULATE=accumulate, num_warps=tile.warps,
        maxnreg=tile.registers,
    )  # fmt: skip


def _tokens_at_once(cols: int, tile: Tile, scratch: torch.Tensor) -> int:
    """Tokens whose activations have room, a multiple of a tile's."""
    groups = scratch.numel() // (cols // 32 * CHUNK_NBYTES)
    return groups * GROUP // tile.tokens * tile.tokens


def _cut(scratch: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Codes, scales and sums of so many groups' chunks."""
    codes, scales = 32 * GROUP * count, 36 * GROUP * count
    used = scratch[: CHUNK_NBYTES * count]
    return used[:codes].view(torch.int32), used[codes:scales].view(torch.float32), used[scales:].view(torch.float32)
