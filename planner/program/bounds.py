"""What no plan of a tier can beat: the tier alone, free of the other ones, waits free, any number of slots."""

from dataclasses import replace
from functools import lru_cache

from pshard.planner.price.draft import Room
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.coefficients import may_spread, tier_problem
from pshard.planner.program.divide_anywhere import divide_anywhere, sample_counts
from pshard.planner.program.joint_program import Question
from pshard.planner.program.solve_tiers import relaxation_bound, solve_tiers
from pshard.planner.program.tier_problems import ClassCost, TierProblem
from pshard.planner.program.unit_classes import UnitClass
from pshard.planner.search.climb import SLOT_CHOICES
from pshard.units.divide_unit import count_shares
from pshard.units.share import Share

BOUND_GAP = 5e-3  # of the solver: a tier's search stops near the bound


def rough_bound(room: Room, classes: tuple[UnitClass, ...], costs: TierCosts, divide: bool = False) -> float:
    """Seconds that no plan of this tier can beat, by linear relaxation: a few percent low, but quick.

    divide: no plan that may divide FFNs, at any row, or experts, at any number; else none of whole units.
    """
    return min(relaxation_bound((_problem(room, classes, way, divide),)) for way in costs.ways)


def bound_seconds(room: Room, classes: tuple[UnitClass, ...], costs: TierCosts, divide: bool = False) -> float:
    """Seconds that no plan of this tier can beat, by the integer program; `divide` as in `rough_bound`."""
    problems = (_problem(room, classes, way, divide) for way in costs.ways)
    return min(map(_solve_bound, problems))


@lru_cache(256)  # a tier is bounded again where it is planned with others, or alone
def _solve_bound(problem: TierProblem) -> float:
    return solve_tiers(Question((problem,), relaxed=True), gap=BOUND_GAP).bound


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
    unit = cls.units[0]
    if cost.in_place:  # its own reading holds up the CPU's part: that is in what is divided
        return replace(cost, in_parts=True, divided=divide_anywhere(unit, costs), link_speed=1.0, cpu_speed=1.0)
    speeds = (costs.divided_speeds(unit.name, Share(n)) for n in sample_counts(count_shares(unit)))
    link, cpu = zip(*speeds)
    fastest = {"link_speed": max(cost.link_speed, *link), "cpu_speed": max(cost.cpu_speed, *cpu)}
    return replace(cost, in_parts=True, divided=divide_anywhere(unit, costs), **fastest)
