"""Each tier of a plan beside what it could be alone, and what going from one to the other and back would take."""

from dataclasses import dataclass, replace

from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import TierPlan, Variant
from pshard.planner.make_plan import place_ranks, refine_ranks
from pshard.planner.prepare_ranks import price_tiers
from pshard.planner.price.draft import simulated_seconds
from pshard.planner.price.page_locks import locked
from pshard.planner.price.profile_tables import find_tables
from pshard.planner.price.tier_costs import TierCosts
from pshard.routing.followed import under_plan
from pshard.units.divide_unit import arena_portion
from pshard.workload import Workload

NOTABLE = 0.03  # a tier that is slower than alone by more than this share is worth a word


@dataclass(frozen=True)
class TierAlone:
    """Seconds of one micro-batch: in the plan, in a plan for this tier alone, and of the switch to that plan's
    residency and back, beyond what the plan's own switch takes: negative where that moves more."""

    tokens: int
    seconds: float
    alone: float
    switch: float

    @property
    def over(self) -> float:
        """Share by which the tier is slower than alone."""
        return self.seconds / self.alone - 1

    @property
    def worth_a_switch(self) -> bool:
        """Whether one micro-batch wins more than the switch takes."""
        return self.seconds - self.alone > self.switch

    def in_words(self) -> str:
        """As `--explain` says it."""
        wins, takes = 1e3 * (self.seconds - self.alone), 1e3 * self.switch
        text = f"{self.over:.0%} slower than in a plan for it alone, which would win {wins:.3g} ms a micro-batch"
        if self.switch <= 0:
            return f"{text}; a switch to it and back would take no longer than the plan's own"
        if self.worth_a_switch:
            return f"{text}; a switch there and back would take {takes:.3g} ms"
        return f"{text}, less than the {takes:.3g} ms that a switch to it and back would take"


def compare_alone(
    spec: ModelSpec, profile: MachineProfile, workload: Workload, variant: Variant
) -> tuple[TierAlone, ...]:
    """Every tier but the smallest, whose residency the others share, of a plan on one device; none for several ones."""
    if len(variant.ranks) > 1 or not variant.plan_needed:
        return ()
    (rank,), spec = variant.ranks, under_plan(spec, variant)
    tokens = tuple(tier.tokens for tier in rank.tiers)
    priced = replace(workload, max_ubatch=variant.workload.max_ubatch)
    (task,) = price_tiers(spec, find_tables(profile, variant.correction), priced, tokens)
    found = []
    for tier, cost in zip(rank.tiers[1:], locked(task.costs)[1:], strict=True):
        alone = plan_alone(spec, profile, workload, tier.tokens, variant)
        seconds, least = (simulated_seconds(task.room, t, cost) for t in (tier, alone))
        if least >= seconds:  # alone it may be as it is
            found.append(TierAlone(tier.tokens, seconds, seconds, 0.0))
            continue
        before = switch_between(spec, rank.tiers[0], tier, cost)
        switch = switch_between(spec, rank.tiers[0], alone, cost) - before
        found.append(TierAlone(tier.tokens, seconds, least, switch))
    return tuple(found)


def plan_alone(
    spec: ModelSpec, profile: MachineProfile, workload: Workload, tokens: int, variant: Variant, time_limit: float = 5.0
) -> TierPlan:
    """The tier of a plan on one device as it is planned where there is no other: with its load, and all the room."""
    priced = replace(workload, max_ubatch=variant.workload.max_ubatch)
    tasks = price_tiers(spec, find_tables(profile, variant.correction), priced, (tokens,))
    (chosen,) = refine_ranks(tasks, place_ranks(tasks, time_limit))
    return chosen.tiers[0]


def switch_between(spec: ModelSpec, small: TierPlan, large: TierPlan, cost: TierCosts) -> float:
    """Seconds of bringing in what one tier has in VRAM and the other has not, there and back."""
    seconds = 0.0
    for unit, one, other in zip(spec.units, small.placements, large.placements):
        here, there = (arena_portion(unit, p.where, p.share) for p in (one, other))
        if here != there:
            seconds += sum(p.nbytes for p in (here, there) if p) / cost.tables.link_rate
        if one.kv != other.kv:
            seconds += 2 * cost.units[unit.name].kv_fetch
    return seconds
