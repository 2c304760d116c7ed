"""Prefixes of texts that were computed before: in the KV cache, in host memory, in files. Finds them, lets texts take
them up, and keeps those that texts make."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pshard.errors import UserError
from pshard.runtime.checkpoints.checkpoints import Checkpoints
from pshard.runtime.executor import Executor
from pshard.runtime.residents import Snapshot
from pshard.runtime.texts.block_copies import BlockCopies
from pshard.runtime.texts.block_keys import list_keys
from pshard.runtime.texts.block_record import BlockRecord
from pshard.runtime.texts.prefix_files import PrefixFiles
from pshard.runtime.texts.text import Text
from pshard.runtime.texts.text_blocks import TextBlocks
from pshard.units.kv_cells import KV_BLOCK, window_start

SHARE_OF_STEP = 0.05  # of a step's time, for copies of blocks that are to be kept


@dataclass(frozen=True)
class KnownBlock:
    """A block of a wanted prefix: its key, that of the block before, its tokens, and which parts of a record there
    are, wherever."""

    key: bytes
    parent: bytes
    ids: tuple[int, ...]
    names: frozenset[str]


class PrefixCache:
    """Those of one engine; ranks make the same calls, and take up the same."""

    def __init__(self, copies: BlockCopies, executor: Executor, blocks: TextBlocks, checkpoints: Checkpoints) -> None:
        self._blocks, self._checkpoints = blocks, checkpoints
        self._copies, self._group = copies, executor.group
        self._window = executor.spec.config.window if blocks.recent else 0
        self._files: PrefixFiles | None = None
        self._until = 0.0  # on the clock: cells are read so long
        self._waiting: OrderedDict[bytes, tuple[bytes, tuple[int, ...]]] = OrderedDict()  # to be copied, by key

    def keep_in(self, folder: Path, file_bytes: int, memory_bytes: int) -> None:
        """From now on blocks are kept in files too, and found there. Raises UserError."""
        self.finish()
        each = sum(self._copies.sizes.values())
        if memory_bytes < 2 * each:
            raise UserError(
                f"the prefix cache may take {memory_bytes >> 20} MiB of host memory, and a block of this model takes "
                f"{each / (1 << 20):.3g} MiB: give it room for two, or no files"
            )
        try:
            self._files = PrefixFiles(folder, file_bytes, memory_bytes)
        except OSError as error:
            raise UserError(
                f"cannot keep the prefix cache in {folder}: {error.strerror}; give another folder"
            ) from None

    @property
    def is_kept(self) -> bool:
        """Whether blocks are kept in files."""
        return self._files is not None

    @property
    def problem(self) -> str | None:
        """Why a file could not be written, the last time."""
        return self._files.problem if self._files else None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that kept blocks take."""
        return self._files.nbytes if self._files else 0

    # --- taking up ----------------------------------------------------------------------------------------------

    def take_up(self, text: Text, root: bytes, ids: Sequence[int], seconds: float) -> int:
        """Let an empty text have the longest known prefix of these tokens, all but the last one, of which cells can be
        read in so many seconds; returns of how many blocks the cells were known."""
        self._until = time.monotonic() + seconds
        known = self._find(root, ids)
        n = self._agree(known, len(known))
        if not n:
            return len(known)
        filled = self._fill_cells(text, known[:n])
        n = self._agree(known, filled)
        if n and not self._take_window(text, known[:n]):
            n = 0
        states = None
        if n and self._checkpoints.each and not self._checkpoints.has_shared(known[n - 1].key):
            states = self._load_states(known[n - 1])
            n = n if states is not None else 0
        if not n and self._blocks.recent:
            self._blocks.recent.cut_back(text.number, 0)
        self._blocks.pool.resize(text.blocks, n * KV_BLOCK)
        text.ids[:], text.keys[:] = ids[: n * KV_BLOCK], [one.key for one in known[:n]]
        text.cached = text.committed = len(text.ids)
        if n and self._checkpoints.each:
            self._checkpoints.adopt(text.number, n * KV_BLOCK, known[n - 1].key, states)
        return len(known)

    def _find(self, root: bytes, ids: Sequence[int]) -> list[KnownBlock]:
        """The blocks, from the first on, whose cells are known."""
        found, parent = [], root
        for at, key in enumerate(list_keys(root, ids, len(ids) - 1)):
            names = self._names(key)
            if "cells" not in names:
                break
            found.append(KnownBlock(key, parent, tuple(ids[at * KV_BLOCK : (at + 1) * KV_BLOCK]), names))
            parent = key
        return found

    def _names(self, key: bytes) -> frozenset[str]:
        recent, names = self._blocks.recent, set[str]()
        if self._blocks.pool.find(key) is not None:
            names.add("cells")
        if not recent or recent.find(key) is not None:
            names.add("window")
        if not self._checkpoints.each or self._checkpoints.has_shared(key):
            names.add("states")
        if len(names) < 3 and self._files is not None:
            names |= self._files.names(key)
        return frozenset(names)

    def _agree(self, known: Sequence[KnownBlock], most: int) -> int:
        """How many of the first `most` blocks every rank can take up."""
        while True:
            while most and not self._fits(known, most):
                most -= 1
            said = self._said_by_all(most)
            if min(said) == max(said):  # which all see at once
                return most
            most = min(said)

    def _said_by_all(self, value: int) -> list[int]:
        """What every rank says. What is in memory is alike on all; what is in files may not be."""
        if self._files is None or self._group.size == 1:
            return [value]
        return self._group.gather(value)

    def _fits(self, known: Sequence[KnownBlock], n: int) -> bool:
        """Whether windows and states at the end of n blocks are known."""
        first = window_start(n * KV_BLOCK, self._window) // KV_BLOCK
        return "states" in known[n - 1].names and all("window" in one.names for one in known[first:n])

    def _fill_cells(self, text: Text, known: Sequence[KnownBlock]) -> int:
        """Let a text hold these blocks, those that are not in the KV cache filled with what was kept; how many, as
        far as that goes."""
        pool = self._blocks.pool
        there = [pool.find(one.key) for one in known]
        for block in there:
            if block is not None:
                pool.hold(block)  # before any is dropped for those that lack
        for at, (one, block) in enumerate(zip(known, there)):
            if block is None:
                block = self._load_cells(one) if pool.room else None
            if block is None:
                for other in there[:at:-1]:
                    if other is not None:
                        pool.leave(other)
                return at
            text.blocks.append(block)
        return len(known)

    def _load_cells(self, one: KnownBlock) -> int | None:
        """A new block with kept cells and its key; None where they can't be had on every rank."""
        in_time = time.monotonic() < self._until  # rank by rank; the first one that is late ends it for all
        record = self._load(one, "cells", in_time)
        if record is None:
            return None
        block = self._blocks.pool.take()
        self._copies.write(block, record.parts["cells"])
        return self._blocks.pool.share(block, one.key)

    def _load(self, one: KnownBlock, name: str, in_time: bool = True) -> BlockRecord | None:
        """A kept block that has a part, when every rank has it in time, whole and of these tokens."""
        record = self._files.get(one.key) if self._files and in_time else None
        if record is not None and not self._is_right(record, one):
            self.forget(one.key)  # so that it is written anew
            record = None
        if record is not None and name not in record.parts:
            record = None
        return record if all(self._said_by_all(int(record is not None))) else None

    def _is_right(self, record: BlockRecord, one: KnownBlock) -> bool:
        """Whether a record stands for these tokens, and has as many bytes as the model's layers."""
        sizes = self._copies.sizes
        return record.is_of(one.parent, one.ids) and all(len(p) == sizes[name] for name, p in record.parts.items())

    def _take_window(self, text: Text, known: Sequence[KnownBlock]) -> bool:
        """Let a text have the blocks of layers with a window; whether that went well."""
        recent = self._blocks.recent
        if not recent:
            return True
        try:
            lacking = recent.adopt(text.number, [one.key for one in known], self._blocks.committed)
        except ValueError:
            return False
        for at in lacking:
            record = self._load(known[at], "window")
            if record is None:
                return False
            self._copies.write(recent.block(text.number, at), record.parts["window"], window=True)
            recent.share(text.number, at, known[at].key)
        return True

    def _load_states(self, one: KnownBlock) -> Snapshot | None:
        record = self._load(one, "states")
        return None if record is None else self._copies.make_states(record.parts["states"])

    # --- keeping ------------------------------------------------------------------------------------------------

    def offer(self, key: bytes, parent: bytes, ids: Sequence[int]) -> None:
        """A block has its key now, or more is known of it: it is to be kept."""
        if self._files is not None:
            self._waiting[key] = parent, tuple(ids)
            self._waiting.move_to_end(key)
            while len(self._waiting) > self._blocks.pool.blocks:  # as many cannot be there
                self._waiting.popitem(last=False)

    def keep_some(self, seconds: float) -> bool:
        """Copy blocks that wait for it to host memory, from where a thread writes them: one, and more while there is
        time. Whether others could be copied now."""
        end = time.monotonic() + seconds
        while self._waiting and self._files is not None:
            key, (parent, ids) = next(iter(self._waiting.items()))
            block = self._blocks.pool.find(key)
            lacking = self._list_lacking(key) if block is not None else ()
            if block is not None and lacking:
                if not self._files.has_room(sum(self._copies.sizes[name] for name in lacking)):
                    return False  # the thread has not written enough of the others
                self._files.put(BlockRecord(key, parent, ids, self._copy(key, block, lacking)))
            del self._waiting[key]
            if lacking and time.monotonic() >= end:
                break
        return bool(self._waiting)

    def _list_lacking(self, key: bytes) -> tuple[str, ...]:
        """The parts of a block that are known now, where some of them are not kept yet."""
        assert self._files is not None
        recent, names = self._blocks.recent, ["cells"]
        if recent and recent.find(key) is not None:
            names.append("window")
        if self._checkpoints.each and self._checkpoints.has_shared(key):
            names.append("states")
        return () if self._files.names(key) >= set(names) else tuple(names)

    def _copy(self, key: bytes, block: int, names: Sequence[str]) -> dict[str, bytes]:
        parts = {"cells": self._copies.read(block)}
        if "window" in names and self._blocks.recent:
            found = self._blocks.recent.find(key)
            assert found is not None
            parts["window"] = self._copies.read(found, window=True)
        if "states" in names:
            parts["states"] = self._copies.read_states(self._checkpoints.get_shared(key))
        return parts

    def forget(self, key: bytes) -> None:
        """A block is not to be kept after all."""
        self._waiting.pop(key, None)
        if self._files is not None:
            self._files.drop(key)

    def finish(self) -> None:
        """Copy all that waits, and wait until it is written. Nothing is kept afterwards."""
        if self._files is not None:
            while self._waiting and self._files.is_writing:
                if not self.keep_some(1.0):
                    time.sleep(0.01)  # the thread makes room
            self._files.close()
            self._files = None
