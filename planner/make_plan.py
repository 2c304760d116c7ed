"""plan_variant: the whole way from model, machine and workload to a plan for every tier and rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

from pshard.cuts.layer_cuts import join_seconds
from pshard.cuts.rank_parts import cut_ranks
from pshard.errors import BudgetTooSmall, UserError
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import NOTHING_LEARNT, Correction, RankPlan, Solve, TierPlan, Variant
from pshard.planner.check_plan import check_variant
from pshard.planner.price.costs import Tables, TierCosts, tier_costs
from pshard.planner.price.draft import Room, predict_ranks, predict_tier, rank_room
from pshard.planner.price.host_limits import explain_shortage, holds, host_fits, share_host, usable_bytes
from pshard.planner.price.page_locks import guess_staged, locked, stage_by
from pshard.planner.price.tier_loads import raise_weights, tier_loads
from pshard.planner.program.bounds import bound_seconds, rough_bound
from pshard.planner.program.coefficients import count_tier, may_divide, tier_problem
from pshard.planner.program.fluid import fluid_seconds
from pshard.planner.program.unit_classes import UnitClass, group_units
from pshard.planner.search.anneal import refine_candidate
from pshard.planner.search.candidates import (
    Candidate,
    keep_everything,
    place_baseline,
    rank_candidates,
    restage_candidate,
    whole_tier,
)
from pshard.planner.search.divide_ffns import divide_candidate
from pshard.planner.search.exact import perfect_candidate
from pshard.planner.search.one_placement import common_plans
from pshard.planner.search.strategies import STRATEGIES
from pshard.times.predicted_times import prefill_seconds, round_seconds
from pshard.units.kv_cells import check_kv_types
from pshard.workload import Split, Workload

MOST_MIB = 1 << 24  # no device has more
SMALLER_BATCH_SHARE = 0.99  # of a prompt's time: what smaller micro-batches must stay below
OFF_DEVICE_SHARE = 0.99  # of a unit's time on the device: what the CPU must stay below


@dataclass(frozen=True)
class RankTask:
    """What is planned for one rank: its slice of the model, its room, and the costs and bounds of its tiers.

    bounds: seconds that no plan of whole units can beat.
    """

    rank: int
    share: float
    room: Room
    classes: tuple[UnitClass, ...]
    costs: tuple[TierCosts, ...]
    bounds: tuple[float, ...]
    plan_needed: bool  # False: everything fits the memory of every rank, and no device is slower than its host

    @property
    def budget_mib(self) -> int:
        return self.room.workload.vram_mib[self.rank]

    @cached_property
    def divided_bounds(self) -> tuple[float, ...]:
        """Seconds by tier that no plan can beat, whether or not it divides FFNs."""
        found = []
        for cost, bound in zip(locked(self.costs), self.bounds):
            if not may_divide(cost):
                found.append(bound)
                continue
            quick = cost.load.rare or not self.plan_needed
            least = (rough_bound if quick else bound_seconds)(self.room, self.classes, cost, divide=True)
            found.append(min(bound, least))
        return tuple(found)

    def is_like(self, other: "RankTask") -> bool:
        """Whether the same plan serves both ranks."""
        same_device = self.costs[0].tables is other.costs[0].tables
        mine, its = self.room, other.room
        return same_device and (mine.arena, mine.host) == (its.arena, its.host) and mine.spec == its.spec


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
    tasks = prepare_ranks(spec, profile, workload, correction)
    return join_fastest(tasks, refine_ranks(tasks, place_ranks(tasks, time_limit)))


def plan_baseline(
    name: str, spec: ModelSpec, profile: MachineProfile, workload: Workload, correction: Correction = NOTHING_LEARNT
) -> Variant:
    """The variant that the published strategy of that name (baselines.STRATEGIES) gives; as runnable as the planner's.

    Raises UserError when the name is unknown or the strategy does not fit the budget.
    """
    if name not in STRATEGIES:
        raise UserError(f"unknown strategy {name!r}; choose from ilp, {', '.join(STRATEGIES)}")
    tasks = prepare_ranks(spec, profile, workload, correction)
    chosen = _like_ranks_once(tasks, partial(_place_strategy, name))
    for task, candidate in zip(tasks, chosen):
        if candidate is None:
            raise UserError(f"strategy {name!r} does not fit {task.budget_mib} MiB; raise --vram")
    placed = [c for c in chosen if c]
    needed = any(
        tier.placements != whole_tier(task.room, tier.tokens).placements
        for task, candidate in zip(tasks, placed)
        for tier in candidate.tiers
    )  # strategies may stream what would fit
    return join_ranks([replace(task, plan_needed=needed) for task in tasks], placed)


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


def same_placements(one: Sequence[TierPlan], other: Sequence[TierPlan]) -> bool:
    """Whether two plans run the same steps in every tier."""
    return [(t.placements, t.buffers) for t in one] == [(t.placements, t.buffers) for t in other]


def predict_again(variant: Variant, task: RankTask) -> Variant:
    """A variant of one device with predictions by the costs of `task`, which prices the same tiers; what was measured
    stays."""
    (rank,) = variant.ranks
    costs = stage_by(rank, task.costs)
    tiers = tuple(
        replace(
            tier,
            prediction=replace(
                predict_tier(task.room, tier, cost, bound),
                measured_seconds=tier.prediction.measured_seconds,
                disturbed=tier.prediction.disturbed,
            ),
        )
        for tier, cost, bound in zip(rank.tiers, costs, task.divided_bounds, strict=True)
    )
    return replace(variant, ranks=(replace(rank, tiers=tiers),), correction=task.costs[0].tables.correction)


def rank_plans(task: RankTask, time_limit: float, programs: int = 1) -> tuple[Candidate, ...]:
    """Plans of one rank, the best first, with so many solutions of the program; only the one that keeps everything in
    VRAM where that fits every rank."""
    best, *others = _place(task, time_limit, programs)
    whole = _improve(task, refine_candidate, best)
    divided = _improve(task, perfect_candidate, _improve(task, divide_candidate, whole))
    return (divided, *others) if divided is whole else (divided, whole, *others)


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
    refined: list[Candidate] = []
    for task, candidate in zip(tasks, placed):
        alike = next((c for other, c in zip(tasks, refined) if other.is_like(task)), None)
        refined.append(alike or _improve(task, divide_candidate, _improve(task, refine_candidate, candidate)))
    if len(tasks) == 1:  # ranks wait for each other: what is the fastest alone need not be
        return (_improve(tasks[0], perfect_candidate, refined[0]),)
    return tuple(refined)


def _place(task: RankTask, time_limit: float, programs: int) -> tuple[Candidate, ...]:
    if not task.plan_needed or not task.room.spec.packed_nbytes:
        return (keep_everything(task.room, task.costs),)
    return rank_candidates(task.room, task.classes, task.costs, task.bounds, time_limit, programs)


_Improve = Callable[[Room, tuple[UnitClass, ...], tuple[TierCosts, ...], Candidate], Candidate]


def _improve(task: RankTask, improve: _Improve, candidate: Candidate) -> Candidate:
    """The candidate improved. Improvements guess which copies are staged, where some are: what is slower when priced
    with those that are is not taken."""
    if not task.plan_needed:
        return candidate
    improved = improve(task.room, task.classes, task.costs, candidate)
    if task.costs[0].tables.profile.lockable_bytes is None:
        return improved
    priced = restage_candidate(task.room, task.costs, improved)
    return priced if priced.total < candidate.total else candidate


def join_fastest(tasks: Sequence[RankTask], chosen: Sequence[Candidate]) -> Variant:
    """The variant of the ranks' plans, or of plans with which several ranks together take less time: the same
    placements on all of them, or a published strategy. Each rank's plan was chosen as if it were alone. Raises as
    `join_ranks` does."""
    best = join_ranks(tasks, chosen)
    if not best.plan_needed or all(task.is_like(tasks[0]) for task in tasks):
        return best
    together = list(common_plans(tasks, chosen)) if best.split_mode == "tensor" else []
    for name in STRATEGIES:
        placed = _like_ranks_once(tasks, partial(_place_strategy, name))
        together += [tuple(c for c in placed if c)] if all(placed) else []
    return min((best, *(join_ranks(tasks, plans) for plans in together)), key=round_seconds)


def _place_strategy(name: str, task: RankTask) -> Candidate | None:
    return place_baseline(name, task.room, task.costs)


def join_ranks(tasks: Sequence[RankTask], chosen: Sequence[Candidate]) -> Variant:
    """The variant in which each rank runs its plan, with predictions of how they run together.

    Raises PlanError for a plan that breaks a rule: a fault of the planner, which no runtime should meet.
    """
    w, shares = tasks[0].room.workload, tuple(t.share for t in tasks)
    ranks = _predict(tasks, [_write_rank(task, candidate) for task, candidate in zip(tasks, chosen)])
    variant = Variant(
        w.vram_mib, w.context, w.sequences, w.type_k, w.type_v, w.max_ubatch, w.prompt, w.generated,
        w.split_mode, shares if len(shares) > 1 else (), tasks[0].plan_needed, ranks,
        tasks[0].costs[0].tables.correction, w.max_tp, w.device, reduce_dtype=w.reduce_dtype,
    )  # fmt: skip
    tables = tasks[0].costs[0].tables
    check_variant(tuple(t.room.spec for t in tasks), variant, tables.kind, usable_bytes(tables.profile, len(tasks)))
    return variant


def prepare_ranks(
    spec: ModelSpec, profile: MachineProfile, workload: Workload, correction: Correction = NOTHING_LEARNT
) -> tuple[RankTask, ...]:
    """Cut the model, choose the largest micro-batch, and price every tier of every rank."""
    check_kv_types(spec.config, workload.type_k, workload.type_v)
    tables = Tables(profile, correction)
    tiers = fitting_tiers(cut_ranks(spec, split_of(workload)), workload, tables)
    tasks = price_roughly(spec, tables, workload, tiers)
    return _weigh(tasks, workload, _best_ubatch(tasks, workload))


def price_tiers(spec: ModelSpec, tables: Tables, workload: Workload, tiers: tuple[int, ...]) -> tuple[RankTask, ...]:
    """Every rank's task for exactly these tiers, whether or not their scratch fits."""
    return _weigh(price_roughly(spec, tables, workload, tiers), workload, tiers[-1])


