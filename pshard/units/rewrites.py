"""Rewrites of a unit's list of operations: which of them one call carries out together. No torch.

A list means the same with and without each of these. `FUSED` says which are done; tests leave one out at a time.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from pshard.units.operands import Rows
from pshard.units.operations import (
    GatedProduct,
    InjectStream,
    NormStreams,
    Operation,
    Product,
    ProductGroup,
    SpreadStream,
)

GATE_UP, WHOLE_FFN = "gate and up", "whole FFN"
ENTER_STREAMS = "streams and their norms"
SUM_NORM, LEFT_NORM = "sum and norm", "product and norm"  # of two units: see UnitRuns
FUSED = frozenset((GATE_UP, WHOLE_FFN, ENTER_STREAMS, SUM_NORM, LEFT_NORM))


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


Step = Operation | Gate | Ffn | EnterStreams


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
    return tuple(found)


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
