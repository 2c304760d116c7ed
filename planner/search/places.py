"""Places: how a search may have one unit, and what that takes at least."""

from pshard.homes import ON_CPU, PINNED, STREAMED
from pshard.planner.price.tier_costs import TierCosts
from pshard.units.share import WHOLE, Share
from pshard.units.unit import Unit, UnitKind, places_of

Place = tuple[str, bool, Share]  # where a unit is, whether its state is in VRAM, how it is divided


def place_choices(kind: UnitKind, sums: bool = False) -> tuple[Place, ...]:
    """The legal placements of units of a kind in VRAM and host memory, none of them divided; `sums` as in
    `places_of`."""
    legal = set(places_of(kind, sums))
    return tuple((place[0], place[1] == "vram", WHOLE) for place in kind.places if place in legal)


def divided_choices(shares: tuple[Share, ...]) -> tuple[Place, ...]:
    """Places of divided units; of one with parts kept in the arena others are streamed."""
    return tuple(
        (where, False, share) for where in (PINNED, STREAMED) for share in shares if where == STREAMED or not share.kept
    )


def least_times(unit: Unit, place: Place, costs: TierCosts) -> tuple[float, float]:
    """Seconds of a unit in turn with other units, and on the link, at least."""
    where, in_vram, share = place
    cost = costs.units[unit.name]
    if share:
        part = costs.divided(unit.name, share)
        busy, link = max(part.acc, part.cpu) + part.join + part.rest, costs.over_link(unit.kind, part)
    else:
        busy, link = cost.cpu if where == ON_CPU else cost.acc, costs.over_link(unit.kind, cost)
    fetched = cost.kv_fetch if unit.kind.state and where != ON_CPU and not in_vram else 0.0
    return busy, (link if where == STREAMED else 0.0) + fetched
