"""Random steps over single units of one tier, simulated annealing: what they gain on a plan its search has missed."""

from collections.abc import Mapping
from math import exp, inf
from random import Random

from pshard.homes import ON_CPU, PINNED, STREAMED
from pshard.plan import TierPlan
from pshard.planner.price.draft import Room, draft_tier, simulated_seconds
from pshard.planner.price.host_limits import holds
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.search.climb import SEARCH_ROUNDS, SLOT_CHOICES
from pshard.planner.search.places import Place, divided_choices, place_choices
from pshard.units.divide_unit import count_shares
from pshard.units.share import WHOLE, Share

MOST_EVICTED = 3  # units that may leave VRAM to make room for a step
TRIES = 2000  # random steps of each pass, or more:
TRIES_PER_UNIT = 150
UNDIVIDED: Mapping[str, tuple[Share, ...]] = {}

_Key = tuple[tuple[Place, ...], int]  # places of all units, slots


class UnitSearch:
    """Random steps from tiers of one size. They come to the same places again and again, which are timed once."""

    def __init__(
        self, room: Room, tokens: int, costs: TierCosts, shares: Mapping[str, tuple[Share, ...]] = UNDIVIDED
    ) -> None:
        self.room, self.tokens, self.costs, self.units = room, tokens, costs, room.spec.units
        self._names = room.columns.names
        self._choices = [(*place_choices(u.kind), *divided_choices(shares.get(u.name, ()))) for u in self.units]
        self._known: dict[_Key, float | None] = {}  # seconds of places
        self._tries = max(TRIES, TRIES_PER_UNIT * len(self.units))

    def anneal(self, tier: TierPlan, heat: float, rng: Random) -> TierPlan:
        """The best of many random steps from a tier: one unit placed otherwise, two units swapped, other slots."""
        units, choices = self.units, self._choices
        now = [(p.where, p.has_state_in_vram, p.share) for p in tier.placements]
        slots = max(1, tier.buffers.slots)
        best, best_seconds = tier, simulated_seconds(self.room, tier, self.costs, SEARCH_ROUNDS)
        seconds = first = best_seconds
        tries = self._tries
        for i in range(tries):
            tried, tried_slots = list(now), slots
            kind = rng.random()
            if kind < 0.1:
                tried_slots = rng.choice(SLOT_CHOICES)
            elif kind < 0.5:
                at = rng.randrange(len(units))
                tried[at] = rng.choice(choices[at])
            else:
                _swap(rng, units, tried)
            took = self._make_fit(rng, tried, tried_slots)
            if took is None:
                continue
            warmth = heat * first * (1 - i / tries)
            if took < seconds or rng.random() < exp((seconds - took) / warmth):
                now, slots, seconds = tried, tried_slots, took
                if took < best_seconds:
                    best, best_seconds = self._draft(tried, tried_slots), took
        return best

    def _make_fit(self, rng: Random, tried: list[Place], slots: int) -> float | None:
        """The seconds of the places; random units leave VRAM until they fit. None when that takes too many, or when
        host memory does not hold what is left."""
        for _ in range(MOST_EVICTED + 1):
            took = self._time(tried, slots)
            if took is not None:
                return took if took < inf else None
            inside = [i for i, (place, vram, share) in enumerate(tried) if place == PINNED or vram or share.kept]
            if not inside:
                return None
            out = rng.choice(inside)
            is_looked_up = self.units[out].kind.is_looked_up
            tried[out] = (ON_CPU if is_looked_up else rng.choice((ON_CPU, STREAMED)), False, WHOLE)
        return None

    def _time(self, places: list[Place], slots: int) -> float | None:
        """Simulated seconds, infinite where host memory does not hold the places; None where the arena does not."""
        streamed = sum([where == STREAMED for where, _, _ in places])
        key = tuple(places), min(slots, streamed)  # with slots for all, more of them are no other tier
        if key not in self._known:
            draft = self._draft(places, slots)
            if draft.buffers.total > self.room.arena:
                self._known[key] = None
            elif not holds(self.room, (draft,)):
                self._known[key] = inf
            else:
                self._known[key] = simulated_seconds(self.room, draft, self.costs, SEARCH_ROUNDS)
        return self._known[key]

    def _draft(self, places: list[Place], slots: int) -> TierPlan:
        named = list(zip(self._names, places))
        where = {name: at for name, (at, _, _) in named}
        kv = frozenset([name for name, (_, vram, _) in named if vram])
        shares = {name: share for name, (_, _, share) in named if share is not WHOLE}
        return draft_tier(self.room, self.tokens, where, kv, slots, shares)


def _swap(rng: Random, units, tried: list[Place]) -> None:
    """Exchange two units' placements; KV stays with the attention unit it belongs to where the new place allows it."""
    a, b = rng.randrange(len(units)), rng.randrange(len(units))
    if units[a].kind.is_looked_up or units[b].kind.is_looked_up:
        return
    if units[a].kind is units[b].kind and count_shares(units[a]) == count_shares(units[b]):
        tried[a], tried[b] = tried[b], tried[a]
        return
    for at, place in ((a, tried[b][0]), (b, tried[a][0])):
        tried[at] = (place, tried[at][1] and place != ON_CPU, WHOLE)
