"""The ranks' plans as one variant, with predictions of how they run together; checked."""

from collections.abc import Sequence
from dataclasses import replace

from pshard.plan import RankPlan, Solve, Variant
from pshard.planner.check_plan import check_variant
from pshard.planner.price.draft import predict_ranks
from pshard.planner.price.host_limits import usable_bytes
from pshard.planner.price.page_locks import stage_by
from pshard.planner.rank_task import RankTask
from pshard.planner.search.candidates import (
    Candidate,
)


def join_ranks(tasks: Sequence[RankTask], chosen: Sequence[Candidate]) -> Variant:
    """The variant in which each rank runs its plan, with predictions of how they run together.

    Raises PlanError for a plan that breaks a rule: a fault of the planner, which no runtime should meet.
    """
    shares, tables = tuple(t.share for t in tasks), tasks[0].costs[0].tables
    workload = replace(tasks[0].room.workload, tensor_split=shares if len(shares) > 1 else ())
    ranks = _predict(tasks, [_write_rank(task, candidate) for task, candidate in zip(tasks, chosen)])
    variant = Variant(workload, tasks[0].plan_needed, ranks, tables.correction)
    check_variant(tuple(t.room.spec for t in tasks), variant, tables.kind, usable_bytes(tables.profile, len(tasks)))
    return variant


def _write_rank(task: RankTask, chosen: Candidate) -> RankPlan:
    """A rank's plan, as yet without predictions."""
    solved, tiers = chosen.solution, []
    for tier in chosen.tiers:
        solve = Solve(
            solved.status if solved else "placed" if task.plan_needed else "not needed",
            solved.gap if solved else 0.0,
            solved.seconds / len(task.costs) if solved else 0.0,
            solved.solver if solved else "",
            chosen.strategy,
        )
        tiers.append(replace(tier, solve=solve))
    pins = max(sum(p.in_arena for p in t.placements) for t in tiers)
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
