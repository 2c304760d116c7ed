"""Packed files: a model's matrices as kernels compute with them, so that what lives on disk is read without packing.
No torch.

A file has a block that says where its end begins, the matrices, and at its end their places as JSON with a checksum of
every piece. An expert's matrices lie side by side, in the order of the model's file. A matrix is in pieces, which one
read each brings and which begin at blocks. What is written last makes the file whole: docs/disk.md, "A packed file".
"""

import hashlib
import json
import os
import re
import struct
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from pshard.errors import name_cause
from pshard.jsonio import from_json, open_regular, parse_json, to_json
from pshard.on_disk import BLOCK, Located, lies_as_used, may_move, piece_rows
from pshard.paths import cache_dir
from pshard.quant import align, packed_nbytes
from pshard.tensor import TensorSpec

LAYOUT = 1  # raised when docs/packed-layout.md says otherwise, or this file
MAGIC = b"pshard packed\n\0\0"
HEAD = struct.Struct("<16sQQQI")  # magic, where the end begins, bytes of its JSON, of all of it, CRC-32 of it
SAMPLES, SAMPLE = 64, 4096  # places of a model's file that are looked at, and bytes there
SUFFIX = ".packed"
NUMBERS = "I"  # how checksums are kept: u32


@dataclass(frozen=True)
class FileState:
    """By what a model's file is known: its bytes, when it was last written, and a digest of some of it."""

    name: str
    nbytes: int
    mtime_ns: int
    digest: str


