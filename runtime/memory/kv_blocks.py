"""Which blocks of the KV cache each sequence holds: taken from one pool as it grows, given back when it forgets."""

import heapq
from collections.abc import Sequence

from pshard.units.kv_cells import KV_BLOCK


class KVBlocks:
    """Cell i of a sequence is cell i % KV_BLOCK of its block number i // KV_BLOCK, in every layer's cache alike."""

    def __init__(self, blocks: int, sequences: int) -> None:
        self._free = list(range(blocks))  # a heap: the lowest goes first, so that what is used lies together
        self._held: list[list[int]] = [[] for _ in range(sequences)]

    def held(self, sequence: int) -> tuple[int, ...]:
        """The sequence's blocks, in the order of its cells."""
        return tuple(self._held[sequence])

    def missing(self, lengths: Sequence[int]) -> int:
        """How many blocks the pool lacks for the first sequences to have these lengths (cells), the others as is."""
        wanted = sum(max(0, blocks_of(n) - len(held)) for n, held in zip(lengths, self._held, strict=False))
        freed = sum(max(0, len(held) - blocks_of(n)) for n, held in zip(lengths, self._held, strict=False))
        return max(0, wanted - freed - len(self._free))

    def resize(self, sequence: int, cells: int) -> None:
        """Let the sequence hold the blocks that `cells` cells need. Raises ValueError, before anything changes, when
        the pool has too few."""
        held, wanted = self._held[sequence], blocks_of(cells)
        if wanted - len(held) > len(self._free):
            raise ValueError(f"{wanted - len(held)} blocks are needed and {len(self._free)} are free")
        while len(held) > wanted:
            heapq.heappush(self._free, held.pop())
        while len(held) < wanted:
            held.append(heapq.heappop(self._free))


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
