"""plan_variant: the whole way from model, machine and workload to a plan for every tier and rank."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from math import inf
from typing import TypeVar

from pshard.errors import NoPlan, UserError
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import NOTHING_LEARNT, Considered, Correction, Prediction, TierPlan, Variant, name_way
from pshard.planner.join_ranks import join_ranks, joint_seconds, predict_together, simulate_together
from pshard.planner.prepare_ranks import prepare_ranks, price_tiers
from pshard.planner.price.draft import Room
from pshard.planner.price.page_locks import locked
from pshard.planner.price.profile_tables import Tables, find_tables
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.unit_classes import UnitClass, group_units
from pshard.planner.published.per_tier import place_per_tier
from pshard.planner.published.rivals import fastest_rival
from pshard.planner.published.strategies import (
    EXPERT_LRU,
    HOT_EXPERTS,
    PER_TIER,
    check_strategy,
    find_left_out,
    list_strategies,
    name_improved,
)
from pshard.planner.rank_task import RankTask
from pshard.planner.remedies.advise import plan_or_advise
from pshard.planner.routing.slot_promises import fill_pools, list_pools
from pshard.planner.search.candidates import (
    Candidate,
    keep_everything,
    place_baseline,
    rank_candidates,
    reads_unlocked,
    restage_candidate,
    share_placements,
    stage_under,
    whole_tier,
)
from pshard.planner.search.divide_ffns import divide_candidate
from pshard.planner.search.one_placement import common_plans
from pshard.planner.search.polish_tiers import polish_tiers
from pshard.planner.search.round_times import steps_seconds
from pshard.planner.search.small.refine_units import refine_units
from pshard.predicted_times import count_swept, round_seconds, sum_first_token, sum_round
from pshard.routing.followed import hold_slots
from pshard.routing.order_experts import order_experts
from pshard.routing.record import RoutingRecord
from pshard.units.moe.expert_cache import ExpertCache
from pshard.workload import Workload

# micro-batches of which sweeps are tried: smaller by so much than what is fastest without, and no smaller than that
SWEPT_PART, LEAST_SWEPT = 8, 512


def plan_variant(
    spec: ModelSpec,
    profile: MachineProfile,
    workload: Workload,
    time_limit: float = 10.0,
    correction: Correction = NOTHING_LEARNT,
) -> Variant:
    """Plan every tier and rank of a workload; `time_limit` in seconds bounds the solver.

    The variant's max_ubatch is lower than the workload's when the scratch of larger micro-batches does not fit, or
    when smaller ones prefill the prompt faster. Raises BudgetTooSmall when not even decoding fits, UserError when
    the profile lacks a table.
    """

    def begin(spec: ModelSpec, workload: Workload) -> tuple[tuple[RankTask, ...], tuple[Candidate, ...]]:
        tasks = prepare_ranks(spec, profile, workload, correction)
        return tasks, place_ranks(tasks, time_limit)

    tasks, placed = plan_or_advise(begin, begin, spec, profile, workload)
    refined = refine_ranks(tasks, placed)
    if len(tasks) == 1:
        refined = (_or_unlimited(tasks[0], refined[0], time_limit),)
    chosen = choose_fastest(tasks, refined)
    if tasks[0].room.beyond is None:
        variant = join_ranks(tasks, chosen)
    else:  # refined as if memory held all: what is not may lose less to the disk
        variant = _plan_beyond(spec, profile, workload, time_limit, correction, (tasks, (chosen, placed)))
    if spec.popularity and not spec.caches and tasks[0].plan_needed and len(tasks) == 1:
        return _or_unrecorded(spec, profile, variant, time_limit)
    return variant


def _plan_beyond(
    spec: ModelSpec,
    profile: MachineProfile,
    workload: Workload,
    time_limit: float,
    correction: Correction,
    found: tuple[tuple[RankTask, ...], Sequence[tuple[Candidate, ...]]],
) -> Variant:
    """The variant with the shortest round of those found for the ranks, which may lack host memory for a part of it. If
    all have too much scratch beside slots for that part, one of smaller micro-batches."""
    tasks, several = found
    try:
        return _or_swept(spec, profile, _join_fastest(tasks, several), workload, time_limit)
    except NoPlan:
        smaller = [cost.load.tokens for cost in tasks[0].costs[:-1]]
        if not smaller or smaller[-1] < workload.answer_rows:
            raise
        return plan_variant(spec, profile, replace(workload, max_ubatch=smaller[-1]), time_limit, correction)


def _or_swept(
    spec: ModelSpec, profile: MachineProfile, variant: Variant, workload: Workload, time_limit: float
) -> Variant:
    """The variant, or where it has weights on disk and no sweeps, one of smaller micro-batches that go in sweeps, where
    that takes less time: their scratch leaves room for pins."""
    largest = variant.workload.max_ubatch
    smaller = max(LEAST_SWEPT, largest // SWEPT_PART)
    rank, *others = variant.ranks
    if others or not rank.beyond_host or rank.tiers[-1].sweep or smaller >= largest:
        return variant
    if not count_swept(workload, smaller):
        return variant
    try:
        other = plan_variant(spec, profile, replace(workload, max_ubatch=smaller), time_limit, variant.correction)
    except NoPlan:
        return variant
    return min(variant, other, key=round_seconds)


def _join_fastest(tasks: tuple[RankTask, ...], several: Sequence[tuple[Candidate, ...]]) -> Variant:
    """The variant with the shortest round. Raises NoPlan where each lacks memory."""
    found, why = list[Variant](), NoPlan("")
    for candidates in several:
        try:
            found.append(join_ranks(tasks, candidates))
        except NoPlan as error:
            why = error
    if not found:
        raise why
    return min(found, key=round_seconds)


def _or_unrecorded(spec: ModelSpec, profile: MachineProfile, variant: Variant, time_limit: float) -> Variant:
    """The variant, or the one of experts that are all chosen alike, where that takes less time by what was recorded:
    the search tries few ways to divide a layer, and a record must make no plan slower."""
    alike = plan_variant(order_experts(spec, None), profile, variant.workload, time_limit, variant.correction)
    tiers = tuple(tier.tokens for tier in alike.ranks[0].tiers)
    (task,) = price_tiers(spec, find_tables(profile, variant.correction), alike.workload, tiers)
    alike = predict_again(alike, task)
    return alike if round_seconds(alike) < round_seconds(variant) else variant


@dataclass(frozen=True)
class RoughPlan:
    """What `plan_variant` has before any rank's plan is refined. placed: the plan of each rank by itself; chosen:
    these, or what takes the ranks less time together."""

    tasks: tuple[RankTask, ...]
    placed: tuple[Candidate, ...]
    chosen: tuple[Candidate, ...]

    @cached_property
    def seconds(self) -> dict[int, tuple[float, ...]]:
        """Predicted seconds of a micro-batch by tier, on every rank; 0 in tiers that the round does not enter."""
        return simulate_together(self.tasks, self.chosen) or {}

    @property
    def round_seconds(self) -> float:
        return sum_round(self.tasks[0].room.workload, self.seconds)

    @cached_property
    def variant(self) -> Variant:
        """What is chosen, with predictions and bounds, checked: much work for who only compares plans."""
        return join_ranks(self.tasks, self.chosen)

    def describe(self) -> Considered:
        """The plan as one of those that were considered."""
        workload = self.tasks[0].room.workload
        way = name_way(workload, [task.share for task in self.tasks])
        return Considered(way, self.round_seconds, sum_first_token(workload, self.seconds))

    @property
    def bound(self) -> float:
        """Seconds of a round that no refined plan can beat, either."""
        bounds = zip(*(task.divided_bounds for task in self.tasks))
        tiers = (cost.load.tokens for cost in self.tasks[0].costs)
        return sum_round(self.tasks[0].room.workload, dict(zip(tiers, bounds)))

    def refine(self) -> Variant:
        """The variant of refined plans, if it is faster. Raises as `join_ranks` does."""
        refined = refine_ranks(self.tasks, self.placed)
        if all(new is old for new, old in zip(refined, self.placed)):
            return self.variant
        return min(self._join(refined), self.variant, key=round_seconds)

    def _join(self, refined: tuple[Candidate, ...]) -> Variant:
        return join_ranks(self.tasks, _pick_fastest(self.tasks, [refined, *_list_common(self.tasks, refined)]))


def plan_roughly(spec: ModelSpec, profile: MachineProfile, workload: Workload, time_limit: float = 10.0) -> RoughPlan:
    """The first part of `plan_variant`. Raises Shortage where that raises BudgetTooSmall, and UserError as it does."""
    tasks = prepare_ranks(spec, profile, workload)
    placed = place_ranks(tasks, time_limit)
    return RoughPlan(tasks, placed, choose_fastest(tasks, placed))


@dataclass(frozen=True)
class Sketch:
    """What the quick part of planning finds: the ranks' tasks, what was chosen for each, and the seconds of a round."""

    tasks: tuple[RankTask, ...]
    chosen: tuple[Candidate, ...]
    seconds: float


