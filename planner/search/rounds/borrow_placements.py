"""Each tier as the other tiers are: what one does with all that is not in VRAM may be the best for another one too.

A tier that the round hardly enters is searched little, and from few starts. What it takes of another tier is where
units are that are not in VRAM; what is there stays a prefix of the plan's orders.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pshard.homes import ON_CPU, PINNED, STREAMED
from pshard.plan import Placement, TierPlan
from pshard.planner.price.draft import Room, draft_tier, simulated_seconds
from pshard.planner.price.host_limits import holds
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.coefficients import may_divide
from pshard.planner.program.unit_classes import UnitClass
from pshard.planner.search.climb import TierSearch
from pshard.planner.search.places import Place, least_times
from pshard.planner.search.residency_order import Residency
from pshard.planner.search.round_times import enter_seconds, plan_seconds
from pshard.units.share import WHOLE, Share
from pshard.units.unit import Unit

SLOTS = (1, 2, 3)
PASSES = 3  # what one tier has borrowed another may borrow from it
GAIN = 0.993  # of a tier's time with the switch into it: what a loan must stay below
CLOSE = 1.01  # so near to its bound, and with so short a switch, a tier borrows nothing


def borrow_placements(
    room: Room,
    classes: tuple[UnitClass, ...],
    costs: Sequence[TierCosts],
    residency: Residency,
    tiers: Sequence[TierPlan],
    seconds: Sequence[float],
    bounds: Sequence[float],
) -> tuple[tuple[TierPlan, ...], tuple[float, ...]]:
    """The tiers and their simulated seconds, each with another one's placements where that shortens the round: with
    one to three slots, and as many pins as the other has or as fit. bounds: by tier, seconds that nothing beats."""
    round_ = Round(room, costs, list(tiers), list(seconds))
    borrowers = [Borrower(TierSearch(room, classes, residency, cost)) for cost in costs]
    lent: list[list[TierPlan]] = [[] for _ in costs]  # by borrower, what it has looked at
    for _ in range(PASSES):
        before = list(round_.tiers)
        for i in reversed(range(len(costs))):
            for lender in before:
                if lender is before[i] or any(lender is other for other in lent[i]):
                    continue
                lent[i].append(lender)
                if round_.reach(i) > bounds[i] * CLOSE:
                    round_.improve(i, borrowers[i], lender)
        if all(one is other for one, other in zip(before, round_.tiers)):
            break
    return tuple(round_.tiers), tuple(round_.seconds)


@dataclass
class Round:
    """A plan's tiers while they change: a tier is replaced where the round is shorter with another one."""

    room: Room
    costs: Sequence[TierCosts]
    tiers: list[TierPlan]
    seconds: list[float]

    def reach(self, i: int) -> float:
        """Seconds that a tier may save of its round at most, for each time that it runs: with the switch into it."""
        cost = self.costs[i]
        if cost.load.rare:
            return self.seconds[i] + self.enter(i, self.tiers[i])
        alone = sum(c.load.weight * s for c, s in zip(self.costs, self.seconds))
        switches = plan_seconds(self.room, self.tiers, self.seconds, self.costs) - alone
        return self.seconds[i] + switches / cost.load.weight

    def enter(self, i: int, tier: TierPlan) -> float:
        """Seconds of the switch into a tier that would be number `i`; 0 of those that the round enters, as these share
        theirs."""
        if not self.costs[i].load.rare:
            return 0.0
        rest = next(t for t, c in zip(self.tiers, self.costs) if not c.load.rare)
        return enter_seconds(self.room, rest, tier, self.costs[i])

    def improve(self, i: int, borrower: "Borrower", lender: TierPlan) -> None:
        """The tier number `i` with the lender's placements as they are best for the round, if it gains enough; host
        memory must hold the rest."""
        goal = self.reach(i) * GAIN
        for tier, way in borrower.list_loans(lender, self.tiers[i], goal):
            enters = self.enter(i, tier)
            if borrower.takes_at_least(tier, way) + enters >= goal:
                continue
            took = borrower.search.time(tier)
            if took + enters < goal and self._gains(i, tier, took) and holds(self.room, self._with(i, tier)):
                self.tiers[i], self.seconds[i] = tier, simulated_seconds(self.room, tier, self.costs[i])
                goal = self.reach(i)

    def _with(self, i: int, tier: TierPlan) -> list[TierPlan]:
        return [*self.tiers[:i], tier, *self.tiers[i + 1 :]]

    def _gains(self, i: int, tier: TierPlan, took: float) -> bool:
        """Whether the round gains enough; of a tier that it hardly enters that is known without adding it up."""
        cost = self.costs[i]
        if cost.load.rare:
            return True
        seconds = [*self.seconds[:i], took, *self.seconds[i + 1 :]]
        now = plan_seconds(self.room, self.tiers, self.seconds, self.costs)
        then = plan_seconds(self.room, self._with(i, tier), seconds, self.costs)
        return now - then > (1 - GAIN) * cost.load.weight * self.seconds[i]


