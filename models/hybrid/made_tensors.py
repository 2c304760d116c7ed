"""Tensors that are not in files as units want them: some rows of one, or other numbers made of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pshard.models.stored import StoredTensor
from pshard.quant import file_nbytes

Spans = Sequence[tuple[int, int]]  # (from, to) along a tensor's first dimension
PLAIN = ("F32", "F16", "BF16")  # types of numbers as they are


@dataclass(frozen=True, kw_only=True)
class MadeTensor(StoredTensor):
    """A tensor whose bytes are made of those of another one, `source`, as they are read."""

    source: StoredTensor

    def expect(self) -> None:
        self.source.expect()

    def forget(self) -> None:
        self.source.forget()


@dataclass(frozen=True, kw_only=True)
class PickedRows(MadeTensor):
    """The rows in `spans` of the matrix `source`, one span below the other: no bit of them changes."""

    spans: tuple[tuple[int, int], ...]

    def read(self) -> np.ndarray:
        rows = self.source.read().reshape(self.source.shape[0], -1)
        return freeze(np.concatenate([rows[start:stop] for start, stop in self.spans]))

    def factor(self, number: int = 0) -> float:
        return self.source.factor(number)


@dataclass(frozen=True, kw_only=True)
class MadeNumbers(MadeTensor):
    """float32 numbers, each made of one of the vector `source`."""

    make: Callable[[np.ndarray], np.ndarray]

    def read(self) -> np.ndarray:
        return freeze(self.make(read_numbers(self.source)).astype(np.float32))


@dataclass(frozen=True, kw_only=True)
class GivenNumbers(StoredTensor):
    """float32 numbers that stand in no tensor of the file."""

    values: tuple[float, ...]

    def read(self) -> np.ndarray:
        return freeze(np.array(self.values, np.float32))

    def expect(self) -> None:
        """Nothing."""

    def forget(self) -> None:
        """Nothing."""


def give_numbers(name: str, values: tuple[float, ...], lender: StoredTensor) -> StoredTensor:
    """A vector of these; lender: any tensor of the same file."""
    return GivenNumbers(name, "F32", (len(values),), lender.file, lender.offset, values=values)


def read_numbers(tensor: StoredTensor) -> np.ndarray:
    """A vector's numbers, float32. Raises UserError for one of a type that holds none."""
    check_vector(tensor)
    raw = tensor.read()
    if tensor.qtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view({"F32": "<f4", "F16": "<f2"}[tensor.qtype]).astype(np.float32)


def take_rows(name: str, source: StoredTensor, spans: Spans) -> StoredTensor:
    """Those rows of a matrix, or numbers of a vector, under a name of their own; one span stays where it is in the
    file."""
    shape = sum(stop - start for start, stop in spans), *source.shape[1:]
    if len(spans) == 1 and not source.slabs and type(source) is StoredTensor:
        before = file_nbytes(source.qtype, spans[0][0], source.shape[1] if len(source.shape) > 1 else 1)
        return replace(source, name=name, shape=shape, offset=source.offset + before)
    return PickedRows(name, source.qtype, shape, source.file, source.offset, source=source, spans=tuple(spans))


def make_numbers(source: StoredTensor, make: Callable[[np.ndarray], np.ndarray]) -> StoredTensor:
    """A vector of other numbers. Raises UserError for one of a type that holds none."""
    check_vector(source)
    return MadeNumbers(source.name, "F32", source.shape, source.file, source.offset, source=source, make=make)


def check_vector(tensor: StoredTensor) -> None:
    """Raises UserError for a type that holds no plain numbers."""
    if tensor.qtype not in PLAIN:
        tensor.fail(f"is a vector of type {tensor.qtype}, and vectors are F32, F16 or BF16")


def freeze(data: np.ndarray) -> np.ndarray:
    """An array's bytes as `StoredTensor.read` gives them: u8 [nbytes], read-only."""
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    flat.flags.writeable = False
    return flat
