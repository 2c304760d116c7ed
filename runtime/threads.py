"""Threads of the host: torch's and those of the C++ pool."""

import os

import torch

from pshard.runtime.kernels import native


def use_threads(count: int) -> None:
    """Give torch and the C++ pool `count` threads, the pool's each on a processor of its own.

    Unbound, two of them may share a processor for a time slice, and all wait for both: 9 ms instead of 0.8 for a
    matrix-vector product was seen on 16 cores.
    """
    torch.set_num_threads(count)
    if native.is_available():
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        native.set_threads(count, cpus[:count] if len(cpus) >= count else None)
