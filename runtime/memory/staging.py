"""Copies to the device from what is not page-locked memory: through a small ring that is.

Threads fill one buffer of the ring while the copy engine empties the others. Both are lanes of the device, so order and
events are those of direct copies; and a ring that is full ahead of a slot that is not free yet saves its fill time.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from pshard.buffers import BUFFERS, CHUNK
from pshard.quant import TENSOR_ALIGN, align
from pshard.runtime.devices.device import Device
from pshard.runtime.memory.host.host_memory import map_memory


class StagingRing:
    """Buffers that copies take turns with. Raises MemoryError when they cannot be page-locked.

    most: bytes of the largest copy; a ring for small ones is smaller. fill: what brings bytes to a buffer; None: the
    device's threads, from host memory. split: how many bytes each buffer takes of a source; None: as many as it holds;
    least: how many it must hold.
    """

    def __init__(
        self,
        device: Device,
        most: int,
        fill: Callable[..., Any] | None = None,
        split: Callable[[torch.Tensor], list[int]] | None = None,
        least: int = 0,
    ) -> None:
        chunk = align(max(least, min(CHUNK, -(-most // BUFFERS))), TENSOR_ALIGN)
        self._device, self._fill, self._split = device, fill, split
        self._memory = map_memory(BUFFERS * chunk)
        if not device.page_lock(self._memory):
            raise MemoryError(f"{self.nbytes} bytes of a staging ring cannot be page-locked")
        self._buffers = self._memory.split(chunk)
        self._emptied: list[Any] = [None] * BUFFERS  # event of the last copy from each buffer
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the ring takes."""
        return self._memory.numel()

    def copy_in(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Any] = ()) -> Any:
        """Like `Device.copy_in`, for contiguous bytes."""
        done, fill = None, self._fill or self._device.fill
        sizes = self._split(src) if self._split else self._buffers[0].numel()
        for to, source in zip(dst.split(sizes), src.split(sizes), strict=True):
            at, self._next = self._next, (self._next + 1) % BUFFERS
            buffer, emptied = self._buffers[at][: source.numel()], self._emptied[at]
            filled = fill(buffer, source, () if emptied is None else (emptied,))
            done = self._emptied[at] = self._device.copy_in(to, buffer, (*after, filled))
            after = ()  # copies of a lane happen in turn
        return done

    def close(self) -> None:
        """Unlock the memory; no copy may be under way."""
        self._device.page_unlock(self._memory)


class DirectFill:
    """Copies to an accelerator whose memory is the host's: as StagingRing, but what fills a ring fills their places at
    once."""

    nbytes = 0

    def __init__(self, device: Device, fill: Callable[..., Any], split: Callable[[torch.Tensor], list[int]]) -> None:
        self._device, self._fill, self._split = device, fill, split

    def copy_in(self, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Any] = ()) -> Any:
        """Like `Device.copy_in`, for contiguous bytes."""
        done, sizes = None, self._split(src)
        for to, source in zip(dst.split(sizes), src.split(sizes), strict=True):
            done = self._fill(to, source, after)
            after = ()  # a lane fills in turn
        return self._device.copy_in(dst[:0], dst[:0], (done,))  # who waits for a later copy waits for this one too

    def close(self) -> None:
        """Nothing to give back."""