def price_roughly(spec: ModelSpec, tables: Tables, workload: Workload, tiers: tuple[int, ...]) -> tuple[RankTask, ...]:
    """Costs and rough bounds of every rank and tier; nothing in them depends on the largest micro-batch."""
    loads, shares = tier_loads(workload, tiers), rank_shares(workload)
    tasks: list[RankTask] = []
    parts = cut_ranks(spec, split_of(workload))
    rooms = share_host(_rooms(parts, workload, workload.vram_mib, tables), tables.profile, tiers[-1])
    for rank, (part, room, share) in enumerate(zip(parts, rooms, shares)):
        own = tables.of_accelerator(workload.device + rank)
        staged = guess_staged(part, own.profile.lockable_bytes, len(shares))
        classes = group_units(part, staged)
        costs = tuple(tier_costs(part, own, load, workload, len(shares), staged) for load in loads)
        task = RankTask(rank, share, room, classes, costs, (), True)
        alike = next((other.bounds for other in tasks if other.is_like(task)), None)
        tasks.append(replace(task, bounds=alike or tuple(rough_bound(room, classes, c) for c in locked(costs))))
    return tuple(tasks)


def _weigh(tasks: tuple[RankTask, ...], workload: Workload, largest: int) -> tuple[RankTask, ...]:
    """The tasks without tiers above `largest`, each tier with its weight in the round and its bound."""
    workload = replace(workload, max_ubatch=largest)
    tiers = tuple(c.load.tokens for c in tasks[0].costs if c.load.tokens <= largest)
    seconds = [join_seconds(workload.split_mode, [bounds]) for bounds in zip(*(t.bounds for t in tasks))]
    loads = raise_weights(tier_loads(workload, tiers), seconds[: len(tiers)])
    whole = [whole_tier(t.room, largest) for t in tasks]
    needed = not all(w.buffers.total <= t.room.arena and holds(t.room, (w,)) for t, w in zip(tasks, whole))
    needed = needed or any(_favours_host(c) for t in tasks for c, n in zip(t.costs, loads) if not n.rare)
    weighed: list[RankTask] = []
    for t in tasks:
        room, costs = replace(t.room, workload=workload), tuple(replace(c, load=n) for c, n in zip(t.costs, loads))
        alike = next((other.bounds for other in weighed if other.is_like(t)), None)
        bounds = alike or tuple(
            (rough_bound if c.load.rare else bound_seconds)(room, t.classes, c) for c in locked(costs)
        )
        weighed.append(replace(t, room=room, costs=costs, bounds=bounds, plan_needed=needed))
    return tuple(weighed)


