"""Tiers of a finished plan, one by one: each improved from several starts under the plan's own residency."""

from collections.abc import Iterator
from dataclasses import replace

from pshard.planner.price.draft import Room, simulated_seconds
from pshard.planner.price.host_limits import holds
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.coefficients import count_tier
from pshard.planner.program.unit_classes import UnitClass
from pshard.planner.search.candidates import Candidate, plan_seconds
from pshard.planner.search.climb import Scored, TierSearch, TierState, state_of

SLOTS = (2, 1, 3)  # of starts
EVALUATIONS = 60  # simulations of one tier
CLOSE = 1.01  # so near to its bound a tier is left as it is


def polish_tiers(
    room: Room,
    classes: tuple[UnitClass, ...],
    costs: tuple[TierCosts, ...],
    found: Candidate,
    bounds: tuple[float, ...],
) -> Candidate:
    """The candidate with every tier that another start makes faster; residency orders stay, so no other tier changes.

    Starts stream all that is not in VRAM, or leave it to the CPU, or both by turns. bounds: by tier, seconds that
    nothing beats.
    """
    tiers, seconds = list(found.tiers), list(found.seconds)
    for i, (cost, bound) in enumerate(zip(costs, bounds)):
        if seconds[i] <= bound * CLOSE:
            continue
        search = TierSearch(room, classes, found.residency, cost)
        current = state_of(classes, count_tier(classes, tiers[i]), 0, max(1, tiers[i].buffers.slots))
        for best in _improved(search, current, bound):
            took = simulated_seconds(room, best.tier, cost)
            tried = [*tiers[:i], best.tier, *tiers[i + 1 :]]
            if took < seconds[i] and holds(room, tried):
                tiers, seconds[i] = tried, took
    if tiers == list(found.tiers):
        return found
    total = plan_seconds(room, tuple(tiers), tuple(seconds), costs)
    if total >= found.total:
        return found
    return replace(found, tiers=tuple(tiers), seconds=tuple(seconds), total=total)


def _improved(search: TierSearch, current: TierState, bound: float) -> Iterator[Scored]:
    """The best of the starts, improved."""
    for start in rank_starts(search, current.kv)[:2]:
        yield search.improve(start, EVALUATIONS, bound)


def rank_starts(search: TierSearch, kv: int) -> list[Scored]:
    """Starts of a tier, the fastest first, with `kv` layers' KV in VRAM or as many as may be."""
    starts = [scored for state in _starts(search, kv) if (scored := search.score(state))]
    return sorted(starts, key=lambda start: start.seconds)


def _by_turns(search: TierSearch, on_cpu: TierState) -> Iterator[TierState]:
    """States of which the CPU has a third or half of what it has in this one of units without state, one by one."""
    for part in (2, 3):
        cpu = tuple(0 if cls.kind.state else n // part for cls, n in zip(search.classes, on_cpu.cpu))
        yield replace(on_cpu, cpu=cpu, runs=max(cpu))


def _starts(search: TierSearch, kv_now: int) -> Iterator[TierState]:
    none, most = (0,) * len(search.classes), len(search.residency.kv_order)
    for copies in (False, True) if search.residency.shares else (False,):
        for kv in sorted({kv_now, most}):
            for slots in SLOTS:
                filled = search.fill_most(TierState(0, kv, none, 0, slots, copies=copies))
                if filled:
                    yield filled
                    if slots == SLOTS[0]:
                        on_cpu = search.leave_to_cpu(filled)
                        yield on_cpu
                        yield from _by_turns(search, on_cpu)
