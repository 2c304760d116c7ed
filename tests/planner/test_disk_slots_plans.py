"""Plans of mixtures that host memory does not hold: slots for experts on disk beside layers that stay."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import exp
from operator import itemgetter

import numpy as np
import pytest
from experts_file import ExpertsFile
from hypothesis import given
from hypothesis import strategies as st
from routing_samples import make_drifting_record
from test_three_homes import MIB, make_machine, no_process  # noqa: F401

from pshard.homes import READ
from pshard.machine import DiskTiming, MachineProfile
from pshard.model import ModelSpec
from pshard.model_config import Experts
from pshard.on_disk import PIECE
from pshard.plan import TierPlan, Variant
from pshard.planner.beyond_host import fill_arena
from pshard.planner.check_plan import check_variant, count_host_bytes
from pshard.planner.make_plan import plan_variant
from pshard.planner.prepare_ranks import prepare_ranks, price_tiers
from pshard.planner.price.draft import Room, draft_tier
from pshard.planner.price.host_limits import usable_bytes
from pshard.planner.price.predict_published import Predictor
from pshard.planner.price.profile_tables import find_tables
from pshard.planner.rank_task import RankTask
from pshard.planner.routing.check_caches import check_caches
from pshard.planner.routing.crowd_layer import crowd_layer
from pshard.planner.routing.plan_slots import plan_slots
from pshard.planner.routing.prefer_slots import ALIKE, likely_seconds, prefer_slots
from pshard.planner.routing.slot_promises import list_pools, share_out
from pshard.planner.time_steps import time_steps
from pshard.predicted_times import first_token_seconds, round_seconds, tier_seconds
from pshard.reserve import TORCH_RESERVE_MIB
from pshard.routing.expert_map import map_experts
from pshard.routing.expert_uses import used_experts
from pshard.routing.followed import find_eligible, hold_slots, least_slots, make_follower
from pshard.routing.measure_popularity import measure_popularity
from pshard.routing.order_experts import order_experts
from pshard.routing.record import RoutingRecord
from pshard.session.run_request import suggest_budget
from pshard.speculation import Acceptance, Drafting
from pshard.steps.emit import emit_steps
from pshard.steps.step import DEMAND, Compute, StepShape
from pshard.units.moe.expert_cache import FOLLOW_TOKENS, ExpertCache
from pshard.workload import Workload

RULE = Experts(count=16, used=2, d_expert=256)
SPEC = ExpertsFile(RULE, layers=4, d_model=256).spec  # 49 MiB, a layer of experts 12
SMALL = ExpertsFile(RULE, layers=8, d_model=128).spec  # 52 MiB, a layer of experts 6
LAYERS = [unit.name for unit in SMALL.units if unit.kind.parts]
ATTENTION = [unit.name for unit in SMALL.units if unit.kind.state]
SIZE, ROUTER = (SMALL.unit(name).packed_nbytes for name in (ATTENTION[0], "blk.0.router"))
WORKLOAD = Workload((1000,), context=128, type_k="f32", type_v="f32", max_ubatch=32, prompt=40, generated=20)


def plan_both(
    profile: MachineProfile, mib: int, record: RoutingRecord | None = None, spec: ModelSpec = SPEC, budget: int = 1000
) -> tuple[Variant, Variant]:
    """The plan of whole layers, and the one to keep."""
    asked = suggest_budget(replace(WORKLOAD, ram_mib=mib, vram_mib=(budget,)), spec, profile)
    asked = replace(asked, vram_mib=(min(budget, *asked.vram_mib),))
    whole = plan_variant(spec, profile, asked)
    found = plan_slots(spec, profile, asked, whole, record)
    check_variant((spec,), found, "cpu", usable_bytes(profile, 1))
    return whole, found


def test_decoding_reads_the_experts_that_slots_lack_instead_of_whole_layers() -> None:
    whole, found = plan_both(make_machine(36 * MIB), 36)
    (rank,) = found.ranks
    (cache,) = rank.caches
    assert cache.is_on_demand and set(cache.units) == set(rank.beyond_host)
    assert rank.tiers[0].prediction.seconds < 0.2 * whole.ranks[0].tiers[0].prediction.seconds
    steps = emit_steps(replace(SPEC, caches=rank.caches), rank.tiers[0], StepShape(1, 0, 1))
    asked = [step for step in steps.body if isinstance(step, Compute) and step.source == DEMAND]
    assert [step.unit for step in asked] == list(cache.units)
    missed = 2 * len(cache.units) * (1 - cache.slots / (16 * len(cache.units)))
    assert sum(step.reads for step in asked) == pytest.approx(missed * cache.slot_bytes, rel=0.02)
    assert cache.admitted == pytest.approx(missed)
    (slots,) = map_experts(SPEC, found)[0].slots
    assert slots.likely and slots.likely > slots.found
    of_eight = replace(found, ranks=(replace(rank, caches=(replace(cache, width=8),)),))
    assert map_experts(SPEC, of_eight)[0].slots[0].likely is None  # published shares are of single tokens


def test_each_layer_waits_for_the_end_of_its_burst_of_reads_where_it_lacks_an_expert() -> None:
    profile, late = make_machine(36 * MIB), 1e-2
    _, found = plan_both(profile, 36)
    (cache,) = found.ranks[0].caches
    small = [DiskTiming("drive", True, PIECE, depth, PIECE, late / depth) for depth in (1, 16)]
    machines = profile, replace(profile, disks=(*profile.disks, *small))
    without, waits = (Predictor([SPEC], machine, found).micro_batch(1, 1, 0) for machine in machines)
    layers = len(cache.units)
    lacking = layers * (1 - exp(-cache.admitted / layers))
    assert waits - without == pytest.approx(lacking * late * (1 - 1 / 16), rel=0.02)


def plan_anew(mib: int, vram: int, spec: ModelSpec, rate: float, prompt: int) -> tuple[Variant, Variant]:
    """The same for a GPU with so many MiB for plans."""
    profile = make_machine(mib * MIB, rate, "cuda")
    asked = replace(WORKLOAD, ram_mib=mib, vram_mib=(TORCH_RESERVE_MIB + vram,), prompt=prompt)
    whole = plan_variant(spec, profile, asked)
    found = plan_slots(spec, profile, asked, whole, None)
    check_variant((spec,), found, "cuda", usable_bytes(profile, 1))
    return whole, found


plan_once = cache(plan_anew)


def plan_beside_gpu(
    mib: int, vram: int = 14, spec: ModelSpec = SMALL, rate: float = 1e9, prompt: int = WORKLOAD.prompt
) -> tuple[Variant, Variant]:
    return plan_once(mib, vram, spec, rate, prompt)


def test_beside_a_gpu_the_cpu_computes_from_slots_in_host_memory_and_prompts_leave_them() -> None:
    whole, found = plan_beside_gpu(20)
    (rank,) = found.ranks
    (cache,) = rank.caches
    answer, prompt = rank.tiers[0], rank.tiers[-1]
    assert cache.on_host and set(cache.units) <= set(rank.beyond_host) and not answer.buffers.cached
    assert {answer.placement(name).where for name in cache.units} == {"demand"}
    assert {prompt.placement(name).where for name in cache.units} == {"disk"}
    assert answer.prediction.seconds < 0.4 * whole.ranks[0].tiers[0].prediction.seconds
    kept = count_host_bytes((SMALL,), found, "cuda")
    assert cache.nbytes < kept <= 20 * MIB < kept + 2 * cache.slot_bytes  # slots take all that is left
    steps = emit_steps(replace(SMALL, caches=rank.caches), answer, StepShape(1, 0, 1))
    asked = [step for step in steps.body if isinstance(step, Compute) and step.source == DEMAND]
    assert [step.unit for step in asked] == list(cache.units) and {step.on for step in asked} == {"cpu"}
    assert sum(step.reads for step in asked) == pytest.approx(cache.admitted * cache.slot_bytes, rel=0.02)
    with pytest.raises(ValueError, match="which is not computed from there"):
        check_caches(SMALL, replace(rank, caches=(replace(cache, on_host=False),)))
    experts = map_experts(SMALL, found)[0]
    assert experts.slots[0].likely and sum(layer.disk for layer in experts.tiers[0].layers) == 16 * len(cache.units)


def replay_alike(cache: ExpertCache, tokens: int, answers: int) -> float:
    """How many experts a micro-batch of so many tokens misses, each after so many of one token, as the runtime's slots
    are filled; all of 16 are chosen alike, 2 by a token."""
    rng, layers = np.random.default_rng(0), len(cache.units)
    every = [(layer, expert) for expert in range(16) for layer in range(layers)]
    follower, missed, turns = make_follower(cache, np.ones((layers, 16), bool), every), 0, 200
    for count in (*(1,) * answers, tokens) * turns:
        before = follower.counts.admitted
        follower.observe(rng.random((count, layers, 16)).argsort(2)[:, :, :2])
        missed += (follower.counts.admitted - before) * (count == tokens)
    return missed / turns


def test_without_a_record_a_step_of_several_texts_brings_an_expert_once() -> None:
    (pool,) = list_pools(SPEC, None, replace(WORKLOAD, sequences=8))
    cache = pool.promise(pool.make_cache(48, "demand", 0), np.ones((4, 16), bool))
    missed = 4 * used_experts(range(16), 2, 16, 8, (), cache.hits_by_place)
    assert cache.admitted == pytest.approx(missed / 8, rel=0.02)


def test_slots_promise_what_the_widest_step_that_uses_them_finds() -> None:
    """Of 64 texts some decode by slots when few are left: then these find something, though all together would not."""
    spec = ExpertsFile(replace(RULE, count=128, d_expert=32), layers=4, d_model=64).spec
    (pool,) = list_pools(spec, None, replace(WORKLOAD, sequences=64))
    (cache,) = share_out(spec, (pool,), 80 * pool.slot_nbytes)
    assert cache.slots == 80 and cache.width == cache.tokens == 32
    followed = replace(spec, caches=(cache,))
    for tokens in (1, 8, 32):
        (found,) = set(followed.hits_of(cache.units[0], tokens, tokens))
        assert found == pytest.approx(cache.find_alike(2, 128, tokens), rel=0.03)
    assert not followed.hits_of(cache.units[0], 64, 64)


@pytest.mark.quick("48-cpu-32")
@pytest.mark.parametrize(("mib", "kind", "followed"), [(24, "cuda", 16), (48, "cpu", 32)])
def test_short_prompts_read_what_slots_lack_of_the_experts_that_they_use(
    monkeypatch: pytest.MonkeyPatch, mib: int, kind: str, followed: int
) -> None:
    """On the CPU prompts of this model are short ones and nothing else: a round gains too."""
    spec = SMALL if kind == "cuda" else SPEC

    def plan() -> Variant:
        return plan_both(make_machine(mib * MIB), mib)[1] if kind == "cpu" else plan_anew(mib, 14, spec, 1e9, 40)[1]

    found = plan()
    (rank,) = found.ranks
    (cache,) = rank.caches
    assert cache.tokens == followed
    short = next(tier for tier in rank.tiers if tier.tokens == 16)
    steps = emit_steps(replace(spec, caches=rank.caches), short, StepShape(16, 0, 1))
    reads = sum(step.reads for step in steps.body if isinstance(step, Compute) and step.source == DEMAND)
    missed = replay_alike(cache, 16, answers=4)
    assert reads == pytest.approx(missed * cache.slot_bytes, rel=0.08)
    for module in ("plan_disk_slots", "plan_host_slots"):
        monkeypatch.setattr(f"pshard.planner.routing.{module}.list_widths", lambda workload: ())
    narrow = plan()
    assert narrow.ranks[0].caches[0].tokens == FOLLOW_TOKENS
    assert tier_seconds(found)[16] < 0.95 * tier_seconds(narrow)[16]
    assert round_seconds(found) <= round_seconds(narrow)
    if kind == "cuda":
        assert {n: s for n, s in tier_seconds(found).items() if n != 16}.items() <= tier_seconds(narrow).items()


def test_short_prompts_read_whole_layers_where_these_come_sooner() -> None:
    """Of 16 experts 16 tokens use nearly all, and whole layers are read ahead."""
    _, found = plan_beside_gpu(20, 24, prompt=32)
    (rank,) = found.ranks
    assert rank.caches[0].tokens == FOLLOW_TOKENS and rank.tiers[1].tokens == 16
    predictor = Predictor((SMALL,), make_machine(20 * MIB, kind="cuda"), found)
    fewer = [predictor.prefill(tokens) for tokens in (2, 8, 9)]  # which run under the same tier
    assert fewer == pytest.approx([tier_seconds(found)[16]] * 3, rel=0.05)


@pytest.mark.slow
def test_slots_too_few_for_a_layer_of_short_prompts_serve_decoding() -> None:
    spec = ExpertsFile(replace(RULE, count=64, d_expert=64), layers=4, d_model=128).spec
    (cache,) = plan_beside_gpu(3, 8, spec)[1].ranks[0].caches
    assert cache.tokens == FOLLOW_TOKENS
    assert least_slots(spec, cache) <= cache.slots < least_slots(spec, replace(cache, tokens=16))


@given(st.lists(st.tuples(st.floats(1.0, 2.0), st.floats(0.1, 9.0)), min_size=1, max_size=6))
def test_of_rounds_that_take_about_as_long_the_likely_shortest_is_chosen(rounds: list[tuple[float, float]]) -> None:
    chosen = prefer_slots(rounds, itemgetter(0), itemgetter(1))
    least = min(seconds for seconds, _ in rounds)
    assert chosen[0] <= ALIKE * least
    assert not any(seconds <= ALIKE * least and likely < chosen[1] for seconds, likely in rounds)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_without_a_record_slots_are_preferred_to_whole_layers_that_are_as_good(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whole layers are at most a little better if all experts are used alike, and much worse if they are not."""

    def plan() -> Variant:
        return plan_both(make_machine(46 * MIB), 46)[1] if kind == "cpu" else plan_anew(24, 14, SMALL, 1e9, 40)[1]

    preferred = plan()
    monkeypatch.setattr("pshard.planner.routing.prefer_slots.ALIKE", 1.0)
    by_the_floor = plan()
    assert round_seconds(preferred) <= ALIKE * round_seconds(by_the_floor)
    assert preferred.ranks[0].caches[0].slots > by_the_floor.ranks[0].caches[0].slots


