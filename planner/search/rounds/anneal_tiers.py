"""All tiers of a small model at once, unit by unit: what is best for the most important tier need not be for the round.

Simulated annealing on the whole round. A step changes what is in VRAM in all tiers that share it, or how one tier
treats what is not there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, log
from random import Random

from pshard.plan import TierPlan
from pshard.planner.price.draft import Room, draft_tier, simulated_seconds
from pshard.planner.price.host_limits import holds
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.unit_classes import UnitClass
from pshard.planner.search.anneal import MOST_EVICTED, MOST_UNITS
from pshard.planner.search.candidates import Candidate
from pshard.planner.search.climb import SEARCH_ROUNDS, SLOT_CHOICES
from pshard.planner.search.residency_order import order_nested
from pshard.planner.search.round_times import plan_seconds, steps_seconds
from pshard.planner.search.rounds.ways import (
    NOTHING,
    TierWays,
    Way,
    goes_with,
    least_seconds,
    lies_within,
    list_ways,
)
from pshard.units.share import WHOLE

TRIES = 1000  # random steps of each pass
HEATS = (0.1, 0.02, 0.05, 0.01, 0.05, 0.01)  # by pass, of the round's time: how much slower a step may be at first


def anneal_tiers(
    room: Room, classes: tuple[UnitClass, ...], costs: tuple[TierCosts, ...], found: Candidate, divides: bool
) -> Candidate:
    """The candidate with all tiers improved together, if better; with `divides` also by divided FFNs."""
    if len(room.spec.units) > MOST_UNITS or len(costs) < 2:
        return found
    search = JointSearch(room, classes, costs, divides)
    start = search.state_of(found.tiers)
    search.limit_steps(start, found.most)
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
    """Ways of all units by tier, and slots by tier."""

    ways: tuple[tuple[Way, ...], ...]
    slots: tuple[int, ...]


class JointSearch:
    """Random steps over the tiers of one rank."""

    def __init__(self, room: Room, classes: tuple[UnitClass, ...], costs: tuple[TierCosts, ...], divides: bool) -> None:
        self.room, self.costs, self.units = room, costs, room.spec.units
        self.most = inf  # seconds of the round's micro-batches
        self.tiers = [TierWays(room, cost, list_ways(room, classes, cost, divides)) for cost in costs]
        self._known: dict[tuple, tuple[TierPlan, float] | None] = {}

    def state_of(self, tiers: Sequence[TierPlan]) -> State:
        """What tiers say."""
        ways = tuple(
            tuple(of.make(u, (p.where, p.has_state_in_vram, p.share)) for u, p in zip(self.units, tier.placements))
            for of, tier in zip(self.tiers, tiers)
        )
        return State(ways, tuple(max(1, tier.buffers.slots) for tier in tiers))

    def limit_steps(self, start: State, most: float) -> None:
        """From now on micro-batches of a round may take `most` seconds, or as long as those of a state that fits, which
        few rounds of its simulation may find slower than many."""
        made = [self._tier(i, *of) for i, of in enumerate(zip(start.ways, start.slots))]
        self.most = max(most, steps_seconds([m[1] for m in made if m], self.costs))

    def run(self, start: State, heat: float, rng: Random) -> State:
        """The best of many random steps from a state."""
        now = best = start
        seconds = least = first = self.score(start)
        for i in range(TRIES):
            tried = self.step(now, rng)
            if tried is None or tried == now:
                continue
            most = seconds - heat * first * (1 - i / TRIES) * log(1 - rng.random())
            took = self.score(tried, most)
            if took < most:
                now, seconds = tried, took
                if took < least * (1 - 1e-9):
                    best, least = tried, took
        return best

    def score(self, state: State, most: float = inf) -> float:
        """Seconds of a round; infinite where a tier does not fit, micro-batches take more than they may, or `most`
        seconds are surely reached."""
        if sum(cost.load.weight * least_seconds(ways) for cost, ways in zip(self.costs, state.ways)) >= most:
            return inf
        made = [self._tier(i, ways, slots) for i, (ways, slots) in enumerate(zip(state.ways, state.slots))]
        if any(m is None for m in made):
            return inf
        tiers, seconds = zip(*(m for m in made if m))
        if steps_seconds(seconds, self.costs) > self.most:
            return inf
        return plan_seconds(self.room, tiers, seconds, self.costs) if holds(self.room, tiers) else inf

    def draft(self, state: State) -> tuple[TierPlan, ...] | None:
        """The tiers; None where one does not fit."""
        made = [self._tier(i, ways, slots) for i, (ways, slots) in enumerate(zip(state.ways, state.slots))]
        return tuple(m[0] for m in made if m) if all(made) else None

    def _tier(self, i: int, ways: tuple[Way, ...], slots: int) -> tuple[TierPlan, float] | None:
        key = i, tuple(way.place for way in ways), slots
        if key not in self._known:
            tier = self._draft(i, ways, slots)
            fits = tier.buffers.total <= self.room.arena
            took = simulated_seconds(self.room, tier, self.costs[i], SEARCH_ROUNDS) if fits else 0.0
            self._known[key] = (tier, took) if fits else None
        return self._known[key]

    def _draft(self, i: int, ways: tuple[Way, ...], slots: int) -> TierPlan:
        named = [(u.name, *way.place) for u, way in zip(self.units, ways)]
        where = {name: at for name, at, _, _ in named}
        kv = frozenset(name for name, _, vram, _ in named if vram)
        shares = {name: share for name, _, _, share in named if share is not WHOLE}
        return draft_tier(self.room, self.costs[i].load.tokens, where, kv, slots, shares)

    def step(self, state: State, rng: Random) -> State | None:
        """Another state; None where the step led to none that fits."""
        ways, slots = [list(of) for of in state.ways], list(state.slots)
        kind, at = rng.random(), rng.randrange(len(self.units))
        if kind < 0.1:
            slots[rng.randrange(len(slots))] = rng.choice(SLOT_CHOICES)
        elif kind < 0.35:
            self._swap(ways, at, rng.randrange(len(self.units)), rng)
        elif kind < 0.6:
            self._change_all(ways, at, rng)
        else:
            i = rng.randrange(len(ways))
            ways[i][at] = rng.choice(self.tiers[i].of_unit[at])
            self._follow(ways, i, at, rng)
        for i in range(len(ways)):
            if not self._make_fit(ways, slots, i, rng):
                return None
        nested = all(goes_with(a, b) for i, a in enumerate(ways) for b in ways[:i])
        return State(tuple(map(tuple, ways)), tuple(slots)) if nested else None

    def _swap(self, ways: list[list[Way]], a: int, b: int, rng: Random) -> None:
        """In all tiers: like units change places, others what is in VRAM."""
        alike = self.units[a].likeness == self.units[b].likeness
        for tier, of in zip(self.tiers, ways):
            if alike:
                of[a], of[b] = of[b], of[a]
            else:
                held = of[a].held[0], of[b].held[0]
                for at, wanted in ((a, held[1]), (b, held[0])):
                    whole = [w for w in tier.of_unit[at] if (w.held[0] == -1) == (wanted != 0) and not w.place[2]]
                    of[at] = rng.choice(whole) if whole else of[at]

    def _change_all(self, ways: list[list[Way]], at: int, rng: Random) -> None:
        """One unit in all tiers, with the same of it in VRAM where they can."""
        first = rng.randrange(len(ways))
        way = rng.choice(self.tiers[first].of_unit[at])
        for i, (tier, of) in enumerate(zip(self.tiers, ways)):
            of[at] = way if i == first else rng.choice(tier.by_held[at].get(way.held, tier.of_unit[at]))

    def _follow(self, ways: list[list[Way]], changed: int, at: int, rng: Random) -> None:
        """Other tiers have of a unit in VRAM what the one that changed has, where they would not be nested."""
        for i, (tier, of) in enumerate(zip(self.tiers, ways)):
            if i != changed and not goes_with(ways[changed], of):
                same = tier.by_held[at].get(ways[changed][at].held)
                of[at] = rng.choice(same) if same else of[at]

    def _make_fit(self, ways: list[list[Way]], slots: list[int], i: int, rng: Random) -> bool:
        """Units leave VRAM, in the tiers that have less there too, until the tier fits; false where that takes many."""
        for _ in range(MOST_EVICTED + 1):
            if self.tiers[i].count_bytes(ways[i], slots[i]) <= self.room.arena:
                return True
            inside = [at for at, way in enumerate(ways[i]) if way.held != NOTHING]
            if not inside:
                return False
            out = rng.choice(inside)
            less = [j for j in range(len(ways)) if j == i or lies_within(ways[j], ways[i])]
            for j in less:
                ways[j][out] = rng.choice(self.tiers[j].by_held[out][NOTHING])
        return False
