"""Where tensors lie in files: what the GGUF and the safetensors reader have in common."""

import contextlib
import errno
import mmap
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import NoReturn

import numpy as np

from pshard.errors import UserError
from pshard.jsonio import open_regular
from pshard.quant import QUANT_TYPES, align, file_nbytes

try:
    import resource
except ImportError:  # where there are no such limits
    resource = None  # type: ignore[assignment]

RAW = {"U8": 1, "I32": 4, "I64": 8, "F8_E4M3": 1}  # bytes of types that only their reader understands
MOST_FILES = 1 << 16  # open at once
FETCH_AGAIN, ANOTHER = "fetch it again", "take another file or model"  # what whoever has such a file can do
MISSING = "a GGUF file, a folder, or a model of the Hub as ORG/REPO:QUANT; pshard models lists those that are here"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def allow_many_files() -> None:
    """Have the system let this process hold more open files, where it has a right to more than it is given: each part
    of a model takes one as long as it is mapped, and each client of a server."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_there(path: Path) -> None:
    """Raise UserError where there is no such file or folder."""
    if not path.exists():
        raise UserError(f"{path}: there is no such file; give {MISSING}")


class MappedFile:
    """A file that is read in parts. Each is copied, until `map`: then arrays are the file's own pages."""

    _map: mmap.mmap | None = None
    leaves_no_cache = False  # whether what is forgotten leaves the system's cache too: set before `map`

    def __init__(self, path: Path, advice: str) -> None:
        """Raises UserError when the file cannot be opened or is empty. advice: what to do when there is none."""
        self.path = path
        try:
            self._file = open_regular(path)
            self._opened = os.fstat(self._file.fileno())
        except FileNotFoundError:
            raise UserError(f"{path}: there is no such file; {advice}") from None
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise UserError(
                    f"{path}: cannot be read beside so many other files; raise the limit of open files (ulimit -n)"
                ) from None
            raise UserError(
                f"{path}: cannot be read ({error.strerror}); give another file, or let it be read"
            ) from None
        self.nbytes = self._opened.st_size
        if not self.nbytes:
            self.close()
            raise UserError(f"{path}: the file is empty; {FETCH_AGAIN}")

    def map(self, guard: Callable[[int, int], None], unguard: Callable[[int], None]) -> None:
        """Map the file read-only: what is read from here on is not copied.

        guard: called with address and bytes of the mapping, has pages read as zeros that vanish with the file's end;
        unguard: called with the address when it is unmapped. Reading anew asks `check_unchanged`.
        """
        if self._map is not None:
            return
        self.check_unchanged()
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        if not self.leaves_no_cache:
            self._file.close()  # the mapping has a handle of its own
        address = np.frombuffer(self._map, np.uint8).ctypes.data
        guard(address, len(self._map))
        self._unguard = weakref.finalize(self._map, unguard, address)

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        """u8 [nbytes], read-only: of the mapping, without a copy, or else copied. Raises UserError where the file has
        become shorter."""
        if self._map is not None:
            return np.frombuffer(self._map, np.uint8, nbytes, offset)
        return np.frombuffer(self.copy(offset, nbytes), np.uint8)

    def copy(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the file, copied, as far as it has them. Raises UserError where it has become shorter."""
        pieces, at, end = [], offset, min(offset + nbytes, self.nbytes)
        if self._map is not None:
            return self._map[offset:end]
        while at < end:
            pieces.append(os.pread(self._file.fileno(), min(end - at, 1 << 30), at))
            at += len(pieces[-1])
            if not pieces[-1]:
                self._fail_changed()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def check_pointer(self) -> None:
        """Raises UserError for what a clone has without Git LFS: a few lines that stand for a file."""
        if self.copy(0, len(_LFS_POINTER)) == _LFS_POINTER:
            what = "a pointer of Git LFS, not the file that it stands for"
            raise UserError(f"{self.path}: {what}; fetch that with git lfs pull, or download the model")

    def check_unchanged(self) -> None:
        """Raises UserError when the file is not what was opened: cut short, or written to."""
        now = os.fstat(self._file.fileno()).st_size if self._map is None else self._map.size()
        if now != self.nbytes:
            self._fail_changed()
        with contextlib.suppress(OSError):  # that name is gone: what was opened is still whole
            at_name = os.stat(self.path)
            same = (at_name.st_dev, at_name.st_ino) == (self._opened.st_dev, self._opened.st_ino)
            if same and at_name.st_mtime_ns != self._opened.st_mtime_ns:
                self._fail_changed()

    def _fail_changed(self) -> NoReturn:
        what = "was cut short or written to while it was read"
        raise UserError(f"{self.path}: {what}; start again when the file is whole") from None

    def expect(self, offset: int, nbytes: int) -> None:
        """Have the system read a part that will be asked for soon, and return at once."""
        if self._map is not None and hasattr(mmap, "MADV_WILLNEED"):
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, start, offset + nbytes - start)

    def forget(self, offset: int, nbytes: int) -> None:
        """Let go of the pages of a part that was read: they no longer count as this process's, and are fetched again
        when they are touched. Raises UserError when the file is not what was opened."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, offset + nbytes - start)
        if self.leaves_no_cache and hasattr(os, "posix_fadvise"):  # unmapping alone leaves all of it there
            os.posix_fadvise(self._file.fileno(), offset, nbytes, os.POSIX_FADV_DONTNEED)
        self.check_unchanged()

    def close(self) -> None:
        """Unmap the file; arrays still in use keep it mapped until they are gone."""
        self._file.close()
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()
                self._unguard()


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: shape in NumPy order (outputs, inputs) and the absolute offset of its first byte.

    `qtype` may name a type that pshard cannot use; then nothing is known about its size. `slabs`: a tensor that does
    not lie in one piece is these, one below the other; `file` and `offset` are then those of the first. `factors`:
    what the file says all weights are multiplied by, or those of each index of the leading dimension; none: 1.
    """

    name: str
    qtype: str
    shape: tuple[int, ...]
    file: MappedFile
    offset: int
    slabs: tuple["StoredTensor", ...] = ()
    factors: tuple[float, ...] = ()

    def factor(self, number: int = 0) -> float:
        """What the weights are multiplied by, of the leading dimension's index `number` where each has its own."""
        if self.slabs:
            return self.slabs[number].factor()
        return self.factors[number if len(self.factors) > 1 else 0] if self.factors else 1.0

    @property
    def nbytes(self) -> int:
        """Bytes in the file. Raises KeyError for an unknown quant type."""
        if self.qtype in RAW:
            return prod(self.shape) * RAW[self.qtype]
        rows = prod(self.shape[:-1])
        return file_nbytes(self.qtype, rows, self.shape[-1])

    def read(self) -> np.ndarray:
        """u8 [nbytes], read-only: mapped, or put together from the slabs."""
        if not self.slabs:
            return self.file.view(self.offset, self.nbytes)
        whole = np.concatenate([slab.read() for slab in self.slabs])
        whole.flags.writeable = False
        return whole

    def expect(self) -> None:
        """Have the system read it while something else is done."""
        for slab in self.slabs:
            slab.expect()
        if not self.slabs:
            self.file.expect(self.offset, self.nbytes)

    def forget(self) -> None:
        """Let go of the pages that reading took."""
        for slab in self.slabs:
            slab.forget()
        if not self.slabs:
            self.file.forget(self.offset, self.nbytes)

    def slab(self, number: int) -> "StoredTensor":
        """What the leading dimension's index `number` selects."""
        if self.slabs:
            return self.slabs[number]
        one = replace(self, shape=self.shape[1:], factors=(self.factor(number),) if self.factors else ())
        return replace(one, offset=self.offset + number * one.nbytes)

    def run(self, first: int, end: int) -> "StoredTensor":
        """What the leading dimension's indexes from `first` on select, as many of those before `end` as lie in one
        piece: one at least."""
        if end - first == 1 or self.slabs or type(self) is not StoredTensor:  # others make their bytes
            return self.slab(first)
        one = self.slab(first)
        return replace(one, shape=((end - first) * one.shape[0], *one.shape[1:]))

    def runs(self) -> tuple["StoredTensor", ...]:
        """What lies in files as it is used, one below the other: the tensor itself, or several; none where its bytes
        are made."""
        return (self,) if type(self) is StoredTensor and not self.slabs else ()

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raises UserError when the tensor has another shape."""
        if self.shape != shape:
            self.fail(f"has shape {list(self.shape)}, not the {list(shape)} that the model's configuration says")

    def check_type(self) -> None:
        """Raises UserError when pshard cannot use the tensor's type."""
        if self.qtype not in QUANT_TYPES:
            self.fail(f"has type {self.qtype}, which is not supported; supported: {', '.join(QUANT_TYPES)}")

    def check_blocks(self) -> None:
        """Raises UserError when the tensor's rows are not whole blocks of its type."""
        block = QUANT_TYPES[self.qtype].block
        if self.shape[-1] % block:
            self.fail(f"has rows of {self.shape[-1]} weights, which {self.qtype} blocks of {block} do not divide")

    def fail(self, what: str, advice: str = ANOTHER) -> NoReturn:
        """Raise a UserError that names file and tensor, and says what to do."""
        raise UserError(f"{self.file.path}: tensor {self.name} {what}; {advice}")


def check_layout(
    file: MappedFile, header: int, extents: Iterable[tuple[StoredTensor, int]], alignment: int = 1
) -> None:
    """Raises UserError unless tensors fill a file from the header's end to its own: in this order, each of so many
    bytes, each at the next multiple of `alignment`, with zeros between them; only the last padding may be missing.

    A type, shape, offset or length that is wrong leaves a gap, an overlap or weights as padding, and only so it shows.
    """
    end, last = header, "the header"
    for tensor, nbytes in extents:
        expected = align(end, alignment)
        if tensor.offset != expected:
            where = f"begins at byte {tensor.offset} of the file and not at {expected}, where {last} before it ends"
            tensor.fail(f"{where}: the header is damaged", FETCH_AGAIN)
        if any(file.copy(end, expected - end)):
            tensor.fail(f"has no padding before it, behind {last}: the header is damaged", FETCH_AGAIN)
        end, last = expected + nbytes, f"{tensor.name} ({tensor.qtype})"
        if end > file.nbytes:
            missing = end - file.nbytes
            tensor.fail(f"ends {missing} bytes beyond the end of the file: it is truncated or damaged", FETCH_AGAIN)
    if end > header and (file.nbytes not in (end, align(end, alignment)) or any(file.copy(end, alignment))):
        what = f"{file.nbytes - end} bytes follow {last}, the last tensor"
        raise UserError(f"{file.path}: {what}; the header is damaged, or something was appended; {FETCH_AGAIN}")
