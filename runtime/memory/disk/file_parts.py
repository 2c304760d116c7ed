"""Where the parts of a model's tensors lie on disk: in its own files as these have them, or packed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from pshard.errors import UserError
from pshard.on_disk import piece_rows
from pshard.packed_file import PackedFile, PackedTensor
from pshard.quant import file_nbytes, packed_nbytes, plane_offsets
from pshard.runtime.memory.disk.reader import DiskReader, PackedPiece, Piece
from pshard.runtime.memory.weights import WeightSource
from pshard.tensor import TensorSpec

Found = tuple[Piece | PackedPiece, int]  # a piece, and its bytes when it is packed


class Part(Protocol):
    """A matrix, or a part of a stack."""

    def list_pieces(self, tensor: TensorSpec) -> Iterator[Found]:
        """Its pieces, in the order of its rows; they go nowhere yet."""


@dataclass(frozen=True)
class FilePart:
    """One in the model's own file, from `offset` on; factor: see Piece."""

    file: int
    offset: int
    factor: tuple[int, float] | None

    def list_pieces(self, tensor: TensorSpec) -> Iterator[Found]:
        """See Part."""
        rows, step, offset = tensor.rows // max(1, tensor.parts), piece_rows(tensor), self.offset
        for row in range(0, rows, step):
            count = min(step, rows - row)
            nbytes = file_nbytes(tensor.qtype, count, tensor.cols)
            piece = Piece(self.file, offset, nbytes, 0, tensor.qtype, count, tensor.cols, self.factor)
            yield piece, packed_nbytes(tensor.qtype, count, tensor.cols)
            offset += nbytes


@dataclass(frozen=True)
class PackedPart:
    """One in a packed file."""

    file: int
    packed: PackedFile
    there: PackedTensor
    number: int

    def list_pieces(self, tensor: TensorSpec) -> Iterator[Found]:
        """See Part."""
        for offset, nbytes, check in self.there.list_pieces(self.number):
            yield PackedPiece(self.file, offset, nbytes, int(self.packed.checks[check])), nbytes


class FileRows(NamedTuple):
    """Rows of a matrix that follow each other in a file of a reader, from `offset` on."""

    file: int
    offset: int
    rows: int


@dataclass(frozen=True)
class TablePart:
    """A matrix without a factor, whose rows lie in one run below the other, each of whole records."""

    runs: tuple[FileRows, ...]

    def list_pieces(self, tensor: TensorSpec) -> Iterator[Found]:
        """See Part."""
        for run in self.runs:
            yield from FilePart(run.file, run.offset, None).list_pieces(replace(tensor, shape=(run.rows, tensor.cols)))


class FileParts:
    """Finds those of one model, and opens their files for a reader."""

    def __init__(self, reader: DiskReader, source: WeightSource, packed: PackedFile | None) -> None:
        self._reader, self._source, self._packed = reader, source, packed
        self._files: dict[Path, int] = {}

    def find(self, tensor: TensorSpec, part: int | None) -> Part:
        """A matrix, or that part of a stack, in the packed file where it has it. Raises UserError where it lies nowhere
        as it is used, or its file cannot be opened."""
        if self._packed and (there := self._packed.find(tensor)):
            return PackedPart(self._open(self._packed.path), self._packed, there, part or 0)
        found = self._source.locate(tensor.name, part)
        if found is None:
            raise self._refuse(tensor)
        path, offset = found
        factor_at = plane_offsets(tensor.qtype, tensor.cols).get("factor")
        factor = (factor_at[0], self._source.factor(tensor.name, part or 0)) if factor_at else None
        return FilePart(self._open(path), offset, factor)

    def find_rows(self, tensor: TensorSpec) -> tuple[FileRows, ...]:
        """Where the rows of a matrix lie in the model's own files, one run below the other. Raises UserError as `find`
        does."""
        runs = self._source.locate_rows(tensor.name)
        if not runs:
            raise self._refuse(tensor)
        return tuple(FileRows(self._open(run.path), run.offset, run.rows) for run in runs)

    def find_table(self, tensor: TensorSpec) -> TablePart:
        """All of a matrix whose rows can be looked up. Raises UserError as `find_rows` does."""
        return TablePart(tuple(run for run in self.find_rows(tensor) if run.rows))

    def _refuse(self, tensor: TensorSpec) -> UserError:
        what = "cannot be used from disk as it lies in the file"
        return UserError(f"{tensor.name} {what}; give a larger --ram, or a GGUF file")

    def _open(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = self._reader.add_file(path)
        return self._files[path]


def largest_read(tensor: TensorSpec) -> int:
    """Bytes of the largest piece of a tensor, packed or not; of a vector none."""
    if len(tensor.shape) != 2:
        return 0
    rows = piece_rows(tensor)
    return max(file_nbytes(tensor.qtype, rows, tensor.cols), packed_nbytes(tensor.qtype, rows, tensor.cols))
