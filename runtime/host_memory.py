"""Host memory of exact size in huge pages, where the system has them: weights and KV are read faster from it."""

import ctypes
import mmap
import platform
import re
import sys
from pathlib import Path

import torch

from pshard.errors import UserError

MEMORY_INFO = Path("/proc/meminfo")  # fields: proc_meminfo(5)


def map_memory(nbytes: int) -> torch.Tensor:
    """Zeroed uint8 memory, not yet touched; it lives as long as the tensor and its views.

    Raises UserError when the system has not so much: it would grant it, and end a process when it is filled.
    """
    if nbytes > (free := available_bytes()):
        raise UserError(
            f"cannot take {nbytes >> 20} MiB of host memory ({free >> 20} MiB are free); "
            "free some or run a smaller model"
        )
    # private: the system's huge pages are for memory that is not shared, unless it is set up otherwise
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), **flags)
    except OSError as error:
        raise UserError(
            f"cannot take {nbytes >> 20} MiB of host memory ({error.strerror}); free some or run a smaller model"
        ) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]


def available_bytes() -> int:
    """Host memory and swap that can be had without ending anything; no limit where the system does not say."""
    try:
        text = MEMORY_INFO.read_text()
    except OSError:
        return sys.maxsize
    found = dict(re.findall(r"^(MemAvailable|SwapFree): +(\d+) kB$", text, re.MULTILINE))
    return sum(map(int, found.values())) << 10 if "MemAvailable" in found else sys.maxsize


def keep_freed_memory() -> None:
    """Let the C library keep up to 512 MiB of freed memory instead of giving it back to the system.

    Torch's temporaries of a prefill on the CPU otherwise fault in anew for every operator: 27% slower on two Zen 5
    cores. Numbers of the options: <malloc.h> of glibc; other C libraries are left alone.
    """
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_threshold = -1, -3
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 512 << 20)
        libc.mallopt(mmap_threshold, 512 << 20)
