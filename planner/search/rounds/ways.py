"""Ways to have a unit in one of several tiers, with what each takes: a search adds them up before it drafts a tier."""

from collections.abc import Iterable, Mapping, Sequence
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
    stage, joined: bytes beside the scratch that units with a state, and divided ones, share. busy, link: seconds in
    turn with other units and of the link, at least.
    """

    place: Place
    held: Held
    fixed: int
    slot: int
    copied: bool
    stage: int
    joined: int
    busy: float
    link: float


def hold(unit: Unit, place: Place) -> Held:
    """What a unit holds in VRAM at a place."""
    where, in_vram, share = place
    if where == PINNED:
        return (count_shares(unit) - share.cpu if share else -1), in_vram
    return share.kept, in_vram


def lies_in(one: Held, other: Held) -> bool:
    """Whether what one tier holds of a unit is held by the other too, the same bytes of it."""
    return one[0] in (0, other[0]) and one[1] <= other[1]


class TierWays:
    """All ways of all units in one tier."""

    def __init__(self, room: Room, costs: TierCosts, places: tuple[tuple[Place, ...], ...]) -> None:
        self._room, self._costs, self._scratch = room, costs, room.scratch(costs.load.tokens)
        self._away = dict.fromkeys(room.columns.names, ON_CPU)
        known: dict[tuple, tuple[Way, ...]] = {}
        for unit, of in zip(room.spec.units, places):
            if (unit.likeness, of) not in known:
                known[unit.likeness, of] = tuple(self.make(unit, place) for place in of)
        self.of_unit = [known[unit.likeness, of] for unit, of in zip(room.spec.units, places)]
        self.by_held = [_group(ways) for ways in self.of_unit]

    def make(self, unit: Unit, place: Place) -> Way:
        """What a place of a unit takes, as a draft of it alone says."""
        where, in_vram, share = place
        kv = frozenset((unit.name,)) if in_vram else frozenset[str]()
        shares = {unit.name: share} if share else {}
        buffers = draft_tier(
            self._room, self._costs.load.tokens, self._away | {unit.name: where}, kv, 1, shares
        ).buffers
        beside = buffers.scratch + buffers.cached - self._scratch
        return Way(
            place,
            hold(unit, place),
            buffers.pinned + buffers.kv,
            buffers.slot_bytes,
            bool(buffers.slots),
            beside if unit.kind.state else 0,
            0 if unit.kind.state else beside,
            *least_times(unit, place, self._costs),
        )

    def count_bytes(self, ways: Sequence[Way], slots: int) -> int:
        """Bytes of the tier in the arena, as its draft has them."""
        fixed = sum(way.fixed for way in ways)
        slots = min(slots, sum(way.copied for way in ways))
        beside = max(way.stage for way in ways) + max(way.joined for way in ways)
        return self._scratch + fixed + beside + slots * max(way.slot for way in ways)


def _group(ways: Iterable[Way]) -> Mapping[Held, tuple[Way, ...]]:
    """Ways by what they hold."""
    found: dict[Held, tuple[Way, ...]] = {}
    for way in ways:
        found[way.held] = (*found.get(way.held, ()), way)
    return found


def least_seconds(ways: Sequence[Way]) -> float:
    """Seconds that no tier with these ways beats: units take turns, copies share the link."""
    return max(sum(way.busy for way in ways), sum(way.link for way in ways))


def lies_within(one: Sequence[Way], other: Sequence[Way]) -> bool:
    """Whether what one tier holds is held by the other too, with the same bytes of each unit."""
    return all(lies_in(a.held, b.held) for a, b in zip(one, other))


def goes_with(one: Sequence[Way], other: Sequence[Way]) -> bool:
    """Whether the pins of one lie within those of the other, and likewise the states."""
    unlike = [(a.held, b.held) for a, b in zip(one, other) if a.held != b.held]
    pins = [(a[0], b[0]) for a, b in unlike if a[0] != b[0]]
    states = [a[1] for a, b in unlike if a[1] != b[1]]
    return (not any(a for a, _ in pins) or not any(b for _, b in pins)) and (all(states) or not any(states))


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
        beside = ((STREAMED, False, share) for share in sorted(share for share in kept if share))
        found.append((*place_choices(unit.kind), *(divided_choices(some) if may else ()), *beside))
    return tuple(found)