def sketch_plan(
    spec: ModelSpec, profile: MachineProfile, workload: Workload, time_limit: float, correction: Correction
) -> Sketch:
    """The quick part of what `plan_variant` does. Raises as `plan_roughly` does."""
    tasks = prepare_ranks(spec, profile, workload, correction)

    found = place_ranks(tasks, time_limit)
    if len(tasks) == 1:
        return Sketch(tasks, found, found[0].total)
    chosen = _pick_fastest(tasks, [found, *_list_common(tasks, found)])
    return Sketch(tasks, chosen, joint_seconds(tasks, chosen))


def plan_baseline(
    name: str,
    spec: ModelSpec,
    profile: MachineProfile,
    workload: Workload,
    correction: Correction = NOTHING_LEARNT,
    record: RoutingRecord | None = None,
    tasks: tuple[RankTask, ...] = (),
    most: float = inf,
) -> Variant:
    """The variant that the published strategy of that name (strategies.NAMES) gives; as runnable as the planner's.

    record: by which slots for experts are priced; None: all experts are used alike. tasks: what `prepare_ranks` gives,
    of who asks for several strategies. Raises UserError when the name is unknown, the strategy does not fit the
    budget, is for one device, or for models with experts; NoPlan when its round takes `most` seconds or more.
    """
    check_strategy(name, spec)
    if name == PER_TIER and len(workload.vram_mib) > 1:
        raise UserError(f"strategy {name!r} is for one device, not {len(workload.vram_mib)}; choose another")

    def prepare(spec: ModelSpec, workload: Workload) -> tuple[RankTask, ...]:
        return prepare_ranks(spec, profile, workload, correction)

    def place(spec: ModelSpec, workload: Workload, tasks: tuple[RankTask, ...] = ()) -> Variant:
        tasks = tasks or prepare(spec, workload)
        if name == EXPERT_LRU:
            slots = _like_ranks_once(tasks, partial(_fill_room, record=record))
            tasks = prepare(hold_slots(spec, slots), workload)
        return _place_published(name, tasks, most)

    return plan_or_advise(partial(place, tasks=tasks), place, spec, profile, workload)


