"""What share of a run's choices found their expert in VRAM, from the first tokens that it decoded to the last. No
torch."""

from dataclasses import dataclass

import numpy as np

from pshard.cuts.rank_parts import cut_ranks
from pshard.model import ModelSpec
from pshard.plan import RankPlan, TierPlan, Variant
from pshard.routing.expert_map import TierExperts, map_experts
from pshard.routing.followed import follow_plan, numbers_of, under_plan
from pshard.routing.record import RoutingRecord

MOST_STRETCHES = 60  # of a course
MOST_STEPS = 4000  # that are looked at: the first ones, some seconds of replay


@dataclass(frozen=True)
class HitCourse:
    """Stretches of a run's decoding under a plan. ends: tokens that were decoded by the end of each. stay, slots: the
    share of a stretch's choices that experts which stay in VRAM served, and slots that follow use. expected_stay,
    expected_slots: the same as the plan expects it."""

    title: str
    ends: tuple[int, ...]
    stay: tuple[float, ...]
    slots: tuple[float, ...]
    expected_stay: float
    expected_slots: float


def follow_hits(spec: ModelSpec, variant: Variant, record: RoutingRecord, run: str) -> tuple[HitCourse, ...]:
    """The course of the run that made the record, where it ran under this plan, one for each rank that has routed
    experts and decoded something; slots are replayed, which gives the run's own hits.

    spec: the model in its own order. run: its name. Raises ValueError where the record is of other layers.
    """
    expected = {each.rank: each.tiers[0] for each in map_experts(spec, variant)}
    parts, courses = cut_ranks(under_plan(spec, variant), variant.split), list[HitCourse]()
    for part, rank in zip(parts, variant.ranks):
        if rank.rank not in expected:
            continue
        tier, title = expected[rank.rank], f"{run} within {rank.budget_mib} MiB"
        title += f" of rank {rank.rank}" if len(parts) > 1 else ""
        own = record.of_layers([layer.layer for layer in tier.layers])
        course = _follow_rank(part, rank, own, tier, title)
        courses += [course] if course else []
    return tuple(courses)


def _follow_rank(
    spec: ModelSpec, rank: RankPlan, record: RoutingRecord, expected: TierExperts, title: str
) -> HitCourse | None:
    """One rank's course. spec, record: of what it holds. expected: of the smallest tier."""
    pools = [(follow_plan(spec, rank, cache), _rows_of(spec, cache.units, record)) for cache in rank.caches]
    most = max((cache.tokens for cache in rank.caches), default=rank.tiers[0].tokens)
    masks = {tier.tokens: _find_staying(spec, tier, record) for tier in rank.tiers if tier.tokens <= most}
    lanes, ends, steps = np.arange(len(record.layers))[:, None], np.cumsum(record.batches), list[tuple[int, int, int]]()
    for n, end in zip(record.batches, ends):
        tier = rank.covering(n).tokens
        if tier not in masks or len(steps) == MOST_STEPS:
            continue
        ids, found = record.ids[end - n : end].astype(np.int64), 0
        for follower, rows in pools:
            before = follower.counts
            follower.begin()
            follower.observe(ids[:, rows])
            found += (follower.counts - before).hits
        steps.append((n, int(masks[tier][lanes, ids].sum()), found))
    if not steps:
        return None
    return _draw_together(title, np.array(steps), len(record.layers) * record.used, expected.served[0], expected.found)


def _draw_together(title: str, steps: np.ndarray, choices: int, stay: float, slots: float) -> HitCourse:
    """steps: tokens, hits of experts that stay, hits in slots; choices: of each token."""
    parts = [part.sum(0).tolist() for part in np.array_split(steps, min(len(steps), MOST_STRETCHES))]
    ends = tuple(np.cumsum([tokens for tokens, *_ in parts]).tolist())
    staying = tuple(hits / (tokens * choices) for tokens, hits, _ in parts)
    found = tuple(hits / (tokens * choices) for tokens, _, hits in parts)
    return HitCourse(title, ends, staying, found, stay, slots)


def _rows_of(spec: ModelSpec, units: tuple[str, ...], record: RoutingRecord) -> list[int]:
    """Of a record's layers, those of a pool."""
    return [record.layers.index(spec.unit(name).layer) for name in units]


def _find_staying(spec: ModelSpec, tier: TierPlan, record: RoutingRecord) -> np.ndarray:
    """Which experts lie in VRAM in a tier, slots left out: bool [layers, experts]."""
    found = np.zeros((len(record.layers), record.experts), bool)
    for unit in spec.units:
        if unit.kind.parts and unit.tensors:
            place = tier.placement(unit.name)
            staying = record.experts - place.cpu_rows if place.site.in_arena else place.kept_parts
            found[record.layers.index(unit.layer), list(numbers_of(unit)[:staying])] = True
    return found
