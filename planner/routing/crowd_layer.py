"""One layer of experts more in VRAM than has room there beside what every token reads: some of that comes over the link
for each token instead, which has time for it while experts are read from disk."""

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

from pshard.homes import PINNED, STREAMED
from pshard.plan import TierPlan
from pshard.planner.beyond_host import fill_arena
from pshard.planner.price.draft import Room, draft_tier
from pshard.planner.search.residency_order import spread


def crowd_layer(
    room: Room, tiers: Sequence[TierPlan], layers: Sequence[str], widest: int, slots: int
) -> tuple[TierPlan, ...] | None:
    """The tiers with the first of these layers that those of up to `widest` tokens have not pinned yet pinned in all of
    them, and as few bytes as possible streamed for it, in every tier; then with what layers have room in larger ones.
    None where there is no such layer, or nothing makes room for it."""
    crowded = [tier for tier in tiers if tier.tokens <= widest]
    held = {place.unit for tier in crowded for place in tier.placements if place.in_arena}
    layer = next((name for name in layers if name not in held), None)
    if layer is None:
        return None
    tried = [
        away for alike in _list_alike(room, crowded, layers) if (away := _choose(room, crowded, layer, alike, slots))
    ]
    if not tried:
        return None
    away = min(tried, key=lambda names: sum(room.spec.unit(name).packed_nbytes for name in names))
    moved = [_move(room, tier, [layer] if tier in crowded else [], away, slots) for tier in tiers]
    return fill_arena(room, moved, layers, slots=slots)


def _list_alike(room: Room, tiers: Sequence[TierPlan], layers: Sequence[str]) -> Iterator[list[str]]:
    """Units of equal sizes that all of these tiers have pinned and that may be streamed, in the order of the model."""

    def may_leave(name: str) -> bool:
        places = [tier.placement(name) for tier in tiers]
        return all(p.is_whole_in_arena and (STREAMED, p.kv) in room.list_places(name) for p in places)

    names = [name for name in room.columns.names if name not in layers and may_leave(name)]
    names.sort(key=lambda name: room.spec.unit(name).packed_nbytes)
    for _, alike in groupby(names, key=lambda name: room.spec.unit(name).packed_nbytes):
        yield list(alike)


def _choose(room: Room, tiers: Sequence[TierPlan], layer: str, alike: Sequence[str], slots: int) -> set[str]:
    """The fewest of units of one size, evenly spread, that make room for the layer and for their own slots; none where
    all of them do not."""
    lacks = max(_move(room, tier, [layer], [], slots).buffers.total for tier in tiers) - room.arena
    for count in range(max(1, lacks // room.spec.unit(alike[0]).packed_nbytes), len(alike) + 1):
        away = {alike[i] for i in spread(len(alike), count)}
        if all(_move(room, tier, [layer], away, slots).buffers.total <= room.arena for tier in tiers):
            return away
    return set()


def _move(room: Room, tier: TierPlan, pinned: Collection[str], away: Collection[str], slots: int) -> TierPlan:
    """A tier with some units pinned, and with others streamed where it has them pinned."""
    where = {p.unit: STREAMED if p.unit in away and p.in_arena else p.where for p in tier.placements}
    kv = frozenset(p.unit for p in tier.placements if p.has_state_in_vram)
    where |= dict.fromkeys(pinned, PINNED)
    return draft_tier(room, tier.tokens, where, kv, slots, sweep=tier.sweep, waves=tier.waves)