def _favours_host(cost: TierCosts) -> bool:
    """Whether some unit is faster on the CPU, hand-offs there and back included, than pinned: memory that holds
    everything does not settle such a tier."""
    nbytes = cost.load.tokens * cost.vector_bytes
    aside = cost.handoff("cpu", nbytes) + cost.handoff("acc", nbytes)
    units = (cost.units[u.name] for u in cost.spec.units if not u.kind.is_looked_up)
    return any(c.cpu + aside < c.acc * OFF_DEVICE_SHARE for c in units)


def _best_ubatch(tasks: tuple[RankTask, ...], workload: Workload) -> int:
    """The largest micro-batch that is (nearly) the fastest for the prompt, judged by the tiers' rough bounds."""
    tiers = [c.load.tokens for c in tasks[0].costs]
    seconds = {t: [task.bounds[i] for task in tasks] for i, t in enumerate(tiers)}
    prompt = workload.prompt * workload.sequences

    def prefill(largest: int) -> float:
        return prefill_seconds(workload.split_mode, seconds, prompt, largest)

    choices = [t for t in tiers if t >= workload.sequences]
    fastest = min(prefill(t) for t in choices)
    return max(t for t in choices if prefill(t) * SMALLER_BATCH_SHARE <= fastest)


def rank_shares(workload: Workload) -> tuple[float, ...]:
    """Share of the model per rank; (1.0,) without a split. Raises UserError when budgets and ratios do not match."""
    n = len(workload.vram_mib)
    if workload.split_mode == "none":
        if n != 1:
            raise UserError(f"{n} budgets for one device; add -sm tensor or layer to split the model over {n}")
        return (1.0,)
    ratios = workload.tensor_split or (1.0,) * n
    if len(ratios) != n:
        raise UserError(f"--tensor-split has {len(ratios)} ratios and --vram {n} budgets; give one of each per device")
    total = sum(ratios)  # shares stay as they were given, to the last bit: registries compare them
    return ratios if abs(total - 1) < 1e-9 else tuple(r / total for r in ratios)