def _place_published(name: str, tasks: tuple[RankTask, ...], most: float) -> Variant:
    """The variant that a published strategy gives for these tasks. Raises NoPlan where it does not fit, or its round
    takes `most` seconds or more."""
    chosen = _like_ranks_once(tasks, partial(_place_strategy, name))
    for task, candidate in zip(tasks, chosen):
        if candidate is None:
            raise NoPlan(f"strategy {name!r} does not fit {task.budget_mib} MiB; raise --vram")
        if reads_unlocked(candidate, task.costs):
            mib = (task.costs[0].tables.profile.lockable_bytes or 0) >> 20
            raise NoPlan(
                f"strategy {name!r} has the GPU read experts in page-locked memory, and the system lets {mib} MiB be "
                "locked; raise that limit or --vram, or choose another strategy"
            )
        if name == HOT_EXPERTS and (without := find_left_out(candidate.tiers[0], task.room.spec)):
            raise NoPlan(
                f"strategy {name!r} has no room in {task.budget_mib} MiB for one expert of each layer ({without[0]} "
                "would have none in VRAM); raise --vram, or choose 'cpu-moe', which has none there"
            )
    placed = [c for c in chosen if c]
    needed = any(
        tier.placements != whole_tier(task.room, tier.tokens).placements
        for task, candidate in zip(tasks, placed)
        for tier in candidate.tiers
    )  # strategies may stream what would fit
    if most < inf and joint_seconds(tasks, placed, most) >= most:  # before it is bounded, which takes longer
        raise NoPlan(f"strategy {name!r} takes no less than {most:g} s for a round; choose another")
    anew = [t if t.plan_needed == needed else replace(t, plan_needed=needed, twin=None) for t in tasks]
    return join_ranks(anew, placed)