def test_what_slots_likely_find_counts_where_steps_have_one_token() -> None:
    profile = make_machine(36 * MIB)
    _, found = plan_both(profile, 36)
    tables, tiers = find_tables(profile, found.correction), tuple(tier.tokens for tier in found.ranks[0].tiers)

    def price(caches: tuple[ExpertCache, ...]) -> tuple[RankTask, ...]:
        return price_tiers(hold_slots(SPEC, (caches,)), tables, found.workload, tiers)

    assert likely_seconds(found, price) < 0.95 * round_seconds(found)
    caches = tuple(replace(cache, width=8) for cache in found.ranks[0].caches)
    wide = replace(found, ranks=(replace(found.ranks[0], caches=caches),))
    assert likely_seconds(wide, price) == round_seconds(wide)


def test_prompts_read_of_layers_with_slots_what_these_lack() -> None:
    rate, latency = 1e9, 1e-4
    _, found = plan_beside_gpu(24, rate=rate)
    (rank,) = found.ranks
    (cache,), prompt = rank.caches, rank.tiers[-1]
    far = [unit for unit in SMALL.units if prompt.placement(unit.name).where == "disk"]
    assert set(cache.units) <= {unit.name for unit in far} and cache.slots > 16
    lacks = {name: 1 - cache.slots / (16 * len(cache.units)) for name in cache.units}
    seconds = sum(latency + unit.packed_nbytes * lacks.get(unit.name, 1.0) / rate for unit in far)
    assert dict(prompt.prediction.busy)[READ.name] == pytest.approx(seconds, rel=0.001)
    profile = make_machine(24 * MIB, rate, "cuda")
    (sheet,) = time_steps(replace(SMALL, caches=rank.caches), profile, found, prompt.tokens)
    reads = sum(step.nbytes for step in sheet.steps if step.lane == READ.name)
    assert reads == pytest.approx(sum(unit.packed_nbytes * lacks.get(unit.name, 1.0) for unit in far), rel=0.001)
    benched = Predictor((SMALL,), profile, found).prefill(WORKLOAD.prompt)
    assert benched == pytest.approx(first_token_seconds(found), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_table_whose_rows_can_be_read_makes_room_for_experts(kind: str) -> None:
    """Rows take a tenth of a millisecond a token; what slots lack takes tens."""
    table = replace(SMALL.units[0].tensors[0], shape=(20480, 128))  # 10 MiB
    spec = replace(SMALL, units=(replace(SMALL.units[0], tensors=(table,)), *SMALL.units[1:]))
    ram, budget = (40, 30) if kind == "cpu" else (30, TORCH_RESERVE_MIB + 14)
    slots, rounds = list[int](), list[float]()
    for small in (False, True):
        profile = make_machine(ram * MIB, kind=kind)
        rows = [DiskTiming("drive", True, 4096, depth, 4096, 1e-4 / depth) for depth in (1, 16)]
        profile = replace(profile, disks=(*profile.disks, *rows)) if small else profile
        asked = replace(WORKLOAD, ram_mib=ram, vram_mib=(budget,))
        asked = suggest_budget(asked, spec, profile) if kind == "cpu" else asked
        found = plan_slots(spec, profile, asked, plan_variant(spec, profile, asked), None)
        check_variant((spec,), found, kind, usable_bytes(profile, 1))
        assert (found.ranks[0].tiers[0].placement("embedding").where == "demand") == small
        slots.append(sum(cache.slots for cache in found.ranks[0].caches))
        rounds.append(round_seconds(found))
    assert slots[1] > 0 and rounds[1] < 0.95 * rounds[0]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "least"), [("ram", 0.8), ("rate", 0.8), ("vram", 0.9)])
