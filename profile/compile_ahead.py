"""Compiles a GPU's matmul kernels for many tiles in processes of their own, into Triton's cache.

Most of a compilation is Python code, so threads would not help. The processes leave the GPU alone: Triton's driver is
replaced there by one that knows what to compile for and starts nothing.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from pshard.profile.identify import count_cores, usable_memory
from pshard.profile.tile_cases import TileCase, calls_of
from pshard.quant import packed_nbytes
from pshard.runtime.kernels.api import Packed
from pshard.tiles import Tile

MOST_PROCESSES = 32  # each takes 4 s to start
PROCESS_BYTES = 1 << 30  # of memory, at most; all together take a quarter of it

Job = tuple[TileCase, Tile]


@dataclass(frozen=True)
class Compiled:
    """The jobs that were compiled, and what went wrong with others; the rest was not reached."""

    jobs: frozenset[Job]
    errors: tuple[BaseException, ...]


def count_processes() -> int:
    """How many processes compile at once: as many as there are cores, and memory for them."""
    return max(1, min(count_cores(), MOST_PROCESSES, usable_memory() // 4 // PROCESS_BYTES))


def compile_ahead(jobs: Sequence[Job], processes: int, seconds: float) -> Compiled:
    """Compile for the GPU that is current, in this order, what is reached in so many seconds."""
    from triton.runtime import driver

    target, deadline = driver.active.get_current_target(), time.monotonic() + seconds
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(processes, len(jobs)), spawn, _leave_gpus_alone)
    try:
        with _interrupts_ignored():
            futures = {job: pool.submit(_compile, target, *job) for job in jobs}
        wait(futures.values(), max(0.0, deadline - time.monotonic()))
    finally:
        pool.shutdown(cancel_futures=True)  # waits for those at work, which would disturb what is timed next
    errors = {job: future.exception() for job, future in futures.items() if not future.cancelled()}
    done = frozenset(job for job, error in errors.items() if error is None)
    return Compiled(done, tuple(error for error in errors.values() if error is not None))


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes that start meanwhile ignore Ctrl-C from their first moment on: this one ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave_gpus_alone() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)


def _compile(target: Any, case: TileCase, tile: Tile) -> None:
    """Call the kernel for the first matrix of the case as `calls_of` does on the GPU, so that the same is compiled."""
    kernels = _kernels(target)
    rows, cols = case.matrices[0]
    weight = Packed(torch.empty(packed_nbytes(case.qtype, rows, cols), dtype=torch.uint8), case.qtype, rows, cols)
    kernels.use_tiles((case.choose(tile),))
    calls_of(kernels, case, [weight], torch.empty(case.tokens, cols, dtype=kernels.act_dtype))[0](0)


@cache
def _kernels(target: Any) -> Any:
    from triton.runtime import driver

    driver.set_active(_CompileOnly(target))
    from pshard.runtime.kernels.cuda import CudaKernels

    return CudaKernels("cpu", 64)


class _CompileOnly:
    """As much of a Triton driver as it takes to compile for a GPU that is not there."""

    def __init__(self, target: Any) -> None:
        self._target, self.utils = target, self

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 30}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[str, None, int, int, int]:
        return name, None, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: None
