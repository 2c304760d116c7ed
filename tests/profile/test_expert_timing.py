"""Experts are timed as they are run: tokens choose at random, weights are out of cache, kernels are the runtime's."""

from collections import Counter
from typing import Any

import pytest
import torch

from pshard.model_config import Experts
from pshard.profile.timed.operands import OperandPool
from pshard.profile.timed.time_experts import deal_routes, time_experts, time_router
from pshard.profile.timed.time_kernels import KernelBench
from pshard.profile.timing_loop import Pace
from pshard.runtime.kernels.plain import PlainKernels
from pshard.units.operations import used_share

CPU, KIB = torch.device("cpu"), 1 << 10
RULE = Experts(16, 2, 32)


class Recorder(PlainKernels):
    """Plain kernels that keep what they are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def experts(self, *arguments: Any) -> None:
        self.calls.append(arguments)

    def route(self, *arguments: Any) -> None:
        self.calls.append(arguments)


def bench(kernels: PlainKernels, pool: int) -> KernelBench:
    return KernelBench("host", kernels, CPU, OperandPool(pool, CPU), Pace(1e-4, least=40, most=40), slow=0.5)


@pytest.mark.parametrize("tokens", [1, 4, 64])
def test_tokens_choose_at_random_and_in_every_call_others_than_before(tokens: int) -> None:
    rule = Experts(128, 8, 32)
    turns = deal_routes(rule, tokens, CPU)
    ids = torch.stack([routes.ids for routes in turns])
    assert ids.shape == (16, tokens, 8) and ids.dtype == torch.int32
    for token in range(tokens):
        assert ids[:, token].unique().numel() == 128  # no expert twice, whatever the call
    used = sum(routes.ids.unique().numel() for routes in turns) / len(turns)
    assert used == pytest.approx(128 * used_share(8, 128, tokens), rel=0.05)
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(turns, deal_routes(rule, tokens, CPU)))


def test_layers_take_turns_in_the_pool_and_then_tokens_take_other_experts() -> None:
    kernels = Recorder()
    (row,) = time_experts(bench(kernels, 512 * KIB), ("Q4_0", "Q8_0"), 64, RULE, [4])
    assert (row.gate_qtype, row.down_qtype, row.experts, row.used) == ("Q4_0", "Q8_0", 16, 2)
    assert (row.d_expert, row.d_model, row.tokens) == (32, 64, 4)
    layers = [tuple(weights.addresses[0].tolist()) for _, _, weights, *_ in kernels.calls]
    count = len(set(layers))
    assert count > 2 and layers[:count] == layers[count : 2 * count]
    assert len({address for layer in layers for address in layer}) == 16 * count  # nothing lies in two layers
    first, later = kernels.calls[0][1], kernels.calls[count][1]
    assert first is kernels.calls[count - 1][1] and not torch.equal(first.ids, later.ids)


def test_a_layer_that_is_larger_than_the_pool_has_all_its_experts_in_the_places_that_there_are() -> None:
    kernels = Recorder()
    (row,) = time_experts(bench(kernels, 40 * KIB), ("Q4_0", "Q4_0"), 64, RULE, [1])
    weights = kernels.calls[0][2]
    places = Counter(weights.addresses[0].tolist())
    assert row.experts == 16 and weights.addresses.shape == (3, 16)
    assert 1 < len(places) < 16 and max(places.values()) - min(places.values()) <= 1


def test_experts_are_called_as_blocks_call_them() -> None:
    """Onto a residual stream, with the scratch that a plan has for them, and with biases where the model has some."""
    kernels, rule = Recorder(), Experts(4, 2, 32, "chosen", activation="clamped", biases=True)
    time_experts(bench(kernels, 64 * KIB), ("Q4_0", "Q4_0"), 64, rule, [3])
    x, routes, weights, given, hidden, scratch, accumulate = kernels.calls[0]
    assert x.shape == hidden.shape == (3, 64) and given is rule and accumulate
    assert routes.ids.shape == routes.weights.shape == (3, 2)
    assert {name: t.shape[0] for name, t in scratch.items() if name != "order"} == {"gated": 6, "picked": 6}
    assert scratch["order"].dtype == torch.int32
    assert [tuple(bias.shape) for bias in weights.biases] == [(4, 32), (4, 32), (4, 64)]


def test_plain_kernels_can_be_timed_with_what_they_are_given() -> None:
    for rule in (RULE, Experts(4, 2, 32, "sigmoid", choice_bias=True, groups=2, groups_used=1, biases=True)):
        plain = bench(PlainKernels(), 64 * KIB)
        rows = [*time_experts(plain, ("Q4_0", "Q4_0"), 64, rule, [1, 4]), *time_router(plain, "F32", 64, rule, [1, 4])]
        assert [row.tokens for row in rows] == [1, 4, 1, 4] and all(row.seconds > 0 for row in rows)


def test_routers_are_given_the_biases_that_their_model_has() -> None:
    kernels = Recorder()
    time_router(bench(kernels, 64 * KIB), "BF16", 64, Experts(8, 2, 32, choice_bias=True), [5])
    x, router, _, routes, bias, choice_bias = kernels.calls[0]
    assert x.shape == (5, 64) and x.dtype == torch.float32 and (router.rows, router.cols) == (8, 64)
    assert routes.ids.shape == (5, 2) and bias is None and choice_bias.shape == (8,)
    assert len({call[1].data.data_ptr() for call in kernels.calls}) > 2
