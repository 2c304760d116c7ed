"""plan_variant: the whole way from model, machine and workload to a plan for every tier and rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pshard.buffers import arena_bytes, scratch_bytes
from pshard.errors import BudgetTooSmall, UserError
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import RankPlan, Solve, Variant
from pshard.planner.baselines import STRATEGIES
from pshard.planner.candidates import best_candidate, bound_seconds, keep_everything, place_baseline, whole_tier
from pshard.planner.classes import UnitClass, group_units
from pshard.planner.costs import Tables, TierCosts, tier_costs
from pshard.planner.draft import Room, predict_tier, rank_room
from pshard.planner.ilp import fluid_seconds
from pshard.planner.load import raise_weights, tier_loads
from pshard.planner.problem import count_tier, tier_problem
from pshard.planner.refine import refine_candidate
from pshard.workload import Workload

WORTH = 0.99  # a smaller micro-batch is taken when the prompt takes less than this share of the time


@dataclass(frozen=True)
class RankTask:
    """What is planned for one rank: its slice of the model, its room, and the costs and bounds of its tiers."""

    rank: int
    share: float
    room: Room
    classes: tuple[UnitClass, ...]
    costs: tuple[TierCosts, ...]
    bounds: tuple[float, ...]


def plan_variant(spec: ModelSpec, profile: MachineProfile, workload: Workload, time_limit: float = 10.0) -> Variant:
    """Plan every tier and rank of a workload; `time_limit` in seconds bounds the solver.

    The variant's max_ubatch is lower than the workload's when the scratch of larger micro-batches does not fit, or
    when smaller ones prefill the prompt faster. Raises BudgetTooSmall when not even decoding fits, UserError when
    the profile lacks a table.
    """
    return _plan(spec, profile, workload, None, time_limit)


def plan_baseline(name: str, spec: ModelSpec, profile: MachineProfile, workload: Workload) -> Variant:
    """The variant that the published strategy of that name (baselines.STRATEGIES) gives; as runnable as the planner's.

    Raises UserError when the name is unknown or the strategy does not fit the budget.
    """
    if name not in STRATEGIES:
        raise UserError(f"unknown strategy {name!r}; choose from ilp, {', '.join(STRATEGIES)}")
    return _plan(spec, profile, workload, name, 0.0)


def _plan(
    spec: ModelSpec, profile: MachineProfile, workload: Workload, strategy: str | None, time_limit: float
) -> Variant:
    tasks = prepare_ranks(spec, profile, workload)
    w = tasks[0].room.workload
    plan_needed = not all(whole_tier(t.room, w.max_ubatch).buffers.total <= t.room.arena for t in tasks)
    ranks = tuple(_plan_rank(task, strategy, plan_needed, time_limit / len(tasks)) for task in tasks)
    shares = tuple(t.share for t in tasks)
    return Variant(
        w.vram_mib, w.context, w.sequences, w.type_k, w.type_v, w.max_ubatch, w.prompt, w.generated,
        w.split_mode, shares if len(shares) > 1 else (), plan_needed, ranks,
    )  # fmt: skip


def prepare_ranks(spec: ModelSpec, profile: MachineProfile, workload: Workload) -> tuple[RankTask, ...]:
    """Cut the model, choose the largest micro-batch, and price every tier of every rank."""
    tables = Tables(profile)
    shares = rank_shares(workload)
    specs = cut_ranks(spec, shares)
    tiers = fitting_tiers(specs, workload, tables)
    tasks = _price(specs, shares, workload, tables, tiers)
    best = _best_ubatch(tasks, workload)
    return tasks if best == tiers[-1] else _price(specs, shares, workload, tables, tuple(t for t in tiers if t <= best))


def _price(
    specs: Sequence[ModelSpec], shares: tuple[float, ...], workload: Workload, tables: Tables, tiers: tuple[int, ...]
) -> tuple[RankTask, ...]:
    workload = replace(workload, max_ubatch=tiers[-1])
    loads = tier_loads(workload, tiers)
    tasks = []
    for rank, (spec, share) in enumerate(zip(specs, shares)):
        room = rank_room(spec, workload, workload.vram_mib[rank], tables.kind, tables.act_bytes, len(shares))
        classes = group_units(spec)
        costs = tuple(tier_costs(spec, tables, load, workload, len(shares)) for load in loads)
        bounds = tuple(bound_seconds(room, classes, c) for c in costs)
        tasks.append(RankTask(rank, share, room, classes, costs, bounds))
    loads = raise_weights(loads, [max(bounds) for bounds in zip(*(t.bounds for t in tasks))])
    return tuple(
        replace(task, costs=tuple(replace(c, load=load) for c, load in zip(task.costs, loads))) for task in tasks
    )


def _best_ubatch(tasks: tuple[RankTask, ...], workload: Workload) -> int:
    """The largest micro-batch that is (nearly) the fastest for the prompt, judged by the tiers' bounds."""
    tiers = [c.load.tokens for c in tasks[0].costs]
    seconds = {t: max(task.bounds[i] for task in tasks) for i, t in enumerate(tiers)}
    prompt = workload.prompt * workload.sequences

    def prefill(largest: int) -> float:
        full, tail = divmod(prompt, largest)
        return full * seconds[largest] + (seconds[min(t for t in tiers if t >= tail)] if tail else 0.0)

    choices = [t for t in tiers if t >= workload.sequences]
    fastest = min(prefill(t) for t in choices)
    return max(t for t in choices if prefill(t) * WORTH <= fastest)