def test_more_memory_or_a_faster_disk_makes_no_plan_beside_a_gpu_slower(change: str, least: float) -> None:
    plans: dict[str, Callable[[int], tuple[Variant, Variant]]] = {
        "ram": lambda n: plan_beside_gpu((16, 20, 30)[n]),
        "rate": lambda n: plan_beside_gpu(20, rate=1e9 * 2**n),
        "vram": lambda n: plan_beside_gpu(20, 14 + 8 * n),
    }
    rounds = [round_seconds(plans[change](n)[1]) for n in range(3)]
    assert all(more <= less * 1.001 for less, more in pairwise(rounds)) and rounds[-1] < least * rounds[0]


@pytest.mark.quick("1", "11")
@pytest.mark.parametrize("drafts", [1, 3, 11])
def test_steps_that_verify_read_what_replays_of_such_steps_miss(drafts: int) -> None:
    """Rows of one text follow each other and share experts, of which each is read once. Also of more rows than others'
    steps use slots for."""
    record, rows = make_drifting_record(1500, layers=4), drafts + 1
    spec, profile = order_experts(SPEC, measure_popularity(record)), make_machine(36 * MIB)
    work = replace(WORKLOAD, ram_mib=36, drafting=Drafting("lookup", drafts), acceptance=Acceptance((0.8,)))
    work = suggest_budget(work, spec, profile)
    found = plan_slots(spec, profile, work, plan_variant(spec, profile, work), record)
    (cache,) = found.ranks[0].caches
    (timed,) = time_steps(spec, profile, found, rows)
    read = sum(step.nbytes for step in timed.steps if step.source == DEMAND)
    follower = make_follower(cache, find_eligible(spec, cache, found.ranks[0]))
    own, steps, before = record.of_layers([spec.unit(name).layer for name in cache.units]), record.tokens // rows, 0
    for step in range(steps):
        before = follower.counts.admitted if step == steps // 2 else before
        follower.observe(own.ids[step * rows : (step + 1) * rows])
    missed = (follower.counts.admitted - before) / (steps - steps // 2)
    assert read == pytest.approx(missed * cache.slot_bytes, rel=0.15)  # priced as if each row missed by itself
    apart = emit_steps(replace(spec, caches=(cache,)), found.ranks[0].covering(rows), StepShape(rows, 0, rows))
    unrelated = sum(step.reads for step in apart.body if isinstance(step, Compute))
    assert unrelated > (1.05 if drafts == 1 else 1.25) * read


def test_a_record_promises_what_a_replay_finds() -> None:
    record, profile = make_drifting_record(200, layers=4), make_machine(36 * MIB)
    alike, recorded = plan_both(profile, 36)[1], plan_both(profile, 36, record)[1]
    (cache,) = recorded.ranks[0].caches
    assert cache.found > alike.ranks[0].caches[0].found + 0.1
    assert round_seconds(recorded) < round_seconds(alike)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((34, 40, 70), marks=pytest.mark.stand_in),
        pytest.param((28, 32, 34, 36, 40, 44, 48, 52, 56, 60, 70), marks=pytest.mark.slow),
    ],
)
def test_more_ram_makes_no_plan_slower(sizes: tuple[int, ...]) -> None:
    rounds = [round_seconds(plan_both(make_machine(mib * MIB), mib)[1]) for mib in sizes]
    assert all(more <= less * 1.001 for less, more in pairwise(rounds)) and rounds[-1] < 0.2 * rounds[0]


