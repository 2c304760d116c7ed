"""A table on disk, of which rows are read as they are looked up."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from pshard.runtime.kernels.api import Packed
from pshard.runtime.memory.disk.file_parts import FileRows
from pshard.runtime.memory.disk.reader import DiskReader, RowPieces
from pshard.runtime.memory.weights import FoundRows, pack_matrix
from pshard.tensor import TensorSpec

BUFFER = 4 << 20  # bytes of rows that are read at once


class FarTable:
    """A matrix whose rows lie in files. nbytes: of host memory that it takes."""

    _asked: RowPieces  # threads may still look at it when a read has failed

    def __init__(self, reader: DiskReader, runs: Sequence[FileRows], tensor: TensorSpec) -> None:
        """runs: where its rows lie, one run below the other."""
        self._reader, self._tensor = reader, tensor
        self._row = tensor.row_nbytes
        self._files, offsets, counts = np.array(runs, np.int64).T
        self._ends = counts.cumsum()  # the number of the row behind each run
        self._starts = offsets - (self._ends - counts) * self._row  # where row 0 would be
        self._most = min(tensor.rows, max(1, BUFFER // self._row))
        self._read = np.zeros(self._most * self._row, np.uint8)  # likewise
        self.nbytes = self._read.nbytes

    def read(self, ids: torch.Tensor) -> Iterator[FoundRows]:
        """What ids (int64 [count]) look up, so many at once, of equal ones a row once. Raises RuntimeError where a read
        has failed."""
        for at in range(0, len(ids), self._most):
            some = slice(at, min(at + self._most, len(ids)))
            numbers, places = np.unique(ids[some].numpy(), return_inverse=True)
            yield FoundRows(some, self._bring(numbers), torch.from_numpy(places.astype(np.int64)))

    def _bring(self, numbers: np.ndarray) -> Packed:
        """Those rows, as a matrix of their own."""
        own = replace(self._tensor, shape=(len(numbers), self._tensor.cols))
        run = np.searchsorted(self._ends, numbers, "right")
        self._asked = RowPieces(self._files[run], self._starts[run] + numbers * self._row, self._row)
        self._reader.wait(self._reader.ask(self._asked, self._read.ctypes.data))
        packed = torch.empty(own.packed_nbytes, dtype=torch.uint8)
        pack_matrix(self._read[: own.file_nbytes], own, packed)
        return Packed(packed, own.qtype, own.rows, own.cols)
