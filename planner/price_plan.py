"""A finished plan with what its tiers cost, for those who simulate it again."""

from collections.abc import Iterator
from dataclasses import dataclass

from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import TierPlan, Variant
from pshard.planner.prepare_ranks import price_tiers
from pshard.planner.price.draft import Room, tier_steps
from pshard.planner.price.page_locks import stage_by
from pshard.planner.price.profile_tables import find_tables
from pshard.planner.price.simulate import Simulation, simulate, simulate_ranks
from pshard.planner.price.tier_costs import TierCosts
from pshard.routing.followed import under_plan
from pshard.steps.step import StepList
from pshard.steps.sweep import sweep_steps


@dataclass(frozen=True)
class PricedTier:
    """One tier on every rank: where it is, the plan of it, and what it costs there."""

    tokens: int
    split_mode: str
    rooms: tuple[Room, ...]
    tiers: tuple[TierPlan, ...]
    costs: tuple[TierCosts, ...]

    def simulate(self) -> tuple[tuple[StepList, Simulation], ...]:
        """Every rank's steps of the expected micro-batch, and what comes of them."""
        steps = tuple(map(tier_steps, self.rooms, self.tiers, self.costs))
        return tuple(zip(steps, simulate_ranks(self.split_mode, steps, self.costs)))

    def simulate_sweep(self, batches: int) -> tuple[StepList, Simulation]:
        """The steps of a sweep of so many micro-batches on the only rank, and what comes of them."""
        (room,), (tier,), (cost,) = self.rooms, self.tiers, self.costs
        steps = sweep_steps(room.spec, tier_steps(room, tier, cost), tier.tokens, batches)
        return steps, simulate(steps, cost)


def price_plan(spec: ModelSpec, profile: MachineProfile, variant: Variant) -> Iterator[PricedTier]:
    """The tiers of a variant, smallest first."""
    w = variant.workload
    tokens = tuple(t.tokens for t in variant.ranks[0].tiers)
    tasks = price_tiers(under_plan(spec, variant), find_tables(profile, variant.correction), w, tokens)
    priced = [stage_by(rank, task.costs) for task, rank in zip(tasks, variant.ranks)]
    rooms = tuple(task.room for task in tasks)
    for i, each in enumerate(tokens):
        tiers = tuple(rank.tiers[i] for rank in variant.ranks)
        yield PricedTier(each, w.split_mode, rooms, tiers, tuple(costs[i] for costs in priced))
