"""Solves the integer program of several tiers, and bounds one without solving it."""

import time
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, floor

from pshard.planner.program.counts import CountColumns, Counts
from pshard.planner.program.joint_program import JointProgram, Question, has_many, write_program
from pshard.planner.program.tier_problems import TierProblem
from pshard.planner.program.tier_rows import MS
from pshard.planner.solver.cpu_clock import cpu_seconds
from pshard.planner.solver.linear import Program
from pshard.planner.solver.solvers import Outcome, relax, solve, solver_name

NEARLY_OPTIMAL = 1e-3  # relative gap at which the solver may stop unless it is told otherwise
NEAR = 1e-6  # a solver's integers
LEAST_SECONDS = 0.05  # that a solver gets


@dataclass(frozen=True)
class Solution:
    """What a solver found. `status`: "optimal", "feasible" (a limit was hit first), "infeasible" or "unsolved".

    `objective` and `bound` in seconds; gap = (objective - bound) / objective. counts[tier][class].
    """

    status: str
    objective: float
    bound: float
    gap: float
    seconds: float
    solver: str
    counts: tuple[tuple[Counts, ...], ...]


def solve_tiers(asked: Question, time_limit: float = 10.0, gap: float = NEARLY_OPTIMAL) -> Solution:
    """Solve all tiers at once. `gap`: relative distance to the bound at which the solver may stop. `time_limit`: in
    seconds of processor time."""
    used = cpu_seconds()
    run = _Run(write_program(asked), time.perf_counter())
    if not asked.relaxed and has_many(asked.tiers):
        near = run.solve_near_parts(time_limit, gap)
        if near.counts and near.gap <= gap:
            return near
    left = max(time_limit - (cpu_seconds() - used), time_limit / 3)
    return run.solve(left, gap)[0]


@lru_cache(256)  # tiers are bounded roughly first, then again
def relaxation_bound(problems: tuple[TierProblem, ...], host_kv: str = "hidden") -> float:
    """Weighted seconds that no counts of these tiers can beat, by the linear relaxation: quick, and rather low."""
    return _relaxation_value(write_program(Question(problems, relaxed=True, host_kv=host_kv)).program) / MS


def _relaxation_value(program: Program) -> float:
    """Value of the linear relaxation: a bound that holds whatever the branch and bound got to. 0 when there is none."""
    found = relax(program)
    return program.goal.value(found.values) if found.status == "optimal" else 0.0


@dataclass(frozen=True)
class _Run:
    """Solves one program; `started`: time.perf_counter seconds."""

    joint: JointProgram
    started: float

    def solve_near_parts(self, time_limit: float, gap: float) -> Solution:
        """Solve with parts of units, then with whole ones near those: small trees both, and the first bounds the
        second. The program is afterwards as it was."""
        program = self.joint.program
        counts = [column.at for tier in self.joint.counts for n in tier for column in n.flatten()]
        low, high = list(program.low), list(program.high)
        for at in counts:
            program.whole[at] = False
        parts, values = self.solve(time_limit / 3, gap / 4)
        for at in counts:
            program.whole[at] = True
            if parts.counts:
                program.low[at] = max(low[at], floor(values[at] + NEAR) - 1)
                program.high[at] = min(high[at], ceil(values[at] - NEAR) + 1)
        near = self.solve(time_limit / 3, gap / 2)[0] if parts.counts else parts
        program.low, program.high = low, high
        bound = min(parts.bound, near.objective)
        return replace(near, bound=bound, gap=(near.objective - bound) / near.objective if near.objective else 0.0)

    def solve(self, time_limit: float, allowed: float) -> tuple[Solution, list[float]]:
        """The solution, and the values of the program's columns."""
        program = self.joint.program
        found = solve(program, max(time_limit, LEAST_SECONDS), allowed)
        name, seconds = solver_name(), time.perf_counter() - self.started
        if not found.values:
            if found.status == "unsolved" and seconds < time_limit / 2:  # a plan without it would only be a baseline
                raise RuntimeError(f"{name} gave up after {seconds:.3f} of {time_limit:.1f} s without saying why")
            return Solution(found.status, 0.0, 0.0, 0.0, seconds, name, ()), []
        objective = program.goal.value(found.values)
        told = found.bound is not None  # CBC may call optimal what it had when its time was up
        proven = found.status == "optimal" and (told or seconds < time_limit)
        bound = _bound(program, found, objective, allowed if proven else None)
        gap = max(0.0, (objective - bound) / objective) if objective else 0.0
        status = "optimal" if proven else "feasible"
        counts = tuple(tuple(_read_counts(n, found.values) for n in tier) for tier in self.joint.counts)
        return Solution(status, objective / MS, bound / MS, gap, seconds, name, counts), found.values


def _bound(program: Program, found: Outcome, objective: float, allowed: float | None) -> float:
    """What the goal is at least: the solver's own proof, whatever stopped it; else by the gap that it was `allowed`;
    under a limit (None) by the linear relaxation."""
    if found.bound is not None:
        return min(found.bound + program.goal.constant, objective)
    return objective * (1 - allowed) if allowed is not None else _relaxation_value(program)


def _read_counts(n: CountColumns, values: list[float]) -> Counts:
    pin, cpu, kv, *divided = (round(values[column.at]) for column in n.flatten())
    return Counts(pin, cpu, kv, tuple(zip(divided[::2], divided[1::2])))
