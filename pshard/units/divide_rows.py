"""An FFN divided between CPU and accelerator: rows of gate and up, byte ranges of the packed layout. No torch.

The CPU computes the last rows of the gated product silu(gate x) * (up x), the accelerator the others and then the whole
`down`, whose columns are no byte range. So only the accelerator's rows and `down` are brought to it.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from pshard.quant import ROW_BLOCK, TENSOR_ALIGN, align
from pshard.tensor import TensorSpec
from pshard.units.unit import Unit

SIXTEENTHS = 16  # shares of the CPU are counted in these


@dataclass(frozen=True)
class Piece:
    """Consecutive bytes: `nbytes` from `start` of the unit's blob, which lie at `to` in the accelerator's part."""

    start: int
    to: int
    nbytes: int


@dataclass(frozen=True)
class RowDivision:
    """The two parts of a unit as units of their own, and the bytes that make up the accelerator's blob."""

    on_acc: Unit
    on_cpu: Unit  # norm, gate and up
    pieces: tuple[Piece, ...]


@lru_cache(1 << 13)
def divide_rows(unit: Unit, cpu_rows: int) -> RowDivision:
    """Divide an FFN: its last `cpu_rows` rows of gate and up are the CPU's.

    Raises ValueError when either side would have no row, or the CPU's do not start at a record of the packed layout.
    """
    rows = ffn_rows(unit)
    own = rows - cpu_rows
    if not 0 < own < rows or own % ROW_BLOCK:
        raise ValueError(f"{unit.name}: {cpu_rows} of {rows} rows are no part that starts at a multiple of {ROW_BLOCK}")
    on_acc = replace(
        unit, tensors=tuple(_take_rows(t, own) if t.role in unit.kind.divided else t for t in unit.tensors)
    )
    on_cpu = replace(
        unit,
        tensors=tuple(
            _take_rows(t, cpu_rows) if t.role in unit.kind.divided else t
            for t in unit.tensors
            if t.role in unit.kind.divided or len(t.shape) == 1
        ),
    )
    pieces: list[Piece] = []
    for (start, _), (to, tensor) in zip(unit.offsets().values(), on_acc.offsets().values(), strict=True):
        nbytes = align(tensor.packed_nbytes, TENSOR_ALIGN)
        if pieces and pieces[-1].start + pieces[-1].nbytes == start:
            pieces[-1] = replace(pieces[-1], nbytes=pieces[-1].nbytes + nbytes)
        else:
            pieces.append(Piece(start, to, nbytes))
    return RowDivision(on_acc, on_cpu, tuple(pieces))


def acc_part(unit: Unit, cpu_rows: int) -> Unit:
    """What the accelerator holds of a unit: all of it when the CPU has no rows."""
    return divide_rows(unit, cpu_rows).on_acc if cpu_rows else unit


def ffn_rows(unit: Unit) -> int:
    """Rows of gate and up; 0 for a unit that has none."""
    return max((t.rows for t in unit.tensors if t.role in unit.kind.divided), default=0)


def share_rows(unit: Unit, sixteenths: int) -> int:
    """Rows that are about so many sixteenths of an FFN and may be the CPU's; 0 when the FFN is too small."""
    rows = ffn_rows(unit)
    own = align(rows * (SIXTEENTHS - sixteenths) // SIXTEENTHS, ROW_BLOCK)
    return rows - own if 0 < own < rows else 0


def _take_rows(tensor: TensorSpec, rows: int) -> TensorSpec:
    return replace(tensor, shape=(rows, tensor.cols))
