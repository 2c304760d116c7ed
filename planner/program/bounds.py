"""What no plan of a tier can beat: the tier alone, free of the other ones, waits free, any number of slots."""

from dataclasses import replace

from pshard.planner.price.draft import Room
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.coefficients import tier_problem
from pshard.planner.program.joint_program import Question
from pshard.planner.program.solve_tiers import relaxation_bound, solve_tiers
from pshard.planner.program.tier_problems import TierProblem
from pshard.planner.program.unit_classes import UnitClass
from pshard.planner.search.climb import SLOT_CHOICES

BOUND_GAP = 5e-3  # of the solver: a tier's search stops near the bound


def rough_bound(room: Room, classes: tuple[UnitClass, ...], costs: TierCosts, divide: bool = False) -> float:
    """Seconds that no plan of this tier can beat, by linear relaxation: a few percent low, but quick.

    divide: no plan that may divide FFNs, at any row; else none of whole units.
    """
    return relaxation_bound((_problem(room, classes, costs, divide),))


def bound_seconds(room: Room, classes: tuple[UnitClass, ...], costs: TierCosts, divide: bool = False) -> float:
    """Seconds that no plan of this tier can beat, by the integer program; `divide` as in `rough_bound`."""
    return solve_tiers(Question((_problem(room, classes, costs, divide),), relaxed=True), gap=BOUND_GAP).bound


def _problem(room: Room, classes: tuple[UnitClass, ...], costs: TierCosts, divide: bool) -> TierProblem:
    """The tier with any number of slots: they take the room of one and look as far ahead as the most."""
    problem = tier_problem(room, classes, costs, 1, divide)
    if divide and costs.tables.kind != "cpu":
        in_parts = (replace(c, in_parts=c.kind.keep is not None) for c in problem.classes)
        problem = replace(problem, classes=tuple(in_parts))
    return replace(problem, weight=1.0, lookahead=max(SLOT_CHOICES))
