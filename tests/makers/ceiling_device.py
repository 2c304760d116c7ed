"""The CPU as accelerator on a system that page-locks only so much memory."""

from collections.abc import Iterable
from typing import Any

import torch

from pshard.runtime.devices.device import CpuDevice


class CeilingDevice(CpuDevice):
    """Page-locks up to so many bytes, and counts the bytes of copies from memory that is and is not page-locked."""

    locks = True

    def __init__(self, ceiling: int) -> None:
        super().__init__()
        self.left = ceiling
        self.answers: list[bool] = []  # to every question for page-locked memory
        self.locked: dict[int, int] = {}  # first address -> bytes
        self.copied = {True: 0, False: 0}  # by whether the source was page-locked
        self.filled = 0  # bytes

    def page_lock(self, memory: torch.Tensor) -> bool:
        self.answers.append(memory.numel() <= self.left)
        if self.answers[-1]:
            self.left -= memory.numel()
            self.locked[memory.data_ptr()] = memory.numel()
        return self.answers[-1]

    def page_unlock(self, memory: torch.Tensor) -> None:
        assert self.locked.pop(memory.data_ptr()) == memory.numel()
        self.left += memory.numel()

    def is_locked(self, memory: torch.Tensor) -> bool:
        at = memory.data_ptr()
        return any(start <= at and at + memory.nbytes <= start + n for start, n in self.locked.items())

    def copy_in(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Any] = ()) -> Any:
        self.copied[self.is_locked(src)] += src.nbytes
        return super().copy_in(dst, src, after)

    def fill(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Any] = ()) -> Any:
        assert self.is_locked(dst) and not self.is_locked(src)
        self.filled += src.nbytes
        return super().fill(dst, src, after)
