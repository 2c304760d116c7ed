"""What a small model's tiers can be: the ways of each unit in each tier as numbers, and tiers simulated once each."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pshard.plan import TierPlan
from pshard.planner.price.draft import Room, draft_tier, simulated_seconds
from pshard.planner.price.host_limits import holds
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.unit_classes import UnitClass
from pshard.planner.search.climb import SEARCH_ROUNDS
from pshard.planner.search.small.ways import TierWays, list_ways
from pshard.units.share import WHOLE

Column = tuple[int, ...]  # of one unit: its way in each tier
Numbers = np.ndarray[Any, Any]
BUSY, COPY, FETCH, FIXED, COPIED, STAGE, JOINED, SLOT, SIDE = range(9)  # columns of a table of ways
SUMS, MAXIMA = slice(BUSY, STAGE), slice(STAGE, SIDE)
LESS, MORE, OTHER, KEPT, GONE = range(5)  # of what one tier has of a unit in VRAM beside another tier


class Space:
    """All that a search asks of a rank's tiers. `simulated`: how many were simulated.

    likeness: by unit, a number that like units share. handed: by tier, seconds of a hand-off between both sides.
    """

    def __init__(self, room: Room, classes: tuple[UnitClass, ...], costs: Sequence[TierCosts], divides: bool) -> None:
        self.room, self.costs, self.units = room, costs, room.spec.units
        self.tiers = [TierWays(room, cost, list_ways(room, classes, cost, divides)) for cost in costs]
        numbers: dict[tuple, int] = {}
        kinds = (tuple(cost.likeness(u) for cost in costs) for u in self.units)
        self.likeness = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
        hidden = 4 * room.spec.config.d_model
        self.handed = np.array(
            [(c.handoff("acc", hidden * c.load.tokens) + c.handoff("cpu", hidden * c.load.tokens)) / 2 for c in costs]
        )
        self.scratch = np.array([tier.scratch for tier in self.tiers], float)
        self.simulated = 0
        self._known: dict[tuple, tuple[TierPlan, float] | None] = {}
        self._tables: dict[int, Numbers] = {}
        self._beside: dict[tuple[int, int], Numbers] = {}

    def read(self, tiers: Sequence[TierPlan]) -> tuple[tuple[Column, ...], tuple[int, ...]]:
        """The units' columns and the tiers' slots."""
        rows = [
            [of.number(u, (p.where, p.has_state_in_vram, p.share)) for u, p in zip(self.units, tier.placements)]
            for of, tier in zip(self.tiers, tiers)
        ]
        return tuple(zip(*rows)), tuple(max(1, tier.buffers.slots) for tier in tiers)

    def time(self, i: int, ways: tuple[int, ...], slots: int) -> tuple[TierPlan, float] | None:
        """A tier with these ways, and its simulated seconds; None where it does not fit."""
        made = [self.tiers[i].all[n] for n in ways]
        key = i, ways, min(slots, sum([way.copied for way in made]))
        if key not in self._known:
            named = list(zip(self.room.columns.names, [way.place for way in made]))
            where = {name: at for name, (at, _, _) in named}
            kv = frozenset([name for name, (_, in_vram, _) in named if in_vram])
            shares = {name: share for name, (_, _, share) in named if share is not WHOLE}
            tier = draft_tier(self.room, self.costs[i].load.tokens, where, kv, slots, shares)
            self._known[key] = None
            if tier.buffers.total <= self.room.arena and holds(self.room, (tier,)):
                self.simulated += 1
                self._known[key] = tier, simulated_seconds(self.room, tier, self.costs[i], SEARCH_ROUNDS)
        return self._known[key]

    def table(self, i: int) -> Numbers:
        """A tier's ways as rows of numbers."""
        ways = self.tiers[i].all
        if i not in self._tables or len(self._tables[i]) < len(ways):
            rows = [(w.busy, w.copy, w.fetch, w.fixed, w.copied, w.stage, w.joined, w.slot, not w.on_cpu) for w in ways]
            self._tables[i] = np.array(rows, float)
        return self._tables[i]

    def beside(self, i: int, j: int) -> Numbers:
        """For each two ways of two tiers what the first has in VRAM beside the second: less, more, or other bytes of
        the unit; its state where the other one has it not, or the other way round."""
        ones, others = self.tiers[i].all, self.tiers[j].all
        known = self._beside.get((i, j))
        if known is None or known.shape[:2] != (len(ones), len(others)):
            pins = [np.array([way.held[0] for way in ways]) for ways in (ones, others)]
            states = [np.array([way.held[1] for way in ways]) for ways in (ones, others)]
            a, b, s, t = pins[0][:, None], pins[1][None], states[0][:, None], states[1][None]
            unlike = a != b
            known = np.stack([unlike & (a == 0), unlike & (b == 0), unlike & (a != 0) & (b != 0), s & ~t, ~s & t], -1)
            self._beside[i, j] = known = known.astype(np.int16)
        return known
