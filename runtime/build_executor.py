"""From a model file and a plan to a ready Executor: memory is taken, weights are packed, pins are brought in."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch

from pshard.buffers import SUM_NORMS, arena_bytes, index_words, shared_index_words
from pshard.cuts.rank_parts import Ranges
from pshard.errors import UserError
from pshard.machine import AS_CARD, emulated_capability
from pshard.model import ModelSpec
from pshard.on_host import list_only_in_vram
from pshard.plan import RankPlan, TierPlan
from pshard.quant import TENSOR_ALIGN, align
from pshard.routing.play_record import RoutingPlay
from pshard.runtime.devices.device import Device
from pshard.runtime.devices.hand_offs import describe_hand_offs
from pshard.runtime.devices.usable_gpus import describe_unused
from pshard.runtime.executor import Executor
from pshard.runtime.kernels.api import Kernels
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.memory.beyond_host import open_stores
from pshard.runtime.memory.host.host_memory import keep_freed_memory
from pshard.runtime.memory.weights import (
    HostWeights,
    LentWeights,
    UnitWeights,
    WeightSource,
    expect_unit,
    fill_sum_norms,
    pack_portion,
)
from pshard.runtime.ranks.group import Group
from pshard.times.gpu_tiles import TileChoice
from pshard.units.state import StateShape


def choose_kernels(
    device: Device, wanted: str, max_tokens: int, tiles: Iterable[TileChoice] = (), exact: bool = False
) -> tuple[Kernels, Kernels, tuple[str, ...]]:
    """Kernels of the accelerator and of the host, and a note for each fallback. `wanted`: "fast" or "plain".

    tiles: what the machine profile chose for this accelerator; the defaults stand for what is not among them.
    exact: the host's products give a token the same bits however many are computed with it.

    Raises UserError for a GPU where Triton is broken.
    """
    keep_freed_memory()
    if wanted == "plain":
        return PlainKernels(), PlainKernels(), ()
    notes: list[str] = []
    host: Kernels = PlainKernels()
    if native.is_available():
        from pshard.runtime.kernels.cpu.host import HostKernels

        host = HostKernels(exact)
        notes += [f"host kernels: {stale}"] if (stale := native.why_stale()) else []
    else:
        notes.append(
            f"host kernels: torch's, some ten times slower ({native.why_missing()}); pshard doctor says what to do"
        )
    if device.kind == "cpu":
        return host, host, (*notes, *describe_unused())
    try:
        from pshard.runtime.kernels.gpu.cuda import CudaKernels
    except ImportError as error:
        raise UserError(f"Triton cannot be imported: {error}; install it again, or use a profile of the CPU") from None
    if wanted_card := emulated_capability():
        notes.append(f"GPU kernels: as card {wanted_card} has them, which this GPU is taken for ({AS_CARD})")
    return CudaKernels(device.torch_device, max_tokens, tiles), host, (*notes, *describe_hand_offs())


def build_executor(
    source: WeightSource,
    spec: ModelSpec,
    plan: RankPlan,
    device: Device,
    states: StateShape,
    kernels: tuple[Kernels, Kernels],
    *,
    weights: HostWeights,
    ranges: Ranges | None,
    group: Group,
    progress: Callable[[int], None],
    lent: bool = False,
    records: bool = False,
    play: RoutingPlay | None = None,
    lent_weights: Mapping[str, UnitWeights] | None = None,
) -> Executor:
    """Take the arena, wait for the weights and bring in the pins of every tier.

    Args:
        source: the model file; spec and ranges: the whole model, or a rank's slice of it.
        weights: what the plan keeps in host memory, which is being packed; with `lent` every unit, already packed, and
            somebody else's.
        progress: called with the number of packed bytes done since its last call.
        records: the executor keeps which experts routers choose. play: what they are made to choose. lent_weights: see
            Residents.
    """
    needed = align(max(tier.buffers.total + _index_nbytes(spec, tier, states) for tier in plan.tiers), TENSOR_ALIGN)
    arena = device.allocate(min(needed, arena_bytes(plan.budget_mib, device.kind, plan.reserve_mib)))
    if lent:
        weights.check_orders(spec)
    own = LentWeights(weights) if lent else weights
    stores = open_stores(spec, plan, device)
    executor = Executor(
        spec, plan, device, arena, own, states, kernels, group, records=records, play=play, stores=stores,
        lent=lent_weights,
    )  # fmt: skip
    try:
        for store in stores.values():
            store.load(source, ranges, progress)
        if lent:
            executor.load_pins(plan.resident, weights.blob)
        else:
            _load_weights(executor, weights, source, ranges, progress)
            if spec.sum_norms:
                fill_sum_norms(source, spec, executor.host.side.space.tensors[SUM_NORMS])
        executor.slots.fill(weights.blob)
    except BaseException:
        executor.close()  # page-locked memory must be unlocked before it is unmapped
        raise
    return executor


def _load_weights(
    executor: Executor,
    weights: HostWeights,
    source: WeightSource,
    ranges: Ranges | None,
    progress: Callable[[int], None],
) -> None:
    """Page-lock what is packed, while the rest is packed and pins are brought in. The executor's buffers came first:
    without them no graph is captured."""
    locker = ThreadPoolExecutor(1, "page-lock")
    try:
        weights.finish(locker if executor.host.is_locked and executor.transfers.may_lock else None)
        locked = locker.submit(executor.lock_weights)
        _pack_pins(executor, source, ranges, progress)
        locked.result()
    finally:
        locker.shutdown(cancel_futures=True)


def _pack_pins(
    executor: Executor, source: WeightSource, ranges: Ranges | None, progress: Callable[[int], None]
) -> None:
    """Pack what lies in VRAM under every tier, and bring it there."""
    only_in_vram = {p.unit.name: p for p in list_only_in_vram(executor.spec, executor.plan)}
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

    executor.load_pins(tuple(only_in_vram), pack)


def _index_nbytes(spec: ModelSpec, tier: TierPlan, states: StateShape) -> int:
    """Bytes that a tier takes beside the plan's, where the budget leaves them; 0 where its sequences share nothing."""
    words = shared_index_words(spec, tier.tokens, states)
    return 0 if words == index_words(spec, tier.tokens, states) else 4 * words + TENSOR_ALIGN
