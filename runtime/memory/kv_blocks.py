"""Blocks of the KV cache: taken from one pool as a sequence grows, given back when it forgets."""

import heapq
from collections.abc import Iterable, Sequence

from pshard.units.kv_cells import KV_BLOCK


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
