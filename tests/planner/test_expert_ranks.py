"""Tensor-parallel plans of models with experts: legal, priced, and with routers that choose alike on all ranks."""

from collections import Counter
from dataclasses import replace

import pytest
from golden.shapes import make_shape
from planner_cases import DESKTOP, OWN, published_variants

from pshard.cuts.rank_parts import cut_ranks
from pshard.errors import BudgetTooSmall, UserError
from pshard.machine import MachineProfile
from pshard.plan import Variant
from pshard.planner.check_plan import PlanError, check_runnable, check_variant
from pshard.planner.choose_mode import plan_mode
from pshard.planner.choose_ratios import plan_ratios
from pshard.planner.make_plan import plan_variant
from pshard.planner.prepare_ranks import prepare_ranks
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.draft import tier_steps
from pshard.predicted_times import round_seconds
from pshard.steps.step import AllReduce
from pshard.units.moe.experts import EXPERTS
from pshard.units.moe.router import ROUTER
from pshard.workload import Workload

FAST = profile_from_datasheet(replace(DESKTOP, ranks=2, collective_rate=100e9))
QWEN, SMALL = make_shape("qwen3-30b-a3b"), make_shape("experts-small")


def work(*mib: int, **more) -> Workload:
    return Workload(tuple(OWN + m for m in mib), **{"context": 4096, "split_mode": "tensor", **more})


def places(variant: Variant, spec, kind) -> Counter:
    return Counter(
        p.where for r in variant.ranks for t in r.tiers for p in t.placements if spec.unit(p.unit).kind is kind
    )


@pytest.mark.slow
@pytest.mark.parametrize("shares", [(3.0, 5.0), (), (1.0, 0.0)])
def test_a_30b_a3b_over_two_ranks_has_a_legal_plan(shares: tuple[float, ...]) -> None:
    workload = work(6000, 6000, tensor_split=shares, max_ubatch=512)
    variant = plan_variant(QWEN, FAST, workload)
    parts = cut_ranks(QWEN, variant.split)
    check_variant(parts, variant, "cuda")
    held = [sum(u.packed_nbytes for u in part.units if u.kind is EXPERTS) for part in parts]
    whole = sum(u.packed_nbytes for u in QWEN.units if u.kind is EXPERTS)
    assert held == pytest.approx([whole * share for share in variant.split.shares], rel=0.01)
    assert "cpu" not in places(variant, QWEN, ROUTER)


def test_each_rank_takes_its_share_of_the_time_and_there_are_two_sums_a_layer() -> None:
    one, *_ = prepare_ranks(QWEN, FAST, work(6000, split_mode="none", max_ubatch=512))
    two = prepare_ranks(QWEN, FAST, work(6000, 6000, max_ubatch=512))
    variant = plan_variant(QWEN, FAST, work(6000, 6000, max_ubatch=512))
    for whole, *slices in zip(one.costs, *(task.costs for task in two)):
        for cost in slices:
            a, b = whole.units["blk.3.experts"], cost.units["blk.3.experts"]
            assert b.acc == pytest.approx(a.acc / 2, rel=0.02)
            assert b.link == pytest.approx(a.link / 2, rel=0.05)
            assert b.nbytes == pytest.approx(a.nbytes / 2, rel=0.01)
            assert cost.units["blk.3.router"].acc == whole.units["blk.3.router"].acc
    steps = tier_steps(two[0].room, variant.ranks[0].tiers[0], two[0].costs[0]).body
    assert sum(isinstance(step, AllReduce) for step in steps) == 2 * QWEN.config.n_layers


@pytest.mark.slow
def test_two_links_stream_experts_faster_than_one() -> None:
    one = plan_variant(QWEN, FAST, work(6000, split_mode="none"))
    two = plan_variant(QWEN, FAST, work(6000, 6000))
    assert round_seconds(two) < round_seconds(one) / 1.5


