"""From an open model file, a variant and a device to an Engine: one rank's part of it."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from pshard.cuts.drafter_cuts import drafter_ranges, is_cut
from pshard.cuts.rank_parts import split_model, split_ranges
from pshard.errors import UserError
from pshard.model import ModelSpec
from pshard.on_host import list_on_host
from pshard.plan import Variant
from pshard.routing.order_experts import order_experts
from pshard.routing.play_record import RoutingPlay
from pshard.routing.record import RoutingRecord
from pshard.runtime.build_executor import build_executor, choose_kernels
from pshard.runtime.devices.device import Device
from pshard.runtime.engine import Engine
from pshard.runtime.executor import Executor
from pshard.runtime.kernels.api import Kernels
from pshard.runtime.kernels.cpu import native
from pshard.runtime.lend_weights import lend_weights
from pshard.runtime.memory.host.fresh_memory import FilledMemory
from pshard.runtime.memory.host.host_memory import measure_process
from pshard.runtime.memory.kv_store import KVStore
from pshard.runtime.memory.weights import HostWeights, WeightSource
from pshard.runtime.ranks.group import Group
from pshard.times.gpu_tiles import TileChoice


class _File(WeightSource, Protocol):
    """What is needed of a ModelFile beside its weights."""

    spec: ModelSpec

    def tokenizer(self) -> object: ...

    def of_head(self) -> "_File": ...

    def map_files(self, guard: Callable[[int, int], None], unguard: Callable[[int], None]) -> None: ...


def build_engine(
    file: _File,
    variant: Variant,
    device: Device,
    *,
    kernels: str = "fast",
    group: Group | None = None,
    progress: Callable[[int], None] = lambda _: None,
    on_close: Callable[[], None] = lambda: None,
    lender: HostWeights | None = None,
    tiles: Iterable[TileChoice] = (),
    records: bool = False,
    checkpoint_bytes: int = 0,
    plays: RoutingRecord | None = None,
    exact: bool = False,
    filled: FilledMemory | None = None,
) -> Engine:
    """Load this rank's part of the model under a variant.

    Args:
        device: closed with the engine, and when loading fails or is interrupted.
        kernels: "fast", or "plain" for torch in float32 (the reference).
        group: the ranks that this process belongs to; None for one rank.
        progress: called with packed bytes done since the last call.
        on_close: called when the engine is closed.
        lender: holds the packed weights of the whole model already, and outlives this engine; for one rank.
        tiles: those of the machine profile for this device (`MachineProfile.tiles_of`).
        records: which experts tokens use is kept for `Engine.record_routing`.
        checkpoint_bytes: of host memory, for checkpoints of states that cannot be cut back; without one a text that is
            cut is computed again from its beginning.
        plays: the experts that tokens are made to use, whatever routers find: for trials, whose tokens are made up.
        exact: no bit of a text depends on the others in its step, in steps of up to SMALL_BATCH tokens under one tier,
            on a GPU and in a CPU's products, which leave a matrix unit alone.
        filled: memory for the weights, maybe still being filled with pages; released where the plan takes another size.
    """
    group, process = group or Group(), measure_process() - (filled.done if filled else 0)
    if group.size != len(variant.ranks):
        wanted = len(variant.ranks)
        raise UserError(f"the plan is for {wanted} ranks, but {group.size} are running; start {wanted}")
    plan = variant.ranks[group.rank]
    whole, spec = specs_of(file.spec, variant, group.rank)
    ranges = [split_ranges(whole, variant.split, rank) for rank in range(group.size)]
    states = variant.workload.state_shape
    weights, own = lender, None
    try:
        _map_files(file)
        if weights is None:  # packed while tokenizer and kernels are made ready
            weights = own = HostWeights(list_on_host(spec, plan), device, filled)
            own.begin(file, ranges[group.rank], progress)
        tokenizer = _tokenizer(file)
        pair = choose_kernels(device, kernels, plan.tiers[-1].tokens, tiles, exact)
        executor = build_executor(
            file, spec, plan, device, states, pair[:2], weights=weights, lent=own is None,
            ranges=ranges[group.rank], group=group, progress=progress, records=records,
            play=RoutingPlay(plays, states.sequences) if plays else None,
        )  # fmt: skip
        head = _build_head(file, variant, device, pair[:2], executor, progress)
    except BaseException:
        if own is not None:
            own.close()
        device.close()
        raise
    executor.walks.exact, executor.process = exact, process
    notes = (*pair[2], *_note_pageable(executor), *executor.transfers.notes)
    store = KVStore(file, ranges, states, executor, group)
    return Engine(executor, variant, tokenizer, notes, on_close, store, checkpoint_bytes, head)


def specs_of(spec: ModelSpec, variant: Variant, rank: int) -> tuple[ModelSpec, ModelSpec]:
    """The model as a variant runs it, whole, and what a rank has of it, with experts in the order of their places."""
    whole = replace(spec, keeps_states=_reads_states(spec, variant))
    ordered = order_experts(whole, variant.popularity)
    return whole, replace(split_model(ordered, variant.split, rank), caches=variant.ranks[rank].caches)


def _reads_states(spec: ModelSpec, variant: Variant) -> bool:
    """Whether what drafts beside the model takes its states, as a head does."""
    return variant.drafter is not None and spec.head is not None and spec.head.takes_states


def _note_pageable(executor: Executor) -> tuple[str, ...]:
    if executor.page_locked:
        return ()
    pageable, of = executor.weights.pageable >> 20, executor.host_nbytes >> 20
    how = "staged" if executor.staging_nbytes else "made by the driver, which is slowest"
    return (f"{pageable} of {of} MiB of host weights are pageable: page-locking was refused, copies are {how}",)


def _build_head(
    file: _File,
    variant: Variant,
    device: Device,
    kernels: tuple[Kernels, Kernels],
    model: Executor,
    progress: Callable[[int], None],
) -> Executor | None:
    """What this rank has of the head that drafts, as a program of its own on the same device; None where it has no
    plan. Raises UserError where the file has none."""
    plan, spec, states = variant.drafter_on(model.group.rank), model.spec.head, variant.workload.state_shape
    if plan is None:
        return None
    assert spec is not None, "whoever has a plan of it has it"
    try:
        source, split = file.of_head(), variant.split
        if source is not file:
            _map_files(source)
        ranges = drafter_ranges(file.spec, split, model.group.rank)
        weights = HostWeights(list_on_host(spec, plan), device)
        weights.begin(source, ranges, progress)
        return build_executor(
            source, spec, plan, device, states, kernels, weights=weights, ranges=ranges,
            group=model.group if is_cut(spec, split) else Group(), progress=progress,
            lent_weights=lend_weights(model, spec),
        )  # fmt: skip
    except BaseException:
        model.close()
        raise


def _map_files(file: _File) -> None:
    if native.is_available():  # else parts are copied: nobody guards a mapping whose file is cut short
        file.map_files(native.guard_map, native.unguard_map)


def _tokenizer(file: _File) -> object | None:
    try:
        return file.tokenizer()
    except UserError:
        return None  # asking for text then says so
