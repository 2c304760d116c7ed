"""The simulator against sums that can be done by hand, and the planner against brute force over unit placements."""

import itertools
import random
from dataclasses import replace

import pytest
from planner_cases import DESKTOP, OWN, make_model, simulate_tier

from pshard.batch import Batch
from pshard.cuts.rank_parts import cut_ranks
from pshard.machine import Contention, ElementwiseTiming
from pshard.model_config import Experts
from pshard.planner.make_plan import plan_variant
from pshard.planner.prepare_ranks import prepare_ranks
from pshard.planner.price.datasheet import Rates, profile_from_datasheet
from pshard.planner.price.draft import draft_tier, predict_tier, rank_room, simulated_seconds, tier_steps
from pshard.planner.price.profile_tables import Tables
from pshard.planner.price.simulate import simulate
from pshard.planner.price.tier_costs import tier_costs
from pshard.planner.price.tier_loads import TierLoad, raise_weights, tier_loads
from pshard.planner.search.candidates import whole_tier
from pshard.planner.search.round_times import switch_seconds
from pshard.runtime.walks.program import Stretch, compile_steps
from pshard.steps.emit import emit_steps
from pshard.steps.graph_runs import LAUNCH_BOUND
from pshard.steps.move import Move, Weights
from pshard.steps.step import StepShape
from pshard.times.curves import interpolate
from pshard.units.ffn import FFN
from pshard.workload import Split, Workload

DECODE = Workload((4000,), context=512, max_ubatch=1, prompt=256, generated=64)


def setting(spec, rates: Rates = DESKTOP, workload: Workload = DECODE, contention: bool = False):
    """Room and decode costs; without contention times add up exactly."""
    profile = profile_from_datasheet(rates)
    if not contention:
        profile = replace(profile, contention=Contention())
    tables = Tables(profile)
    room = rank_room(spec, workload, workload.vram_mib[0], tables.kind, tables.act_bytes)
    return room, tier_costs(spec, tables, tier_loads(workload)[0], workload)


def place(room, slots: int, **kinds: str):
    """A tier with one placement per kind of unit, KV in VRAM where the accelerator computes."""
    where = {u.name: kinds.get(u.kind.name, "pinned") for u in room.spec.units}
    where["embedding"] = "cpu"
    kv = frozenset(u.name for u in room.spec.units if u.kind.state and where[u.name] != "cpu")
    return draft_tier(room, 1, where, kv, slots)


def test_interpolation_is_exact_on_power_laws_flat_below_and_proportional_above():
    curve = ((1.0, 2.0), (4.0, 4.0), (64.0, 64.0))
    assert interpolate(curve, 0.5) == 2.0
    assert interpolate(curve, 2.0) == pytest.approx(2 * 2**0.5)
    assert interpolate(curve, 16.0) == pytest.approx(16.0)
    assert interpolate(curve, 640.0) == pytest.approx(640.0)


def test_pinned_units_take_the_sum_of_their_times():
    room, costs = setting(make_model(layers=3))
    result = simulate_tier(room, whole_tier(room, 1), costs)
    units = sum(max(c.acc, c.issue) for name, c in costs.units.items() if name != "embedding")
    logits, hidden = room.spec.config.vocab * 4, room.spec.config.d_model * 4
    ends = costs.handoff("acc", hidden) + costs.handoff("cpu", logits)
    assert result.seconds == pytest.approx(units + costs.units["embedding"].cpu + ends)
    assert result.busy["link"] == 0


def test_units_on_the_cpu_take_turns_with_the_accelerator():
    room, costs = setting(make_model(layers=3))
    result = simulate_tier(room, place(room, 0, ffn="cpu"), costs)
    acc = sum(c.acc for name, c in costs.units.items() if "attention" in name or name == "output")
    cpu = sum(c.cpu for name, c in costs.units.items() if "ffn" in name or name == "embedding")
    hidden = room.spec.config.d_model * 4
    trips = 4 * costs.handoff("acc", hidden) + 3 * costs.handoff("cpu", hidden)
    last = costs.handoff("cpu", room.spec.config.vocab * 4)
    assert result.seconds == pytest.approx(acc + cpu + trips + last)


