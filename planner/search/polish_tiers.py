"""Tiers of a finished plan, one by one: each improved from several starts under the plan's own residency."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from math import inf

from pshard.planner.price.draft import Room, simulated_seconds
from pshard.planner.price.host_limits import holds
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.coefficients import count_tier
from pshard.planner.program.unit_classes import UnitClass
from pshard.planner.search.candidates import Candidate
from pshard.planner.search.climb import Scored, TierSearch, TierState, state_of
from pshard.planner.search.round_times import plan_seconds

SLOTS = 2  # of starts...
OTHER_SLOTS = (1, 3)  # ...and of those that stream all
EVALUATIONS = 40  # simulations of one start's improvement
CLOSE = 1.01  # so near to its bound a tier is left as it is
FAR = 1.3  # a start that takes so much longer than the tier now is not improved


def polish_tiers(
    room: Room,
    classes: tuple[UnitClass, ...],
    costs: tuple[TierCosts, ...],
    found: Candidate,
    bounds: tuple[float, ...],
) -> Candidate:
    """The candidate with every tier that another start makes faster; residency orders stay, so no other tier changes.

    Starts stream all that is not in VRAM, whole or with parts of it on the CPU, or leave it to the CPU, or both by
    turns. Where experts may be copied whole or read in place, both are tried. bounds: by tier, seconds that
    nothing beats.
    """
    tiers, seconds = list(found.tiers), list(found.seconds)
    for i, (cost, bound) in enumerate(zip(costs, bounds)):
        if seconds[i] <= bound * CLOSE:
            continue
        divides = any(cls.kind.parts for cls in classes)
        current = state_of(classes, count_tier(classes, tiers[i]), 0, max(1, tiers[i].buffers.slots))
        searches = (TierSearch(room, classes, found.residency, way, divides) for way in cost.ways)
        for best in chain.from_iterable(_improved(search, current, seconds[i], bound) for search in searches):
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


def _improved(search: TierSearch, current: TierState, seconds: float, bound: float) -> Iterator[Scored]:
    """The best of the starts, improved, where they are near enough to the tier's `seconds` now."""
    for start in rank_starts(search, current.kv, seconds * FAR)[:2]:
        yield search.improve(start, EVALUATIONS, bound)


def rank_starts(search: TierSearch, kv: int, most: float = inf) -> list[Scored]:
    """Starts of a tier that take less than `most` seconds, the fastest first, with `kv` layers' KV in VRAM or as many
    as may be."""
    states = (state for state in _starts(search, kv) if most == inf or not search.reaches(state, most))
    starts = [scored for state in states if (scored := search.score(state)) and scored.seconds < most]
    return sorted(starts, key=lambda start: start.seconds)


def _starts(search: TierSearch, kv_now: int) -> Iterator[TierState]:
    none, most = (0,) * len(search.classes), len(search.residency.kv_order)
    for copies in (False, True) if search.residency.shares else (False,):
        for kv in sorted({kv_now, most}):
            for slots in OTHER_SLOTS:
                if other := search.fill_most(TierState(0, kv, none, 0, slots, copies=copies)):
                    yield other
            streamed = search.fill_most(TierState(0, kv, none, 0, SLOTS, copies=copies))
            if streamed:
                yield streamed
                if search.spreads:
                    yield from _with_parts(search, streamed)
                yield (on_cpu := search.leave_to_cpu(streamed))
                yield _by_turns(search, on_cpu)


def _with_parts(search: TierSearch, streamed: TierState) -> Iterator[TierState]:
    """The state with parts of what it streams on the CPU: as many as take as long as the copies, or half of them."""
    even = search.balance(streamed)
    yield even
    yield replace(even, parts=tuple(n // 2 for n in even.parts))


def _by_turns(search: TierSearch, on_cpu: TierState) -> TierState:
    """The state of which the CPU has half of what it has in this one of units without state, one by one."""
    cpu = tuple(0 if cls.kind.state else n // 2 for cls, n in zip(search.classes, on_cpu.cpu))
    return replace(on_cpu, cpu=cpu, runs=max(cpu))
