"""A program as text of the CPLEX LP format, which other solvers and people read."""

from collections.abc import Iterator, Mapping
from math import inf

from pshard.planner.solver.linear import Program, Row

PER_LINE = 6  # terms
HEADER = r"\ Milliseconds of a round; columns and rows are derived in docs/planning.md"


def lp_text(program: Program) -> str:
    """The whole program with its names; numbers are written so that they are read back to the last bit."""
    goal = program.goal
    lines = [HEADER, "Minimize", *_sum_lines("round: ", goal.terms, program.names, f" {_number(goal.constant)}")]
    lines += ["Subject To", *(line for row in program.rows for line in _row_lines(row, program.names))]
    used = program.used()
    lines += ["Bounds", *(_bounds(program, column) for column in used)]
    lines += ["General", *(f" {program.names[column]}" for column in used if program.whole[column]), "End"]
    return "\n".join(lines) + "\n"


def _row_lines(row: Row, names: list[str]) -> Iterator[str]:
    """A constraint; one with two different ends takes two, and one without columns says nothing."""
    if not any(row.terms.values()):
        return
    if row.low == row.high:
        yield from _sum_lines(f"{row.name}: ", row.terms, names, f" = {_number(row.low)}")
        return
    both = row.low > -inf and row.high < inf
    if row.low > -inf:
        yield from _sum_lines(f"{row.name}{'.low' * both}: ", row.terms, names, f" >= {_number(row.low)}")
    if row.high < inf:
        yield from _sum_lines(f"{row.name}{'.high' * both}: ", row.terms, names, f" <= {_number(row.high)}")


def _sum_lines(begin: str, terms: Mapping[int, float], names: list[str], end: str) -> Iterator[str]:
    parts = [f"{_number(x)} {names[column]}" for column, x in terms.items() if x]
    for i in range(0, len(parts), PER_LINE):
        last = end if i + PER_LINE >= len(parts) else ""
        yield f" {begin if not i else '  '}{' '.join(parts[i : i + PER_LINE])}{last}"


def _bounds(program: Program, column: int) -> str:
    high = "" if program.high[column] == inf else f" <= {_number(program.high[column])}"
    return f" {_number(program.low[column])} <= {program.names[column]}{high}"


def _number(x: float) -> str:
    """With its sign, and as many digits as tell it from its neighbours."""
    return f"{float(x) + 0.0:+}".removesuffix(".0")  # + 0.0: no negative zero
