"""Slots for experts that live on disk, weighed against whole layers that stay in memory.

A layer that stays is never read. Of one on disk a prompt reads what its slots lack, and decoding what they lack of what
tokens use: much less than of whole layers in the same memory. So layers that stay give way to slots, as long as a round
takes less time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from pshard.homes import ON_DISK, PINNED
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import Placement, TierPlan, Variant
from pshard.planner.make_plan import predict_again
from pshard.planner.prepare_ranks import price_tiers
from pshard.planner.price.draft import Room, draft_tier
from pshard.planner.price.profile_tables import Tables, find_tables
from pshard.planner.rank_task import RankTask
from pshard.planner.routing.plan_host_slots import WAVES, plan_host_slots
from pshard.planner.routing.prefer_slots import likely_seconds, prefer_slots
from pshard.planner.routing.slot_promises import gains_by_width, list_pools, list_widths, share_out
from pshard.predicted_times import round_seconds
from pshard.routing.followed import hold_slots
from pshard.routing.record import RoutingRecord
from pshard.units.moe.expert_cache import DEMAND, ExpertCache
from pshard.units.unit import Unit, places_of_unit
from pshard.workload import Workload

MOST_REPLAYS = 3  # numbers of layers that stay which are tried by a record: a replay takes seconds
MOST_TRIED = 12  # the same without one


def lives_on_disk(spec: ModelSpec, variant: Variant) -> bool:
    """Whether a plan for one device leaves experts on disk."""
    return len(variant.ranks) == 1 and any(unit.name in variant.ranks[0].beyond_host for unit in _list_experts(spec))


def plan_disk_slots(
    spec: ModelSpec, profile: MachineProfile, workload: Workload, variant: Variant, record: RoutingRecord | None
) -> Variant:
    """The variant, which leaves experts on disk, or one with slots for them, where that takes less time for a round.

    Of its layers of experts that are pinned, some give way to slots. How many choices find their expert there is what a
    replay of the record promises, or without one as many as the slots have of all experts. Beside a GPU they are in
    host memory. workload: what the variant was planned for, with the largest micro-batch that was asked for.
    """
    if profile.accelerators[0].kind != "cpu":
        return plan_host_slots(spec, profile, workload, variant, record)
    search = _Search(spec, find_tables(profile, variant.correction), variant, record)
    ways = [_Way(staying, staging) for staying in search.list_staying() for staging in (2, 1)]
    found = [(each, way) for way in ways for each in search.place(way) or search.place(replace(way, returns=False))]
    if not found:
        return variant
    _, best = min(found, key=lambda each: round_seconds(each[0]))
    found += [(each, way) for way in best.in_waves(record is not None) for each in search.place(way)]
    chosen, best = search.choose(found)
    wide = [each for way in best.widen(variant.workload) for each in search.place(way) if gains_by_width(chosen, each)]
    # of equal ones the first: a round may have no short prompts, which gain
    best_of_all = min([*wide, variant, chosen], key=round_seconds)
    return variant if best_of_all is variant else replace(search.bound(best_of_all), considered=variant.considered)


def _list_experts(spec: ModelSpec) -> list[Unit]:
    return [unit for unit in spec.units if unit.kind.parts and unit.tensors]


@dataclass(frozen=True)
class _Way:
    """How a plan gets slots: so many layers of experts stay in memory; `staging` of the others have room at once on
    their way, each of which comes in so many waves. returns: what else is on disk comes back to memory. width: of a
    larger tier than others that uses the slots too; 0: none does."""

    staying: int
    staging: int
    returns: bool = True
    waves: int = 1
    width: int = 0

    def in_waves(self, few: bool) -> "Iterator[_Way]":
        """The same with smaller slots for what is on its way; few: a replay takes seconds."""
        for waves, staging in product(WAVES[1:2] if few else WAVES, (2,) if few else (2, 3)):
            yield replace(self, waves=waves, staging=staging)

    def widen(self, workload: Workload) -> "Iterator[_Way]":
        """The same with short prompts that use the slots too, first of all that may."""
        return (replace(self, width=width) for width in list_widths(workload))


@dataclass(frozen=True)
class _Search:
    spec: ModelSpec
    tables: Tables
    variant: Variant
    record: RoutingRecord | None

    @cached_property
    def _tiers(self) -> tuple[TierPlan, ...]:
        return self.variant.ranks[0].tiers

    @cached_property
    def _pinned(self) -> list[str]:
        """Layers of experts that every tier has whole in memory, the first in the plan's order first."""
        experts = {unit.name for unit in _list_experts(self.spec)}
        whole = (name for name in self.variant.ranks[0].pin_order if name in experts)
        return [name for name in whole if all(t.placement(name).is_whole_in_arena for t in self._tiers)]

    def list_staying(self) -> Iterator[int]:
        """How many layers of experts stay, in all that is tried."""
        most = len(self._pinned)
        tried = min(most, (MOST_REPLAYS if self.record else MOST_TRIED) - 1)
        yield from sorted({round(most * i / max(1, tried)) for i in range(tried + 1)})

    def place(self, way: _Way) -> list[Variant]:
        """The variant with slots in all that a way leaves; none where that is too little, or a sweep would have to wait
        between waves."""
        if way.waves > 1 and any(tier.sweep for tier in self._tiers):
            return []
        movable = {u.name for u in _list_experts(self.spec) if (ON_DISK, None) in places_of_unit(u, False)}
        far = movable - set(self._pinned[: way.staying])
        pools = [
            replace(pool, units=own)
            for pool in list_pools(self.spec, self.record, self.variant.workload, way.width)
            if (own := tuple(unit for unit in pool.units if unit.name in far))
        ]
        (task,) = self._price(tuple(pool.make_cache(1, DEMAND, 0) for pool in pools))
        tiers = self._draft(task.room, far, way)
        left = task.room.arena - max(tier.buffers.total - tier.buffers.cached for tier in tiers)
        caches = tuple(share_out(self.spec, pools, left))
        return [self._predict(caches, far, way)] if len(caches) == len(pools) else []

    def choose(self, found: "list[tuple[Variant, _Way]]") -> "tuple[Variant, _Way]":
        """The plan with the shortest round; of those about as short the likely one, where nothing was recorded."""

        def seconds(each: "tuple[Variant, _Way]") -> float:
            return round_seconds(each[0])

        found = [each for each in found if seconds(each) < round_seconds(self.variant)] or found
        if self.record:
            return min(found, key=seconds)
        return prefer_slots(found, seconds, lambda each: likely_seconds(each[0], self._price))

    def bound(self, variant: Variant) -> Variant:
        """A plan that was tried with its bounds, which take longer than the rest of a try."""
        return predict_again(variant, *self._price(variant.ranks[0].caches))

    def _price(self, caches: tuple[ExpertCache, ...]) -> tuple[RankTask, ...]:
        tokens = tuple(tier.tokens for tier in self._tiers)
        return price_tiers(hold_slots(self.spec, (caches,)), self.tables, self.variant.workload, tokens)

    def _draft(self, room: Room, far: set[str], way: _Way) -> tuple[TierPlan, ...]:
        """The tiers with these units on disk, and those that return from there in memory."""
        found = []
        for tier in self._tiers:
            where = {p.unit: ON_DISK if p.unit in far else self._choose_site(p, way.returns) for p in tier.placements}
            kv = frozenset(p.unit for p in tier.placements if p.has_state_in_vram)
            shares = {p.unit: p.share for p in tier.placements if p.share and p.unit not in far}
            sizes = way.staging, shares
            found.append(draft_tier(room, tier.tokens, where, kv, *sizes, sweep=tier.sweep, waves=way.waves))
        return tuple(found)

    def _choose_site(self, place: Placement, returns: bool) -> str:
        unit = self.spec.unit(place.unit)
        if unit.kind.is_looked_up:  # rows cost less than the slots that its table would take
            return place.where
        legal = places_of_unit(unit, False)
        return PINNED if returns and place.site.is_beyond_host and (PINNED, place.kv) in legal else place.where

    def _predict(self, caches: tuple[ExpertCache, ...], far: set[str], way: _Way) -> Variant:
        (task,) = self._price(caches)
        tiers = self._draft(task.room, far, way)
        rank = self.variant.ranks[0]
        drafted = tuple(
            replace(old, placements=t.placements, buffers=t.buffers, in_place=t.in_place, sweep=t.sweep, waves=t.waves)
            for old, t in zip(rank.tiers, tiers)
        )
        always = [p.unit for p in tiers[-1].placements if p.in_arena and p.unit not in rank.pin_order]
        pins = [{p.unit for p in tier.placements if p.in_arena} for tier in tiers]
        order = [*always, *(name for name in rank.pin_order if name not in far)]
        order.sort(key=lambda name: sum(name not in own for own in pins))  # what returned may be in more tiers now
        rank = replace(rank, tiers=drafted, pin_order=tuple(order), caches=caches)
        return predict_again(replace(self.variant, ranks=(rank,)), task, bounded=False)
