"""Linear programs with integers, as plain numbers: what the integer program is written in, for any solver to read."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple


class Linear:
    """A linear expression: coefficients by column, and a constant."""

    __slots__ = ("constant", "terms")

    def __init__(self, terms: dict[int, float], constant: float = 0.0) -> None:
        self.terms, self.constant = terms, constant

    def __add__(self, other: "Linear | float") -> "Linear":
        if not isinstance(other, Linear):
            return Linear(self.terms, self.constant + other)
        terms = dict(self.terms)
        for column, x in other.terms.items():
            terms[column] = terms[column] + x if column in terms else x
        return Linear(terms, self.constant + other.constant)

    def __radd__(self, other: float) -> "Linear":
        return Linear(self.terms, self.constant + other)

    def __sub__(self, other: "Linear | float") -> "Linear":
        if not isinstance(other, Linear):
            return Linear(self.terms, self.constant - other)
        terms = dict(self.terms)
        for column, x in other.terms.items():
            terms[column] = terms.get(column, 0.0) - x
        return Linear(terms, self.constant - other.constant)

    def __rsub__(self, other: float) -> "Linear":
        return Linear({column: -x for column, x in self.terms.items()}, other - self.constant)

    def __mul__(self, factor: float) -> "Linear":
        if not factor:
            return Linear({})
        return Linear({column: factor * x for column, x in self.terms.items()}, factor * self.constant)

    __rmul__ = __mul__

    def value(self, values: list[float]) -> float:
        """What it amounts to with these values of the columns."""
        found = self.constant
        for column, x in self.terms.items():
            found += values[column] * x
        return found


class Column(Linear):
    """A column as an expression; `at`: its number."""

    __slots__ = ("at",)

    def __init__(self, at: int) -> None:
        super().__init__({at: 1.0})
        self.at = at


def sum_of(parts: Iterable[Linear | float]) -> Linear:
    """The sum of expressions and numbers."""
    terms: dict[int, float] = {}
    constant = 0.0
    for part in parts:
        if isinstance(part, Linear):
            constant += part.constant
            for column, x in part.terms.items():
                terms[column] = terms[column] + x if column in terms else x
        else:
            constant += part
    return Linear(terms, constant)


Amount = Linear | float  # what a formula works on: an expression of the program, or the number that it comes to


class Row(NamedTuple):
    """A constraint: `terms` (coefficients by column) amount to `low` at least and `high` at most."""

    name: str
    terms: dict[int, float]
    low: float
    high: float


@dataclass
class Program:
    """Minimise `goal` subject to `rows`, columns between `low` and `high`.

    whole: which columns are integers. keys: solvers get columns in the order of these, as their order decides which of
    several optima they find.
    """

    names: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    goal: Linear = field(default_factory=lambda: Linear({}))

    def column(self, name: str, low: float = 0.0, high: float = inf, whole: bool = False, key: str = "") -> Column:
        """A new column; `key` is its name where none is given."""
        self.names.append(name)
        self.keys.append(key or name)
        self.low.append(low)
        self.high.append(high)
        self.whole.append(whole)
        return Column(len(self.names) - 1)

    def switch(self, name: str, key: str = "") -> Column:
        """A column that is 0 or 1."""
        return self.column(name, 0, 1, True, key)

    def at_most(self, name: str, left: Amount, right: Amount) -> None:
        difference = _expression(left - right)
        self.rows.append(Row(name, difference.terms, -inf, -difference.constant))

    def at_least(self, name: str, left: Amount, right: Amount) -> None:
        difference = _expression(left - right)
        self.rows.append(Row(name, difference.terms, -difference.constant, inf))

    def equal(self, name: str, left: Amount, right: float) -> None:
        left = _expression(left)
        self.rows.append(Row(name, left.terms, right - left.constant, right - left.constant))

    def used(self) -> list[int]:
        """Columns that a row or the goal names, by key: the order that a solver gets them in."""
        columns = set(self.goal.terms).union(*(row.terms for row in self.rows))
        return sorted(columns, key=self.keys.__getitem__)


def _expression(amount: Amount) -> Linear:
    return amount if isinstance(amount, Linear) else Linear({}, amount)
