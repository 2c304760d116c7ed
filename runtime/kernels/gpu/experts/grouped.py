"""Experts of many tokens: sorts pairs (token, chosen expert) by expert, multiplies tiles of them, sums per token."""

from typing import Any

import torch
import triton

from pshard.model_config import Experts
from pshard.runtime.kernels.api import ExpertWeights, Packed, Routes
from pshard.runtime.kernels.gpu.experts import int8_pairs, triton_grouped
from pshard.runtime.kernels.gpu.experts.picked import Picked
from pshard.runtime.kernels.gpu.experts.sorted_pairs import Kinds, Sorted, sort_pairs
from pshard.runtime.kernels.gpu.products.places import places
from pshard.runtime.kernels.gpu.products.triton_decode import ENCODINGS
from pshard.runtime.kernels.gpu.tiles.pick_tiles import TilePicker
from pshard.times.gpu_tiles import LIBRARY, Tile, experts_type, pairs_together


def multiply_sorted(
    x: torch.Tensor,
    routes: Routes,
    weights: ExpertWeights,
    kinds: Kinds,
    rule: Experts,
    scratch: dict[str, torch.Tensor],
    picker: TilePicker,
) -> Picked:
    """See `Kernels.experts`, for any number of tokens: all but adding up. Three launches, four in int8."""
    pairs, experts = routes.ids.numel(), weights.addresses.shape[1]
    picked = scratch["picked"].view(-1)[: pairs * kinds.down.rows].view(pairs, kinds.down.rows)
    type_ = experts_type(kinds.gate.qtype, kinds.down.qtype)
    key, ways = picker.many_pairs(type_, pairs_together(pairs, experts))
    ways = tuple(t for t in ways if t == LIBRARY or int8_pairs.fits(kinds, pairs, experts, t))

    def start(tile: Tile) -> None:
        if tile == LIBRARY:
            _multiply_in_bf16(x, routes, weights, kinds, rule, scratch, picked, picker)
        else:
            by_expert = sort_pairs(routes, weights.addresses, scratch["order"], tile.tokens)
            int8_pairs.multiply(x, by_expert, kinds, weights, rule, scratch, picked, tile)

    picker.launch(key, ways or (LIBRARY,), start)
    return Picked(picked, routes.ids, routes.weights, weights.addresses[2])


def _multiply_in_bf16(
    x: torch.Tensor,
    routes: Routes,
    weights: ExpertWeights,
    kinds: Kinds,
    rule: Experts,
    scratch: dict[str, torch.Tensor],
    picked: torch.Tensor,
    picker: TilePicker,
) -> None:
    (tokens, used), inner = routes.ids.shape, kinds.gate.rows
    gated = scratch["gated"].view(-1)[: tokens * used * inner].view(tokens * used, inner)
    together = pairs_together(tokens * used, weights.addresses.shape[1])
    by_expert = sort_pairs(routes, weights.addresses, scratch["order"], together)
    gate_bias, up_bias, down_bias = weights.biases or (None, None, None)
    gate_at, up_at, down_at = weights.addresses
    both = {"bias": gate_bias, "second_bias": up_bias, "ACTIVATION": rule.activation}
    _multiply(by_expert, used, x, (kinds.gate, kinds.up), (gate_at, up_at), gated, both, picker=picker)
    down = {"bias": down_bias, "second_bias": None, "ACTIVATION": "silu"}
    _multiply(by_expert, used, gated, (kinds.down,), (down_at,), picked, down, picker=picker)


def add_up(pairs: Picked, out: torch.Tensor, accumulate: bool) -> None:
    """out [tokens, cols] (+)= the sums by weight of each token's pairs."""
    tokens, cols = out.shape
    triton_grouped.sum_kernel[(triton.cdiv(cols, 1024), tokens)](
        **pairs.arguments(), picked=pairs.rows, out=out, out_stride=out.stride(0), cols=cols, ACCUMULATE=accumulate,
        BLOCK=1024, num_warps=4,
    )  # fmt: skip


def _multiply(
    by_expert: Sorted,
    used: int,
    x: torch.Tensor,
    matrices: tuple[Packed, ...],
    addresses: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    how: dict[str, Any],
    picker: TilePicker,
) -> None:
    """Products of every tile of pairs with one or two matrices of its expert: `products_kernel`."""
    first, second, gated = matrices[0], matrices[-1], len(matrices) == 2
    low, high = _bits_of(first.qtype)
    second_low, second_high = _bits_of(second.qtype)

    def start(tile: Tile) -> None:
        triton_grouped.products_kernel[(triton.cdiv(first.rows, tile.depth), by_expert.slots)](
            x=x, x_stride=x.stride(0), addresses=addresses[0], second_addresses=addresses[-1], order=by_expert.order,
            tiles=by_expert.tiles, slots=by_expert.slots, used=used, out=out, out_stride=out.stride(0),
            rows=first.rows, cols=first.cols, places=_places_of(first, x.device),
            second_places=_places_of(second, x.device),
            QTYPE=first.qtype, LOW=low, HIGH=high, SECOND_QTYPE=second.qtype, SECOND_LOW=second_low,
            SECOND_HIGH=second_high, GATED=gated, MASKED=first.cols % tile.tokens != 0, BM=by_expert.together,
            BN=tile.depth, BK=tile.tokens, STAGES=tile.stages, num_warps=tile.warps, num_stages=tile.stages,
            maxnreg=tile.registers, **how,
        )  # fmt: skip

    key = "grouped gate" if gated else "grouped down", first.qtype, by_expert.together
    picker.launch(key, picker.grouped(*key), start)


def _bits_of(qtype: str) -> tuple[int, int]:
    """Bits of the code planes; zeros for types of plain numbers."""
    encoding = ENCODINGS.get(qtype)
    return (encoding.low, encoding.high) if encoding else (0, 0)


def _places_of(matrix: Packed, device: torch.device) -> tuple[int, ...]:
    return places(matrix, device) if matrix.qtype in ENCODINGS else (0,) * 6
