"""plan_variant: the whole way from model, machine and workload to a plan for every tier and rank."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pshard.buffers import arena_bytes, scratch_bytes
from pshard.errors import BudgetTooSmall, UserError
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import RankPlan, Solve, TierPlan, Variant
from pshard.planner.baselines import STRATEGIES, place_strategy
from pshard.planner.classes import UnitClass, group_units
from pshard.planner.costs import Tables, TierCosts, tier_costs
from pshard.planner.draft import Room, draft_tier, predict_tier, rank_room, simulate_tier
from pshard.planner.ilp import Solution, fluid_seconds, solve_tiers
from pshard.planner.load import TierLoad, tier_loads
from pshard.planner.order import Residency, order_residency
from pshard.planner.problem import count_tier, tier_problem
from pshard.planner.search import SLOT_CHOICES, Scored, TierSearch
from pshard.workload import Workload

FLAVOURS = ((2, False), (2, True), (3, False), (3, True))  # staging slots, whether all KV stays in VRAM
EVALUATIONS = 16  # simulations of local improvement per tier; the workload's own tiers get four times as many


@dataclass(frozen=True)
class Candidate:
    """A complete plan of one rank before it is written down. `total`: seconds of one round of the workload."""

    strategy: str
    residency: Residency
    tiers: tuple[TierPlan, ...]
    seconds: tuple[float, ...]
    total: float
    solution: Solution | None = None


def plan_variant(spec: ModelSpec, profile: MachineProfile, workload: Workload, time_limit: float = 10.0) -> Variant:
    """Plan every tier and rank of a workload; `time_limit` in seconds bounds the solver.

    Tiers whose scratch does not fit the budget are left out, which lowers the variant's max_ubatch.
    Raises BudgetTooSmall when not even decoding fits, UserError when the profile lacks a table.
    """
    return _plan_variant(spec, profile, workload, None, time_limit)


def plan_baseline(name: str, spec: ModelSpec, profile: MachineProfile, workload: Workload) -> Variant:
    """The variant that the published strategy of that name (baselines.STRATEGIES) gives; as runnable as the planner's.

    Raises UserError when the name is unknown or the strategy does not fit the budget.
    """
    if name not in STRATEGIES:
        raise UserError(f"unknown strategy {name!r}; choose from ilp, {', '.join(STRATEGIES)}")
    return _plan_variant(spec, profile, workload, name, 0.0)


def _plan_variant(
    spec: ModelSpec, profile: MachineProfile, workload: Workload, strategy: str | None, time_limit: float
) -> Variant:
    tables = Tables(profile)
    shares = rank_shares(workload)
    specs = [_cut(spec, shares, rank) for rank in range(len(shares))]
    tiers = fitting_tiers(specs, workload, tables)
    workload = replace(workload, max_ubatch=tiers[-1])
    rooms = [
        rank_room(s, workload, budget, tables.kind, tables.act_bytes, len(shares))
        for s, budget in zip(specs, workload.vram_mib)
    ]
    plan_needed = not all(_fits_whole(room, tiers[-1]) for room in rooms)
    loads = tier_loads(workload, tiers)
    ranks = tuple(
        _plan_rank(rank, shares[rank], room, tables, loads, strategy, plan_needed, time_limit / len(rooms))
        for rank, room in enumerate(rooms)
    )
    w = workload
    return Variant(
        w.vram_mib, w.context, w.sequences, w.type_k, w.type_v, w.max_ubatch, w.prompt, w.generated,
        w.split_mode, shares if len(shares) > 1 else (), plan_needed, ranks,
    )  # fmt: skip


def rank_shares(workload: Workload) -> tuple[float, ...]:
    """Share of the model per rank; (1.0,) without a split. Raises UserError when budgets and ratios differ in number."""
    n = len(workload.vram_mib)
    if workload.split_mode == "none":
        if n != 1:
            raise UserError(f"{n} budgets for one device; add -sm tensor to split the model over {n}")
        return (1.0,)
    ratios = workload.tensor_split or (1.0,) * n
    if len(ratios) != n:
        raise UserError(f"--tensor-split has {len(ratios)} ratios and --vram {n} budgets; give one of each per device")
    return tuple(r / sum(ratios) for r in ratios)


def _cut(spec: ModelSpec, shares: tuple[float, ...], rank: int) -> ModelSpec:
    """The rank's slice of the model."""
    if len(shares) == 1:
        return spec
    from pshard.parallel import cut_model

    return cut_model(spec, shares, rank)


