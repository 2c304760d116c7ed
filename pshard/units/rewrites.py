"""Rewrites of a unit's list of operations: which of them one call carries out together. No torch.

A list means the same with and without each of these. `FUSED` says which are done; tests leave one out at a time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from pshard.units.operands import STREAM, Rows
from pshard.units.operations import (
    GatedProduct,
    InjectStream,
    Norm,
    NormStreams,
    Operation,
    Product,
    ProductGroup,
    SpreadStream,
)

GATE_UP, WHOLE_FFN = "gate and up", "whole FFN"
ENTER_STREAMS = "streams and their norms"
END_NORMS = "inner norms and norm"  # of one unit, and of two: see UnitRuns
SUM_NORM, LEFT_NORM = "sum and norm", "product and norm"  # of two units: see UnitRuns
FUSED = frozenset((GATE_UP, WHOLE_FFN, ENTER_STREAMS, END_NORMS, SUM_NORM, LEFT_NORM))


def fuses(what: str) -> bool:
    """Whether that is done where kernels can."""
    return what in FUSED


@dataclass(frozen=True)
class Gate:
    """act(x) * up, `width` elements a token each, by the activation of a layer."""

    width: int
    x: Rows
    up: Rows
    out: Rows
    layer: int

    @property
    def reads(self) -> tuple[Rows, ...]:
        """Its operands."""
        return self.x, self.up

    @property
    def writes(self) -> tuple[Rows, ...]:
        """What it leaves."""
        return (self.out,)


@dataclass(frozen=True)
class Ffn:
    """A gated product and the product of what it gives, in one call where kernels have one for them."""

    gated: GatedProduct
    down: Product

    @property
    def reads(self) -> tuple[Rows, ...]:
        """Its operands."""
        return self.gated.reads

    @property
    def writes(self) -> tuple[Rows, ...]:
        """What it leaves."""
        return self.down.writes


@dataclass(frozen=True)
class EnterStreams:
    """What blocks have given goes into the streams, and these are normalised."""

    begin: SpreadStream | InjectStream
    norm: NormStreams

    @property
    def reads(self) -> tuple[Rows, ...]:
        """Its operands."""
        return self.begin.reads

    @property
    def writes(self) -> tuple[Rows, ...]:
        """What it leaves."""
        return *self.begin.writes, *self.norm.writes


@dataclass(frozen=True)
class EndNorms:
    """How a unit ends that normalises what it adds to the residual stream, by `last`. parts: what makes that of several
    results, each normalised by itself; none where it is one. The unit that follows may make all of them with the norm
    by which it begins."""

    last: Norm
    parts: tuple[Norm, ...] = ()

    @property
    def norms(self) -> tuple[Norm, ...]:
        """All of them, in their order."""
        return *self.parts, self.last

    @property
    def reads(self) -> tuple[Rows, ...]:
        """Its operands."""
        return *(part.x for part in self.parts), *self.last.reads

    @property
    def writes(self) -> tuple[Rows, ...]:
        """What it leaves."""
        return self.last.writes


Step = Operation | Gate | Ffn | EnterStreams | EndNorms


def rewrite(operations: Iterable[Operation]) -> tuple[Step, ...]:
    """The list as it is carried out."""
    found: list[Step] = []
    for operation in operations:
        before = found[-1] if found else None
        if isinstance(operation, GatedProduct) and (operation.biased or not fuses(GATE_UP)):
            found += split_gate(operation)
        elif (
            fuses(WHOLE_FFN)
            and isinstance(operation, Product)
            and isinstance(before, GatedProduct)
            and operation.x == before.out
            and operation.bias is None
        ):
            found[-1] = Ffn(before, operation)
        elif fuses(ENTER_STREAMS) and (entered := _join_entry(before, operation)):
            found[-1] = entered
        else:
            found.append(operation)
    return _end_once(found) if fuses(END_NORMS) else tuple(found)


def end_norms(operations: Sequence[Step]) -> EndNorms | None:
    """The norms by which a list ends, where these are of what it adds to the residual stream."""
    last = operations[-1] if operations else None
    if not isinstance(last, Norm) or not last.adds or last.out != STREAM or last.count > 1:
        return None
    parts = takewhile(lambda step: isinstance(step, Norm) and step.out == last.x, reversed(operations[:-1]))
    found = tuple(part for part in parts if isinstance(part, Norm))[::-1]
    return EndNorms(last, found) if len(found) in (0, 2) else EndNorms(last)


def _end_once(steps: list[Step]) -> tuple[Step, ...]:
    ended = end_norms(steps)
    return tuple(steps) if ended is None else (*steps[: -len(ended.norms)], ended)


def _join_entry(before: Step | None, operation: Operation) -> EnterStreams | None:
    """What goes into streams, and the norm of these right behind it, as one."""
    if isinstance(before, SpreadStream | InjectStream) and isinstance(operation, NormStreams):
        return EnterStreams(before, operation) if operation.x == before.out else None
    return None


def enter_once(operations: Iterable[Operation]) -> tuple[Operation | EnterStreams, ...]:
    """The list with what goes into streams and their norm as one, as it is timed and carried out."""
    found: list[Operation | EnterStreams] = []
    for operation in operations:
        if entered := _join_entry(found[-1] if found else None, operation):
            found[-1] = entered
        else:
            found.append(operation)
    return tuple(found)


def split_gate(gated: GatedProduct) -> tuple[ProductGroup, Gate]:
    """A gated product as two products side by side, and what is made of both: no kernel adds biases in between."""
    both = ProductGroup((gated.gate, gated.up), gated.biases, gated.x, Rows(gated.out.buffer, gated.out.first))
    first, second = both.writes
    return both, Gate(gated.up.rows, first, second, gated.out, gated.gate.layer)
