"""From a model file and a plan to a ready Executor: memory is taken, weights are packed, pins are brought in."""

from collections.abc import Callable, Iterable
from itertools import pairwise

import torch

from pshard.buffers import SUM_NORMS, arena_bytes, index_words, shared_index_words
from pshard.cuts.rank_parts import Ranges
from pshard.model import ModelSpec
from pshard.plan import RankPlan, TierPlan
from pshard.quant import TENSOR_ALIGN, align
from pshard.routing.play_record import RoutingPlay
from pshard.runtime.devices.device import Device
from pshard.runtime.executor import Executor
from pshard.runtime.kernels.api import Kernels
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.memory.host_memory import keep_freed_memory
from pshard.runtime.memory.weights import (
    HostWeights,
    LentWeights,
    WeightSource,
    expect_unit,
    fill_sum_norms,
    pack_portion,
)
from pshard.runtime.ranks.group import Group
from pshard.times.gpu_tiles import TileChoice
from pshard.units.moe.on_host import list_on_host, list_only_in_vram
from pshard.units.state import StateShape


def choose_kernels(
    device: Device, wanted: str, max_tokens: int, tiles: Iterable[TileChoice] = ()
) -> tuple[Kernels, Kernels, tuple[str, ...]]:
    """Kernels of the accelerator and of the host, and a note for each fallback. `wanted`: "fast" or "plain".

    tiles: what the machine profile chose for this accelerator; the defaults stand for what is not among them.
    """
    keep_freed_memory()
    if wanted == "plain":
        return PlainKernels(), PlainKernels(), ()
    notes: list[str] = []
    host: Kernels = PlainKernels()
    if native.is_available():
        from pshard.runtime.kernels.cpu.host import HostKernels

        host = HostKernels()
        notes += [f"host kernels: {stale}"] if (stale := native.why_stale()) else []
    else:
        notes.append(f"host kernels: torch fallbacks, slower ({native.why_missing()})")
    if device.kind == "cpu":
        return host, host, tuple(notes)
    try:
        from pshard.runtime.kernels.gpu.cuda import CudaKernels
    except ImportError as error:
        notes.append(f"GPU kernels: torch fallbacks, slower (no Triton: {error})")
        return PlainKernels(), host, tuple(notes)
    return CudaKernels(device.torch_device, max_tokens, tiles), host, tuple(notes)


def build_executor(
    source: WeightSource,
    spec: ModelSpec,
    plan: RankPlan,
    device: Device,
    states: StateShape,
    kernels: tuple[Kernels, Kernels],
    *,
    ranges: Ranges | None,
    group: Group,
    progress: Callable[[int], None],
    lender: HostWeights | None = None,
    records: bool = False,
    play: RoutingPlay | None = None,
) -> Executor:
    """Take the arena, pack the weights and bring in the pins of every tier.

    Args:
        source: the model file; spec and ranges: the whole model, or a rank's slice of it.
        progress: called with the number of packed bytes done since its last call.
        lender: holds every unit already, packed; None packs them from the source.
        records: the executor keeps which experts routers choose. play: what they are made to choose.
    """
    needed = align(max(tier.buffers.total + _index_nbytes(spec, tier, states) for tier in plan.tiers), TENSOR_ALIGN)
    arena = device.allocate(min(needed, arena_bytes(plan.budget_mib, device.kind)))
    if lender is not None:
        lender.check_orders(spec)
        executor = Executor(
            spec, plan, device, arena, LentWeights(lender), states, kernels, group, records=records, play=play
        )
        _load_pins(executor, plan.resident, lender.blob, lender.blob)
        return executor
    weights = HostWeights(list_on_host(spec, plan), device)
    try:
        executor = Executor(spec, plan, device, arena, weights, states, kernels, group, records=records, play=play)
    except BaseException:
        weights.close()
        raise
    try:  # the executor's buffers came first: without them no graph is captured
        weights.pack(source, ranges, progress, executor.host.is_locked and executor.transfers.may_lock)
        executor.lock_weights()
    except BaseException:
        executor.close()  # page-locked memory must be unlocked before it is unmapped
        raise
    if spec.sum_norms:
        fill_sum_norms(source, spec, executor.host.side.space.tensors[SUM_NORMS])
    only_in_vram = {p.unit.name: p for p in list_only_in_vram(spec, plan)}
    stage = torch.empty(max((p.nbytes for p in only_in_vram.values()), default=0), dtype=torch.uint8)

    following = dict(pairwise(only_in_vram))
    expect_unit(source, next((p.unit for p in only_in_vram.values()), None))

    def pack(name: str) -> torch.Tensor:
        portion = only_in_vram[name]
        expect_unit(source, only_in_vram[following[name]].unit if name in following else None)
        blob = stage[: portion.nbytes]
        pack_portion(source, portion, blob, ranges)
        progress(portion.nbytes)
        return blob

    _load_pins(executor, tuple(only_in_vram), pack, weights.blob)
    return executor


def _index_nbytes(spec: ModelSpec, tier: TierPlan, states: StateShape) -> int:
    """Bytes that a tier takes beside the plan's, where the budget leaves them; 0 where its sequences share nothing."""
    words = shared_index_words(spec, tier.tokens, states)
    return 0 if words == index_words(spec, tier.tokens, states) else 4 * words + TENSOR_ALIGN


def _load_pins(
    executor: Executor,
    names: tuple[str, ...],
    blobs: Callable[[str], torch.Tensor],
    on_host: Callable[[str], torch.Tensor],
) -> None:
    """Pins, and experts of units that stay `on_host` into their slots."""
    try:
        executor.load_pins(names, blobs)
        executor.slots.fill(on_host)
    except BaseException:
        executor.close()
        raise
