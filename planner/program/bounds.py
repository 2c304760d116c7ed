"""What no plan of a tier can beat: the tier alone, free of the other ones, waits free, any number of slots."""

from dataclasses import replace

from pshard.planner.price.draft import Room
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.coefficients import tier_problem
from pshard.planner.program.ilp import TierProblem, relaxation_bound, solve_tiers
from pshard.planner.program.unit_classes import UnitClass
from pshard.planner.search.climb import SLOT_CHOICES

GAP = 5e-3  # of the solver: a tier's search stops near the bound


def rough_bound(room: Room, classes: tuple[UnitClass, ...], costs: TierCosts, split: bool = False) -> float:
    """Seconds that no plan of this tier can beat, by linear relaxation: a few percent low, but quick.

    split: no plan that may split FFNs; else none of whole units.
    """
    return relaxation_bound((_problem(room, classes, costs, split),))


def bound_seconds(room: Room, classes: tuple[UnitClass, ...], costs: TierCosts, split: bool = False) -> float:
    """Seconds that no plan of this tier can beat, by the integer program; `split` as in `rough_bound`."""
    return solve_tiers((_problem(room, classes, costs, split),), relaxed=True, gap=GAP).bound


def _problem(room: Room, classes: tuple[UnitClass, ...], costs: TierCosts, split: bool) -> TierProblem:
    """The tier with any number of slots: they take the room of one and look as far ahead as the most."""
    problem = tier_problem(room, classes, costs, 1, split)
    return replace(problem, weight=1.0, lookahead=max(SLOT_CHOICES))
