"""The pool of threads that reads a model's files past the page cache (csrc/threads/reader.cpp)."""

import ctypes
import errno
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pshard.errors import UserError
from pshard.on_disk import BLOCK, PIECE
from pshard.runtime.kernels.cpu import native
from pshard.runtime.memory.disk.fake_disk import FAULTS, read_fake_disk

DEPTH = 16  # reads under way at once
SLOTS = 64  # of a piece each
PATIENCE = 60.0  # seconds without an answer, then the step fails
LEAVE = 5.0  # seconds that closing waits for reads that do not come back
_COPY, _SKIP, _PACKED = -1, -2, -3  # types of pieces, as csrc/threads/reader.cpp has them
_NBYTES, TO, _FROM = 2, 7, 8  # which of a piece's words say what
_UNCHECKED = -1


@dataclass(frozen=True)
class Piece:
    """What one read brings, and where it goes in its job: `rows` of a matrix of type `qtype`, whole records of them;
    "" reads and throws away. to: bytes from the job's beginning. factor: what its weights are multiplied by, and where
    in each record that is written; None: nowhere."""

    file: int
    offset: int
    nbytes: int
    to: int = 0
    qtype: str = ""
    rows: int = 0
    cols: int = 0
    factor: tuple[int, float] | None = None

    @property
    def words(self) -> tuple[int, ...]:
        """As the C++ library reads it."""
        kind = native.type_number(self.qtype) if self.qtype else _SKIP
        row_bytes = self.nbytes // self.rows if self.rows else 0
        at, factor = self.factor or (-1, 0.0)
        bits = int.from_bytes(bytes(ctypes.c_float(factor)), "little")
        matrix = (kind, self.rows, self.cols, row_bytes)
        return (self.file, self.offset, self.nbytes, *matrix, self.to, 0, at, bits, _UNCHECKED)


@dataclass(frozen=True)
class KeptPiece:
    """Bytes that lie in host memory, at an address."""

    address: int
    nbytes: int
    to: int

    @property
    def words(self) -> tuple[int, ...]:
        """As the C++ library reads it."""
        return (0, 0, self.nbytes, _COPY, 0, 0, 0, self.to, self.address, -1, 0, _UNCHECKED)


@dataclass(frozen=True)
class PackedPiece:
    """Bytes of a packed file, with their CRC32C, which is looked at when they are first read."""

    file: int
    offset: int
    nbytes: int
    check: int
    to: int = 0

    @property
    def words(self) -> tuple[int, ...]:
        """As the C++ library reads it."""
        return (self.file, self.offset, self.nbytes, _PACKED, 0, 0, 0, self.to, 0, -1, 0, self.check)


AnyPiece = Piece | KeptPiece | PackedPiece


class PieceList:
    """The pieces of a job, ready to be asked for again and again.

    table: int64 [pieces, words], as the C++ library reads them.
    """

    def __init__(self, pieces: Sequence[AnyPiece], table: np.ndarray | None = None) -> None:
        """table: instead of pieces; contiguous."""
        self.table = np.array([piece.words for piece in pieces], np.int64) if table is None else table
        self.words, self.count = self.table.ctypes.data_as(ctypes.c_void_p), len(self.table)  # which keeps the table