def test_experts_that_no_file_holds_as_they_are_used_stay_in_memory() -> None:
    held = next(unit.name for unit in SPEC.units if unit.kind.parts)
    spec = replace(SPEC, units=tuple(replace(u, stays_in_memory=u.name == held) for u in SPEC.units))
    (rank,) = plan_both(make_machine(46 * MIB), 46, spec=spec, budget=32)[1].ranks
    assert len(rank.caches[0].units) == 3 and held not in rank.beyond_host


def test_what_returns_from_disk_to_all_tiers_is_pinned_before_what_decoding_lacks() -> None:
    """Attention came back to every tier, behind an embedding that prompts alone pinned."""
    spec = ExpertsFile(replace(RULE, count=64, d_expert=64), layers=4, d_model=256).spec
    whole, found = plan_both(make_machine(32 * MIB), 32, spec=spec)
    pinned = [[p.unit for p in v.ranks[0].tiers[0].placements if p.in_arena] for v in (whole, found)]
    assert found.ranks[0].caches and "embedding" not in pinned[1] and set(pinned[1]) > set(pinned[0])


def test_slots_below_what_a_token_uses_are_not_planned() -> None:
    rule = replace(RULE, used=8)
    spec = ExpertsFile(rule, layers=4, d_model=256).spec
    profile = make_machine(30 * MIB)
    asked = suggest_budget(replace(WORKLOAD, ram_mib=30), spec, profile)
    whole = plan_variant(spec, profile, asked)
    assert not plan_slots(spec, profile, asked, whole, None).ranks[0].caches


