"""Host memory of exact size in huge pages, where the system has them: weights and KV are read faster from it."""

import mmap

import torch


def map_memory(nbytes: int) -> torch.Tensor:
    """Zeroed uint8 memory, not yet touched; it lives as long as the tensor and its views."""
    memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
