"""The integer program of a plan for one device, for people and for other solvers."""

from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import NOTHING_LEARNT, Correction
from pshard.planner.prepare_ranks import prepare_ranks
from pshard.planner.search.program_starts import write_first_program
from pshard.workload import Workload


def lp_of_plan(
    spec: ModelSpec, profile: MachineProfile, workload: Workload, correction: Correction = NOTHING_LEARNT
) -> str:
    """The program of the tiers that the round enters, as it is solved first, in the CPLEX LP format.

    correction: of the plan, so that the program has the times that the plan was made with.
    """
    (task,) = prepare_ranks(spec, profile, workload, correction)
    entered = tuple(cost for cost in task.costs if not cost.load.rare)
    return write_first_program(task.room, task.classes, entered)
