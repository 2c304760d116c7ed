"""All tiers of a small model at once, unit by unit: what is best for the most important tier need not be for the round.

Simulated annealing on the whole round. A step changes what is in VRAM in all tiers that share it, or how one tier
treats what is not there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp
from random import Random

from pshard.plan import TierPlan
from pshard.planner.price.draft import Room, draft_tier, simulated_seconds
from pshard.planner.price.host_limits import holds
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.coefficients import may_divide
from pshard.planner.program.unit_classes import UnitClass
from pshard.planner.search.anneal import MOST_EVICTED, MOST_UNITS, Place, divided_choices, place_choices
from pshard.planner.search.candidates import Candidate, plan_seconds
from pshard.planner.search.climb import SEARCH_ROUNDS, SLOT_CHOICES
from pshard.planner.search.residency_order import order_nested
from pshard.units.divide_unit import count_shares, without_cpu
from pshard.units.share import WHOLE

TRIES = 1000  # random steps of each pass
HEATS = (0.1, 0.02)  # by pass, of the round's time: how much slower a step may be at first
Held = tuple[int, bool]  # of a unit's rows or parts in the arena (-1: all of it), and whether its state is in VRAM


def anneal_tiers(
    room: Room, classes: tuple[UnitClass, ...], costs: tuple[TierCosts, ...], found: Candidate, divides: bool
) -> Candidate:
    """The candidate with all tiers improved together, if better; with `divides` also by divided FFNs."""
    if len(room.spec.units) > MOST_UNITS or len(costs) < 2:
        return found
    search = JointSearch(room, classes, costs, divides)
    start = State.of(found.tiers)
    for seed, heat in enumerate(HEATS):
        start = search.run(start, heat, Random(seed))
    tiers = search.draft(start)
    if tiers is None or not holds(room, tiers):
        return found
    seconds = tuple(simulated_seconds(room, tier, cost) for tier, cost in zip(tiers, costs))
    total = plan_seconds(room, tiers, seconds, costs)
    if total >= found.total:
        return found
    return replace(found, residency=order_nested(room, tiers), tiers=tiers, seconds=seconds, total=total)


@dataclass(frozen=True)
class State:
    """Places of all units by tier, and slots by tier."""

    places: tuple[tuple[Place, ...], ...]
    slots: tuple[int, ...]

    @staticmethod
    def of(tiers: Sequence[TierPlan]) -> "State":
        """What tiers say."""
        places = tuple(tuple((p.where, p.kv == "vram", p.share) for p in tier.placements) for tier in tiers)
        return State(places, tuple(max(1, tier.buffers.slots) for tier in tiers))


class JointSearch:
    """Random steps over the tiers of one rank."""

    def __init__(self, room: Room, classes: tuple[UnitClass, ...], costs: tuple[TierCosts, ...], divides: bool) -> None:
        self.room, self.costs, self.units = room, costs, room.spec.units
        self.ways = [list_ways(room, classes, cost, divides) for cost in costs]
        self.rows = [count_shares(u) for u in self.units]
        self._known: dict[tuple, tuple[TierPlan, float] | None] = {}

    def run(self, start: State, heat: float, rng: Random) -> State:
        """The best of many random steps from a state."""
        now = best = start
        seconds = least = first = self.score(start)
        for i in range(TRIES):
            tried = self.step(now, rng)
            if tried is None or tried == now:
                continue
            took = self.score(tried)
            if took < seconds or rng.random() < exp((seconds - took) / (heat * first * (1 - i / TRIES))):
                now, seconds = tried, took
                if took < least * (1 - 1e-9):
                    best, least = tried, took
        return best

    def score(self, state: State) -> float:
        """Seconds of a round; infinite where a tier does not fit."""
        made = [self._tier(i, places, slots) for i, (places, slots) in enumerate(zip(state.places, state.slots))]
        if any(m is None for m in made):
            return float("inf")
        tiers, seconds = zip(*(m for m in made if m))
        return plan_seconds(self.room, tiers, seconds, self.costs) if holds(self.room, tiers) else float("inf")

    def draft(self, state: State) -> tuple[TierPlan, ...] | None:
        """The tiers; None where one does not fit."""
        made = [self._tier(i, places, slots) for i, (places, slots) in enumerate(zip(state.places, state.slots))]
        return tuple(m[0] for m in made if m) if all(made) else None

    def _tier(self, i: int, places: tuple[Place, ...], slots: int) -> tuple[TierPlan, float] | None:
        key = i, places, slots
        if key not in self._known:
            tier = self._draft(i, places, slots)
            fits = tier.buffers.total <= self.room.arena
            took = simulated_seconds(self.room, tier, self.costs[i], SEARCH_ROUNDS) if fits else 0.0
            self._known[key] = (tier, took) if fits else None
        return self._known[key]

    def _draft(self, i: int, places: tuple[Place, ...], slots: int) -> TierPlan:
        named = [(u.name, *place) for u, place in zip(self.units, places)]
        where = {name: at for name, at, _, _ in named}
        kv = frozenset(name for name, _, vram, _ in named if vram)
        shares = {name: share for name, _, _, share in named if share is not WHOLE}
        return draft_tier(self.room, self.costs[i].load.tokens, where, kv, slots, shares)

    def _held(self, at: int, place: Place) -> Held:
        where, vram, share = place
        if where == "pinned":
            return (self.rows[at] - share.cpu if share else -1), vram
        return share.kept, vram

    def step(self, state: State, rng: Random) -> State | None:
        """Another state; None where the step led to none that fits."""
        places, slots = [list(of) for of in state.places], list(state.slots)
        kind, at = rng.random(), rng.randrange(len(self.units))
        if kind < 0.1:
            slots[rng.randrange(len(slots))] = rng.choice(SLOT_CHOICES)
        elif kind < 0.35:
            self._swap(places, at, rng.randrange(len(self.units)), rng)
        elif kind < 0.6:
            self._change_all(places, at, rng)
        else:
            i = rng.randrange(len(places))
            places[i][at] = rng.choice(self.ways[i][at])
            self._follow(places, i, at, rng)
        for i in range(len(places)):
            if not self._make_fit(places, slots, i, rng):
                return None
        return State(tuple(map(tuple, places)), tuple(slots)) if self._nested(places) else None

    def _swap(self, places: list[list[Place]], a: int, b: int, rng: Random) -> None:
        """In all tiers: like units change places, others what is in VRAM."""
        alike = self.units[a].likeness == self.units[b].likeness
        for i, of in enumerate(places):
            if alike:
                of[a], of[b] = of[b], of[a]
            else:
                held = self._held(a, of[a])[0], self._held(b, of[b])[0]
                for at, wanted in ((a, held[1]), (b, held[0])):
                    whole = [w for w in self.ways[i][at] if (self._held(at, w)[0] == -1) == (wanted != 0) and not w[2]]
                    of[at] = rng.choice(whole) if whole else of[at]

    def _change_all(self, places: list[list[Place]], at: int, rng: Random) -> None:
        """One unit in all tiers, with the same of it in VRAM where they can."""
        first = rng.randrange(len(places))
        place = rng.choice(self.ways[first][at])
        held = self._held(at, place)
        for i, of in enumerate(places):
            same = [w for w in self.ways[i][at] if self._held(at, w) == held]
            of[at] = place if i == first else rng.choice(same or self.ways[i][at])

    def _follow(self, places: list[list[Place]], changed: int, at: int, rng: Random) -> None:
        """Other tiers have of a unit in VRAM what the one that changed has, where they would not be nested."""
        for i, of in enumerate(places):
            if i != changed and not self._goes(places[changed], of):
                held = self._held(at, places[changed][at])
                same = [w for w in self.ways[i][at] if self._held(at, w) == held]
                of[at] = rng.choice(same) if same else of[at]

    def _make_fit(self, places: list[list[Place]], slots: list[int], i: int, rng: Random) -> bool:
        """Units leave VRAM, in the tiers that have less there too, until the tier fits; false where that takes many."""
        for _ in range(MOST_EVICTED + 1):
            if self._draft(i, tuple(places[i]), slots[i]).buffers.total <= self.room.arena:
                return True
            inside = [at for at, place in enumerate(places[i]) if self._held(at, place) != (0, False)]
            if not inside:
                return False
            out = rng.choice(inside)
            less = [j for j in range(len(places)) if j == i or self._within(places[j], places[i])]
            for j in less:
                free = [w for w in self.ways[j][out] if self._held(out, w) == (0, False)]
                places[j][out] = rng.choice(free)
        return False

    def _nested(self, places: list[list[Place]]) -> bool:
        return all(self._goes(a, b) for i, a in enumerate(places) for b in places[:i])

    def _within(self, a: Sequence[Place], b: Sequence[Place]) -> bool:
        held = [(self._held(at, x), self._held(at, y)) for at, (x, y) in enumerate(zip(a, b))]
        return all(mine[0] in (0, other[0]) and mine[1] <= other[1] for mine, other in held)

    def _goes(self, a: Sequence[Place], b: Sequence[Place]) -> bool:
        """Whether the pins of one lie within those of the other, with the same bytes of each, and likewise the KV."""
        pairs = [(self._held(at, x), self._held(at, y)) for at, (x, y) in enumerate(zip(a, b))]
        pins = [(mine[0], other[0]) for mine, other in pairs]
        kv = [(mine[1], other[1]) for mine, other in pairs]
        return all(all(x in (0, y) for x, y in of) or all(y in (0, x) for x, y in of) for of in (pins, kv))


def list_ways(
    room: Room, classes: tuple[UnitClass, ...], costs: TierCosts, divides: bool
) -> tuple[tuple[Place, ...], ...]:
    """By unit, how one of several tiers may have it: whole, and with `divides` divided, or with what another tier
    divides kept in VRAM.

    With limited host memory all is whole: of what is there in part, and of all after it, the host keeps a copy.
    """
    shares = {u.name: cls.shares if divides and room.host is None else () for cls in classes for u in cls.units}
    may, found = may_divide(costs), []
    for unit in room.spec.units:
        some = shares[unit.name]
        kept = {without_cpu(unit, share) for share in some} - {None, *some}
        beside = (("streamed", False, share) for share in sorted(share for share in kept if share))
        found.append((*place_choices(unit.kind), *(divided_choices(some) if may else ()), *beside))
    return tuple(found)
