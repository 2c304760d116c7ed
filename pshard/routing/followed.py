"""Which experts of a plan a cache may hold: those that lie outside VRAM where tokens are few. No torch."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pshard.model import ModelSpec
from pshard.plan import Placement, RankPlan, TierPlan, Variant
from pshard.routing.follow_use import DemandFollower, Follower, UseFollower
from pshard.routing.order_experts import order_experts
from pshard.units.divide_unit import count_shares
from pshard.units.moe.expert_cache import ExpertCache
from pshard.units.unit import Unit


def under_plan(spec: ModelSpec, variant: Variant) -> ModelSpec:
    """A model as a plan prices it: experts in the plan's order, some of them in slots."""
    return hold_slots(order_experts(spec, variant.popularity), [rank.caches for rank in variant.ranks])


def hold_slots(spec: ModelSpec, caches: Sequence[tuple[ExpertCache, ...]]) -> ModelSpec:
    """A whole model with these slots for experts, by rank."""
    if len(caches) == 1:
        return replace(spec, caches=caches[0])
    return replace(spec, rank_caches=tuple(caches) if any(caches) else ())


def keep_slots(variant: Variant) -> Variant:
    """The variant with slots that keep what they have at the start, so that earlier tokens never decide who computes
    an expert."""
    ranks = (replace(r, caches=tuple(replace(cache, admits=0) for cache in r.caches)) for r in variant.ranks)
    return replace(variant, ranks=tuple(ranks))


def outside_vram(unit: Unit, place: Placement) -> range:
    """Places of a layer's experts that lie outside VRAM in a tier of few tokens. None where the accelerator computes
    nothing of the layer: what lay in a slot would not be used."""
    total = count_shares(unit)
    if not place.site.is_on_acc:
        return range(0)
    return range(total - place.cpu_rows if place.site.in_arena else place.kept_parts, total)


def expect_hits(rank: RankPlan) -> float | None:
    """The share of tokens' choices in layers with slots that a plan expects to find there; None where it has no slots,
    or expects nothing of them."""
    known = [cache for cache in rank.caches if cache.hits]
    layers = sum(len(cache.units) for cache in known)
    return sum(cache.found * len(cache.units) for cache in known) / layers if layers else None


def numbers_of(unit: Unit) -> tuple[int, ...]:
    """Numbers of a layer's experts by place."""
    return unit.order or tuple(range(count_shares(unit)))


def largest_to_follow(rank: RankPlan, cache: ExpertCache) -> TierPlan:
    """The tier in which all sequences decode: of those that use a cache the largest."""
    return [tier for tier in rank.tiers if tier.tokens <= cache.tokens][-1]


def find_eligible(spec: ModelSpec, cache: ExpertCache, rank: RankPlan) -> np.ndarray:
    """bool [layers, experts]: those of a cache's layers, by number, that may lie in a slot."""
    places = {p.unit: p for p in largest_to_follow(rank, cache).placements}
    units = [spec.unit(name) for name in cache.units]
    found = np.zeros((len(units), max(map(count_shares, units))), bool)
    for row, unit in enumerate(units):
        numbers = numbers_of(unit)
        place = places[unit.name]
        far = range(count_shares(unit) if place.site.is_beyond_host else 0)
        for at in far if cache.is_on_demand else outside_vram(unit, place):
            found[row, numbers[at]] = True
    return found


def least_slots(spec: ModelSpec, cache: ExpertCache) -> int:
    """Of a cache whose experts come on demand: as many as a token uses in all its layers, or it would find none again;
    and as a micro-batch may use in one layer."""
    rule = spec.config.experts
    assert rule is not None
    return max(rule.used * len(cache.units), min(rule.count, rule.used * cache.tokens))


def follow_plan(spec: ModelSpec, rank: RankPlan, cache: ExpertCache) -> Follower:
    """The slots as an engine starts with them: filled with the experts that the plan's popularity says are used most,
    of those outside VRAM; without popularity with the first of each layer."""
    eligible = find_eligible(spec, cache, rank)
    units, expected, ranked = [spec.unit(name) for name in cache.units], np.zeros(eligible.shape), []
    for row, unit in enumerate(units):
        uses = spec.popularity.uses_of(unit.layer) if spec.popularity else (0.0,) * eligible.shape[1]
        for place, number in enumerate(numbers_of(unit)):
            expected[row, number] = uses[place]
            if eligible[row, number]:
                ranked.append((-uses[place], place, row, number))
    first = [(row, number) for *_, row, number in sorted(ranked)[: cache.slots]]
    return make_follower(cache, eligible, first, expected)


def make_follower(
    cache: ExpertCache,
    eligible: np.ndarray,
    first: Sequence[tuple[int, int]] = (),
    expected: np.ndarray | None = None,
) -> Follower:
    """Who decides what lies in a cache's slots; see UseFollower."""
    if cache.is_on_demand:
        return DemandFollower(eligible, cache.slots, first)
    return UseFollower(eligible, cache.slots, cache.policy, cache.admits, first, expected)
