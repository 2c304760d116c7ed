"""What host memory keeps of units, and homes beyond it: all but what lies in VRAM under every tier. No torch.

Of experts these are the first ones of a layer. Of an FFN whose rows are divided host memory keeps all.
"""

from collections.abc import Sequence

from pshard.homes import Home
from pshard.model import ModelSpec
from pshard.plan import Placement, RankPlan
from pshard.units.divide_unit import Portion, arena_portion, count_shares, last_parts, whole_unit
from pshard.units.unit import Unit


def keep_on_host(unit: Unit, places: Sequence[Placement]) -> Portion | None:
    """What host memory keeps of a unit that has these places, one in each tier; None: nothing."""
    return None if any(place.site.is_beyond_host for place in places) else keep_outside(unit, places)


def keep_outside(unit: Unit, places: Sequence[Placement]) -> Portion | None:
    """What the home of a unit outside VRAM keeps of it; None: nothing."""
    if all(place.is_whole_in_arena for place in places):
        return None
    first = min(_count_in_arena(unit, place) for place in places) if unit.kind.parts else 0
    return last_parts(unit, first) if first else whole_unit(unit)


def list_on_host(spec: ModelSpec, plan: RankPlan) -> tuple[Portion, ...]:
    """What host memory keeps under a plan, in the order in which it is page-locked."""
    kept = (keep_on_host(spec.unit(name), _places(plan, name)) for name in plan.lock_order)
    return tuple(portion for portion in kept if portion is not None)


def list_beyond(spec: ModelSpec, plan: RankPlan, home: Home) -> tuple[Portion, ...]:
    """What a home beyond host memory keeps under a plan."""
    homes = plan.beyond_host
    names = (unit.name for unit in spec.units if homes.get(unit.name) is home)
    kept = (keep_outside(spec.unit(name), _places(plan, name)) for name in names)
    return tuple(portion for portion in kept if portion is not None)


def list_whole(spec: ModelSpec, plan: RankPlan, home: Home) -> tuple[Portion, ...]:
    """What of that comes to the accelerator as it is: all but tables that no tier has in VRAM."""
    pinned = {place.unit for tier in plan.tiers for place in tier.placements if place.in_arena}
    kept = list_beyond(spec, plan, home)
    return tuple(p for p in kept if not p.unit.kind.is_looked_up or p.unit.name in pinned)


def list_tables(spec: ModelSpec, plan: RankPlan, home: Home) -> tuple[Unit, ...]:
    """The tables among it: where a tier has them not in VRAM, rows are read as they are looked up."""
    return tuple(p.unit for p in list_beyond(spec, plan, home) if p.unit.kind.is_looked_up)


def list_only_in_vram(spec: ModelSpec, plan: RankPlan) -> tuple[Portion, ...]:
    """What lies in VRAM under every tier and not in host memory, in pin order; what all parts of a unit share is in
    both."""
    found = []
    for name in plan.staying:
        unit, places = spec.unit(name), _places(plan, name)
        kept, lies = keep_on_host(unit, places), arena_portion(unit, places[0].where, places[0].share)
        if lies is not None and (kept is None or kept.first):
            found.append(lies)
    return tuple(found)


def _places(plan: RankPlan, unit: str) -> tuple[Placement, ...]:
    return tuple(tier.placement(unit) for tier in plan.tiers)


def _count_in_arena(unit: Unit, place: Placement) -> int:
    """Parts of a unit that lie in the arena: its first."""
    return count_shares(unit) - place.cpu_rows if place.site.in_arena else place.kept_parts
