"""Solvers of linear programs: HiGHS in this process when `highspy` is installed, else CBC through pulp."""

import marshal
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from math import isinf

from pshard.planner.solver.cpu_clock import cpu_seconds
from pshard.planner.solver.linear import Program

LONGER = 4  # times the limit after one in which a solver got less than half of it
KEPT = 4096  # outcomes that this process remembers: tiers, ranks and what-ifs ask for the same programs again
THREADS = 1  # in every call: HiGHS refuses to solve with another number than the process's first call had
# HiGHS: trees of these small programs are done before searches in sub-problems and fresh starts pay for themselves
SMALL_TREES: dict[str, bool | int] = {
    "mip_heuristic_run_feasibility_jump": False,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_root_reduced_cost": False,
    "mip_allow_restart": False,
    "mip_pscost_minreliable": 1,
}


@dataclass(frozen=True)
class Outcome:
    """What a solver found: "optimal", "feasible" (a limit was hit first), "infeasible" or "unsolved".

    values: by column of the program, empty without a solution. bound: what the goal without its constant is at least,
    where the solver tells. late: whether the time was up.
    """

    status: str
    values: list[float]
    bound: float | None = None
    late: bool = False


@cache
def solver_name() -> str:
    """The solver that is installed: "HiGHS" or "CBC"."""
    try:
        import highspy  # noqa: F401
    except ImportError:
        return "CBC"
    return "HiGHS"


def solve(program: Program, time_limit: float, gap: float) -> Outcome:
    """Solve with integers; may stop at a relative `gap`, and does after `time_limit` seconds: HiGHS of processor time,
    nearly, CBC of the clock."""
    if solver_name() == "CBC":
        return _with_cbc(program, time_limit, gap)
    key = _digest(program, gap)
    if key in _known:
        return _known[key]
    allowed = time_limit  # by the clock, the only one that HiGHS has
    while True:
        began = cpu_seconds()
        found = _with_highs(program, True, {"mip_rel_gap": gap, "time_limit": allowed} | SMALL_TREES)
        if not found.late or cpu_seconds() - began >= time_limit / 2:
            break
        allowed *= LONGER  # other programs had the processor meanwhile
    if not found.late:  # with more time it would find the same
        _known[key] = found
        if len(_known) > KEPT:
            _known.popitem(last=False)
    return found


_known: OrderedDict[bytes, Outcome] = OrderedDict()


def _digest(program: Program, gap: float) -> bytes:
    """Tells programs apart by all that the solver gets, to the last bit and in its order."""
    rows = [(list(row.terms.items()), row.low, row.high) for row in program.rows]
    goal = list(program.goal.terms.items())
    told = (gap, rows, goal, program.keys, program.low, program.high, program.whole)
    return blake2b(marshal.dumps(told, 2), digest_size=16).digest()  # version 2: equal numbers are equal bytes


def relax(program: Program) -> Outcome:
    """Solve the linear relaxation: as if no column were an integer."""
    # so small a program is solved before presolve is done
    return _with_highs(program, False, {"presolve": "off"}) if solver_name() == "HiGHS" else _with_cbc(program)


def _with_highs(program: Program, whole: bool, options: dict) -> Outcome:
    import highspy

    solver = highspy.Highs()
    for name, value in {"output_flag": False, "threads": THREADS, **options}.items():
        solver.setOptionValue(name, value)
    columns = program.used()
    at = {column: i for i, column in enumerate(columns)}
    starts, indices, numbers = [0], [], []
    for row in program.rows:
        for column, x in row.terms.items():
            if x:
                indices.append(at[column])
                numbers.append(x)
        starts.append(len(indices))
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(columns), len(program.rows)
    model.col_cost_ = [program.goal.terms.get(c, 0.0) for c in columns]
    model.col_lower_, model.col_upper_ = [program.low[c] for c in columns], [program.high[c] for c in columns]
    model.row_lower_, model.row_upper_ = [row.low for row in program.rows], [row.high for row in program.rows]
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.num_col_, model.a_matrix_.num_row_ = len(columns), len(program.rows)
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = starts, indices, numbers
    if whole:
        kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
        model.integrality_ = [kinds[program.whole[c]] for c in columns]
    solver.passModel(model)
    solver.run()

    status, said = solver.getModelStatus(), highspy.HighsModelStatus
    if status in (said.kInfeasible, said.kUnboundedOrInfeasible):
        return Outcome("infeasible", [])
    limits = (said.kTimeLimit, said.kIterationLimit, said.kInterrupt, said.kObjectiveBound, said.kObjectiveTarget)
    if status != said.kOptimal and (status not in limits or isinf(solver.getObjectiveValue())):
        return Outcome("unsolved", [], late=status == said.kTimeLimit)
    values = [0.0] * len(program.names)
    for column, x in zip(columns, list(solver.getSolution().col_value), strict=True):
        values[column] = x
    bound, late = solver.getInfo().mip_dual_bound, status == said.kTimeLimit
    return Outcome("optimal" if status == said.kOptimal else "feasible", values, bound, late)


def _with_cbc(program: Program, time_limit: float | None = None, gap: float | None = None) -> Outcome:
    """With integers when a time limit and a gap are given."""
    import pulp

    whole = gap is not None
    columns = {
        c: pulp.LpVariable(
            program.keys[c],  # pulp sorts by name
            program.low[c],
            None if isinf(program.high[c]) else program.high[c],
            pulp.LpInteger if whole and program.whole[c] else pulp.LpContinuous,
        )
        for c in program.used()
    }
    problem = pulp.LpProblem("placement", pulp.LpMinimize)
    problem += pulp.lpSum(x * columns[c] for c, x in program.goal.terms.items())
    for row in program.rows:
        left = pulp.lpSum(x * columns[c] for c, x in row.terms.items())
        if not isinf(row.low):
            problem += left >= row.low
        if not isinf(row.high):
            problem += left <= row.high
    problem.solve(pulp.PULP_CBC_CMD(msg=False, threads=THREADS, mip=whole, timeLimit=time_limit, gapRel=gap))
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return Outcome("infeasible" if problem.status == pulp.LpStatusInfeasible else "unsolved", [])
    values = [0.0] * len(program.names)
    for c, variable in columns.items():
        values[c] = variable.value() or 0.0
    return Outcome("optimal" if problem.sol_status == pulp.LpSolutionOptimal else "feasible", values)
