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

    Notes once where the system says that it has not so much: it grants it, and may end a process when it is filled. It
    may also have more: sandboxes and virtual machines get memory as they fill it. Raises UserError when it refuses.
    """
    if nbytes > (free := available_bytes()):
        _note_shortage(free >> 20)
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


_noted: list[int] = []  # free MiB of the shortage that was told of


def _note_shortage(free_mib: int) -> None:
    if not _noted:
        _noted.append(free_mib)
        print(
            f"note: the system says that {free_mib} MiB of host memory are free, which is too little; "
            "if it ends this run, free some or run a smaller model",
            file=sys.stderr,
        )


def available_bytes() -> int:
    """Host memory and swap that can be had without ending anything, as the system says; no limit where it does not."""
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