class Borrower:
    """What one tier would be with another one's placements, under the orders of its search."""

    def __init__(self, search: TierSearch) -> None:
        self.search, self.room, self.costs, self.order = search, search.room, search.costs, search.residency
        self._units = self.room.spec.units
        self._lent = set[tuple]()  # what lenders have outside VRAM, and of how many units in it, that was looked at
        self._least: dict[tuple, tuple[float, float]] = {}  # seconds of units and places, by what they depend on
        self._placed: dict[tuple[int, bool], tuple[Placement, float, float]] = {}  # and of placements

    def list_loans(self, lender: TierPlan, now: TierPlan, most: float) -> Iterator[tuple[TierPlan, TierCosts]]:
        """Drafts that fit and may take less than `most` seconds, each with the costs of its way to read experts."""
        outside, inside = self._list_outside(lender), self._list_inside(lender)
        lent = tuple(outside.values()), tuple(inside.items()), _count_cells(lender)
        if lent in self._lent:
            return
        self._lent.add(lent)
        for cells in sorted({_count_cells(lender), _count_cells(now)}):
            for way in self.costs.ways:
                if self._takes_outside(outside, way) >= most:
                    continue
                for slots in SLOTS:
                    tiers = list(self._fit(_Loan(outside, inside, cells, slots, way.in_place)))
                    yield from ((tier, way) for tier in tiers)
                    if not tiers or self.takes_at_least(tiers[-1], way) >= most or tiers[0].buffers.slots < slots:
                        break  # more slots leave less room for pins

    def _list_outside(self, lender: TierPlan) -> dict[str, Place]:
        """Where each unit is when it is not in VRAM: as the lender has it, or others like it that it has not there."""
        places = list(zip(self._units, lender.placements))
        copied = {u.likeness for u, p in places if p.moves_each_step and not p.in_arena}
        computed = {u.likeness for u, p in places if not p.is_on_acc} - copied
        found: dict[str, Place] = {}
        for unit, place in places:
            on_cpu = unit.likeness in computed if place.in_arena else not place.is_on_acc
            keeps = not place.in_arena and (may_divide(self.costs) or unit.kind.parts)
            if unit.kind.is_looked_up or on_cpu:
                found[unit.name] = ON_CPU, False, WHOLE
            else:
                found[unit.name] = STREAMED, False, place.share if keeps else WHOLE
        return found

    def _list_inside(self, lender: TierPlan) -> dict[str, Place]:
        """Where each unit is that the lender has in VRAM, but for those of which the CPU may have nothing here."""
        return {
            unit.name: (place.where, False, place.share)
            for unit, place in zip(self._units, lender.placements)
            if place.in_arena and (not place.cpu_rows or unit.kind.parts or may_divide(self.costs))
        }

    def _takes_outside(self, outside: dict[str, Place], way: TierCosts) -> float:
        """Seconds that no number of pins and slots beats: units take turns, copies share the link."""
        busy = link = 0.0
        pins = set(self.order.pin_order[: self.search.most_pins])
        for unit in self._units:
            where, _, share = outside[unit.name]
            took, copies = self._time_least(unit, (where, True, share), way)
            if unit.name in pins:
                shared = self.order.shares.get(unit.name)
                took = 0.0 if shared else min(took, self._time_least(unit, (PINNED, True, WHOLE), way)[0])
                copies = 0.0
            busy, link = busy + took, link + copies
        return max(busy, link)

    def takes_at_least(self, tier: TierPlan, way: TierCosts) -> float:
        """Seconds that no order of the tier's units beats."""
        busy = link = 0.0
        for unit, place in zip(self._units, tier.placements):
            known = self._placed.get((id(place), way.in_place))
            if known is None:
                times = self._time_least(unit, (place.where, place.has_state_in_vram, place.share), way)
                known = self._placed[id(place), way.in_place] = place, *times  # with it, as no other has its identity
            busy, link = busy + known[1], link + known[2]
        return max(busy, link)

    def _time_least(self, unit: Unit, place: Place, way: TierCosts) -> tuple[float, float]:
        key = way.likeness(unit), place, way.in_place
        if key not in self._least:
            self._least[key] = least_times(unit, place, way)
        return self._least[key]

    def _fit(self, loan: "_Loan") -> Iterator[TierPlan]:
        """The loan with as many pins as the lender has, or as fit; and with as many as fit, where these are more."""
        least, most = self.order.least_pins, self.search.most_pins
        pins = max(least, min(len(loan.inside), most))
        tier = self._draft(loan, pins)
        if tier:
            yield tier
            low, over = pins, most + 1
            if low == most or not self._draft(loan, low + 1):
                return
            low += 1
        else:
            low, over = least - 1, pins
        while over - low > 1:
            middle = (low + over) // 2
            low, over = (middle, over) if self._draft(loan, middle) else (low, middle)
        if low >= least and (fullest := self._draft(loan, low)):
            yield fullest

    def _draft(self, loan: "_Loan", pins: int) -> TierPlan | None:
        """None where it does not fit."""
        where, shares = dict(loan.where), dict(loan.shares)
        kv = frozenset(self.order.kv_order[: max(self.order.least_kv, loan.cells)])
        where |= {name: STREAMED for name in kv if where[name] == ON_CPU}
        for name in self.order.pin_order[:pins]:
            share = self.search.share_of(name, False) if self.order.shares else WHOLE
            if share is None:  # a tier of many tokens ends before units that are divided by rows
                return None
            where[name] = STREAMED if share.kept else PINNED
            if name in loan.inside:
                where[name], _, share = loan.inside[name]
            shares.pop(name, None)
            shares |= {name: share} if share else {}
        tier = draft_tier(self.room, self.costs.load.tokens, where, kv, loan.slots, shares, loan.in_place)
        return tier if tier.buffers.total <= self.room.arena else None


@dataclass(frozen=True)
class _Loan:
    """Where units are when they are not in VRAM, and those when they are that the lender has there; of how many layers
    the KV is there, slots, and how experts are read."""

    outside: Mapping[str, Place]
    inside: Mapping[str, Place]
    cells: int
    slots: int
    in_place: bool

    @cached_property
    def where(self) -> dict[str, str]:
        return {name: where for name, (where, _, _) in self.outside.items()}

    @cached_property
    def shares(self) -> dict[str, Share]:
        return {name: share for name, (_, _, share) in self.outside.items() if share}


def _count_cells(tier: TierPlan) -> int:
    """Of how many layers the KV is in VRAM."""
    return sum(p.has_state_in_vram for p in tier.placements)
