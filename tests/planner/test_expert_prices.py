"""Prices of routers and experts: what was timed comes back, what was not is scaled, and gaps are told."""

from dataclasses import replace

import pytest
from experts_file import RULES, ExpertsFile
from planner_cases import DESKTOP

from pshard.batch import Batch
from pshard.commands.cli_plan import list_gaps
from pshard.machine import ExpertTiming, InPlaceTiming, MachineProfile, RouteTiming
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.experts.expert_tables import LayerShape
from pshard.planner.price.price_operations import OneSide, price_operations
from pshard.planner.price.profile_tables import Tables
from pshard.planner.price.simulate import _price
from pshard.planner.price.tier_costs import tier_costs
from pshard.planner.price.tier_loads import TierLoad
from pshard.quant import packed_nbytes
from pshard.steps.move import hand_over
from pshard.tensor import TensorSpec
from pshard.units.operands import CHOSEN
from pshard.units.operations import ExpertProducts, Operation, Route
from pshard.workload import Workload

PROFILE = profile_from_datasheet(DESKTOP)
TOKENS = (1, 4, 16, 64, 256, 1024)


def layer(qtype: str = "Q4_0", here: int = 128, chosen: int = 8, of: int = 128, f: int = 768, d: int = 2048):
    """The products of `here` of a layer's experts."""
    gate, up = (TensorSpec(f"blk.0.{n}", qtype, (here * f, d), here) for n in ("gate", "up"))
    return ExpertProducts(gate, up, TensorSpec("blk.0.down", qtype, (here * d, f), here), chosen, of)


def timed(seconds, *, side: str = "acc", shape: tuple = ("Q4_0", "Q4_0", 128, 8, 768, 2048)) -> MachineProfile:
    """A profile whose experts take seconds(tokens) on one side."""
    rows = tuple(ExpertTiming(side, *shape, n, seconds(n)) for n in TOKENS)
    return replace(PROFILE, experts=rows, routes=())


def price(profile: MachineProfile, operation: Operation, tokens: int, side: str = "acc") -> float:
    load = TierLoad(Batch.even(tokens, 1))
    return price_operations([operation], OneSide(side, Tables(profile), load, tokens, "bf16", ready=CHOSEN))


def test_timed_experts_and_routers_cost_what_was_timed() -> None:
    for e in PROFILE.experts[::5]:
        operation = layer(e.gate_qtype, e.experts, e.used, e.experts, e.d_expert, e.d_model)
        assert price(PROFILE, operation, e.tokens, e.device) == pytest.approx(e.seconds)
    for r in PROFILE.routes:
        router = Route(TensorSpec("blk.0.router", r.qtype, (r.experts, r.d_model)), r.used)
        assert price(PROFILE, router, r.tokens, r.device) == pytest.approx(r.seconds)


@pytest.mark.parametrize("tokens", [1, 2, 100, 5000])
def test_some_of_a_layers_experts_take_their_share_of_what_all_take(tokens: int) -> None:
    assert price(PROFILE, layer(here=32), tokens) == pytest.approx(price(PROFILE, layer(), tokens) / 4)


def test_between_timed_token_counts_each_used_expert_takes_as_long() -> None:
    """What is read grows with the experts that are used, not along a line through the logarithms of whole layers."""
    shape = LayerShape("Q4_0", "Q4_0", 128, 8, 768, 2048)
    profile = timed(lambda n: 1e-6 * shape.touched(n))
    for tokens in (2, 8, 32, 100):
        assert price(profile, layer(), tokens) == pytest.approx(1e-6 * shape.touched(tokens))


def test_above_the_last_token_count_experts_take_longer_in_proportion() -> None:
    profile = timed(lambda n: 1e-5 * n)
    assert price(profile, layer(), 8192) == pytest.approx(8192e-5)


def test_other_types_scale_by_bytes_while_experts_have_few_tokens_and_by_arithmetic_later() -> None:
    profile = timed(lambda n: 1e-5 * n)
    heavier = packed_nbytes("Q8_0", 256, 2048) / packed_nbytes("Q4_0", 256, 2048)
    assert price(profile, layer("Q8_0"), 1) == pytest.approx(1e-5 * heavier)
    assert price(profile, layer("Q8_0"), 1024) == pytest.approx(1e-5 * 1024 * heavier)  # 64 tokens each
    assert price(profile, layer("Q8_0"), 2048) == pytest.approx(1e-5 * 2048)


