"""Where else a layer could be, and what that would cost: `pshard-plan --why`."""

from collections.abc import Sequence
from dataclasses import dataclass

from pshard.cuts.layer_cuts import join_seconds
from pshard.errors import UserError
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import Placement, TierPlan, Variant
from pshard.planner.price.draft import Room, draft_tier, tier_seconds
from pshard.planner.price_plan import PricedTier, price_plan
from pshard.planner.program.unit_classes import SIXTEENTHS
from pshard.planner.search.places import Place, divided_choices
from pshard.units.divide_unit import list_shares
from pshard.units.share import WHOLE
from pshard.units.unit import Unit


@dataclass(frozen=True)
class OtherPlace:
    """A tier with one unit elsewhere and everything else as it is. `seconds`: of a micro-batch. `arena`: bytes of VRAM
    that it takes more than the plan. `lacks`: bytes of VRAM that there are too few for it, on the rank that lacks
    most."""

    place: Placement
    seconds: float
    arena: int
    lacks: int


@dataclass(frozen=True)
class WhyThere:
    """A unit in one tier: its place, the seconds of a micro-batch, the fastest other place that fits, and the fastest
    that does not where it would be faster than the plan; None where there is none."""

    unit: str
    tokens: int
    place: Placement
    seconds: float
    next_best: OtherPlace | None
    too_large: OtherPlace | None


def find_layer(spec: ModelSpec, named: str) -> tuple[Unit, ...]:
    """The units of a layer, by its number or by a unit's name. Raises UserError when there are none."""
    found = tuple(u for u in spec.units if named in (u.name, str(u.layer)) and u.tensors)
    if not found:
        ends = " or ".join(u.name for u in spec.units if u.layer < 0)
        raise UserError(
            f"--why {named}: {spec.name} has no such unit; give a layer from 0 to {spec.config.n_layers - 1}, or {ends}"
        )
    return found


def compare_places(
    spec: ModelSpec, profile: MachineProfile, variant: Variant, units: tuple[Unit, ...]
) -> tuple[WhyThere, ...]:
    """Each unit in each tier beside all its other legal places, whole, or divided by quarters on one device; over
    several ranks it moves on all that hold it."""
    return tuple(
        _compare(tier, unit.name)
        for tier in price_plan(spec, profile, variant)
        for unit in units
        if any(_holds(room, unit.name) for room in tier.rooms)
    )


def _compare(tier: PricedTier, name: str) -> WhyThere:
    held = [r for r, room in enumerate(tier.rooms) if _holds(room, name)]
    now, seconds = tier.tiers[held[0]].placement(name), _join(tier, tier.tiers)
    places = _list_places(tier.rooms[held[0]], name)
    others = [o for o in (_move(tier, held, name, place) for place in places) if o.place != now]
    fitting = [o for o in others if not o.lacks]
    larger = [o for o in others if o.lacks and o.seconds < seconds]
    next_best, too_large = (min(some, key=lambda o: o.seconds, default=None) for some in (fitting, larger))
    return WhyThere(name, tier.tokens, now, seconds, next_best, too_large)


def _holds(room: Room, name: str) -> bool:
    """Whether a rank has a part of a unit: of a pipeline each layer is on one."""
    return any(unit.name == name and unit.tensors for unit in room.spec.units)


def _list_places(room: Room, name: str) -> tuple[Place, ...]:
    unit = room.spec.unit(name)
    whole = tuple((where, state == "vram", WHOLE) for where, state in room.list_places(name))
    divided = divided_choices(list_shares(unit, SIXTEENTHS)) if room.ranks == 1 else ()
    return whole + divided


def _move(tier: PricedTier, held: Sequence[int], name: str, place: Place) -> OtherPlace:
    """The tier with a unit at `place` on the ranks that hold it."""
    tiers, more, lacks = list(tier.tiers), 0, 0
    for rank in held:
        tiers[rank] = moved = _redraft(tier.rooms[rank], tier.tiers[rank], name, place)
        more = max(more, moved.buffers.total - tier.tiers[rank].buffers.total, key=abs)
        lacks = max(lacks, moved.buffers.total - tier.rooms[rank].arena)
    return OtherPlace(tiers[held[0]].placement(name), _join(tier, tuple(tiers)), more, lacks)


def _redraft(room: Room, tier: TierPlan, name: str, place: Place) -> TierPlan:
    """A rank's tier with one unit elsewhere; slots stay as many, but at least one where something is copied."""
    at, in_vram, share = place
    where = {p.unit: p.where for p in tier.placements} | {name: at}
    shares = {p.unit: p.share for p in tier.placements if p.share and p.unit != name} | ({name: share} if share else {})
    kv = {p.unit for p in tier.placements if p.has_state_in_vram} - {name} | ({name} if in_vram else set())
    streams_parts = any(p.moves_each_step and room.spec.unit(p.unit).kind.parts for p in tier.placements)
    in_place = tier.in_place if streams_parts else None
    return draft_tier(room, tier.tokens, where, frozenset(kv), max(tier.buffers.slots, 1), shares, in_place, tier.sweep)


def _join(tier: PricedTier, tiers: tuple[TierPlan, ...]) -> float:
    """Seconds of one micro-batch over all ranks."""
    return join_seconds(tier.split_mode, [tier_seconds(tier.rooms, tiers, tier.costs)])
