"""Of plans that take about as long, the one whose slots for experts on disk texts are likely to gain most by.

Without a record plans are priced as if all experts were used alike. Then whole layers in memory are as good as slots in
the same memory, within a few percent. Texts never use all alike, and what is asked for again is found in slots alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from pshard.plan import Variant
from pshard.planner.make_plan import predict_again
from pshard.planner.rank_task import RankTask
from pshard.predicted_times import round_seconds
from pshard.routing.expert_map import likely_share
from pshard.units.moe.expert_cache import ExpertCache, pack_hits

ALIKE = 1.03  # times the least time of a round: so much longer it may be if all experts are used alike

T = TypeVar("T")


def prefer_slots(found: Sequence[T], seconds: Callable[[T], float], likely: Callable[[T], float]) -> T:
    """Of what takes at most ALIKE times the least seconds the one with the least likely ones; of equal ones the
    first. found: one or more."""
    most = ALIKE * min(map(seconds, found))
    return min((each for each in found if seconds(each) <= most), key=likely)


def likely_seconds(variant: Variant, price: Callable[[tuple[ExpertCache, ...]], tuple[RankTask, ...]]) -> float:
    """Of a round of a plan for one device whose slots find what is likely; what steps of several tokens find is not
    known. price: costs of its tiers with some slots."""
    if any(cache.width > 1 for cache in variant.ranks[0].caches):
        return round_seconds(variant)
    caches = tuple(map(_expect_likely, variant.ranks[0].caches))
    ranks = (replace(variant.ranks[0], caches=caches),)
    return round_seconds(predict_again(replace(variant, ranks=ranks), *price(caches), bounded=False))


def _expect_likely(cache: ExpertCache) -> ExpertCache:
    hits = pack_hits([likely_share(hit) for hit in cache.hits_by_place])
    return replace(cache, hits=hits, found=likely_share(cache.found))
