"""What the program says of counts is never more than what any placement with these counts takes when simulated."""

import random
from dataclasses import replace

import pytest

from pshard.plan import TierPlan
from pshard.planner.datasheet import profile_from_datasheet
from pshard.planner.draft import Room, draft_tier, tier_seconds
from pshard.planner.ilp import fluid_seconds
from pshard.planner.plan import prepare_ranks
from pshard.planner.problem import count_tier, tier_problem
from pshard.planner.refine import CHOICES
from tests.test_planner_oracle import random_case

ROUNDS = 4


def place_randomly(rng: random.Random, room: Room, tokens: int) -> TierPlan:
    """Any placement of every unit, whether or not it fits; every choice as likely as drawn for this tier."""
    likely = [rng.random() for _ in range(max(map(len, CHOICES.values())))]
    drawn = {u.name: rng.choices(CHOICES[u.kind], likely[: len(CHOICES[u.kind])])[0] for u in room.spec.units}
    where = {name: place for name, (place, _) in drawn.items()}
    kv = frozenset(name for name, (_, vram) in drawn.items() if vram)
    return draft_tier(room, tokens, where, kv, rng.choice((1, 2, 3, 4)))


def settle_slots(room: Room, tier: TierPlan) -> TierPlan:
    """The tier with units pinned that have a staging slot for themselves: these are copied only once."""
    streamed = [p.unit for p in tier.placements if p.where == "streamed"]
    slots = tier.buffers.slots
    stay = {name for i, name in enumerate(streamed) if i < slots and i + slots >= len(streamed)}
    where = {p.unit: "pinned" if p.unit in stay else p.where for p in tier.placements}
    kv = frozenset(p.unit for p in tier.placements if p.kv == "vram")
    return draft_tier(room, tier.tokens, where, kv, max(1, slots - len(stay)))


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("seed", range(12))
def test_no_placement_is_faster_than_its_counts_allow(seed, kind):
    rng = random.Random(seed)
    spec, rates, workload = random_case(seed, rng.choice((1, 2, 3, 5, 8)))
    workload = replace(workload, max_ubatch=256, sequences=rng.choice((1, 3)))
    (task,) = prepare_ranks(spec, profile_from_datasheet(replace(rates, kind=kind)), workload)
    for _ in range(30):
        costs = rng.choice(task.costs)
        tier = place_randomly(rng, task.room, costs.load.tokens)
        counted = settle_slots(task.room, tier)
        problem = tier_problem(task.room, task.classes, costs, max(1, counted.buffers.slots))
        least = fluid_seconds(problem, count_tier(task.classes, counted), relaxed=True)
        assert tier_seconds(task.room, tier, costs, ROUNDS) >= least * (1 - 1e-9)
