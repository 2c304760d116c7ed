"""What counts of whole units take at least, whatever their order: it tells which of them need not be simulated."""

from dataclasses import dataclass, field

from pshard.planner.price.draft import Room
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.coefficients import tier_problem
from pshard.planner.program.counts import Counts
from pshard.planner.program.fluid import takes_at_least
from pshard.planner.program.tier_problems import TierProblem
from pshard.planner.program.unit_classes import UnitClass


@dataclass(frozen=True)
class Floor:
    """Of one tier of one rank. Looks coefficients up once for each number of slots."""

    room: Room
    classes: tuple[UnitClass, ...]
    costs: TierCosts
    _problems: dict[int, TierProblem] = field(default_factory=dict, init=False, compare=False, repr=False)

    def reaches(self, counts: tuple[Counts, ...], slots: int, seconds: float) -> bool:
        """Whether no order of the counts takes less than `seconds`. False where that is not known: of counts that are
        not possible, and where a slot may keep its only unit, which then is not copied."""
        left = [c.size - n.pin - n.cpu for c, n in zip(self.classes, counts) if not c.kind.is_looked_up]
        if min(left) < 0 or 0 < sum(left) < 2 * slots:
            return False
        if slots not in self._problems:
            self._problems[slots] = tier_problem(self.room, self.classes, self.costs, slots)
        return takes_at_least(self._problems[slots], counts, seconds)
