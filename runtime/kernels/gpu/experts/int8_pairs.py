"""Experts of many tokens in int8, straight from packed weights: see triton_int8. Three launches, behind the sorting."""

from dataclasses import replace
from typing import Any

import torch
import triton

from pshard.model_config import Experts
from pshard.runtime.kernels.api import ExpertWeights, Packed
from pshard.runtime.kernels.gpu.experts import triton_int8
from pshard.runtime.kernels.gpu.experts.sorted_pairs import Kinds, Sorted
from pshard.runtime.kernels.gpu.products.int8_rows import GROUP, are_alike, cut_room, cut_sums, suits
from pshard.runtime.kernels.gpu.products.places import places
from pshard.times.gpu_tiles import Tile, holds_pairs

SPAN = 4  # chunks that a program quantises one after the other


def fits(kinds: Kinds, pairs: int, experts: int, tile: Tile) -> bool:
    """Whether so many pairs can be computed in int8: tiles of quantised inputs lie where results will."""
    whole = are_alike(kinds.gate, kinds.up) and kinds.gate.rows % 32 == 0
    return whole and all(map(suits, kinds)) and holds_pairs(tile, pairs, experts)


def multiply(
    x: torch.Tensor,
    by_expert: Sorted,
    kinds: Kinds,
    weights: ExpertWeights,
    rule: Experts,
    scratch: dict[str, torch.Tensor],
    picked: torch.Tensor,
    tile: Tile,
) -> None:
    """picked[pair] = the pair's expert of its token's row of x. Uses "picked" and "gated" of the scratch on the way."""
    slots = by_expert.slots
    groups, chunks = slots * tile.tokens // GROUP, kinds.gate.cols // 32
    room, inner = _take_room(scratch["picked"], groups, kinds.gate), _take_room(scratch["gated"], groups, kinds.down)
    where = {"order": by_expert.order, "tiles": by_expert.tiles, "slots": slots}
    triton_int8.quantise_pairs_kernel[(triton.cdiv(chunks, SPAN), groups)](
        x, x.stride(0), *where.values(), rule.used, *room, chunks, BM=tile.tokens, SPAN=SPAN
    )
    gate_bias, up_bias, down_bias = weights.biases or (None, None, None)
    gate_at, up_at, down_at = weights.addresses
    out = {"out": inner[0], "out_stride": 0, "out_scale": inner[1], "out_sums": inner[2]}
    biases = {"bias": gate_bias, "second_bias": up_bias, "ACTIVATION": rule.activation}
    _launch(kinds.gate, room, (gate_at, up_at), tile, slots, **where, **out, **biases)
    out = {"out": picked, "out_stride": picked.stride(0), "out_scale": None, "out_sums": None}
    biases = {"bias": down_bias, "second_bias": None, "ACTIVATION": ""}
    _launch(kinds.down, inner, (down_at, down_at), widen(tile), slots, **where, **out, **biases)


def widen(tile: Tile) -> Tile:
    """The tile of one matrix where `tile` is of two, each of whose warps has a group of tokens: it takes two of them,
    and half as many warps share rows."""
    along = tile.warps * 32 // tile.rows
    narrow = along % 2 == 0 and tile.tokens // GROUP == along
    return replace(tile, rows=2 * tile.rows) if narrow else tile


def _launch(
    matrix: Packed,
    room: tuple[torch.Tensor, ...],
    addresses: tuple[torch.Tensor, torch.Tensor],
    tile: Tile,
    count: int,
    **more: Any,
) -> None:
    words, scale, sums = room
    triton_int8.pairs_many_kernel[(triton.cdiv(matrix.rows, tile.rows), count)](
        words=words, scale=scale, sums=sums, addresses=addresses[0], second_addresses=addresses[1], rows=matrix.rows,
        chunks=matrix.cols // 32, places=places(matrix, words.device), **cut_sums(matrix, tile), **more,
    )  # fmt: skip


def _take_room(scratch: torch.Tensor, groups: int, matrix: Packed) -> tuple[torch.Tensor, ...]:
    """Where so many groups of activations for a matrix lie."""
    return cut_room(scratch.view(-1).view(torch.uint8), groups * (matrix.cols // 32))
