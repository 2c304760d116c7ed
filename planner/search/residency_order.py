"""From counts to units: which ones of a class are pinned, streamed or on the CPU, spread evenly over the layers."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from pshard.homes import STREAMED
from pshard.plan import TierPlan
from pshard.planner.price.draft import Room
from pshard.planner.program.counts import Counts
from pshard.planner.program.unit_classes import UnitClass
from pshard.units.divide_unit import count_shares
from pshard.units.share import WHOLE, Share


def spread(n: int, k: int, phase: float = 0.5) -> list[int]:
    """k of the positions 0..n-1, evenly spaced; `phase` in (0, 1) shifts them."""
    return sorted({min(n - 1, int((i + phase) * n / k)) for i in range(k)}) if k else []


@dataclass(frozen=True)
class Residency:
    """Orders in which units become resident: every tier's pins and KV are prefixes of them.

    shares: of units that are in the arena in part. Tiers in which the CPU may have nothing of a unit do not reach those
        that are divided by rows; of others they stream the CPU's parts.
    least_pins, least_kv: how many every tier has in VRAM at least, as host memory does not hold more.
    """

    pin_order: tuple[str, ...]
    kv_order: tuple[str, ...]
    shares: Mapping[str, Share] = field(default_factory=dict)
    least_pins: int = 0
    least_kv: int = 0


def _spread_order(left: list[str], pins: list[int], phase: float) -> list[str]:
    """The names in pinning order: for each count in `pins`, what that prefix leaves out is evenly spaced, and nearly
    so for every other count."""
    tail: list[str] = []
    for count in sorted(set(pins), reverse=True):
        out = [left[i] for i in spread(len(left), len(left) - count, phase)]
        tail = [*_scatter(out), *tail]
        gone = set(out)
        left = [n for n in left if n not in gone]
    return [*_scatter(left), *tail]


def _scatter(names: list[str]) -> list[str]:
    """The names such that those at the beginning lie far apart: by their positions' binary digits, last one first."""
    return [names[i] for i in _scattered(len(names))]


@lru_cache(1 << 10)
def _scattered(n: int) -> list[int]:
    digits = n.bit_length()
    return sorted(range(n), key=lambda i: f"{i:0{digits}b}"[::-1])


def order_residency(
    classes: tuple[UnitClass, ...],
    counts: Sequence[tuple[Counts, ...]],
    even: bool,
    spaced: Sequence[tuple[Counts, ...]] = (),
) -> Residency:
    """Pin and KV orders for nested counts (tier by tier); both are prefixes of one permutation of each class.

    `even` leaves out units that are evenly spaced, which suits streaming; else the last layers stay in VRAM, so that
    CPU units are one run. `spaced`: the counts that leave out evenly spaced units, when these are not all of them.
    What the smallest tier pins in part comes after all that it pins whole.
    """
    whole = [n.pin_whole for n in counts[0]]
    partly = any(n.pin_whole < n.pin for n in counts[0])
    orders = []
    for c, cls in enumerate(classes):
        if even:
            marks = {n[c].pin for n in spaced or counts} | ({whole[c]} if partly else set())
            marks |= {n[c].kv for n in spaced or counts if cls.kind.state}
            orders.append(_spread_order([u.name for u in cls.units], sorted(marks), cls.kind.phase))
        else:
            orders.append([u.name for u in reversed(cls.units)])
    pins = [[n[c].pin for c in range(len(classes))] for n in counts]
    pin_order = _merge(orders, [whole, *pins] if partly else pins)
    kv_orders = [o if cls.kind.state else [] for o, cls in zip(orders, classes)]
    kv_order = _merge(kv_orders, [[n[c].kv for c in range(len(classes))] for n in counts])
    shares: dict[str, Share] = {}
    for cls, order, start, n in zip(classes, orders, whole, counts[0]):
        for share, (pinned, _) in zip(cls.shares, n.divided):
            shares |= dict.fromkeys(order[start : start + pinned], share)
            start += pinned
    return Residency(pin_order, kv_order, shares)


def arrange_residency(
    room: Room,
    classes: tuple[UnitClass, ...],
    counts: Sequence[tuple[Counts, ...]],
    even: bool,
    spaced: Sequence[tuple[Counts, ...]] = (),
) -> Residency:
    """`order_residency` within host memory, see `limit_host`."""
    return limit_host(room, order_residency(classes, counts, even, spaced), counts)


def limit_host(room: Room, residency: Residency, counts: Sequence[tuple[Counts, ...]]) -> Residency:
    """The orders with the shortest prefixes that any tier may have, so that host memory holds what all leave out.

    counts: of tiers that it does hold together. What they leave free goes to weights and KV by their bytes.
    """
    if room.host is None:
        return residency
    sizes = dict(zip(room.columns.names, room.columns.sizes))
    left = room.spec.packed_nbytes - sum(sizes[name] for name in residency.pin_order)
    outside = [left]  # bytes of weights in host memory, by length of the prefix from the longest one down
    for name in reversed(residency.pin_order):
        outside.append(outside[-1] + sizes[name])
    outside = [
        nbytes + sum(sizes[name] for name in residency.pin_order[:i] if name in residency.shares)
        for i, nbytes in enumerate(reversed(outside))
    ]
    weights = max(outside[min(sum(n.pin for n in tier), len(outside) - 1)] for tier in counts)
    away = [sum(room.states.values())]  # bytes of states in host memory, by length of the prefix
    for name in residency.kv_order:
        away.append(away[-1] - room.states[name])
    cells = max(away[min(sum(n.kv for n in tier), len(away) - 1)] for tier in counts)
    more = max(1.0, room.host / max(1, weights + cells))
    pins = next(i for i, nbytes in enumerate(outside) if nbytes <= weights * more)
    kv = next(i for i, nbytes in enumerate(away) if nbytes <= cells * more)
    return replace(residency, least_pins=pins, least_kv=kv)


