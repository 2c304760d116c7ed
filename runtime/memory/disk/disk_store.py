"""Weights on disk: they stay in the model's file, and are read from there and packed each time."""

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pshard.cuts.rank_parts import Ranges
from pshard.errors import UserError
from pshard.quant import QUANT_TYPES, ROW_BLOCK, TENSOR_ALIGN, align, file_nbytes, packed_nbytes, plane_offsets
from pshard.runtime.devices.device import Device
from pshard.runtime.memory.disk.reader import PIECE, DiskReader, KeptPiece, Piece, PieceList
from pshard.runtime.memory.staging import BUFFERS, CHUNK
from pshard.runtime.memory.weights import UnitWeights, WeightSource, read_vector, view_portion
from pshard.tensor import TensorSpec
from pshard.units.divide_unit import Portion
from pshard.units.unit import Unit


class _Blob:
    """Addresses that stand for a unit's packed bytes, with no memory behind them, and the jobs that bring these.

    nbytes: of jobs in turn; ends: where these end.
    """

    def __init__(self, nbytes: int, jobs: list[tuple[int, PieceList]]) -> None:
        self._space = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
        start = np.frombuffer(self._space, np.uint8).ctypes.data
        self.memory = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(start), dtype=torch.uint8)
        self.nbytes = [size for size, _ in jobs]
        self.ends = list(accumulate(self.nbytes))
        self.jobs = [pieces for _, pieces in jobs]


