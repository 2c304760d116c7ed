"""Writes a model's packed file: read and packed by the pool that runs read with, written past the page cache."""

import ctypes
import errno
import mmap
import os
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from pshard.on_disk import BLOCK
from pshard.packed_file import NUMBERS, Contents, PackedTensor, make_ends
from pshard.quant import align
from pshard.runtime.kernels.cpu import native
from pshard.runtime.memory.disk.file_parts import FileParts, largest_read
from pshard.runtime.memory.disk.reader import AnyPiece, DiskReader, PieceList
from pshard.runtime.memory.weights import WeightSource
from pshard.tensor import TensorSpec

BUFFER = 16 << 20  # bytes that are written at once, while as many are read


def write_packed(source: WeightSource, contents: Contents, place: Path, progress: Callable[[int], None]) -> None:
    """Write the packed file of a model through a temporary one beside it: readers see a whole one or none. progress:
    gets the bytes done since last time. Raises OSError (full disk, read-only folder), RuntimeError where the model
    cannot be read, UserError without the C++ library; then, and after an interrupt, nothing is left."""
    handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            checks = _write_pieces(source, contents, Path(temporary), progress)
            head, end = make_ends(contents, checks)
            for data, at in ((end, contents.end), (head, 0)):
                file.seek(at)
                while data:
                    data = data[file.write(data) :]
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, place)
        _settle_folder(place.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _write_pieces(
    source: WeightSource, contents: Contents, path: Path, progress: Callable[[int], None]
) -> "array[int]":
    """Write all pieces; returns their checksums. One buffer is filled while the one before is written."""
    tensors = {t.name: t for unit in source.spec.units for t in unit.matrices}
    checks = array(NUMBERS, bytes(4 * contents.pieces))
    largest = max(map(largest_read, (tensors[t.name] for t in contents.tensors)), default=0)
    with closing(DiskReader(largest)) as reader, closing(_Output(path)) as output:
        parts = FileParts(reader, source, None)
        buffers = [_Buffer(reader, max(BUFFER, align(largest, BLOCK))) for _ in range(2)]
        filled: _Buffer | None = None
        for pieces in _list_batches(contents, tensors, parts, buffers[0].nbytes):
            buffers.reverse()
            buffers[0].fill(pieces)
            if filled:
                filled.write(output, checks, progress)
            filled = buffers[0]
        if filled:
            filled.write(output, checks, progress)
    return checks


# a piece, where it lies in the packed file, its bytes there, the number of its checksum
Placed = tuple[AnyPiece, int, int, int]


def _list_batches(
    contents: Contents, tensors: dict[str, TensorSpec], parts: FileParts, most: int
) -> Iterator[list[Placed]]:
    """Pieces that follow each other in the packed file, up to so many bytes of it."""
    batch = list[Placed]()
    for there, part in _list_parts(contents):
        tensor = tensors[there.name]
        found = parts.find(tensor, part if tensor.parts else None).list_pieces(tensor)
        for (piece, _), (at, nbytes, number) in zip(found, there.list_pieces(part), strict=True):
            if batch and at + align(nbytes, BLOCK) - batch[0][1] > most:
                yield batch
                batch = []
            batch.append((piece, at, nbytes, number))
    if batch:
        yield batch


def _list_parts(contents: Contents) -> Iterator[tuple[PackedTensor, int]]:
    """Matrices, and parts of stacks, in their order in the packed file."""
    starts = ((t.at + part * t.stride, i, part) for i, t in enumerate(contents.tensors) for part in range(t.parts))
    for _, i, part in sorted(starts):
        yield contents.tensors[i], part


class _Buffer:
    """Memory that a reader fills, and that is written then."""

    def __init__(self, reader: DiskReader, nbytes: int) -> None:
        self.nbytes, self._reader = nbytes, reader
        self._memory = mmap.mmap(-1, nbytes)  # at a page, as direct writes want it
        self._address = np.frombuffer(self._memory, np.uint8).ctypes.data
        self._batch, self._asked, self._list = list[Placed](), 0, PieceList([])

    def fill(self, batch: list[Placed]) -> None:
        """Start to read and pack pieces."""
        ctypes.memset(self._address, 0, self.nbytes)
        first = batch[0][1]
        self._batch, self._list = batch, PieceList([replace(piece, to=at - first) for piece, at, _, _ in batch])
        self._asked = self._reader.ask(self._list, self._address)

    def write(self, output: "_Output", checks: "array[int]", progress: Callable[[int], None]) -> None:
        """Wait for them, note their checksums, and write them."""
        self._reader.wait(self._asked)
        first, last = self._batch[0][1], self._batch[-1]
        for _, at, nbytes, number in self._batch:
            checks[number] = native.crc32c(self._address + at - first, nbytes)
        nbytes = align(last[1] + last[2], BLOCK) - first
        output.write(memoryview(self._memory)[:nbytes], first)
        progress(nbytes)


class _Output:
    """A file that is written past the page cache where its file system lets it; else what was written is dropped."""

    def __init__(self, path: Path) -> None:
        try:
            self._handle, self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._handle, self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC), False

    def write(self, data: memoryview, at: int) -> None:
        """Write whole blocks."""
        while data:
            done = os.pwrite(self._handle, data, at)
            data, at = data[done:], at + done
        if not self._direct:
            os.fdatasync(self._handle)
            os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)


def _settle_folder(folder: Path) -> None:
    """Have a rename outlive a loss of power, where the file system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
