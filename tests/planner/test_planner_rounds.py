"""All tiers together: the round of a small model against an enumeration that shares no code with the planner."""

import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from planner_cases import DESKTOP, OWN, make_model

from pshard.plan import TierPlan
from pshard.planner.make_plan import place_ranks
from pshard.planner.prepare_ranks import prepare_ranks
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.draft import draft_tier, simulated_seconds
from pshard.planner.rank_task import RankTask
from pshard.planner.search.candidates import Candidate
from pshard.planner.search.small.moves import Moves, State
from pshard.planner.search.small.refine_units import refine_units
from pshard.planner.search.small.space import Space
from pshard.planner.search.small.starts import list_starts
from pshard.planner.search.small.walk import Walk
from pshard.units.divide_unit import Piece, arena_portion
from pshard.workload import Workload

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from joint_gaps import WITHIN, measure_case


@pytest.mark.quick("8")
@pytest.mark.parametrize("seed", [8, 21, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4, 13, 143))])
@pytest.mark.usefixtures("whole_search")
def test_no_mix_of_tiers_beats_the_plan_of_a_small_model_by_more_than_a_percent(seed: int) -> None:
    """These were 1.02, 2.4, 10.3, 2.2, 1.6 and 3.8% over. The oracle's clock says what the simulator says."""
    case = measure_case(seed, 60_000 if seed == 4 else 20_000)
    assert case and case["over"] is not None and len(case["tiers"]) > 1
    assert case["over"] <= WITHIN
    assert case["clock_off"] < 1e-9


def place(mib: int, layers: int = 6) -> tuple[RankTask, Candidate]:
    """A plan of a model of a few layers for decoding and prompts, not refined unit by unit."""
    workload = Workload((OWN + mib,), context=512, max_ubatch=16, prompt=256, generated=16)
    (task,) = prepare_ranks(make_model(layers), profile_from_datasheet(DESKTOP), workload)
    return task, place_ranks((task,), 10.0)[0]


def held_pins(task: RankTask, tier: TierPlan) -> set[tuple[str, tuple[Piece, ...]]]:
    """What a tier has in the arena: units, and which bytes of them."""
    portions = {
        unit.name: arena_portion(unit, place.where, place.share)
        for unit, place in zip(task.room.spec.units, tier.placements)
    }
    return {(name, portion.pieces) for name, portion in portions.items() if portion}


def open_space(task: RankTask) -> Space:
    return Space(task.room, task.classes, task.costs, True)


def draft(space: Space, state: State) -> list[TierPlan]:
    """The tiers of a state, whether they fit or not."""
    tiers = []
    for i, (row, slots) in enumerate(zip(state.rows, state.slots)):
        named = [
            (unit.name, *space.tiers[i].all[way].place) for unit, way in zip(space.room.spec.units, row, strict=True)
        ]
        where = {name: at for name, at, _, _ in named}
        kv = frozenset(name for name, _, in_vram, _ in named if in_vram)
        shares = {name: share for name, _, _, share in named if share}
        tiers.append(draft_tier(space.room, space.costs[i].load.tokens, where, kv, slots, shares))
    return tiers


def test_steps_keep_the_tiers_nested_and_within_the_arena() -> None:
    task, found = place(40)
    space, rng = open_space(task), Random(0)
    moves = Moves(space, range(len(space.tiers)), [tier.of_unit for tier in space.tiers])
    state, changed = State(*space.read(found.tiers)), 0
    for _ in range(60):
        steps = [*moves.rank(state, float("inf")), *moves.reorder(state)]
        state = state.put(rng.choice(steps))
        tiers = draft(space, state)
        assert all(tier.buffers.total <= task.room.arena for tier in tiers)
        cells = [{p.unit for p in tier.placements if p.has_state_in_vram} for tier in tiers]
        pins = [held_pins(task, tier) for tier in tiers]
        for one, *others in (cells, pins):
            assert all(one <= other or other <= one for other in others)
        changed += len(steps) > 100
    assert changed > 50


