"""What no plan of a tier can beat: the tier alone, free of the other ones, waits free, any number of slots."""

from collections.abc import Sequence
from dataclasses import replace

from pshard.planner.price.draft import Room
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.price.unit_costs import DividedCost
from pshard.planner.program.coefficients import may_spread, tier_problem
from pshard.planner.program.joint_program import Question
from pshard.planner.program.solve_tiers import relaxation_bound, solve_tiers
from pshard.planner.program.tier_problems import ClassCost, DividedClassCost, TierProblem
from pshard.planner.program.unit_classes import UnitClass
from pshard.planner.search.climb import SLOT_CHOICES
from pshard.units.divide_unit import count_shares
from pshard.units.share import Share

BOUND_GAP = 5e-3  # of the solver: a tier's search stops near the bound
SAMPLES = 128  # numbers of parts on the CPU that a bound looks at: all of them, of most models


def rough_bound(room: Room, classes: tuple[UnitClass, ...], costs: TierCosts, divide: bool = False) -> float:
    """Seconds that no plan of this tier can beat, by linear relaxation: a few percent low, but quick.

    divide: no plan that may divide FFNs, at any row, or experts, at any number; else none of whole units.
    """
    return min(relaxation_bound((_problem(room, classes, way, divide),)) for way in costs.ways)


def bound_seconds(room: Room, classes: tuple[UnitClass, ...], costs: TierCosts, divide: bool = False) -> float:
    """Seconds that no plan of this tier can beat, by the integer program; `divide` as in `rough_bound`."""
    problems = (_problem(room, classes, way, divide) for way in costs.ways)
    return min(solve_tiers(Question((problem,), relaxed=True), gap=BOUND_GAP).bound for problem in problems)


def _problem(room: Room, classes: tuple[UnitClass, ...], costs: TierCosts, divide: bool) -> TierProblem:
    """The tier with any number of slots: they take the room of one and look as far ahead as the most."""
    problem = tier_problem(room, classes, costs, 1, divide)
    if divide and costs.tables.kind != "cpu":
        in_parts = (_count_parts(c, cls, costs) for c, cls in zip(problem.classes, classes))
        problem = replace(problem, classes=tuple(in_parts))
    return replace(problem, weight=1.0, lookahead=max(SLOT_CHOICES))


def _count_parts(cost: ClassCost, cls: UnitClass, costs: TierCosts) -> ClassCost:
    """The class for a bound of units that are divided anywhere: parts of them count."""
    if not may_spread(costs, cls):
        return replace(cost, in_parts=cls.kind.keep is not None)
    name, parts = cls.units[0].name, count_shares(cls.units[0])
    counts = sorted({*range(1, parts, max(1, parts // SAMPLES)), parts - 1})
    link, cpu = zip(*(costs.divided_speeds(name, Share(n)) for n in counts))
    fastest = {"link_speed": max(cost.link_speed, *link), "cpu_speed": max(cost.cpu_speed, *cpu)}
    found = [costs.divided(name, Share(n)) for n in counts]
    divided = _divide_anywhere(parts, counts, found, [costs.over_link(cls.kind, c) for c in found])
    return replace(cost, in_parts=True, divided=divided, **fastest)


def _divide_anywhere(
    parts: int, counts: list[int], found: list[DividedCost], over_link: list[float]
) -> tuple[DividedClassCost, ...]:
    """Two ends between which every division of a unit with parts lies: the CPU has next to nothing of it, or all.

    Each amount at the ends is of a line that no number of parts on the CPU goes below. The time of such a unit is at
    least the CPU's; the accelerator's part runs beside it and is only in `alone`.
    """
    ends = zip(
        *(
            _line_below(parts, counts, amounts)
            for amounts in (
                [c.cpu for c in found],
                over_link,
                [c.acc + c.rest for c in found],
                [c.nbytes for c in found],
            )
        )
    )
    chain = min(c.issue + c.join + c.rest for c in found)
    issue = min(2 * c.issue for c in found)
    return tuple(
        DividedClassCost(
            Share(n), acc=chain, cpu=cpu, link=link, alone=alone, issue=issue, nbytes=int(nbytes), kept=0, row_nbytes=0
        )
        for n, (cpu, link, alone, nbytes) in zip((1, parts - 1), ends)
    )


def _line_below(parts: int, counts: Sequence[int], amounts: Sequence[float]) -> tuple[float, float]:
    """Where a line that is above none of the amounts, and never below 0, begins (at 0) and ends (at `parts`)."""
    slope = (amounts[-1] - amounts[0]) / max(1, counts[-1] - counts[0])
    begin = min(y - slope * n for n, y in zip(counts, amounts))
    end = begin + slope * parts
    if begin < 0:
        return 0.0, parts * min(y / n for n, y in zip(counts, amounts))
    if end < 0:
        return parts * min(y / (parts - n) for n, y in zip(counts, amounts)), 0.0
    return begin, end
