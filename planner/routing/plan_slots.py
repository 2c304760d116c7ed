"""Slots for experts that follow use, weighed against experts that stay in VRAM: by replay of a routing record.

Each rank of a split model has pools of its own, of what it holds: slices of experts, or whole layers.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from operator import attrgetter
from typing import TypeVar

from pshard.cuts.rank_parts import cut_ranks
from pshard.errors import NoPlan
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import Correction, RankPlan, TierPlan, Variant
from pshard.planner.join_ranks import joint_seconds
from pshard.planner.make_plan import Sketch, plan_baseline, plan_variant, predict_again, sketch_plan
from pshard.planner.prepare_ranks import price_tiers
from pshard.planner.price.host_issue import admit_issue
from pshard.planner.price.profile_tables import Tables, find_tables
from pshard.planner.published.strategies import EXPERT_LRU
from pshard.planner.routing.plan_disk_slots import lives_on_disk, plan_disk_slots
from pshard.planner.routing.slot_promises import Pool, fill_pools, list_pools
from pshard.predicted_times import round_seconds
from pshard.routing.followed import find_eligible, hold_slots
from pshard.routing.record import RoutingRecord
from pshard.units.divide_unit import count_shares
from pshard.units.moe.expert_cache import MOST_FOLLOW_TOKENS, POLICIES, ExpertCache, part_sizes
from pshard.workload import Workload

SHARES = (0.3, 0.6, 0.95)  # of what experts take of VRAM: pools that are tried
SPARE_SHARE = 0.5  # of the time in which the link has nothing else to do: what admissions may take of it
LEAST_SHARE = 0.15  # of all time: where the link limits the plan without slots, which slots relieve
HOST_SHARE = 0.15  # of all time, that the host may take to bring experts: nothing else begins meanwhile
MOST_ADMITS = 16  # after each micro-batch; more move hit rates little

RankCaches = tuple[tuple[ExpertCache, ...], ...]


def why_no_slots(variant: Variant) -> str | None:
    """Why a plan by a routing record cannot have slots for experts that follow use, and what can; None where it can."""
    if (sequences := variant.workload.sequences) <= MOST_FOLLOW_TOKENS:
        return None
    return (
        f"no slots for experts that follow use, as they are for up to {MOST_FOLLOW_TOKENS} sequences and the plan is "
        f"for {sequences}; popular experts are pinned by the record all the same"
    )


def plan_slots(
    spec: ModelSpec,
    profile: MachineProfile,
    workload: Workload,
    variant: Variant,
    record: RoutingRecord | None,
    time_limit: float = 10.0,
) -> Variant:
    """The variant, or one with slots for experts that follow use, where that takes less time by the record. Without
    one all experts are used alike: then slots find no more than experts that stay, and only the published way to use
    them is looked at.

    Pools of some sizes take their room from experts that would stay. Beside each all is placed, by the hits that a
    replay promises. Beside the one with which that is the fastest all is planned, twice: by those hits, and by those
    of the first plan's slots. Of several ranks each has pools of its own, priced by a replay of its own, and what they
    take together counts. workload: what the variant was planned for, with the largest micro-batch that was asked for.
    """
    if why_no_slots(variant) or not variant.plan_needed or spec.config.experts is None:
        return variant
    if lives_on_disk(spec, variant):
        return plan_disk_slots(spec, profile, workload, variant, record)
    correction, found, published = variant.correction, [variant], list[Variant]()

    def plan(caches: RankCaches) -> Variant:
        return plan_variant(hold_slots(spec, caches), profile, workload, time_limit, correction)

    with suppress(NoPlan):
        most = inf if record else round_seconds(variant)  # by a record its slots are a size to try, fast or not
        published.append(plan_baseline(EXPERT_LRU, spec, profile, workload, correction, record, most=most))
    if record:
        tried = [*_list_caches(spec, profile, variant, published, record)]
        if caches := _choose_pools(spec, profile, workload, correction, tried, time_limit):
            with suppress(NoPlan):
                again = plan(_replay_slots(spec, plan(caches), record))
                found.append(_price_slots(spec, profile, again, record))
    return replace(min([*found, *published], key=round_seconds), considered=variant.considered)


def _choose_pools(
    spec: ModelSpec,
    profile: MachineProfile,
    workload: Workload,
    correction: Correction,
    tried: Sequence[RankCaches],
    time_limit: float,
) -> RankCaches:
    """Those beside which the quick part of planning finds the fastest plan, of several ranks each one's of any that are
    tried, or none; () where no rank has any."""
    ranks, found = len(workload.vram_mib), list[Sketch]()
    for caches in (*tried, ((),) * ranks) if ranks > 1 else tried:
        with suppress(NoPlan):
            found.append(sketch_plan(hold_slots(spec, caches), profile, workload, time_limit, correction))
    if not found:
        return ()
    best = _mix_sketches(min(found, key=attrgetter("seconds")), found)
    caches = tuple(task.room.spec.caches for task in best.tasks)
    return caches if any(caches) else ()


def _mix_sketches(best: Sketch, others: Sequence[Sketch]) -> Sketch:
    """The sketch in which rank after rank has what it has in another one, as far as all of them take less time so: one
    rank's experts may all be in VRAM while the next one's are not. Ranks that are alike go together."""
    others = [other for other in others if _tiers_of(other) == _tiers_of(best)]
    groups: list[list[int]] = []
    for rank, task in enumerate(best.tasks):
        like = next((group for group in groups if task.is_like(best.tasks[group[0]])), None)
        if like is None:
            groups.append([rank])
        else:
            like.append(rank)
    for group in groups if len(groups) > 1 else ():
        for other in others:
            tasks, chosen = list(best.tasks), list(best.chosen)
            for rank in group:
                tasks[rank], chosen[rank] = other.tasks[rank], other.chosen[rank]
            seconds = joint_seconds(tasks, chosen, best.seconds)
            if seconds < best.seconds:
                best = Sketch(tuple(tasks), tuple(chosen), seconds)
    return best


def _tiers_of(sketch: Sketch) -> list[int]:
    return [cost.load.tokens for cost in sketch.tasks[0].costs]


def _list_caches(
    spec: ModelSpec, profile: MachineProfile, variant: Variant, published: Sequence[Variant], record: RoutingRecord
) -> Iterator[RankCaches]:
    """Pools of some sizes, with what a replay promises where the rest of the experts' VRAM has as many of each layer as
    fit; of several ranks also those of a published plan, and as large ones that bring in less. Ranks with slices of the
    same experts bring in equally many, so that equal pools hold the same ones."""
    w, tables, parts = variant.workload, find_tables(profile, variant.correction), cut_ranks(spec, variant.split)
    decoding = [rank.covering(w.answer_rows) for rank in variant.ranks]
    in_vram = [_count_in_vram(part, tier) for part, tier in zip(parts, decoding)]
    admits = [
        _count_admits(part, tables.of_accelerator(w.device + rank), tier)
        for rank, (part, tier) in enumerate(zip(parts, decoding))
    ]
    if w.split_mode == "tensor":
        admits = [min(n for n in admits if n)] * len(parts)
    rooms = [[(share * nbytes, (1 - share) * nbytes) for nbytes in in_vram] for share in SHARES]
    for other in published if len(parts) > 1 else ():
        yield tuple(rank.caches for rank in other.ranks)
        rooms.append([(sum(own.nbytes for own in rank.caches), 0) for rank in other.ranks])
    for room in rooms:
        caches = _once_for_alike([*zip(parts, room, admits)], lambda alike: _fill(*alike, record, w))
        if any(caches):
            yield caches


def _fill(
    part: ModelSpec, room: tuple[float, float], admits: int, record: RoutingRecord, workload: Workload
) -> tuple[ExpertCache, ...]:
    """A rank's pools. room: bytes of them, and of experts that stay."""
    if not (pools := list_pools(part, record, workload)):
        return ()
    each = sum(pool.nbytes for pool in pools) / count_shares(pools[0].units[0])  # one expert of every layer
    return fill_pools(pools, room[0], int(room[1] / each), POLICIES, admits)


