"""No placement of experts is simulated faster than the bound that is printed beside its tier."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from planner_cases import OWN, make_model
from routing_samples import make_record

from pshard.machine import ElementwiseTiming
from pshard.model import ModelSpec
from pshard.model_config import Experts
from pshard.plan import TierPlan
from pshard.planner.prepare_ranks import prepare_ranks
from pshard.planner.price.datasheet import Rates, profile_from_datasheet
from pshard.planner.price.draft import draft_tier, simulated_seconds
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.coefficients import count_tier, tier_problem
from pshard.planner.program.fluid import fluid_seconds
from pshard.planner.rank_task import RankTask
from pshard.planner.search.program_starts import affordable_slots
from pshard.routing.measure_popularity import measure_popularity
from pshard.routing.order_experts import order_experts
from pshard.units.divide_unit import count_shares
from pshard.units.moe.experts import EXPERTS
from pshard.units.share import WHOLE, Share
from pshard.workload import Workload

COUNT = 16
CASES = [(11, 2.0), (13, 2.0), (21, 0.5), (0, None), (1, None)]


def draw_model(rng: random.Random, skew: float | None) -> ModelSpec:
    """One or two layers of experts; `skew`: of the record that they are planned by, None: without one."""
    layers = rng.choice((1, 2))
    rule = Experts(COUNT, rng.choice((1, 2, 4)), 256 * rng.choice((1, 4)))
    spec = make_model(layers, 512, 4, 2, vocab=512, experts=rule)
    if skew is None:
        return spec
    record = make_record(2000, layers, COUNT, rule.used, skew, rng.randrange(100))
    return order_experts(spec, measure_popularity(replace(record, layers=tuple(range(layers)))))


def draw_task(rng: random.Random, skew: float | None, copy_issue: float = 0.0) -> RankTask:
    """A model, a machine and a budget; `copy_issue`: seconds that the host needs to start a copy."""
    spec = draw_model(rng, skew)
    rates = Rates(
        link=rng.choice((1e9, 4e9, 16e9)),
        acc_memory=rng.choice((20e9, 800e9)),
        acc_flops=20e12,
        host_memory=rng.choice((0.2e9, 4e9, 40e9)),
        host_flops=rng.choice((0.1e12, 1e12)),
        handoff_seconds=rng.choice((1e-9, 1e-5, 1e-2)),
    )
    most = (spec.packed_nbytes >> 20) + 2
    workload = Workload((OWN + 8 + rng.randrange(most),), context=128, max_ubatch=256, prompt=64, generated=32)
    profile = profile_from_datasheet(rates)
    issue = ElementwiseTiming("acc", "copy", 1, 1, copy_issue)
    (task,) = prepare_ranks(spec, replace(profile, elementwise=(*profile.elementwise, issue)), workload)
    return task


def enumerate_tiers(task: RankTask, costs: TierCosts) -> Iterator[TierPlan]:
    """Every number of experts of a layer in VRAM, streamed and on the CPU, the same in all layers; all other units in
    VRAM, but the embedding on either side; read in place and copied where the tier may choose."""
    spec, tokens = task.room.spec, costs.load.tokens
    states = frozenset(u.name for u in spec.units if u.kind.state)
    others = {u.name: "pinned" for u in spec.units}
    looked_up = [{u.name: place for u in spec.units if u.kind.is_looked_up} for place in ("pinned", "cpu")]
    layers = [u for u in spec.units if u.kind is EXPERTS]
    ways = [(Share(cpu, kept), "streamed") for cpu in range(COUNT) for kept in range(COUNT - cpu)]
    ways += [(Share(cpu), "pinned") for cpu in range(COUNT)] + [(WHOLE, "cpu")]
    for share, place in ways:
        shares = {u.name: share for u in layers} if share else {}
        for first, way in product(looked_up, costs.ways):
            where = others | first | {u.name: place for u in layers}
            yield draft_tier(task.room, tokens, where, states, 2, shares, way.in_place)


@pytest.mark.quick("13-2.0")
@pytest.mark.parametrize(("seed", "skew"), CASES)
def test_no_number_of_experts_anywhere_beats_the_bound(seed: int, skew: float | None) -> None:
    rng = random.Random(seed)
    task = draw_task(rng, skew)
    assert count_shares(next(u for u in task.room.spec.units if u.kind is EXPERTS)) == COUNT
    for costs, bound in zip(task.costs, task.divided_bounds):
        fitting = [t for t in enumerate_tiers(task, costs) if t.buffers.total <= task.room.arena]
        fastest = min((simulated_seconds(task.room, tier, costs) for tier in fitting), default=bound)
        assert fastest >= bound * (1 - 1e-9), costs.load.tokens


@pytest.mark.parametrize("seed", range(3))
def test_experts_that_are_read_in_place_need_no_copy_and_no_slot_in_the_program(seed: int) -> None:
    rng, read = random.Random(seed), 0
    task = draw_task(rng, None, copy_issue=1e-2)
    for costs in task.costs:
        for tier in enumerate_tiers(task, costs):
            whole = not any(p.share for p in tier.placements)
            if whole and tier.in_place and any(p.where == "streamed" for p in tier.placements):
                read += 1
                way = next(way for way in costs.ways if way.in_place)
                problem = tier_problem(task.room, task.classes, way, 1)
                least = fluid_seconds(problem, count_tier(task.classes, tier), relaxed=True)
                assert simulated_seconds(task.room, tier, costs) >= least * (1 - 1e-9)
                assert affordable_slots(task.room, way, 3) == 3
    assert read