def split_of(workload: Workload) -> Split:
    """How the workload splits the model. Raises UserError as `rank_shares` does."""
    return Split(workload.split_mode, rank_shares(workload), workload.max_tp)


def fitting_tiers(specs: Sequence[ModelSpec], workload: Workload, tables: Tables) -> tuple[int, ...]:
    """Tiers whose scratch fits every rank's arena, and beside which host memory holds what the arenas do not.

    Raises BudgetTooSmall when decoding does not fit, UserError when no budget makes it fit.
    """

    def fits(tokens: int, budgets: Sequence[int]) -> bool:
        rooms = _rooms(specs, workload, budgets, tables)
        return all(r.scratch(tokens) <= r.arena for r in rooms) and host_fits(rooms, tables.profile, tokens)

    tiers = tuple(t for t in workload.tiers() if fits(t, workload.vram_mib))
    if tiers and tiers[-1] >= workload.sequences:
        return tiers
    rooms = _rooms(specs, workload, workload.vram_mib, tables)
    why = explain_shortage(rooms, tables.profile, workload.sequences)
    low, smallest = 0, 1
    while not fits(workload.sequences, [smallest] * len(specs)):
        if smallest > MOST_MIB:
            raise UserError(f"{why}; lower -c, or take a smaller model")
        low, smallest = smallest, 2 * smallest
    while smallest - low > 1:
        middle = (low + smallest) // 2
        low, smallest = (low, middle) if fits(workload.sequences, [middle] * len(specs)) else (middle, smallest)
    if not host_fits(rooms, tables.profile, workload.sequences):
        raise BudgetTooSmall(
            f"{why}; raise --vram (to {smallest} MiB at least), lower -c, or take a smaller model", smallest
        )
    given = ",".join(map(str, workload.vram_mib))
    raise BudgetTooSmall(
        f"--vram {given} MiB is too small for {specs[0].name}; the smallest budget that works is {smallest} MiB",
        smallest,
    )