def test_other_shapes_scale_by_the_experts_that_are_used_and_their_size() -> None:
    """The timed layer is looked up where each expert has as many tokens."""
    profile = timed(lambda n: 1e-5 * n)
    assert price(profile, layer(f=1536), 1024) == pytest.approx(2 * 1e-5 * 1024)
    assert price(profile, layer(here=64, of=64, chosen=4), 1024) == pytest.approx(1e-5 * 512)
    one = price(profile, layer(here=32, of=32, chosen=4), 1)  # 2 tokens of the timed layer give each as many
    shape = LayerShape("Q4_0", "Q4_0", 128, 8, 768, 2048)
    assert one == pytest.approx(2e-5 * 4 / shape.touched(2), rel=0.05)


def test_the_layer_that_is_most_alike_is_looked_up() -> None:
    profile = timed(lambda n: 1e-5 * n)
    large = timed(lambda n: 1.0, shape=("Q4_0", "Q4_0", 8, 2, 14336, 4096))
    both = replace(profile, experts=profile.experts + large.experts)
    assert price(both, layer("Q8_0"), 4096) == price(profile, layer("Q8_0"), 4096)


def test_of_types_with_as_many_bytes_a_slice_takes_its_own() -> None:
    each = {"IQ4_NL": 1e-5, "Q4_0": 9e-5, "Q4_K": 5e-5}
    rows = [timed(lambda n, s=s: s * n, shape=(q, q, 128, 8, 768, 2048)).experts for q, s in each.items()]
    both = replace(PROFILE, experts=sum(rows, ()), routes=())
    for qtype, seconds in each.items():
        assert price(both, layer(qtype, f=384), 1) == pytest.approx(seconds / 2)


@pytest.mark.parametrize("tokens", [1, 256, 4096])
def test_a_pair_of_types_is_put_together_from_both_timed_with_themselves(tokens: int) -> None:
    gates = timed(lambda n: 3e-5 * n, shape=("IQ2_XXS", "IQ2_XXS", 128, 8, 768, 2048))
    downs = timed(lambda n: 9e-5 * n, shape=("IQ3_S", "IQ3_S", 128, 8, 768, 2048))
    mixed = replace(layer("IQ2_XXS"), down=layer("IQ3_S").down)
    both = replace(gates, experts=gates.experts + downs.experts)
    assert price(both, mixed, tokens) == pytest.approx(5e-5 * tokens)
    exact = timed(lambda n: 1e-5 * n, shape=("IQ2_XXS", "IQ3_S", 128, 8, 768, 2048))
    assert price(replace(both, experts=both.experts + exact.experts), mixed, tokens) == pytest.approx(1e-5 * tokens)


@pytest.mark.parametrize("tokens", [1, 256, 4096])
def test_ups_of_another_type_than_gates_take_the_mean_of_both(tokens: int) -> None:
    kinds = {"Q4_0": 3e-5, "Q8_0": 9e-5}
    rows = [timed(lambda n, s=s: s * n, shape=(q, "Q4_0", 128, 8, 768, 2048)).experts for q, s in kinds.items()]
    mixed = replace(layer("Q4_0"), up=layer("Q8_0").up)
    both = replace(PROFILE, experts=sum(rows, ()), routes=())
    assert price(both, mixed, tokens) == pytest.approx(6e-5 * tokens)


def test_slices_of_a_pair_of_types_are_put_together_from_slices_that_were_not_timed_either() -> None:
    gates = timed(lambda n: 3e-5 * n, shape=("IQ2_XXS", "IQ2_XXS", 128, 8, 768, 2048))
    downs = timed(lambda n: 9e-5 * n, shape=("IQ3_S", "IQ3_S", 128, 8, 768, 2048))
    both = replace(gates, experts=gates.experts + downs.experts)
    mixed = replace(layer("IQ2_XXS", f=256), down=layer("IQ3_S", f=256).down)
    assert price(both, mixed, 1) == pytest.approx(5e-5 / 3)
    whole = timed(lambda n: 1e-5 * n, shape=("IQ2_XXS", "IQ3_S", 128, 8, 768, 2048))
    assert price(replace(both, experts=both.experts + whole.experts), mixed, 1) == pytest.approx(1e-5 / 3)


