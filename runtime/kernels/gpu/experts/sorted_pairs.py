"""Pairs (token, chosen expert) by expert, and what a layer's experts are alike in."""

from typing import NamedTuple

import torch
import triton

from pshard.runtime.kernels.api import ExpertWeights, Packed, Routes
from pshard.runtime.kernels.gpu.experts import triton_grouped


class Kinds(NamedTuple):
    """One expert's matrices, for their types and shapes: those of a layer are all alike."""

    gate: Packed
    up: Packed
    down: Packed


class Sorted(NamedTuple):
    """Pairs by expert, see `sort_kernel`: int32 [pairs] and [3, slots], tiles of up to `together` pairs."""

    order: torch.Tensor
    tiles: torch.Tensor
    slots: int
    together: int


def find_kinds(weights: ExpertWeights) -> Kinds | None:
    """The first expert on this side; None where there is none."""
    for gate, up, down in zip(weights.gate, weights.up, weights.down, strict=True):
        if gate is not None and up is not None and down is not None:
            return Kinds(gate, up, down)
    return None


def sort_pairs(routes: Routes, addresses: torch.Tensor, memory: torch.Tensor, together: int) -> Sorted:
    """Pairs by expert, in int32 [4 * pairs + 4 * experts] of memory or less, `together` in a tile."""
    (tokens, used), experts = routes.ids.shape, addresses.shape[1]
    pairs = tokens * used
    slots = pairs // together + experts
    order, tiles = memory[:pairs], memory[pairs : pairs + 3 * slots]
    triton_grouped.sort_kernel[(experts,)](
        ids=routes.ids.view(-1), pairs=pairs, addresses=addresses[2], order=order, tiles=tiles, slots=slots,
        BM=together, LINES=min(512, triton.cdiv(triton.next_power_of_2(pairs), 32)), EACH=32, num_warps=8,
    )  # fmt: skip
    return Sorted(order, tiles, slots, together)