@dataclass(frozen=True)
class PackedTensor:
    """Where a matrix lies, or each part of a stack: pieces of `step` rows from `at` on, the next part `stride` bytes
    behind. rows: of a part; first: the number of its first piece among all checksums."""

    name: str
    qtype: str
    rows: int
    cols: int
    parts: int
    step: int
    at: int
    stride: int
    first: int

    @property
    def pieces(self) -> int:
        """Of a part."""
        return -(-self.rows // self.step)

    def list_pieces(self, part: int) -> Iterator[tuple[int, int, int]]:
        """Of each piece of a part where it lies, its bytes, and the number of its checksum."""
        size, at = align(packed_nbytes(self.qtype, self.step, self.cols), BLOCK), self.at + part * self.stride
        for i in range(self.pieces):
            rows = min(self.step, self.rows - i * self.step)
            number = self.first + part * self.pieces + i
            yield at + i * size, packed_nbytes(self.qtype, rows, self.cols), number

    def is_of(self, tensor: TensorSpec) -> bool:
        """Whether it has the parts of a tensor, or of some of them."""
        rows = tensor.rows // max(1, tensor.parts)
        return (self.qtype, self.rows, self.cols) == (tensor.qtype, rows, tensor.cols)


@dataclass(frozen=True)
class Contents:
    """What a packed file has, and of which model. model: its path when it was packed, to be shown."""

    layout: int
    files: tuple[FileState, ...]
    tensors: tuple[PackedTensor, ...]
    model: str = field(compare=False)

    @property
    def pieces(self) -> int:
        """All that have a checksum."""
        return sum(tensor.parts * tensor.pieces for tensor in self.tensors)

    @cached_property
    def end(self) -> int:
        """Where the matrices end."""
        last = (offset + size for t in self.tensors for offset, size, _ in t.list_pieces(t.parts - 1))
        return align(max(last, default=BLOCK), BLOCK)

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        return self.end + len(_as_text(self)) + 4 * self.pieces


@dataclass(frozen=True)
class PackedFile:
    """A packed file. checks: u32, the CRC32C of every piece."""

    path: Path
    contents: Contents
    checks: "array[int]"

    @cached_property
    def _by_name(self) -> dict[str, PackedTensor]:
        return {tensor.name: tensor for tensor in self.contents.tensors}

    def find(self, tensor: TensorSpec) -> PackedTensor | None:
        """Where a matrix lies, or the stack of its parts; None where it is not there."""
        found = self._by_name.get(tensor.name)
        return found if found and found.is_of(tensor) else None


def packed_folder(given: Path | None = None) -> Path:
    """Where packed files are kept: as --disk-cache says, else in the cache folder."""
    return given or cache_dir() / "packed"


def packed_place(file: Located, folder: Path) -> Path:
    """Where a model's packed file lies in a folder: one for each place of a model."""
    place = hashlib.sha256(os.fsencode(_list_files(file)[0].resolve())).hexdigest()[:8]
    return folder / f"{re.sub(r'[^A-Za-z0-9._-]', '-', file.spec.name)}-{place}{SUFFIX}"


def describe_contents(file: Located) -> Contents:
    """What the packed file of a model has: all matrices that may live on disk, as their file is now."""
    tensors, at, first = list[PackedTensor](), BLOCK, 0
    for unit in file.spec.units:
        if not may_move(unit) or not lies_as_used(file, unit):
            continue
        for parts in sorted({t.parts for t in unit.matrices}):
            group = [t for t in unit.matrices if t.parts == parts]
            sizes, count = [_part_nbytes(t) for t in group], max(1, parts)
            for tensor, begin in zip(group, accumulate(sizes, initial=at)):
                shape = (tensor.name, tensor.qtype, tensor.rows // count, tensor.cols, count)
                tensors.append(PackedTensor(*shape, _step(tensor), begin, sum(sizes), first))
                first += count * tensors[-1].pieces
            at += count * sum(sizes)
    return Contents(LAYOUT, tuple(map(_look_at, _list_files(file))), tuple(tensors), os.path.abspath(file.spec.path))


def _part_nbytes(tensor: TensorSpec) -> int:
    """Bytes of a matrix, or of each part of a stack, in blocks."""
    full, rest = divmod(tensor.rows // max(1, tensor.parts), _step(tensor))
    sizes = (packed_nbytes(tensor.qtype, rows, tensor.cols) for rows in (_step(tensor), rest))
    return sum(count * align(size, BLOCK) for count, size in zip((full, 1), sizes))


def _step(tensor: TensorSpec) -> int:
    return min(tensor.rows // max(1, tensor.parts), piece_rows(tensor))


def _list_files(file: Located) -> list[Path]:
    """The files that hold a model's matrices."""
    places = (file.locate(t.name, 0 if t.parts else None) for unit in file.spec.units for t in unit.matrices)
    return sorted({place[0] for place in places if place}) or [Path(file.spec.path)]


def _look_at(path: Path) -> FileState:
    with open_regular(path) as file:
        stat, digest = os.fstat(file.fileno()), hashlib.sha256()
        for i in range(SAMPLES):
            digest.update(os.pread(file.fileno(), SAMPLE, i * max(0, stat.st_size - SAMPLE) // (SAMPLES - 1)))
        return FileState(path.name, stat.st_size, stat.st_mtime_ns, digest.hexdigest())


def _as_text(contents: Contents) -> bytes:
    return json.dumps(to_json(contents), separators=(",", ":")).encode()


def make_ends(contents: Contents, checks: "array[int]") -> tuple[bytes, bytes]:
    """The first block of a packed file, and what stands behind its matrices. checks: see PackedFile."""
    text = _as_text(contents)
    end = text + checks.tobytes()
    head = HEAD.pack(MAGIC, contents.end, len(text), len(end), zlib.crc32(end))
    return head.ljust(BLOCK, b"\0"), end


def read_packed(path: Path) -> PackedFile:
    """What a packed file says it has. Raises OSError, and ValueError for one that is half written, damaged, or none."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(HEAD.size)
        if len(head) < HEAD.size or not head.startswith(MAGIC):
            raise ValueError("it is no packed file, or half written")
        _, at, text_nbytes, nbytes, check = HEAD.unpack(head)
        if at + nbytes != size or text_nbytes > nbytes:
            raise ValueError("it is cut, or half written")
        file.seek(at)
        end = file.read(nbytes)
    if zlib.crc32(end) != check:
        raise ValueError("it is damaged")
    try:
        contents = from_json(Contents, parse_json(end[:text_nbytes]))
        return PackedFile(path, contents, array(NUMBERS, end[text_nbytes:]))
    except ValueError:
        raise ValueError("it is of another version") from None


def find_packed(file: Located, folder: Path) -> tuple[PackedFile | None, str]:
    """The packed file of a model in a folder; None where there is none that is right, with why one is not used."""
    place = packed_place(file, folder)
    try:
        packed = read_packed(place)
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError) as error:
        return None, f"{place} is not used: {name_cause(error)}"
    right = describe_contents(file)
    if (packed.contents, len(packed.checks)) != (right, right.pieces):
        return None, f"{place} is not used: the model's file is another than the one that was packed"
    return packed, ""


def list_packed(folder: Path) -> list[Path]:
    """The packed files of a folder, and what is left of writing some."""
    return sorted([*folder.glob(f"*{SUFFIX}"), *folder.glob(f".*{SUFFIX}.*.tmp")])
