"""Starts of the search: solutions of the program, placed in two orders and simulated, before anything is improved."""

from dataclasses import dataclass
from math import inf

from pshard.planner.price.draft import Room
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.program.coefficients import tier_problem
from pshard.planner.program.counts import Counts
from pshard.planner.program.joint_program import Question, write_program
from pshard.planner.program.solve_tiers import Solution, relaxation_bound, solve_tiers
from pshard.planner.program.unit_classes import UnitClass
from pshard.planner.search.climb import Scored, TierSearch
from pshard.planner.search.residency_order import arrange_residency
from pshard.planner.solver.cpu_clock import cpu_seconds
from pshard.planner.solver.lp_text import lp_text

SLOTS = (2, 3)  # the program is solved for each; the best of them also with other assumptions about KV
FIRST_HOST_KV, OTHERWISE = "stalls", ("hidden", "none")
START_GAP = 0.02  # of the solver: what units gain by their order is worth more than the rest of it


@dataclass(frozen=True)
class Start:
    """A plan of the tiers that the round enters: counts and simulated states by tier, in one order.

    `even` and `spaced` are for `order_residency`; `weighted`: seconds of a round in these tiers.
    """

    solution: Solution
    slots: int
    even: bool
    spaced: tuple[tuple[Counts, ...], ...]
    counts: tuple[tuple[Counts, ...], ...]
    tiers: tuple[Scored, ...]
    weighted: float


@dataclass(frozen=True)
class StartFinder:
    """Finds starts for the tiers that the round enters (`costs`) until `deadline` (`cpu_seconds`)."""

    room: Room
    classes: tuple[UnitClass, ...]
    costs: tuple[TierCosts, ...]
    deadline: float

    def find(self, wanted: int) -> list[Start]:
        """Starts of all flavours, the fastest first; of the `wanted` fastest, none is missed for lack of a solution.

        A flavour is not solved when its linear relaxation takes longer than so many starts that were found.
        """
        starts: list[Start] = []
        for slots in SLOTS:
            starts = self._add(starts, slots, FIRST_HOST_KV, wanted)
        for host_kv in OTHERWISE if starts else ():
            starts = self._add(starts, starts[0].slots, host_kv, wanted)
        return starts

    def _add(self, starts: list[Start], slots: int, host_kv: str, wanted: int) -> list[Start]:
        slowest = starts[wanted - 1].weighted if len(starts) >= wanted else inf
        left = self.deadline - cpu_seconds()
        asked = _ask(self.room, self.classes, self.costs, slots, host_kv)
        late = bool(starts) and left <= 0
        if late or (slowest < inf and relaxation_bound(asked.tiers, host_kv) >= slowest):
            return starts
        solution = solve_tiers(asked, max(left / 2, 0.5), START_GAP)
        found = [self._simulate(solution, slots, even) for even in (True, False)] if solution.counts else []
        return sorted([*starts, *(s for s in found if s)], key=lambda s: s.weighted)

    def _simulate(self, solution: Solution, slots: int, even: bool) -> Start | None:
        """The solution in one order; None when a tier does not fit after all."""
        residency = arrange_residency(self.room, self.classes, solution.counts, even)
        tiers = []
        for cost, counts in zip(self.costs, solution.counts):
            search = TierSearch(self.room, self.classes, residency, cost)
            tier = search.start(counts, affordable_slots(self.room, cost, slots))
            if tier is None:
                return None
            tiers.append(tier)
        weighted = sum(c.load.weight * t.seconds for c, t in zip(self.costs, tiers))
        return Start(solution, slots, even, solution.counts, solution.counts, tuple(tiers), weighted)


def write_first_program(room: Room, classes: tuple[UnitClass, ...], costs: tuple[TierCosts, ...]) -> str:
    """The program that a StartFinder solves first, as text of the LP format."""
    return lp_text(write_program(_ask(room, classes, costs, SLOTS[0], FIRST_HOST_KV)).program)


def _ask(
    room: Room, classes: tuple[UnitClass, ...], costs: tuple[TierCosts, ...], slots: int, host_kv: str
) -> Question:
    """What the program is asked of one flavour."""
    problems = tuple(tier_problem(room, classes, c, affordable_slots(room, c, slots)) for c in costs)
    kv_switch = tuple(costs[0].units[c.units[0].name].kv_fetch for c in classes)
    return Question(problems, 1 / costs[0].tables.link_rate, kv_switch, host_kv=host_kv)


def affordable_slots(room: Room, costs: TierCosts, slots: int) -> int:
    """At most `slots` staging slots, fewer when that many of a layer's largest unit that is copied do not fit beside
    the scratch."""
    copied = (u for u in room.spec.units if u.layer >= 0 and not costs.reads_in_place(u.kind))
    largest = max((u.packed_nbytes for u in copied), default=0)
    return max(1, min(slots, (room.arena - room.scratch(costs.load.tokens)) // max(largest, 1)))
