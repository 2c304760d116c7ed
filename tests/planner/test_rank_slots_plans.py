"""Slots for experts that follow use on several ranks: each has pools of what it holds, priced by a replay of its own,
and no plan is slower than without them."""

import random
from dataclasses import replace
from io import StringIO

import pytest
from experts_file import ExpertsFile
from planner_cases import MANY, OWN
from rich.console import Console
from routing_samples import make_drifting_record
from slot_cases import DRIFTING, EXPERTS, FILE, LAYERS, PROFILE, USED, WORK

from pshard.batch import Batch
from pshard.cuts.rank_parts import cut_ranks
from pshard.errors import NoPlan
from pshard.jsonio import from_json, to_json
from pshard.model import ModelSpec
from pshard.model_config import Experts
from pshard.plan import Variant
from pshard.planner.check_plan import check_variant
from pshard.planner.explain import explain_gains, simulate_timelines
from pshard.planner.make_plan import plan_baseline, plan_variant, predict_again
from pshard.planner.prepare_ranks import price_tiers
from pshard.planner.price.predict_published import Predictor
from pshard.planner.price.profile_tables import find_tables
from pshard.planner.routing.plan_slots import plan_slots
from pshard.planner.routing.slot_promises import list_pools
from pshard.planner.show_plan import print_explanation, print_variant
from pshard.predicted_times import round_seconds
from pshard.routing.expert_map import map_experts
from pshard.routing.followed import find_eligible, under_plan
from pshard.routing.measure_popularity import measure_popularity
from pshard.routing.order_experts import order_experts
from pshard.routing.record import RoutingRecord
from pshard.units.moe.expert_cache import pack_hits, slot_nbytes
from pshard.workload import Workload

SPEC = order_experts(FILE.spec, measure_popularity(DRIFTING))
WAYS = {
    "slices": ("tensor", (10, 10), ()),
    "unequal slices": ("tensor", (15, 6), (3.0, 1.0)),
    "a rank of zero": ("tensor", (20, 2), (1.0, 0.0)),
    "layers": ("layer", (10, 10), ()),
}


def work_of(way: str) -> Workload:
    mode, more, shares = WAYS[way]
    return replace(WORK, vram_mib=tuple(OWN + mib for mib in more), split_mode=mode, tensor_split=shares)


def plan_both(spec: ModelSpec, work: Workload, record: RoutingRecord) -> tuple[Variant, Variant]:
    without = plan_variant(spec, PROFILE, work)
    asked = replace(without.workload, max_ubatch=work.max_ubatch)
    return without, plan_slots(spec, PROFILE, asked, without, record)


def plan_way(way: str) -> tuple[Variant, Variant]:
    return plan_both(SPEC, work_of(way), DRIFTING)


def check_slots(spec: ModelSpec, variant: Variant, record: RoutingRecord) -> None:
    """The plan is legal; each rank's slots have the bytes of what it holds, and promise what a replay of them finds."""
    parts = cut_ranks(under_plan(spec, variant), variant.split)
    check_variant(parts, variant, "cuda")
    for part, rank in zip(parts, variant.ranks):
        assert part.caches == rank.caches
        pools = {pool.units[0].name: pool for pool in list_pools(part, record, variant.workload)}
        assert {tier.buffers.cached for tier in rank.tiers} == {sum(cache.nbytes for cache in rank.caches)}
        for own in rank.caches:
            assert own.slot_bytes == slot_nbytes(part.unit(own.units[0]))
            assert pools[own.units[0]].promise(own, find_eligible(part, own, rank)) == own
    assert from_json(Variant, to_json(variant)) == variant


@pytest.mark.quick("slices")
@pytest.mark.parametrize("way", WAYS)
def test_each_rank_has_slots_for_what_it_holds_and_all_take_less_time(way: str) -> None:
    without, variant = plan_way(way)
    assert round_seconds(variant) < 0.97 * round_seconds(without)
    check_slots(SPEC, variant, DRIFTING)
    assert [bool(rank.caches) for rank in variant.ranks] == [True, way != "a rank of zero"]
    predictor = Predictor(cut_ranks(under_plan(SPEC, variant), variant.split), PROFILE, variant)
    past = variant.ranks[0].tiers[0].prediction.past
    seconds = [rank.tiers[0].prediction.seconds for rank in variant.ranks]
    assert predictor.rank_seconds(Batch.even(1, 1, past)) == pytest.approx(seconds, rel=1e-6)
    first, second = variant.ranks
    if way == "slices":
        assert first.caches == second.caches and first.tiers == second.tiers
    if way == "layers":
        assert [name for rank in variant.ranks for cache in rank.caches for name in cache.units] == [
            f"blk.{layer}.experts" for layer in range(LAYERS)
        ]
    if way == "unequal slices":
        assert all(a.found > b.found for a, b in zip(first.caches, second.caches))
        check_explanation(variant)


