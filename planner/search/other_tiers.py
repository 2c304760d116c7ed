"""Tiers around others: each solved alone, its residency between that of the tiers that are already placed."""

from dataclasses import dataclass, replace

from pshard.planner.price.draft import Room
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.coefficients import tier_problem
from pshard.planner.program.counts import Counts, host_bytes
from pshard.planner.program.joint_program import Question
from pshard.planner.program.solve_tiers import solve_tiers
from pshard.planner.program.unit_classes import UnitClass
from pshard.planner.search.climb import Scored, TierSearch
from pshard.planner.search.program_starts import Start, affordable_slots
from pshard.planner.search.residency_order import Residency, arrange_residency

OTHER_TIER_GAP = 0.02  # of the solver
EVALUATIONS = 40  # simulations of local improvement of a tier that the round enters
RARE_EVALUATIONS = 16  # and of one that it hardly enters

Numbers = tuple[int, ...]  # of units by class


@dataclass(frozen=True)
class Counted:
    """A tier's counts, and the seconds that the program says they take."""

    counts: tuple[Counts, ...]
    seconds: float


def place_others(
    room: Room, classes: tuple[UnitClass, ...], costs: tuple[TierCosts, ...], start: Start
) -> tuple[Residency, tuple[Scored, ...]] | None:
    """All tiers of `costs`, those of `start` as they are; None when one does not fit. The others are improved down to
    the seconds that the program promises."""
    counted = _count_around(room, classes, costs, start)
    if counted is None:
        return None
    residency = arrange_residency(room, classes, [c.counts for c in counted], start.even, start.spaced)
    given = {t.tier.tokens: t for t in start.tiers}
    tiers = []
    for cost, goal in zip(costs, counted):
        placed = given.get(cost.load.tokens)
        if placed is None:
            search = TierSearch(room, classes, residency, cost)
            begun = search.start(goal.counts, affordable_slots(room, cost, start.slots))
            if begun is None:
                return None
            placed = search.improve(begun, RARE_EVALUATIONS if cost.load.rare else EVALUATIONS, goal.seconds)
        tiers.append(placed)
    return residency, tuple(tiers)


def _count_around(
    room: Room, classes: tuple[UnitClass, ...], costs: tuple[TierCosts, ...], start: Start
) -> list[Counted] | None:
    """Counts of all tiers.

    All tiers' residency stays one chain, class by class: a tier between two others lies between them, or, where that
    does not fit, below all others.
    """
    fixed = {t.tier.tokens: Counted(n, t.seconds) for t, n in zip(start.tiers, start.counts)}
    sizes = tuple(c.size for c in classes), tuple(c.size if c.kind.state else 0 for c in classes)
    counted: list[Counted] = []
    for cost in costs:
        tokens = cost.load.tokens
        if tokens in fixed:
            counted.append(fixed[tokens])
            continue
        before = _numbers(counted[-1].counts) if counted else None
        after = next((_numbers(fixed[t].counts) for t in sorted(fixed) if t > tokens), None)
        chains = [_numbers(n.counts) for n in (*counted, *fixed.values())]
        ranges = [
            (_between(chain, before[i] if before else None, after[i] if after else None, size), _below(chain))
            for i, (chain, size) in enumerate(zip(zip(*chains), sizes))
        ]
        problem = tier_problem(room, classes, cost, affordable_slots(room, cost, start.slots))
        kept = [host_bytes(problem, n.counts) for n in (*counted, *fixed.values())]
        problem = replace(problem, host_before=(max(w for w, _ in kept), max(cells for _, cells in kept)))
        for pins, kv in zip(*ranges):
            low, high = (tuple(Counts(p, 0, v) for p, v in zip(*ends)) for ends in zip(pins, kv))
            solution = solve_tiers(Question((problem,), between=(low, high)), gap=OTHER_TIER_GAP)
            if solution.counts:
                counted.append(Counted(solution.counts[0], solution.objective / problem.weight))
                break
        else:
            return None
    return counted


def _numbers(counts: tuple[Counts, ...]) -> tuple[Numbers, Numbers]:
    """Pins by class, layers with KV in VRAM by class."""
    return tuple(n.pin for n in counts), tuple(n.kv for n in counts)


def _between(
    chain: tuple[Numbers, ...], before: Numbers | None, after: Numbers | None, size: Numbers
) -> tuple[Numbers, Numbers]:
    """Neighbours in a nested chain, between which a tier lies that comes after one member and before another."""
    ends = [n for n in (before, after) if n]
    low = (0,) * len(size) if after is None and before == min(chain, key=sum) else min(ends, key=sum)
    above = [n for n in chain if sum(n) > sum(low)]
    return low, min(above, key=sum, default=size if before is None else low)


def _below(chain: tuple[Numbers, ...]) -> tuple[Numbers, Numbers]:
    least = min(chain, key=sum)
    return (0,) * len(least), least