@pytest.mark.slow
def test_slots_below_what_a_token_uses_are_not_planned_beside_a_gpu() -> None:
    spec = ExpertsFile(replace(RULE, used=12), layers=8, d_model=128).spec
    assert not plan_beside_gpu(16, spec=spec)[1].ranks[0].caches


@pytest.mark.slow
def test_layers_come_in_waves_where_slots_for_whole_ones_take_room_from_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = plan_beside_gpu(18, 28, prompt=32)
    last = found.ranks[0].tiers[-1]
    assert last.waves > 1 and last.buffers.slots * last.buffers.slot_bytes < 6 * MIB  # of a layer
    assert found.ranks[0].tiers[0].waves == 1  # answers find their experts in slots
    monkeypatch.setattr("pshard.planner.routing.plan_host_slots.WAVES", ())
    _, whole = plan_anew(18, 28, SMALL, 1e9, 32)
    assert first_token_seconds(found) < 0.75 * first_token_seconds(whole)
    assert round_seconds(found) < 0.95 * round_seconds(whole)


def draft_answers() -> tuple[Room, tuple[TierPlan, ...]]:
    """Tiers beside a GPU whose experts are all on disk, and all else in VRAM with as many layers of them as fit."""
    asked = replace(WORKLOAD, ram_mib=20, vram_mib=(TORCH_RESERVE_MIB + 13,))
    (task,) = prepare_ranks(SMALL, make_machine(20 * MIB, kind="cuda"), asked)
    cells, tiers = frozenset(ATTENTION), list[TierPlan]()
    for tokens, far in ((1, "demand"), (16, "disk"), (32, "disk")):
        where = {unit.name: far if unit.name in LAYERS else "pinned" for unit in SMALL.units} | {"embedding": "cpu"}
        tiers.append(draft_tier(task.room, tokens, where, cells, 2, waves=8))
    return task.room, fill_arena(task.room, tiers, LAYERS)


