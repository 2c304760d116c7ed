"""The fastest round of a model of up to four layers: every placement of every tier, and every mix of tiers.

Each tier is first searched alone, which says what the others leave it at most in a round that is faster than the one
found. Every placement below that is listed by what it has in VRAM; then tiers are combined whose pins lie within each
other.
"""

from collections.abc import Sequence
from dataclasses import replace

from pshard.plan import TierPlan
from pshard.planner.price.draft import Room
from pshard.planner.price.host_limits import holds
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.unit_classes import UnitClass
from pshard.planner.search.anneal_tiers import list_ways
from pshard.planner.search.candidates import Candidate, plan_seconds
from pshard.planner.search.exact import ExactSearch, Residents
from pshard.planner.search.residency_order import order_nested

MOST_UNITS = 10  # of four layers
MOST_VISITED = 20_000  # placements of a tier, some half second
CLOSE = 1.001  # so near to what its tiers take alone, a round is as good as optimal
Listed = tuple[float, TierPlan, Residents]  # weighted seconds, the tier, what it has in VRAM


def perfect_round(
    room: Room, classes: tuple[UnitClass, ...], costs: tuple[TierCosts, ...], found: Candidate, divides: bool
) -> Candidate:
    """The candidate, or the fastest round of all where it is faster and all could be tried: of all rounds of whole
    units, or with `divides` of all."""
    if len(room.spec.units) > MOST_UNITS or len(costs) < 2:
        return found
    ways = [list_ways(room, classes, cost, divides) for cost in costs]
    floors = []
    for cost, places, seconds in zip(costs, ways, found.seconds):
        alone = ExactSearch(room, classes, cost, seconds * (1 + 1e-9), places, MOST_VISITED)
        alone.run()
        if not alone.proven:
            return found
        floors.append(cost.load.weight * min(alone.limit, seconds))
    if found.total <= sum(floors) * CLOSE:
        return found
    lists: list[list[Listed]] = []
    for cost, places, floor in zip(costs, ways, floors):
        weight = cost.load.weight
        limit = (found.total - sum(floors) + floor) / weight
        every = ExactSearch(room, classes, cost, limit, places, MOST_VISITED, every=True)
        every.run()
        if not every.proven:
            return found
        listed = [(weight * seconds, tier, where) for where, (seconds, tier) in every.fastest.items()]
        lists.append(sorted(listed, key=lambda one: one[0]))
    mix = _fastest_mix(room, costs, lists, floors, found.total)
    if mix is None:
        return found
    tiers = tuple(tier for _, tier, _ in mix)
    each = tuple(weighted / cost.load.weight for (weighted, _, _), cost in zip(mix, costs))
    total = plan_seconds(room, tiers, each, costs)
    return replace(found, residency=order_nested(room, tiers), tiers=tiers, seconds=each, total=total)


def _fastest_mix(
    room: Room, costs: tuple[TierCosts, ...], lists: Sequence[list[Listed]], floors: Sequence[float], most: float
) -> tuple[Listed, ...] | None:
    """One of each list that go with each other; None where none makes a round shorter than `most` seconds."""
    order = sorted(range(len(lists)), key=lambda i: len(lists[i]))
    rest = [sum(floors[i] for i in order[at:]) for at in range(len(order) + 1)]
    best, found = most, None

    def descend(taken: tuple[Listed, ...], seconds: float) -> None:
        nonlocal best, found
        at = len(taken)
        if at == len(order):
            mix = tuple(one for _, one in sorted(zip(order, taken), key=lambda pair: pair[0]))
            tiers = tuple(tier for _, tier, _ in mix)
            each = tuple(weighted / cost.load.weight for (weighted, _, _), cost in zip(mix, costs))
            total = plan_seconds(room, tiers, each, costs)
            if total < best and holds(room, tiers):
                best, found = total, mix
            return
        for one in lists[order[at]]:
            if seconds + one[0] + rest[at + 1] >= best:
                return
            if all(_goes_with(one[2], other[2]) for other in taken):
                descend((*taken, one), seconds + one[0])

    descend((), 0.0)
    return found


def _goes_with(one: Residents, other: Residents) -> bool:
    """Whether what one has lies within what the other has, with the same bytes of each unit."""
    return all(a <= b or b <= a for a, b in zip(one, other))
