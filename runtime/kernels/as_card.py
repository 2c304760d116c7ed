"""Another card on the GPU at hand: kernels are compiled to PTX for an older capability (mma.sync instead of wgmma),
assembled for the GPU that is there, and held to the shared memory and the blocks a processor of that other card.

`pshard.runtime.kernels.gpu` calls `become_card` before its first kernel, in every process that inherits PSHARD_AS_CARD.
Not emulated: numbers of processors, caches, memory and clocks, and kernels of libraries, which stay the real GPU's.
"""

import os
from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

from pshard.errors import UserError

if TYPE_CHECKING:
    from pshard.runtime.kernels.gpu.card_limits import CardLimits

CARD_HERE = "PSHARD_CARD_HERE"  # capability of the real GPU, for processes that compile and leave it alone
BLOCKS = {75: 16, 80: 32, 86: 16, 89: 24, 90: 32, 100: 32, 120: 24}  # most that a processor holds at once
RESERVED = 1024  # bytes of shared memory that each block takes besides its own


def become_card(wanted: int, cards: Mapping[int, "CardLimits"]) -> None:
    """Change Triton in this process. Call it once, before the first kernel is compiled; `cards` by capability.

    Raises UserError for a card that is not known and, when the GPU is first asked for, where that is older or unknown.
    """
    if wanted not in cards:
        raise UserError(f"PSHARD_AS_CARD: there is no card {wanted}; choose {', '.join(map(str, sorted(cards)))}")
    _name_target(wanted, cards)
    _assemble_for_the_card_here(wanted)
    _refuse_above(cards[wanted].shared_block)
    _hold_to_room(wanted, cards)


def capability_here(wanted: int) -> int:
    """Of the GPU that the code is assembled for; `wanted` itself where a process only compiles, without any GPU."""
    return int(os.environ.get(CARD_HERE, wanted))


def room_for_blocks(card: "CardLimits", warps: int, shared: int, registers: int) -> int:
    """Blocks of so many warps, bytes of shared memory and registers a thread that a processor holds; 1 at least.

    Registers are given to warps 256 at a time (CUDA's occupancy calculator).
    """
    by_registers = card.registers // (-(-max(registers, 1) // 8) * 256) // warps
    by_memory = card.shared_processor // (shared + RESERVED)
    return max(1, min(BLOCKS[card.capability], card.threads // (32 * warps), by_memory, by_registers))


def pad_shared(wanted: "CardLimits", here: "CardLimits", warps: int, shared: int, registers: int) -> int:
    """Bytes of shared memory with which a processor of `here` holds as many blocks as one of `wanted`."""
    room = room_for_blocks(wanted, warps, shared, registers)
    if room_for_blocks(here, warps, shared, registers) <= room:
        return shared
    return max(shared, min(here.shared_block, here.shared_processor // room - RESERVED) // 128 * 128)


def _name_target(wanted: int, cards: Mapping[int, "CardLimits"]) -> None:
    """Triton compiles for the wanted card; what the GPU is goes to processes that start from now on."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    ask = CudaDriver.get_current_target

    def answer(driver: Any) -> Any:
        here = ask(driver)
        if here.arch < wanted or here.arch not in cards:
            raise UserError(f"this GPU is a {here.arch}, which cannot be taken for a {wanted}; take an older card")
        os.environ[CARD_HERE] = str(here.arch)
        return GPUTarget(here.backend, wanted, here.warp_size)

    CudaDriver.get_current_target = answer


def _assemble_for_the_card_here(wanted: int) -> None:
    """PTX of the wanted card becomes code of the GPU here, cached apart from what that card itself would run."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    assemble, name = CUDABackend.make_cubin, CUDABackend.hash

    def make_cubin(backend: Any, source: Any, metadata: Any, options: Any, _: int) -> Any:
        of_here, here = copy(backend), capability_here(wanted)
        of_here.target = GPUTarget("cuda", here, 32)  # newer GPUs have an assembler of their own
        return assemble(of_here, source, metadata, options, here)

    CUDABackend.make_cubin = make_cubin
    CUDABackend.hash = lambda backend: f"{name(backend)} on {capability_here(wanted)}"


def _refuse_above(shared_block: int) -> None:
    """Kernels that ask for more shared memory than the wanted card has are refused, as there."""
    from triton.backends.nvidia.driver import CudaUtils
    from triton.compiler import compiler

    make = CudaUtils.__init__

    def limit(utils: Any) -> None:
        ask = utils.get_device_properties

        def answer(device: int) -> dict[str, int]:
            found = ask(device)
            return {**found, "max_shared_mem": min(shared_block, found["max_shared_mem"])}

        utils.get_device_properties = answer

    def make_limited(utils: Any) -> None:
        make(utils)
        limit(utils)

    CudaUtils.__init__ = make_limited
    if hasattr(CudaUtils, "instance"):  # another package had kernels before
        limit(CudaUtils.instance)
    compiler.max_shared_mem.cache_clear()


def _hold_to_room(wanted: int, cards: Mapping[int, "CardLimits"]) -> None:
    """A kernel of which processors here would hold more blocks than the wanted card's takes more shared memory."""
    from triton.compiler.compiler import CompiledKernel, make_backend
    from triton.runtime import driver

    load = CompiledKernel._init_handles

    def load_held(kernel: Any) -> None:
        if kernel.module is not None:
            return
        load(kernel)
        here, asked, warps = cards[capability_here(wanted)], kernel.metadata.shared, kernel.metadata.num_warps
        padded = pad_shared(cards[wanted], here, warps, asked, kernel.n_regs)
        if padded == asked:
            return
        kernel.metadata = kernel.metadata._replace(shared=padded)
        kernel.packed_metadata = make_backend(kernel.metadata.target).pack_metadata(kernel.metadata)
        if asked <= 48 << 10 < padded:  # only then has Triton not yet told the driver that it is more than usual
            device = driver.active.get_current_device()
            kernel.module, kernel.function, *_ = driver.active.utils.load_binary(
                kernel.name, kernel.kernel, padded, device
            )

    CompiledKernel._init_handles = load_held
