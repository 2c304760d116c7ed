"""Weights in host memory: one arena, page-locked in chunks, each unit's tensors packed into one contiguous blob."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from pshard.cuts.rank_parts import Ranges
from pshard.model import ModelSpec
from pshard.on_disk import RowRun
from pshard.packed_file import PackedFile
from pshard.quant import QUANT_TYPES, ROW_BLOCK, packed_nbytes, plane_offsets, record_nbytes
from pshard.runtime.devices.device import Device
from pshard.runtime.kernels import layout
from pshard.runtime.kernels.api import Packed
from pshard.runtime.kernels.cpu import native
from pshard.runtime.memory.host.fresh_memory import FilledMemory
from pshard.runtime.memory.host.host_arena import arrange_blobs
from pshard.runtime.memory.host.host_memory import as_tensor, map_memory
from pshard.tensor import TensorSpec
from pshard.units.divide_unit import Portion, whole_unit
from pshard.units.enter import LAYER_SCALE
from pshard.units.unit import Unit


class WeightSource(Protocol):
    """What hands out a model file's bytes (pshard.models.ModelFile)."""

    spec: ModelSpec
    packed: PackedFile | None

    def tensor_bytes(self, name: str) -> np.ndarray: ...

    def part_bytes(self, name: str, part: int) -> np.ndarray: ...

    def run_bytes(self, name: str, first: int, end: int) -> np.ndarray: ...

    def factor(self, name: str, part: int = 0) -> float: ...

    def locate(self, name: str, part: int | None = None) -> tuple[Path, int] | None: ...

    def locate_rows(self, name: str) -> tuple[RowRun, ...]: ...

    def expect_tensor(self, name: str) -> None: ...

    def forget_tensor(self, name: str) -> None: ...


@dataclass(frozen=True)
class FoundRows:
    """Rows of a table that some ids look up: which ids these are, the rows, and which of them each id has."""

    ids: slice
    table: Packed
    places: torch.Tensor


class RowSource(Protocol):
    """A table elsewhere, of which rows are read as they are looked up."""

    def read(self, ids: torch.Tensor) -> Iterable[FoundRows]: ...


@dataclass(frozen=True)
class UnitWeights:
    """A unit's tensors as views of one blob: matrices packed, vectors float32.

    last: the last rows of the matrices that are divided, or parts of those that are stacks, where they lie elsewhere.
    first: the number of the first part in stacks. far: matrices that lie on disk, of which rows are read.
    """

    matrices: dict[str, Packed]
    vectors: dict[str, torch.Tensor]
    last: "UnitWeights | None" = None
    first: int = 0
    far: "Mapping[str, RowSource]" = field(default_factory=dict)


def view_unit(unit: Unit, blob: torch.Tensor) -> UnitWeights:
    """Views of a blob (uint8, on any device) that `pack_unit` filled."""
    return _view(unit, unit.offsets().values(), blob)


def view_portion(portion: Portion, blob: torch.Tensor) -> UnitWeights:
    """Views of a portion where it lies in the whole unit's blob."""
    return replace(_view(portion.unit, zip(portion.starts, portion.unit.tensors), blob), first=portion.first)


def view_brought(portion: Portion, blob: torch.Tensor) -> UnitWeights:
    """Views of a portion in a blob of its own, to which its pieces were copied."""
    return replace(view_unit(portion.unit, blob), first=portion.first)


def _view(unit: Unit, tensors: Iterable[tuple[int, TensorSpec]], blob: torch.Tensor) -> UnitWeights:
    matrices, vectors = {}, {}
    for at, tensor in tensors:
        data = blob[at : at + tensor.packed_nbytes]
        if len(tensor.shape) == 2:
            never_int8 = unit.stays_in_bf16(tensor)
            matrices[tensor.role] = Packed(data, tensor.qtype, tensor.rows, tensor.cols, never_int8)
        else:
            vectors[tensor.role] = data.view(torch.float32)
    return UnitWeights(matrices, vectors)