def _fill_room(task: RankTask, record: RoutingRecord | None) -> tuple[ExpertCache, ...]:
    """Slots in all the room that expert-lru leaves on a rank, for whatever was used last; none without experts."""
    chosen = place_baseline(EXPERT_LRU, task.room, task.costs)
    left = task.room.arena - max(tier.buffers.total for tier in chosen.tiers) if chosen else 0
    pools = list_pools(task.room.spec, record, task.room.workload)
    if not pools:
        return ()
    all_missed = sum(pool.used * len(pool.units) for pool in pools)
    caches = fill_pools(pools, left, 0, ("lru",), all_missed)
    if not caches:
        raise NoPlan(f"strategy {EXPERT_LRU!r} does not fit {task.budget_mib} MiB; raise --vram")
    slots, layers = sum(cache.slots for cache in caches), sum(len(pool.units) for pool in pools)
    if slots < layers:
        raise NoPlan(
            f"strategy {EXPERT_LRU!r} has slots for {slots} experts in {task.budget_mib} MiB, not for one of each of "
            f"{layers} layers; raise --vram"
        )
    return caches


def plan_several(task: RankTask, time_limit: float, programs: int = 2) -> tuple[Variant, ...]:
    """Variants of a model on one device that are worth trying: what `plan_variant` returns, then other ones.

    The best `programs` solutions of the program and the best published strategy, all with different placements.
    """
    ranked = rank_plans(task, time_limit, programs)
    wanted = [ranked[0]]
    for group, most in (([c for c in ranked if c.solution], programs), ([c for c in ranked if not c.solution], 1)):
        taken = sum(c in group for c in wanted)
        for candidate in group:
            if taken < most and all(not same_placements(candidate.tiers, c.tiers) for c in wanted):
                wanted.append(candidate)
                taken += 1
    return tuple(join_ranks((task,), [candidate]) for candidate in wanted)


def plan_to_try(task: RankTask, tables: Tables, time_limit: float) -> tuple[Variant, ...]:
    """What is worth trying on one device, the planner's choice first: `plan_several`, and before it, of a model with a
    record of routing, the plan of experts that are all chosen alike, where that takes less time by the record."""
    several = plan_several(task, time_limit)
    own, spec = several[0], task.room.spec
    if not spec.popularity or not task.plan_needed:
        return several
    tiers = tuple(tier.tokens for tier in own.ranks[0].tiers)
    (unrecorded,) = price_tiers(order_experts(spec, None), tables, own.workload, tiers)
    alike = predict_again(plan_several(unrecorded, time_limit, 1)[0], task)
    return (alike, *several) if round_seconds(alike) < round_seconds(own) else several


