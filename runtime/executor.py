"""Walks a tier's steps on one rank: copies run ahead on their lane while units compute; tiers are switched here."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pshard.batch_sizes import LOGIT_ROWS, SMALL_BATCH
from pshard.buffers import row_stage_bytes, scratch_bytes
from pshard.model import ModelSpec
from pshard.plan import RankPlan, TierPlan
from pshard.runtime.best_logits import choose_best
from pshard.runtime.blocks.blocks import Side
from pshard.runtime.blocks.rope_table import fill_rope_table
from pshard.runtime.devices.device import MOST_PROMPT_GRAPHS, Device
from pshard.runtime.kernels.api import Kernels, LayerKV, RopeTable, Segment
from pshard.runtime.kernels.kv_codec import gather_cells
from pshard.runtime.kernels.row_index import fill_rows
from pshard.runtime.memory.arena import Arena
from pshard.runtime.memory.host_memory import map_memory
from pshard.runtime.memory.kv_blocks import pool_spans
from pshard.runtime.memory.kv_cache import JOIN_BYTES, Piece, cell_nbytes, cut_pieces, find_pieces
from pshard.runtime.memory.staging import StagingRing
from pshard.runtime.memory.weights import HostWeights, LentWeights
from pshard.runtime.memory.workspace import Workspace, carve_workspace
from pshard.runtime.ranks.group import Group
from pshard.runtime.walk import Copies, IndexView, Launch, MicroBatch, TierState, group_launches
from pshard.steps.emit import emit_steps
from pshard.steps.step import CopyIn, Step, StepShape
from pshard.units.divide_rows import divide_rows
from pshard.units.kv_cells import kv_blocks
from pshard.units.state import StateShape

LEAST_CELLS = 1024  # launch sizes grow with the context in powers of two from here, so that few graphs are captured


@dataclass(frozen=True)
class Program:
    """A tier's steps as they are walked: copies when it is entered, then one micro-batch after the other."""

    enter: tuple[CopyIn, ...]
    body: tuple[Step | Launch, ...]


