"""Blocks of the KV cache: taken from one pool as a sequence grows, shared by equal prefixes, given back when it
forgets."""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from pshard.units.kv_cells import KV_BLOCK, window_start


class BlockPool:
    """Cell i of a sequence is cell i % KV_BLOCK of its block number i // KV_BLOCK, in every layer's cache alike.

    A full block that is given a key may have several holders, none of whom changes it. It stays when the last one
    leaves, until its room is needed: the block that was left first goes first. Holders leave their last block first, so
    what follows a block never outlives it by much, and prefixes that several share stay longest.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = list(range(blocks))  # a heap: the lowest goes first, so that what is used lies together
        self._holders = [0] * blocks
        self._keys: list[bytes | None] = [None] * blocks
        self._known: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # with a key and without a holder, the oldest first

    def missing(self, wanted: Iterable[tuple[Sequence[int], int]]) -> int:
        """How many blocks the pool lacks for holders of these blocks to have so many cells instead."""
        more = sum(blocks_of(cells) - len(held) for held, cells in wanted)
        return max(0, more - self.room)

    def resize(self, held: list[int], cells: int) -> None:
        """Let a holder of these blocks hold those that `cells` cells need. Raises ValueError, before anything changes,
        when the pool has too few."""
        wanted = blocks_of(cells)
        if wanted - len(held) > self.room:
            raise ValueError(f"{wanted - len(held)} blocks are needed and {self.room} are free")
        while len(held) > wanted:
            self.leave(held.pop())
        while len(held) < wanted:
            held.append(self.take())

    def take_back(self, held: list[int]) -> None:
        """Let a holder leave its first block."""
        self.leave(held.pop(0))

    @property
    def room(self) -> int:
        """Blocks that can be taken: without a holder."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> tuple[int, ...]:
        """Blocks with a key and without a holder, the oldest first."""
        return tuple(self._idle)

    def find(self, key: bytes) -> int | None:
        """The block with that key."""
        return self._known.get(key)

    def key(self, block: int) -> bytes | None:
        """A block's key."""
        return self._keys[block]

    def hold(self, block: int) -> int:
        """Become one more holder of a block with a key; returns it."""
        self._idle.pop(block, None)
        self._holders[block] += 1
        return block

    def share(self, block: int, key: bytes) -> int:
        """Give a full block, which its only holder changes no more, a key; returns the block that its holder has from
        now on: another one where that key is known already."""
        other = self._known.setdefault(key, block)
        if other != block:
            self.hold(other)
            self.leave(block)
        else:
            self._keys[block] = key
        return other

    def drop(self, block: int) -> bool:
        """Make a block that has a key and no holder empty; others stay as they are. Whether it was one."""
        if block not in self._idle:
            return False
        del self._idle[block]
        self._forget_key(block)
        heapq.heappush(self._free, block)
        return True

    def forget(self, key: bytes) -> None:
        """Let no block have that key: what it was given for was not computed."""
        block = self._known.get(key)
        if block is not None and not self.drop(block):
            self._forget_key(block)

    def _forget_key(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._known[key]
            self._keys[block] = None

    def is_shared(self, block: int) -> bool:
        """Whether a block has several holders."""
        return self._holders[block] > 1

    def own(self, block: int) -> int:
        """A block that a holder of this one may change: this one, without its key, or where others hold it too another
        one, which is to be filled; for that there must be room."""
        if not self.is_shared(block):
            self._forget_key(block)
            return block
        other = self.take()
        self.leave(block)
        return other

    def leave(self, block: int) -> None:
        """Be one holder of a block less."""
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if self._keys[block] is None:
            heapq.heappush(self._free, block)
        else:
            self._idle[block] = None

    def take(self) -> int:
        """A block of one's own, where there is room."""
        if not self._free:
            self.drop(next(iter(self._idle)))
        block = heapq.heappop(self._free)
        self._holders[block] = 1
        return block


class RecentBlocks:
    """Blocks of layers whose tokens see a window, of all sequences. What lies before the window of a sequence's next
    token stays until somebody needs the room: then the sequence that has most of it loses its first block.

    Attributes:
        pool: of these blocks.
    """

    def __init__(self, blocks: int, sequences: int, window: int, batch: int = 1 << 62) -> None:
        """batch: tokens of a micro-batch at most: more come in several, which lose what no token sees any more."""
        self.pool, self._window, self._batch = BlockPool(blocks), window, batch
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
            self._make_room(lengths)
            self.pool.resize(held, (len(held) + 1) * KV_BLOCK)

    def missing(self, lengths: Sequence[int], wanted: Mapping[int, int]) -> int:
        """How many blocks are lacking for sequences of these lengths to have so many cells instead, or as many of them
        as one micro-batch brings."""
        needed, left = 0, self._batch
        for number, length in enumerate(lengths):
            more = min(left, max(0, wanted.get(number, length) - length))
            left -= more
            needed += blocks_of(length + more) - window_start(length, self._window) // KV_BLOCK
        return max(0, needed - self.pool.blocks)

    def share(self, number: int, at: int, key: bytes) -> None:
        """Give a sequence's block number `at`, which is full, a key."""
        held, at = self._held[number], at - self._lost[number]
        if at >= 0:
            held[at] = self.pool.share(held[at], key)

    def find(self, key: bytes) -> int | None:
        """As `BlockPool.find`."""
        return self.pool.find(key)

    def adopt(self, number: int, keys: Sequence[bytes], lengths: Sequence[int]) -> list[int]:
        """Let a sequence without blocks hold those with these keys that its next token sees, and empty ones in place of
        those that are not there: returns at which places, for `block` and `share`. As `extend` it raises ValueError."""
        lost = self._lost[number] = window_start(len(keys) * KV_BLOCK, self._window) // KV_BLOCK
        found = [self.pool.find(key) for key in keys[lost:]]
        for block in found:
            if block is not None:
                self.pool.hold(block)
        held = self._held[number] = []
        for at, block in enumerate(found):
            if block is None:
                try:
                    self._make_room(lengths)
                except ValueError:
                    held += [b for b in found[at:] if b is not None]
                    raise
            held.append(self.pool.take() if block is None else block)
        return [lost + at for at, block in enumerate(found) if block is None]

    def block(self, number: int, at: int) -> int:
        """A sequence's block number `at`, which it has."""
        return self._held[number][at - self._lost[number]]

    def own(self, number: int, at: int) -> int:
        """Let a sequence's block number `at`, which it has, be its own; as `BlockPool.own`."""
        held, at = self._held[number], at - self._lost[number]
        held[at] = self.pool.own(held[at])
        return held[at]

    @property
    def idle(self) -> tuple[int, ...]:
        """As `BlockPool.idle`."""
        return self.pool.idle

    def _make_room(self, lengths: Sequence[int]) -> None:
        """Let sequences leave blocks behind their windows until one is free: one that others have too frees nothing."""
        while not self.pool.room:
            spare = {
                number: window_start(lengths[number], self._window) // KV_BLOCK - self._lost[number]
                for number, held in enumerate(self._held)
                if held
            }
            number = max(spare, key=spare.__getitem__, default=None)
            if number is None or spare[number] <= 0:
                raise ValueError("there is no room for the windows of all sequences")
            self.pool.take_back(self._held[number])
            self._lost[number] += 1

    def cut_back(self, number: int, length: int) -> bool:
        """Forget a sequence's cells after the first `length`; whether what its next token sees is still there. Where it
        is not, nothing is left of the sequence."""
        there = self._lost[number] <= window_start(length, self._window) // KV_BLOCK
        if length and there:
            self.pool.resize(self._held[number], max(0, length - self.first(number)))
        else:
            self.pool.resize(self._held[number], 0)
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