def same_placements(one: Sequence[TierPlan], other: Sequence[TierPlan]) -> bool:
    """Whether two plans run the same steps in every tier."""
    return [(t.placements, t.buffers) for t in one] == [(t.placements, t.buffers) for t in other]


def predict_again(variant: Variant, *tasks: RankTask, bounded: bool = True) -> Variant:
    """A variant with predictions by the costs of the ranks' tasks, which price the same tiers; what was measured
    stays. bounded: see `predict_together`."""
    ranks = []
    for old, new in zip(variant.ranks, predict_together(tasks, variant.ranks, bounded), strict=True):
        tiers = tuple(
            replace(tier, prediction=_keep_measured(before.prediction, tier.prediction))
            for before, tier in zip(old.tiers, new.tiers, strict=True)
        )
        ranks.append(replace(new, tiers=tiers))
    return replace(
        variant,
        ranks=tuple(ranks),
        correction=tasks[0].costs[0].tables.correction,
        popularity=tasks[0].room.spec.popularity,
    )


def no_slower(spec: ModelSpec, profile: MachineProfile, variant: Variant, smaller: Variant | None) -> Variant:
    """The variant, or what was planned under smaller budgets, put there unchanged, where its round is shorter: more
    memory makes no plan of a sweep slower."""
    if smaller is None or round_seconds(smaller) >= round_seconds(variant):
        return variant
    budgets = variant.workload.vram_mib[:1] * len(smaller.ranks)  # a sweep gives all devices the same
    workload = replace(smaller.workload, vram_mib=budgets)
    ranks = tuple(replace(rank, budget_mib=mib) for rank, mib in zip(smaller.ranks, budgets, strict=True))
    tiers = tuple(tier.tokens for tier in ranks[0].tiers)
    kept = replace(smaller, workload=workload, ranks=ranks)
    return predict_again(kept, *price_tiers(spec, find_tables(profile, smaller.correction), workload, tiers))


def _keep_measured(before: Prediction, after: Prediction) -> Prediction:
    return replace(after, measured_seconds=before.measured_seconds, disturbed=before.disturbed)


def rank_plans(task: RankTask, time_limit: float, programs: int = 1) -> tuple[Candidate, ...]:
    """Plans of one rank, the best first, with so many solutions of the program; only the one that keeps everything in
    VRAM where that fits every rank."""
    best, *others = _place(task, time_limit, programs)
    whole, divided = _refine_alone(task, best)
    divided = _or_unlimited(task, divided, time_limit)
    others = others if divided is whole else [whole, *others]
    return (divided, *(_share(task, candidate) for candidate in others))


def place_ranks(tasks: Sequence[RankTask], time_limit: float) -> tuple[Candidate, ...]:
    """The best plan of each rank by counts, not refined unit by unit. Ranks that are alike get the same."""
    return tuple(_like_ranks_once(tasks, lambda task: _place(task, time_limit / len(tasks), 1)[0]))


_T = TypeVar("_T")


def _like_ranks_once(tasks: Sequence[RankTask], place: Callable[[RankTask], _T]) -> list[_T]:
    """What `place` gives for each rank, the same for ranks that are alike."""
    found: list[_T] = []
    for task in tasks:
        alike = next((one for other, one in zip(tasks, found) if other.is_like(task)), None)
        found.append(alike or place(task))
    return found


