"""States: what a unit keeps of its sequences from one micro-batch to the next, by the law of its size. No torch.

A law answers how many bytes a layer's state takes, what is brought before the unit runs and taken back after it, and
whether the state can be cut back to an earlier length.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

from pshard.quant import BUFFER_ALIGN, align
from pshard.units.kv_cells import KV_BLOCK, kv_blocks, kv_nbytes


@dataclass(frozen=True)
class StateShape:
    """What sizes states: cells of context that so many sequences share, and the types of keys and values."""

    context: int
    sequences: int
    type_k: str
    type_v: str


class State(Protocol):
    """The law of a state's size. Bytes."""

    grows: ClassVar[bool]  # with the tokens of a sequence
    can_be_cut: ClassVar[bool]  # back to any earlier length

    def nbytes(self, shape: StateShape) -> int:
        """Of one layer, for all sequences of `shape`."""
        ...

    def fetched(self, past: int, sequences: int) -> int:
        """What a micro-batch reads that was there before: `past` tokens over all of its sequences."""
        ...

    def written(self, tokens: int, sequences: int) -> int:
        """What a micro-batch of `tokens` new tokens changes."""
        ...


@dataclass(frozen=True)
class CellState:
    """A KV cache: one cell of `width` keys and `width` values a token, in blocks that the sequences share."""

    width: int
    type_k: str
    type_v: str
    grows: ClassVar[bool] = True
    can_be_cut: ClassVar[bool] = True

    @cached_property
    def cell(self) -> int:
        """Bytes of one token's cell."""
        return kv_nbytes(self.type_k, self.width) + kv_nbytes(self.type_v, self.width)

    def nbytes(self, shape: StateShape) -> int:
        """Whole blocks for every sequence's share; keys, then values, which begin where vectors may."""
        cells = kv_blocks(shape.context, shape.sequences) * KV_BLOCK
        return sum(align(cells * kv_nbytes(kind, self.width), BUFFER_ALIGN) for kind in (self.type_k, self.type_v))

    def fetched(self, past: int, sequences: int) -> int:
        return past * self.cell

    def written(self, tokens: int, sequences: int) -> int:
        return tokens * self.cell


@dataclass(frozen=True)
class LatentState:
    """A cache of latents: one cell of `width` numbers a token, which are key and value at once, in the blocks of a KV
    cache."""

    width: int
    kind: str
    grows: ClassVar[bool] = True
    can_be_cut: ClassVar[bool] = True

    @cached_property
    def cell(self) -> int:
        """Bytes of one token's cell."""
        return kv_nbytes(self.kind, self.width)

    def nbytes(self, shape: StateShape) -> int:
        """Whole blocks for every sequence's share."""
        return align(kv_blocks(shape.context, shape.sequences) * KV_BLOCK * self.cell, BUFFER_ALIGN)

    def fetched(self, past: int, sequences: int) -> int:
        return past * self.cell

    def written(self, tokens: int, sequences: int) -> int:
        return tokens * self.cell


@dataclass(frozen=True)
class FixedState:
    """So many bytes a sequence, whatever its length; every micro-batch reads and writes all of it."""

    each: int
    grows: ClassVar[bool] = False
    can_be_cut: ClassVar[bool] = False

    def nbytes(self, shape: StateShape) -> int:
        return shape.sequences * align(self.each, BUFFER_ALIGN)

    def fetched(self, past: int, sequences: int) -> int:
        return sequences * self.each if past else 0

    def written(self, tokens: int, sequences: int) -> int:
        return sequences * self.each
