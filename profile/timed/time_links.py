"""The link between host memory and an accelerator: rates by size and memory, contention, hand-off latency.

Copies go through the runtime's own copy lanes. For the CPU as accelerator these are real copies between two buffers.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import torch

from pshard.machine import Contention, CopyTiming
from pshard.profile.timed.operands import fill_ordinary
from pshard.profile.timed.time_kernels import time_series
from pshard.profile.timing_loop import Pace, median_seconds
from pshard.runtime.devices.device import Device
from pshard.runtime.memory.host.host_memory import map_memory
from pshard.runtime.memory.staging import StagingRing

KIB, MIB = 1 << 10, 1 << 20
COPY_SIZES = (4 * KIB, 64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
BATCH_BYTES = 16 * MIB  # small copies are queued until so many bytes are under way, as the runtime queues them
DEEPEST_QUEUE = 32
DUPLEX_BYTES = 32 * MIB
ROUNDS = 3
QUEUED_BESIDE = 16  # copies under way beside a CPU kernel: more than the link moves while it reads its 66 MB
MOST_PIECES = 512  # pieces of a buffer that copies take turns with

Copy = Callable[[torch.Tensor, torch.Tensor], Any]


@dataclass(frozen=True)
class LinkBench:
    """A device's lanes and the buffers that copies go between. `locked` is None when page-locking was refused, `ring`
    also where the device cannot fill one."""

    device: Device
    remote: torch.Tensor
    pageable: torch.Tensor
    locked: torch.Tensor | None
    ring: StagingRing | None = None

    @property
    def host(self) -> torch.Tensor:
        """Page-locked memory, or pageable where that was refused."""
        return self.pageable if self.locked is None else self.locked

    def close(self) -> None:
        self.device.synchronize()
        if self.ring is not None:
            self.ring.close()
        if self.locked is not None:
            self.device.page_unlock(self.locked)


def open_link(device: Device, host_bytes: int, device_bytes: int) -> LinkBench:
    """Buffers of `host_bytes` in pageable and in page-locked memory, so large that copies from them miss the caches.

    `device_bytes`: as much as the largest copy.
    """
    host_bytes = max(host_bytes, 2 * device_bytes)
    pageable, locked = (fill_ordinary(map_memory(host_bytes)) for _ in range(2))
    remote = device.allocate(device_bytes)
    remote.zero_()
    if not device.page_lock(locked):
        return LinkBench(device, remote, pageable, None)
    ring = None
    if device.fills:
        with suppress(MemoryError):  # no more can be page-locked: then the runtime stages nothing, too
            ring = StagingRing(device, device_bytes)
    return LinkBench(device, remote, pageable, locked, ring)


def link_from(device: Device, memory: torch.Tensor, device_bytes: int) -> LinkBench:
    """Copies to the device from host memory that is there already (uint8) and is page-locked until the link closes."""
    remote = device.allocate(device_bytes)
    remote.zero_()
    return LinkBench(device, remote, memory, memory if device.page_lock(memory) else None)


def time_copies(link: LinkBench, sizes: Iterable[int], pace: Pace) -> list[CopyTiming]:
    """Seconds per copy, queued one behind the other: in both directions from page-locked and pageable memory, and to
    the device from pageable memory staged through a ring, as the runtime copies weights that are not page-locked."""
    device, ways = link.device, list[tuple[str, str, torch.Tensor, Copy]]()
    if link.locked is not None:
        ways += [("h2d", "pinned", link.locked, device.copy_in), ("d2h", "pinned", link.locked, device.copy_out)]
    if link.ring is not None:
        ways.append(("h2d", "staged", link.pageable, link.ring.copy_in))
    ways += [("h2d", "pageable", link.pageable, device.copy_in), ("d2h", "pageable", link.pageable, device.copy_out)]
    rows = []
    for direction, memory, host, copy in ways:
        series = time_series(sizes, inf, partial(_time_copy, link, host, direction, copy, pace))
        rows += [CopyTiming(direction, memory, nbytes, seconds) for nbytes, seconds in series]
    return rows


def _time_copy(link: LinkBench, host: torch.Tensor, direction: str, copy: Copy, pace: Pace, nbytes: int) -> float:
    queued = max(1, min(DEEPEST_QUEUE, BATCH_BYTES // nbytes))
    copies = _copies(link, host, direction, nbytes, copy)

    def run(i: int) -> None:
        for n in range(queued):
            copies[(i * queued + n) % len(copies)]()
        link.device.synchronize()

    return median_seconds(run, pace) / queued


def copy_in_turn(link: LinkBench, direction: str, nbytes: int) -> Callable[[], None]:
    """A function that makes one copy of `nbytes` and waits for it; page-locked memory where that was not refused."""
    turn = itertools.cycle(_copies(link, link.host, direction, nbytes))

    def run() -> None:
        next(turn)()
        link.device.synchronize()

    return run


def _copies(
    link: LinkBench, host: torch.Tensor, direction: str, nbytes: int, copy: Copy | None = None
) -> list[Callable[[], Any]]:
    """Copies of `nbytes` (made by `copy` instead of the direction's lane) whose pieces of host memory lie all over it,
    and on the device as far as its buffer goes."""
    copy = copy or (link.device.copy_in if direction == "h2d" else link.device.copy_out)
    return [
        partial(copy, there, here) if direction == "h2d" else partial(copy, here, there)
        for here, there in zip(_pieces(host, nbytes), itertools.cycle(_pieces(link.remote, nbytes)))
    ]


def _pieces(memory: torch.Tensor, nbytes: int) -> list[torch.Tensor]:
    count = min(MOST_PIECES, memory.numel() // nbytes)
    stride = memory.numel() // count // 64 * 64 if count > 1 else nbytes
    return [memory[i * stride :][:nbytes] for i in range(count)]


def measure_contention(link: LinkBench, read_weights: Callable[[], int] | None, seconds: float) -> Contention:
    """Rates of copies and CPU kernels that run at once, each repeated for `seconds`.

    `read_weights` runs a CPU kernel once and returns the bytes it read from host memory; None leaves that part out.
    """
    host, half = link.host, link.host.numel() // 2
    into = _copy_loop(link, host[:half], "h2d")
    out = _copy_loop(link, host[half:], "d2h")
    both = run_together({"h2d": into, "d2h": out}, seconds)
    if read_weights is None:
        return Contention(h2d_with_d2h=both["h2d"], d2h_with_h2d=both["d2h"])
    part = seconds / ROUNDS  # by turns, the best of each: other programs only make rates look worse
    alone, (cpu_rate, link_rate) = 0.0, (0.0, 0.0)
    for _ in range(ROUNDS):
        alone = max(alone, _read_alone(read_weights, part))
        copied, read = _copy_beside(link, host, read_weights, part)
        cpu_rate, link_rate = max((cpu_rate, link_rate), (read, copied))
    return Contention(link_rate, min(cpu_rate, alone), both["h2d"], both["d2h"], alone)


def _read_alone(read_weights: Callable[[], int], seconds: float) -> float:
    """Bytes per second of CPU kernels."""
    read_weights()
    start, read = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        read += read_weights()
    return read / elapsed


def _copy_beside(
    link: LinkBench, host: torch.Tensor, read_weights: Callable[[], int], seconds: float
) -> tuple[float, float]:
    """Bytes per second of copies and of CPU kernels at once, driven as the executor does: one thread queues copies and
    computes. (A second thread that waits for copies would spin on a core that the kernels' pool needs.)"""
    nbytes = min(DUPLEX_BYTES, host.numel(), link.remote.numel())
    turn = itertools.cycle(_copies(link, host, "h2d", nbytes))
    under_way: deque[Any] = deque()
    copied, read, computing = 0, 0, 0.0
    read_weights()
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        while len(under_way) < QUEUED_BESIDE:
            under_way.append(next(turn)())
        begin = time.perf_counter()
        read += read_weights()
        computing += time.perf_counter() - begin
        while under_way and link.device.happened(under_way[0]):
            under_way.popleft()
            copied += nbytes
    link.device.synchronize()
    return copied / elapsed, read / computing


def _copy_loop(link: LinkBench, host: torch.Tensor, direction: str) -> Callable[[], int]:
    """A function that makes one large copy and returns its bytes; two copies are always under way."""
    nbytes = min(DUPLEX_BYTES, host.numel(), link.remote.numel())
    turn = itertools.cycle(_copies(link, host, direction, nbytes))
    under_way: list[Any] = []

    def run() -> int:
        with link.device.current():  # in a thread of its own
            under_way.append(next(turn)())
            if len(under_way) > 2:
                link.device.host_wait(under_way.pop(0))
                return nbytes
            return 0

    return run


def run_together(tasks: dict[str, Callable[[], int]], seconds: float) -> dict[str, float]:
    """Repeat all tasks at once, a thread for each; units per second of each, by what the tasks return.

    Raises what a task raised.
    """
    rates: dict[str, float] = {}
    errors: list[BaseException] = []
    ready = threading.Barrier(len(tasks))

    def repeat(name: str, task: Callable[[], int]) -> None:
        try:
            task()
            ready.wait()
            start, done = time.perf_counter(), 0
            while (elapsed := time.perf_counter() - start) < seconds:
                done += task()
            rates[name] = done / elapsed
        except BaseException as error:
            ready.abort()
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=item, daemon=True) for item in tasks.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return rates
