"""A matrix that a folder has as several tensors: codes, scales and more, read as one of a type of GGUF's."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pshard.models.hybrid.made_tensors import freeze, read_numbers
from pshard.models.stored import FETCH_AGAIN, StoredTensor

_NUMBERS = {"F32": "<f4", "F16": "<f2", "U8": "u1", "I32": "<i4", "F8_E4M3": "u1"}
SCALES = ("F32", "BF16", "F16")  # types of scales
Arrays = dict[str, np.ndarray]
Make = Callable[["JoinedMatrix", Arrays], np.ndarray]
Module = dict[str, StoredTensor]  # tensors of one matrix by what their names end with


@dataclass(frozen=True)
class ColumnOrder:
    """Columns that lie in any order: `groups_of` has the group of each, of as many columns as the other groups."""

    groups_of: StoredTensor
    groups: int

    def read(self) -> np.ndarray:
        """As `sort` of what is in the file."""
        return self.sort(_read_array(self.groups_of))

    def sort(self, of: np.ndarray) -> np.ndarray:
        """Which column comes at each place once they are sorted by their groups, int64. Raises UserError for groups
        that do not exist, or are of unlike sizes."""
        check_groups(self.groups_of, of, self.groups)
        counts, each = np.bincount(of, minlength=self.groups), len(of) // self.groups
        if (counts != each).any():
            wrong = int(np.argmax(counts != each))
            what = f"has {counts[wrong]} columns in group {wrong}, where a group has {each}: the file is damaged"
            self.groups_of.fail(what, FETCH_AGAIN)
        return np.argsort(of, kind="stable")


def check_groups(tensor: StoredTensor, of: np.ndarray, groups: int) -> None:
    """Raises UserError for a group of a column that there is not."""
    if of.min() < 0 or of.max() >= groups:
        wrong = int(of.min() if of.min() < 0 else of.max())
        tensor.fail(f"names group {wrong} of {groups}: the file is damaged", FETCH_AGAIN)


@dataclass(frozen=True, kw_only=True)
class JoinedMatrix(StoredTensor):
    """The bytes that `make` builds of the tensors `parts`, by what their names end with.

    make: called with this tensor, which names what is wrong, and the parts' numbers. multiplier: one number by which
    all weights are multiplied, or with `divides` divided, where the type has room for such a factor. order: that in
    which its columns are sorted.
    """

    parts: tuple[tuple[str, StoredTensor], ...]
    make: Make
    multiplier: StoredTensor | None = None
    divides: bool = False
    order: ColumnOrder | None = None

    def read(self) -> np.ndarray:
        return freeze(self.make(self, {key: _read_array(part) for key, part in self.parts}))

    def expect(self) -> None:
        for _, part in self.parts:
            part.expect()

    def forget(self) -> None:
        for _, part in self.parts:
            part.forget()

    def factor(self, number: int = 0) -> float:
        if self.multiplier is None:
            return super().factor(number)
        value = float(_read_array(self.multiplier).reshape(-1)[0])
        if not 0 < abs(value) < float("inf"):
            self.multiplier.fail(f"is {value}, by which no weights are multiplied: the file is damaged", FETCH_AGAIN)
        return float(np.float32(1) / np.float32(value)) if self.divides else value


def _read_array(tensor: StoredTensor) -> np.ndarray:
    """A tensor's numbers in its shape; BF16 as float32, E4M3 as bytes."""
    numbers = read_numbers(tensor) if tensor.qtype == "BF16" else tensor.read().view(_NUMBERS[tensor.qtype])
    return numbers.reshape(tensor.shape)


def check_rank(tensor: StoredTensor) -> tuple[int, int]:
    """A matrix' shape. Raises UserError for what is none."""
    if len(tensor.shape) != 2:
        tensor.fail(f"has shape {list(tensor.shape)}, not two dimensions")
    return tensor.shape[0], tensor.shape[1]


def check_types(tensor: StoredTensor, *known: str) -> None:
    """Raises UserError for another type than these."""
    if tensor.qtype not in known:
        tensor.fail(f"has type {tensor.qtype}, not {'one of ' if len(known) > 1 else ''}{', '.join(known)}")
