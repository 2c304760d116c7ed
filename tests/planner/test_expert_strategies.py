"""Published ways to place routed experts: what they place where, for which models, and that plans are no slower."""

from collections.abc import Iterator
from dataclasses import replace
from io import StringIO

import pytest
from golden.machines import find_machine
from golden.shapes import make_shape
from hypothesis import strategies as st
from planner_cases import (
    DESKTOP,
    expert_rules,
    few_or_many,
    machines,
    make_model,
    models,
    published_variants,
    try_cases,
    workloads,
)
from rich.console import Console
from test_planner_plans import smallest_budget, workload_seconds

from pshard.errors import NoPlan, UserError
from pshard.plan import TierPlan, Variant
from pshard.planner.check_plan import check_variant
from pshard.planner.foresee import foresee_strategies
from pshard.planner.make_plan import plan_baseline, plan_variant
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.published.strategies import COPIED_FROM, NAMES, OF_EXPERTS, PER_TIER
from pshard.planner.show_plan import print_outlook
from pshard.predicted_times import round_seconds
from pshard.times.outlook import LeftOut
from pshard.workload import Workload

LAYERS, COUNT = 48, 128  # of qwen3-30b-a3b


def place(name: str, mib: int = 6000) -> Variant:
    return plan_baseline(name, make_shape("qwen3-30b-a3b"), find_machine("h100"), Workload((mib,), context=4352))


def tiers_of(variant: Variant) -> Iterator[tuple[TierPlan, list, list]]:
    """Every tier with the placements of its experts, and of the rest but the embedding."""
    for tier in variant.ranks[0].tiers:
        experts = [p for p in tier.placements if p.unit.endswith("experts")]
        yield tier, experts, [p for p in tier.placements[1:] if p not in experts]


def test_cpu_moe_has_all_experts_on_the_cpu_and_the_rest_in_vram() -> None:
    for tier, experts, others in tiers_of(place("cpu-moe")):
        assert {p.where for p in experts} == {"cpu" if tier.tokens < COPIED_FROM else "streamed"}
        assert {p.where for p in others} == {"pinned"} and {p.kv for p in others} == {"vram", None}


def test_n_cpu_moe_has_whole_layers_from_the_front_on_the_cpu_as_few_as_fit() -> None:
    variant, outside = place("n-cpu-moe"), set()
    for tier, experts, others in tiers_of(variant):
        away = "cpu" if tier.tokens < COPIED_FROM else "streamed"
        n = sum(p.where == away for p in experts)
        assert [p.where for p in experts] == [away] * n + ["pinned"] * (LAYERS - n) and 0 < n < LAYERS
        assert {p.where for p in others} == {"pinned"}
        outside.add(n)
    assert len(outside) == 1  # the same layers for prompts and answers
    layer = make_shape("qwen3-30b-a3b").unit("blk.0.experts").packed_nbytes
    largest = variant.ranks[0].tiers[-1].buffers
    assert largest.total + layer > (6000 << 20) - (320 << 20)  # one layer more would not fit beside torch's own


def test_hot_experts_has_as_many_of_every_layer_in_vram_in_every_tier() -> None:
    held = set()
    for tier, experts, others in tiers_of(place("hot-experts")):
        few = tier.tokens < COPIED_FROM
        assert {p.where for p in experts} == {"pinned" if few else "streamed"}
        held |= {COUNT - p.cpu_rows if few else p.kept_parts for p in experts}
        assert {p.where for p in others} == {"pinned"}
    assert len(held) == 1 and 0 < held.pop() < COUNT


def test_ways_to_place_experts_keep_everything_where_it_fits() -> None:
    for name in ("n-cpu-moe", "hot-experts"):
        assert not place(name, 30000).plan_needed
    assert place("cpu-moe", 30000).plan_needed


def test_layer_stream_streams_nothing_but_experts_of_a_model_that_has_some() -> None:
    for _, experts, others in tiers_of(place("layer-stream")):
        n = sum(p.where == "streamed" for p in experts)
        assert [p.where for p in experts] == ["streamed"] * n + ["pinned"] * (LAYERS - n) and 0 < n < LAYERS
        assert {p.where for p in others} == {"pinned"}


def test_ways_to_place_experts_do_not_exist_for_dense_models() -> None:
    spec, profile, workload = make_model(), profile_from_datasheet(DESKTOP), Workload((400,), context=512, prompt=256)
    for name in OF_EXPERTS:
        with pytest.raises(UserError, match=f"'{name}' places routed experts, and made has none; choose from fit, "):
            plan_baseline(name, spec, profile, workload)
    outlook = foresee_strategies(spec, profile, workload, plan_variant(spec, profile, workload))
    assert not set(OF_EXPERTS) & {each.strategy for each in outlook.forecasts}