def refine_ranks(tasks: Sequence[RankTask], placed: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Each rank's plan refined unit by unit, FFNs divided where that helps; of a small model on one device proven."""
    if len(tasks) == 1:  # ranks wait for each other: what is the fastest alone need not be
        return (_refine_alone(tasks[0], placed[0])[1],)
    refined: list[Candidate] = []
    for task, candidate in zip(tasks, placed):
        alike = next((c for other, c in zip(tasks, refined) if other.is_like(task)), None)
        refined.append(alike or _keep_steps(task, _refine_rank, candidate))
    return tuple(refined)


def _refine_alone(task: RankTask, candidate: Candidate) -> tuple[Candidate, Candidate]:
    """The plan of one device refined: of whole units, and with divided ones where that is faster. Each is searched by
    itself: a search that may divide can end in a slower plan than one that may not."""
    whole = _keep_steps(task, _refine_whole, candidate)
    if not any(cls.shares for cls in task.classes):
        return whole, whole
    divided = _keep_steps(task, _refine_divided, candidate)
    return whole, min(whole, divided, key=lambda refined: refined.total)


_Refine = Callable[[RankTask, Candidate], Candidate]


def _keep_steps(task: RankTask, refine: _Refine, candidate: Candidate) -> Candidate:
    """What `refine` makes of the candidate, or, where a published plan's micro-batches take less time, of that one:
    with no slower ones."""
    refined = refine(task, candidate)
    rival = fastest_rival(task, refined) if task.plan_needed else None
    return refine(task, replace(rival, most=steps_seconds(rival.seconds, task.costs))) if rival else refined


def _refine_rank(task: RankTask, candidate: Candidate) -> Candidate:
    """The plan of one of several devices refined: with divided FFNs and every unit's place searched."""
    refined = _search_units(task, _improve(task, divide_candidate, candidate), divides=True)
    return _share(task, _polish(task, refined))


def _refine_whole(task: RankTask, candidate: Candidate) -> Candidate:
    """The plan of the only device refined, without dividing FFNs."""
    return _share(task, _search_units(task, _polish(task, candidate), divides=False))


def _refine_divided(task: RankTask, candidate: Candidate) -> Candidate:
    """The same with divided FFNs where that helps."""
    whole = _polish(task, candidate)
    divided = _improve(task, divide_candidate, candidate)
    divided = whole if divided is candidate else _polish(task, divided)
    start = min(whole, divided, key=lambda begun: begun.promise(task.costs))
    return _share(task, _search_units(task, start, divides=True))


def _place(task: RankTask, time_limit: float, programs: int) -> tuple[Candidate, ...]:
    if not task.plan_needed or not task.room.spec.packed_nbytes:
        return (keep_everything(task.room, task.costs),)
    ranked = rank_candidates(task.room, task.classes, task.costs, task.bounds, time_limit, programs)
    listed = task.choices if task.costs[0].tables.profile.lockable_bytes is None else None
    whole, most = locked(task.costs), ranked[0].total
    mix = place_per_tier(task.room, task.classes, whole, task.bounds, most, listed=listed)
    if mix is None:
        return ranked
    placed = (restage_candidate(task.room, task.costs, mix), *ranked)
    return tuple(sorted(placed, key=lambda c: c.promise(task.costs)))


_Improve = Callable[[Room, tuple[UnitClass, ...], tuple[TierCosts, ...], Candidate], Candidate]


def _improve(task: RankTask, improve: _Improve, candidate: Candidate) -> Candidate:
    """The candidate improved. Improvements guess which copies are staged, where some are: what is slower when priced
    with those that are is not taken, nor is what takes longer in its micro-batches than it may."""
    if not task.plan_needed:
        return candidate
    improved = improve(task.room, task.classes, task.costs, candidate)
    if task.costs[0].tables.profile.lockable_bytes is not None:
        improved = restage_candidate(task.room, task.costs, improved)
        if improved.total >= candidate.total:
            return candidate
    if not improved.keeps(task.costs):
        return candidate
    if same_placements(improved.tiers, candidate.tiers):
        return improved
    return replace(improved, strategy=name_improved(improved.strategy))


def _search_units(task: RankTask, candidate: Candidate, divides: bool) -> Candidate:
    return _improve(task, partial(refine_units, divides=divides), candidate)


def _polish(task: RankTask, candidate: Candidate) -> Candidate:
    polish = partial(polish_tiers, bounds=task.divided_bounds)
    return _improve(_stage_as(task, candidate), polish, candidate)


def _share(task: RankTask, candidate: Candidate) -> Candidate:
    """The candidate with tiers that borrow from each other; where that changes which copies are staged, the others are
    improved under these."""
    share = partial(share_placements, bounds=task.divided_bounds)
    shared = _improve(_stage_as(task, candidate), share, candidate)
    if shared is candidate or task.costs[0].tables.profile.lockable_bytes is None:
        return shared
    return _polish(task, shared)


def _or_unlimited(task: RankTask, found: Candidate, time_limit: float) -> Candidate:
    """The plan of one device, or, where not all memory can be page-locked, what becomes of the plan that is made as if
    it could, where that takes less time: searches guess what lies beyond the limit, and some plans lie below it."""
    tables, room = task.costs[0].tables, task.room
    if tables.profile.lockable_bytes is None or not task.plan_needed:
        return found
    free = find_tables(replace(tables.profile, lockable_bytes=None), tables.correction)
    (unlimited,) = price_tiers(room.spec, free, room.workload, tuple(cost.load.tokens for cost in task.costs))
    made = _refine_alone(unlimited, place_ranks((unlimited,), time_limit)[0])[1]
    made = _share(task, _polish(task, restage_candidate(room, task.costs, made)))
    slower = steps_seconds(made.seconds, task.costs) > steps_seconds(found.seconds, task.costs)
    return found if slower or made.total >= found.total or reads_unlocked(made, task.costs) else made


def _stage_as(task: RankTask, candidate: Candidate) -> RankTask:
    """The task with the copies staged that are under a candidate: for who changes what is done with units outside
    VRAM."""
    if task.costs[0].tables.profile.lockable_bytes is None or not task.plan_needed:
        return task
    costs = stage_under(candidate, task.costs)
    return replace(task, costs=costs, classes=group_units(task.room.spec, costs), twin=None)


def choose_fastest(tasks: Sequence[RankTask], chosen: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The ranks' plans, or plans with which several ranks together take less time: the same placements on all of them,
    or a published strategy. Each rank's plan was chosen as if it were alone."""
    plans = [tuple(chosen), *_list_common(tasks, chosen)]
    return _pick_fastest(tasks, chain(plans, _place_strategies(tasks)))


def _wait_for_each_other(tasks: Sequence[RankTask]) -> bool:
    """Whether ranks may do better with other plans than those that are the best of each alone."""
    return tasks[0].plan_needed and not all(task.is_like(tasks[0]) for task in tasks)


def _list_common(tasks: Sequence[RankTask], chosen: Sequence[Candidate]) -> Iterator[tuple[Candidate, ...]]:
    if _wait_for_each_other(tasks) and tasks[0].room.workload.split_mode == "tensor":
        yield from common_plans(tasks, chosen)


def _pick_fastest(tasks: Sequence[RankTask], plans: Iterable[tuple[Candidate, ...]]) -> tuple[Candidate, ...]:
    """The plans with which the ranks together take least time; the first of equally fast ones."""
    best, *others = plans
    least = joint_seconds(tasks, best) if others else inf
    for tried in others:
        seconds = joint_seconds(tasks, tried, least)
        best, least = (tried, seconds) if seconds < least else (best, least)
    return best


def _place_strategies(tasks: Sequence[RankTask]) -> Iterator[tuple[Candidate, ...]]:
    """Published strategies that fit every rank, where its own plan need not be the best."""
    for name in list_strategies(tasks[0].room.spec) if _wait_for_each_other(tasks) else ():
        placed = _like_ranks_once(tasks, partial(_place_strategy, name))
        if all(placed):
            yield tuple(c for c in placed if c)


def _place_strategy(name: str, task: RankTask) -> Candidate | None:
    if name == PER_TIER:
        return place_per_tier(task.room, task.classes, task.costs, task.bounds)
    return place_baseline(name, task.room, task.costs)