class DiskStore:
    """What a plan leaves on disk. Vectors, which are small, lie in host memory all the time.

    Attributes: see Store.
    """

    def __init__(self, device: Device, portions: tuple[Portion, ...]) -> None:
        self.held: Mapping[str, Portion] = {portion.unit.name: portion for portion in portions}
        self.largest = max(portion.nbytes for portion in portions)
        tensors = [tensor for portion in portions for tensor in portion.unit.tensors]
        self._most = max([min(CHUNK, -(-self.largest // BUFFERS)), *map(_piece_nbytes, tensors)])
        self.least = self._most + TENSOR_ALIGN  # a job ends where the next tensor begins
        self._device = device
        self._reader = DiskReader(max(map(_piece_file_nbytes, tensors)))
        self._kept: dict[str, dict[str, torch.Tensor]] = {}  # vectors, by unit and role
        self._stacks: dict[str, list[_Stack]] = {}
        self._parts: dict[tuple[str, int], PieceList] = {}
        self._blobs: dict[str, _Blob] = {}
        self._starts: list[int] = []  # of blobs, ascending
        self._by_start: dict[int, _Blob] = {}
        self._files: dict[Path, int] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        return self._reader.notes

    @property
    def is_direct(self) -> bool:
        """Whether files are read past the page cache."""
        return self._reader.is_direct

    @property
    def nbytes(self) -> int:
        return self._reader.nbytes + sum(v.nbytes for vectors in self._kept.values() for v in vectors.values())

    @property
    def read_bytes(self) -> int:
        return self._reader.read_bytes

    def load(self, source: WeightSource, ranges: Ranges | None, progress: Callable[[int], None]) -> None:
        """Find where all of it lies in the files. Raises UserError for a tensor that is not there as it is used."""
        for name, portion in self.held.items():
            blob = _Blob(portion.nbytes, list(self._list_jobs(source, portion)))
            self._blobs[name] = self._by_start[blob.memory.data_ptr()] = blob
            progress(portion.nbytes)
        self._starts = sorted(self._by_start)

    def _list_jobs(self, source: WeightSource, portion: Portion) -> Iterator[tuple[int, PieceList]]:
        """Bytes and pieces of each job: as many pieces as a buffer of the ring takes."""
        start, pieces = 0, list[Piece | KeptPiece]()
        for piece, packed in self._list_pieces(source, portion.unit):
            if pieces and piece.to + packed - start > self._most:
                yield piece.to - start, PieceList(pieces)
                start, pieces = piece.to, []
            pieces.append(replace(piece, to=piece.to - start))
        yield portion.nbytes - start, PieceList(pieces)

    def _list_pieces(self, source: WeightSource, unit: Unit) -> Iterator[tuple[Piece | KeptPiece, int]]:
        """All pieces of a unit, each to its place in the unit's bytes, with its packed bytes."""
        self._kept[unit.name], self._stacks[unit.name] = {}, []
        for at, tensor in unit.offsets().values():
            if len(tensor.shape) == 1:
                self._kept[unit.name][tensor.role] = vector = read_vector(source, tensor)
                yield KeptPiece(vector.data_ptr(), vector.nbytes, at), vector.nbytes
                continue
            numbers = (unit.order or range(tensor.parts)) if tensor.parts else (None,)
            stack = _Stack(tensor, tuple(self._find_part(source, tensor, number) for number in numbers))
            self._stacks[unit.name].append(stack)
            for part in stack.parts:
                for piece, packed in _list_rows(tensor, part):
                    yield replace(piece, to=at), packed
                    at += packed
        for tensor in unit.tensors:
            source.forget_tensor(tensor.name)

    def _find_part(self, source: WeightSource, tensor: TensorSpec, part: int | None) -> "_Part":
        """Where a matrix lies, or a part of a stack."""
        file, offset = self._locate(source, tensor, part)
        factor_at = plane_offsets(tensor.qtype, tensor.cols).get("factor")
        return _Part(file, offset, (factor_at[0], source.factor(tensor.name, part or 0)) if factor_at else None)

    def _locate(self, source: WeightSource, tensor: TensorSpec, part: int | None) -> tuple[int, int]:
        """The number of the file that holds a tensor, or a part of it, and where it begins there."""
        found = source.locate(tensor.name, part)
        if found is None:
            raise UserError(
                f"{tensor.name} cannot be used from disk as it lies in the file; give a larger --ram, or a GGUF file"
            )
        path, offset = found
        if path not in self._files:
            self._files[path] = self._reader.add_file(path)
        return self._files[path], offset

    def blob(self, unit: str) -> torch.Tensor:
        """Addresses that stand for the unit's bytes: nothing can be read there."""
        return self._blobs[unit].memory

    def view(self, unit: str) -> UnitWeights:
        """A unit's vectors, and its matrices as addresses where nothing can be read."""
        weights = view_portion(self.held[unit], self.blob(unit))
        return replace(weights, vectors=self._kept[unit])

    def ask_part(self, unit: str, place: int, to: int) -> int:
        """Ask for one part of all of a unit's stacks, in turn from an address on, each where a tensor may begin, before
        all that is read ahead. Returns a number for `wait_part`."""
        if (unit, place) not in self._parts:
            pieces, at = list[Piece | KeptPiece](), 0
            for stack in self._stacks[unit]:
                for piece, packed in _list_rows(stack.tensor, stack.parts[place]):
                    pieces.append(replace(piece, to=at))
                    at += packed
                at = align(at, TENSOR_ALIGN)
            self._parts[unit, place] = PieceList(pieces)
        return self._reader.ask(self._parts[unit, place], to)

    def wait_part(self, number: int) -> None:
        """Until what was asked for is there. Raises RuntimeError where it cannot be read."""
        self._reader.wait(number)

    def split(self, src: torch.Tensor) -> list[int]:
        """Bytes of each job of a unit, all of which `src` is."""
        return self._find(src)[0].nbytes

    def fill(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Any] = ()) -> Any:
        """Start to bring bytes of one job: they are read ahead from now on, and packed when `after` has happened."""
        blob, offset = self._find(src)
        job = self._reader.submit(blob.jobs[bisect_right(blob.ends, offset)], dst.data_ptr())
        return self._device.call(self._reader.run, job, after)

    def _find(self, src: torch.Tensor) -> tuple[_Blob, int]:
        start = self._starts[bisect_right(self._starts, src.data_ptr()) - 1]
        return self._by_start[start], src.data_ptr() - start

    def check(self) -> None:
        self._reader.check()

    def cancel(self) -> None:
        self._reader.cancel()

    def close(self) -> None:
        self._reader.close()


@dataclass(frozen=True)
class _Part:
    """Where a matrix begins, or a part of a stack; factor: see Piece."""

    file: int
    offset: int
    factor: tuple[int, float] | None


@dataclass(frozen=True)
class _Stack:
    """A tensor with its parts by place; of a matrix one."""

    tensor: TensorSpec
    parts: tuple[_Part, ...]


def _list_rows(tensor: TensorSpec, part: _Part) -> Iterator[tuple[Piece, int]]:
    """The pieces of a matrix, or of a part of a stack, with their packed bytes."""
    rows, step, offset = tensor.rows // max(1, tensor.parts), _piece_rows(tensor), part.offset
    for row in range(0, rows, step):
        count = min(step, rows - row)
        nbytes = file_nbytes(tensor.qtype, count, tensor.cols)
        piece = Piece(part.file, offset, nbytes, 0, tensor.qtype, count, tensor.cols, part.factor)
        yield piece, packed_nbytes(tensor.qtype, count, tensor.cols)
        offset += nbytes


def _piece_rows(tensor: TensorSpec) -> int:
    """Rows of a matrix that one read brings: whole records, one at least."""
    block = ROW_BLOCK if QUANT_TYPES[tensor.qtype].planes else 1
    return min(tensor.rows, max(1, PIECE // max(1, file_nbytes(tensor.qtype, block, tensor.cols))) * block)


def _piece_file_nbytes(tensor: TensorSpec) -> int:
    """Bytes of the largest read of a tensor."""
    return file_nbytes(tensor.qtype, _piece_rows(tensor), tensor.cols) if len(tensor.shape) == 2 else 0


def _piece_nbytes(tensor: TensorSpec) -> int:
    """The same, packed; of a vector all."""
    one = packed_nbytes(tensor.qtype, _piece_rows(tensor), tensor.cols) if len(tensor.shape) == 2 else 0
    return one or tensor.packed_nbytes
