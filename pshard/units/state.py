"""States: what a unit keeps of its sequences from one micro-batch to the next, by the law of its size. No torch.

A law answers how many bytes a layer's state takes, what is brought before the unit runs and taken back after it, and
whether the state can be cut back to an earlier length.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

from pshard.quant import BUFFER_ALIGN, align
from pshard.units.kv_cells import KV_BLOCK, kv_blocks, kv_nbytes, window_blocks, window_start


@dataclass(frozen=True)
class StateShape:
    """What sizes states: cells of context that so many sequences share, the types of keys and values, and the most
    tokens of a micro-batch (0: as many as the context). open: most rows of a micro-batch that are held back from states
    which cannot be cut, until it is known which of them hold."""

    context: int
    sequences: int
    type_k: str
    type_v: str
    batch: int = 0
    open: int = 0


def count_before(layer: int, full: tuple[int, ...]) -> int:
    """Layers before this one that are none of `full`."""
    return layer - sum(other < layer for other in full)


class State(Protocol):
    """The law of a state's size. Bytes."""

    grows: ClassVar[bool]  # with the tokens of a sequence
    can_be_cut: ClassVar[bool]  # back to any earlier length; with a window perhaps only by computing it again

    @property
    def cell(self) -> int:
        """Of one token's cell; 0 of a state that is no cache of cells."""
        ...

    @property
    def window(self) -> int:
        """How many of the last cells a token sees; 0: all."""
        ...

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
    """A KV cache: one cell of `width` keys and `width` values a token, in blocks that the sequences share. With a
    `window` a token sees the last so many cells; those that no further token sees are kept while there is room. index:
    numbers of a key by which cells are chosen, float32 whatever the types: which cells are seen hangs on them."""

    width: int
    type_k: str
    type_v: str
    window: int = 0
    index: int = 0
    grows: ClassVar[bool] = True
    can_be_cut: ClassVar[bool] = True

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """What a cell has: the type and the numbers of each part, which lie apart."""
        found = (self.type_k, self.width), (self.type_v, self.width)
        return (*found, ("f32", self.index)) if self.index else found

    @cached_property
    def cell(self) -> int:
        """Bytes of one token's cell."""
        return sum(kv_nbytes(kind, width) for kind, width in self.parts)

    def blocks(self, shape: StateShape) -> int:
        """Blocks of the layer: whole ones for every sequence's share, or for the windows."""
        if self.window:
            return window_blocks(self.window, shape.context, shape.sequences, shape.batch or shape.context)
        return kv_blocks(shape.context, shape.sequences)

    def nbytes(self, shape: StateShape) -> int:
        """Keys, then values, then an index, which begin where vectors may."""
        cells = self.blocks(shape) * KV_BLOCK
        return sum(align(cells * kv_nbytes(kind, width), BUFFER_ALIGN) for kind, width in self.parts)

    def fetched(self, past: int, sequences: int) -> int:
        """With a window what is seen of all, by the mean length."""
        if self.window:
            each = past // max(1, sequences)
            past = sequences * (each - min(each, window_start(each, self.window)))
        return past * self.cell

    def written(self, tokens: int, sequences: int) -> int:
        return tokens * self.cell


@dataclass(frozen=True)
class LatentState:
    """A cache of latents: one cell of `width` numbers a token, which are key and value at once, in the blocks of a KV
    cache."""

    width: int
    kind: str
    window: ClassVar[int] = 0
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
    """So many bytes a sequence, whatever its length: all zeros where one begins. Every micro-batch reads and writes all
    of it."""

    each: int
    cell: ClassVar[int] = 0
    window: ClassVar[int] = 0
    grows: ClassVar[bool] = False
    can_be_cut: ClassVar[bool] = False

    def nbytes(self, shape: StateShape) -> int:
        return shape.sequences * align(self.each, BUFFER_ALIGN)

    def fetched(self, past: int, sequences: int) -> int:
        return sequences * self.each

    def written(self, tokens: int, sequences: int) -> int:
        return sequences * self.each
