"""Experts of few tokens: launches a matrix-vector product for every pair (token, chosen expert)."""

from typing import Any

import torch
import triton

from pshard.model_config import Experts
from pshard.runtime.kernels.api import ExpertWeights, Packed, Routes
from pshard.runtime.kernels.gpu.activations import NOT_QUANTISED, Quantised
from pshard.runtime.kernels.gpu.experts import triton_pairs
from pshard.runtime.kernels.gpu.experts.sorted_pairs import Kinds
from pshard.runtime.kernels.gpu.next_norm import NO_NORM, Unscaled
from pshard.runtime.kernels.gpu.products.places import places
from pshard.runtime.kernels.gpu.products.triton_decode import ENCODINGS
from pshard.runtime.kernels.gpu.products.triton_fragments import FACTORS
from pshard.runtime.kernels.gpu.tiles.pick_tiles import TilePicker

FEW = 8  # tokens: from about here on experts that several tokens share are better read once


def fits_pairs(tokens: int, kinds: Kinds) -> bool:
    """Whether `add_pairs` is for such a batch: few tokens, and packed types."""
    return tokens <= FEW and all(matrix.qtype in ENCODINGS for matrix in kinds)


def add_pairs(
    x: tuple[Quantised, Unscaled | None],
    gated: Quantised,
    routes: Routes,
    weights: ExpertWeights,
    kinds: Kinds,
    rule: Experts,
    out: torch.Tensor,
    how: tuple[bool, tuple[torch.Tensor, torch.Tensor], TilePicker],
    following: tuple[Quantised, Unscaled] | None = None,
) -> None:
    """See `Kernels.experts`. Two launches. x: of the tokens; gated: room for [pairs, F]; how: whether to add to `out`,
    scratch of floats and of counters that are zero, and tiles; following: see `FewRows.multiply`."""
    (tokens, used), (accumulate, scratch, picker) = routes.ids.shape, how
    chosen = {"ids": routes.ids, "ids_stride": routes.ids.stride(0), "used": used}
    gate_bias, up_bias, down_bias = weights.biases or (None, None, None)
    gate_at, up_at, down_at = weights.addresses
    gate, up, down = kinds
    old, (left, new) = x[1], following or (NOT_QUANTISED, None)
    squares, norm, _ = (new.squares, new.weight, new.eps) if new else NO_NORM
    triton_pairs.gate_up_pairs_kernel[(gate.rows // 32, tokens * used)](
        *x[0], **chosen, squares=old.squares if old else None, eps=old.eps if old else 0.0,
        UNSCALED=triton.next_power_of_2(gate.cols // 32) if old else 0, addresses=gate_at, up_addresses=up_at,
        bias=gate_bias, up_bias=up_bias, new_words=gated.words,
        new_scale=gated.scale, new_sums=gated.sums, ACTIVATION=rule.activation,
        **_cut("pairs gate", gate, x[0][0].device, picker), **_read_up(up, x[0][0].device),
    )  # fmt: skip
    triton_pairs.down_pairs_kernel[(triton.cdiv(down.rows, 32), tokens * used)](
        *gated, **chosen, new_words=left[0], new_scale=left[1], new_sums=left[2], squares=squares, norm=norm,
        NEXT=following is not None, weights=routes.weights, weights_stride=routes.weights.stride(0), tokens=tokens,
        addresses=down_at, bias=down_bias, partial=scratch[0], counters=scratch[1], out=out, out_stride=out.stride(0),
        ACCUMULATE=accumulate, PLACES=triton.next_power_of_2(used), **_cut("pairs down", down, out.device, picker),
    )  # fmt: skip


def _read_up(matrix: Packed, device: torch.device) -> dict[str, Any]:
    """How the rows of an up are read, beside those of its gate, which are cut alike."""
    encoding = ENCODINGS[matrix.qtype]
    return {
        "up_places": places(matrix, device), "UP_QTYPE": matrix.qtype, "UP_LOW": encoding.low,
        "UP_HIGH": encoding.high, "UP_FACTOR": FACTORS.get(matrix.qtype, 1),
    }  # fmt: skip


def _cut(kernel: str, matrix: Packed, device: torch.device, picker: TilePicker) -> dict[str, Any]:
    """How the rows of one expert's matrix are cut, and how they are read."""
    tile, encoding, chunks = picker.fixed(kernel, matrix.qtype, 1), ENCODINGS[matrix.qtype], matrix.cols // 32
    return {
        "rows": matrix.rows, "chunks": chunks, "places": places(matrix, device), "DEPTH": tile.depth,
        "WARPS": tile.warps, "QTYPE": matrix.qtype, "LOW": encoding.low, "HIGH": encoding.high,
        "FACTOR": FACTORS.get(matrix.qtype, 1), "MASKED": chunks % tile.depth != 0 or matrix.rows % 32 != 0,
        "AHEAD": tile.stages - 1, "num_warps": tile.warps, "maxnreg": tile.registers,
    }  # fmt: skip