@pytest.mark.parametrize(
    ("lacks", "away", "kind"),
    [
        *((1, 3, "router"), (6 * ROUTER, 8, "router"), (6 * ROUTER + 1, 3, "attention"), (SIZE, 3, "attention")),
        *((SIZE + 1, 4, "attention"), (6 * SIZE, 8, "attention"), (6 * SIZE + 1, 0, "")),
    ],
)
def test_as_little_as_makes_room_gives_way_to_a_layer_of_experts(lacks: int, away: int, kind: str) -> None:
    """Two slots for what is streamed instead take room too. lacks: bytes that the layer lacks."""
    room, tiers = draft_answers()
    arena = tiers[0].buffers.total + SMALL.unit(LAYERS[0]).packed_nbytes - lacks
    crowded = crowd_layer(replace(room, arena=arena), tiers, LAYERS, 1, 2)
    if not away:
        assert crowded is None
        return
    assert crowded is not None and all(tier.buffers.total <= arena for tier in crowded)
    pins = [{place.unit for place in tier.placements if place.in_arena} for tier in crowded]
    before = {place.unit for place in tiers[0].placements if place.in_arena}
    assert pins[0] >= pins[1] >= pins[2] and len(pins[0] - before) == 1 and pins[0] - before < set(LAYERS)
    for tier in crowded:
        streamed = [place for place in tier.placements if place.where == "streamed"]
        assert len(streamed) == away and {place.unit for place in streamed} <= before
        assert {SMALL.unit(place.unit).kind.name for place in streamed} == {kind}
        assert all(place.has_state_in_vram for place in streamed if kind == "attention")


