"""Walks through the steps of a plan without weights and without a device, to find what these would start on one."""

import mmap
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from pshard.batch import VERIFY
from pshard.batch_sizes import RUNGS, SMALL_BATCH
from pshard.buffers import arena_bytes
from pshard.cuts.rank_parts import split_ranges
from pshard.model import ModelSpec
from pshard.on_host import list_on_host, list_only_in_vram
from pshard.plan import RankPlan, Variant
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
from pshard.runtime.lend_weights import lend_weights
from pshard.runtime.memory.host.host_memory import as_tensor
from pshard.runtime.memory.kv_store import KVStore
from pshard.runtime.memory.weights import HostWeights, UnitWeights, WeightSource
from pshard.runtime.ranks.group import Group
from pshard.runtime.speculation.second_program import Ask, SecondProgram
from pshard.runtime.texts.text import Piece
from pshard.units.state import StateShape

NO_RESERVE = 0x4000  # Linux: nothing is set aside for what is mapped, and so nothing can lack
SECOND = 2  # drafts: the second is made of the first, and all others like it
SHORT = (8, 16, 32, SMALL_BATCH)  # tokens of a question, by powers of two as few rows are multiplied


class SilentDevice(CpuDevice):
    """A device that copies nothing but whole numbers: whatever is waited for has happened. Its memory is mapped, and
    hardly touched. It starts the kernels that copy what is small, as a GPU does from page-locked memory."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory that the system need not have: a GPU may have more than the host."""
        if sys.platform != "linux":
            return super().allocate(nbytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        return as_tensor(mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=flags), nbytes)

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
    """Go through steps of every size that the plan of one rank has a tier for, of single tokens of several texts, and
    of one text that verifies drafts, which the head or the draft model of the plan makes.

    kernels: of the accelerator; what they start must be no more than noted, as nobody has written what they would read.
    Nothing of the model is loaded. For plans that leave nothing on disk.
    """
    whole, spec = specs_of(source.spec, variant, 0)
    pair, drafts = (kernels, cast(Kernels, SilentKernels())), variant.workload.drafting.drafts

    def open_engine(drafter: RankPlan | None) -> Engine:
        device, states = SilentDevice(), variant.workload.state_shape
        executor, head = _take_room(spec, variant.ranks[0], device, states, pair), None
        if drafter is not None:
            assert spec.head is not None, "whoever has a plan of it has it"
            head = _take_room(spec.head, drafter, device, states, pair, lend_weights(executor, spec.head))
        store = KVStore(source, [split_ranges(whole, variant.split, 0)], states, executor, Group())
        return Engine(executor, replace(variant, drafter=drafter), None, (), lambda: None, store, head=head)

    with open_engine(None) as engine:  # what drafts would take a long prompt in hundreds of pieces
        for step in list_steps(variant, engine.longest):
            engine.reset()
            engine.forward(step)
    if drafts:
        with open_engine(variant.drafter) as engine:
            verify_drafts(engine, drafts, variant.drafter.tiers[-1].tokens if variant.drafter else 0)


def _take_room(
    spec: ModelSpec,
    plan: RankPlan,
    device: SilentDevice,
    states: StateShape,
    kernels: tuple[Kernels, Kernels],
    lent: Mapping[str, UnitWeights] | None = None,
) -> Executor:
    """What runs a program, without its weights."""
    arena = device.allocate(arena_bytes(plan.budget_mib, "cuda", plan.reserve_mib))
    weights = HostWeights(list_on_host(spec, plan), device)
    executor = Executor(spec, plan, device, arena, weights, states, kernels, Group(), lent=lent)
    executor.residents.hold_pins(portion.unit.name for portion in list_only_in_vram(spec, plan))
    return executor


def verify_drafts(engine: Engine, most: int, whole: int) -> None:
    """Let a text verify ever more drafts of whoever drafts beside the model, as far as it has room for them. whole:
    tokens that whoever drafts takes in at once, at most."""
    pool, rows = engine.texts, [*(rung for rung in RUNGS if 1 < rung <= most), most + 1]
    text, prompt = pool.begin(0), min(whole + SHORT[0], engine.longest)
    pool.step([Piece(text, (0,) * prompt, best=1)])
    for count in rows:
        if len(text.ids) + count + SECOND > engine.longest:
            break
        if isinstance(engine.drafter, SecondProgram):  # which takes in what was verified before
            engine.drafter.draft([Ask(text, (0,), min(most, SECOND))])
        pool.step([Piece(text, (0,) * count, "all", 1, kind=VERIFY)])
        pool.commit(text, len(text.ids))
    pool.close(text)


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
