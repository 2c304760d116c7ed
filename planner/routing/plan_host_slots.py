"""Slots in host memory for experts that live on disk, beside a GPU: the CPU computes what decoding uses of them.

Prompts bring whole layers over the link: from the disk what no slot has. They leave the slots as they are. What every
token reads stays in memory, and as many layers of experts as a round of prompts and answers gains by; slots take all
that is left of host memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, product, takewhile
from operator import attrgetter

from pshard.errors import NoPlan, UserError
from pshard.homes import DISK, ON_CPU, ON_DEMAND, ON_DISK, PINNED, STREAMED
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import Placement, Sweep, TierPlan, Variant
from pshard.planner.beyond_host import fill_arena, list_spread, list_strays
from pshard.planner.make_plan import plan_variant, predict_again
from pshard.planner.prepare_ranks import price_tiers
from pshard.planner.price.draft import Room, draft_tier
from pshard.planner.price.host_limits import kept_bytes
from pshard.planner.price.profile_tables import Tables, find_tables, seconds_from
from pshard.planner.rank_task import RankTask
from pshard.planner.routing.crowd_layer import crowd_layer
from pshard.planner.routing.prefer_slots import likely_seconds, prefer_slots
from pshard.planner.routing.slot_promises import Pool, gains_by_width, list_pools, list_widths, share_out
from pshard.planner.search.residency_order import order_nested, spread
from pshard.predicted_times import count_swept, round_seconds
from pshard.routing.followed import hold_slots
from pshard.routing.record import RoutingRecord
from pshard.units.moe.expert_cache import DEMAND, ExpertCache
from pshard.units.unit import places_of_unit
from pshard.workload import Workload

MOST_TRIED = 6  # numbers of layers that stay; by a record, whose replay takes seconds, fewer
MOST_REPLAYS = 3
WAVES = (2, 4, 8)  # in which a layer may come
AMPLE = 1 << 42  # bytes of host memory that hold any model


def plan_host_slots(
    spec: ModelSpec, profile: MachineProfile, workload: Workload, variant: Variant, record: RoutingRecord | None
) -> Variant:
    """The variant, which leaves experts on disk, or one with slots for them in host memory, where that takes less time
    for a round. All else lies as in the variant, or as if host memory held all."""
    tables, found = find_tables(profile, variant.correction), list[_Found]()
    ways = [
        _Way(search, *way)
        for search in [_Search(spec, tables, base) for base in _list_bases(spec, profile, workload, variant)]
        for way in product((2, 1), (False, True), (False, True), (False, True) if search.swept else (False,))
    ]
    tried = [each for way in ways for each in way.try_all(1, None)]
    # rows of a sweep would have to wait between waves
    in_turn = _choose([each for each in tried if not each.way.sweeps])
    in_waves = [each for base in in_turn for way in base.way.in_waves() for each in way.try_all(1, None)]
    tried += [each for base in _choose(tried) for each in replace(base.way, crowds=True).try_all(1, None)]
    for best in (*_choose(tried), *_choose(in_waves)):
        found += best.way.try_all(MOST_REPLAYS if record else MOST_TRIED, record)
    found = [each for each in found if each.seconds < round_seconds(variant)]
    if found and not record:
        found = [prefer_slots(found, attrgetter("seconds"), _Found.likely_seconds)]
    for narrow in _choose(found):  # of equal ones the first: a round may have no short prompts, which gain
        found = [*_widen(narrow, record), narrow]
    chosen = next((each.bound() for each in _choose(found)), variant)
    return replace(chosen, considered=variant.considered)


def _choose(tried: "Sequence[_Found]") -> "tuple[_Found, ...]":
    """What takes least time, if anything was tried; of equal ones the first."""
    return (min(tried, key=attrgetter("seconds")),) if tried else ()


def _widen(narrow: "_Found", record: RoutingRecord | None) -> "Iterator[_Found]":
    """The same with short prompts that use the slots too, first of all that may, where these gain by it."""
    for width in list_widths(narrow.way.search.base.workload):
        way = replace(narrow.way, search=replace(narrow.way.search, width=width))
        wider = way.try_staying(narrow.staying, record)
        yield from (wide for wide in wider if gains_by_width(narrow.variant, wide.variant))


def _list_bases(spec: ModelSpec, profile: MachineProfile, workload: Workload, variant: Variant) -> Iterator[Variant]:
    """Plans as if host memory held all, of the variant's micro-batches and of larger ones up to what was asked for, as
    whole layers on disk may have wanted smaller ones; and the variant."""
    ample = replace(profile, ram_bytes=0, disks=(), host=replace(profile.host, memory_bytes=AMPLE))
    own = variant.workload.max_ubatch
    most = max(own, workload.max_ubatch)
    for size in (*takewhile(lambda size: size < most, (own << doubled for doubled in count())), most):
        with suppress(NoPlan, UserError):
            yield plan_variant(spec, ample, replace(variant.workload, max_ubatch=size), correction=variant.correction)
    yield variant


@dataclass(frozen=True)
class _Search:
    """What is looked up once of a base. width: of a larger tier than others that uses the slots too; 0: none does."""

    spec: ModelSpec
    tables: Tables
    base: Variant
    width: int = 0

    @cached_property
    def filled(self) -> "dict[tuple[frozenset[str], int, bool, bool, int], tuple[TierPlan, ...]]":
        """What several ways begin with is made once."""
        return {}

    @cached_property
    def predicted(self) -> "dict[tuple[tuple[ExpertCache, ...], tuple[TierPlan, ...]], Variant]":
        """What several ways led to is predicted once."""
        return {}

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        return self.list_pools(None)

    def list_pools(self, record: RoutingRecord | None) -> tuple[Pool, ...]:
        return list_pools(self.spec, record, self.base.workload, self.width)

    @cached_property
    def movable(self) -> list[str]:
        """Layers of experts that may live on disk."""
        units = [unit for pool in self.pools for unit in pool.units]
        return [unit.name for unit in units if (ON_DISK, None) in places_of_unit(unit, False)]

    @cached_property
    def room(self) -> Room:
        return self.price(())[0].room

    @cached_property
    def swept(self) -> Sweep | None:
        """All micro-batches of the expected prompt in one sweep; None where that has none."""
        batches = count_swept(self.base.workload, self.base.ranks[0].tiers[-1].tokens)
        return Sweep(batches) if batches else None

    @cached_property
    def order(self) -> list[str]:
        """What is pinned first where a tier has room: what every token reads, the smallest first, as each unit that is
        brought has a slot that could have brought a layer of experts meanwhile."""
        spec = self.room.spec
        return sorted(list_spread(self.room), key=lambda n: (n in self.movable, spec.unit(n).packed_nbytes))

    @cached_property
    def _most_followed(self) -> int:
        return max(pool.make_cache(1, DEMAND, 0).tokens for pool in self.pools)

    def follows(self, tier: TierPlan) -> bool:
        """Whether a tier uses the slots."""
        return tier.tokens <= self._most_followed

    def price(self, caches: tuple[ExpertCache, ...]) -> tuple[RankTask, ...]:
        tokens = tuple(tier.tokens for tier in self.base.ranks[0].tiers)
        return price_tiers(hold_slots(self.spec, (caches,)), self.tables, self.base.workload, tokens)


@dataclass(frozen=True)
class _Way:
    """How a base becomes a plan with slots. staging: so many layers of a prompt have room at once on their way. bare:
    tiers that do not use the slots keep cells in VRAM as those that do, and what is left of it holds weights. lean:
    what these tiers lack of VRAM that those that use the slots have lives on disk, and takes no host memory. sweeps:
    prompts go in one. waves: a layer of a prompt comes in so many. crowds: tiers that use the slots have a layer of
    experts more in VRAM, see `crowd_layer`."""

    search: _Search
    staging: int
    bare: bool
    lean: bool
    sweeps: bool
    waves: int = 1
    crowds: bool = False

    def in_waves(self) -> Iterator["_Way"]:
        """The same with smaller slots: weights lie in what these leave, and less waits until a whole layer is there."""
        for waves, staging, crowds in product(WAVES, (2, 3), (False, True)):
            yield replace(self, waves=waves, staging=staging, crowds=crowds)

    def try_all(self, most: int, record: RoutingRecord | None) -> "Iterator[_Found]":
        """Plans with up to so many numbers of layers in host memory."""
        room, movable = self.search.room, self.search.movable
        if room.beyond is None or not movable:
            return
        each = max(self.search.spec.unit(name).packed_nbytes for name in movable)
        fits = min(len(movable) - 1, room.beyond.host // each)
        for i in range(most):
            yield from self.try_staying(round(fits * i / max(1, most)), record)

    def try_staying(self, staying: int, record: RoutingRecord | None) -> "Iterator[_Found]":
        """The plan with so many layers of experts in host memory, if there is one."""
        found, beyond = None, self.search.room.beyond
        assert beyond is not None
        with suppress(ValueError):  # no sweep is possible where the host keeps rows between two slots
            found = self._place(staying, beyond.host, record)
        if found is not None:
            yield _Found(round_seconds(found) + self.count_switch(found), found, self, staying)

    def _place(self, staying: int, host: int, record: RoutingRecord | None) -> Variant | None:
        """The base with so many layers of experts in host memory, as many as fit in VRAM, and all others on disk, with
        slots in all that is left; None where that is too little."""
        room, names = self.search.room, self.search.movable
        far = frozenset(names) - {names[i] for i in spread(len(names), staying)}
        order = sorted(self.search.order, key=lambda name: (name in names) + (name in names and name not in far))
        if not (tiers := self._fill(far, order)):
            return None
        if self.crowds:
            widest = max(tier.tokens for tier in tiers if self.search.follows(tier))
            crowded = crowd_layer(room, tiers, [name for name in order if name in names], widest, self.staging)
            if crowded is None:
                return None
            tiers = self._release_strays(crowded)
        pins = {tier.tokens: {p.unit for p in tier.placements if p.in_arena} for tier in tiers}
        near = set.intersection(*(pins[tier.tokens] for tier in tiers if self.search.follows(tier)))
        kept = {tokens: own - (far - near) for tokens, own in pins.items()}
        tiers = self._draft(tiers, far | near if self.lean else far, kept)
        if any(tier.buffers.total > room.arena for tier in tiers):  # what all of a tier's pins made no slots for
            return None
        pools = self.search.list_pools(record)
        own = [replace(p, units=tuple(u for u in p.units if u.name in far - near)) for p in pools]
        own = [pool for pool in own if pool.units]
        caches = tuple(share_out(self.search.spec, own, host - kept_bytes(room, tiers), on_host=True))
        return self._predict(caches, tiers) if own and len(caches) == len(own) else None

    def _fill(self, far: frozenset[str], order: Sequence[str]) -> tuple[TierPlan, ...]:
        """The base with these layers on disk, and what has room for it in VRAM, in that order, which follows from them;
        () where slots have none."""
        key = far, self.staging, self.bare, self.sweeps, self.waves
        if key not in self.search.filled:
            self.search.filled[key] = self._fill_anew(far, order)
        return self.search.filled[key]

    def _fill_anew(self, far: frozenset[str], order: Sequence[str]) -> tuple[TierPlan, ...]:
        tiers, room = self._draft(self.search.base.ranks[0].tiers, far, {}), self.search.room
        if any(tier.buffers.total > room.arena for tier in tiers):
            return ()
        return self._release_strays(fill_arena(room, tiers, order, slots=self.staging))

    def _draft(self, tiers: Sequence[TierPlan], far: frozenset[str], pins: dict[int, set[str]]) -> tuple[TierPlan, ...]:
        """The tiers with units on disk that are far, but where pins have them."""
        cells = frozenset(p.unit for p in tiers[0].placements if p.has_state_in_vram)
        found = []
        for tier in tiers:
            bare = self.bare and not pins and not self.search.follows(tier)
            kv = cells if bare else frozenset(p.unit for p in tier.placements if p.has_state_in_vram)
            away = far - pins.get(tier.tokens, set())
            where = {p.unit: self._choose_site(tier, p, away, bare) for p in tier.placements}
            sweep = self.search.swept if self.sweeps and tier is tiers[-1] else None
            given = self.search.room, tier.tokens, where, kv, self.staging
            found.append(draft_tier(*given, sweep=sweep, waves=self.waves))
        return tuple(found)

    def _release_strays(self, tiers: tuple[TierPlan, ...]) -> tuple[TierPlan, ...]:
        """The tiers without pins that others with as many have not: residency must not move."""
        room = self.search.room
        while any(strays := list_strays(tiers)):
            found = []
            for tier, out in zip(tiers, strays):
                where = {p.unit: self._leave(p) if p.unit in out else p.where for p in tier.placements}
                kv = frozenset(p.unit for p in tier.placements if p.has_state_in_vram)
                sweep, waves = tier.sweep, tier.waves
                found.append(draft_tier(room, tier.tokens, where, kv, self.staging, sweep=sweep, waves=waves))
            tiers = tuple(found)
        return tiers

    def _leave(self, place: Placement) -> str:
        """Where else a pinned unit may be, with its state where that is."""
        legal = self.search.room.list_places(place.unit)
        return next(site for site in (STREAMED, ON_DEMAND, ON_CPU) if (site, place.kv) in legal)

    def _choose_site(self, tier: TierPlan, place: Placement, far: frozenset[str], bare: bool) -> str:
        follows, movable = self.search.follows(tier), place.unit in self.search.movable
        legal = [site for site, _ in self.search.room.list_places(place.unit)]
        unit = self.search.spec.unit(place.unit)
        if unit.kind.is_looked_up:  # rows cost less than the slots that its table would take
            return ON_DEMAND if ON_DEMAND in legal and not place.in_arena else place.where
        if place.unit in far and ON_DISK in legal:
            return ON_DEMAND if follows else ON_DISK
        if movable and not place.is_whole_in_arena:
            return ON_CPU if follows else STREAMED
        if bare and STREAMED in legal:
            return STREAMED
        if place.site.is_beyond_host:
            return STREAMED if STREAMED in legal else PINNED
        return place.where

    def _predict(self, caches: tuple[ExpertCache, ...], tiers: tuple[TierPlan, ...]) -> Variant:
        if (caches, tiers) not in self.search.predicted:
            self.search.predicted[caches, tiers] = self._predict_anew(caches, tiers)
        return self.search.predicted[caches, tiers]

    def _predict_anew(self, caches: tuple[ExpertCache, ...], tiers: tuple[TierPlan, ...]) -> Variant:
        (task,), base = self.search.price(caches), self.search.base
        rank, order = base.ranks[0], order_nested(task.room, tiers)
        drafted = tuple(
            replace(old, placements=t.placements, buffers=t.buffers, in_place=t.in_place, sweep=t.sweep, waves=t.waves)
            for old, t in zip(rank.tiers, tiers)
        )
        rank = replace(rank, tiers=drafted, pin_order=order.pin_order, kv_order=order.kv_order, caches=caches)
        return predict_again(replace(base, plan_needed=True, ranks=(rank,)), task, bounded=False)

    def count_switch(self, variant: Variant) -> float:
        """Seconds of reading what answers have in VRAM and prompts on disk, once a round."""
        first, *_, last = variant.ranks[0].tiers
        pairs = zip(first.placements, last.placements)
        names = [here.unit for here, there in pairs if here.in_arena and there.site.is_beyond_host]
        nbytes = sum(self.search.spec.unit(name).packed_nbytes for name in names)
        return seconds_from(self.search.tables, DISK, nbytes)


@dataclass(frozen=True)
class _Found:
    """A plan that a way has led to with so many layers of experts in host memory; seconds: of its round, and of what
    answers read after each prompt."""

    seconds: float
    variant: Variant
    way: _Way
    staying: int

    def likely_seconds(self) -> float:
        """The same where slots find what is likely."""
        return likely_seconds(self.variant, self.way.search.price) + self.way.count_switch(self.variant)

    def bound(self) -> Variant:
        """The plan with its bounds, which take longer than the rest of a try."""
        return predict_again(self.variant, *self.way.search.price(self.variant.ranks[0].caches))
