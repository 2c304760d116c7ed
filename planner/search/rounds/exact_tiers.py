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
from pshard.planner.search.candidates import Candidate
from pshard.planner.search.exact import ExactSearch, Residents
from pshard.planner.search.places import Place
from pshard.planner.search.residency_order import order_nested
from pshard.planner.search.round_times import plan_seconds, steps_seconds
from pshard.planner.search.rounds.ways import hold, lies_in, list_ways

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
    limits = [seconds * (1 + 1e-9) for seconds in found.seconds]
    alone = [_search(room, classes, *of) for of in zip(costs, limits, ways)]
    floors = [c.load.weight * min(s.limit, took) for c, s, took in zip(costs, alone, found.seconds)]
    if all(search.proven for search in alone) and found.total <= sum(floors) * CLOSE:
        return found
    if not all(search.proven for search in alone):
        return _follow_leader(room, classes, costs, found, ways, alone)
    lists: list[list[Listed]] = []
    for cost, places, floor in zip(costs, ways, floors):
        weight = cost.load.weight
        limit = (found.total - sum(floors) + floor) / weight
        every = _search(room, classes, cost, limit, places, every=True)
        if not every.proven:
            return _follow_leader(room, classes, costs, found, ways, alone)
        listed = [(weight * seconds, tier, where) for where, (seconds, tier) in every.fastest.items()]
        lists.append(sorted(listed, key=lambda one: one[0]))
    mix = _fastest_mix(room, costs, lists, floors, found)
    if mix is None:
        return found
    each = tuple(weighted / cost.load.weight for (weighted, _, _), cost in zip(mix, costs))
    return _replace_tiers(room, costs, found, tuple(tier for _, tier, _ in mix), each)


def _search(
    room: Room,
    classes: tuple[UnitClass, ...],
    cost: TierCosts,
    limit: float,
    places: tuple[tuple[Place, ...], ...],
    every: bool = False,
) -> ExactSearch:
    search = ExactSearch(room, classes, cost, limit, places, MOST_VISITED, every=every)
    search.run()
    return search


def _replace_tiers(
    room: Room, costs: tuple[TierCosts, ...], found: Candidate, tiers: tuple[TierPlan, ...], seconds: tuple[float, ...]
) -> Candidate:
    total = plan_seconds(room, tiers, seconds, costs)
    return replace(found, residency=order_nested(room, tiers), tiers=tiers, seconds=seconds, total=total)


def _follow_leader(
    room: Room,
    classes: tuple[UnitClass, ...],
    costs: tuple[TierCosts, ...],
    found: Candidate,
    ways: Sequence[tuple[tuple[Place, ...], ...]],
    alone: Sequence[ExactSearch],
) -> Candidate:
    """Where there are too many placements for all: each tier in turn as fast as was found alone, the others as fast as
    what they may have in VRAM beside it lets them be. The candidate, or the fastest of these."""
    best, least = found, [search.limit if search.proven else 0.0 for search in alone]
    for lead, search in enumerate(alone):
        if search.best is None or costs[lead].load.rare:
            continue
        tiers, seconds = dict[int, TierPlan](), dict[int, float]()
        tiers[lead], seconds[lead] = search.best, search.limit
        for i in sorted(set(range(len(costs))) - {lead}, key=lambda i: -costs[i].load.weight):
            others = sum(costs[j].load.weight * seconds.get(j, least[j]) for j in range(len(costs)) if j != i)
            limit = (best.total - others) / costs[i].load.weight
            for within in (True, False):
                places = _beside(room, ways[i], list(tiers.values()), within)
                around = _search(room, classes, costs[i], limit, places)
                if around.best:
                    tiers[i], seconds[i], limit = around.best, around.limit, around.limit
            if i not in tiers:
                break
        else:
            in_order = tuple(tiers[i] for i in range(len(costs)))
            each = tuple(seconds[i] for i in range(len(costs)))
            tried = _replace_tiers(room, costs, found, in_order, each)
            best = tried if tried.total < best.total and tried.keeps(costs) and holds(room, in_order) else best
    return best


def _beside(
    room: Room, ways: tuple[tuple[Place, ...], ...], tiers: Sequence[TierPlan], within: bool
) -> tuple[tuple[Place, ...], ...]:
    """The ways of a tier that has in VRAM what all these tiers have at most (`within`), or at least."""
    others = [
        [hold(unit, (p.where, p.has_state_in_vram, p.share)) for unit, p in zip(room.spec.units, tier.placements)]
        for tier in tiers
    ]
    return tuple(
        tuple(
            place
            for place in of
            if all(lies_in(hold(unit, place), held) if within else lies_in(held, hold(unit, place)) for held in of_unit)
        )
        for unit, of, of_unit in zip(room.spec.units, ways, zip(*others))
    )


def _fastest_mix(
    room: Room, costs: tuple[TierCosts, ...], lists: Sequence[list[Listed]], floors: Sequence[float], than: Candidate
) -> tuple[Listed, ...] | None:
    """One of each list that go with each other; None where none makes a round shorter `than` the candidate's."""
    order = sorted(range(len(lists)), key=lambda i: len(lists[i]))
    rest = [sum(floors[i] for i in order[at:]) for at in range(len(order) + 1)]
    numbers: tuple[dict, dict] = {}, {}  # of what may be in VRAM
    held = [[tuple(map(_as_bits, one[2], numbers)) for one in of] for of in lists]
    best, found = than.total, None

    def descend(taken: tuple[Listed, ...], seconds: float, holding: tuple[tuple[int, ...], ...]) -> None:
        nonlocal best, found
        at = len(taken)
        if at == len(order):
            mix = tuple(one for _, one in sorted(zip(order, taken), key=lambda pair: pair[0]))
            tiers = tuple(tier for _, tier, _ in mix)
            each = tuple(weighted / cost.load.weight for (weighted, _, _), cost in zip(mix, costs))
            total = plan_seconds(room, tiers, each, costs)
            if total < best and steps_seconds(each, costs) <= than.most and holds(room, tiers):
                best, found = total, mix
            return
        for one, (pins, states) in zip(lists[order[at]], held[order[at]]):
            if seconds + one[0] + rest[at + 1] >= best:
                return
            for other_pins, other_states in holding:  # what one has lies within what the other has
                if pins & other_pins not in (pins, other_pins) or states & other_states not in (states, other_states):
                    break
            else:
                descend((*taken, one), seconds + one[0], (*holding, (pins, states)))

    descend((), 0.0, ())
    return found


def _as_bits(held: frozenset, numbers: dict) -> int:
    """A set as the bits of its elements' numbers; those that have none get the next ones."""
    return sum(1 << numbers.setdefault(one, len(numbers)) for one in held)
