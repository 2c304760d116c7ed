"""Launches routing: which experts every token of a batch takes."""

from typing import Any

import torch
import triton

from pshard.model_config import Experts
from pshard.quant import align
from pshard.runtime.kernels.api import Packed, Routes
from pshard.runtime.kernels.gpu.experts import triton_route
from pshard.runtime.kernels.gpu.next_norm import FEW, NO_NORM, Unscaled
from pshard.runtime.kernels.unpack import PLAIN

PROGRAMS = 264  # the columns of a product are cut until about so many run, on PROCESSORS of `default_tiles`
PIECES = 16  # at most: who chooses waits for them all


def route_tokens(
    x: torch.Tensor,
    router: Packed,
    rule: Experts,
    routes: Routes,
    biases: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    scratch: tuple[torch.Tensor, torch.Tensor],
    begin: torch.Tensor | None,
    programs: int,
    unscaled: Unscaled | None = None,
) -> None:
    """See `Kernels.route`. biases: the router's, that of the choice, and factors. scratch: floats, and counters that
    are zero. programs: see PROGRAMS. unscaled: x is to be made of that, of up to FEW rows."""
    if router.qtype not in PLAIN:
        raise ValueError(f"a router of type {router.qtype}: the kernels take F32, F16 and BF16")
    if unscaled is not None:
        _route_part(x, router, rule, routes, (*biases, begin), scratch, programs, unscaled)
        return
    most = scratch[0].numel() // router.rows
    for first in range(0, x.shape[0], most):
        part = slice(first, first + most)
        own = None if begin is None else begin[part]
        into = Routes(routes.ids[part], routes.weights[part])
        _route_part(x[part], router, rule, into, (*biases, own), scratch, programs)


def _route_part(
    x: torch.Tensor,
    router: Packed,
    rule: Experts,
    routes: Routes,
    given: tuple[torch.Tensor | None, ...],
    scratch: tuple[torch.Tensor, torch.Tensor],
    programs: int,
    unscaled: Unscaled | None = None,
) -> None:
    """given: both biases, factors, and `begin`."""
    tokens, (partial, counters) = x.shape[0], scratch
    few = tokens <= FEW  # each has programs of its own then, and routing is one launch
    together, block, depth = (1, 4, 256) if few else (64, 32, 32) if rule.count <= 32 else (128, 64, 32)
    blocks, rows = triton.cdiv(rule.count, block), triton.cdiv(tokens, together)
    wanted = min(max(1, programs // (blocks * rows)), PIECES, partial.numel() // (tokens * rule.count))
    each = align(triton.cdiv(router.cols, wanted), depth)
    pieces = triton.cdiv(router.cols, each)
    product = (x, x.stride(0), router.data.view(PLAIN[router.qtype]), partial)
    groups = rule.groups if rule.groups_used < rule.groups else 1
    per = rule.count // groups
    choice = (*given, routes.ids, routes.ids.stride(0), routes.weights, routes.weights.stride(0),
              groups, per, rule.used, rule.scale)  # fmt: skip
    how: dict[str, Any] = {
        "SCORES": rule.scores, "NORMED": rule.normed, "GROUPS_USED": rule.groups_used if groups > 1 else 0,
        "GP": triton.next_power_of_2(groups), "PP": triton.next_power_of_2(per),
        "KP": triton.next_power_of_2(rule.used),
    }  # fmt: skip
    grid = (blocks, pieces, rows)
    if few:
        sizes = (router.cols, each, tokens, pieces)
        norm = (unscaled.squares, unscaled.weight, unscaled.eps, x, x.stride(0)) if unscaled else (*NO_NORM, None, 0)
        source = unscaled.hidden if unscaled else x
        how["UNSCALED"] = triton.next_power_of_2(router.cols // 32) if unscaled else 0
        triton_route.route_kernel[grid](
            source, source.stride(0), *product[2:], counters, *norm, *sizes, *choice, **how, BE=block, BK=depth,
            num_warps=1,
        )  # fmt: skip
        return
    sizes = (router.cols, each, tokens, rule.count)
    triton_route.logits_kernel[grid](*product, *sizes, TOKENS=together, BE=block, BK=depth, num_warps=4, num_stages=3)
    triton_route.choose_kernel[(tokens,)](partial, pieces, *choice, **how, num_warps=1)
