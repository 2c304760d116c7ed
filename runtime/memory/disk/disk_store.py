"""Weights on disk: they stay in the model's file, and are read from there and packed each time, or in a packed file."""

import ctypes
import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from pshard.buffers import BUFFERS, CHUNK
from pshard.cuts.rank_parts import Ranges
from pshard.on_disk import piece_rows
from pshard.quant import TENSOR_ALIGN, align, packed_nbytes
from pshard.runtime.devices.device import Device
from pshard.runtime.memory.disk.far_table import FarTable
from pshard.runtime.memory.disk.file_parts import FileParts, largest_read
from pshard.runtime.memory.disk.reader import TO, AnyPiece, DiskReader, KeptPiece, PieceList, copy_instead
from pshard.runtime.memory.weights import UnitWeights, WeightSource, read_vector, view_portion
from pshard.tensor import TensorSpec
from pshard.units.divide_unit import Portion
from pshard.units.unit import Unit

NOWHERE = np.empty(0, np.int64)  # slots of a unit that has none


class _Placed(NamedTuple):
    """A piece, where it goes in its unit's bytes, and how many these are; of which part of a stack it is (-1: of none),
    and where it goes in a slot of that."""

    piece: AnyPiece
    to: int
    nbytes: int
    part: int = -1
    in_slot: int = 0


