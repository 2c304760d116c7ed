"""Which units a model's files hold as they are used, so that they can be read from disk for every step, and in what
pieces: whole units, or of a table the rows that are looked up. No torch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from pshard.homes import ON_DISK
from pshard.model import ModelSpec
from pshard.model_config import ModelConfig
from pshard.quant import QUANT_TYPES, ROW_BLOCK, file_nbytes, plane_offsets
from pshard.tensor import TensorSpec
from pshard.units.operations import LookUp
from pshard.units.unit import Unit, places_of

BLOCK = 4096  # of a file and in memory: no drive asks for more
PIECE = 512 << 10  # bytes of a read


@dataclass(frozen=True)
class RowRun:
    """Rows of a matrix that follow each other in a file, from its byte `offset` on."""

    path: Path
    offset: int
    rows: int


class Located(Protocol):
    """A model's file whose tensors can be found on disk."""

    spec: ModelSpec

    def locate(self, name: str, part: int | None = None) -> tuple[Path, int] | None: ...

    def locate_rows(self, name: str) -> tuple[RowRun, ...]: ...


def mark_made(file: Located) -> ModelSpec:
    """The model with a mark on units that are made of what the file holds: plans leave them in memory."""
    could = (unit for unit in file.spec.units if may_move(unit) or unit.kind.is_looked_up)
    made = {unit.name for unit in could if not lies_as_used(file, unit)}
    units = (replace(unit, stays_in_memory=True) if unit.name in made else unit for unit in file.spec.units)
    return replace(file.spec, units=tuple(units))


def may_move(unit: Unit) -> bool:
    """Whether units of its kind may live on disk, and come from there whole."""
    return any(where == ON_DISK for where, _ in places_of(unit.kind, False))


def lies_as_used(file: Located, unit: Unit) -> bool:
    """Whether all its matrices lie in the file as they are used: of a table, of which rows are read, each row, without
    a factor and in runs of whole records."""
    if unit.kind.is_looked_up:
        return all(_has_rows(file, tensor) for tensor in unit.matrices)
    stacks = [(t.name, part) for t in unit.matrices for part in (range(t.parts) if t.parts else (None,))]
    return all(file.locate(*place) is not None for place in stacks)


def _has_rows(file: Located, tensor: TensorSpec) -> bool:
    runs = file.locate_rows(tensor.name)
    whole = not any(run.rows % _count_joined(tensor.qtype) for run in runs[:-1])
    return bool(runs) and whole and "factor" not in plane_offsets(tensor.qtype, tensor.cols)


def list_lookups(unit: Unit, config: ModelConfig) -> tuple[LookUp, ...]:
    """What a unit looks up of each token."""
    return tuple(o for o in unit.operations(config) if isinstance(o, LookUp)) if unit.kind.is_looked_up else ()


def rows_nbytes(unit: Unit, config: ModelConfig, tokens: int) -> int:
    """Bytes of the rows in the model's file that so many tokens look up, each as often as it is."""
    return tokens * sum(o.each * o.table.row_nbytes for o in list_lookups(unit, config))


def _count_joined(qtype: str) -> int:
    """Rows that lie in one record of the packed layout."""
    return ROW_BLOCK if QUANT_TYPES[qtype].planes else 1


def piece_rows(tensor: TensorSpec) -> int:
    """Rows of a matrix, or of each part of a stack, that one read brings: whole records, one at least."""
    block = _count_joined(tensor.qtype)
    return min(tensor.rows, max(1, PIECE // max(1, file_nbytes(tensor.qtype, block, tensor.cols))) * block)
