"""Blocks of prefixes in host memory and in files, for when the KV cache has dropped them, or another process asks."""

import contextlib
import queue
import threading
import time
from collections import OrderedDict
from pathlib import Path

from pshard.jsonio import STALE_SECONDS, write_bytes_atomically
from pshard.runtime.texts.block_record import BlockRecord, encode_record, read_names, read_record

SUFFIX = ".block"


class PrefixFiles:
    """One file a block, named by its key, in a folder that several processes may use; and the blocks used last in host
    memory. A thread writes: a file is there whole or not at all. Files that were used longest ago go where there are
    more bytes than the budget, in memory likewise.

    Attributes:
        problem: why a file could not be written, the last time; None.
        nbytes: of host memory taken now.
    """

    def __init__(self, folder: Path, file_bytes: int, memory_bytes: int) -> None:
        """Makes the folder, for its owner only: files tell what was asked. Raises OSError."""
        self._folder, self._file_bytes, self._memory_bytes = folder, file_bytes, memory_bytes
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.problem: str | None = None
        self.nbytes = 0
        self._lock = threading.Lock()
        self._records: OrderedDict[bytes, BlockRecord] = OrderedDict()  # the one used longest ago first
        self._unwritten: set[bytes] = set()
        self._queue: queue.SimpleQueue[BlockRecord | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="prefix-files", daemon=True)
        self._thread.start()

    def names(self, key: bytes) -> frozenset[str]:
        """Which parts of a block there are."""
        with self._lock:
            record = self._records.get(key)
        if record is not None:
            return frozenset(record.parts)
        try:
            with open(self._path(key), "rb") as file:
                return read_names(file, key)
        except OSError:
            return frozenset()

    def get(self, key: bytes) -> BlockRecord | None:
        """A block, checked. One whose file is damaged is gone then."""
        with self._lock:
            record = self._records.get(key)
            if record is not None:
                self._records.move_to_end(key)
        path = self._path(key)
        if record is None:
            try:
                with open(path, "rb") as file:
                    record = read_record(file, key)
            except OSError:
                return None
            if record is None:
                path.unlink(missing_ok=True)
        if record is not None:
            with contextlib.suppress(OSError):
                path.touch()  # used just now
        return record

    def has_room(self, nbytes: int) -> bool:
        """Whether host memory for a block of so many bytes can be had now: what is not written yet stays."""
        with self._lock:
            held = sum(self._records[key].nbytes for key in self._unwritten)
        return held + nbytes <= self._memory_bytes

    def put(self, record: BlockRecord) -> None:
        """Keep a block, for which there is room, and have it written."""
        with self._lock:
            old = self._records.pop(record.key, None)
            self.nbytes += record.nbytes - (old.nbytes if old else 0)
            self._records[record.key] = record
            self._unwritten.add(record.key)
            self._drop_from_memory()
        self._queue.put(record)

    def drop(self, key: bytes) -> None:
        """Keep a block no longer."""
        with self._lock:
            record = self._records.pop(key, None)
            self.nbytes -= record.nbytes if record else 0
            self._unwritten.discard(key)
        self._path(key).unlink(missing_ok=True)

    def _drop_from_memory(self) -> None:
        for key in [key for key in self._records if key not in self._unwritten]:
            if self.nbytes <= self._memory_bytes:
                return
            self.nbytes -= self._records.pop(key).nbytes

    @property
    def is_writing(self) -> bool:
        """Whether there is a thread that makes room in memory."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Wait until all is written. May be called twice."""
        self._queue.put(None)
        self._thread.join()

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}{SUFFIX}"

    def _write_all(self) -> None:
        """The thread."""
        held = self._measure_folder()
        while (record := self._queue.get()) is not None:
            if not self._is_wanted(record):
                continue
            data = encode_record(record)
            try:
                if len(data) <= self._file_bytes:
                    if held + len(data) > self._file_bytes:
                        held = self._make_room(len(data))
                    write_bytes_atomically(self._path(record.key), data)
                    held += len(data)
                    self.problem = None
            except OSError as error:
                self.problem = f"cannot write {self._folder}: {error.strerror}"
            if not self._has(record.key):
                self._path(record.key).unlink(missing_ok=True)  # dropped meanwhile
            with self._lock:
                if self._records.get(record.key) is record:
                    self._unwritten.discard(record.key)
                self._drop_from_memory()

    def _has(self, key: bytes) -> bool:
        with self._lock:
            return key in self._records

    def _is_wanted(self, record: BlockRecord) -> bool:
        """Whether it was neither dropped nor replaced."""
        with self._lock:
            return self._records.get(record.key) is record

    def _measure_folder(self) -> int:
        """Bytes of all blocks; what a process left that was killed while it wrote is removed."""
        for path in self._folder.glob(".*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()
        return sum(nbytes for _, nbytes, _ in self._list_files())

    def _list_files(self) -> list[tuple[float, int, Path]]:
        """When each was used last, its bytes, and its path."""
        found = []
        for path in self._folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):  # another process has removed it
                stat = path.stat()
                found.append((stat.st_mtime, stat.st_size, path))
        return found

    def _make_room(self, nbytes: int) -> int:
        """Remove files, those used longest ago first, until so many bytes more fit with some to spare; returns the
        bytes that are left."""
        files = sorted(self._list_files())
        held = sum(size for _, size, _ in files)
        for _, size, path in files:
            if held + nbytes <= self._file_bytes - self._file_bytes // 16:
                break
            path.unlink(missing_ok=True)
            held -= size
        return held