class _Blob:
    """Addresses that stand for a unit's packed bytes, with no memory behind them, and the pieces that bring these."""

    def __init__(self, unit: Unit, pieces: list[_Placed]) -> None:
        self._space = mmap.mmap(-1, unit.packed_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
        start = np.frombuffer(self._space, np.uint8).ctypes.data
        self.unit = unit.name
        self.memory = torch.frombuffer((ctypes.c_uint8 * unit.packed_nbytes).from_address(start), dtype=torch.uint8)
        self._begins = [one.to for one in pieces]
        self._read = np.array([replace(one.piece, to=one.to).words for one in pieces], np.int64)
        # of each piece the part, where it lies in a slot of that, and its bytes
        self._parts = np.array([(one.part, one.in_slot, one.nbytes) for one in pieces], np.int64).T
        self._slots, self._table = NOWHERE, self._read

    def split(self, start: int, end: int, most: int) -> list[int]:
        """Bytes of each job that brings what is from `start` to before `end`, where pieces begin: as many pieces as
        have at most so many bytes, one at least."""
        first, last = bisect_left(self._begins, start), bisect_left(self._begins, end)
        jobs = [start]
        for begins, ends in pairwise((*self._begins[first:last], end)):
            if ends - jobs[-1] > most and begins > jobs[-1]:
                jobs.append(begins)
        return [after - before for before, after in pairwise((*jobs, end))]

    def find_job(self, start: int, end: int, slots: np.ndarray) -> PieceList:
        """The pieces of a job, of which parts that lie in a slot are copied from there. slots: int64 [parts], the
        address of each part's; 0: none. Other slots than last time are asked for while nothing is on its way."""
        if not np.array_equal(slots, self._slots):
            parts, in_slot, nbytes = self._parts
            begins = np.append(slots, 0)[parts]  # what is of no part is of part -1
            self._table = copy_instead(self._read, np.where(begins, begins + in_slot, 0), nbytes)
            self._slots = slots
        return PieceList((), self._table[bisect_left(self._begins, start) : bisect_left(self._begins, end)])

    def list_parts(self, numbers: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """See DiskStore.list_pieces."""
        parts, in_slot, _ = self._parts
        number = np.where(parts < 0, -1, numbers[parts])
        order = np.argsort(number, kind="stable")[np.count_nonzero(parts < 0) :]
        table = self._read[order]
        table[:, TO] = in_slot[order]
        return table, np.searchsorted(number[order], np.arange(count + 1)).astype(np.int64)

    @property
    def nbytes(self) -> int:
        """Of what says where pieces lie."""
        return self._read.nbytes + self._parts.nbytes + (self._table.nbytes if self._table is not self._read else 0)


class Holder(Protocol):
    """What has some parts of units on disk in memory too."""

    def find_slots(self, unit: str) -> np.ndarray | None:
        """int64 [parts], where each part of a unit begins, all of its stacks in turn, each where a tensor may begin; 0:
        not here. None: the unit is none of its own. Nothing moves while copies to the accelerator are on their way."""


class DiskStore:
    """What a plan leaves on disk. Vectors, which are small, lie in host memory all the time. Of tables rows are read as
    they are looked up, and all of one as a tier is entered that has it in VRAM.

    Attributes: see Store.
    """

    def __init__(self, device: Device, portions: tuple[Portion, ...], tables: tuple[Unit, ...] = ()) -> None:
        """portions: what comes whole. tables: of which rows are read; some may come whole too."""
        self._looked_up = tables
        self.held: Mapping[str, Portion] = {portion.unit.name: portion for portion in portions}
        self.largest = max((portion.nbytes for portion in portions), default=0)
        tensors = [tensor for portion in portions for tensor in portion.unit.tensors]
        self._most = max([min(CHUNK, -(-self.largest // BUFFERS)), *map(_piece_nbytes, tensors)])
        self.least = self._most + TENSOR_ALIGN  # a job ends where the next tensor begins
        self._device = device
        rows = [t.row_nbytes for unit in self._looked_up for t in unit.tensors]
        self._reader = DiskReader(max([*map(largest_read, tensors), *rows]))
        self._tables: dict[str, dict[str, FarTable]] = {}  # by unit and role
        self._kept: dict[str, dict[str, torch.Tensor]] = {}  # vectors, by unit and role
        self._holders: list[Holder] = []
        self._blobs: dict[str, _Blob] = {}
        self._starts: list[int] = []  # of blobs, ascending
        self._by_start: dict[int, _Blob] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        return self._reader.notes

    @property
    def is_direct(self) -> bool:
        """Whether files are read past the page cache."""
        return self._reader.is_direct

    @property
    def nbytes(self) -> int:
        kept = [v.nbytes for vectors in self._kept.values() for v in vectors.values()]
        tables = [t.nbytes for own in self._tables.values() for t in own.values()]
        return self._reader.nbytes + sum(kept) + sum(tables) + sum(blob.nbytes for blob in self._blobs.values())

    @property
    def read_bytes(self) -> int:
        return self._reader.read_bytes

    @property
    def waited(self) -> tuple[int, float]:
        return self._reader.waited

    def load(self, source: WeightSource, ranges: Ranges | None, progress: Callable[[int], None]) -> None:
        """Find where all of it lies in the files. Raises UserError for a tensor that is not there as it is used."""
        parts = FileParts(self._reader, source, source.packed)
        for name, portion in self.held.items():
            blob = _Blob(portion.unit, list(self._list_pieces(source, parts, portion.unit)))
            self._blobs[name] = self._by_start[blob.memory.data_ptr()] = blob
            progress(portion.nbytes)
        self._starts = sorted(self._by_start)
        lying = FileParts(self._reader, source, None)  # rows are packed where they are looked up
        for unit in self._looked_up:
            self._tables[unit.name] = {t.role: FarTable(self._reader, lying.find_rows(t), t) for t in unit.tensors}
            progress(0 if unit.name in self.held else unit.packed_nbytes)

    def _list_pieces(self, source: WeightSource, parts: FileParts, unit: Unit) -> Iterator[_Placed]:
        """All pieces of a unit."""
        self._kept[unit.name], in_slot = {}, 0
        for at, tensor in unit.offsets().values():
            if len(tensor.shape) == 1:
                self._kept[unit.name][tensor.role] = vector = read_vector(source, tensor)
                yield _Placed(KeptPiece(vector.data_ptr(), vector.nbytes, 0), at, vector.nbytes)
                continue
            numbers = (unit.order or range(tensor.parts)) if tensor.parts else (None,)
            for place, number in enumerate(numbers):
                first = at
                there = parts.find_table(tensor) if unit.kind.is_looked_up else parts.find(tensor, number)
                for piece, packed in there.list_pieces(tensor):
                    yield _Placed(piece, at, packed, place if tensor.parts else -1, in_slot + at - first)
                    at += packed
            in_slot += align(tensor.packed_nbytes // max(1, tensor.parts), TENSOR_ALIGN)
        for tensor in unit.tensors:
            source.forget_tensor(tensor.name)

    def blob(self, unit: str) -> torch.Tensor:
        """Addresses that stand for the unit's bytes: nothing can be read there."""
        return self._blobs[unit].memory

    def view(self, unit: str) -> UnitWeights:
        """A unit's vectors, and its matrices as addresses where nothing can be read, or as what reads rows of them."""
        if unit in self._tables:
            return UnitWeights({}, {}, far=self._tables[unit])
        weights = view_portion(self.held[unit], self.blob(unit))
        return replace(weights, vectors=self._kept[unit])

    def ask(self, pieces: PieceList, to: int) -> int:
        """See DiskReader.ask."""
        return self._reader.ask(pieces, to)

    def list_pieces(self, unit: str, numbers: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """All pieces of a unit's parts, each as it goes to a slot (int64 [pieces, words], as the C++ library reads
        them), and where those of each number below `count` begin, with the end of the last. numbers: ints [parts], of
        each part."""
        return self._blobs[unit].list_parts(numbers, count)

    @property
    def address(self) -> int:
        """The reader, as the C++ library calls it."""
        return self._reader.address

    def wait(self, number: int) -> None:
        """See DiskReader.wait."""
        self._reader.wait(number)

    def split(self, src: torch.Tensor) -> list[int]:
        blob, start = self._find(src)
        return blob.split(start, start + src.numel(), self._most)

    def share_with(self, holder: Holder) -> None:
        """From now on copy from there what it has, instead of reading it."""
        self._holders.append(holder)

    def fill(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Any] = ()) -> Any:
        """Start to bring bytes of one job: they are read ahead from now on, and packed when `after` has happened."""
        blob, start = self._find(src)
        pieces = blob.find_job(start, start + src.numel(), self._find_slots(blob.unit))
        job = self._reader.submit(pieces, dst.data_ptr() - start)
        return self._device.call(self._reader.run, job, after)

    def _find_slots(self, unit: str) -> np.ndarray:
        found = (holder.find_slots(unit) for holder in self._holders)
        return next((slots for slots in found if slots is not None), NOWHERE)

    def _find(self, src: torch.Tensor) -> tuple[_Blob, int]:
        start = self._starts[bisect_right(self._starts, src.data_ptr()) - 1]
        return self._by_start[start], src.data_ptr() - start

    def check(self) -> None:
        self._reader.check()

    def cancel(self) -> None:
        self._reader.cancel()

    def close(self) -> None:
        self._reader.close()


def _piece_nbytes(tensor: TensorSpec) -> int:
    """Bytes of the largest piece of a tensor when it is packed; of a vector all."""
    one = packed_nbytes(tensor.qtype, piece_rows(tensor), tensor.cols) if len(tensor.shape) == 2 else 0
    return one or tensor.packed_nbytes