def test_streaming_on_a_slow_link_takes_the_link_time():
    room, costs = setting(make_model(layers=6), replace(DESKTOP, link=2e9))
    result = simulate_tier(room, place(room, 2, ffn="streamed"), costs)
    copies = sum(costs.units[f"ffn.{i}"].link for i in range(6))
    assert result.seconds == pytest.approx(copies, rel=1e-3)
    assert result.busy["link"] == pytest.approx(result.seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("tokens", "sequences", "streamed", "launched"),
    [
        (128, 1, 0, 0),  # one graph
        (128, 1, 1, 0),  # three: the streamed FFN waits for its copy, and what follows begins another
        (128, 2, 0, 41),  # of two sequences nothing is captured
        (64, 1, 1, 0),  # everything is
        (2 * LAUNCH_BOUND, 1, 1, 0),  # nothing is, and the kernels were timed with their launches
    ],
)
def test_launches_are_paid_where_no_graph_holds_them(tokens, sequences, streamed, launched):
    spec, each = make_model(layers=20), 0.5
    workload = Workload((8000,), context=8192, sequences=sequences, max_ubatch=tokens, prompt=tokens // sequences)
    profile = replace(profile_from_datasheet(DESKTOP), contention=Contention())
    seconds = []
    for row in ((), (ElementwiseTiming("acc", "launch", 1, 1, each),)):
        tables = Tables(replace(profile, elementwise=(*profile.elementwise, *row)))
        room = rank_room(spec, workload, workload.vram_mib[0], tables.kind, tables.act_bytes)
        load = TierLoad(Batch.even(tokens, sequences))
        where = {u.name: "pinned" for u in spec.units} | {"embedding": "cpu"}
        where |= {"ffn.5": "streamed"} if streamed else {}
        kv = frozenset(u.name for u in spec.units if u.kind.state)
        tier = draft_tier(room, tokens, where, kv, 1 if streamed else 0)
        seconds.append(simulate_tier(room, tier, tier_costs(spec, tables, load, workload)).seconds)
    assert seconds[1] - seconds[0] == pytest.approx(each * launched, abs=0.3 * each)


@pytest.mark.parametrize("on_cpu", [0, 2, 6])
@pytest.mark.parametrize("streamed", [0, 3, 6])
@pytest.mark.parametrize("kv", ["vram", "host"])
def test_the_host_thread_pays_for_every_run_that_no_hand_off_begins(streamed, kv, on_cpu):
    spec, each = make_model(layers=6), 0.5
    workload = Workload((8000,), context=8192)
    where = {u.name: "pinned" for u in spec.units} | {"embedding": "cpu"}
    where |= {f"attention.{i}": "streamed" for i in range(streamed)} | {f"ffn.{i}": "cpu" for i in range(on_cpu)}
    in_vram = frozenset(u.name for u in spec.units if u.kind.state and kv == "vram")
    seconds = []
    for row in ((), (ElementwiseTiming("acc", "run", 1, 1, each),)):
        profile = replace(profile_from_datasheet(DESKTOP), contention=Contention())
        tables = Tables(replace(profile, elementwise=(*profile.elementwise, *row)))
        room = rank_room(spec, workload, workload.vram_mib[0], tables.kind, tables.act_bytes)
        tier = draft_tier(room, 1, where, in_vram, 2 if streamed else 0)
        costs = tier_costs(spec, tables, TierLoad(Batch.even(1, 1, 100)), workload)
        seconds.append(simulate_tier(room, tier, costs).seconds)
    body = emit_steps(spec, tier, StepShape(1, 100, 1)).body
    graphs = [item for item in compile_steps(body).body if isinstance(item, Stretch)]
    runs = sum(not graph.brings for graph in graphs)
    assert seconds[1] - seconds[0] == pytest.approx(each * runs, abs=0.3 * each)


@pytest.mark.parametrize(("link", "paid"), [(25e9, 1.0), (2e7, 0.0)])
def test_the_accelerator_waits_for_the_hosts_turn_and_copies_do_not(link, paid):
    spec, turn, seconds = make_model(layers=6), 1e-3, []
    profile = replace(profile_from_datasheet(replace(DESKTOP, link=link)), contention=Contention())
    for row in ((), (ElementwiseTiming("acc", "turn", 1, 1, turn),)):
        tables = Tables(replace(profile, elementwise=(*profile.elementwise, *row)))
        room = rank_room(spec, DECODE, DECODE.vram_mib[0], tables.kind, tables.act_bytes)
        costs = tier_costs(spec, tables, tier_loads(DECODE)[0], DECODE)
        seconds.append(simulate_tier(room, place(room, 2, ffn="pinned" if paid else "streamed"), costs).seconds)
    assert seconds[1] - seconds[0] == pytest.approx(paid * turn, abs=1e-9)


def test_ranks_that_sum_wait_for_the_last_ones_turn_and_later_layers_for_none():
    spec = make_model(layers=4)
    profile = profile_from_datasheet(DESKTOP)
    tables = Tables(replace(profile, elementwise=(*profile.elementwise, ElementwiseTiming("acc", "turn", 1, 1, 1e-3))))
    turns = {}
    for mode in ("tensor", "layer"):
        work, split = replace(DECODE, split_mode=mode), Split(mode, (1.0, 1.0))
        parts = cut_ranks(spec, split)
        turns[mode] = [tier_costs(part, tables, tier_loads(work)[0], work, 2).turn for part in parts]
    assert turns == {"tensor": [2e-3, 2e-3], "layer": [1e-3, 0.0]}


def test_one_slot_cannot_overlap_copy_and_compute_of_neighbours():
    room, costs = setting(make_model(layers=6))
    one, two = (simulate_tier(room, place(room, n, ffn="streamed"), costs).seconds for n in (1, 2))
    assert one > two
    assert one >= sum(costs.units[f"ffn.{i}"].link + costs.units[f"ffn.{i}"].acc for i in range(6)) * (1 - 1e-9)


def test_contention_slows_both_the_copy_and_the_cpu():
    spec = make_model(layers=6)
    where = {"attention": "streamed", "ffn": "cpu"}
    free, shared = (setting(spec, contention=c) for c in (False, True))
    times = [simulate_tier(room, place(room, 2, **where), costs) for room, costs in (free, shared)]
    assert times[1].busy["cpu"] > times[0].busy["cpu"]
    assert times[1].seconds > times[0].seconds


def test_events_of_a_lane_never_overlap_and_copies_run_into_the_next_micro_batch():
    room, costs = setting(make_model(layers=6), contention=True)
    tier = place(room, 2, attention="streamed", ffn="streamed")
    result = simulate_tier(room, tier, costs)
    for lane in ("acc", "cpu", "link"):
        events = sorted((e.start, e.end) for e in result.events if e.lane == lane)
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(events))
    moved = sum(s.nbytes for s in tier_steps(room, tier, costs).body if isinstance(s, Move) and s.brings(Weights))
    assert moved == sum(u.packed_nbytes for u in room.spec.units if u.ports.adds)