def _rooms(specs: Sequence[ModelSpec], workload: Workload, budgets: Sequence[int], tables: Tables) -> tuple[Room, ...]:
    """The ranks' rooms under these budgets, host memory not yet shared out."""
    return tuple(
        rank_room(s, workload, budget, tables.kind, tables.act_bytes, len(specs)) for s, budget in zip(specs, budgets)
    )


def _write_rank(task: RankTask, chosen: Candidate) -> RankPlan:
    """A rank's plan, as yet without predictions."""
    solved, tiers = chosen.solution, []
    for tier, cost in zip(chosen.tiers, task.costs):
        problem = tier_problem(task.room, task.classes, cost, max(tier.buffers.slots, 1), divide=True)
        objective = fluid_seconds(problem, count_tier(task.classes, tier))
        gap = solved.gap if solved else 0.0
        solve = Solve(
            solved.status if solved else "placed" if task.plan_needed else "not needed",
            objective,
            objective * (1 - gap),
            gap,
            solved.seconds / len(task.costs) if solved else 0.0,
            solved.solver if solved else "",
            chosen.strategy,
        )
        tiers.append(replace(tier, solve=solve))
    pins = max(sum(p.where == "pinned" for p in t.placements) for t in tiers)
    kv = max(sum(p.kv == "vram" for p in t.placements) for t in tiers)
    order = chosen.residency
    return RankPlan(task.rank, task.budget_mib, task.share, order.pin_order[:pins], order.kv_order[:kv], tuple(tiers))


def _predict(tasks: Sequence[RankTask], ranks: Sequence[RankPlan]) -> tuple[RankPlan, ...]:
    """The ranks' plans with predictions: they run together."""
    rooms, predicted = [t.room for t in tasks], []
    priced = [stage_by(r, t.costs) for t, r in zip(tasks, ranks)]
    for i in range(len(tasks[0].costs)):
        tiers, costs, bounds = zip(*((r.tiers[i], c[i], t.divided_bounds[i]) for t, r, c in zip(tasks, ranks, priced)))
        predictions = predict_ranks(rooms, tiers, costs, bounds)
        predicted.append([replace(tier, prediction=p) for tier, p in zip(tiers, predictions)])
    return tuple(replace(rank, tiers=tiers) for rank, tiers in zip(ranks, zip(*predicted)))
