"""Host memory of exact size as torch's, and what the C library keeps of it: weights and KV are read faster from huge
pages."""

import ctypes
import mmap
import platform
from pathlib import Path

import torch

from pshard.runtime.memory.host.fresh_memory import map_fresh


def map_memory(nbytes: int) -> torch.Tensor:
    """Zeroed uint8 memory, not yet touched; it lives as long as the tensor and its views. Raises UserError as
    `map_fresh` does, and notes what it does."""
    return as_tensor(map_fresh(nbytes), nbytes)


def measure_process() -> int:
    """Bytes of host memory that this process takes, of what it shares with others its part, without pages of files
    (Pss - Pss_File of proc_pid_smaps(5)); 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return max(0, kib.get("Pss", 0) - kib.get("Pss_File", 0)) << 10


def as_tensor(memory: mmap.mmap, nbytes: int) -> torch.Tensor:
    """The first bytes of memory, which lives as long as the tensor and its views."""
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