def rank_shares(workload: Workload) -> tuple[float, ...]:
    """Share of the model per rank; (1.0,) without a split. Raises UserError when budgets and ratios do not match."""
    n = len(workload.vram_mib)
    if workload.split_mode == "none":
        if n != 1:
            raise UserError(f"{n} budgets for one device; add -sm tensor to split the model over {n}")
        return (1.0,)
    ratios = workload.tensor_split or (1.0,) * n
    if len(ratios) != n:
        raise UserError(f"--tensor-split has {len(ratios)} ratios and --vram {n} budgets; give one of each per device")
    total = sum(ratios)  # shares stay as they were given, to the last bit: registries compare them
    return ratios if abs(total - 1) < 1e-9 else tuple(r / total for r in ratios)


def cut_ranks(spec: ModelSpec, shares: tuple[float, ...]) -> tuple[ModelSpec, ...]:
    """The ranks' slices of the model."""
    if len(shares) == 1:
        return (spec,)
    from pshard.parallel import cut_model

    return tuple(cut_model(spec, shares, rank) for rank in range(len(shares)))


def fitting_tiers(specs: Sequence[ModelSpec], workload: Workload, tables: Tables) -> tuple[int, ...]:
    """Tiers whose scratch fits every rank's arena. Raises BudgetTooSmall when decoding does not fit."""

    def fits(tokens: int, budgets: Sequence[int]) -> bool:
        return all(
            scratch_bytes(s, tokens, workload.sequences, tables.act_bytes, workload.context)
            <= arena_bytes(budget, tables.kind)
            for s, budget in zip(specs, budgets)
        )

    tiers = tuple(t for t in workload.tiers() if fits(t, workload.vram_mib))
    if tiers and tiers[-1] >= workload.sequences:
        return tiers
    low, smallest = 0, 1
    while not fits(workload.sequences, [smallest] * len(specs)):
        low, smallest = smallest, 2 * smallest
    while smallest - low > 1:
        middle = (low + smallest) // 2
        low, smallest = (low, middle) if fits(workload.sequences, [middle] * len(specs)) else (middle, smallest)
    given = ",".join(map(str, workload.vram_mib))
    raise BudgetTooSmall(
        f"--vram {given} MiB is too small for {specs[0].name}; the smallest budget that works is {smallest} MiB",
        smallest,
    )


def _plan_rank(task: RankTask, strategy: str | None, plan_needed: bool, time_limit: float) -> RankPlan:
    room, costs = task.room, task.costs
    budget = room.workload.vram_mib[task.rank]
    if strategy is not None:
        chosen = place_baseline(strategy, room, costs)
        if chosen is None:
            raise UserError(f"strategy {strategy!r} does not fit {budget} MiB; raise --vram")
    elif not plan_needed:
        chosen = keep_everything(room, costs)
    else:
        found = best_candidate(room, task.classes, costs, time_limit)
        chosen = refine_candidate(room, task.classes, costs, found)
    solved, tiers = chosen.solution, []
    for tier, cost, bound in zip(chosen.tiers, costs, task.bounds):
        problem = tier_problem(room, task.classes, cost, max(tier.buffers.slots, 1))
        objective = fluid_seconds(problem, count_tier(task.classes, tier))
        gap = solved.gap if solved else 0.0
        solve = Solve(
            solved.status if solved else "placed" if plan_needed else "not needed",
            objective,
            objective * (1 - gap),
            gap,
            solved.seconds / len(costs) if solved else 0.0,
            solved.solver if solved else "",
            chosen.strategy,
        )
        tiers.append(replace(tier, prediction=predict_tier(room, tier, cost, bound), solve=solve))
    pins = max(sum(p.where == "pinned" for p in t.placements) for t in tiers)
    kv = max(sum(p.kv == "vram" for p in t.placements) for t in tiers)
    order = chosen.residency
    return RankPlan(task.rank, budget, task.share, order.pin_order[:pins], order.kv_order[:kv], tuple(tiers))
