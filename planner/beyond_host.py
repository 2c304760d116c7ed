"""What of a plan lives beyond host memory, where that does not hold it: the units that cost a round least for their
bytes. They come to the accelerator for every micro-batch, through the lanes of their home."""

from collections.abc import Iterator, Sequence

from pshard.errors import NoPlan
from pshard.homes import Home
from pshard.on_host import keep_on_host
from pshard.plan import Placement, TierPlan
from pshard.planner.price.draft import Room, draft_tier
from pshard.planner.price.host_limits import kept_bytes
from pshard.planner.price.tier_costs import TierCosts
from pshard.units.share import WHOLE
from pshard.units.unit import Place, Unit, places_of

SLOTS = 2  # one is filled while the other is computed from
SPREAD = 0.618  # of equal units in turn: any number of them lies evenly over the layers


def move_beyond(
    room: Room, tiers: tuple[TierPlan, ...], pin_order: tuple[str, ...], costs: Sequence[TierCosts]
) -> tuple[TierPlan, ...]:
    """The tiers with as few bytes beyond host memory as keep the rest within it. Raises NoPlan when not even all that
    may live there does."""
    if room.beyond is None or kept_bytes(room, tiers) <= room.beyond.host:
        return tiers
    home, left = room.beyond.home, kept_bytes(room, tiers) - room.beyond.host
    moved = set[str]()
    for name, nbytes in _list_movable(room, tiers, costs, home):
        if left <= 0:
            break
        moved.add(name)
        left -= nbytes
    if left > 0:
        raise NoPlan(f"host memory lacks {-(-left >> 20)} MiB for what cannot live in {home}: give it more, or --vram")
    while True:  # what one tier has no room for lives there in all others too
        redrafted = tuple(_redraft(room, tier, moved, pin_order, home) for tier in tiers)
        dropped = {p.unit for tier in redrafted for p in tier.placements if p.site.is_beyond_host} - moved
        if not dropped:
            return redrafted
        moved |= dropped


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


def _may_live(room: Room, unit: Unit, places: Sequence[Placement], home: Home) -> bool:
    legal = _legal(room, unit.name)
    return all(not p.share and (p.site.in_arena or (home.name, p.kv) in legal) for p in places)


def _over_lanes(unit: Unit, cost: TierCosts, home: Home) -> float:
    """Seconds of the slowest lane for all of a unit."""
    return max(cost.over_lane(lane, unit.name, WHOLE) for lane in home.way_in)


def _redraft(room: Room, tier: TierPlan, moved: set[str], pin_order: tuple[str, ...], home: Home) -> TierPlan:
    """A tier with units beyond host memory but where it has them in VRAM. Where slots for them lack room, the last pins
    live there too. Raises NoPlan where that is not enough."""
    places = {p.unit: p for p in tier.placements}
    where = {n: home.name if n in moved and not p.site.in_arena else p.where for n, p in places.items()}
    shares = {n: p.share for n, p in places.items() if p.share}
    kv = frozenset(n for n, p in places.items() if p.has_state_in_vram)
    pins = [n for n in pin_order if places[n].in_arena]
    for slots in (max(tier.buffers.slots, SLOTS), 1):
        tried, left = dict(where), list(pins)
        while True:
            drafted = draft_tier(room, tier.tokens, tried, kv, slots, shares, tier.in_place)
            if drafted.buffers.total <= room.arena:
                return drafted
            if not left or left[-1] in shares or (home.name, places[left[-1]].kv) not in _legal(room, left[-1]):
                break
            tried[left.pop()] = home.name
    raise NoPlan(f"{room.workload.vram_mib[0]} MiB have no room for a slot of what lives in {home}; raise --vram")


def _legal(room: Room, name: str) -> tuple[Place, ...]:
    return places_of(room.spec.unit(name).kind, room.sums)
