"""The ranks' plans as one variant, with predictions of how they run together; checked."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from pshard.plan import RankPlan, Solve, Sweep, TierPlan, Variant
from pshard.planner.beyond_host import move_beyond
from pshard.planner.check_plan import check_variant
from pshard.planner.price.draft import Room, predict_ranks, swept_seconds, tier_seconds
from pshard.planner.price.host_limits import usable_bytes
from pshard.planner.price.page_locks import stage_by
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.price.tier_loads import tier_loads
from pshard.planner.rank_task import RankTask
from pshard.planner.search.candidates import (
    Candidate,
)
from pshard.planner.search.residency_order import order_nested
from pshard.predicted_times import sum_round


def join_ranks(tasks: Sequence[RankTask], chosen: Sequence[Candidate]) -> Variant:
    """The variant in which each rank runs its plan, with predictions of how they run together.

    Raises PlanError for a plan that breaks a rule: a fault of the planner, which no runtime should meet.
    """
    shares, tables = tuple(t.share for t in tasks), tasks[0].costs[0].tables
    workload = replace(tasks[0].room.workload, tensor_split=shares if len(shares) > 1 else ())
    ranks = predict_together(tasks, [_write_rank(task, candidate) for task, candidate in zip(tasks, chosen)])
    popularity = tasks[0].room.spec.popularity
    needed = tasks[0].plan_needed or any(rank.beyond_host for rank in ranks)
    variant = Variant(workload, needed, ranks, tables.correction, popularity=popularity)
    check_variant(tuple(t.room.spec for t in tasks), variant, tables.kind, usable_bytes(tables.profile, len(tasks)))
    return variant


def joint_seconds(tasks: Sequence[RankTask], chosen: Sequence[Candidate], most: float = inf) -> float:
    """Seconds of a round under the variant that `join_ranks` would make: only what the round enters is simulated.

    Infinite where some of its tiers alone take `most` or more, the smallest ones first.
    """
    seconds = simulate_together(tasks, chosen, most)
    return inf if seconds is None else sum_round(tasks[0].room.workload, seconds)


def simulate_together(
    tasks: Sequence[RankTask], chosen: Sequence[Candidate], most: float = inf
) -> dict[int, tuple[float, ...]] | None:
    """By tier, seconds of a micro-batch on every rank under that variant: 0 in tiers that the round does not enter.

    None where some of its tiers alone take `most` or more of the round, the smallest ones first.
    """
    rooms, workload = [t.room for t in tasks], tasks[0].room.workload
    ranks = [_write_rank(task, candidate) for task, candidate in zip(tasks, chosen)]
    priced = [stage_by(r, t.costs) for t, r in zip(tasks, ranks)]
    seconds = {c.load.tokens: (0.0,) * len(tasks) for c in tasks[0].costs}
    entered = {load.tokens for load in tier_loads(workload, tuple(seconds)) if load.weight}
    for i, tokens in enumerate(seconds):
        if tokens in entered:
            seconds[tokens] = tier_seconds(rooms, [r.tiers[i] for r in ranks], [costs[i] for costs in priced])
            if sum_round(workload, seconds) >= most:
                return None
    return seconds


def _write_rank(task: RankTask, chosen: Candidate) -> RankPlan:
    """A rank's plan, as yet without predictions."""
    solved, tiers = chosen.solution, []
    moved = move_beyond(task.room, chosen.tiers, chosen.residency.pin_order, task.costs)
    for tier in moved:
        solve = Solve(
            solved.status if solved else "placed" if task.plan_needed else "not needed",
            solved.gap if solved else 0.0,
            solved.seconds / len(task.costs) if solved else 0.0,
            solved.solver if solved else "",
            chosen.strategy,
        )
        tiers.append(replace(tier, solve=solve))
    pins = max(sum(p.in_arena for p in t.placements) for t in tiers)
    kv = max(sum(p.has_state_in_vram for p in t.placements) for t in tiers)
    columns, order = task.room.columns, chosen.residency if moved is chosen.tiers else order_nested(task.room, moved)
    held = [columns.names[i] for i in columns.held]  # pinned under every tier, whatever the order says of them
    pin_order = (*held, *(name for name in order.pin_order if name not in held))
    orders, caches = (pin_order[:pins], order.kv_order[:kv]), task.room.spec.caches
    reserve = task.room.reserve_mib
    return RankPlan(task.rank, task.budget_mib, task.share, *orders, tuple(tiers), caches, reserve)


def _predict_sweep(room: Room, tier: TierPlan, costs: TierCosts) -> Sweep | None:
    """A tier's sweep with its prediction."""
    return replace(tier.sweep, seconds=swept_seconds(room, tier, costs)) if tier.sweep else None


def predict_together(
    tasks: Sequence[RankTask], ranks: Sequence[RankPlan], bounded: bool = True
) -> tuple[RankPlan, ...]:
    """The ranks' plans with predictions by the costs of their tasks: they run together. bounded: with what no plan can
    beat, which takes most of the time; else with bounds of 0."""
    rooms, predicted = [t.room for t in tasks], []
    priced = [stage_by(r, t.costs) for t, r in zip(tasks, ranks)]
    for i in range(len(tasks[0].costs)):
        tiers, costs = zip(*((r.tiers[i], c[i]) for r, c in zip(ranks, priced)))
        bounds = [task.divided_bounds[i] if bounded else 0.0 for task in tasks]
        predictions = predict_ranks(rooms, tiers, costs, bounds)
        swept = (_predict_sweep(*each) for each in zip(rooms, tiers, costs))
        predicted.append([replace(t, prediction=p, sweep=s) for t, p, s in zip(tiers, predictions, swept)])
    return tuple(replace(rank, tiers=tiers) for rank, tiers in zip(ranks, zip(*predicted)))