def test_what_the_ways_add_up_to_is_what_a_draft_of_the_tier_takes() -> None:
    """Bytes exactly, and never more seconds: a search leaves out what would not fit, or would take too long."""
    task, _ = place(40)
    space, rng = open_space(task), Random(1)
    for i, (of_tier, cost) in enumerate(zip(space.tiers, task.costs)):
        for _ in range(200):
            row, slots = tuple(rng.choice(of) for of in of_tier.of_unit), rng.randint(1, 4)
            state = State(tuple((0,) * i + (way,) + (0,) * (len(space.tiers) - i - 1) for way in row), (slots,) * 9)
            tier = draft(space, state)[i]
            assert of_tier.count_bytes(row, slots) == tier.buffers.total
            least = of_tier.least_seconds(row, slots)
            assert least <= simulated_seconds(task.room, tier, cost) * (1 + 1e-9)


def test_descending_and_roaming_lead_to_no_slower_states() -> None:
    task, found = place(40)
    space = open_space(task)
    walk = Walk(space, range(len(space.tiers)), [tier.of_unit for tier in space.tiers])
    start = State(*space.read(found.tiers))
    seconds, state = walk.descend(start)
    assert walk.score(state) == seconds < walk.score(start)
    further = walk.roam((seconds, state), 20)
    assert walk.score(further[1]) == further[0] <= seconds


def test_starts_of_a_tier_have_the_ways_that_it_may_go() -> None:
    task, _ = place(40)
    space = open_space(task)
    allowed = [of[1:] for of in space.tiers[0].of_unit]
    states = [state for alike in list_starts(space, 0, allowed) for state in alike]
    assert len(states) > 20
    assert all(way in of for state in states for (way,), of in zip(state.columns, allowed, strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("whole_search")
def test_a_round_is_improved_or_left_as_it_is() -> None:
    task, found = place(14, layers=2)
    better = refine_units(task.room, task.classes, task.costs, found, True)
    assert better.total < found.total
    again = refine_units(task.room, task.classes, task.costs, better, True)
    assert again.total <= better.total
    assert again is better or again.tiers != better.tiers


@pytest.mark.slow
@pytest.mark.usefixtures("whole_search")
def test_roaming_finds_a_faster_round_than_descents_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    task, found = place(18, layers=3)
    roamed = refine_units(task.room, task.classes, task.costs, found, True)
    monkeypatch.setattr(Walk, "roam", lambda walk, start, steps: start)
    descended = refine_units(task.room, task.classes, task.costs, found, True)
    assert roamed.total < 0.985 * descended.total < found.total


@pytest.mark.slow
@pytest.mark.usefixtures("whole_search")
def test_ranks_with_layers_of_their_own_are_searched_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has few units; when each was searched like a small model, planning over 4 ranks took half a minute."""
    spaces: list[Space] = []

    class Counted(Space):
        def __init__(self, *of: Any) -> None:
            super().__init__(*of)
            spaces.append(self)

    monkeypatch.setattr("pshard.planner.search.small.refine_units.Space", Counted)

    def count(layers: int, budgets: tuple[int, ...], mode: str) -> int:
        spaces.clear()
        load = Workload(budgets, context=256, prompt=128, generated=32, max_ubatch=16, split_mode=mode)
        spec = make_model(layers=layers, d_model=256, heads=2, d_ffn=512)
        tasks = prepare_ranks(spec, profile_from_datasheet(DESKTOP), load)
        for task, found in zip(tasks, place_ranks(tasks, 10.0)):
            refine_units(task.room, task.classes, task.costs, found, True)
        return sum(space.simulated for space in spaces)

    alone = count(12, (OWN + 6,), "none")
    assert 0 < count(48, tuple(OWN + 8 + rank for rank in range(4)), "layer") < 4 * alone / 2
