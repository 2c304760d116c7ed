"""Slots for experts that follow use, weighed against experts that stay in VRAM: by replay of a routing record."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter

from pshard.errors import NoPlan
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import RankPlan, TierPlan, Variant
from pshard.planner.make_plan import plan_baseline, plan_variant, predict_again, time_roughly
from pshard.planner.prepare_ranks import price_tiers
from pshard.planner.price.profile_tables import find_tables
from pshard.planner.published.strategies import EXPERT_LRU
from pshard.planner.routing.slot_promises import Pool, fill_pools, list_pools
from pshard.routing.expert_cache import MOST_FOLLOW_TOKENS, POLICIES, ExpertCache, part_sizes
from pshard.routing.record import RoutingRecord
from pshard.times.predicted_times import round_seconds
from pshard.units.divide_unit import count_shares
from pshard.units.moe.followed import find_eligible
from pshard.workload import Workload

SHARES = (0.3, 0.6, 0.95)  # of what experts take of VRAM: pools that are tried
SPARE_SHARE = 0.5  # of the time in which the link has nothing else to do: what admissions may take of it
LEAST_SHARE = 0.15  # of all time: where the link limits the plan without slots, which slots relieve
MOST_ADMITS = 16  # after each micro-batch; more move hit rates little


def why_no_slots(variant: Variant) -> str | None:
    """Why a plan by a routing record cannot have slots for experts that follow use, and what can; None where it can."""
    ranks, sequences = len(variant.ranks), variant.workload.sequences
    if ranks > 1:
        most = f"one device and the plan is for {ranks}"
    elif sequences > MOST_FOLLOW_TOKENS:
        most = f"up to {MOST_FOLLOW_TOKENS} sequences and the plan is for {sequences}"
    else:
        return None
    return (
        f"no slots for experts that follow use, as they are for {most}; "
        "popular experts are pinned by the record all the same"
    )


def plan_slots(
    spec: ModelSpec,
    profile: MachineProfile,
    workload: Workload,
    variant: Variant,
    record: RoutingRecord | None,
    time_limit: float = 10.0,
) -> Variant:
    """The variant of one device, or one with slots for experts that follow use, where that takes less time by the
    record. Without one all experts are used alike: then slots find no more than experts that stay, and only the
    published way to use them is looked at.

    Pools of some sizes take their room from experts that would stay. Beside each all is placed, by the hits that a
    replay promises. Beside the one with which that is the fastest all is planned, twice: by those hits, and by those
    of the first plan's slots. workload: what the variant was planned for, with the largest micro-batch that was asked
    for.
    """
    if why_no_slots(variant) or not variant.plan_needed or spec.config.experts is None:
        return variant
    best, correction = variant, variant.correction

    def plan(caches: tuple[ExpertCache, ...]) -> Variant:
        return plan_variant(replace(spec, caches=caches), profile, workload, time_limit, correction)

    if record and (caches := _choose_pools(spec, profile, workload, variant, record, time_limit)):
        with suppress(NoPlan):
            again = plan(_replay_slots(spec, plan(caches), record))
            best = min(best, _price_slots(spec, profile, again, record), key=round_seconds)
    with suppress(NoPlan):
        best = min(best, plan_baseline(EXPERT_LRU, spec, profile, workload, correction, record), key=round_seconds)
    return replace(best, considered=variant.considered)


def _choose_pools(
    spec: ModelSpec,
    profile: MachineProfile,
    workload: Workload,
    variant: Variant,
    record: RoutingRecord,
    time_limit: float,
) -> tuple[ExpertCache, ...]:
    """Those beside which the quick part of planning finds the fastest plan."""
    found: list[tuple[float, tuple[ExpertCache, ...]]] = []
    for caches in _list_caches(spec, profile, variant, record):
        with suppress(NoPlan):
            known = replace(spec, caches=caches)
            found.append((time_roughly(known, profile, workload, time_limit, variant.correction), caches))
    return min(found, key=itemgetter(0))[1] if found else ()


def _list_caches(
    spec: ModelSpec, profile: MachineProfile, variant: Variant, record: RoutingRecord
) -> Iterator[tuple[ExpertCache, ...]]:
    """Pools of some sizes, with what a replay promises where the rest of the experts' VRAM has as many of each layer as
    fit."""
    tier, pools = _decoding_tier(variant), list_pools(spec, record, variant.workload.sequences)
    admits, in_vram = _count_admits(spec, profile, variant), _count_in_vram(spec, tier)
    each = sum(pool.nbytes for pool in pools) / count_shares(pools[0].units[0])  # one expert of every layer
    for share in SHARES:
        caches = fill_pools(pools, share * in_vram, int((1 - share) * in_vram / each), POLICIES, admits)
        if caches:
            yield caches


def _price_slots(spec: ModelSpec, profile: MachineProfile, variant: Variant, record: RoutingRecord) -> Variant:
    """The variant with the hits that a replay of its own slots finds, and predictions by them."""
    (rank,), caches = variant.ranks, _replay_slots(spec, variant, record)
    variant = replace(variant, ranks=(replace(rank, caches=caches),))
    tables, tiers = find_tables(profile, variant.correction), tuple(tier.tokens for tier in rank.tiers)
    (task,) = price_tiers(replace(spec, caches=caches), tables, variant.workload, tiers)
    return predict_again(variant, task)


def _replay_slots(spec: ModelSpec, variant: Variant, record: RoutingRecord) -> tuple[ExpertCache, ...]:
    """A plan's slots with the hits that a replay finds."""
    (rank,), pools = variant.ranks, list_pools(spec, record, variant.workload.sequences)
    return tuple(_promise(spec, rank, cache, pools) for cache in rank.caches)


def _promise(spec: ModelSpec, rank: RankPlan, cache: ExpertCache, pools: tuple[Pool, ...]) -> ExpertCache:
    pool = next(pool for pool in pools if pool.units[0].name == cache.units[0])
    return pool.promise(cache, find_eligible(spec, cache, rank))


def _decoding_tier(variant: Variant) -> TierPlan:
    """In which all sequences decode."""
    return variant.ranks[0].covering(variant.workload.sequences)


def _count_in_vram(spec: ModelSpec, tier: TierPlan) -> int:
    """Bytes of experts that lie in VRAM in a tier."""
    total = 0
    for place in tier.placements:
        unit = spec.unit(place.unit)
        if unit.kind.parts and place.in_arena:
            here = place.kept_parts or count_shares(unit) - place.cpu_rows
            total += here * sum(part_sizes(unit).values())
    return total


def _count_admits(spec: ModelSpec, profile: MachineProfile, variant: Variant) -> int:
    """How many experts may be brought in after a micro-batch so that none waits for the link. What they cost after
    all is simulated."""
    prediction, tables = _decoding_tier(variant).prediction, find_tables(profile, variant.correction)
    idle = prediction.seconds - dict(prediction.busy).get("link", 0.0)
    spare = max(SPARE_SHARE * idle, LEAST_SHARE * prediction.seconds)
    units = [unit for unit in spec.units if unit.kind.parts and unit.tensors]
    each = max(sum(tables.copy("h2d", nbytes) for nbytes in part_sizes(unit).values()) for unit in units)
    return max(1, min(MOST_ADMITS, int(spare / each)))
