"""Launches of routing and of routed experts: what `CudaKernels` has of them."""

import torch
import triton

from pshard.batch_sizes import SMALL_BATCH
from pshard.collectives import elements_at_once
from pshard.model_config import LEAST_SUM, Experts
from pshard.runtime.kernels.api import ExpertWeights, NextNorm, Packed, Routes
from pshard.runtime.kernels.gpu.activations import Activations
from pshard.runtime.kernels.gpu.default_tiles import share_programs
from pshard.runtime.kernels.gpu.experts.grouped import add_up, multiply_sorted
from pshard.runtime.kernels.gpu.experts.pairs import add_pairs, fits_pairs
from pshard.runtime.kernels.gpu.experts.picked import Picked
from pshard.runtime.kernels.gpu.experts.route_tokens import PROGRAMS, route_tokens
from pshard.runtime.kernels.gpu.experts.sorted_pairs import Kinds, find_kinds
from pshard.runtime.kernels.gpu.experts.triton_route import choose_chunks_kernel
from pshard.runtime.kernels.gpu.gate_rows import GatesOnGpu
from pshard.runtime.kernels.gpu.norms import NormsOnGpu
from pshard.runtime.kernels.gpu.products.few_rows import FewRows
from pshard.runtime.kernels.gpu.tiles.pick_tiles import TilePicker


class ExpertsOnGpu(NormsOnGpu, GatesOnGpu):
    """See `Kernels` and `SumKernels`."""

    act_dtype: torch.dtype
    _activations: Activations
    _few_rows: FewRows
    _picker: TilePicker
    _pairs: tuple[torch.Tensor, Picked] | None  # the last part of experts that was left to its sum

    def route(
        self,
        x: torch.Tensor,
        router: Packed,
        rule: Experts,
        routes: Routes,
        bias: torch.Tensor | None = None,
        choice_bias: torch.Tensor | None = None,
        begin: torch.Tensor | None = None,
        factors: torch.Tensor | None = None,
    ) -> None:
        """See `Kernels.route`. What was handed over quantised stays so. A NaN among the scores counts as the best."""
        _, unscaled = self._activations.find(x)
        programs = share_programs(PROGRAMS, self._picker.limits)
        biases, scratch = (bias, choice_bias, factors), self._few_rows.scratch
        route_tokens(x, router, rule, routes, biases, scratch, begin=begin, programs=programs, unscaled=unscaled)

    def choose_chunks(self, scored: Routes, rule: Experts, routes: Routes) -> None:
        """See `Kernels.choose_chunks`."""
        assert rule.chunks is not None
        (tokens, experts), used, scale = scored.ids.shape, routes.ids.shape[1], rule.scale * rule.chunks.scale
        choose_chunks_kernel[(tokens,)](
            scored.ids, scored.weights, experts, routes.ids, routes.weights, used, each=rule.chunks.each, scale=scale,
            least=LEAST_SUM, EP=triton.next_power_of_2(experts), KP=triton.next_power_of_2(used), num_warps=1,
        )  # fmt: skip

    def experts(
        self,
        x: torch.Tensor,
        routes: Routes,
        weights: ExpertWeights,
        rule: Experts,
        out: torch.Tensor,
        scratch: dict[str, torch.Tensor],
        accumulate: bool,
        following: NextNorm | None = None,
    ) -> None:
        """See `Kernels.experts` and `NormKernels`. x that was handed over quantised stays so. Two launches for up to 8
        tokens, else four; types of plain numbers always take four."""
        self._pairs = None
        kinds = find_kinds(weights)
        if kinds is None:
            if not accumulate:
                out.zero_()
            return
        if fits_pairs(x.shape[0], kinds) and weights.wave.of == 1:
            quantised = self._activations.quantise(x)
            gated = self._activations.spare(routes.ids.numel(), kinds.gate.rows)
            if gated is not None:
                how = accumulate, self._few_rows.scratch, self._picker
                fits = accumulate and kinds.down.rows % 32 == 0
                left = self._room_for_norm(out, following, fits, beside_spare=True)
                add_pairs(quantised, gated, routes, weights, kinds, rule, out, how, following=left)
                return
        pairs = self._multiply_pairs(x, routes, weights, kinds, rule, scratch)
        if weights.summed is not None:
            pairs = pairs._replace(addresses=weights.summed[2])
        if weights.wave.is_last:
            add_up(pairs, out, accumulate)

    def _multiply_pairs(
        self,
        x: torch.Tensor,
        routes: Routes,
        weights: ExpertWeights,
        kinds: Kinds,
        rule: Experts,
        scratch: dict[str, torch.Tensor],
    ) -> Picked:
        if x.dtype is not self.act_dtype:
            self.place(x, scratch["normed"])
            x = scratch["normed"]
        return multiply_sorted(x, routes, weights, kinds, rule, scratch, self._picker)

    def experts_part(
        self,
        x: torch.Tensor,
        routes: Routes,
        weights: ExpertWeights,
        rule: Experts,
        part: torch.Tensor,
        scratch: dict[str, torch.Tensor],
    ) -> None:
        """See `SumKernels.experts_part`. Of rows longer than a program's place the sum's registers would not hold what
        is added up."""
        kinds, longer = find_kinds(weights), part.shape[1] > elements_at_once("bf16")
        if kinds is None or x.shape[0] <= SMALL_BATCH or longer:
            self.experts(x, routes, weights, rule, part, scratch, False)
        else:
            self._pairs = part, self._multiply_pairs(x, routes, weights, kinds, rule, scratch)
