"""What a GPU's kernels have to keep to, asked in one place: tiles are taken by these limits. Importing this needs no
torch."""

import platform
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pshard.machine import emulated_capability

if TYPE_CHECKING:
    import torch

LEAST_CAPABILITY = 80  # of the kernels in Triton: below, the tensor cores lack bfloat16 and the int8 products


@dataclass(frozen=True)
class CardLimits:
    """The limits of a GPU.

    `capability`: 86 for 8.6. `shared_block` and `shared_processor`: bytes of shared memory that one program may ask
    for, and that a processor has. `registers` and `threads`: of a processor; registers have 32 bits. `processors`: how
    many there are. `l2`: bytes of the cache that all share. `bf16`: whether its tensor cores multiply bfloat16. `wddm`:
    whether Windows schedules it, which gathers launches and resets a GPU whose kernel runs for two seconds.
    """

    name: str
    capability: int
    shared_block: int
    shared_processor: int
    registers: int
    threads: int
    processors: int
    l2: int
    bf16: bool
    wddm: bool = False

    @property
    def runs_kernels(self) -> bool:
        """Whether the kernels in Triton can run there."""
        return self.capability >= LEAST_CAPABILITY and self.bf16


# One card of each capability, for those who compile for a card that is not there: of GeForce one with few processors.
# From NVIDIA's CUDA C++ Programming Guide, table of technical specifications by compute capability, and its datasheets.
KNOWN_CARDS = {
    card.capability: card
    for card in (
        CardLimits("T4", 75, 64 << 10, 64 << 10, 65536, 1024, 40, 4 << 20, bf16=False),
        CardLimits("A100", 80, 163 << 10, 164 << 10, 65536, 2048, 108, 40 << 20, bf16=True),
        CardLimits("GeForce RTX 3060", 86, 99 << 10, 100 << 10, 65536, 1536, 28, 9 << 18, bf16=True),
        CardLimits("GeForce RTX 4060", 89, 99 << 10, 100 << 10, 65536, 1536, 24, 24 << 20, bf16=True),
        CardLimits("H100", 90, 227 << 10, 228 << 10, 65536, 2048, 132, 50 << 20, bf16=True),
        CardLimits("B200", 100, 227 << 10, 228 << 10, 65536, 2048, 148, 126 << 20, bf16=True),
        CardLimits("GeForce RTX 5060", 120, 99 << 10, 100 << 10, 65536, 1536, 30, 32 << 20, bf16=True),
    )
}
INTERPRETED = KNOWN_CARDS[90]  # what a CPU is taken for, on which Triton's interpreter runs the kernels


def card_limits(device: "torch.device | str") -> CardLimits:
    """The limits of a CUDA device; of a CPU those of INTERPRETED. Raises what torch raises where there is no such
    device."""
    import torch

    device = torch.device(device)
    if device.type != "cuda":
        return INTERPRETED
    return _read_limits(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache(maxsize=64)
def _read_limits(index: int) -> CardLimits:
    import torch

    found: Any = torch.cuda.get_device_properties(index)  # whose stubs lack some
    capability = 10 * found.major + found.minor
    limits = CardLimits(
        found.name, capability, found.shared_memory_per_block_optin, found.shared_memory_per_multiprocessor,
        found.regs_per_multiprocessor, found.max_threads_per_multi_processor, found.multi_processor_count,
        found.L2_cache_size, bf16=capability >= 80, wddm=is_scheduled_by_windows(),
    )  # fmt: skip
    wanted = emulated_capability()
    return take_for(limits, KNOWN_CARDS[wanted]) if wanted else limits


def take_for(here: CardLimits, other: CardLimits) -> CardLimits:
    """The card that is here where it is taken for another: processors and L2 are its own, whatever that other has."""
    return replace(
        here,
        name=f"{here.name} as sm_{other.capability}",
        capability=other.capability,
        shared_block=min(here.shared_block, other.shared_block),
        shared_processor=min(here.shared_processor, other.shared_processor),
        registers=min(here.registers, other.registers),
        threads=min(here.threads, other.threads),
        bf16=here.bf16 and other.bf16,
    )


def is_scheduled_by_windows() -> bool:
    """Whether GPUs of this system are Windows' to schedule: on Windows, and in its subsystem for Linux."""
    return sys.platform == "win32" or "microsoft" in platform.release().lower()
