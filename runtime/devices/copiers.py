"""Copies within host memory, by a few threads beside those that compute."""

import ctypes

import torch

from pshard.runtime.devices.cuda_driver import queue_call
from pshard.runtime.kernels.cpu import native

MOST_THREADS = 8  # one copies some 8 GB/s, and eight half as fast as a link; more would take cores from the kernels


def move(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy contiguous memory on this thread; the interpreter lock is released, so compute goes on."""
    ctypes.memmove(to.data_ptr(), source.data_ptr(), source.nbytes)


class Copiers:
    """Threads that copy, one copy at a time. Without the C++ library the calling thread copies by itself."""

    def __init__(self) -> None:
        self._functions = native.functions_of("copiers") if native.is_available() else {}
        self._team = self._functions["open"](copy_threads()) if self._functions else None

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy contiguous host memory; the interpreter lock is released meanwhile."""
        if self._team is None:
            move(to, source)
        else:
            self._functions["run"](self._job(to, source))

    def queue(self, to: torch.Tensor, source: torch.Tensor, stream: int) -> None:
        """Queue the copy on a CUDA stream (its handle), where a thread of the driver has it made: no Python runs then.

        Raises RuntimeError when the driver refuses, or without the C++ library.
        """
        if self._team is None:
            raise RuntimeError("host memory cannot be copied in a stream without the C++ library")
        queue_call(self._functions["run"], self._job(to, source), stream)

    def _job(self, to: torch.Tensor, source: torch.Tensor) -> int:
        if not (to.is_contiguous() and source.is_contiguous() and to.nbytes == source.nbytes):
            raise ValueError("copies within host memory are between contiguous tensors of equal size")
        return self._functions["job"](self._team, to.data_ptr(), source.data_ptr(), to.nbytes)

    def close(self) -> None:
        """End the threads; no copy may be under way."""
        if self._team is not None:
            self._functions["close"](self._team)
            self._team = None


def copy_threads() -> int:
    """How many threads copy: at most half as many as compute."""
    return max(1, min(MOST_THREADS, native.threads() // 2))
