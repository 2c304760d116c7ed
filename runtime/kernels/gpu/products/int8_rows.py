"""Products of more than SMALL_BATCH rows in int8, straight from packed weights: see triton_many."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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


Room = tuple[torch.Tensor, ...]  # codes, scales and sums of quantised activations


class Target(NamedTuple):
    """A product's weights, where its results go, and its bias."""

    weight: Packed
    out: torch.Tensor
    bias: torch.Tensor | None


def fits(weight: Packed, tile: Tile, scratch: torch.Tensor) -> bool:
    """Whether such a product can be computed in int8 with so much scratch."""
    return suits(weight) and _tokens_at_once(weight.cols, tile, scratch) > 0


def suits(weight: Packed) -> bool:
    """Whether `sum_chunks` knows such a matrix, and may have it."""
    known = weight.qtype in INT8_TYPES and (weight.qtype not in WITH_ADDENDS or weight.cols % 256 == 0)
    return known and not weight.never_int8


def are_alike(gate: Packed, up: Packed) -> bool:
    """Whether one launch can multiply by both."""
    return (gate.qtype, gate.rows) == (up.qtype, up.rows)


def multiply(
    x: torch.Tensor, targets: Sequence[Target], tile: Tile, scratch: torch.Tensor, accumulate: bool = False
) -> None:
    """out[M, rows] (+)= x @ W.T for each of the targets, which have the columns of x [M, cols]; no bias.

    The activations are quantised once, into `scratch` (uint8): as many tokens at a time as have room there.
    """
    for room, some in _quantise(x, tile, scratch):
        for target in targets:
            _launch(room, (target.weight, None), target.out[some], tile, accumulate)


def multiply_gated(
    x: torch.Tensor, gate: Packed, up: Packed, out: torch.Tensor, tile: Tile, scratch: torch.Tensor, activation: str
) -> None:
    """out[M, rows] = act(x @ gate.T) * (x @ up.T), of matrices of one type and shape, in one launch."""
    for room, some in _quantise(x, tile, scratch):
        _launch(room, (gate, up), out[some], tile, False, activation)


def _quantise(x: torch.Tensor, tile: Tile, scratch: torch.Tensor) -> Iterator[tuple[Room, slice]]:
    """As many tokens at a time as have room: where they lie quantised, and which they are."""
    chunks = x.shape[1] // 32
    step = _tokens_at_once(x.shape[1], tile, scratch)
    for first in range(0, x.shape[0], step):
        some = x[first : first + step]
        tokens = some.shape[0]
        groups = -(-tokens // tile.tokens) * (tile.tokens // GROUP)
        room = cut_room(scratch, groups * chunks)
        triton_many.quantise_many_kernel[(chunks, groups)](some, some.stride(0), *room, tokens, chunks)
        yield room, slice(first, first + step)


def _launch(
    room: Room,
    weights: tuple[Packed, Packed | None],
    out: torch.Tensor,
    tile: Tile,
    accumulate: bool,
    activation: str = "",
) -> None:
    weight, second = weights
    grid = (triton.cdiv(weight.rows, tile.rows) * triton.cdiv(out.shape[0], tile.tokens),)
    triton_many.many_rows_kernel[grid](
        weight.data, None if second is None else second.data, *room, out, *out.shape, weight.cols // 32, out.stride(0),
        *places(weight, out.device), BAND=BAND, ACCUMULATE=accumulate, ACTIVATION=activation, **cut_sums(weight, tile),
    )  # fmt: skip


def cut_sums(weight: Packed, tile: Tile) -> dict[str, Any]:
    """What kernels that call `sum_chunks` are compiled for, of a matrix and a tile."""
    encoding, across = ENCODINGS[weight.qtype], tile.rows // 32
    along = tile.warps // across
    shape = {"WR": across, "WT": along, "GROUPS": tile.tokens // GROUP // along, "UNIT": tile.depth}
    kind = {"QTYPE": weight.qtype, "LOW": encoding.low, "HIGH": encoding.high, "FACTOR": FACTORS.get(weight.qtype, 1)}
    return shape | kind | {"AHEAD": tile.stages > 1, "num_warps": tile.warps, "maxnreg": tile.registers}


def _tokens_at_once(cols: int, tile: Tile, scratch: torch.Tensor) -> int:
    """Tokens whose activations have room, a multiple of a tile's."""
    groups = scratch.numel() // (cols // 32 * CHUNK_NBYTES)
    return groups * GROUP // tile.tokens * tile.tokens


def cut_room(scratch: torch.Tensor, count: int) -> Room:
    """Codes, scales and sums of so many groups' chunks."""
    codes, scales = 32 * GROUP * count, 36 * GROUP * count
    used = scratch[: CHUNK_NBYTES * count]
    return used[:codes].view(torch.int32), used[codes:scales].view(torch.float32), used[scales:].view(torch.float32)
