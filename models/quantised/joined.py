"""A matrix that a folder has as several tensors: codes, scales and more, read as one of a type of GGUF's."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pshard.models.hybrid.made_tensors import freeze
from pshard.models.stored import FETCH_AGAIN, StoredTensor

NUMBERS = {"F32": "<f4", "F16": "<f2", "U8": "u1", "I32": "<i4", "F8_E4M3": "u1"}
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class JoinedMatrix(StoredTensor):
    """The bytes that `make` builds of the tensors `parts`, by what their names end with.

    make: called with this tensor, which names what is wrong, and the parts' numbers. multiplier: one number by which
    all weights are multiplied, or with `divides` divided, where the type has room for such a factor.
    """

    parts: tuple[tuple[str, StoredTensor], ...]
    make: Callable[["JoinedMatrix", Arrays], np.ndarray]
    multiplier: StoredTensor | None = None
    divides: bool = False

    def read(self) -> np.ndarray:
        return freeze(self.make(self, {key: read_numbers(part) for key, part in self.parts}))

    def expect(self) -> None:
        for _, part in self.parts:
            part.expect()

    def forget(self) -> None:
        for _, part in self.parts:
            part.forget()

    def factor(self, number: int = 0) -> float:
        if self.multiplier is None:
            return super().factor(number)
        value = float(read_numbers(self.multiplier).reshape(-1)[0])
        if not 0 < abs(value) < float("inf"):
            self.multiplier.fail(f"is {value}, by which no weights are multiplied: the file is damaged", FETCH_AGAIN)
        return float(np.float32(1) / np.float32(value)) if self.divides else value


def read_numbers(tensor: StoredTensor) -> np.ndarray:
    """A tensor's numbers in its shape; BF16 as float32, E4M3 as bytes."""
    raw = tensor.read()
    if tensor.qtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
    return raw.view(NUMBERS[tensor.qtype]).reshape(tensor.shape)
