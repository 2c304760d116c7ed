"""Which GPUs the runtime computes on, and why it leaves others alone: then the CPU computes, and a note says this."""

import sys
from dataclasses import dataclass
from importlib.util import find_spec

from pshard.runtime.kernels.gpu.card_limits import LEAST_CAPABILITY, card_limits

LEAST = f"{LEAST_CAPABILITY // 10}.{LEAST_CAPABILITY % 10}"
NEEDED = (
    f"the GPU kernels need an NVIDIA card of compute capability {LEAST} or newer (RTX 30, 40, 50, A100, H100), Linux "
    "or WSL 2, and Triton"
)


@dataclass(frozen=True)
class Lack:
    """Why a GPU is not computed on. `remedy`: what makes it usable, "" where nothing does."""

    why: str
    remedy: str = ""


def count_usable() -> int:
    """How many of the GPUs that torch sees are computed on: those before the first that cannot be."""
    import torch

    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return next((i for i in range(seen) if find_lack(i)), seen)


def describe_unused() -> tuple[str, ...]:
    """A line for the first GPU that torch sees and that is not computed on: why, and what is needed."""
    import torch

    seen, used = torch.cuda.device_count() if torch.cuda.is_available() else 0, count_usable()
    lack = find_lack(used) if used < seen else None
    if lack is None:
        return ()
    others = f", and those behind it (to GPU {seen - 1})" if used + 1 < seen else ""
    return (f"GPU {used} is left alone{others}: {lack.why}; {lack.remedy or NEEDED}",)


def find_lack(index: int) -> Lack | None:
    """What keeps a GPU that torch sees from being computed on; None where nothing does."""
    import torch

    if torch.version.hip:  # kernels with PTX in them would end the process in the compiler, which nobody can catch
        return Lack(f"{torch.cuda.get_device_name(index)} is an AMD card, on which nothing was tried")
    if sys.platform == "win32":
        return Lack("Windows has no Triton", "install WSL 2, and pshard in it")
    limits = card_limits(f"cuda:{index}")
    if not limits.runs_kernels:
        return Lack(f"{limits.name} has compute capability {limits.capability // 10}.{limits.capability % 10}")
    if find_spec("triton") is None:
        return Lack("Triton is not installed", "pip install triton")
    return None