class Executor:
    """Runs micro-batches of one model (or one rank's slice) under a plan."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: RankPlan,
        device: Device,
        arena: torch.Tensor,
        weights: HostWeights | LentWeights,
        kv: StateShape,
        kernels: tuple[Kernels, Kernels],
        group: Group,
    ) -> None:
        self.spec, self.plan, self.device, self.group, self._kv_shape = spec, plan, device, group, kv
        self.acc_kernels, self._host_kernels = kernels
        self.weights = weights
        self.arena = Arena(arena, spec, plan, kv, self.acc_kernels.act_dtype)
        # cells of a layer that the link moves while one more copy is issued
        self.join_cells = JOIN_BYTES // max(1, cell_nbytes(spec, kv))
        self._loaded_pins: tuple[str, ...] = ()
        self._kv_in_vram: tuple[str, ...] = ()
        self._state: TierState | None = None
        self.written: dict[str, Any] = {}  # attention unit -> event of its last write-back
        self._programs: dict[tuple[int, bool], Program] = {}
        self.link_bytes = 0  # moved host to device since the start: weights, KV, activations
        self.switches = 0
        self._prompt_graphs: set[tuple] = set()  # keys of prompts' graphs
        self._sent: Any = None
        output = spec.units[-1]
        elsewhere = spec.stage is not None and not output.tensors  # another rank's logits come to this GPU at once
        on_device = elsewhere or all(t.placement(output.name).where != "cpu" for t in plan.tiers)
        # columns of the logits of each rank, when they are put together on the GPUs
        self.logit_widths = group.logit_widths(sum(t.rows for t in output.matrices), on_device) or ()
        self._host_memory: list[torch.Tensor] = []
        self.host_is_locked = True  # all that is transferred beside weights
        self._ring: StagingRing | None = None
        self._refused = False  # the ring
        try:
            self._make_host_side()
            self._ring = self._make_ring()
        except BaseException:
            self._unlock_host_memory()
            raise

    @property
    def arena_nbytes(self) -> int:
        """Bytes of the arena on the accelerator."""
        return self.arena.memory.numel()

    @property
    def host_nbytes(self) -> int:
        """Bytes of the packed weights in host memory."""
        return self.weights.nbytes

    @property
    def page_locked(self) -> bool:
        """Whether weights are copied from page-locked memory."""
        return self.weights.page_locked

    @property
    def staging_nbytes(self) -> int:
        """Bytes of the ring through which weights are copied that are not page-locked; 0 without one."""
        return self._ring.nbytes if self._ring else 0

    @property
    def locked_nbytes(self) -> int:
        """Bytes of host memory that are page-locked."""
        buffers = sum(memory.numel() for memory in self._host_memory)
        return buffers + self.staging_nbytes + self.weights.nbytes - self.weights.pageable

    # --- memory -------------------------------------------------------------------------------------------------

    def _make_host_side(self) -> None:
        """Host buffers: hidden rows of any micro-batch, scratch for CPU units, KV of layers that leave VRAM."""
        spec, kv, tiers = self.spec, self._kv_shape, self.plan.tiers
        largest = tiers[-1].tokens
        self.host_hidden = self._host_alloc(largest * spec.config.d_model * 4).view(torch.float32)
        self.host_hidden = self.host_hidden.view(largest, spec.config.d_model)
        index = 3 * largest + kv_blocks(kv.context, kv.sequences)
        self._host_index = self._host_alloc(index * 4).view(torch.int32)
        rows = max(kv.sequences, LOGIT_ROWS)
        self.host_logits = self._host_alloc(rows * spec.config.vocab * 4).view(torch.float32)
        on_cpu = [
            t.tokens
            for t in tiers
            if any(p.cpu_rows or (p.where == "cpu" and not spec.unit(p.unit).kind.is_looked_up) for p in t.placements)
        ]
        tokens = max(on_cpu, default=1)
        nbytes = max(row_stage_bytes(t.tokens, t.most_cpu_rows) for t in tiers)
        self.host_rows = (self._host_alloc(nbytes) if nbytes else torch.empty(0)).view(torch.float32)
        act = self._host_kernels.act_dtype
        memory = torch.empty(scratch_bytes(spec, tokens, kv, act.itemsize), dtype=torch.uint8)
        space = carve_workspace(memory, spec, tokens, kv, act)
        space.tensors["hidden"] = self.host_hidden
        if self.group.size > 1 and spec.stage is None:  # a graph may fetch the CPU's part of a sum from there
            branch = self._host_alloc(space.tensors["branch"].nbytes)
            space.tensors["branch"] = branch.view(torch.float32).view(space.tensors["branch"].shape)
        if "rope" in space.tensors:  # a rank of a pipeline may have no layers
            fill_rope_table(spec.config.rope, space.tensors["rope"])
        self.host_side = self._make_side(self._host_kernels, space)
        self.host_kv = {
            name: self.arena.view_kv(self._host_alloc(spec.unit(name).state_nbytes(spec.config, kv)), name)
            for name in self.plan.kv_on_host
        }

    def _host_alloc(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory, up to the first refusal; it lives as long as the executor."""
        memory = map_memory(nbytes)
        if self.host_is_locked and self.device.page_lock(memory):
            self._host_memory.append(memory)
        else:
            self.host_is_locked = False
        return memory

    def _make_ring(self) -> StagingRing | None:
        """A ring for weights that will not be page-locked. It comes before them, as they take all there is."""
        if not self.host_is_locked or self.weights.page_locked or not self.device.fills:
            return None
        try:
            return StagingRing(self.device, self.weights.largest)
        except MemoryError:
            self._refused = True
            return None

    def lock_weights(self) -> None:
        """Page-lock the weights as far as the system lets us; the first refusal, of whatever, is the last question."""
        if self.host_is_locked and not self._refused:
            self.weights.lock()
        if self.weights.page_locked and self._ring:
            self._ring.close()
            self._ring = None

    def _make_side(self, kernels: Kernels, space: Workspace) -> Side:
        table = space.tensors.get("rope", torch.empty(2, 0, 0))
        return Side(kernels, space, RopeTable(table[0], table[1], self.spec.config.rope.pairing), self.spec.config)

    def load_pins(self, names: Iterable[str], blobs: Any) -> None:
        """Bring the first pins into the arena from anything that maps a name to a blob (also ones not kept on the
        host)."""
        for name in names:
            self.arena.pinned(name).copy_(blobs(name))
            self._loaded_pins += (name,)

    # --- tiers --------------------------------------------------------------------------------------------------

    def enter(self, tier: TierPlan, used: Callable[[], list[tuple[int, int]]]) -> None:
        """Put a tier in force; `used` tells the ranges of cells in use. Moves only what changes hands.

        What arrives does so under the first units of the micro-batch that follows: each waits for its own.
        """
        if self._state is not None and self._state.tier is tier:
            return
        self.device.synchronize()
        self.switches += self._state is not None
        pieces = find_pieces(used(), self.join_cells)
        self._move_kv(self._kv_in_vram[len(self.arena.kv_units(tier)) :], pieces, to_host=True)
        self.device.synchronize()  # what arrives, and scratch, may lie where KV was
        carved = self.arena.carve(tier)
        with self.device.computing():  # angles that the host has: computing them again takes milliseconds
            for name in ("rope",) if "rope" in carved.space.tensors else ():
                carved.space.tensors[name].copy_(self.host_side.space.tensors[name])
        side = self._make_side(self.acc_kernels, carved.space)
        self._state = TierState(tier, side, carved, {}, [], [])
        new_pins = set(self.arena.pinned_units(tier)[len(self._loaded_pins) :])
        new_kv = set(self.arena.kv_units(tier)[len(self._kv_in_vram) :])
        self._loaded_pins, self._kv_in_vram = self.arena.pinned_units(tier), self.arena.kv_units(tier)
        streamed = {step.unit: step for step in self._program(False).enter}
        for unit in self.spec.units:  # in the order of need
            name, arrived = unit.name, None
            if name in new_pins:
                copies = self._cut_copy(self.arena.pinned(name), name, tier.placement(name).cpu_rows)
                arrived = self._copy_unit(copies, name)
            if name in new_kv:
                arrived = self._move_kv((name,), pieces, to_host=False) or arrived  # copies of a lane happen in turn
            if arrived is not None:
                self._state.arriving[name] = arrived
            if name in streamed:
                self.copy_in(streamed[name], ())

    def _move_kv(self, names: Iterable[str], pieces: tuple[Piece, ...], to_host: bool) -> Any:
        """Start to copy the cells of layers; returns the event of their end, None when there was nothing to copy."""
        done = None
        for name in names:
            if name not in self.host_kv:
                continue
            vram, host = self.arena.kv(name), self.host_kv[name]
            source, target = (vram, host) if to_host else (host, vram)
            copy = self.device.copy_out if to_host else self.device.copy_in
            for to, origin in cut_pieces(source, target, pieces):
                done = copy(to, origin)
                self.link_bytes += 0 if to_host else to.nbytes
        return done

    def _cells(self, unit: str) -> LayerKV:
        """Where a layer's KV stands now."""
        in_vram = unit in self._kv_in_vram or unit not in self.host_kv
        return self.arena.kv(unit) if in_vram else self.host_kv[unit]

    def read_cells(self, unit: str, blocks: Sequence[int], cells: int) -> dict[str, torch.Tensor]:
        """A copy on the host of a sequence's first cells in a layer: "k" and "v", each [cells, ...] as in LayerKV."""
        self.device.synchronize()
        kv = self._cells(unit)
        return {what: gather_cells(c, blocks, cells).to("cpu", copy=True) for what, c in (("k", kv.k), ("v", kv.v))}

    def write_cells(self, unit: str, blocks: Sequence[int], cells: dict[str, torch.Tensor]) -> None:
        """Fill a sequence's first cells in a layer with what `read_cells` gave."""
        kv = self._cells(unit)
        for cache, values in ((kv.k, cells["k"]), (kv.v, cells["v"])):
            done = 0
            for start, stop in pool_spans(blocks, 0, len(values)):
                cache.flatten(0, 1)[start:stop] = values[done : done + stop - start].to(cache.device)
                done += stop - start
        self.device.synchronize()

    def _program(self, has_past: bool) -> Program:
        """The tier's steps, grouped for launching."""
        assert self._state is not None
        tier = self._state.tier
        if (tier.tokens, has_past) not in self._programs:
            steps = emit_steps(self.spec, tier, self._shape(has_past))
            self._programs[tier.tokens, has_past] = Program(steps.enter, group_launches(steps.body))
        return self._programs[tier.tokens, has_past]

    def _shape(self, has_past: bool) -> StepShape:
        return StepShape(1, int(has_past), 1, ranks=self.group.size, sums_on_host=self.device.kind == "cpu")

    # --- one micro-batch ----------------------------------------------------------------------------------------

    def run(
        self,
        ids: torch.Tensor,
        segments: tuple[Segment, ...],
        logit_rows: list[int],
        used: Callable[[], list[tuple[int, int]]],
        best_only: bool = False,
    ) -> torch.Tensor:
        """Compute one micro-batch under the smallest tier that covers it.

        Args:
            ids: int64 [M] on the host.
            segments: which rows belong to which sequence, in row order.
            logit_rows: rows whose logits are wanted.
            used: tells the ranges of cells that are in use before this micro-batch, by any sequence.
            best_only: the largest logit of each row will do.

        Returns:
            float32 on the host, a fresh tensor: [len(logit_rows), vocabulary]; with `best_only` [len(logit_rows), 2],
            logit and id.
        """
        tokens = ids.numel()
        self.enter(self.plan.covering(tokens), used)
        state = self._state
        assert state is not None
        if self._sent is not None:
            self.device.host_wait(self._sent)  # the last micro-batch may still read the host buffers
        # few rows: torch's small operators stay on this thread, so that its threads don't spin beside the C++ pool
        threads = torch.get_num_threads()
        torch.set_num_threads(1 if tokens <= SMALL_BATCH else threads)
        has_past = any(s.past for s in segments)
        here, there = self._index_rows(segments, logit_rows, tokens)
        cells = max(s.past + s.tokens for s in segments)
        bound = min(max(LEAST_CELLS, 1 << (cells - 1).bit_length()), self._kv_shape.context)
        rows = here.rows(segments, cells), there.rows(segments, bound)
        wanted, unsent = (here.wanted, there.wanted), (there.memory, here.memory)
        batch = MicroBatch(self, state, ids, tokens, segments, *rows, logit_rows, *wanted, best_only, unsent)
        try:
            with torch.inference_mode(), self.device.computing():
                self.group.finish_send()  # the last micro-batch's hidden states may still be read
                logits = batch.walk(self._program(has_past).body)
        finally:
            torch.set_num_threads(threads)
        self._sent = None if batch.settled else self.device.mark()
        self.group.check()
        if not logits:
            return torch.empty(0, 2 if best_only else self.spec.config.vocab)
        table = logits[0] if len(logits) == 1 else torch.cat(logits)
        return choose_best(table) if best_only else table

    def _index_rows(
        self, segments: tuple[Segment, ...], logit_rows: list[int], tokens: int
    ) -> tuple[IndexView, IndexView]:
        """The index on the host, filled, and on the device, where the first launch takes it."""
        state, shape = self._state, (tokens, len(logit_rows))
        assert state is not None
        if shape not in state.indexes:
            there, most = state.side.space.tensors["index"], state.side.space.tokens
            here = self._host_index[: there.numel()]  # all in one copy
            state.indexes[shape] = _view_index(here, most, *shape), _view_index(there, most, *shape)
        on_host, _ = views = state.indexes[shape]
        fill_rows(segments, on_host.begin, on_host.position, on_host.blocks)
        on_host.wanted.numpy()[:] = logit_rows
        return views

    def may_repeat_prompt(self, key: tuple) -> bool:
        """Whether a prompt's launches of that key are captured: few, so that small batches keep memory for theirs."""
        if len(self._prompt_graphs) < MOST_PROMPT_GRAPHS:
            self._prompt_graphs.add(key)
        return key in self._prompt_graphs

    def copy_in(self, step: CopyIn, after: Iterable[Any]) -> None:
        """Start to copy a unit's blob, or the accelerator's part of it, to its slot."""
        state = self._state
        assert state is not None
        if step not in state.copies:
            target = state.carved.slots[step.slot][: step.nbytes]
            state.copies[step] = self._cut_copy(target, step.unit, step.cpu_rows)
        state.arrived[step.slot] = self._copy_unit(state.copies[step], step.unit, after)

    def _cut_copy(self, target: torch.Tensor, name: str, cpu_rows: int) -> Copies:
        """The copies that bring a unit's blob, or the accelerator's part of it, to the device."""
        blob = self.weights.blob(name)
        if not cpu_rows:
            return ((target, blob),)
        pieces = divide_rows(self.spec.unit(name), cpu_rows).pieces
        return tuple((target[p.to : p.to + p.nbytes], blob[p.start : p.start + p.nbytes]) for p in pieces)

    def _copy_unit(self, copies: Copies, name: str, after: Iterable[Any] = ()) -> Any:
        """Start the copies of a unit; returns the event of their end."""
        staged = self._ring is not None and not self.weights.is_locked(name)
        copy_in, done = self._ring.copy_in if self._ring and staged else self.device.copy_in, None
        for to, origin in copies:  # which happen in turn, as all of a lane
            done = copy_in(to, origin, after if done is None else ())
            self.link_bytes += to.nbytes
        return done

    def close(self) -> None:
        """Wait for all lanes, drop graphs, which know addresses of this executor only, and unlock host memory."""
        with contextlib.suppress(
            RuntimeError
        ):  # whoever used what a failed copy brought has been told; memory is freed
            self.device.synchronize()
        self._state, self._sent = None, None  # with their events, whose handles the device destroys
        self.written.clear()
        self.device.forget_repeats()
        self._unlock_host_memory()
        self.weights.close()

    def _unlock_host_memory(self) -> None:
        for memory in self._host_memory:
            self.device.page_unlock(memory)
        self._host_memory.clear()
        if self._ring:
            self._ring.close()
            self._ring = None


def _view_index(memory: torch.Tensor, most: int, tokens: int, wanted: int) -> IndexView:
    """The parts for so many tokens and logit rows of memory that has room for `most` tokens."""
    begin, position = memory[:tokens], memory[most : most + tokens]
    return IndexView(memory, begin, position, memory[3 * most :], memory[2 * most : 2 * most + wanted])
