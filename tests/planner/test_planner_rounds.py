"""All tiers together: the round of a small model against an enumeration that shares no code with the planner."""

import sys
from pathlib import Path
from random import Random

import pytest
from planner_cases import DESKTOP, OWN, make_model

from pshard.plan import TierPlan
from pshard.planner.make_plan import place_ranks
from pshard.planner.prepare_ranks import prepare_ranks
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.rank_task import RankTask
from pshard.planner.search.anneal_tiers import JointSearch, State, anneal_tiers
from pshard.planner.search.candidates import Candidate
from pshard.planner.search.exact_tiers import perfect_round
from pshard.units.divide_unit import Piece, arena_portion
from pshard.workload import Workload

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from joint_gaps import WITHIN, measure_case


@pytest.mark.parametrize("seed", [8, 21, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 13))])
@pytest.mark.usefixtures("whole_search")
def test_no_mix_of_tiers_beats_the_plan_of_a_small_model_by_more_than_a_percent(seed: int) -> None:
    """These were 1.02, 2.4, 10.3 and 1.6% over. The oracle's clock says what the simulator says."""
    case = measure_case(seed)
    assert case and case["over"] is not None and len(case["tiers"]) > 1
    assert case["over"] <= WITHIN
    assert case["clock_off"] < 1e-9


def place(mib: int) -> tuple[RankTask, Candidate]:
    """A plan of a model of six layers for decoding and prompts, not refined unit by unit."""
    workload = Workload((OWN + mib,), context=512, max_ubatch=16, prompt=256, generated=16)
    (task,) = prepare_ranks(make_model(6), profile_from_datasheet(DESKTOP), workload)
    return task, place_ranks((task,), 10.0)[0]


def held_pins(task: RankTask, tier: TierPlan) -> set[tuple[str, tuple[Piece, ...]]]:
    """What a tier has in the arena: units, and which bytes of them."""
    portions = {
        unit.name: arena_portion(unit, place.where, place.share)
        for unit, place in zip(task.room.spec.units, tier.placements)
    }
    return {(name, portion.pieces) for name, portion in portions.items() if portion}


def test_random_steps_keep_the_tiers_nested_and_within_the_arena() -> None:
    task, found = place(40)
    search, rng = JointSearch(task.room, task.classes, task.costs, True), Random(0)
    state, changed = State.of(found.tiers), 0
    for _ in range(300):
        after = search.step(state, rng)
        if after is None or after == state:
            continue
        state, changed = after, changed + 1
        tiers = search.draft(state)
        assert tiers and all(tier.buffers.total <= task.room.arena for tier in tiers)
        cells = [{p.unit for p in tier.placements if p.kv == "vram"} for tier in tiers]
        pins = [held_pins(task, tier) for tier in tiers]
        for one, other in (cells, pins):
            assert one <= other or other <= one
    assert changed > 50


def test_a_round_is_improved_or_left_as_it_is() -> None:
    task, found = place(40)
    better = anneal_tiers(task.room, task.classes, task.costs, found, True)
    assert better.total <= found.total
    assert anneal_tiers(task.room, task.classes, task.costs[:1], found, True) is found  # nothing to weigh
    assert perfect_round(task.room, task.classes, task.costs, found, True) is found  # too many placements
    assert better is found or better.tiers != found.tiers