@pytest.mark.slow
def test_ways_to_place_experts_stand_beside_a_plan_of_a_model_that_has_some() -> None:
    variant = place("cpu-moe")
    outlook = foresee_strategies(make_shape("qwen3-30b-a3b"), find_machine("h100"), variant.workload, variant)
    assert set(OF_EXPERTS) < {each.strategy for each in outlook.forecasts}


@few_or_many
def test_no_plan_of_experts_is_slower_than_a_published_way(cases: int) -> None:
    try_cases(cases, expect_no_slower, st.data())


def expect_no_slower(data: st.DataObject) -> None:
    spec, rates = data.draw(models(6, expert_rules())), data.draw(machines())
    profile = profile_from_datasheet(rates)
    least = smallest_budget(spec, profile, Workload((1,), context=2048, sequences=3, max_ubatch=16, prompt=64))
    workload = data.draw(workloads(spec, least))
    variant = plan_variant(spec, profile, workload)
    check_variant((spec,), variant, rates.kind)
    own = workload_seconds(spec, profile, workload, variant)
    same = replace(workload, max_ubatch=variant.workload.max_ubatch)
    all_fits = variant.ranks[0].tiers[0].solve.strategy == "all in VRAM"  # then nothing is planned
    for name, published in published_variants(spec, profile, same):
        check_variant((spec,), published, rates.kind)
        if published.workload.max_ubatch == variant.workload.max_ubatch and not (all_fits and name == PER_TIER):
            assert own <= workload_seconds(spec, profile, workload, published) * (1 + 1e-9), name


def test_a_strategy_that_reads_experts_where_no_gpu_reaches_them_is_no_plan() -> None:
    """Beyond the limit of page-locking: it was a plan of a thousand seconds a layer."""
    spec, profile, workload = make_shape("qwen3-30b-a3b"), find_machine("h100"), Workload((6000,), context=4352)
    limited = replace(profile, lockable_bytes=2 << 30)
    with pytest.raises(NoPlan, match=r"'layer-stream' has the GPU read experts in page-locked memory, .* 2048 MiB"):
        plan_baseline("layer-stream", spec, limited, workload)
    outlook = foresee_strategies(spec, limited, workload, plan_baseline("cpu-moe", spec, limited, workload))
    assert {"cpu-moe", "n-cpu-moe"} <= {f.strategy for f in outlook.forecasts[1:]}
    assert "layer-stream" not in {f.strategy for f in outlook.forecasts}
    assert max(f.round_seconds for f in outlook.forecasts) < 100


def test_popular_experts_of_which_a_layer_has_none_in_vram_are_no_plan() -> None:
    """It would be cpu-moe under another name. What is left out is said beside the plan, and why."""
    spec, profile, workload = make_shape("qwen3-30b-a3b"), find_machine("h100"), Workload((2500,), context=4352)
    says = r"'hot-experts' has no room in 2500 MiB for one expert of each layer \(blk\.0\.experts would have none"
    with pytest.raises(NoPlan, match=says):
        plan_baseline("hot-experts", spec, profile, workload)
    outlook = foresee_strategies(spec, profile, workload, place("cpu-moe", 2500))
    foreseen, left_out = ({each.strategy for each in them} for them in (outlook.forecasts, outlook.left_out))
    assert "cpu-moe" in foreseen and "hot-experts" in left_out and not foreseen & left_out
    assert foreseen | left_out == {"ilp", *NAMES}
    console = Console(file=StringIO(), width=300)
    print_outlook(outlook, console)
    assert "left out: strategy 'hot-experts' has no room in 2500 MiB" in console.file.getvalue()
    assert "this plan  " in console.file.getvalue()
    print_outlook(replace(outlook, left_out=(LeftOut("fit", "1 MiB have no room"),)), console, "improved fit")
    assert "left out: strategy 'fit': 1 MiB have no room" in console.file.getvalue()
    assert "this plan, improved fit  " in console.file.getvalue()


def test_a_strategy_is_the_same_plan_among_others_and_alone() -> None:
    """What is compared is prepared once for all strategies."""
    variant = place("cpu-moe")
    outlook = foresee_strategies(make_shape("qwen3-30b-a3b"), find_machine("h100"), variant.workload, variant)
    alone = {name: round_seconds(place(name)) for name in ("hot-experts", "n-cpu-moe", "expert-lru")}
    assert alone == {each.strategy: each.round_seconds for each in outlook.forecasts if each.strategy in alone}