def test_a_larger_router_takes_longer_in_proportion_and_a_smaller_one_what_was_timed() -> None:
    routes = tuple(RouteTiming("acc", "F32", 128, 8, 2048, n, 1e-6 * n) for n in TOKENS)
    profile = replace(PROFILE, routes=routes)
    for experts, factor in ((64, 1), (128, 1), (256, 2)):
        router = Route(TensorSpec("blk.0.router", "F32", (experts, 2048)), 8)
        assert price(profile, router, 16) == pytest.approx(16e-6 * factor)


@pytest.mark.parametrize("operation", [layer(), Route(TensorSpec("blk.0.router", "F32", (128, 2048)), 8)])
def test_without_timings_of_a_side_its_matmuls_stand_in(operation: Operation) -> None:
    profile = timed(lambda n: 9.0, side="host")
    slower = replace(profile, matmuls=tuple(replace(m, seconds=2 * m.seconds) for m in profile.matmuls))
    once, twice = (price(p, operation, 4096) for p in (profile, slower))
    assert 1.5 * once < twice < 2.01 * once < 18


READ = (InPlaceTiming("acc", 2 << 20, 1, 16 << 20, 4e-4),)


def test_gaps_of_a_profile_are_told_where_they_matter() -> None:
    without, whole = replace(PROFILE, experts=(), routes=()), replace(PROFILE, in_place=READ)
    assert list_gaps(whole, splits=False, routes=True) == list_gaps(without, splits=False, routes=False) == []
    (line,) = list_gaps(without, splits=False, routes=True)
    assert "no routed experts" in line and "pshard-profile -m" in line
    (line,) = list_gaps(replace(whole, in_place=()), splits=False, routes=True)
    assert "read over the link in place; that is priced as a copy" in line and "pshard-profile -m" in line
    on_cpu = replace(whole, in_place=(), accelerators=(replace(whole.accelerators[0], kind="cpu"),))
    assert not list_gaps(on_cpu, splits=False, routes=True)  # whose kernels are where the experts are


@pytest.mark.parametrize(("tokens", "bound"), [(1, "memory"), (4096, "flops")])
def test_a_datasheets_experts_take_what_the_slower_of_its_rates_allows(tokens: int, bound: str) -> None:
    (row,) = (
        e for e in PROFILE.experts
        if (e.device, e.gate_qtype, e.experts, e.tokens) == ("acc", "Q4_0", 128, tokens)
    )  # fmt: skip
    weights = 8 * (2 * packed_nbytes("Q4_0", 768, 2048) + packed_nbytes("Q4_0", 2048, 768))
    least = weights / DESKTOP.acc_memory if bound == "memory" else 6 * 8 * 768 * 2048 * tokens / DESKTOP.acc_flops
    assert least < row.seconds < 1.3 * least


def test_a_hand_over_costs_what_it_carries() -> None:
    """Bytes of all buffers, and one more kernel for each but the first."""
    spec, workload = ExpertsFile(RULES["softmax"]).spec, Workload((1000,), context=128)
    costs = tier_costs(spec, Tables(PROFILE), TierLoad(Batch.even(16, 1)), workload)
    hidden, routed = 4 * 16 * 64, 4 * 16 * (64 + 2 * 2)

    def seconds(nbytes: int, *carries: str) -> float:
        return _price(hand_over("cpu", nbytes, carries), costs)[2]

    latency = PROFILE.handoff_seconds / 2
    vector, kernel = costs.tables.copy("d2h", 4 * 64), costs.tables.elementwise("acc", "norm", 1, 64)
    assert seconds(routed, "routed") == pytest.approx(latency + costs.tables.copy("d2h", routed) - vector)
    both = seconds(hidden + routed, "hidden", "routed")
    assert both == pytest.approx(latency + costs.tables.copy("d2h", hidden + routed) - vector + kernel)
