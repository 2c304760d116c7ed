"""One micro-batch on its way through the steps of its tier."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from pshard.batch_sizes import LOGIT_ROWS, SMALL_BATCH
from pshard.plan import TierPlan
from pshard.runtime.best_logits import find_best
from pshard.runtime.blocks.blocks import (
    PendingSum,
    Residual,
    Side,
    gate_rows,
    project_down,
    run_attention,
    run_ffn,
    run_output,
)
from pshard.runtime.kernels.api import LayerKV, RowIndex, Segment
from pshard.runtime.memory.arena import Carved
from pshard.runtime.memory.kv_blocks import pool_spans
from pshard.runtime.memory.kv_cache import Piece, cut_pieces, find_pieces
from pshard.runtime.memory.weights import UnitWeights, lookup_rows, view_cpu_rows, view_unit
from pshard.runtime.memory.workspace import Workspace
from pshard.steps.graph_runs import LAUNCH_BOUND, enters, find_runs
from pshard.steps.step import (
    AllReduce,
    Compute,
    CopyIn,
    FetchKV,
    Free,
    Gather,
    Handoff,
    Join,
    Receive,
    Send,
    Step,
    WriteBack,
)
from pshard.units.attention import ATTENTION
from pshard.units.divide_rows import acc_part
from pshard.units.ffn import FFN

if TYPE_CHECKING:
    from pshard.runtime.executor import Executor


Copies = tuple[tuple[torch.Tensor, torch.Tensor], ...]  # (to, from), of one unit


@dataclass(frozen=True)
class Launch:
    """Units on the accelerator, and their all-reduces, that nothing interrupts: one CUDA graph in small batches.

    `enters`: activations come from the host first; `leaves`: the next unit wants them there. As nodes of the graph
    these transfers cost the host no launch of their own.
    """

    steps: tuple[Compute | AllReduce, ...]
    enters: bool = False
    leaves: bool = False

    @cached_property
    def name(self) -> tuple:
        """What tells it from the other launches of a tier."""
        first, last = self.steps[0], self.steps[-1]
        return type(first), first.unit, getattr(first, "part", ""), last.unit


def group_launches(body: tuple[Step, ...]) -> tuple[Step | Launch, ...]:
    """The body with its runs of accelerator units put together, and the hand-offs that begin them."""
    program: list[Step | Launch] = []
    at = 0
    for begin, end in find_runs(body):
        entered = enters(body, begin)
        program += body[at : begin - entered]
        steps = tuple(step for step in body[begin:end] if isinstance(step, Compute | AllReduce))
        program.append(Launch(steps, enters=entered))
        at = end
    return tuple(_mark_leaving([*program, *body[at:]]))


def _mark_leaving(program: list[Step | Launch]) -> Iterator[Step | Launch]:
    """Launches whose hidden states the host takes next, after steps that don't touch them."""
    for i, step in enumerate(program):
        following = next((s for s in program[i + 1 :] if not isinstance(s, CopyIn | Free | FetchKV | WriteBack)), None)
        if isinstance(step, Launch) and not _gives_logits(step.steps[-1]):
            step = replace(step, leaves=isinstance(following, Handoff) and following.to == "cpu")
        yield step


def _gives_logits(step: Compute | AllReduce) -> bool:
    return isinstance(step, Compute) and step.position == "last"


@dataclass(frozen=True)
class IndexView:
    """Parts of one side's `memory` for a micro-batch's index (int32): see RowIndex, and the `wanted` logits' rows."""

    memory: torch.Tensor
    begin: torch.Tensor
    position: torch.Tensor
    blocks: torch.Tensor
    wanted: torch.Tensor

    def rows(self, segments: tuple[Segment, ...], cells: int) -> RowIndex:
        """The index of segments that was written here."""
        return RowIndex(self.begin, self.position, self.blocks, segments, cells)