_T = TypeVar("_T")
_Alike = TypeVar("_Alike", bound=Hashable)


def _once_for_alike(ranks: Sequence[_Alike], make: Callable[[_Alike], _T]) -> tuple[_T, ...]:
    """What is made of each rank; once of those that are the same: a replay takes seconds."""
    made = {rank: make(rank) for rank in dict.fromkeys(ranks)}
    return tuple(made[rank] for rank in ranks)


def _price_slots(spec: ModelSpec, profile: MachineProfile, variant: Variant, record: RoutingRecord) -> Variant:
    """The variant with the hits that replays of its own slots find, and predictions by them."""
    caches = _replay_slots(spec, variant, record)
    ranks = tuple(replace(rank, caches=own) for rank, own in zip(variant.ranks, caches))
    variant = replace(variant, ranks=ranks)
    tables, tiers = find_tables(profile, variant.correction), tuple(tier.tokens for tier in ranks[0].tiers)
    return predict_again(variant, *price_tiers(hold_slots(spec, caches), tables, variant.workload, tiers))


def _replay_slots(spec: ModelSpec, variant: Variant, record: RoutingRecord) -> RankCaches:
    """A plan's slots, by rank, with the hits that a replay finds."""
    parts = cut_ranks(spec, variant.split)
    plans = [replace(rank, rank=0, budget_mib=0) for rank in variant.ranks]  # these are told apart by what they have

    def replay(alike: tuple[ModelSpec, RankPlan]) -> tuple[ExpertCache, ...]:
        pools = list_pools(alike[0], record, variant.workload)
        return tuple(_promise(*alike, cache, pools) for cache in alike[1].caches)

    return _once_for_alike([*zip(parts, plans)], replay)


def _promise(spec: ModelSpec, rank: RankPlan, cache: ExpertCache, pools: tuple[Pool, ...]) -> ExpertCache:
    pool = next(pool for pool in pools if pool.units[0].name == cache.units[0])
    eligible = find_eligible(spec, cache, rank)
    return pool.count_alone(pool.promise(cache, eligible), eligible)


def _count_in_vram(spec: ModelSpec, tier: TierPlan) -> int:
    """Bytes of experts that lie in VRAM in a tier."""
    total = 0
    for place in tier.placements:
        unit = spec.unit(place.unit)
        if unit.kind.parts and unit.tensors and place.in_arena:
            here = place.kept_parts or count_shares(unit) - place.cpu_rows
            total += here * sum(part_sizes(unit).values())
    return total


def _count_admits(spec: ModelSpec, tables: Tables, tier: TierPlan) -> int:
    """How many experts may be brought in after a micro-batch so that none waits for the link, and little for the host;
    0 where there are none. What they cost after all is simulated."""
    units = [unit for unit in spec.units if unit.kind.parts and unit.tensors]
    if not units:
        return 0
    prediction = tier.prediction
    idle = prediction.seconds - dict(prediction.busy).get("link", 0.0)
    spare = max(SPARE_SHARE * idle, LEAST_SHARE * prediction.seconds)
    each = max(sum(tables.copy("h2d", nbytes) for nbytes in part_sizes(unit).values()) for unit in units)
    on_host = HOST_SHARE * prediction.seconds / max(1e-9, admit_issue(tables, len(part_sizes(units[0]))))
    return max(1, min(MOST_ADMITS, int(spare / each), int(on_host)))
