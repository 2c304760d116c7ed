"""Walks a tier's steps on one rank: copies run ahead on their lane while units compute; tiers are switched here."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from pshard.buffers import LOGIT_ROWS, SMALL_BATCH, scratch_bytes
from pshard.model import ModelSpec
from pshard.plan import RankPlan, TierPlan
from pshard.runtime.arena import Arena
from pshard.runtime.blocks import Side, run_attention, run_ffn, run_output
from pshard.runtime.device import Device
from pshard.runtime.host_memory import map_memory
from pshard.runtime.kernels.api import Kernels, RopeTable, RowIndex, Segment
from pshard.runtime.kv_cache import KVShape, layer_nbytes, used_spans
from pshard.runtime.parallel import Group
from pshard.runtime.rope import fill_rope_table
from pshard.runtime.weights import HostWeights, UnitWeights, lookup_rows, view_unit
from pshard.runtime.workspace import Workspace, carve_workspace
from pshard.steps import (
    AllReduce,
    Compute,
    CopyIn,
    FetchKV,
    Free,
    Gather,
    Handoff,
    StepList,
    StepShape,
    WriteBack,
    emit_steps,
)

LEAST_CELLS = 1024  # launch sizes grow with the context in powers of two from here, so that few graphs are captured


@dataclass
class _TierState:
    """Views of the arena and lane events while a tier is in force."""

    tier: TierPlan
    side: Side
    stage: torch.Tensor | None  # bytes of one layer's KV
    slots: tuple[torch.Tensor, ...]
    arrived: dict[int, Any]  # slot -> event of the copy into it
    stage_free: list[Any]  # events after which the KV stage may be written by a fetch
    stage_ready: list[Any]  # events after which a unit may use the KV stage


class Executor:
    """Runs micro-batches of one model (or one rank's slice) under a plan."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: RankPlan,
        device: Device,
        arena: torch.Tensor,
        weights: HostWeights,
        kv: KVShape,
        kernels: tuple[Kernels, Kernels],
        group: Group,
    ) -> None:
        self.spec, self.plan, self.device, self.group, self._kv_shape = spec, plan, device, group, kv
        self._acc_kernels, self._host_kernels = kernels
        self._weights = weights
        self._arena = Arena(arena, spec, plan, kv, self._acc_kernels.act_dtype)
        self._loaded_pins: tuple[str, ...] = ()
        self._kv_in_vram: tuple[str, ...] = ()
        self._state: _TierState | None = None
        self._written: dict[str, Any] = {}  # attention unit -> event of its last write-back
        self._steps: dict[tuple, StepList] = {}
        self.link_bytes = 0  # moved host to device since the start: weights, KV, activations
        self.switches = 0
        self._sent: Any = None
        self._host_memory: list[torch.Tensor] = []
        self._torch_threads = torch.get_num_threads()
        self._make_host_side()

    @property
    def arena_nbytes(self) -> int:
        """Bytes of the arena on the accelerator."""
        return self._arena.memory.numel()

    @property
    def host_nbytes(self) -> int:
        """Bytes of the packed weights in host memory."""
        return self._weights.nbytes

    @property
    def page_locked(self) -> bool:
        """Whether weights are copied from page-locked memory."""
        return self._weights.page_locked

    # --- memory -------------------------------------------------------------------------------------------------

    def _make_host_side(self) -> None:
        """Host buffers: hidden rows of any micro-batch, scratch for CPU units, KV of layers that leave VRAM."""
        spec, kv, tiers = self.spec, self._kv_shape, self.plan.tiers
        largest = tiers[-1].tokens
        self._host_hidden = self._host_alloc(largest * spec.config.d_model * 4).view(torch.float32)
        self._host_hidden = self._host_hidden.view(largest, spec.config.d_model)
        self._host_index = self._host_alloc(3 * largest * 4).view(torch.int32).view(3, largest)
        rows = max(kv.sequences, LOGIT_ROWS)
        self._host_logits = self._host_alloc(rows * spec.config.vocab * 4).view(torch.float32)
        on_cpu = [t.tokens for t in tiers if any(p.where == "cpu" and p.unit != "embedding" for p in t.placements)]
        tokens = max(on_cpu, default=1)
        act = self._host_kernels.act_dtype
        memory = torch.empty(scratch_bytes(spec, tokens, kv.sequences, act.itemsize, kv.context), dtype=torch.uint8)
        space = carve_workspace(memory, spec, tokens, kv.sequences, kv.context, act)
        space.tensors["hidden"] = self._host_hidden
        self._host_side = self._make_side(self._host_kernels, space)
        leaving = {p.unit for t in tiers for p in t.placements if p.kv == "host"}
        self._host_kv = {
            name: self._arena.view_kv(self._host_alloc(layer_nbytes(spec.config, kv)), name)
            for name in self.plan_attention()
            if name in leaving
        }

    def plan_attention(self) -> tuple[str, ...]:
        """Attention units of this rank, in order."""
        return tuple(u.name for u in self.spec.units if u.kind == "attention")

    def _host_alloc(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory; it lives as long as the executor."""
        memory = map_memory(nbytes)
        if self.device.page_lock(memory):
            self._host_memory.append(memory)
        return memory

    def _make_side(self, kernels: Kernels, space: Workspace) -> Side:
        table = space.tensors["rope"]
        fill_rope_table(self.spec.config.rope, table)
        return Side(kernels, space, RopeTable(table[0], table[1], self.spec.config.rope.pairing), self.spec.config)

    def load_pins(self, names: Iterable[str], blobs: Any) -> None:
        """Bring the first pins into the arena from anything that maps a name to a blob (also ones not kept on the
        host)."""
        for name in names:
            self._arena.pinned(name).copy_(blobs(name))
            self._loaded_pins += (name,)

    # --- tiers --------------------------------------------------------------------------------------------------

    def enter(self, tier: TierPlan, lengths: list[int]) -> None:
        """Put a tier in force; `lengths` are the cells in use of each sequence. Moves only what changes hands."""
        if self._state is not None and self._state.tier is tier:
            return
        self.device.synchronize()
        self.switches += self._state is not None
        spans = [(sequence, 0, used) for sequence, used in enumerate(lengths)]
        self._move_kv(self._kv_in_vram[len(self._arena.kv_units(tier)) :], spans, to_host=True)
        pins = self._arena.pinned_units(tier)
        for name in pins[len(self._loaded_pins) :]:
            self.device.copy_in(self._arena.pinned(name), self._weights.blob(name))
            self.link_bytes += self.spec.unit(name).packed_nbytes
        arriving = self._arena.kv_units(tier)[len(self._kv_in_vram) :]
        self._move_kv(arriving, spans, to_host=False)
        self._loaded_pins, self._kv_in_vram = pins, self._arena.kv_units(tier)
        self.device.synchronize()
        space, stage, slots = self._arena.carve(tier)
        with self.device.computing():
            side = self._make_side(self._acc_kernels, space)
        self._state = _TierState(tier, side, stage, slots, {}, [], [])
        self.device.synchronize()
        for step in self._steps_of(StepShape(1, 0, 1, ranks=self.group.size)).enter:
            self._copy_in(step, ())

    def _move_kv(self, names: tuple[str, ...], spans: list[tuple[int, int, int]], to_host: bool) -> None:
        for name in names:
            if name not in self._host_kv:
                continue
            vram, host = self._arena.kv(name), self._host_kv[name]
            source, target = (vram, host) if to_host else (host, vram)
            copy = self.device.copy_out if to_host else self.device.copy_in
            for to, origin in used_spans(source, target, spans):
                copy(to, origin)
                self.link_bytes += 0 if to_host else to.nbytes

    def _steps_of(self, shape: StepShape) -> StepList:
        assert self._state is not None
        key = (self._state.tier.tokens, shape.past > 0)
        if key not in self._steps:
            self._steps[key] = emit_steps(self.spec, self._state.tier, shape)
        return self._steps[key]

    # --- one micro-batch ----------------------------------------------------------------------------------------

    def run(
        self, ids: torch.Tensor, segments: tuple[Segment, ...], logit_rows: list[int], lengths: list[int]
    ) -> torch.Tensor:
        """Compute one micro-batch under the smallest tier that covers it.

        Args:
            ids: int64 [M] on the host.
            segments: which rows belong to which sequence, in row order.
            logit_rows: rows whose logits are wanted.
            lengths: cells in use of every sequence before this micro-batch.

        Returns:
            float32 [len(logit_rows), vocabulary] on the host, a fresh tensor.
        """
        tokens = ids.numel()
        self.enter(self.plan.covering(tokens), lengths)
        state = self._state
        assert state is not None
        if self._sent is not None:
            self.device.host_wait(self._sent)  # the last micro-batch may still read the host buffers
        # few rows: torch's small operators stay on this thread, so that its threads don't spin beside the C++ pool
        torch.set_num_threads(1 if tokens <= SMALL_BATCH else self._torch_threads)
        past = sum(s.past for s in segments)
        host_rows, acc_rows, wanted = self._index_rows(segments, logit_rows, tokens)
        logits: list[torch.Tensor] = []
        run = _Run(self, state, ids, tokens, segments, host_rows, acc_rows, logit_rows, *wanted, logits)
        with torch.inference_mode():
            for step in self._steps_of(StepShape(tokens, past, len(logit_rows), ranks=self.group.size)).body:
                run.step(step)
            run.flush()
        self._sent = self.device.mark()
        if len(logits) == 1:
            return logits[0]
        return torch.cat(logits) if logits else torch.empty(0, self.spec.config.vocab)

    def _index_rows(
        self, segments: tuple[Segment, ...], logit_rows: list[int], tokens: int
    ) -> tuple[RowIndex, RowIndex, tuple[torch.Tensor, torch.Tensor]]:
        """Row indexes on the host and on the device, and the numbers of the rows whose logits are wanted on both."""
        assert self._state is not None
        position, sequence, wanted = self._host_index[:, :tokens].unbind()
        for s in segments:
            rows = slice(s.start, s.start + s.tokens)
            if s.tokens == 1:
                position[s.start] = s.past
            else:
                torch.arange(s.past, s.past + s.tokens, out=position[rows])
            sequence[rows] = s.sequence
        wanted = wanted[: len(logit_rows)]
        wanted.copy_(torch.tensor(logit_rows, dtype=torch.int32))
        there = []
        for name, values in (("positions", position), ("sequences", sequence), ("logit_rows", wanted)):
            target = self._state.side.space.tensors[name][: values.shape[0]]
            self.device.send(target, values)
            there.append(target)
        cells = max(s.past + s.tokens for s in segments)
        bound = min(max(LEAST_CELLS, 1 << (cells - 1).bit_length()), self._kv_shape.context)
        rows_here = RowIndex(sequence, position, segments, cells)
        return rows_here, RowIndex(there[1], there[0], segments, bound), (wanted, there[2])

    def _copy_in(self, step: CopyIn, after: Iterable[Any]) -> None:
        assert self._state is not None
        target = self._state.slots[step.slot][: step.nbytes]
        self._state.arrived[step.slot] = self.device.copy_in(target, self._weights.blob(step.unit), after)
        self.link_bytes += step.nbytes

    def close(self) -> None:
        """Wait for all lanes and unlock host memory."""
        self.device.synchronize()
        for memory in self._host_memory:
            self.device.page_unlock(memory)
        self._host_memory.clear()
        self._weights.close()
        torch.set_num_threads(self._torch_threads)


@dataclass
class _Run:
    """One walk over the steps of a micro-batch."""

    executor: Executor
    state: _TierState
    ids: torch.Tensor
    tokens: int
    segments: tuple[Segment, ...]
    host_rows: RowIndex
    acc_rows: RowIndex
    logit_rows: list[int]
    host_logit_rows: torch.Tensor
    acc_logit_rows: torch.Tensor
    logits: list[torch.Tensor]
    side: str = "cpu"
    freed: Any = None
    held: list[Compute | AllReduce] = field(default_factory=list)
    pending: torch.Tensor | None = None  # logits that are still on the device

    def step(self, step: Any) -> None:
        """Issue one step. Units on the accelerator are held back until something else must happen, so that a run of
        them is one CUDA graph."""
        if isinstance(step, Compute) and step.on == "acc" and step.unit != "embedding":
            if self._must_wait(step):
                self.flush()
                self._wait_for_inputs(step)
            self.side = "acc"
            self.held.append(step)
            return
        if isinstance(step, AllReduce) and self.held:
            self.held.append(step)
            return
        self.flush()
        match step:
            case Compute():
                self.side = step.on
                with self.executor.device.computing() if step.on == "acc" else torch.inference_mode():
                    self._execute(step)
            case CopyIn():
                self.executor._copy_in(step, [self.freed])
            case Free():
                self.freed = self.executor.device.mark()
            case Handoff():
                self._hand_off(step)
            case FetchKV():
                self._fetch_kv(step)
            case WriteBack():
                self._write_back(step)
            case AllReduce():
                self._all_reduce()
            case Gather():
                self.logits[:] = [self.executor.group.gather_columns(part) for part in self.logits]

    def flush(self) -> None:
        """Run the units that are held back."""
        if not self.held:
            return
        steps, self.held = self.held, []
        e = self.executor
        key = (self.state.tier.tokens, steps[0].unit, steps[-1].unit, self.tokens, len(self.logit_rows))
        with e.device.computing():
            e.device.repeat((*key, self.acc_rows.cells), self._is_small(), lambda: [self._kernels(s) for s in steps])
        if steps[-1].unit == self.executor.spec.units[-1].name:
            if self._is_small() and self.logit_rows and self.executor.spec.units[-1].tensors:
                self.pending = self._logits_on_device()  # a replayed graph has written them without telling
            self._deliver_logits()

    def _is_small(self) -> bool:
        """Whether launching costs more than computing, and all addresses and launch sizes repeat."""
        first = self.executor._acc_kernels.repeatable and self.tokens <= SMALL_BATCH
        return first and len(self.logit_rows) <= self.state.side.space.tensors["logits"].shape[0]

    def _side(self) -> Side:
        return self.state.side if self.side == "acc" else self.executor._host_side

    def _must_wait(self, step: Compute) -> bool:
        place = self.state.tier.placement(step.unit)
        return step.slot is not None or place.kv == "host"

    def _wait_for_inputs(self, step: Compute) -> None:
        e = self.executor
        if step.slot is not None:
            e.device.wait(self.state.arrived[step.slot])
        if self.state.tier.placement(step.unit).kv == "host":
            for event in self.state.stage_ready:
                e.device.wait(event)
            self.state.stage_ready.clear()

    def _kernels(self, step: Compute | AllReduce) -> None:
        self._execute(step) if isinstance(step, Compute) else self._all_reduce()

    def _execute(self, step: Compute) -> None:
        """The unit's kernels, nothing else: what a graph may hold."""
        unit, weights = self.executor.spec.unit(step.unit), self._weights_of(step)
        target = self._side().space.rows("branch", self.tokens) if self.executor.group.size > 1 else None
        if not unit.tensors:
            self._contribute_nothing(unit.kind, target)
        elif unit.kind == "embedding":
            self._embed(weights, step.on)
        elif unit.kind == "attention":
            self._attend(step, weights, target)
        elif unit.kind == "ffn":
            run_ffn(self._side(), weights, self.tokens, target)
        else:
            self._output(weights, step.on)

    def _contribute_nothing(self, kind: str, target: torch.Tensor | None) -> None:
        """This rank holds nothing of the unit: zeros for the sum, no columns for the logits."""
        if kind == "output":
            self.logits.append(torch.empty(len(self.logit_rows), 0))
        elif target is not None:
            target.zero_()

    def _weights_of(self, step: Compute) -> UnitWeights:
        e = self.executor
        if step.source == "arena":
            blob = e._arena.pinned(step.unit)
        elif step.source == "slot":
            assert step.slot is not None
            blob = self.state.slots[step.slot][: e.spec.unit(step.unit).packed_nbytes]
        else:
            blob = e._weights.blob(step.unit)
        return view_unit(e.spec.unit(step.unit), blob)

    def _embed(self, weights: UnitWeights, on: str) -> None:
        e, table = self.executor, weights.matrices["token_embd.weight"]
        if on == "cpu":
            lookup_rows(table, self.ids, e._host_hidden[: self.tokens])
        else:
            lookup_rows(table, self.ids.to(e.device.torch_device), self.state.side.space.rows("hidden", self.tokens))

    def _attend(self, step: Compute, weights: UnitWeights, target: torch.Tensor | None) -> None:
        e, place = self.executor, self.state.tier.placement(step.unit)
        if step.on == "cpu":
            run_attention(e._host_side, weights, self.host_rows, e._host_kv[step.unit], target)
            return
        if place.kv == "vram":
            kv = e._arena.kv(step.unit)
        else:
            assert self.state.stage is not None
            kv = e._arena.view_kv(self.state.stage, step.unit)
        run_attention(self.state.side, weights, self.acc_rows, kv, target)

    def _output(self, weights: UnitWeights, on: str) -> None:
        """Logits of the wanted rows, as many at once as the scratch holds; the last ones stay there on the device."""
        side, wanted = self._side(), self.logit_rows_on(on)
        capacity = side.space.tensors["logits"].shape[0]
        self.pending = None
        for start in range(0, len(self.logit_rows), capacity):
            self._deliver_logits()
            self.pending = run_output(side, weights, wanted[start : start + capacity])
            if on == "cpu":
                self.logits.append(self.pending.clone())
                self.pending = None

    def _logits_on_device(self) -> torch.Tensor:
        """Where `run_output` leaves the logits of all wanted rows on the device."""
        head = next(t for t in self.executor.spec.units[-1].matrices)
        n = len(self.logit_rows)
        return self.state.side.space.tensors["logits"].flatten()[: n * head.rows].view(n, head.rows)

    def logit_rows_on(self, on: str) -> torch.Tensor:
        """int32 row numbers whose logits are wanted, on that side."""
        return self.host_logit_rows if on == "cpu" else self.acc_logit_rows

    def _deliver_logits(self) -> None:
        """Bring the logits on the device to the host."""
        if self.pending is not None:
            here = self.executor._host_logits[: self.pending.numel()].view(self.pending.shape)
            self.executor.device.receive(here, self.pending)
            self.logits.append(here.clone())
            self.pending = None

    def _hand_off(self, step: Handoff) -> None:
        e = self.executor
        if self.logits or self.side == step.to:
            return  # logits were delivered as they were computed
        here, there = e._host_hidden[: self.tokens], self.state.side.space.rows("hidden", self.tokens)
        if step.to == "cpu":
            e.device.receive(here, there)
        else:
            e.device.send(there, here)
            e.link_bytes += here.nbytes
        self.side = step.to

    def _fetch_kv(self, step: FetchKV) -> None:
        e, state = self.executor, self.state
        assert state.stage is not None
        spans = [(s.sequence, 0, s.past) for s in self.segments]
        after = [*state.stage_free, *([e._written[step.unit]] if step.unit in e._written else [])]
        for to, origin in used_spans(e._host_kv[step.unit], e._arena.view_kv(state.stage, step.unit), spans):
            state.stage_ready.append(e.device.copy_in(to, origin, after))
            e.link_bytes += to.nbytes

    def _write_back(self, step: WriteBack) -> None:
        e, state = self.executor, self.state
        assert state.stage is not None
        state.stage_free = [e.device.mark()]  # the attention over it was the last thing given to the compute lane
        spans = [(s.sequence, s.past, s.past + s.tokens) for s in self.segments]
        for to, origin in used_spans(e._arena.view_kv(state.stage, step.unit), e._host_kv[step.unit], spans):
            done = e.device.copy_out(to, origin, state.stage_free)
        e._written[step.unit] = done
        state.stage_ready.append(done)  # the next layer's new cells go where these are read from
        state.stage_free.append(done)  # and so may its old ones, where a rank's layers differ in width

    def _all_reduce(self) -> None:
        e, side = self.executor, self._side()
        part, ours = side.space.rows("branch", self.tokens), self.state.side.space.rows("branch", self.tokens)
        with e.device.computing() if self.side == "acc" else torch.inference_mode():
            if self.side == "cpu" and e.device.kind != "cpu":  # other ranks may have computed theirs on a GPU
                e.device.send(ours, part)
                with e.device.computing():
                    e.group.all_reduce(ours)
                e.device.receive(part, ours)
            else:
                e.group.all_reduce(part)
            side.space.rows("hidden", self.tokens).add_(part)
