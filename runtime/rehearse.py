"""Walks through the steps of a plan without weights and without a device, to find what these would start on one."""

from collections.abc import Iterator
from typing import Any, cast

import torch

from pshard.batch_sizes import SMALL_BATCH
from pshard.buffers import arena_bytes
from pshard.cuts.rank_parts import split_ranges
from pshard.on_host import list_on_host, list_only_in_vram
from pshard.plan import Variant
from pshard.runtime.build_engine import specs_of
from pshard.runtime.devices.device import (
    KERNEL_RECEIVE_BYTES,
    KERNEL_SEND_BYTES,
    CpuDevice,
    CpuEvent,
    suits_kernel,
)
from pshard.runtime.engine import Engine
from pshard.runtime.executor import Executor
from pshard.runtime.kernels.api import Kernels
from pshard.runtime.kernels.gpu.triton_copy import copy_words
from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.memory.kv_store import KVStore
from pshard.runtime.memory.weights import HostWeights, WeightSource
from pshard.runtime.ranks.group import Group

SHORT = (8, 16, 32, SMALL_BATCH)  # tokens of a question, by powers of two as few rows are multiplied


class SilentDevice(CpuDevice):
    """A device that copies nothing but whole numbers: whatever is waited for has happened. Its memory is mapped, and
    hardly touched. It starts the kernels that copy what is small, as a GPU does from page-locked memory."""

    def copy_in(self, *_: Any, **__: Any) -> CpuEvent:
        event = CpuEvent()
        event.finish()
        return event

    copy_out = fill = call = copy_in

    def send(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Rows and lengths are copied, with which others are looked up."""
        _start_copy(dst, src, KERNEL_SEND_BYTES)
        self._copy_whole(dst, src)

    def receive(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        _start_copy(dst, src, KERNEL_RECEIVE_BYTES)
        self._copy_whole(dst, src)

    def _copy_whole(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        if not dst.is_floating_point() and dst.dtype != torch.uint8:
            dst.copy_(src)

    def bring(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """What nobody has computed is zeros, also where these are experts' numbers."""
        _start_copy(dst, src, KERNEL_RECEIVE_BYTES)
        dst.zero_()


def _start_copy(dst: torch.Tensor, src: torch.Tensor, most: int) -> None:
    if suits_kernel(dst, src, most):
        copy_words(dst, src)


def _compute_nothing(*_: Any, **__: Any) -> bool:
    return True


_CALLED = [name for name in dir(PlainKernels) if not name.startswith("_") and callable(getattr(PlainKernels, name))]
SilentKernels = type("SilentKernels", (PlainKernels,), dict.fromkeys(_CALLED, _compute_nothing))


def rehearse_steps(source: WeightSource, variant: Variant, kernels: Kernels) -> None:
    """Go through steps of every size that the plan of one rank has a tier for, and of single tokens of several texts.

    kernels: of the accelerator; what they start must be no more than noted, as nobody has written what they would read.
    Nothing of the model is loaded. For plans that leave nothing on disk.
    """
    (plan,) = variant.ranks
    whole, spec = specs_of(source.spec, variant, 0)
    device, states = SilentDevice(), variant.workload.state_shape
    arena = device.allocate(arena_bytes(plan.budget_mib, "cuda", plan.reserve_mib))
    weights = HostWeights(list_on_host(spec, plan), device)
    executor = Executor(spec, plan, device, arena, weights, states, (kernels, cast(Kernels, SilentKernels())), Group())
    executor.residents.hold_pins(portion.unit.name for portion in list_only_in_vram(spec, plan))
    store = KVStore(source, [split_ranges(whole, variant.split, 0)], states, executor, Group())
    with Engine(executor, variant, None, (), lambda: None, store) as engine:
        for step in list_steps(variant, engine.longest):
            engine.reset()
            engine.forward(step)


def list_steps(variant: Variant, longest: int) -> Iterator[list[list[int]]]:
    """Tokens of each text: of short prompts and of those that fill a tier, and of 1, 2, 4, ... texts that have one
    token each. longest: tokens that a text can have."""
    workload, texts = variant.workload, 1
    longest = min(longest, workload.context // workload.sequences)
    for tokens in sorted({*SHORT, *(tier.tokens for tier in variant.ranks[0].tiers)}):
        if tokens <= longest:
            yield [[0] * tokens]
    while texts <= workload.sequences:
        yield [[0]] * texts
        texts *= 2