class HostWeights:
    """The host arena: blobs of what is given of units, page-locked for `device` as far as it lets us, in that order.

    It is locked in chunks of whole units, as a copy that spans two of them is an error. The first that is refused ends
    it: what is locked by then stays so, and a refusal again and again has made drivers unusable.

    Attributes:
        held: what it has of each unit, by name.
        nbytes: bytes of the arena; pageable: bytes of it that copies do not reach at the page-locked rate; largest:
            bytes of the largest blob.
    """

    def __init__(self, portions: Iterable[Portion], device: Device, filled: FilledMemory | None = None) -> None:
        """filled: memory for the arena; released where it is of another size."""
        self.held = {p.unit.name: p for p in portions}
        self._units = {name: p.unit for name, p in self.held.items()}
        places = arrange_blobs(self.held.values())
        if filled is not None and filled.nbytes != places.nbytes:
            filled.release()
            filled = None
        self._filled = filled
        arena = map_memory(places.nbytes) if filled is None else as_tensor(filled.memory, places.nbytes)
        self._device = device
        self.nbytes = self.pageable = places.nbytes
        self.largest = max((u.packed_nbytes for u in self._units.values()), default=0)
        self._starts, self._ends = places.starts, places.ends
        self._chunks = [arena[start:end] for start, end in pairwise((0, *places.ends))]
        self._locked: list[torch.Tensor] = []
        self._refused = False
        self._packer: ThreadPoolExecutor | None = None
        self._packed: dict[str, Future[None]] = {}
        self._locking: list[Future[bool]] = []
        self._blobs = {name: arena[at : at + self._units[name].packed_nbytes] for name, at in self._starts.items()}

    @property
    def page_locked(self) -> bool:
        """Whether all copies run at the page-locked rate."""
        return self.pageable == 0

    def blob(self, unit: str) -> torch.Tensor:
        """The contiguous bytes of what is held of a unit. Raises KeyError when the arena does not hold it."""
        return self._blobs[unit]

    def is_locked(self, unit: str) -> bool:
        """Whether the unit's bytes are page-locked: chunks are, from the arena's beginning."""
        return self._starts[unit] < self.nbytes - self.pageable

    def load(self, source: WeightSource, ranges: Ranges | None, progress: Callable[[int], None]) -> None:
        """`pack`, then `lock`."""
        self.pack(source, ranges, progress)
        self.lock()

    def pack(
        self, source: WeightSource, ranges: Ranges | None, progress: Callable[[int], None], locks: bool = False
    ) -> None:
        """`begin`, then `finish`; locks: what is full is page-locked meanwhile."""
        self.begin(source, ranges, progress)
        with ThreadPoolExecutor(1, "page-lock") as locker:
            self.finish(locker if locks else None)

    def begin(self, source: WeightSource, ranges: Ranges | None, progress: Callable[[int], None]) -> None:
        """Start to pack every unit from the file, which is read ahead by one, in a thread. `progress` gets the bytes
        done since last time, there."""

        def pack(name: str, following: str | None) -> None:
            expect_unit(source, self._units.get(following) if following else None)
            pack_portion(source, self.held[name], self._blobs[name], ranges)
            progress(self._units[name].packed_nbytes)

        names = list(self._units)
        self._packer = ThreadPoolExecutor(1, "pack")
        self._packed = {name: self._packer.submit(pack, name, after) for name, after in zip_longest(names, names[1:])}

    def finish(self, locker: ThreadPoolExecutor | None) -> None:
        """Wait until all is packed, and raise what went wrong there. locker: a thread that page-locks each chunk when
        it is full, all but the last, and may still be at it afterwards; see `lock`."""
        full = 0
        try:
            for name, packed in self._packed.items():
                if locker and full < len(self._ends) and self._starts[name] >= self._ends[full]:  # the chunk is full
                    self._locking.append(locker.submit(self._lock_next))
                    full += 1
                packed.result()
        finally:
            self._stop_packing()

    def _stop_packing(self) -> None:
        """After the unit that is being packed."""
        if self._packer is not None:
            self._packer.shutdown(cancel_futures=True)
            self._packer = None

    def check_orders(self, spec: ModelSpec) -> None:
        """Raise ValueError where parts of a unit lie in another order than the model has them."""
        for name, unit in self._units.items():
            if unit.order != spec.unit(name).order:
                raise ValueError(f"the weights of {name} were packed in another order than the plan's; pack them again")

    def lock(self) -> None:
        """Page-lock what is left of the arena until that is refused: whatever else must be page-locked comes before.
        Not beside a locker that is still at it."""
        for chunk in self._locking:
            chunk.result()
        while self._lock_next():
            pass

    def _lock_next(self) -> bool:
        """Page-lock the next chunk; False where there is none, or one was refused."""
        if self._refused or len(self._locked) == len(self._chunks):
            return False
        chunk = self._chunks[len(self._locked)]
        self._locked.append(chunk)  # before, so that an interrupt leaves nothing locked
        if not self._device.page_lock(chunk):
            self._locked.pop()
            self._refused = True
            return False
        self.pageable -= chunk.numel()
        return True

    def close(self) -> None:
        """Unlock the memory, and leave what is not packed yet; the arena must not be in use."""
        self._stop_packing()
        if self._filled is not None:
            self._filled.stop()
        while self._locked:
            self._device.page_unlock(self._locked.pop())
        self.pageable = self.nbytes


