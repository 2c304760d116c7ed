"""What the program says of counts is never more than what any placement with these counts takes when simulated."""

import random
from dataclasses import replace

import pytest
from test_planner_oracle import random_case

from pshard.machine import ElementwiseTiming
from pshard.plan import TierPlan
from pshard.planner.prepare_ranks import prepare_ranks
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.draft import Room, draft_tier, simulated_seconds
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.coefficients import count_tier, may_divide, tier_problem
from pshard.planner.program.fluid import fluid_seconds
from pshard.planner.program.least_times import Floor
from pshard.planner.program.unit_classes import group_units
from pshard.planner.search.climb import SEARCH_ROUNDS
from pshard.planner.search.places import divided_choices, place_choices
from pshard.units.divide_unit import count_shares
from pshard.units.share import Share

ROUNDS = 4


def place_randomly(rng: random.Random, room: Room, costs: TierCosts) -> TierPlan:
    """Any placement of every unit, whether or not it fits; every choice as likely as drawn for this tier."""
    likely = [rng.random() for _ in range(16)]
    drawn = {}
    for cls in group_units(room.spec):
        choices = place_choices(cls.kind) + (divided_choices(cls.shares) if may_divide(costs) else ())
        for unit in cls.units:
            drawn[unit.name] = rng.choices(choices, likely[: len(choices)])[0]
    where = {name: place for name, (place, _, _) in drawn.items()}
    kv = frozenset(name for name, (_, vram, _) in drawn.items() if vram)
    cut = {name: share for name, (_, _, share) in drawn.items() if share}
    return draft_tier(room, costs.load.tokens, where, kv, rng.choice((1, 2, 3, 4)), cut)


def settle_slots(room: Room, tier: TierPlan) -> TierPlan:
    """The tier with units pinned that have a staging slot for themselves: these are copied only once."""
    streamed = [p.unit for p in tier.placements if p.where == "streamed"]
    slots = tier.buffers.slots
    stay = {name for i, name in enumerate(streamed) if i < slots and i + slots >= len(streamed)}
    where = {p.unit: "pinned" if p.unit in stay else p.where for p in tier.placements}
    kv = frozenset(p.unit for p in tier.placements if p.kv == "vram")
    cut = {p.unit: p.share for p in tier.placements if p.share}
    return draft_tier(room, tier.tokens, where, kv, max(1, slots - len(stay)), cut)


def draw_tiers(seed, kind):
    """Thirty random placements of tiers of a random case: (the rank's task, the tier's costs, the tier)."""
    rng = random.Random(seed)
    spec, rates, workload = random_case(seed, rng.choice((1, 2, 3, 5, 8)))
    workload = replace(workload, max_ubatch=256, sequences=rng.choice((1, 3)))
    profile = profile_from_datasheet(replace(rates, kind=kind))
    host = (ElementwiseTiming("acc", what, 1, 1, rng.choice((0.0, 1e-5, 1e-4))) for what in ("copy", "run", "turn"))
    both = replace(profile.contention, cpu_alone=rng.choice((0.0, 1.0, 1.5)) * rates.host_memory)
    profile = replace(profile, elementwise=(*profile.elementwise, *host), contention=both)
    (task,) = prepare_ranks(spec, profile, workload)
    for _ in range(30):
        costs = rng.choice(task.costs)
        yield task, costs, place_randomly(rng, task.room, costs)


@pytest.mark.quick("2-cuda")
@pytest.mark.parametrize(("seed", "kind"), [(seed, ("cuda", "cpu")[seed % 2]) for seed in range(10)])
def test_no_placement_is_faster_than_its_counts_allow(seed, kind):
    for task, costs, tier in draw_tiers(seed, kind):
        counted = settle_slots(task.room, tier)
        problem = tier_problem(task.room, task.classes, costs, max(1, counted.buffers.slots), divide=True)
        least = fluid_seconds(problem, count_tier(task.classes, counted), relaxed=True)
        assert simulated_seconds(task.room, tier, costs, ROUNDS) >= least * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_no_placement_beats_the_bound_that_is_printed(seed):
    """FFNs divided at any row: some rows on the CPU where that may be, or kept in VRAM while the others are copied."""
    rng, kept = random.Random(seed), 0
    for task, costs, tier in draw_tiers(seed, "cuda"):
        where, shares = (
            {p.unit: p.where for p in tier.placements},
            {p.unit: p.share for p in tier.placements if p.share},
        )
        for unit in task.room.spec.units:
            rows = count_shares(unit) // 16
            if rows > 1 and where[unit.name] != "cpu" and rng.random() < 0.7:
                some = 16 * rng.randrange(1, rows)
                if rng.random() < 0.5:
                    where[unit.name], shares[unit.name] = "streamed", Share(kept=some)
                elif may_divide(costs):
                    shares[unit.name] = Share(some)
        kv = frozenset(p.unit for p in tier.placements if p.kv == "vram")
        tier = draft_tier(task.room, tier.tokens, where, kv, rng.choice((1, 2, 3, 4)), shares)
        if tier.buffers.total <= task.room.arena:
            kept += any(p.kept_parts for p in tier.placements)
            bound = task.divided_bounds[task.costs.index(costs)]
            assert simulated_seconds(task.room, tier, costs, ROUNDS) >= bound * (1 - 1e-9)
    assert kept or seed


def test_what_is_not_simulated_would_not_have_been_faster():
    near = 0
    for seed in range(12):
        for task, costs, tier in draw_tiers(seed, ("cuda", "cpu")[seed % 2]):
            if any(p.cpu_rows for p in tier.placements):
                continue
            floor, counts = Floor(task.room, task.classes, costs), count_tier(task.classes, tier)
            slots, seconds = max(1, tier.buffers.slots), simulated_seconds(task.room, tier, costs, SEARCH_ROUNDS)
            assert not floor.reaches(counts, slots, seconds * (1 + 1e-9))
            near += floor.reaches(counts, slots, 0.8 * seconds)
    assert near > 10  # it does know something