def predict_with_hits(variant: Variant, hits: tuple[float, float]) -> float:
    """Seconds of a decoding step where each rank finds that share of its choices in slots; nothing is brought in."""
    ranks = tuple(
        replace(
            rank,
            caches=tuple(
                replace(own, hits=pack_hits([share] * EXPERTS), found=share, admitted=0.0) for own in rank.caches
            ),
        )
        for rank, share in zip(variant.ranks, hits)
    )
    variant = replace(variant, ranks=ranks)
    tiers = tuple(tier.tokens for tier in ranks[0].tiers)
    tasks = price_tiers(under_plan(SPEC, variant), find_tables(PROFILE), variant.workload, tiers)
    first, second = (rank.tiers[0].prediction.seconds for rank in predict_again(variant, *tasks).ranks)
    assert first == second or variant.workload.split_mode == "layer"
    return max(first, second) if variant.workload.split_mode == "tensor" else first + second


def test_ranks_with_slices_wait_for_the_one_that_finds_least_and_those_with_layers_take_turns() -> None:
    slices, layers = (plan_baseline("expert-lru", SPEC, PROFILE, work_of(way)) for way in ("slices", "layers"))
    none, some, both = (predict_with_hits(slices, hits) for hits in ((0.0, 0.0), (0.9, 0.0), (0.9, 0.9)))
    assert some == pytest.approx(none, rel=1e-9) and both < 0.9 * none
    assert predict_with_hits(slices, (0.0, 0.9)) == pytest.approx(none, rel=1e-9)
    none, first, second, both = (predict_with_hits(layers, hits) for hits in ((0, 0), (0.9, 0), (0, 0.9), (0.9, 0.9)))
    assert first < none > second and none - both == pytest.approx((none - first) + (none - second), rel=1e-6)


def test_expert_lru_fills_the_room_of_each_rank() -> None:
    for way in WAYS:
        variant = plan_baseline("expert-lru", SPEC, PROFILE, work_of(way), record=DRIFTING)
        check_slots(SPEC, variant, DRIFTING)
        for rank in variant.ranks:
            left = (rank.budget_mib - OWN << 20) - max(tier.buffers.total for tier in rank.tiers)
            all_held = all(own.slots == EXPERTS * len(own.units) for own in rank.caches)
            one_tier = len(rank.tiers) == 1  # with so many hits a prompt is faster token by token: less scratch
            assert all_held or one_tier or left < sum(own.slot_bytes for own in rank.caches)
    with pytest.raises(NoPlan, match="'expert-lru'"):
        plan_baseline("expert-lru", SPEC, PROFILE, replace(work_of("slices"), vram_mib=(OWN + 2,) * 2))


def random_case(seed: int) -> tuple[ModelSpec, Workload, RoutingRecord]:
    """A model, a machine's budgets and a split of them, and a record."""
    rng = random.Random(seed)
    file = ExpertsFile(Experts(EXPERTS, USED, rng.choice((192, 320))), rng.choice((3, 5)), 1024)
    layers = sum(unit.kind.parts is not None for unit in file.spec.units)
    record = make_drifting_record(300, layers, EXPERTS, USED, rng.choice((0.9, 0.97, 0.99)), rng.choice((1.0, 4.0)))
    ranks = rng.choice((2, 2, 3))
    shares = rng.choice(((), (1.0, *(rng.choice((0.0, 1.0, 3.0)) for _ in range(ranks - 1)))))
    budgets = tuple(OWN + rng.randint(16, 64) for _ in range(ranks))
    sequences = rng.choice((1, 1, 4))
    mode = rng.choice(("tensor", "layer"))
    work = replace(WORK, vram_mib=budgets, split_mode=mode, tensor_split=shares, sequences=sequences)
    return order_experts(file.spec, measure_popularity(record)), replace(work, context=128 * sequences), record


@pytest.mark.slow
def test_no_plan_with_slots_is_slower_than_without() -> None:
    better = 0
    for seed in range(17, 17 + MANY // 2):
        spec, work, record = random_case(seed)
        try:
            without, variant = plan_both(spec, work, record)
        except NoPlan:
            continue
        assert round_seconds(variant) <= round_seconds(without), seed
        check_slots(spec, variant, record)
        better += round_seconds(variant) < round_seconds(without)
        try:
            published = plan_baseline("expert-lru", spec, PROFILE, without.workload, record=record)
        except NoPlan:
            continue
        assert round_seconds(variant) <= round_seconds(published) or not variant.plan_needed, seed
    assert better >= 2


def check_explanation(variant: Variant) -> None:
    """It has the slots of all ranks."""
    maps, out = map_experts(SPEC, variant), StringIO()
    assert [sum(slots.count for slots in each.slots) for each in maps] == [
        sum(cache.slots for cache in rank.caches) for rank in variant.ranks
    ]
    console = Console(file=out, width=200)
    gains = explain_gains(SPEC, PROFILE, variant.workload, variant)
    print_variant(variant, console)
    print_explanation(variant, gains, (), console, maps)
    pools = sum(len(rank.caches) for rank in variant.ranks)
    assert out.getvalue().count("in VRAM for experts of") == pools > 1 and "experts that follow use" in out.getvalue()
    assert all(speedup > 0.9 for gain in gains for _, speedup in gain.speedups)
    decode = simulate_timelines(SPEC, PROFILE, variant)[0]
    assert "new experts" in {event.label for event in decode.events}