class LentWeights:
    """Another's HostWeights, for as long as that lives: what one engine of several on one model holds."""

    def __init__(self, lender: HostWeights) -> None:
        self.nbytes, self.pageable, self.blob, self.held = lender.nbytes, lender.pageable, lender.blob, lender.held
        self.page_locked, self.is_locked, self.largest = lender.page_locked, lender.is_locked, lender.largest

    def lock(self) -> None:
        """Nothing: the lender has done it."""

    def close(self) -> None:
        """Nothing: the lender closes them."""


def expect_unit(source: WeightSource, unit: Unit | None) -> None:
    """Have the system read a unit's bytes while others are packed."""
    for tensor in unit.tensors if unit else ():
        source.expect_tensor(tensor.name)


def pack_unit(source: WeightSource, unit: Unit, blob: torch.Tensor, ranges: Ranges | None = None) -> None:
    """Fill a whole unit's blob (uint8, host) from the model file; with `ranges` only that part of each tensor."""
    pack_portion(source, whole_unit(unit), blob, ranges)


def pack_portion(source: WeightSource, portion: Portion, blob: torch.Tensor, ranges: Ranges | None = None) -> None:
    """The same of some parts of a unit, or all of it."""
    unit, first = portion.unit, portion.first
    whole = {t.name: t for t in source.spec.unit(unit.name).tensors}
    for at, tensor in unit.offsets().values():
        out = blob[at : at + tensor.packed_nbytes]
        own = None if ranges is None else ranges[unit.name][tensor.name]
        if tensor.parts:
            order = (unit.order or range(whole[tensor.name].parts))[first : first + tensor.parts]
            _pack_stack(source, tensor, order, (whole[tensor.name].cols, own), out)
            continue
        raw = source.tensor_bytes(tensor.name)
        if own is not None and len(tensor.shape) == 1:
            raw = _cut_vector(raw, whole[tensor.name], tensor.cols, own[2:])
        elif own is not None:
            raw = _cut_matrix(raw, tensor, whole[tensor.name], own)
        if len(tensor.shape) == 1:
            out.view(torch.float32).copy_(_vector(raw, tensor.qtype))
        else:
            pack_matrix(raw, tensor, out)
            _put_factors(source, tensor, out)
        source.forget_tensor(tensor.name)  # else all of the file counts beside all of the arena at the end


def fill_sum_norms(source: WeightSource, spec: ModelSpec, rows: torch.Tensor) -> None:
    """Write the weights that normalise sums over ranks to `rows` float32 [one for each of `spec.sum_norms`, width + 4],
    and behind each what the stream is multiplied by then."""
    rows.fill_(1)
    for row, (unit, name) in zip(rows, spec.sum_norms, strict=True):
        scale = source.spec.unit(unit).by_role.get(LAYER_SCALE)
        (tensor,) = (t for t in source.spec.unit(unit).tensors if t.name == name)
        _fill_vector(source, tensor, row[:-4])
        if scale is not None:
            _fill_vector(source, scale, row[-4:-3])


def _fill_vector(source: WeightSource, tensor: TensorSpec, out: torch.Tensor) -> None:
    out.copy_(read_vector(source, tensor))
    source.forget_tensor(tensor.name)


def _pack_stack(
    source: WeightSource,
    tensor: TensorSpec,
    order: Sequence[int],
    wanted: tuple[int, tuple[int, int, int, int] | None],
    out: torch.Tensor,
) -> None:
    """The parts in that order, at once what lies together in the file: of some models a whole stack is gigabytes, and
    its parts lie all over the files.

    wanted: how many columns each part has in the file, and what of it is wanted; None: all of it.
    """
    rows, (cols, own) = tensor.rows // tensor.parts, wanted
    joins = own is None and rows % ROW_BLOCK == 0  # no record has rows of two parts
    place, size = 0, packed_nbytes(tensor.qtype, rows, tensor.cols)
    while place < len(order):
        end = place + 1
        while joins and end < len(order) and order[end] == order[end - 1] + 1:
            end += 1
        raw = source.run_bytes(tensor.name, order[place], order[end - 1] + 1)
        count = len(raw) // rows if joins else 1
        raw = raw if own is None else _cut_rows(raw, tensor.qtype, cols, own)
        some = replace(tensor, shape=(count * rows, tensor.cols), parts=0)
        pack_matrix(raw, some, out[place * size : (place + count) * size])
        _put_factors(source, tensor, out[place * size : (place + count) * size], order[place : place + count])
        place += count
    source.forget_tensor(tensor.name)


