"""Which units a model's files hold as they are used, so that they can be read from disk for every step, and in what
pieces. No torch."""

from dataclasses import replace
from pathlib import Path
from typing import Protocol

from pshard.homes import ON_DISK
from pshard.model import ModelSpec
from pshard.quant import QUANT_TYPES, ROW_BLOCK, file_nbytes
from pshard.tensor import TensorSpec
from pshard.units.unit import Unit, places_of

BLOCK = 4096  # of a file and in memory: no drive asks for more
PIECE = 512 << 10  # bytes of a read


class Located(Protocol):
    """A model's file whose tensors can be found on disk."""

    spec: ModelSpec

    def locate(self, name: str, part: int | None = None) -> tuple[Path, int] | None: ...


def mark_made(file: Located) -> ModelSpec:
    """The model with a mark on units that are made of what the file holds: plans leave them in memory."""
    made = {unit.name for unit in file.spec.units if may_move(unit) and not lies_as_used(file, unit)}
    units = (replace(unit, stays_in_memory=True) if unit.name in made else unit for unit in file.spec.units)
    return replace(file.spec, units=tuple(units))


def may_move(unit: Unit) -> bool:
    """Whether units of its kind may live on disk."""
    return any(where == ON_DISK for where, _ in places_of(unit.kind, False))


def lies_as_used(file: Located, unit: Unit) -> bool:
    """Whether all its matrices lie in the file as they are used."""
    stacks = [(t.name, part) for t in unit.matrices for part in (range(t.parts) if t.parts else (None,))]
    return all(file.locate(*place) is not None for place in stacks)


def piece_rows(tensor: TensorSpec) -> int:
    """Rows of a matrix, or of each part of a stack, that one read brings: whole records, one at least."""
    block = ROW_BLOCK if QUANT_TYPES[tensor.qtype].planes else 1
    return min(tensor.rows, max(1, PIECE // max(1, file_nbytes(tensor.qtype, block, tensor.cols))) * block)