def test_loads_count_full_micro_batches_and_a_tail():
    workload = Workload((1,), context=4096, sequences=2, max_ubatch=512, prompt=1300, generated=100)
    loads = {load.tokens: load for load in tier_loads(workload)}
    assert loads[2].weight == 100
    assert loads[512].weight == 5  # 2600 tokens: five full ones
    assert loads[128].weight == 1  # and a tail of 40
    assert loads[2].past == 1350 and loads[2].is_decode
    assert loads[512] == TierLoad(Batch.even(512, 1, 512), 5)
    raised = {load.tokens: load for load in raise_weights(tuple(loads.values()), [0.1] * len(loads))}
    assert raised[2] == loads[2] and raised[16].weight == pytest.approx(0.02 * 106)


ATTENTION = (("pinned", True), ("pinned", False), ("streamed", True), ("streamed", False), ("cpu", False))
OTHER = (("pinned", False), ("streamed", False), ("cpu", False))
EMBEDDING = (("pinned", False), ("cpu", False))


def best_by_brute_force(task) -> float:
    """Seconds of the fastest decode tier over every placement of every unit and every number of slots."""
    room, costs = task.room, task.costs[0]
    options = {"attention": ATTENTION, "embedding": EMBEDDING}
    best = float("inf")
    for combo in itertools.product(*(options.get(u.kind.name, OTHER) for u in room.spec.units)):
        where = {u.name: place for u, (place, _) in zip(room.spec.units, combo)}
        kv = frozenset(u.name for u, (_, vram) in zip(room.spec.units, combo) if vram)
        streamed = sum(place == "streamed" for place in where.values())
        for slots in range(1, min(4, streamed) + 1) if streamed else (0,):
            tier = draft_tier(room, 1, where, kv, slots)
            if tier.buffers.total <= room.arena:
                best = min(best, simulate_tier(room, tier, costs).seconds)
    return best


