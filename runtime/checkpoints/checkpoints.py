"""Checkpoints: what states that cannot be cut back were at some lengths of a sequence, in host memory.

Cutting a sequence back goes to the last checkpoint at or before the wanted length; the tokens behind it are computed
again. They are made where texts are likely to be cut: at the end of a prompt, before its last micro-batch (the same
prompt again needs its last token's logits), and every so many tokens. Others belong to prefixes that texts share: to
the key of the block at whose end they were made.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pshard.runtime.executor import Executor
from pshard.runtime.residents import Snapshot

CHECKPOINT_BYTES = 1 << 30  # of host memory, for those of all sequences
EVERY = 2048  # tokens


@dataclass(frozen=True)
class Checkpoint:
    """What all states that do not grow were after the first `length` tokens of a sequence."""

    length: int
    states: Snapshot


class Checkpoints:
    """Those of all sequences of an engine, alike on all ranks.

    Attributes:
        each: bytes of one on the rank that has most of it; 0 where every state can be cut back.
        most: how many are kept.
    """

    def __init__(self, executor: Executor, nbytes: int) -> None:
        """nbytes: of host memory, for the checkpoints of this rank. All ranks call it."""
        self._residents, self._device, group = executor.residents, executor.device, executor.group
        said = group.gather((executor.residents.fixed_nbytes, nbytes))
        self.each = max(each for each, _ in said)
        self.most = min(room for _, room in said) // self.each if self.each else 0
        self._kept: list[list[Checkpoint]] = [[] for _ in range(executor.states.sequences)]
        self._shared: OrderedDict[bytes, Snapshot] = OrderedDict()  # by the key of a block, the oldest first

    def last(self, number: int, length: int) -> int:
        """The length of a sequence's last checkpoint at or before `length`; 0 without one."""
        return max((c.length for c in self._kept[number] if c.length <= length), default=0)

    def all_of(self, number: int) -> tuple[Checkpoint, ...]:
        """A sequence's, by length."""
        return tuple(self._kept[number])

    def note(self, number: int, length: int, span: tuple[int, int], most: int) -> None:
        """Make one of a sequence that has so many tokens now, where it is due. span: from and to which length the new
        tokens reach, which come in micro-batches of at most so many."""
        if self.is_due(length, span, most, self.last(number, length)):
            self.keep(number, length)

    def is_due(self, length: int, span: tuple[int, int], most: int, last: int) -> bool:
        """Whether one is made at that length, of a sequence whose last one is of length `last`; span, most: see
        `note`."""
        start, end = span
        return bool(self.most) and ((end - start > 1 and end - length <= most) or length - last >= EVERY)

    def keep(self, number: int, length: int, states: Snapshot | None = None) -> None:
        """Make one of a sequence that has so many tokens now, or had when its states were these, if it has none; where
        there are too many, the one goes without which fewest tokens would have to be computed again."""
        kept = self._kept[number]
        if kept and kept[-1].length == length:
            return
        kept.append(self.take(number, length) if states is None else Checkpoint(length, states))
        while self._count() > self.most:
            if self._shared:
                self._shared.popitem(last=False)
                continue
            first = min(self._list_spare(kept[-1]), key=lambda found: found[0])
            self._kept[first[1]].pop(first[2])

    def _count(self) -> int:
        return len(self._shared) + sum(map(len, self._kept))

    @property
    def shared_nbytes(self) -> int:
        """Bytes of those that belong to blocks."""
        return len(self._shared) * self.each

    def has_shared(self, key: bytes) -> bool:
        """Whether there is one of the end of the block with that key."""
        return key in self._shared

    def share(self, number: int, length: int, key: bytes, states: Snapshot | None = None) -> None:
        """Keep what a sequence's states are now, or were at that length, at the end of the block with that key; the one
        that was used longest ago goes where there are too many."""
        if key in self._shared:
            self._shared.move_to_end(key)
        elif self.most > sum(map(len, self._kept)):
            self.put_shared(key, self.take(number, length).states if states is None else states)

    def put_shared(self, key: bytes, states: Snapshot) -> None:
        """Keep states of the end of the block with that key."""
        self._shared[key] = states
        while self._count() > self.most and self._shared:
            self._shared.popitem(last=False)

    def get_shared(self, key: bytes) -> Snapshot:
        """The states at the end of the block with that key, of which `has_shared` was true."""
        return self._shared[key]

    def adopt(self, number: int, length: int, key: bytes, states: Snapshot | None = None) -> None:
        """Make a sequence's states those at the end of the block with that key: these, or of which `has_shared` was
        true."""
        if states is None:
            self._shared.move_to_end(key)
            states = self._shared[key]
        else:
            self.put_shared(key, states)
        self.put(number, Checkpoint(length, states))

    def _list_spare(self, newest: Checkpoint) -> list[tuple[int, int, int]]:
        """(tokens since the one before it, sequence, place) of all but the newest."""
        return [
            (one.length - (kept[i - 1].length if i else 0), number, i)
            for number, kept in enumerate(self._kept)
            for i, one in enumerate(kept)
            if one is not newest
        ]

    def read(self, number: int, units: Collection[str]) -> Snapshot:
        """What a sequence's states of these units are now."""
        self._device.synchronize()
        return self._residents.read_fixed(number, units)

    def take(self, number: int, length: int) -> Checkpoint:
        """What a sequence's states are now."""
        self._device.synchronize()
        return Checkpoint(length, self._residents.read_fixed(number))

    def go_back(self, number: int, length: int) -> None:
        """Forget a sequence's checkpoints above a length, and make the states those of the last one where it is of that
        length."""
        kept = self._kept[number]
        kept[:] = [one for one in kept if one.length <= length]
        if kept and kept[-1].length == length:
            self.put(number, kept[-1])

    def put(self, number: int, one: Checkpoint) -> None:
        """Make the states of a sequence those of a checkpoint."""
        self._device.synchronize()
        with self._device.current(), self._device.computing():
            self._residents.write_fixed(number, one.states)

    def up_to(self, number: int, length: int) -> list[Checkpoint]:
        """A sequence's below its length, and one of all that it has: what a file of it holds."""
        below = [one for one in self._kept[number] if one.length < length]
        return [*below, self.take(number, length)] if self.each and length else []

    def replace(self, number: int, found: Sequence[Checkpoint]) -> None:
        """Let a sequence be at the last of these, and have them all, or the last ones where there is no room."""
        if found:
            self.put(number, found[-1])
        self._kept[number].clear()
        while self._shared and self._count() + len(found) > self.most:
            self._shared.popitem(last=False)
        room = self.most - self._count()
        self._kept[number][:] = found[max(0, len(found) - room) :] if room > 0 else []

    @property
    def in_words(self) -> tuple[str, ...]:
        """A note on what they take; none where there are none."""
        if not self.each:
            return ()
        size = f"{self.each / (1 << 20):.3g} MiB"
        if not self.most:
            return (f"states of {size} a sequence cannot be cut back: a text that is cut is computed again",)
        return (
            f"states of {size} a sequence cannot be cut back: up to {self.most} checkpoints of them are kept in host "
            f"memory ({self.most * self.each >> 20} MiB), at the ends of prompts and every {EVERY} tokens",
        )
