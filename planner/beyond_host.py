"""What of a plan lives beyond host memory, where that does not hold it: the units that cost a round least for their
bytes. They come to the accelerator for every micro-batch, through the lanes of their home."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import inf

from pshard.batch_sizes import SMALL_BATCH
from pshard.errors import NoPlan
from pshard.homes import DISK, ON_CPU, ON_DEMAND, PINNED, STREAMED, VRAM, Home
from pshard.on_host import keep_on_host
from pshard.plan import Placement, Sweep, TierPlan
from pshard.planner.price.draft import Beyond, Room, draft_tier, simulated_seconds, swept_seconds
from pshard.planner.price.host_limits import kept_bytes
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.search.residency_order import spread
from pshard.planner.search.round_times import plan_seconds
from pshard.predicted_times import count_swept, sum_first_token
from pshard.units.share import WHOLE
from pshard.units.unit import Unit

MOST_SIZES = 4  # of units, the largest, for which slots are tried
MOST_TRIED = 6  # units of which all sets are tried
MOST_SWEPT = 3  # plans that are tried with sweeps, the fastest ones without
SLOTS = 2  # one is filled while the other is computed from
SWEPT_SLOTS = (SLOTS, 3, 4)  # a unit stays in its slot as long as all micro-batches of a sweep have their turn
SPREAD = 0.618  # of equal units in turn: any number of them lies evenly over the layers


def move_beyond(
    room: Room, tiers: tuple[TierPlan, ...], pin_order: tuple[str, ...], costs: Sequence[TierCosts]
) -> tuple[TierPlan, ...]:
    """The tiers with so many units beyond host memory that it holds the rest: those, and as they are or with the arena
    filled with what else would be outside, whichever takes less time. Raises NoPlan when not even all that may live
    there suffices."""
    if room.beyond is None or kept_bytes(room, tiers) <= room.beyond.host:
        return tiers
    found, why = list[_Moved](), None
    for tried, moved in dict.fromkeys(_list_tries(room, tiers, costs, room.beyond)):  # many are alike
        try:
            found.append(_Moved(_move_all(room, tried, moved, pin_order, room.beyond.home), tried, moved))
        except NoPlan as error:
            why = error
    totals = {i: _sum_seconds(room, one.tiers, costs) for i, one in enumerate(found) if _holds(room, one.tiers)}
    if not totals:
        lacks = kept_bytes(room, tiers) - room.beyond.host
        lacks -= sum(nbytes for _, nbytes in _list_movable(room, tiers, costs, room.beyond.home))
        raise why if why and lacks <= 0 else _lack(lacks, room.beyond)
    first, *others = (found[i] for i in sorted(totals, key=totals.__getitem__))
    return _sweep(room, (first, *others[: MOST_SWEPT - 1]), pin_order, costs)


@dataclass(frozen=True)
class _Moved:
    """Tiers with so many units beyond host memory, and what they were before."""

    tiers: tuple[TierPlan, ...]
    tried: tuple[TierPlan, ...]
    moved: frozenset[str]


def _holds(room: Room, tiers: Sequence[TierPlan]) -> bool:
    return room.beyond is not None and kept_bytes(room, tiers) <= room.beyond.host


def _sum_seconds(room: Room, tiers: Sequence[TierPlan], costs: Sequence[TierCosts]) -> float:
    """Seconds of a round. Raises ValueError where no sweep can be as the last tier has it."""
    seconds = [simulated_seconds(room, tier, cost) for tier, cost in zip(tiers, costs, strict=True)]
    total, w = plan_seconds(room, tiers, seconds, costs), room.workload
    if tiers[-1].sweep is None:
        return total
    in_turn = sum_first_token(w, {tier.tokens: (took,) for tier, took in zip(tiers, seconds)})
    swept = count_swept(w, tiers[-1].tokens) * swept_seconds(room, tiers[-1], costs[-1])
    return total - w.rounds_of_prompts * (in_turn - swept)


def _sweep(
    room: Room, found: Sequence[_Moved], pin_order: tuple[str, ...], costs: Sequence[TierCosts]
) -> tuple[TierPlan, ...]:
    """The first of these, or the one with sweeps that take less time: in as few as their rows have room for."""
    best, least = found[0].tiers, _sum_seconds(room, found[0].tiers, costs)
    batches = count_swept(room.workload, best[-1].tokens)
    passes, home = 1, room.beyond.home if room.beyond else None
    while home and passes < batches:
        before = least
        for one, slots in product(found, SWEPT_SLOTS):
            last = replace(one.tried[-1], sweep=Sweep(-(-batches // passes)))
            last = replace(last, buffers=replace(last.buffers, slots=max(last.buffers.slots, slots)))
            with suppress(NoPlan, ValueError):  # no room for rows that wait, or some on the host
                swept = _move_all(room, (*one.tried[:-1], last), one.moved, pin_order, home)
                total = _sum_seconds(room, swept, costs) if _holds(room, swept) else inf
                best, least = (swept, total) if total < least else (best, least)
        if least == before and best[-1].sweep:
            break
        passes *= 2
    return best


def _list_tries(
    room: Room, tiers: tuple[TierPlan, ...], costs: Sequence[TierCosts], beyond: Beyond
) -> Iterator[tuple[tuple[TierPlan, ...], frozenset[str]]]:
    """Tiers, and what of them may live beyond host memory. They are as they are; with what is left of their arenas
    filled with pins; and with other pins, the largest units first: the largest one of what is not pinned is as large as
    slots are."""
    names = list_spread(room)
    by_size = sorted(names, key=lambda name: -room.spec.unit(name).packed_nbytes)
    without_pins = tuple(dict.fromkeys(_list_bare(room, tiers)))
    starts = [tiers, fill_arena(room, tiers, names), *(fill_arena(room, bare, by_size) for bare in without_pins)]
    for tried in dict.fromkeys(starts):
        for moved in _choose_moved(room, tried, costs, beyond):
            yield tried, frozenset(moved)
    for bare in without_pins:
        sizes = {nbytes for _, nbytes in _list_movable(room, bare, costs, beyond.home)}
        for size in sorted(sizes)[-MOST_SIZES:]:  # of the slots of the smallest tier: larger units are elsewhere in it
            tried = fill_arena(room, bare, by_size, SLOTS * size)
            yield tried, frozenset(_choose_evenly(room, tried, costs, beyond, size))


def _choose_evenly(
    room: Room, tiers: Sequence[TierPlan], costs: Sequence[TierCosts], beyond: Beyond, size: int
) -> set[str]:
    """What the smallest tier has in VRAM, and tables, of which rows are read; then units of at most `size` bytes that
    lie evenly between others, so that each is read while these are computed: so many that host memory holds the
    rest."""
    left, movable = kept_bytes(room, tiers) - beyond.host, dict(_list_movable(room, tiers, costs, beyond.home))
    first = {p.unit for p in tiers[0].placements if p.in_arena} | _list_looked_up(room)
    moved = _take([pair for pair in movable.items() if pair[0] in first], left)
    left -= sum(movable[name] for name in moved)
    others = [name for name in room.columns.names if movable.get(name, size + 1) <= size and name not in first]
    others.sort(key=lambda name: -movable[name])  # units that are alike stay in their order
    alike = [name for name in others if 2 * movable[name] > size]
    most = sum(movable[name] for name in alike)
    if left <= 0 or not alike or most < left:
        return moved | _take([(name, movable[name]) for name in others], left)
    count = next(n for n in range(1, len(alike) + 1) if sum(movable[alike[i]] for i in spread(len(alike), n)) >= left)
    return moved | {alike[i] for i in spread(len(alike), count)}


def _choose_moved(
    room: Room, tiers: Sequence[TierPlan], costs: Sequence[TierCosts], beyond: Beyond
) -> Iterator[set[str]]:
    """Sets of units that may live beyond host memory so that it holds the rest: the cheapest for their bytes, and where
    there are few all sets that suffice and of which none could be left out."""
    left, movable = kept_bytes(room, tiers) - beyond.host, list(_list_movable(room, tiers, costs, beyond.home))
    if left > sum(nbytes for _, nbytes in movable):
        return
    moved = _take(movable, left)
    yield moved
    if not movable:  # all is in VRAM
        return
    sizes, tables = sorted(nbytes for _, nbytes in movable), _list_looked_up(room)
    middle = 2 * sizes[len(sizes) // 2]
    small = [(name, nbytes) for name, nbytes in movable if nbytes <= middle or name in tables]
    if len(small) < len(movable) and sum(nbytes for _, nbytes in small) >= left:
        yield _take(small, left)  # slots take room too, and are as large as the largest
    if len(movable) > MOST_TRIED:
        return
    for count in range(1, len(movable) + 1):
        for some in combinations(movable, count):
            spare = sum(nbytes for _, nbytes in some) - left
            names = {name for name, _ in some}
            if spare >= 0 and names != moved and all(nbytes > spare for _, nbytes in some):
                yield names


def _take(movable: Sequence[tuple[str, int]], left: int) -> set[str]:
    """The first units that have so many bytes."""
    moved = set[str]()
    for name, nbytes in movable:
        if left > 0:
            moved.add(name)
            left -= nbytes
    return moved


def _lack(nbytes: int, beyond: Beyond) -> NoPlan:
    """What to say where no set of units suffices: so many bytes too few could be moved."""
    mib = -(-max(1, nbytes) >> 20)
    return NoPlan(f"host memory lacks {mib} MiB for what cannot live in {beyond.home}: give it more, or --vram")


def list_spread(room: Room) -> list[str]:
    """Units in an order of which every beginning lies evenly over the layers; none whose rows are looked up."""
    names = sorted((i * SPREAD % 1, unit.name) for i, unit in enumerate(room.spec.units))
    return [name for _, name in names if not room.spec.unit(name).kind.is_looked_up]


def _list_bare(room: Room, tiers: Sequence[TierPlan]) -> Iterator[tuple[TierPlan, ...]]:
    """The tiers with nothing pinned: all of it streamed, or where most of its kind are, or, of few tokens, where it
    lies, so that slots are small and the link is free for what comes from further away."""
    yield tuple(_unpin(room, tier, {}) for tier in tiers)
    yield tuple(_unpin(room, tier, _count_sites(room, tier)) for tier in tiers)
    if any(tier.tokens <= SMALL_BATCH for tier in tiers):
        yield tuple(
            _leave_on_host(room, tier) if tier.tokens <= SMALL_BATCH else _unpin(room, tier, {}) for tier in tiers
        )


def _count_sites(room: Room, tier: TierPlan) -> dict[str, Counter[str]]:
    """How many units are where, but in VRAM, by the name of their kind."""
    found = dict[str, Counter[str]]()
    for p in tier.placements:
        if not p.in_arena and not p.share:
            found.setdefault(room.spec.unit(p.unit).kind.name, Counter())[p.where] += 1
    return found


def _unpin(room: Room, tier: TierPlan, usual: Mapping[str, Counter[str]]) -> TierPlan:
    """A tier with nothing divided, and with nothing pinned that may be elsewhere: where most of its kind are by
    `usual`, else streamed."""
    where = {p.unit: p.where for p in tier.placements}
    for p in tier.placements:
        if p.in_arena:
            legal, counted = room.list_places(p.unit), usual.get(room.spec.unit(p.unit).kind.name, Counter[str]())
            sites = (*(site for site, _ in counted.most_common()), STREAMED)
            where[p.unit] = next((site for site in sites if (site, p.kv) in legal), p.where)
    kv = frozenset(p.unit for p in tier.placements if p.has_state_in_vram)
    return draft_tier(room, tier.tokens, where, kv, SLOTS, {}, tier.in_place)


def _leave_on_host(room: Room, tier: TierPlan) -> TierPlan:
    """A tier with nothing divided, and with everything computed by the CPU that may be, but for cells in VRAM."""
    places = tier.placements
    where = {p.unit: ON_CPU if (ON_CPU, p.kv) in room.list_places(p.unit) else p.where for p in places}
    away = {
        p.unit: STREAMED for p in places if where[p.unit] == PINNED and (STREAMED, p.kv) in room.list_places(p.unit)
    }
    kv = frozenset(p.unit for p in places if p.has_state_in_vram)
    return draft_tier(room, tier.tokens, where | away, kv, SLOTS, {}, tier.in_place)


def fill_arena(
    room: Room, tiers: Sequence[TierPlan], order: Sequence[str], spare: int = 0, slots: int = SLOTS
) -> tuple[TierPlan, ...]:
    """The tiers with whole units pinned in what is left of the arena beside slots and so many spare bytes, in that
    order; a larger tier has none that a smaller one has not."""
    found, cells = list[TierPlan](), [{p.unit for p in tier.placements if p.has_state_in_vram} for tier in tiers]
    for i, tier in enumerate(tiers):
        if not any(p.share for p in tier.placements):
            grows = set[str]().union(*cells[i:]) == cells[i]  # else its cells lie within those of another tier
            kept = [n for n in order if grows or n in cells[i] or room.spec.unit(n).kind.state is None]
            tier = _fill_tier(room, tier, kept, spare, slots)
        there = {p.unit for p in tier.placements if p.in_arena and not p.has_state_on_host}
        order = [name for name in order if name in there]
        found.append(tier)
    return tuple(found)


def _fill_tier(room: Room, tier: TierPlan, order: Sequence[str], spare: int, slots: int) -> TierPlan:
    where = {p.unit: p.where for p in tier.placements}
    kv = {p.unit for p in tier.placements if p.has_state_in_vram}
    for name in order:
        has_state = room.spec.unit(name).kind.state is not None
        pinned = PINNED, VRAM.name if has_state else None
        if where[name] == PINNED or pinned not in room.list_places(name):
            continue
        wider = where | {name: PINNED}, kv | ({name} if has_state else set())
        in_place, sweep, waves = tier.in_place, tier.sweep, tier.waves
        drafted = draft_tier(
            room, tier.tokens, wider[0], frozenset(wider[1]), slots, in_place=in_place, sweep=sweep, waves=waves
        )
        if drafted.buffers.total + spare <= room.arena:
            (where, kv), tier = wider, drafted
    return tier


def _move_all(
    room: Room, tiers: tuple[TierPlan, ...], moved: frozenset[str], pin_order: tuple[str, ...], home: Home
) -> tuple[TierPlan, ...]:
    """The tiers with these units beyond host memory. Raises NoPlan where a tier has no room for slots."""
    barred = [frozenset[str]()] * len(tiers)
    while True:  # what one tier has no room for lives there in all others too
        redrafted = tuple(_redraft(room, t, moved, out, pin_order, home) for t, out in zip(tiers, barred))
        dropped = {p.unit for tier in redrafted for p in tier.placements if p.site.is_beyond_host} - moved
        strays = list_strays(redrafted)
        if not dropped and not any(strays):
            return redrafted
        moved, barred = moved | dropped, [out | more for out, more in zip(barred, strays)]


def list_strays(tiers: Sequence[TierPlan]) -> list[set[str]]:
    """What each tier has pinned that one with as many pins or more has not: residency must not move."""
    pins = [{p.unit for p in tier.placements if p.in_arena} for tier in tiers]
    strays, around = [set[str]() for _ in tiers], set[str]().union(*pins)
    for i in sorted(range(len(tiers)), key=lambda i: -len(pins[i])):
        strays[i], around = pins[i] - around, pins[i] & around
    return strays


def _list_movable(
    room: Room, tiers: Sequence[TierPlan], costs: Sequence[TierCosts], home: Home
) -> Iterator[tuple[str, int]]:
    """Units with their bytes in host memory, those first that cost a round least for them."""
    followed = {name for cache in room.spec.caches for name in cache.units}
    found = []
    for i, unit in enumerate(room.spec.units):
        places = [tier.placement(unit.name) for tier in tiers]
        kept = keep_on_host(unit, places)
        if kept is not None and unit.name not in followed and _may_live(room, unit, places, home):
            pairs = zip(places, costs, strict=True)
            seconds = sum(c.load.weight * _over_lanes(unit, c, home) for p, c in pairs if not p.site.in_arena)
            found.append((seconds / kept.nbytes, i * SPREAD % 1, unit.name, kept.nbytes))
    for _, _, name, nbytes in sorted(found):
        yield name, nbytes


def _list_looked_up(room: Room) -> set[str]:
    return {unit.name for unit in room.spec.units if unit.kind.is_looked_up}


def _may_live(room: Room, unit: Unit, places: Sequence[Placement], home: Home) -> bool:
    legal = room.list_places(unit.name)
    return all(not p.share and (p.site.in_arena or (_name_site(unit, home), p.kv) in legal) for p in places)


def _name_site(unit: Unit, home: Home) -> str:
    """What a plan says of a unit that lives in a home: of a table on disk rows are read as they are looked up."""
    return ON_DEMAND if unit.kind.is_looked_up and home is DISK else home.name


def _over_lanes(unit: Unit, cost: TierCosts, home: Home) -> float:
    """Seconds of the slowest lane for all of a unit, or for the rows that are looked up."""
    if unit.kind.is_looked_up:
        return cost.reading_rows(unit)
    return max(cost.over_lane(lane, unit.name, WHOLE) for lane in home.way_in)


def _redraft(
    room: Room, tier: TierPlan, moved: frozenset[str], barred: frozenset[str], pin_order: tuple[str, ...], home: Home
) -> TierPlan:
    """A tier with units beyond host memory but where it has them in VRAM; those that are barred it has not. Where slots
    for them lack room, the last pins live there too. Raises NoPlan where that is not enough."""
    places = {p.unit: p for p in tier.placements}
    far = {n: _name_site(room.spec.unit(n), home) for n in moved}
    where = {n: far[n] if n in moved and not p.site.in_arena else p.where for n, p in places.items()}
    where |= {name: _leave(room, places[name], home) for name in barred}
    shares = {n: p.share for n, p in places.items() if p.share}
    kv = frozenset(n for n, p in places.items() if p.has_state_in_vram)
    known = {name: i for i, name in enumerate(pin_order)}
    pins = [n for n, p in places.items() if p.in_arena and n not in barred]
    pins.sort(key=lambda n: known.get(n, len(known)))
    for slots in (max(tier.buffers.slots, SLOTS), 1):
        tried, left = dict(where), list(pins)
        while True:
            drafted = draft_tier(room, tier.tokens, tried, kv, slots, shares, tier.in_place, tier.sweep)
            if drafted.buffers.total <= room.arena:
                return drafted
            last = next((n for n in reversed(left) if n not in shares and _leave(room, places[n], home)), None)
            if last is None:
                break
            left.remove(last)
            tried[last] = _leave(room, places[last], home)
    raise NoPlan(f"{room.workload.vram_mib[0]} MiB have no room for a slot of what lives on {home}; raise --vram")


def _leave(room: Room, place: Placement, home: Home) -> str:
    """Where else a pinned unit may be, with its state where that is: beyond host memory, or what is looked up there;
    "": nowhere."""
    legal, far = room.list_places(place.unit), _name_site(room.spec.unit(place.unit), home)
    return next((where for where in (far, ON_CPU) if (where, place.kv) in legal), "")
