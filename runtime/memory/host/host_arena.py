"""Where blobs of units lie in the host arena, and which of them are page-locked together. No torch."""

import mmap
from collections.abc import Iterable
from dataclasses import dataclass

from pshard.quant import TENSOR_ALIGN, align
from pshard.units.divide_unit import Portion

LOCK_CHUNK = 2 << 30  # bytes that are page-locked at once: half a second in which Ctrl-C is not heard


@dataclass(frozen=True)
class HostArena:
    """`starts` of blobs, by unit, and `ends` of the chunks of whole units that are page-locked at once; in bytes."""

    starts: dict[str, int]
    ends: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return self.ends[-1]


def arrange_blobs(portions: Iterable[Portion]) -> HostArena:
    """The arena of what is kept of units, in that order."""
    starts, at, borders = dict[str, int](), 0, [0]
    for unit in (portion.unit for portion in portions):
        size = align(unit.packed_nbytes, TENSOR_ALIGN)
        if at + size - borders[-1] > LOCK_CHUNK and at > borders[-1]:
            at = align(at, mmap.PAGESIZE)  # chunks share no page
            borders.append(at)
        starts[unit.name] = at
        at += size
    return HostArena(starts, (*borders[1:], at))