@dataclass
class TierState:
    """Views of the arena and lane events while a tier is in force."""

    tier: TierPlan
    side: Side
    carved: Carved
    arrived: dict[int, Any]  # slot -> event of the copy into it
    stage_free: list[Any]  # events after which the KV stage may be written by a fetch
    stage_ready: list[Any]  # events after which a unit may use the KV stage
    arriving: dict[str, Any] = field(default_factory=dict)  # unit -> event of its pin or KV that the switch brings
    weights: dict[Compute, UnitWeights] = field(default_factory=dict)  # views made once: 60 us each
    copies: dict[CopyIn, Copies] = field(default_factory=dict)  # likewise
    caches: dict[str, LayerKV] = field(default_factory=dict)  # likewise, by attention unit
    # likewise, by rows of logits, whether ranks put them together, and whether it is on the device
    tables: dict[tuple[int, bool, bool], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    # likewise, by tokens and logit rows: on the host and on the device
    indexes: dict[tuple[int, int], tuple[IndexView, IndexView]] = field(default_factory=dict)


@dataclass
class MicroBatch:
    """One walk over the steps of a micro-batch, with what it needs of the executor."""

    executor: "Executor"
    state: TierState
    ids: torch.Tensor
    tokens: int
    segments: tuple[Segment, ...]
    host_rows: RowIndex
    acc_rows: RowIndex
    logit_rows: list[int]
    host_logit_rows: torch.Tensor
    acc_logit_rows: torch.Tensor
    best_only: bool = False  # of each row of logits only the best one, as candidates of this rank's columns
    unsent: tuple[torch.Tensor, torch.Tensor] | None = None  # the index on the device and on the host
    logits: list[torch.Tensor] = field(default_factory=list)
    side: str = "cpu"
    freed: Any = None
    pending: torch.Tensor | None = None  # logits that are still on the device
    settled: bool = False  # whether the host has waited for all that the compute lane was given
    left: Any = None  # event after which the host has what the last graph brought: hidden states or logits

    def walk(self, program: tuple[Any, ...]) -> list[torch.Tensor]:
        """Issue all steps, in `computing()`; returns the logits, float32 on the host, or the ranks' candidates for the
        best ones."""
        for step in program:
            self._step(step)
        return self.logits

    def _step(self, step: Any) -> None:
        match step:
            case Launch():
                self._launch(step)
            case Compute():
                self._wait_for_arrival(step)
                self.side = step.on
                self._execute(step)
            case CopyIn():
                self.executor.copy_in(step, [self.freed])
            case Free():
                self.freed = self.executor.device.mark()
            case Handoff():
                self._hand_off(step)
            case Join():
                self._join(step)
            case FetchKV():
                self._fetch_kv(step)
            case WriteBack():
                self._write_back(step)
            case AllReduce():
                self._all_reduce()
            case Receive():
                self.side = "acc"
                self.executor.group.receive(self.state.side.space.rows("hidden", self.tokens), step.source)
            case Send():
                self.executor.group.send(self.state.side.space.rows("hidden", self.tokens), step.target)
            case Gather():
                self._gather()

    def _launch(self, launch: Launch) -> None:
        e, first, last = self.executor, launch.steps[0], launch.steps[-1]
        if isinstance(first, Compute):
            self._wait_for_inputs(first)
        for step in launch.steps:
            self._wait_for_arrival(step)
        self.side = "acc"
        cells = self.acc_rows.cells if self.tokens <= SMALL_BATCH else 0  # a prompt's launches do not depend on them
        output, index = _gives_logits(last), self.unsent
        wanted = len(self.logit_rows) if output or index is not None else 0  # the others' work is the same
        key = (self.state.tier.tokens, launch.name, self.tokens, wanted, cells)
        repeats = self._repeats(key)
        leaving = launch.leaves and repeats
        delivering = output and repeats and len(self.logit_rows) > 0
        delivering = delivering and bool(e.spec.units[-1].tensors or self._gathers_on_device())
        # a sum comes first where the CPU made a part of it
        brought = "hidden" if isinstance(first, Compute) else "branch"

        def work() -> None:
            if index is not None:
                e.device.send(*index)
            if launch.enters:
                self._send(brought)
            self._kernels(launch.steps)
            if leaving:
                e.device.bring(*self._rows("hidden"))
            if delivering:
                e.device.bring(*self._logits_both_sides(self._logits_on_device()[0]))

        e.device.repeat(key, repeats, work)
        self.unsent = None
        e.link_bytes += self._hidden_nbytes if launch.enters else 0
        self.left = e.device.mark() if leaving or delivering else None
        if delivering:
            self.pending = self._logits_on_device()[0]  # a replayed graph has written them without telling
        if output:
            self._deliver_logits()
            self.settled = delivering
            self.side = "cpu"  # nobody wants hidden states any more

    def _rows(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The micro-batch's rows of "hidden" or "branch" on the host and on the accelerator."""
        return self.executor.host_side.space.rows(name, self.tokens), self.state.side.space.rows(name, self.tokens)

    @property
    def _hidden_nbytes(self) -> int:
        return 4 * self.tokens * self.executor.spec.config.d_model

    def _send(self, name: str) -> None:
        here, there = self._rows(name)
        self.executor.device.send(there, here)

    def _repeats(self, key: tuple) -> bool:
        """Whether launching costs more than computing, and all addresses and launch sizes repeat where `key` does."""
        space = self.state.side.space
        if not self.executor.acc_kernels.repeatable or len(self.logit_rows) > space.tensors["logits"].shape[0]:
            return False
        if not self.executor.host_is_locked:  # a graph cannot take transfers from or to pageable memory
            return False
        if self.tokens <= SMALL_BATCH:
            return True
        # of prompts the full micro-batches of one sequence: one size, and all that differs is read from memory
        full = len(self.segments) == 1 and self.tokens == self.state.tier.tokens
        return full and self.tokens <= LAUNCH_BOUND and self.executor.may_repeat_prompt(key)

    def _side(self) -> Side:
        return self.state.side if self.side == "acc" else self.executor.host_side

    def _wait_for_inputs(self, step: Compute) -> None:
        e = self.executor
        if step.slot is not None:
            e.device.wait(self.state.arrived[step.slot])
        if self.state.tier.placement(step.unit).kv == "host":
            for event in self.state.stage_ready:
                e.device.wait(event)
            self.state.stage_ready.clear()

    def _wait_for_arrival(self, step: Compute | AllReduce) -> None:
        """The first use of what a switch brings waits for it."""
        if self.state.arriving and step.unit in self.state.arriving:
            self.executor.device.wait(self.state.arriving.pop(step.unit))

    def _kernels(self, steps: tuple[Compute | AllReduce, ...]) -> None:
        """The steps' kernels; a sum goes with the norm of the unit that follows it where there is a kernel for both."""
        entering = None
        for step, following, second in zip_longest(steps, steps[1:], steps[2:]):
            if isinstance(step, Compute):
                leaving = self._sum_for(second) if isinstance(following, AllReduce) else None
                if leaving is not None and not self.executor.group.pushes(leaving.part):
                    leaving = None
                self._execute(step, entering, leaving)
                entering = None
            else:
                entering = self._sum_for(following)
                if entering is None:
                    self._all_reduce()

    def _sum_for(self, following: Compute | AllReduce | None) -> PendingSum | None:
        """What `following` is to add as it normalises; None when the sum must be made by itself."""
        e, part = self.executor, self.state.side.space.rows("branch", self.tokens)
        if not isinstance(following, Compute) or not e.acc_kernels.fuses_sums:
            return None
        unit, exchange = e.spec.unit(following.unit), e.group.row_exchange(*part.shape)
        if exchange is None or not unit.tensors or not unit.kind.adds:
            return None
        return PendingSum(exchange, part, e.group.wire(part))

    def _execute(self, step: Compute, entering: PendingSum | None = None, leaving: PendingSum | None = None) -> None:
        """The unit's kernels, nothing else: what a graph may hold. entering, leaving: see Residual."""
        unit, weights = self.executor.spec.unit(step.unit), self._weights_of(step)
        part = self._side().space.rows("branch", self.tokens) if self._is_partial(step) else None
        residual = Residual(entering, part, leaving)
        if not unit.tensors:
            self._contribute_nothing(unit.kind.gives_logits, part)
        elif unit.kind.is_looked_up:
            self._embed(weights, step.on)
        elif unit.kind is ATTENTION:
            self._attend(step, weights, residual)
        elif step.cpu_rows:
            self._compute_part(step, weights, residual)
        elif unit.kind is FFN:
            run_ffn(self._side(), weights, self.tokens, residual)
        else:
            self._output(weights, step.on)

    def _is_partial(self, step: Compute) -> bool:
        """Whether this rank computes its part of a sum."""
        e = self.executor
        return e.group.size > 1 and e.spec.stage is None and e.spec.unit(step.unit).kind.adds

    def _compute_part(self, step: Compute, weights: UnitWeights, residual: Residual) -> None:
        """One side's rows of a split FFN, or all of its `down` once the CPU's rows have come."""
        side = self._side()
        if step.part == "down":
            here = self._rows_of(self.state.carved.row_stage, step.cpu_rows)
            project_down(side, weights, self.tokens, residual, here)
        elif step.on == "cpu":
            here = self._rows_of(self.executor.host_rows, step.cpu_rows)
            gate_rows(side, weights, self.tokens, out=here)
        else:
            gate_rows(side, weights, self.tokens, residual)

    def _rows_of(self, stage: torch.Tensor, cpu_rows: int) -> torch.Tensor:
        """float32 [M, cpu_rows] at the beginning of a row stage."""
        return stage[: self.tokens * cpu_rows].view(self.tokens, cpu_rows)

    def _join(self, step: Join) -> None:
        e, rows = self.executor, self.state.tier.placement(step.unit).cpu_rows
        here = self._rows_of(e.host_rows, rows)
        e.device.send(self._rows_of(self.state.carved.row_stage, rows), here)
        e.link_bytes += here.nbytes

    def _contribute_nothing(self, gives_logits: bool, part: torch.Tensor | None) -> None:
        """This rank holds nothing of the unit: zeros for the sum; no column of the logits."""
        if gives_logits and self._gathers_on_device():
            self.pending = self._logits_on_device()[0]
            self.executor.group.gather_logits(self.pending, self.executor.logit_widths)
        elif part is not None:
            part.zero_()

    def _gather(self) -> None:
        """One gather of all wanted rows, whatever number of pieces each rank computed them in."""
        e, pipeline = self.executor, self.executor.spec.stage is not None
        if self.logit_rows and not self._gathers_on_device():
            own = torch.cat(self.logits) if self.logits else self._keep(torch.empty(len(self.logit_rows), 0))
            # in a pipeline a rank is done long before the last one
            self.logits[:] = [e.group.gather_columns(own, inf if pipeline else None, alike=self.best_only)]
        elif self.logit_rows and pipeline and not e.spec.units[-1].tensors:
            self._contribute_nothing(True, None)
            self._deliver_logits()

    def _weights_of(self, step: Compute) -> UnitWeights:
        if step not in self.state.weights:
            self.state.weights[step] = self._view_weights(step)
        return self.state.weights[step]

    def _view_weights(self, step: Compute) -> UnitWeights:
        e = self.executor
        unit = e.spec.unit(step.unit)
        if step.on == "cpu" and step.cpu_rows:
            return view_cpu_rows(unit, e.weights.blob(step.unit), step.cpu_rows)
        if step.source == "arena":
            blob = e.arena.pinned(step.unit)
        elif step.source == "slot":
            assert step.slot is not None
            blob = self.state.carved.slots[step.slot]
        else:
            blob = e.weights.blob(step.unit)
        return view_unit(acc_part(unit, step.cpu_rows), blob)

    def _embed(self, weights: UnitWeights, on: str) -> None:
        e, table = self.executor, weights.matrices["token_embd.weight"]
        if on == "cpu":
            lookup_rows(table, self.ids, e.host_hidden[: self.tokens])
        else:
            lookup_rows(table, self.ids.to(e.device.torch_device), self.state.side.space.rows("hidden", self.tokens))

    def _gathers_on_device(self) -> bool:
        """Whether the ranks' logits are put together on the GPUs: few rows, so that each rank has them in one piece."""
        return bool(self.executor.logit_widths) and 0 < len(self.logit_rows) <= LOGIT_ROWS

    def _attend(self, step: Compute, weights: UnitWeights, residual: Residual) -> None:
        kv, rows = self._cache(step.unit), self.host_rows if step.on == "cpu" else self.acc_rows
        run_attention(self._side(), weights, rows, kv, residual)

    def _cache(self, unit: str) -> LayerKV:
        """The cells of the unit's layer on the side that attends: of one with KV on the host, the stage."""
        if unit not in self.state.caches:
            self.state.caches[unit] = self._view_cache(unit)
        return self.state.caches[unit]

    def _view_cache(self, unit: str) -> LayerKV:
        e, place = self.executor, self.state.tier.placement(unit)
        if place.where == "cpu":
            return e.host_kv[unit]
        if place.kv == "vram":
            return e.arena.kv(unit)
        assert self.state.carved.stage is not None
        return e.arena.view_kv(self.state.carved.stage, unit)

    def _output(self, weights: UnitWeights, on: str) -> None:
        """Logits of the wanted rows, as many at once as the scratch holds; the last ones stay there on the device."""
        side, wanted = self._side(), self.logit_rows_on(on)
        capacity = side.space.tensors["logits"].shape[0]
        self.pending = None
        for start in range(0, len(self.logit_rows), capacity):
            self._deliver_logits()
            rows = wanted[start : start + capacity]
            self.pending, own = self._logits_on_device(side, rows.shape[0])
            run_output(side, weights, rows, own)
            if self._gathers_on_device():
                self.executor.group.gather_logits(self.pending, self.executor.logit_widths)
            if on == "cpu":
                self.logits.append(self._keep(self.pending))
                self.pending = None

    def _logits_on_device(self, side: Side | None = None, n: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Where n rows of logits (default: all wanted) are left on the device, and this rank's columns of them."""
        n, side = len(self.logit_rows) if n is None else n, side or self.state.side
        key = n, self._gathers_on_device(), side is self.state.side
        if key not in self.state.tables:
            self.state.tables[key] = self._view_logits(side.space, n)
        return self.state.tables[key]

    def _view_logits(self, space: Workspace, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        e = self.executor
        own = sum(t.rows for t in e.spec.units[-1].matrices)
        if not self._gathers_on_device():
            table = space.tensors["logits"].flatten()[: n * own].view(n, own)
            return table, table
        table = space.tensors["logits"].flatten()[: n * sum(e.logit_widths)].view(n, sum(e.logit_widths))
        start = sum(e.logit_widths[: e.group.rank])
        return table, table[:, start : start + own]

    def _keep(self, logits: torch.Tensor) -> torch.Tensor:
        """What is kept of logits on the host: a copy, or candidates for the best ones."""
        # numpy's copy takes half the time of torch's, in whose fresh memory every page is a fault
        return find_best(logits) if self.best_only else torch.from_numpy(logits.numpy().copy())

    def logit_rows_on(self, on: str) -> torch.Tensor:
        """int32 row numbers whose logits are wanted, on that side."""
        return self.host_logit_rows if on == "cpu" else self.acc_logit_rows

    def _logits_both_sides(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the host has a table of logits, and the table on the device."""
        return self.executor.host_logits[: table.numel()].view(table.shape), table

    def _deliver_logits(self) -> None:
        """Bring the logits on the device to the host."""
        e = self.executor
        if self.pending is not None:
            here, there = self._logits_both_sides(self.pending)
            if self.left is None:
                e.device.receive(here, there)
            else:
                e.device.host_wait(self.left)
            self.logits.append(self._keep(here))
            self.pending = self.left = None

    def _hand_off(self, step: Handoff) -> None:
        e = self.executor
        if self.side == step.to:
            return  # the last one: logits were delivered as they were computed
        if step.to == "acc":
            self._send("hidden")
            e.link_bytes += self._hidden_nbytes
        elif self.left is None:
            e.device.receive(*self._rows("hidden"))
        else:
            e.device.host_wait(self.left)
            self.left = None
        self.side = step.to

    @cached_property
    def _old(self) -> tuple[Piece, ...]:
        """The cells that the micro-batch's sequences have behind them."""
        spans = [span for s in self.segments for span in pool_spans(s.blocks, 0, s.past)]
        return find_pieces(spans, self.executor.join_cells)

    @cached_property
    def _new(self) -> tuple[Piece, ...]:
        """The cells that it makes. What lies between them may be copied in blocks that it has: the stage agrees there
        with the host's cache, that it was filled from, and what follows a sequence's last cell is in nobody's use."""
        spans = [span for s in self.segments for span in pool_spans(s.blocks, s.past, s.past + s.tokens)]
        return find_pieces(spans, self.executor.join_cells, {block for s in self.segments for block in s.blocks})

    def _fetch_kv(self, step: FetchKV) -> None:
        e, state = self.executor, self.state
        after = [*state.stage_free, *([e.written[step.unit]] if step.unit in e.written else [])]
        done = None
        for to, origin in cut_pieces(e.host_kv[step.unit], self._cache(step.unit), self._old):
            done = e.device.copy_in(to, origin, after if done is None else ())
            e.link_bytes += to.nbytes
        if done is not None:  # copies of a lane happen in turn
            state.stage_ready.append(done)

    def _write_back(self, step: WriteBack) -> None:
        e, state = self.executor, self.state
        state.stage_free = [e.device.mark()]  # the attention over it was the last thing given to the compute lane
        done, after = None, state.stage_free
        for to, origin in cut_pieces(self._cache(step.unit), e.host_kv[step.unit], self._new):
            done = e.device.copy_out(to, origin, after if done is None else ())
        if done is None:  # another rank holds all of this layer's cache
            return
        e.written[step.unit] = done
        state.stage_ready.append(done)  # the next layer's new cells go where these are read from
        state.stage_free.append(done)  # and so may its old ones, where a rank's layers differ in width

    def _all_reduce(self) -> None:
        space = self._side().space
        self.executor.group.add_sum(space.rows("hidden", self.tokens), space.rows("branch", self.tokens))
