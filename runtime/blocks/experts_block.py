"""Routed experts: each side adds up what those that it has give for the tokens that chose them."""

from dataclasses import dataclass, replace
from typing import cast

import torch

from pshard.model_config import Experts
from pshard.quant import packed_nbytes
from pshard.runtime.blocks.block import Block, Laid, Residual, Side, Work
from pshard.runtime.blocks.routed_rows import view_routed, view_scored
from pshard.runtime.kernels.api import ExpertWeights, NormKernels, Packed, SumKernels
from pshard.units.moe.chunks import ROLES as CHUNK_ROLES
from pshard.units.moe.experts import BIASES, DOWN, GATE, UP, count_inner, target
from pshard.units.moe.routed import expert_buffers, rule_of
from pshard.units.moe.router import WEIGHT
from pshard.units.operands import STREAM
from pshard.units.ports import EXPERTED


class ExpertsBlock(Block):
    """Whichever experts `weights` has: those of one side, or all."""

    def prepare(self, laid: Laid) -> ExpertWeights:
        unit, weights, rule = laid.unit, laid.weights, rule_of(laid.config)
        biases = None
        if rule.biases:
            gate, up = (weights.vectors[role].view(rule.count, -1) for role in BIASES[:2])
            down = weights.vectors.get(BIASES[2])  # of several ranks one has it
            biases = gate, up, None if down is None else down.view(rule.count, -1)
        found = _list_experts(laid, rule.count, count_inner(unit.by_role), (GATE, UP, DOWN))
        if laid.wave.of > 1:
            found = replace(found, wave=laid.wave, summed=torch.ones_like(found.addresses))
        return replace(found, biases=biases, rule=rule.of_layer(unit.layer))

    def ends_in_product(self, weights: ExpertWeights) -> bool:
        return weights.wave.of == 1

    def run(self, work: Work, weights: ExpertWeights, state: None, residual: Residual) -> None:
        side, n = work.side, work.rows.tokens
        out, accumulate = _target(side, n, residual)
        if residual.leaving is None or accumulate:
            _add_experts(work, weights, out, accumulate, residual.following)
        else:
            x, routes = view_routed(side, work.rows)
            cast(SumKernels, side.kernels).experts_part(
                x, routes, weights, weights.rule or rule_of(side.config), out, _scratch(side, n)
            )

    def run_share(self, work: Work, weights: ExpertWeights, residual: Residual, out: torch.Tensor | None) -> None:
        target = _target(work.side, work.rows.tokens, residual) if out is None else (out, False)
        _add_experts(work, weights, *target)

    def run_rest(self, work: Work, weights: ExpertWeights, residual: Residual, from_cpu: torch.Tensor) -> None:
        out, _ = _target(work.side, work.rows.tokens, residual)
        work.side.kernels.add_rows(out, from_cpu)


@dataclass(frozen=True)
class ChunkWeights:
    """By what tokens choose among the experts of chunks, the rule of these, and these."""

    router: Packed
    rule: Experts
    experts: ExpertWeights


class ChunksBlock(Block):
    """Experts of chunks. All scores are made again, as the router leaves only those of the chosen."""

    def prepare(self, laid: Laid) -> ChunkWeights:
        rule = rule_of(laid.config).of_chunks()
        experts = _list_experts(laid, rule.count, rule.d_expert, CHUNK_ROLES)
        return ChunkWeights(laid.weights.matrices[WEIGHT], rule, experts)

    def run(self, work: Work, weights: ChunkWeights, state: None, residual: Residual) -> None:
        side, n, rule = work.side, work.rows.tokens, rule_of(work.side.config)
        x, _ = view_routed(side, work.rows)
        scored, routes = view_scored(side, n)
        every = replace(rule, used=rule.count, normed=False, scale=1.0)
        side.kernels.route(x, weights.router, every, scored, begin=work.rows.begin)
        side.kernels.choose_chunks(scored, rule, routes)
        summed, hidden = side.space.rows(EXPERTED, n), side.space.rows("hidden", n)
        side.kernels.experts(summed, routes, weights.experts, weights.rule, hidden, _scratch(side, n), True)
        side.kernels.add_rows(hidden, summed)


def _list_experts(laid: Laid, count: int, inner: int, roles: tuple[str, str, str]) -> ExpertWeights:
    """Those of so many that a unit has here, each with `inner` rows of gate and up."""
    weights = laid.weights
    places = [weights, *([weights.last] if weights.last else [])]
    numbers = laid.unit.order or range(count)  # of the experts, by where they stand in the stacks
    stacks = list[tuple[Packed | None, ...]]()
    for role, rows in zip(roles, (inner, inner, laid.config.d_model)):
        found: list[Packed | None] = [None] * count
        for place in places:
            for i, expert in enumerate(_cut_stack(place.matrices[role], rows), place.first):
                found[numbers[i]] = expert
        stacks.append(tuple(found))
    addresses = [[0 if expert is None else expert.data.data_ptr() for expert in stack] for stack in stacks]
    return ExpertWeights(stacks[0], stacks[1], stacks[2], torch.tensor(addresses, device=laid.device))


def _target(side: Side, n: int, residual: Residual) -> tuple[torch.Tensor, bool]:
    """Where the sum of each token's experts goes, float32 [n, D], and whether it is added to what is there."""
    out = target(side.config)
    return residual.target(side, n) if out == STREAM else (side.space.rows(out.buffer, n), False)


def _cut_stack(stack: Packed, rows: int) -> list[Packed]:
    """The matrices of `rows` rows that stand in a stack."""
    size = packed_nbytes(stack.qtype, rows, stack.cols)
    return [replace(stack, data=stack.data[at : at + size], rows=rows)
            for at in range(0, stack.rows // rows * size, size)]  # fmt: skip


def _add_experts(
    work: Work, weights: ExpertWeights, out: torch.Tensor, accumulate: bool, following: torch.Tensor | None = None
) -> None:
    side, n = work.side, work.rows.tokens
    x, routes = view_routed(side, work.rows)
    rule, scratch = weights.rule or rule_of(side.config), _scratch(side, n)
    if following is None:
        side.kernels.experts(x, routes, weights, rule, out, scratch, accumulate)
    else:
        kernel, norm = cast(NormKernels, side.kernels).experts, (following, side.config.norm_eps)
        kernel(x, routes, weights, rule, out, scratch, accumulate, norm)


def _scratch(side: Side, n: int) -> dict[str, torch.Tensor]:
    names = (buffer.name for buffer in expert_buffers(side.config, 1))
    return {"normed": side.space.rows("normed", n), **{name: side.space.tensors[name] for name in names}}