def copy_instead(table: np.ndarray, addresses: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """The table of pieces of which some are not read but copied from memory, where they lie as they are used.
    addresses, nbytes: int64 [pieces], where they lie (0: nowhere), and so many bytes."""
    found, here = table.copy(), addresses > 0
    found[here] = KeptPiece(0, 0, 0).words
    found[here, _NBYTES], found[here, TO], found[here, _FROM] = nbytes[here], table[here, TO], addresses[here]
    return found


class RowPieces:
    """The pieces of a job that brings rows of a table as the file has them, one behind the other."""

    def __init__(self, files: np.ndarray, starts: np.ndarray, nbytes: int) -> None:
        """files, starts: int64 [rows], the file of each, and where it begins there; nbytes: of each."""
        words = np.zeros((len(starts), len(PackedPiece(0, 0, 0, 0).words)), np.int64)
        words[:] = PackedPiece(0, 0, nbytes, _UNCHECKED).words
        words[:, 0], words[:, 1], words[:, TO] = files, starts, np.arange(len(starts)) * nbytes
        self.words, self.count = words.ctypes.data_as(ctypes.c_void_p), len(starts)  # which keeps the words


class DiskReader:
    """Reads pieces of files. Where a file system refuses O_DIRECT, what was read is dropped from the page cache.
    PSHARD_DISK makes up a disk instead.

    Attributes:
        is_direct: whether all files are read past the page cache; notes: a line for each that is not.
        nbytes: of host memory that it takes; run: the address of the C function that is called with a job.
    """

    def __init__(self, largest: int = PIECE, depth: int = DEPTH, patience: float = PATIENCE) -> None:
        """largest: bytes of the largest piece. Raises UserError without the C++ library."""
        if not native.is_available():
            raise UserError(f"weights on disk need the C++ library ({native.why_missing()}); run pshard doctor")
        self._functions, self._fake = native.functions_of("reader"), read_fake_disk()
        slot = -(-max(PIECE, largest) // BLOCK + -2) * BLOCK  # a piece may begin and end within a block
        self.nbytes = SLOTS * slot
        fake = (0.0, 0.0, 0.0, 0, 0)
        if f := self._fake:
            fake = (f.rate, f.latency, f.jitter, FAULTS.index(f.fault), f.fault_at)
        self._reader: int | None = self._functions["open"](depth, SLOTS, slot, *fake, patience)
        if not self._reader:
            raise UserError(f"{self.nbytes >> 20} MiB for reads from disk cannot be had; raise --ram, or free some")
        self._open: list[int] = []
        self.is_direct, self.notes = True, tuple[str, ...]()
        self.run = self._functions["run"]

    def add_file(self, path: Path) -> int:
        """The number of a file from here on. Raises UserError where it cannot be opened."""
        direct = self._fake is None
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise UserError(f"{path}: cannot be read from disk ({error.strerror}); give another file") from None
            direct, self.is_direct = False, False
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            line = f"{path}: the file system refuses direct reads: they go through the page cache, and are slower"
            self.notes = (*self.notes, line)
        self._open.append(handle)
        size = os.fstat(handle).st_size
        return self._functions["file"](self._reader, handle, int(direct), size, os.fsencode(path))

    def submit(self, pieces: PieceList, to: int) -> int:
        """Ask for pieces whose place begins at the address `to`. Returns the job, which must be run once: its place may
        be written to from then on, and is full when `run` returns."""
        return self._functions["submit"](self._reader, pieces.words, pieces.count, to)

    def ask(self, pieces: PieceList | RowPieces, to: int) -> int:
        """Ask for pieces whose place, which begins at the address `to`, is free now: they come before all that is read
        ahead. Returns a number for `wait`, until which `pieces` must live."""
        return self._functions["ask"](self._reader, pieces.words, pieces.count, to)

    def wait(self, number: int) -> None:
        """Until what was asked for is there. Raises RuntimeError where a read has failed."""
        self._functions["wait"](self._reader, number)
        self.check()

    def read(self, jobs: Iterable[PieceList]) -> None:
        """Read pieces that are thrown away; all are asked for before the first is waited for."""
        for job in [self.submit(pieces, 0) for pieces in jobs]:
            self.run(job)
        self.check()

    @property
    def address(self) -> int:
        """What the C++ library calls the reader."""
        assert self._reader is not None, "it is closed"
        return self._reader

    @property
    def read_bytes(self) -> int:
        """Of pieces that were read since the start."""
        return self._functions["bytes"](self._reader)

    @property
    def waited(self) -> tuple[int, float]:
        """Bytes that were read while somebody waited for a job, and the seconds of that, since the start."""
        seconds = ctypes.c_double()
        return self._functions["waited"](self._reader, ctypes.addressof(seconds)), seconds.value

    def check(self) -> None:
        """Raise RuntimeError that names file, place and error where a read has failed: nothing is read after that."""
        why = ctypes.create_string_buffer(1 << 13)
        if self._functions["failure"](self._reader, why, len(why)):
            raise RuntimeError(os.fsdecode(why.value))

    def cancel(self) -> None:
        """Ask for nothing more; the pieces under way end."""
        self._functions["cancel"](self._reader)

    def close(self) -> None:
        """End the threads; reads that do not come back are left to the end of the process."""
        if self._reader:
            self._functions["cancel"](self._reader)
            self._functions["close"](self._reader, LEAVE)
            self._reader = None
            for handle in self._open:
                os.close(handle)