def fitting_tiers(specs: Sequence[ModelSpec], workload: Workload, tables: Tables) -> tuple[int, ...]:
    """Tiers whose scratch fits every rank's arena. Raises BudgetTooSmall when decoding does not fit."""

    def fits(tokens: int, budgets: Sequence[int]) -> bool:
        return all(
            scratch_bytes(s, tokens, workload.sequences, tables.act_bytes, workload.context) <= arena_bytes(b, tables.kind)
            for s, b in zip(specs, budgets)
        )

    tiers = tuple(t for t in workload.tiers() if fits(t, workload.vram_mib))
    if not tiers or tiers[-1] < workload.sequences:
        smallest = 1
        while not fits(workload.sequences, [smallest] * len(specs)):
            smallest *= 2
        low = smallest // 2
        while smallest - low > 1:
            middle = (low + smallest) // 2
            low, smallest = (low, middle) if fits(workload.sequences, [middle] * len(specs)) else (middle, smallest)
        given = ",".join(map(str, workload.vram_mib))
        raise BudgetTooSmall(
            f"--vram {given} MiB is too small for {specs[0].name}; the smallest budget that works is {smallest} MiB",
            smallest,
        )
    return tiers


def _fits_whole(room: Room, tokens: int) -> bool:
    """Everything but the embedding (a look-up on the host) in VRAM, with all KV."""
    return _whole(room, tokens).buffers.total <= room.arena


def _whole(room: Room, tokens: int) -> TierPlan:
    where = {u.name: "cpu" if u.kind == "embedding" else "pinned" for u in room.spec.units}
    return draft_tier(room, tokens, where, frozenset(u.name for u in room.spec.units if u.kind == "attention"), 0)


def _plan_rank(
    rank: int, share: float, room: Room, tables: Tables, loads: tuple[TierLoad, ...],
    strategy: str | None, plan_needed: bool, time_limit: float,
) -> RankPlan:  # fmt: skip
    classes = group_units(room.spec)
    costs = [tier_costs(room.spec, tables, load, room.workload, room.ranks) for load in loads]
    bounds = [_bound(room, classes, c) for c in costs]
    if strategy is not None:
        chosen = _baseline(strategy, room, costs)
        if chosen is None:
            raise UserError(f"strategy {strategy!r} does not fit {room.workload.vram_mib[rank]} MiB; raise --vram")
    elif not plan_needed:
        chosen = _keep_everything(room, costs)
    else:
        chosen = best_candidate(room, classes, costs, time_limit)
    solved = chosen.solution
    tiers = []
    for tier, cost, bound in zip(chosen.tiers, costs, bounds):
        problem = tier_problem(room, classes, cost, max(tier.buffers.slots, 1))
        objective = fluid_seconds(problem, count_tier(classes, tier))
        solve = Solve(
            solved.status if solved else "not needed",
            objective,
            objective * (1 - solved.gap) if solved else objective,
            solved.gap if solved else 0.0,
            solved.seconds / len(loads) if solved else 0.0,
            solved.solver if solved else "",
            chosen.strategy,
        )
        tiers.append(replace(tier, prediction=predict_tier(room, tier, cost, bound), solve=solve))
    pins = max(sum(p.where == "pinned" for p in t.placements) for t in tiers)
    kv = max(sum(p.kv == "vram" for p in t.placements) for t in tiers)
    return RankPlan(
        rank, room.workload.vram_mib[rank], share, chosen.residency.pin_order[:pins],
        chosen.residency.kv_order[:kv], tuple(tiers),
    )  # fmt: skip


def _bound(room: Room, classes: tuple[UnitClass, ...], costs: TierCosts) -> float:
    """Seconds that no plan of this tier can beat, for any number of slots, with the tier free of the other ones."""
    bounds = []
    for slots in SLOT_CHOICES:
        solution = solve_tiers((replace(tier_problem(room, classes, costs, slots), weight=1.0),), relaxed=True)
        bounds.append(solution.bound / 1e3)
    return min(bounds)


