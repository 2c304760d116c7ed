"""Plans with slots for experts that follow use: what they promise, that they are legal, and never slower."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from experts_file import ExpertsFile
from planner_cases import OWN
from routing_samples import make_drifting_record, make_record
from slot_cases import DRIFTING, EXPERTS, FILE, LAYERS, PROFILE, RATES, USED, WORK

from pshard.batch import Batch
from pshard.errors import NoPlan
from pshard.machine import ElementwiseTiming
from pshard.model import ModelSpec
from pshard.model_config import Experts
from pshard.plan import Variant
from pshard.planner.check_plan import PlanError, check_variant
from pshard.planner.foresee import foresee_strategies
from pshard.planner.llama_cpp_arguments import list_unsaid
from pshard.planner.make_plan import plan_baseline, plan_variant
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.profile_tables import Tables
from pshard.planner.price.tier_costs import tier_costs
from pshard.planner.price.tier_loads import TierLoad
from pshard.planner.routing.check_caches import check_caches
from pshard.planner.routing.plan_slots import plan_slots, why_no_slots
from pshard.planner.routing.slot_promises import list_pools
from pshard.predicted_times import round_seconds
from pshard.routing.expert_map import map_experts
from pshard.routing.expert_uses import count_apart, used_experts
from pshard.routing.followed import expect_hits, find_eligible, make_follower
from pshard.routing.measure_popularity import measure_popularity
from pshard.routing.order_experts import order_experts
from pshard.routing.record import RoutingRecord
from pshard.speculation import NO_DRAFTS, Drafting
from pshard.steps.emit import emit_steps
from pshard.steps.move import Move, NewExperts
from pshard.steps.step import StepShape
from pshard.units.moe.expert_cache import ExpertCache, pack_hits, slot_nbytes
from pshard.units.share import Share
from pshard.workload import Workload


def recorded(record: RoutingRecord = DRIFTING) -> ModelSpec:
    return order_experts(FILE.spec, measure_popularity(record))


def cache_of(hits: list[float], slots: int = 8, admitted: float = 2.0) -> ExpertCache:
    units = [unit for unit in FILE.spec.units if unit.kind.parts]
    names = tuple(unit.name for unit in units)
    return ExpertCache(names, slots, slot_nbytes(units[0]), "lru", 4, pack_hits(hits), 0.5, admitted)


def price(tokens: int, *caches: ExpertCache):
    load = TierLoad(Batch.even(tokens, 1))
    return tier_costs(replace(FILE.spec, caches=caches), Tables(PROFILE), load, Workload((1000,), context=128))


def test_hits_take_work_from_the_cpu_and_the_link_and_give_it_to_the_accelerator() -> None:
    share, unit = Share(8, 4), "blk.1.experts"
    without, half = price(1).divided(unit, share), price(1, cache_of([0.5] * 16)).divided(unit, share)
    assert half.cpu == pytest.approx(without.cpu / 2, rel=0.15)
    assert half.read < 0.75 * without.read  # a copy begins with a wait
    assert half.cpu_reads == pytest.approx(without.cpu_reads / 2, rel=0.01) and half.acc > without.acc
    all_found = price(1, cache_of([1.0] * 16)).divided(unit, share)
    assert all_found.cpu < 0.2 * without.cpu and all_found.read < 0.5 * without.read
    assert price(16, cache_of([0.5] * 16)).divided(unit, share) == price(16).divided(unit, share)  # prompts use none


def plan_both(record: RoutingRecord) -> tuple[Variant, Variant]:
    spec = recorded(record)
    without = plan_variant(spec, PROFILE, WORK)
    return without, plan_slots(spec, PROFILE, WORK, without, record)


@cache
def plan_drifting() -> tuple[Variant, Variant]:
    return plan_both(DRIFTING)


def test_a_record_of_drifting_likings_gets_slots_and_less_time() -> None:
    without, variant = plan_drifting()
    (rank,) = variant.ranks
    assert rank.caches and round_seconds(variant) < 0.95 * round_seconds(without)
    check_variant((replace(recorded(), caches=rank.caches),), variant, "cuda")
    (cache,) = rank.caches
    assert {tier.buffers.cached for tier in rank.tiers} == {cache.nbytes} and cache.admits >= 1
    assert variant.popularity == without.popularity and variant.workload.vram_mib == WORK.vram_mib


@pytest.mark.parametrize(("drafts", "texts"), [(0, 1), (1, 1), (3, 1), (7, 1), (0, 4), (0, 8), (0, 16), (3, 4)])
def test_steps_miss_as_many_experts_as_slots_promise(drafts: int, texts: int) -> None:
    """Slots follow use from step to step, so rows of one step find less there than tokens one by one; what they find is
    there for all of them."""
    record, rows, spec = make_drifting_record(3000, LAYERS), drafts + 1, recorded()
    drafting = Drafting("lookup", drafts) if drafts else NO_DRAFTS
    (pool,) = list_pools(spec, record, replace(WORK, drafting=drafting, sequences=texts))
    eligible = np.ones((LAYERS, 16), bool)
    cache = pool.promise(pool.make_cache(24, "lru", 4), eligible)
    known = measure_popularity(record)
    apart = texts * count_apart(rows, record.used, 16, known.uses, known.overlaps)
    expected = used_experts(range(16), record.used, 16, apart, known.uses, cache.hits_by_place)
    assert pool.record
    follower, missed = make_follower(cache, eligible), 0
    steps = pool.record.tokens // (texts * rows)
    own = pool.record.ids[: steps * texts * rows].astype(np.int64).reshape(texts, steps, rows, LAYERS, -1)
    for step in range(steps):
        follower.begin()
        ids = own[:, step].reshape(texts * rows, LAYERS, -1)
        found = follower.observe(ids)
        if step >= steps // 2:
            missed += sum(len(np.unique(ids[:, i][~found[:, i]])) for i in range(LAYERS))
    assert expected == pytest.approx(missed / (steps - steps // 2) / LAYERS, rel=0.08)


@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
def test_steps_bring_in_as_many_experts_as_they_are_priced_by(drafts: int) -> None:
    """Also one of a single token under a plan for steps of several: it fills as many slots as any other step."""
    record, rows = make_drifting_record(1500, LAYERS), drafts + 1
    work = replace(WORK, drafting=Drafting("lookup", drafts) if drafts else NO_DRAFTS)
    (pool,) = list_pools(recorded(), record, work)
    eligible = np.ones((LAYERS, EXPERTS), bool)
    cache = pool.make_cache(24, "lru", 2)
    cache = pool.count_alone(pool.promise(cache, eligible), eligible)
    for width in {1, rows}:
        follower, steps, before = make_follower(cache, eligible), record.tokens // width, 0
        for step in range(steps):
            before = follower.counts.admitted if step == steps // 2 else before
            follower.begin()
            follower.observe(record.ids[step * width : (step + 1) * width])
        brought = (follower.counts.admitted - before) / (steps - steps // 2)
        assert cache.refill(width) == pytest.approx(brought, rel=0.02)
        costs = price(width, cache)
        assert costs.setting.refill[1] == pytest.approx(3 * brought * costs.copy_issue, rel=0.02)
    assert cache.refill(rows) >= cache.refill(1) > 0.5


def test_following_use_costs_the_host_what_was_timed_of_it() -> None:
    """Also where nothing comes; on top of the copies, which are part of what an expert costs there."""
    rows = ElementwiseTiming("acc", "slots", 1, 1, 2e-4), ElementwiseTiming("acc", "admit", 1, 1, 1e-4)
    timed = replace(PROFILE, elementwise=(*PROFILE.elementwise, *rows))

    def on_host(cache: ExpertCache, tokens: int = 1) -> float:
        load = TierLoad(Batch.even(tokens, 1))
        spec = replace(FILE.spec, caches=(cache,))
        return tier_costs(spec, Tables(timed), load, Workload((1000,), context=128)).setting.refill[1]

    cache = cache_of([0.5] * 16, admitted=3.0)
    assert on_host(cache) == pytest.approx(2e-4 + 3 * 1e-4) and on_host(cache, 2) == pytest.approx(2e-4 + 4 * 1e-4)
    assert on_host(replace(cache, admits=0)) == pytest.approx(2e-4) and on_host(cache, 16) == 0.0


def test_what_a_plan_promises_is_what_a_replay_of_its_slots_finds() -> None:
    """Also: the bytes that it counts over the link have the experts that are brought in."""
    _, variant = plan_drifting()
    (rank,) = variant.ranks
    (cache,), (pool,) = rank.caches, list_pools(recorded(), DRIFTING, variant.workload)
    eligible = find_eligible(recorded(), cache, rank)
    assert pool.promise(cache, eligible) == cache and expect_hits(rank) == cache.found > 0.4
    (experts,) = map_experts(recorded(), variant)
    assert experts.tiers[0].found == pytest.approx(cache.found, abs=0.06) and experts.tiers[-1].found == 0
    assert sum(experts.tiers[0].served) + experts.tiers[0].found == pytest.approx(1)
    steps = emit_steps(replace(recorded(), caches=rank.caches), rank.tiers[0], StepShape(1, 100, 1))
    (refill,) = [step for step in steps.body if isinstance(step, Move) and step.brings(NewExperts)]
    assert refill.nbytes == round(cache.admitted * cache.slot_bytes) > 0


@pytest.mark.slow
def test_slots_serve_16_sequences_that_decode_together() -> None:
    """They are replayed as so many texts, and what a step brings in is that of 16 tokens."""
    record = make_drifting_record(3000, LAYERS, 64, 2, 0.99, 6.0)
    slow_host = replace(RATES, link=8e9, host_memory=8e9, host_flops=2e9)
    file, profile = ExpertsFile(Experts(64, 2, 64), LAYERS, 256), profile_from_datasheet(slow_host)
    spec = order_experts(file.spec, measure_popularity(record))
    work = replace(WORK, vram_mib=(OWN + 24,), sequences=16, context=16 * 128, max_ubatch=64)
    variant = plan_slots(spec, profile, work, without := plan_variant(spec, profile, work), record)
    (rank,) = variant.ranks
    (cache,) = rank.caches
    assert cache.tokens == 16 and round_seconds(variant) < round_seconds(without)
    assert [tier.in_place for tier in rank.tiers if tier.tokens <= 16] == [True, True]
    check_variant((replace(spec, caches=rank.caches),), variant, "cuda")
    steps = emit_steps(replace(spec, caches=rank.caches), rank.covering(16), StepShape(16, 100, 16, 16))
    (refill,) = [step for step in steps.body if isinstance(step, Move) and step.brings(NewExperts)]
    assert refill.nbytes == round(min(cache.admits, 16 * cache.admitted) * cache.slot_bytes) > 0
    damaged = [replace(tier, in_place=False) if tier.tokens == 16 else tier for tier in rank.tiers]
    with pytest.raises(ValueError, match="tier 16: experts that may lie in slots are copied whole"):
        check_caches(spec, replace(rank, tiers=tuple(damaged)))


@pytest.mark.slow
def test_a_record_of_likings_that_stay_gets_no_slower_plan() -> None:
    record = make_record(400, LAYERS, skew=2.0)
    record = replace(record, layers=tuple(range(LAYERS)))
    without, variant = plan_both(record)
    assert round_seconds(variant) <= round_seconds(without)


def test_without_a_record_slots_are_worth_no_more_than_experts_that_stay() -> None:
    (pool,) = list_pools(FILE.spec, None, WORK)
    cache = pool.promise(pool.make_cache(16, "lru", 99), np.ones((LAYERS, EXPERTS), bool))
    assert cache.found == pytest.approx(16 / 64) and cache.hits_by_place == pytest.approx((0.25,) * 16, abs=2e-3)
    assert cache.admitted == pytest.approx(LAYERS * USED * 0.75)
    without = plan_variant(FILE.spec, PROFILE, WORK)
    assert plan_slots(FILE.spec, PROFILE, WORK, without, None) == without


def test_expert_lru_has_slots_in_all_the_room_and_reads_the_rest_over_the_link() -> None:
    variant = plan_baseline("expert-lru", FILE.spec, PROFILE, WORK)
    check_variant((FILE.spec,), variant, "cuda")
    (rank,) = variant.ranks
    (cache,) = rank.caches
    assert cache.policy == "lru" and cache.admits == LAYERS * USED
    for tier in rank.tiers:
        assert {p.where for p in tier.placements if p.unit.endswith("experts")} == {"streamed"}
        assert {p.where for p in tier.placements[1:] if not p.unit.endswith("experts")} == {"pinned"}
    most = max(tier.buffers.total for tier in rank.tiers)
    assert most + cache.slot_bytes > 20 << 20 or cache.slots == LAYERS * EXPERTS
    (line,) = [said for said in list_unsaid(variant, FILE.spec) if "follow use" in said]
    assert line.startswith(f"{cache.slots} slots") and f"--moe-cache-mib {cache.nbytes >> 20}," in line
    spec, record = recorded(), DRIFTING
    promised = plan_baseline("expert-lru", spec, PROFILE, WORK, record=record)
    assert round_seconds(promised) < round_seconds(variant)
    _, planned = plan_drifting()
    assert round_seconds(planned) <= round_seconds(promised)
    names = [each.strategy for each in foresee_strategies(spec, PROFILE, WORK, planned, record).forecasts]
    assert names.count("expert-lru") == 1


def test_where_no_slots_can_be_a_line_says_why() -> None:
    work = replace(WORK, sequences=33, context=33 * 128, max_ubatch=64, vram_mib=(OWN + 60,))
    without = plan_variant(recorded(), PROFILE, work)
    why = why_no_slots(without)
    assert why and "to 32 sequences and the" in why and "pinned by the record all the same" in why
    assert plan_slots(recorded(), PROFILE, work, without, DRIFTING) == without


def test_expert_lru_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(NoPlan, match="'expert-lru' does not fit"):
        plan_baseline("expert-lru", FILE.spec, PROFILE, replace(WORK, vram_mib=(OWN + 1,)))
    with pytest.raises(
        NoPlan, match=r"has slots for 2 experts in .* MiB, not for one of each of 4 layers; raise --vram"
    ):
        plan_baseline("expert-lru", FILE.spec, PROFILE, replace(WORK, vram_mib=(OWN + 5,)))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"units": ("blk.0.router",)}, "'blk.0.router', which has no experts"),
        ({"slot_bytes": 512}, "slots of 512 bytes are for experts of"),
        ({"slots": 3}, "bytes of caches, not"),
        ({"hits": pack_hits([0.5])}, "hits of 1 experts, not of 16"),
    ],
)
def test_damaged_caches_are_refused(change: dict, message: str) -> None:
    variant = plan_baseline("expert-lru", FILE.spec, PROFILE, WORK)
    (rank,) = variant.ranks
    damaged = replace(rank, caches=(replace(rank.caches[0], **change),))
    with pytest.raises(PlanError, match=message):
        check_variant((FILE.spec,), replace(variant, ranks=(damaged,)), "cuda")


def test_what_the_cpu_and_the_link_find_outside_slots_is_spread_as_chance_has_it() -> None:
    """Each choice is found in a slot or not, whatever others are: against random tokens."""
    rng, share, unit, found = np.random.default_rng(3), Share(8, 4), "blk.1.experts", 0.6
    cost, times = price(1, cache_of([found] * EXPERTS)).divided(unit, share), []
    read, cpu = (seconds / (n * USED / EXPERTS * (1 - found)) for seconds, n in ((cost.read, 4), (cost.cpu, 8)))
    for _ in range(20_000):
        missed = [e for e in rng.permutation(EXPERTS)[:USED] if rng.random() > found]
        times.append(sum(read if 4 <= e < 8 else -cpu if e >= 8 else 0.0 for e in missed))
    assert cost.spread == pytest.approx(np.std(times), rel=0.05)