def _put_factors(source: WeightSource, tensor: TensorSpec, out: torch.Tensor, parts: Sequence[int] = (0,)) -> None:
    """Write what all weights of a tensor, or of each of these parts, are multiplied by into the packed matrices `out`,
    where the type has room for it."""
    at = plane_offsets(tensor.qtype, tensor.cols).get("factor")
    if at is not None:
        factors = torch.tensor([source.factor(tensor.name, part) for part in parts], dtype=torch.float32)
        planes = out.view(len(parts), -1, record_nbytes(tensor.qtype, tensor.cols))[..., at[0] : at[0] + at[1]]
        planes.copy_(factors[:, None, None].repeat(1, 1, ROW_BLOCK).view(torch.uint8))


def _cut_matrix(raw: np.ndarray, part: TensorSpec, whole: TensorSpec, ranges: tuple[int, int, int, int]) -> np.ndarray:
    """The file bytes of a slice: those of `ranges` in each of as many equal parts as that takes, along both axes."""
    row0, row1, col0, col1 = ranges
    below, beside = max(1, part.rows // (row1 - row0)), max(1, part.cols // (col1 - col0))
    rows = raw.reshape(below, whole.rows // below, -1)[:, row0:row1].reshape(below * (row1 - row0), -1)
    width = whole.cols // beside
    cut = [
        _cut_rows(rows, part.qtype, whole.cols, (0, len(rows), at + col0, at + col1))
        for at in range(0, whole.cols, width)
    ]
    return cut[0] if beside == 1 else np.concatenate(cut, 1)


def _cut_rows(raw: np.ndarray, qtype: str, cols: int, ranges: tuple[int, int, int, int]) -> np.ndarray:
    """The file bytes of a slice of a matrix of `cols` columns, which are cut at whole quant blocks."""
    row0, row1, col0, col1 = ranges
    quant = QUANT_TYPES[qtype]
    grid = raw.reshape(-1, cols // quant.block * quant.nbytes)
    return np.ascontiguousarray(
        grid[row0:row1, col0 // quant.block * quant.nbytes : col1 // quant.block * quant.nbytes]
    )


def _cut_vector(raw: np.ndarray, whole: TensorSpec, wanted: int, span: tuple[int, int]) -> np.ndarray:
    """The file bytes of `wanted` elements: those of `span` in each of as many equal parts as that takes."""
    start, stop = span
    parts = wanted // (stop - start)
    grid = raw.reshape(parts, whole.cols // parts, -1)
    return np.ascontiguousarray(grid[:, start:stop])


def read_vector(source: WeightSource, tensor: TensorSpec) -> torch.Tensor:
    """A vector of the model file, float32."""
    return _vector(source.tensor_bytes(tensor.name), tensor.qtype)


def _vector(raw: np.ndarray, qtype: str) -> torch.Tensor:
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[qtype]
    return torch.frombuffer(bytearray(raw.tobytes()), dtype=dtype).float()


def pack_matrix(raw: np.ndarray, tensor: TensorSpec, out: torch.Tensor) -> None:
    """Write a matrix to `out` (uint8) in the packed layout; raw: its bytes as a file has them."""
    if native.is_available():
        raw = np.ascontiguousarray(raw)
        native.pack(raw, tensor.qtype, tensor.rows, tensor.cols, out)
        return
    # numpy twin: records are independent, so threads take a share each
    step = max(ROW_BLOCK, 1024)
    rows = raw.reshape(tensor.rows, -1)

    def pack(start: int) -> None:
        stop = min(start + step, tensor.rows)
        part = layout.pack_reference(np.ascontiguousarray(rows[start:stop]), tensor.qtype, stop - start, tensor.cols)
        at = packed_nbytes(tensor.qtype, start, tensor.cols)
        out[at : at + part.size].copy_(torch.from_numpy(part.reshape(-1)))

    with ThreadPoolExecutor() as pool:
        list(pool.map(pack, range(0, tensor.rows, step)))
