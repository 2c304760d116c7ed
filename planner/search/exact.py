"""Every placement of every unit and every number of slots of a small model: the fastest there is, proven.

Branch and bound over units in order of execution, on simulated time.
"""

from dataclasses import dataclass, field
from math import inf

from pshard.homes import PINNED, STREAMED
from pshard.plan import TierPlan
from pshard.planner.price.draft import Room, draft_tier, simulated_seconds
from pshard.planner.price.host_limits import holds
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.coefficients import count_tier, may_divide, tier_problem
from pshard.planner.program.fluid import fluid_seconds
from pshard.planner.program.unit_classes import UnitClass
from pshard.planner.search.anneal import main_tier, place_around
from pshard.planner.search.candidates import Candidate
from pshard.planner.search.climb import SLOT_CHOICES
from pshard.planner.search.places import Place, divided_choices, least_times, place_choices
from pshard.units.divide_unit import count_shares, divided_sizes
from pshard.units.share import WHOLE
from pshard.units.unit import Unit

Residents = tuple[frozenset[tuple[str, int]], frozenset[str]]

MOST_UNITS = 10  # of four layers, of which one search in four is given up
MOST_VISITED = 400_000  # complete placements, some 6 s; a search that would need more is given up


def perfect_candidate(
    room: Room, classes: tuple[UnitClass, ...], costs: tuple[TierCosts, ...], found: Candidate, divides: bool
) -> Candidate:
    """The candidate with the fastest of all placements in its most important tier, if the round gains by it; with
    `divides` also of divided FFNs."""
    if len(room.spec.units) > MOST_UNITS:
        return found
    main = main_tier(costs, found)
    places = list_places(room, classes if divides else (), costs[main])
    search = ExactSearch(room, classes, costs[main], found.seconds[main], places)
    search.run()
    return place_around(room, classes, costs, found, main, search.best) if search.best else found


def residents(room: Room, tier: TierPlan) -> Residents:
    """Units with how many of their rows or parts are in the arena (-1: all), and units with their state in VRAM."""
    pins = set[tuple[str, int]]()
    for unit, place in zip(room.spec.units, tier.placements):
        if place.in_arena:
            own = count_shares(unit) - place.cpu_rows if place.site.in_arena else place.kept_parts
            pins.add((unit.name, own if place.share else -1))
    return frozenset(pins), frozenset(p.unit for p in tier.placements if p.has_state_in_vram)


def list_places(room: Room, classes: tuple[UnitClass, ...], costs: TierCosts) -> tuple[tuple[Place, ...], ...]:
    """By unit, how a tier may have it that shares memory with no other."""
    shares = {u.name: cls.shares if may_divide(costs) else () for cls in classes for u in cls.units}
    return tuple((*place_choices(u.kind), *divided_choices(shares.get(u.name, ()))) for u in room.spec.units)


@dataclass
class ExactSearch:
    """Looks for a tier that is faster than `limit` seconds, in `most` complete placements.

    What is cut off cannot be faster: its units on the accelerator and on the CPU take turns, its copies share one
    link, its pins alone are over the arena, or the program's time of its counts is a bound. Units that would have a
    slot for themselves are not tried: pinned they take no more memory and as much time.

    Attributes:
        places: by unit, how it may be placed.
        every: whether to collect the fastest of each residency below the limit, which else falls to the fastest of all.
        fastest: those, by what they have in the arena and which states in VRAM.
        best: the fastest tier; None when nothing is faster than the limit.
        proven: whether all placements were tried or cut off.
    """

    room: Room
    classes: tuple[UnitClass, ...]
    costs: TierCosts
    limit: float
    places: tuple[tuple[Place, ...], ...]
    most: int = MOST_VISITED
    every: bool = False
    fastest: dict[Residents, tuple[float, TierPlan]] = field(default_factory=dict)
    best: TierPlan | None = None
    proven: bool = False
    visited: int = 0
    _bounds: dict[tuple, list[tuple[int, float]]] = field(default_factory=dict)

    def run(self) -> None:
        """Search; `best` and `proven` tell the result."""
        self._units = self.room.spec.units
        self._class = [next(i for i, c in enumerate(self.classes) if u.name in c.names) for u in self._units]
        self._options = [self._list_options(u, places) for u, places in zip(self._units, self.places)]
        least = [min(seconds for _, seconds, _, _ in options) for options in self._options]
        self._rest = [sum(least[i:]) for i in range(len(least) + 1)]
        self._space = self.room.arena - self.room.scratch(self.costs.load.tokens)
        self._problems = {
            n: tier_problem(self.room, self.classes, self.costs, max(n, 1), may_divide(self.costs))
            for n in (0, *SLOT_CHOICES)
        }
        self._descend((), 0.0, 0.0, 0)
        self.proven = self.visited <= self.most

    def _list_options(self, unit: Unit, places: tuple[Place, ...]) -> list[tuple[Place, float, float, int]]:
        """Ways to place a unit: the place, its least seconds in turn with other units and on the link, bytes held."""
        options = []
        for place in places:
            where, in_vram, share = place
            busy, link = least_times(unit, place, self.costs)
            pins = self.costs.divided(unit.name, share).nbytes if share else unit.packed_nbytes
            held = (pins if where == PINNED else divided_sizes(unit, share).kept) + (
                self.room.states[unit.name] if in_vram else 0
            )
            options.append((place, busy, link, held))
        return options

    def _descend(self, places: tuple[Place, ...], busy: float, link: float, held: int) -> None:
        at = len(places)
        over = held > self._space or max(busy + self._rest[at], link) >= self.limit
        if over or self.visited > self.most:
            return
        if at == len(self._units):
            self._try_slots(places)
            return
        for place, seconds, copied, nbytes in self._options[at]:
            self._descend((*places, place), busy + seconds, link + copied, held + nbytes)

    def _try_slots(self, places: tuple[Place, ...]) -> None:
        self.visited += 1
        alike = tuple(sorted(zip(self._class, places)))
        if alike not in self._bounds:
            self._bounds[alike] = self._bound_slots(places)
        for slots, bound in self._bounds[alike]:
            if bound < self.limit:
                tier = self._draft(places, slots)
                self._take(tier, simulated_seconds(self.room, tier, self.costs))

    def _take(self, tier: TierPlan, seconds: float) -> None:
        if self.every:
            where = residents(self.room, tier)
            if seconds < min(self.limit, self.fastest.get(where, (inf,))[0]):
                self.fastest[where] = seconds, tier
        elif seconds < self.limit:
            self.limit, self.best = seconds, tier

    def _bound_slots(self, places: tuple[Place, ...]) -> list[tuple[int, float]]:
        """Numbers of slots that fit, each with the seconds that no order of these places beats."""
        streamed, found = sum(where == STREAMED for where, _, _ in places), []
        for slots in [n for n in SLOT_CHOICES if 2 * n <= streamed] if streamed else [0]:
            tier = self._draft(places, slots)
            if tier.buffers.total <= self.room.arena and holds(self.room, (tier,)):
                counts = count_tier(self.classes, tier)
                found.append((slots, fluid_seconds(self._problems[slots], counts, relaxed=True)))
        return found

    def _draft(self, places: tuple[Place, ...], slots: int) -> TierPlan:
        named = list(zip((u.name for u in self._units), places))
        where = {name: at for name, (at, _, _) in named}
        kv = frozenset(name for name, (_, in_vram, _) in named if in_vram)
        shares = {name: share for name, (_, _, share) in named if share is not WHOLE}
        return draft_tier(self.room, self.costs.load.tokens, where, kv, slots, shares)