def test_routers_stay_on_gpus_that_sum_also_under_the_smallest_budget() -> None:
    with pytest.raises(BudgetTooSmall) as refused:
        plan_variant(SMALL, FAST, Workload((1, 1), 512, split_mode="tensor", max_ubatch=16))
    smallest = Workload((refused.value.smallest_mib,) * 2, 512, split_mode="tensor", max_ubatch=16)
    variant = plan_variant(SMALL, FAST, smallest)
    check_variant(cut_ranks(SMALL, variant.split), variant, "cuda")
    assert "cpu" not in places(variant, SMALL, ROUTER)


def test_a_plan_with_a_router_on_one_ranks_cpu_is_refused_on_gpus() -> None:
    variant = plan_variant(SMALL, FAST, work(300, 300, max_ubatch=128))
    first, second = variant.ranks
    tiers = []
    for tier in first.tiers:
        moved = tuple(replace(p, where="cpu") if p.unit == "blk.2.router" else p for p in tier.placements)
        tiers.append(replace(tier, placements=moved))
    order = tuple(name for name in first.pin_order if name != "blk.2.router")
    wrong = replace(variant, ranks=(replace(first, tiers=tuple(tiers), pin_order=order), second))
    with pytest.raises(PlanError, match=r"blk\.2\.router cannot be cpu"):
        check_runnable(cut_ranks(SMALL, variant.split), wrong, "cuda")


def test_published_strategies_have_legal_plans_on_ranks_with_experts() -> None:
    workload = work(120, 120, max_ubatch=128)
    compared = 0
    for name, variant in published_variants(SMALL, FAST, workload):
        check_variant(cut_ranks(SMALL, variant.split), variant, "cuda")
        assert "cpu" not in places(variant, SMALL, ROUTER), name
        compared += 1
    assert compared >= 5


def test_a_limit_of_units_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(
        UserError, match="--max-tp ffn: experts-small has no such units; choose from attn, experts, head"
    ):
        plan_variant(SMALL, FAST, work(300, 300, max_tp=(("ffn", 1),)))


def unlike_gpus() -> MachineProfile:
    first = FAST.accelerators[0]
    return replace(FAST, accelerators=(first, replace(first, index=1, name="another GPU")))


def test_unlike_gpus_are_refused_by_name() -> None:
    """Their last bits may differ, and so the experts that they choose."""
    with pytest.raises(UserError, match=r"needs like GPUs .* another GPU; use -sm layer"):
        plan_variant(SMALL, unlike_gpus(), work(300, 300))


@pytest.mark.slow
def test_sm_auto_does_not_cut_experts_over_unlike_gpus() -> None:
    best = plan_mode(SMALL, unlike_gpus(), work(100, 100, max_ubatch=16), auto_ratios=False)
    assert best.workload.split_mode != "tensor"
    assert not any("tensor" in way.way for way in best.considered)


@pytest.mark.slow
def test_sm_auto_weighs_cuts_of_experts() -> None:
    best = plan_mode(SMALL, FAST, work(150, 80, max_ubatch=16), auto_ratios=False)
    assert any(way.way.startswith("-sm tensor") for way in best.considered)


@pytest.mark.slow
def test_ts_auto_gives_the_larger_budget_more_rows_of_every_expert() -> None:
    cut = plan_ratios(SMALL, FAST, work(150, 60, max_ubatch=16, max_tp=(("output", 1),)))
    check_variant(cut_ranks(SMALL, cut.split), cut, "cuda")
    assert cut.split.shares[0] > 0.5


def test_experts_may_be_kept_on_fewer_ranks() -> None:
    limited = plan_variant(SMALL, FAST, work(400, 100, max_ubatch=128, max_tp=(("experts", 1),)))
    check_variant(cut_ranks(SMALL, limited.split), limited, "cuda")
    held = [any(u.tensors for u in part.units if u.kind is EXPERTS) for part in cut_ranks(SMALL, limited.split)]
    assert held == [True, False]