def best_candidate(
    room: Room, classes: tuple[UnitClass, ...], costs: list[TierCosts], time_limit: float
) -> Candidate:
    """The best, by simulated time, of the program's solutions locally improved and of every published strategy.

    What no coefficient says (lookahead, waits) is left to simulation: the program is solved in several flavours.
    """
    candidates: list[Candidate | None] = [_baseline(name, room, costs) for name in STRATEGIES]
    started = time.monotonic()
    for i, (slots, kv_stays) in enumerate(FLAVOURS):
        left = time_limit - (time.monotonic() - started)
        if i == 0 or left > 0:
            candidates.append(_solve(room, classes, costs, slots, kv_stays, max(left / 2, 1.0)))
    found = [c for c in candidates if c]
    if not found:
        raise UserError(f"no plan for {room.spec.name} found within {time_limit:g} s; raise the time limit")
    return min(found, key=lambda c: c.total)


def _solve(
    room: Room, classes: tuple[UnitClass, ...], costs: list[TierCosts], slots: int, kv_stays: bool, time_limit: float
) -> Candidate | None:
    problems = tuple(tier_problem(room, classes, c, slots) for c in costs)
    per_byte, per_layer = 1 / costs[0].tables.link_rate, _kv_switch(classes, costs)
    solution = solve_tiers(problems, per_byte, per_layer, time_limit, kv_stays=kv_stays)
    if not solution.counts:
        return None
    residency = order_residency(classes, list(solution.counts))
    best: list[Scored] = []
    for cost, counts in zip(costs, solution.counts):
        search = TierSearch(room, classes, residency, cost)
        start = search.start(counts, slots)
        if start is None:
            return None
        best.append(search.improve(start, EVALUATIONS * (4 if cost.load.weight >= 1 else 1)))
    return _candidate(
        "ilp", room, residency, tuple(s.tier for s in best), tuple(s.seconds for s in best), costs, solution
    )


def _baseline(name: str, room: Room, costs: list[TierCosts]) -> Candidate | None:
    placed = place_strategy(name, room, tuple(c.load.tokens for c in costs))
    if placed is None:
        return None
    seconds = tuple(simulate_tier(room, tier, cost).seconds for tier, cost in zip(placed.tiers, costs))
    return _candidate(name, room, Residency(placed.pin_order, placed.kv_order), placed.tiers, seconds, costs)


def _keep_everything(room: Room, costs: list[TierCosts]) -> Candidate:
    tiers = tuple(_whole(room, c.load.tokens) for c in costs)
    pins = tuple(u.name for u in room.spec.units if u.kind != "embedding")
    kv = tuple(u.name for u in room.spec.units if u.kind == "attention")
    seconds = tuple(simulate_tier(room, tier, cost).seconds for tier, cost in zip(tiers, costs))
    return _candidate("all in VRAM", room, Residency(pins, kv), tiers, seconds, costs)


def _candidate(
    strategy: str, room: Room, residency: Residency, tiers: tuple[TierPlan, ...], seconds: tuple[float, ...],
    costs: list[TierCosts], solution: Solution | None = None,
) -> Candidate:  # fmt: skip
    total = sum(c.load.weight * s for c, s in zip(costs, seconds)) + switch_seconds(room, tiers, costs)
    return Candidate(strategy, residency, tiers, seconds, total, solution)


def _kv_switch(classes: tuple[UnitClass, ...], costs: list[TierCosts]) -> tuple[float, ...]:
    """By class: seconds of moving one layer's used KV cells between prefill and decode."""
    return tuple(costs[0].units[c.units[0].name].kv_fetch for c in classes)


def switch_seconds(room: Room, tiers: tuple[TierPlan, ...], costs: list[TierCosts]) -> float:
    """Seconds of going from the largest tier to the smallest and back once: pins brought in, used KV cells moved."""
    if len(tiers) < 2:
        return 0.0
    nbytes = seconds = 0.0
    for unit, small, large in zip(room.spec.units, tiers[0].placements, tiers[-1].placements):
        if (small.where == "pinned") != (large.where == "pinned"):
            nbytes += unit.packed_nbytes
        if small.kv != large.kv:
            seconds += costs[0].units[unit.name].kv_fetch
    return nbytes / costs[0].tables.link_rate + seconds


