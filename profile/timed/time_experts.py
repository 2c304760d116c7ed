"""Times routers and routed experts through the kernels that the runtime calls.

Every token takes its experts at random, whatever the others take; one call's tokens take none that they took in the
calls before it, as far as there are others. The experts of a call lie in the operand pool behind those of the call
before. A layer that is larger than the pool has several experts in one place, so far apart that no cache keeps them.
"""

from collections.abc import Callable, Sequence

import torch

from pshard.machine import ExpertTiming, RouteTiming
from pshard.model_config import Experts
from pshard.profile.timed.time_kernels import KernelBench, time_series
from pshard.runtime.kernels.api import ExpertWeights, Routes
from pshard.runtime.memory.workspace import view_buffers
from pshard.units.moe.routed import scratch_of


def time_experts(
    bench: KernelBench, types: tuple[str, str], d_model: int, rule: Experts, tokens: Sequence[int]
) -> list[ExpertTiming]:
    """All experts of a layer for each number of `tokens`, until one is slow. types: of gate and up, of down."""
    layers = rotate_layers(bench, types, d_model, rule)
    series = time_series(
        tokens, bench.slow, lambda n: bench.replayed_seconds(expert_calls(bench, layers, rule, d_model, n), n)
    )
    shape = (*types, rule.count, rule.used, rule.d_expert, d_model)
    return [ExpertTiming(bench.side, *shape, n, seconds) for n, seconds in series]


def time_router(
    bench: KernelBench, qtype: str, d_model: int, rule: Experts, tokens: Sequence[int]
) -> list[RouteTiming]:
    """A layer's router for each number of `tokens`, until one is slow; its matrix is another copy in every call."""
    routers = bench.pool.rotate_weights(qtype, rule.count, d_model)
    generator = torch.Generator().manual_seed(0)
    both = torch.rand(2, rule.count, generator=generator).to(bench.device)
    bias, choice_bias = both[0] if rule.biases else None, both[1] if rule.choice_bias else None

    def seconds_of(n: int) -> float:
        x = torch.randn(n, d_model, generator=generator).to(bench.device)
        ids = torch.zeros(n, rule.used, dtype=torch.int32, device=bench.device)
        routes, route = Routes(ids, torch.zeros(n, rule.used, device=bench.device)), bench.kernels.route
        return bench.seconds(lambda i: route(x, routers[i % len(routers)], rule, routes, bias, choice_bias), n)

    series = time_series(tokens, bench.slow, seconds_of)
    return [RouteTiming(bench.side, qtype, rule.count, rule.used, d_model, n, seconds) for n, seconds in series]


def expert_calls(
    bench: KernelBench, layers: Sequence[ExpertWeights], rule: Experts, d_model: int, tokens: int
) -> Callable[[int], None]:
    """A function of i that adds what the experts of so many tokens give to a residual stream; layers take turns, and
    when all had theirs the tokens take other experts."""
    act, x = bench.kernels.act_dtype, bench.normed(tokens, d_model)
    hidden = torch.zeros(tokens, d_model, device=bench.device)
    buffers = scratch_of(rule, d_model, tokens)
    memory = torch.empty(sum(b.nbytes(act.itemsize) for b in buffers), dtype=torch.uint8, device=bench.device)
    scratch, _ = view_buffers(memory, buffers, act)
    turns = deal_routes(rule, tokens, bench.device)

    def run(i: int) -> None:
        routes = turns[i // len(layers) % len(turns)]
        bench.kernels.experts(x, routes, layers[i % len(layers)], rule, hidden, scratch, True)

    return run


def deal_routes(rule: Experts, tokens: int, device: torch.device) -> list[Routes]:
    """Routes of so many tokens, for as many calls as a token finds other experts in every one: each deals its own
    shuffled pack, so that tokens choose independently."""
    packs = torch.rand(tokens, rule.count, generator=torch.Generator().manual_seed(tokens)).argsort(1).int()
    hands = packs[:, : rule.count // rule.used * rule.used].split(rule.used, 1)
    weights = torch.full((tokens, rule.used), 1 / rule.used, device=device)
    return [Routes(hand.contiguous().to(device), weights) for hand in hands]


def rotate_layers(bench: KernelBench, types: tuple[str, str], d_model: int, rule: Experts) -> list[ExpertWeights]:
    """As many layers as the pool has room for, one at least; experts behind its end are again at its beginning."""
    places = bench.pool.rotate_experts(*types, rule.d_expert, d_model)
    widths = (rule.d_expert, rule.d_expert, d_model)
    gate, up, down = (torch.zeros(rule.count, width, device=bench.device) for width in widths)
    layers = []
    for first in range(0, max(1, len(places) // rule.count * rule.count), rule.count):
        own = [places[(first + e) % len(places)] for e in range(rule.count)]
        stacks = [tuple(matrices) for matrices in zip(*own)]
        addresses = torch.tensor([[m.data.data_ptr() for m in stack] for stack in stacks], device=bench.device)
        biases = (gate, up, down) if rule.biases else None
        layers.append(ExpertWeights(stacks[0], stacks[1], stacks[2], addresses, biases))
    return layers
