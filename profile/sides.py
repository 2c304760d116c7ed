"""Which kernels the runtime will use on each side of this machine, and what to note when fast ones are missing."""

import torch

from pshard.buffers import SMALL_BATCH
from pshard.runtime.kernels import native
from pshard.runtime.kernels.api import Kernels
from pshard.runtime.kernels.host import HostKernels
from pshard.runtime.kernels.plain import PlainKernels


def choose_host_kernels() -> tuple[Kernels, list[str]]:
    """Host kernels and notes."""
    if native.is_available():
        return HostKernels(), []
    return PlainKernels(), [f"the host was timed with torch fallbacks, which are much slower: {native.why_missing()}"]


def open_gpu_kernels(device: torch.device) -> Kernels:
    """Kernels of a GPU."""
    from pshard.runtime.kernels.cuda import CudaKernels

    return CudaKernels(device, SMALL_BATCH)


def describe_host_kernels() -> tuple[str, str]:
    """(ISA, "native" or "torch") of the host kernels."""
    if native.is_available():
        return native.isa(), "native"
    return torch.backends.cpu.get_cpu_capability().lower(), "torch"
