"""Ways to have a unit in a tier, with what each takes: a search adds them up before it drafts the tier."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pshard.homes import ON_CPU, PINNED, STREAMED
from pshard.planner.price.draft import Room, draft_tier
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.coefficients import may_divide
from pshard.planner.program.unit_classes import UnitClass
from pshard.planner.search.places import Place, divided_choices, least_times, place_choices
from pshard.units.divide_unit import count_shares, without_cpu
from pshard.units.unit import Unit

Held = tuple[int, bool]  # of a unit's rows or parts in the arena (-1: all of it), and whether its state is in VRAM
NOTHING: Held = (0, False)


class Way(NamedTuple):
    """A place, and what it adds to its tier. Bytes, seconds.

    held: what other tiers must agree with. fixed: bytes pinned and of the state. slot: bytes that a slot must have.
    stage, joined: bytes beside the scratch that units with a state, and divided ones, share. busy: seconds in turn with
    other units; copy, fetch: of the link, for weights and for the state.
    """

    place: Place
    held: Held
    fixed: int
    slot: int
    copied: bool
    stage: int
    joined: int
    busy: float
    copy: float
    fetch: float

    @property
    def on_cpu(self) -> bool:
        return self.place[0] == ON_CPU


def hold(unit: Unit, place: Place) -> Held:
    """What a unit holds in VRAM at a place."""
    where, in_vram, share = place
    if where == PINNED:
        return (count_shares(unit) - share.cpu if share else -1), in_vram
    return share.kept, in_vram


class TierWays:
    """All ways of all units in one tier, by number; units that are alike have the same ones."""

    def __init__(self, room: Room, costs: TierCosts, places: tuple[tuple[Place, ...], ...]) -> None:
        self._room, self._costs = room, costs
        self.scratch = room.scratch(costs.load.tokens)
        self._away = dict.fromkeys(room.columns.names, ON_CPU)
        self.all: list[Way] = []
        self._numbers: dict[tuple, int] = {}
        units = room.spec.units
        self.of_unit = [tuple(self.number(unit, place) for place in of) for unit, of in zip(units, places)]

    def number(self, unit: Unit, place: Place) -> int:
        """The number of a way, which is a new one where nobody asked for it before."""
        key = self._costs.likeness(unit), place
        if key not in self._numbers:
            self._numbers[key] = len(self.all)
            self.all.append(self._make(unit, place))
        return self._numbers[key]

    def _make(self, unit: Unit, place: Place) -> Way:
        """What a place of a unit takes, as a draft of it alone says."""
        where, in_vram, share = place
        kv = frozenset((unit.name,)) if in_vram else frozenset[str]()
        shares = {unit.name: share} if share else {}
        buffers = draft_tier(
            self._room, self._costs.load.tokens, self._away | {unit.name: where}, kv, 1, shares
        ).buffers
        beside = buffers.scratch + buffers.cached - self.scratch
        busy, link = least_times(unit, place, self._costs)
        moves = bool(unit.kind.state) and where != ON_CPU and not in_vram
        fetch = self._costs.units[unit.name].kv_fetch if moves else 0.0
        return Way(
            place=place,
            held=hold(unit, place),
            fixed=buffers.pinned + buffers.kv,
            slot=buffers.slot_bytes,
            copied=bool(buffers.slots),
            stage=beside if unit.kind.state else 0,
            joined=0 if unit.kind.state else beside,
            busy=busy,
            copy=link - fetch,
            fetch=fetch,
        )

    def count_bytes(self, numbers: Iterable[int], slots: int) -> int:
        """Bytes of the tier in the arena, as its draft has them."""
        ways = [self.all[n] for n in numbers]
        fixed = sum(way.fixed for way in ways)
        slots = min(slots, sum(way.copied for way in ways))
        beside = max(way.stage for way in ways) + max(way.joined for way in ways)
        return self.scratch + fixed + beside + slots * max(way.slot for way in ways)

    def least_seconds(self, numbers: Sequence[int], slots: int) -> float:
        """Seconds that no tier with these ways beats: units take turns, copies share the link. A unit that has a slot
        for itself is copied once for all micro-batches."""
        ways = [self.all[n] for n in numbers]
        copies = sorted([way.copy for way in ways if way.copied], reverse=True)
        once = min(len(copies), max(0, 2 * slots - len(copies)))
        read = sum([way.copy for way in ways if not way.copied]) + sum(copies[once:])
        return max(sum([way.busy for way in ways]), read + sum([way.fetch for way in ways]))


def list_ways(
    room: Room, classes: tuple[UnitClass, ...], costs: TierCosts, divides: bool
) -> tuple[tuple[Place, ...], ...]:
    """By unit, how a tier may have it: whole, and with `divides` divided, or with what another tier
    divides kept in VRAM.

    With limited host memory all is whole: of what is there in part, and of all after it, the host keeps a copy.
    """
    shares = {u.name: cls.shares if divides and room.host is None else () for cls in classes for u in cls.units}
    may, found = may_divide(costs), []
    for unit in room.spec.units:
        some = shares[unit.name]
        kept = {without_cpu(unit, share) for share in some} - {None, *some}
        beside = ((STREAMED, False, share) for share in sorted(share for share in kept if share))
        found.append((*place_choices(unit.kind, room.sums), *(divided_choices(some) if may else ()), *beside))
    return tuple(found)
