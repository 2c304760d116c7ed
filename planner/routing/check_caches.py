"""Checks slots for experts of a finished plan, as planner/check_plan.py does the rest."""

from pshard.model import ModelSpec
from pshard.plan import RankPlan, TierPlan
from pshard.quant import TENSOR_ALIGN
from pshard.routing.followed import least_slots
from pshard.units.moe.expert_cache import ExpertCache


def check_caches(spec: ModelSpec, rank: RankPlan) -> None:
    """Raise ValueError unless every pool is of like layers, its slots hold their experts, and all tiers keep room."""
    named = [unit for cache in rank.caches for unit in cache.units]
    if len(set(named)) != len(named):
        raise ValueError(f"rank {rank.rank}: a layer's experts are in two caches, or twice in one")
    for cache in rank.caches:
        _check_units(spec, rank, cache)
    nbytes = sum(cache.slots * cache.slot_bytes for cache in rank.caches if not cache.on_host)
    for tier in rank.tiers:
        if tier.buffers.cached != nbytes:
            said = tier.buffers.cached
            raise ValueError(f"rank {rank.rank}, tier {tier.tokens}: buffers say {said} bytes of caches, not {nbytes}")


def _check_units(spec: ModelSpec, rank: RankPlan, cache: ExpertCache) -> None:
    known = {unit.name: unit for unit in spec.units if unit.kind.parts and unit.tensors}
    if strange := [name for name in cache.units if name not in known]:
        raise ValueError(f"rank {rank.rank}: a cache is for {strange[0]!r}, which has no experts")
    units = [known[name] for name in cache.units]
    if any(unit.likeness != units[0].likeness for unit in units):
        raise ValueError(f"rank {rank.rank}: the layers of a cache have experts of different shapes or types")
    stacks = [t for t in units[0].tensors if t.parts]
    one = sum(-(-t.packed_nbytes // t.parts // TENSOR_ALIGN) * TENSOR_ALIGN for t in stacks)
    if cache.slot_bytes != one:
        raise ValueError(f"rank {rank.rank}: slots of {cache.slot_bytes} bytes are for experts of {one}")
    follows = [tier for tier in rank.tiers if tier.tokens <= cache.tokens]
    if not follows:
        raise ValueError(f"rank {rank.rank}: no tier is small enough to use the caches")
    if cache.is_on_demand:
        _check_demand(spec, rank, cache, follows)
    elif beyond := [name for name in cache.units if name in rank.beyond_host]:
        raise ValueError(f"rank {rank.rank}: a cache is for {beyond[0]!r}, which lives beyond host memory")
    for tier in follows:
        if not tier.in_place and any(tier.placement(name).moves_each_step for name in cache.units):
            raise ValueError(f"rank {rank.rank}, tier {tier.tokens}: experts that may lie in slots are copied whole")
    places = len(cache.hits_by_place)
    if places not in (0, stacks[0].parts):
        raise ValueError(f"rank {rank.rank}: a cache has hits of {places} experts, not of {stacks[0].parts}")


def _check_demand(spec: ModelSpec, rank: RankPlan, cache: ExpertCache, follows: list[TierPlan]) -> None:
    """What comes on demand lives on disk in all tiers that use the slots, and these hold what a token uses."""
    if near := [n for n in cache.units if any(not t.placement(n).site.is_beyond_host for t in follows)]:
        raise ValueError(
            f"rank {rank.rank}: a cache brings experts of {near[0]!r} from disk, which does not live there"
        )
    if other := [n for n in cache.units if any(t.placement(n).site.is_on_acc == cache.on_host for t in follows)]:
        side = "in host memory" if cache.on_host else "with the accelerator"
        raise ValueError(f"rank {rank.rank}: a cache {side} is for {other[0]!r}, which is not computed from there")
    least = least_slots(spec, cache)
    if cache.slots < least:
        raise ValueError(f"rank {rank.rank}: {cache.slots} slots are fewer than the {least} experts of one micro-batch")
