"""Blocks of the KV cache: taken from one pool as a sequence grows, given back when it forgets."""

import heapq
from collections.abc import Iterable, Sequence

from pshard.units.kv_cells import KV_BLOCK, window_start


class BlockPool:
    """Cell i of a sequence is cell i % KV_BLOCK of its block number i // KV_BLOCK, in every layer's cache alike."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = list(range(blocks))  # a heap: the lowest goes first, so that what is used lies together

    def missing(self, wanted: Iterable[tuple[Sequence[int], int]]) -> int:
        """How many blocks the pool lacks for holders of these blocks to have so many cells instead."""
        more = sum(blocks_of(cells) - len(held) for held, cells in wanted)
        return max(0, more - len(self._free))

    def resize(self, held: list[int], cells: int) -> None:
        """Let a holder of these blocks hold those that `cells` cells need. Raises ValueError, before anything changes,
        when the pool has too few."""
        wanted = blocks_of(cells)
        if wanted - len(held) > len(self._free):
            raise ValueError(f"{wanted - len(held)} blocks are needed and {len(self._free)} are free")
        while len(held) > wanted:
            heapq.heappush(self._free, held.pop())
        while len(held) < wanted:
            held.append(heapq.heappop(self._free))

    def take_back(self, held: list[int]) -> None:
        """Free the first of a holder's blocks."""
        heapq.heappush(self._free, held.pop(0))

    @property
    def is_empty(self) -> bool:
        return not self._free


class RecentBlocks:
    """Blocks of layers whose tokens see a window, of all sequences. What lies before the window of a sequence's next
    token stays until somebody needs the room: then the sequence that has most of it loses its first block."""

    def __init__(self, blocks: int, sequences: int, window: int) -> None:
        self._pool, self._window = BlockPool(blocks), window
        self._held: list[list[int]] = [[] for _ in range(sequences)]
        self._lost = [0] * sequences  # blocks of each that it had before those

    def table(self, number: int) -> tuple[int, ...]:
        """A sequence's blocks, in order; 0 for those that it has lost."""
        return (0,) * self._lost[number] + tuple(self._held[number])

    def first(self, number: int) -> int:
        """The first cell of a sequence that is still there."""
        return self._lost[number] * KV_BLOCK

    def seen_from(self, past: int) -> int:
        """The first cell of the block where what a token after `past` others sees begins."""
        return window_start(past, self._window)

    def extend(self, number: int, cells: int, lengths: Sequence[int]) -> None:
        """Let a sequence hold blocks up to so many cells, when all have these lengths. Raises ValueError when there is
        no room for all windows."""
        held = self._held[number]
        while self._lost[number] + len(held) < blocks_of(cells):
            if self._pool.is_empty:
                self._make_room(lengths)
            self._pool.resize(held, (len(held) + 1) * KV_BLOCK)

    def _make_room(self, lengths: Sequence[int]) -> None:
        spare = [window_start(n, self._window) // KV_BLOCK - lost for n, lost in zip(lengths, self._lost)]
        number = max(range(len(spare)), key=lambda i: spare[i])
        if spare[number] <= 0 or not self._held[number]:
            raise ValueError("there is no room for the windows of all sequences")
        self._pool.take_back(self._held[number])
        self._lost[number] += 1

    def cut_back(self, number: int, length: int) -> bool:
        """Forget a sequence's cells after the first `length`; whether what its next token sees is still there. Where it
        is not, nothing is left of the sequence."""
        there = self._lost[number] <= window_start(length, self._window) // KV_BLOCK
        if length and there:
            self._pool.resize(self._held[number], max(0, length - self.first(number)))
        else:
            self._pool.resize(self._held[number], 0)
            self._lost[number] = 0
        return there or not length

    def begin(self, number: int, length: int, lengths: Sequence[int]) -> None:
        """Let a sequence without blocks hold those that the token after `length` others sees."""
        self._lost[number] = window_start(length, self._window) // KV_BLOCK
        self.extend(number, length, lengths)


def blocks_of(cells: int) -> int:
    """Blocks that hold so many cells."""
    return -(-cells // KV_BLOCK)


def pool_spans(blocks: Sequence[int], start: int, stop: int) -> list[tuple[int, int]]:
    """Where in the pool the cells [start, stop) of a sequence with these blocks lie: ranges of cells, in its order."""
    spans: list[tuple[int, int]] = []
    while start < stop:
        block, inside = divmod(start, KV_BLOCK)
        take = min(stop - start, KV_BLOCK - inside)
        first = blocks[block] * KV_BLOCK + inside
        if spans and spans[-1][1] == first:
            spans[-1] = (spans[-1][0], first + take)
        else:
            spans.append((first, first + take))
        start += take
    return spans