@pytest.mark.quick("3000000000.0-4")
@pytest.mark.usefixtures("whole_search")
@pytest.mark.parametrize("mib", [4, 10, 16])
@pytest.mark.parametrize("link", [3e9, 25e9])
def test_plans_of_small_models_equal_brute_force(mib, link):
    spec = make_model(layers=2, d_model=1024, d_ffn=4096, vocab=4096)
    profile = profile_from_datasheet(replace(DESKTOP, link=link))
    workload = replace(DECODE, vram_mib=(OWN + mib,))
    planned = plan_variant(spec, profile, workload).ranks[0].tiers[0].prediction
    best = best_by_brute_force(prepare_ranks(spec, profile, workload)[0])
    assert planned.seconds <= best * 1.01
    assert planned.bound_seconds <= best * (1 + 1e-9)


def test_a_round_switches_between_the_tiers_that_it_enters():
    spec = make_model(layers=6)
    tables = Tables(profile_from_datasheet(DESKTOP))
    for tokens, moved in ((16, False), (256, True)):
        workload = replace(DECODE, max_ubatch=256, prompt=tokens, context=512)
        room = rank_room(spec, workload, workload.vram_mib[0], tables.kind, tables.act_bytes)
        loads = tier_loads(workload)
        loads = raise_weights(
            loads, [float(load.tokens) for load in loads]
        )  # a prompt takes as long as that many answers
        costs = tuple(tier_costs(spec, tables, load, workload) for load in loads)
        streamed = {u.name: "streamed" if u.kind is FFN else "pinned" for u in spec.units} | {"embedding": "cpu"}
        pinned = dict.fromkeys(streamed, "pinned") | {"embedding": "cpu"}
        kv = frozenset(u.name for u in spec.units if u.kind.state)
        tiers = tuple(draft_tier(room, n, streamed if n == 256 else pinned, kv, 2) for n in workload.tiers())
        ffns = sum(u.packed_nbytes for u in spec.units if u.kind is FFN)
        assert switch_seconds(room, tiers, costs) == pytest.approx(moved * ffns / tables.link_rate)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("experts", [None, Experts(8, 2, 512)])
def test_a_tier_is_timed_by_few_names_as_by_the_steps_of_its_own(kind, experts):
    spec = make_model(layers=7, experts=experts)
    room, costs = setting(spec)
    if kind == "cpu":
        (gpu,) = costs.tables.profile.accelerators
        profile = replace(costs.tables.profile, accelerators=(replace(gpu, kind="cpu"),))
        costs = tier_costs(spec, Tables(profile), costs.load, DECODE)
    draw = random.Random(7)
    for _ in range(60):
        where, kv = {}, set()
        for unit in spec.units:
            places = [side for side, _ in unit.kind.places if side != "cpu" or kind == "cuda" or unit.kind.is_looked_up]
            where[unit.name] = draw.choice(sorted(set(places)))
            if unit.kind.state and where[unit.name] != "cpu" and draw.random() < 0.5:
                kv.add(unit.name)
        tier = draft_tier(room, 1, where, frozenset(kv), draw.randint(1, 3))
        steps = tier_steps(room, tier, costs)
        own, predicted = simulate(steps, costs), predict_tier(room, tier, costs, 0.0)
        assert simulated_seconds(room, tier, costs) == own.seconds == predicted.seconds
        assert {lane: dict(predicted.busy)[lane] for lane in own.busy} == own.busy
        assert predicted.link_bytes == steps.link_bytes


def test_longer_models_have_no_more_steps_to_price_in_a_search():
    priced = []
    for layers in (6, 24):
        room, costs = setting(make_model(layers=layers))
        for ffn in ("pinned", "streamed", "cpu"):
            simulated_seconds(room, place(room, 2, ffn=ffn), costs)
        priced.append(len(costs.acts))
    assert priced[0] == priced[1]
