"""Plans with slots for experts that follow use, made by hand."""

from dataclasses import replace

from experts_file import ExpertsFile
from plan_samples import make_variant
from toy_kinds import CONTEXT

from pshard.plan import TierPlan, Variant
from pshard.units.moe.expert_cache import ExpertCache, slot_nbytes
from pshard.units.moe.popularity import Popularity


def cache_of(file: ExpertsFile, slots: int, policy: str = "frequency", admits: int = 3) -> ExpertCache:
    """A pool for all layers with experts."""
    units = [unit for unit in file.spec.units if unit.kind.parts]
    return ExpertCache(tuple(unit.name for unit in units), slots, slot_nbytes(units[0]), policy, admits)


def with_cache(
    file: ExpertsFile,
    tiers: tuple[TierPlan, ...],
    caches: tuple[ExpertCache, ...],
    sequences: int = 1,
    popularity: Popularity | None = None,
) -> Variant:
    """A variant of those tiers with the pools in front of all else."""
    cached = sum(cache.nbytes for cache in caches)
    tiers = tuple(replace(tier, buffers=replace(tier.buffers, cached=cached)) for tier in tiers)
    variant = make_variant(file.spec, tiers, CONTEXT * sequences, sequences)
    ranks = tuple(replace(rank, caches=caches) for rank in variant.ranks)
    return replace(variant, ranks=ranks, popularity=popularity)