@pytest.mark.slow
def test_answers_have_one_more_layer_of_experts_in_vram_where_little_lacks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention of some layers comes over the link meanwhile, which idles while experts are read."""
    _, found = plan_beside_gpu(20, 19, prompt=32)
    monkeypatch.setattr("pshard.planner.routing.plan_host_slots.crowd_layer", lambda *given: None)
    _, roomy = plan_anew(20, 19, SMALL, 1e9, 32)
    in_vram = [sum(v.ranks[0].tiers[0].placement(name).in_arena for name in LAYERS) for v in (found, roomy)]
    assert in_vram[0] == in_vram[1] + 1
    assert any(p.where == "streamed" for p in found.ranks[0].tiers[0].placements)
    assert round_seconds(found) < 0.85 * round_seconds(roomy)


@pytest.mark.quick("30")
@pytest.mark.parametrize("ram", [16, 30])
def test_what_one_tier_alone_has_in_vram_leaves_it_beside_slots(ram: int) -> None:
    """The embedding was pinned for prompts of 16 tokens alone."""
    plan_beside_gpu(ram)


def test_a_model_that_vram_and_memory_nearly_hold_is_planned() -> None:
    """With the arena filled nothing was left that could live on disk, and the search asked for its sizes."""
    spec = ExpertsFile(Experts(count=16, used=2, d_expert=64), layers=6, d_model=128).spec
    _, found = plan_beside_gpu(7, 6, spec)
    assert not found.ranks[0].beyond_host
