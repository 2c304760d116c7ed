"""Seconds of one round of the workload under a plan's tiers: micro-batches, and what comes into VRAM between them."""

from collections import Counter
from collections.abc import Iterable, Sequence

from pshard.homes import Home
from pshard.plan import Placement, TierPlan
from pshard.planner.price.draft import Room
from pshard.planner.price.profile_tables import seconds_from
from pshard.planner.price.tier_costs import TierCosts
from pshard.units.divide_unit import arena_portion
from pshard.units.unit import Unit

_Brought = tuple[Unit, Placement, Placement]  # where the unit is in VRAM, and where it is not


def plan_seconds(room: Room, tiers: Sequence[TierPlan], seconds: Sequence[float], costs: Sequence[TierCosts]) -> float:
    """Seconds of one round of the workload: every tier as often as it runs, and the switches between them. A tier that
    the round hardly enters is entered from the smallest one that it does enter: then a text is waiting for it."""
    rest = next(tier for tier, cost in zip(tiers, costs) if not cost.load.rare)
    total = switch_seconds(room, tiers, costs)
    for tier, took, cost in zip(tiers, seconds, costs):
        total += cost.load.weight * (took + (enter_seconds(room, rest, tier, cost) if cost.load.rare else 0.0))
    return total


def steps_seconds(seconds: Sequence[float], costs: Sequence[TierCosts]) -> float:
    """Seconds of the micro-batches of one round alone, as its prediction tells them: no switch, no tiers that are not
    entered."""
    return sum(c.load.weight * s for c, s in zip(costs, seconds) if not c.load.rare)


def switch_seconds(room: Room, tiers: Sequence[TierPlan], costs: Sequence[TierCosts]) -> float:
    """Seconds of going from the largest tier that the round enters to the smallest and back once: pins brought in, used
    KV cells moved."""
    entered = [tier for tier, cost in zip(tiers, costs) if not cost.load.rare]
    brought, seconds = list[_Brought](), 0.0
    for unit, here, there in _unlike(room, entered[0], entered[-1]):
        if here.in_arena != there.in_arena:
            brought.append((unit, here, there) if here.in_arena else (unit, there, here))
        if here.kv != there.kv:
            seconds += costs[0].units[unit.name].kv_fetch
    return _bring_seconds(costs[0], brought) + seconds


def enter_seconds(room: Room, before: TierPlan, tier: TierPlan, cost: TierCosts) -> float:
    """Seconds of what comes into VRAM, or of KV leaves it, when a tier follows another: none of it under computing.
    What both have of a unit there is the same."""
    brought, seconds = list[_Brought](), 0.0
    for unit, old, new in _unlike(room, before, tier):
        if new.in_arena and not old.in_arena:
            brought.append((unit, new, old))
        if old.kv != new.kv:
            seconds += cost.units[unit.name].kv_fetch
    return _bring_seconds(cost, brought) + seconds


def _unlike(room: Room, one: TierPlan, other: TierPlan) -> list[tuple[Unit, Placement, Placement]]:
    """Units whose placements differ; drafts share those that are alike, so most need no closer look."""
    return [
        (unit, here, there)
        for unit, here, there in zip(room.spec.units, one.placements, other.placements)
        if here is not there
    ]


def held_nbytes(unit: Unit, place: Placement) -> int:
    """Bytes of a unit's weights in the arena."""
    portion = arena_portion(unit, place.where, place.share)
    return portion.nbytes if portion else 0


def _bring_seconds(cost: TierCosts, brought: Iterable[_Brought]) -> float:
    """Seconds of copies into the arena: over the link, or by the slowest lane from beyond host memory."""
    locked, staged, far = 0, 0, Counter[Home]()
    for unit, inside, outside in brought:
        nbytes = held_nbytes(unit, inside)
        if outside.site.is_beyond_host:
            far[outside.weights_home] += nbytes
        elif unit.name in cost.staged:
            staged += nbytes
        else:
            locked += nbytes
    reading = sum(seconds_from(cost.tables, home, nbytes) for home, nbytes in far.items())
    return reading + locked / cost.tables.link_rate + (staged / cost.tables.staged_rate if staged else 0.0)