def order_nested(room: Room, tiers: Sequence[TierPlan]) -> Residency:
    """Orders of which every tier's pins and KV are prefixes, where these lie within each other; units that are there
    in part come last of what a tier adds."""
    at = {u.name: i for i, u in enumerate(room.spec.units)}
    held = [{p.unit: p.share for p in tier.placements if p.in_arena} for tier in tiers]
    cells = [{p.unit for p in tier.placements if p.has_state_in_vram} for tier in tiers]
    shares = dict[str, Share]()
    for of_tier in sorted(held, key=lambda of: any(share.cpu for share in of.values())):  # what the CPU has says more
        shares |= {unit: share for unit, share in of_tier.items() if share}
    pins, kv = list[str](), list[str]()
    for names in sorted(held, key=len):
        pins += sorted(names.keys() - set(pins), key=lambda name: (name in shares, at[name]))
    for layers in sorted(cells, key=len):
        kv += sorted(layers - set(kv), key=at.__getitem__)
    return Residency(tuple(pins), tuple(kv), shares)


def _merge(orders: list[list[str]], prefixes: list[list[int]]) -> tuple[str, ...]:
    """One order of which every tier's set (prefixes[tier][class] of each class's order) is a prefix."""
    merged: list[str] = []
    taken = [0] * len(orders)
    for lengths in sorted(prefixes, key=sum):
        for c, length in enumerate(lengths):
            merged += orders[c][taken[c] : length]
            taken[c] = max(taken[c], length)
    return tuple(merged)


def assign_cpu(
    classes: tuple[UnitClass, ...], counts: tuple[int, ...], resident: frozenset[str], runs: int
) -> set[str]:
    """Names of the units that the CPU computes, out of those that are neither pinned nor have KV in VRAM.

    They form about `runs` runs of neighbours, evenly spread over the layers; 0 runs means one at the start, where
    the tokens come from.
    """
    layers = 1 + max(cls.units[-1].layer for cls in classes)
    centres = [(i + 0.5) * layers / runs for i in range(runs)] or [0.0]
    cpu: set[str] = set()
    for cls, count in zip(classes, counts):
        if not count:
            continue
        free = [u for u in cls.units if u.name not in resident]
        if cls.kind.position != "layer":
            cpu |= {u.name for u in free[:count]}
            continue
        names, middles = [u.name for u in free], [u.layer + 0.5 for u in free]
        for i, centre in enumerate(centres):
            share = (i + 1) * count // len(centres) - i * count // len(centres)
            near = _nearest(middles, centre, share)
            cpu.update(names[near])
            del names[near], middles[near]
    return cpu


def assign_divided(
    classes: tuple[UnitClass, ...], counts: tuple[tuple[int, ...], ...], taken: frozenset[str]
) -> dict[str, Share]:
    """Divided streamed units, evenly spread over those of their class that are not `taken`, with their shares.

    counts: by class, for each of its `shares`. Raises ValueError when there are fewer units.
    """
    shares: dict[str, Share] = {}
    for cls, of_class in zip(classes, counts):
        free = [u.name for u in cls.units if u.name not in taken]
        for share, count in zip(cls.shares, of_class):
            if count > len(free):
                raise ValueError(f"{count} of {len(free)} units of {cls.name} cannot be divided")
            chosen = [free[i] for i in spread(len(free), count)]
            shares |= dict.fromkeys(chosen, share)
            free = [name for name in free if name not in shares]
    return shares


def spread_parts(
    classes: tuple[UnitClass, ...], parts: tuple[int, ...], where: Mapping[str, str], shares: Mapping[str, Share]
) -> dict[str, Share] | None:
    """The shares of streamed units of which the CPU has nothing yet, when it gets so many `parts` of a class in all:
    of each in proportion to what is copied of it. Parts that are kept in the arena stay there. None where a class has
    none that is streamed, or a unit would have none left to copy."""
    found: dict[str, Share] = {}
    for cls, total in zip(classes, parts):
        if not total:
            continue
        free = [u for u in cls.units if where[u.name] == STREAMED and not shares.get(u.name, WHOLE).cpu]
        if not free:
            return None
        brought = [count_shares(u) - shares.get(u.name, WHOLE).kept for u in free]
        given = before = 0
        for unit, parts_of in zip(free, brought):
            before += parts_of
            cpu = total * before // sum(brought) - given
            given += cpu
            if cpu >= parts_of:
                return None
            if cpu:
                found[unit.name] = Share(cpu, shares.get(unit.name, WHOLE).kept)
    return found


def _nearest(middles: list[float], centre: float, count: int) -> slice:
    """Where the `count` of the ascending `middles` nearest to `centre` are, the earlier one of two."""
    left = right = bisect_left(middles, centre)
    while right - left < count and left and right < len(middles):
        if centre - middles[left - 1] <= middles[right] - centre:
            left -= 1
        else:
            right += 1
    missing = count - (right - left)  # one side is used up
    return slice(left, right + missing) if not left else slice(max(0, left - missing), right)
