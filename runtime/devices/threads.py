"""Threads of the host: torch's and those of the C++ pool."""

import os

import torch

from pshard.runtime.devices.numa import read_siblings, spread_over_cores
from pshard.runtime.kernels.cpu import native


def use_threads(count: int) -> None:
    """Give torch and the C++ pool `count` threads, the pool's on as many processors, one of each physical core as long
    as there are some. The caller, who is one of them, runs where it may."""
    torch.set_num_threads(count)
    if native.is_available():
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
        cpus = spread_over_cores(tuple(usable), read_siblings())
        native.set_threads(count, cpus[:count] if len(cpus) >= count else None)


def rank_threads(host: int, ranks: int, cores: int, in_turns: bool) -> int:
    """Threads of one of `ranks` ranks with `cores` cores each, on a host that `host` threads serve best.

    Ranks that work at once divide them: a virtual machine may not get as many cores at once as it names, and the pools
    of two ranks with 32 threads each took eight times as long there as with 16. Ranks that take turns (whole layers, at
    decode) use all they have.
    """
    return max(1, min(cores, host if in_turns else host // ranks))
