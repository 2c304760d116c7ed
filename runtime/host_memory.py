"""Host memory of exact size in huge pages, where the system has them: weights and KV are read faster from it."""

import ctypes
import mmap
import platform

import torch

from pshard.errors import UserError


def map_memory(nbytes: int) -> torch.Tensor:
    """Zeroed uint8 memory, not yet touched; it lives as long as the tensor and its views. UserError: there is none."""
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
