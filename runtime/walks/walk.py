"""One micro-batch on its way through the steps of its tier."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from pshard.batch_sizes import SMALL_BATCH
from pshard.homes import ACC, CPU
from pshard.routing.expert_uses import read_nbytes
from pshard.runtime.blocks.block import Work
from pshard.runtime.kernels.api import RowIndex, Segment
from pshard.runtime.kernels.cpu import native
from pshard.runtime.logits import Logits
from pshard.runtime.memory.states import Copies, Reach, pair_runs, reach_new, reach_old
from pshard.runtime.residents import Residents, view_rows
from pshard.runtime.tier_in_force import RunContext, TierInForce
from pshard.runtime.walks.unit_runs import UnitRuns
from pshard.runtime.walks.walk_program import HostRun, Launch, WalkProgram
from pshard.steps.graph_runs import is_launch_bound
from pshard.steps.move import Activations, Move, NewExperts, Part, UnitState, Weights
from pshard.steps.step import AllReduce, Compute, Free, Gather, Receive, Send
from pshard.units.divide_unit import divide_unit


@dataclass
class MicroBatch:
    """What is to be computed: token ids (int64 [M] on either side), where their rows stand there (on the accelerator
    maybe more, that only fill it), and what the first launch brings, as places on the device and on the host: the index
    that says so, and the ids where it looks them up."""

    ids: torch.Tensor
    acc_ids: torch.Tensor
    segments: tuple[Segment, ...]
    host_rows: RowIndex
    acc_rows: RowIndex
    unsent: tuple[tuple[torch.Tensor, torch.Tensor], ...]


class PromptGraphs:
    """Which launches of prompts are captured: those that come again, as capturing takes as long as launching; at most
    so many, so that small batches keep memory for theirs."""

    def __init__(self, most: int) -> None:
        self._most, self._seen, self._keys = most, set[tuple](), set[tuple]()

    def may_repeat(self, key: tuple) -> bool:
        """Whether launches of that key are captured, which begin now."""
        if key in self._seen and len(self._keys) < self._most:
            self._keys.add(key)
        self._seen.add(key)
        return key in self._keys


class Walk:
    """One walk over the steps of a micro-batch.

    Attributes:
        batch, logits: as given. settled: whether the host has waited for all that the compute lane was given.
    """

    def __init__(
        self,
        context: RunContext,
        residents: Residents,
        tier: TierInForce,
        batch: MicroBatch,
        logits: Logits,
        graphs: PromptGraphs,
    ) -> None:
        self._context, self._residents, self._tier, self.batch = context, residents, tier, batch
        self.logits, self._graphs, self._device = logits, graphs, context.device
        self._tokens, self._filled = batch.ids.shape[0], batch.acc_rows.tokens
        self._host_space, self._acc_space = context.host.side.space, tier.side.space
        peers = context.group.peers if context.sums else None
        acc = Work(tier.side, batch.acc_rows, batch.acc_ids, logits, peers)
        work = {"cpu": Work(context.host.side, batch.host_rows, batch.ids, logits), "acc": acc}
        self._units = UnitRuns(context, residents, tier, work)
        self._side = "cpu"
        self._freed: Any = None
        self._once = False  # whether nothing of this walk will be done again in the same way
        self._left: Any = None  # event after which the host has what the last graph brought: hidden states or logits
        self.settled = False

    def walk(self, program: WalkProgram) -> list[torch.Tensor]:
        """Issue all steps, in `computing()`; returns the logits, float32 on the host, or the ranks' candidates for the
        best ones."""
        for step in program.body:
            ACTS[type(step)](self, step)
        return self.logits.kept

    def _compute(self, step: Compute) -> None:
        if self._tier.arriving:
            self._wait_for_arrival(step)
        self._side = step.on
        self._units.run(step)

    def _run_on_host(self, run: HostRun) -> None:
        if self._tier.arriving:
            for step in run.steps:
                self._wait_for_arrival(step)
        self._side = "cpu"
        self._repeat_on_host(run)

    def _repeat_on_host(self, run: HostRun) -> None:
        """Its kernels as one native call, in small batches: what differs between these is read from memory."""
        if self._tokens > SMALL_BATCH or not self._units.can_record(run.steps[0].on):
            self._units.run_all(run.steps)
            return
        self._units.bind_all(run.steps)  # which makes tables, and is no part of what is written down
        self._tier.on_host.run(self._host_key(run), lambda: self._units.run_all(run.steps))

    def _host_key(self, run: HostRun) -> tuple:
        return run.name, self._tokens, len(self.batch.segments), self.batch.host_rows.longest

    def _run_units(self, launch: Launch) -> None:
        if self._device.kind != "cpu" or self._tokens > SMALL_BATCH:
            self._units.run_all(launch.steps)
            return
        for step in launch.on_cpu:
            if isinstance(step, HostRun):
                self._repeat_on_host(step)
            else:
                self._units.run_all((step,))

    def _launch(self, launch: Launch) -> None:
        tier, logits, unsent = self._tier, self.logits, self.batch.unsent
        if isinstance(first := launch.steps[0], Compute):
            self._wait_for_inputs(first)
        if tier.arriving:
            for step in launch.steps:
                self._wait_for_arrival(step)
        self._side = "acc"
        # a prompt's launches do not depend on the cells
        cells = self.batch.acc_rows.cells if self._tokens <= SMALL_BATCH else 0
        output = launch.gives_logits
        wanted = logits.made if output or unsent else 0  # the others' work is the same
        key = (tier.tokens, launch.name, self._filled, wanted, cells, self.batch.acc_rows.longest)
        repeats = self._repeats(key, launch)
        leaving = launch.leaves if repeats else ()
        written = output and repeats and logits.has_some()  # maybe by a graph, without telling

        def work() -> None:
            tier.side.kernels.forget()
            for there, here in unsent:
                self._device.send(there, here)
            for name in launch.brought:
                self._send(name)
            self._run_units(launch)
            for name in leaving:
                self._device.bring(*self._rows(name))

        self._device.repeat(key, repeats, work)
        if written and logits.is_brought:
            logits.bring()
        self.batch.unsent = ()
        self._context.transfers.link_bytes += sum(self._rows(name)[0].nbytes for name in launch.brought)
        self._context.transfers.link_bytes += sum(map(self._count_read, launch.reading))
        self._left = self._device.mark() if leaving or written else None
        if output:
            if written:
                logits.expect()
            logits.deliver(self._left)
            self._left, self.settled = None, written
            self._side = "cpu"  # nobody wants hidden states any more

    def _count_read(self, step: Compute) -> int:
        """Bytes that kernels are expected to read over the link: what is chosen only they know."""
        context, key = self._context, (step, self._tokens)
        if key not in self._tier.reads:
            unit = context.spec.unit(step.unit)
            uses = context.spec.uses_outside(step.unit, self._tier.tokens)
            self._tier.reads[key] = read_nbytes(unit, step.share, context.spec.config, self._tokens, uses)
        return self._tier.reads[key]

    def _may_repeat(self) -> bool:
        """Whether addresses and launch sizes are the same where the key of launches is."""
        locked = self._context.host.is_locked  # a graph cannot take transfers from or to pageable memory
        return not self._once and self._tier.side.kernels.repeatable and self.logits.fits() and locked

    def _repeats(self, key: tuple, launch: Launch) -> bool:
        """Whether launching costs more than computing, and all that is launched repeats where `key` does."""
        if not self._may_repeat():
            return False
        if self._tokens <= SMALL_BATCH:
            return True
        # of prompts the full micro-batches of one sequence: one size, and all that differs is read from memory
        spec, full = self._context.spec, len(self.batch.segments) == 1 and self._tokens == self._tier.tokens
        bound = full and is_launch_bound(map(spec.unit, launch.units), spec.config, self._tokens)
        return bound and self._graphs.may_repeat(key)

    def _wait_for_inputs(self, step: Compute) -> None:
        tier, device = self._tier, self._device
        if step.slot is not None:
            device.wait(tier.arrived[step.slot])
        if step.state == "host":
            for event in tier.stage_ready:
                device.wait(event)
            tier.stage_ready.clear()

    def _wait_for_arrival(self, step: Compute | AllReduce) -> None:
        """The first use of what a switch brings waits for it."""
        if step.unit in self._tier.arriving:
            self._device.wait(self._tier.arriving.pop(step.unit))

    # --- activations --------------------------------------------------------------------------------------------

    def _rows(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The micro-batch's rows of a port, or of "branch", on the host and on the accelerator."""
        return self._host_space.rows(name, self._filled), self._acc_space.rows(name, self._filled)

    def _send(self, name: str) -> int:
        """Rows of the host to the accelerator; returns their bytes."""
        here, there = self._rows(name)
        self._device.send(there, here)
        self._tier.side.kernels.forget()
        return here.nbytes

    def _hand_over(self, step: Move) -> None:
        side, names = ACC if step.is_to_acc else CPU, step.activations
        if self._side == side:
            return  # the last one: logits were delivered as they were computed
        if step.is_to_acc:
            self._context.transfers.link_bytes += sum(self._send(name) for name in names)
        else:
            self._wait_for_rows(names)
        self._side = side

    def _wait_for_rows(self, names: tuple[str, ...]) -> None:
        """Until the accelerator's rows are on the host, for a unit on the CPU. Its threads wake meanwhile."""
        if self._device.kind != "cpu":  # which has computed by now
            native.expect_work()
            self._context.meanwhile.begin()
        if self._left is None:
            for name in names:
                self._device.receive(*self._rows(name))
        else:
            self._device.host_wait(self._left)
            self._left = None

    def _join(self, step: Move) -> None:
        there, here = view_joined(self._context, self._tier, self._filled, step)
        self._device.send(there, here)
        self._context.transfers.link_bytes += here.nbytes

    def _all_reduce(self, step: AllReduce) -> None:
        self._units.add_sum(self._side, step.unit)

    def _receive(self, step: Receive) -> None:
        self._side = "acc"
        self._context.group.receive(self._rows("hidden")[1], step.source)

    def _hand_on(self, step: Send) -> None:
        self._context.group.send(self._rows("hidden")[1], step.target)

    def _gather(self, step: Gather) -> None:
        self.logits.gather()

    def _bring_weights(self, step: Move) -> None:
        if self._freed is None:  # a copy that had to wait for this micro-batch
            self._freed = self._device.mark()
        bring_weights(self._context, self._tier, step, (self._freed,))

    def _bring_experts(self, step: Move) -> None:
        self._context.slots.begin(self._tier.tokens, self._tokens)

    def _free(self, step: Free) -> None:
        self._freed = self._device.mark()

    @cached_property
    def _old(self) -> Reach:
        return reach_old(self.batch.segments, self._context.join_cells)

    @cached_property
    def _new(self) -> Reach:
        return reach_new(self.batch.segments, self._context.join_cells)

    def _decide(self, step: Move) -> Copies:
        """What a step copies whose bytes are decided now."""
        staged = self._tier.staged.get(step.unit)
        if staged is None:
            staged = self._tier.staged[step.unit] = self._residents.stage_state(step.unit, self._tier.carved)
        if step.is_to_acc:
            return pair_runs(staged.here, staged.there, self._old.entries(staged.law))
        return pair_runs(staged.there, staged.here, self._new.entries(staged.law))

    def _fetch_state(self, step: Move) -> None:
        tier, written = self._tier, self._residents.written
        after = (*tier.stage_free, written[step.unit]) if step.unit in written else tier.stage_free
        done = self._context.transfers.bring(self._decide(step), after)
        if done is not None:
            tier.stage_ready.append(done)

    def write_state(self, step: Move) -> None:
        """Start to copy what has changed of a unit's state to where it lives."""
        tier = self._tier
        tier.stage_free = [self._device.mark()]  # the unit over it was the last thing given to the compute lane
        done = self._context.transfers.take_back(self._decide(step), tier.stage_free)
        if done is None:  # another rank holds all of this unit's state
            return
        self._residents.written[step.unit] = done
        tier.stage_ready.append(done)  # what the next unit changes goes where this is read from
        tier.stage_free.append(done)  # and so may what it had, where a rank's layers differ in width


def move(walk: Walk, step: Move) -> None:
    """Do a step that copies."""
    if isinstance(step.portion, UnitState) and not step.is_to_acc:
        walk.write_state(step)
    else:
        BRINGS[type(step.portion)](walk, step)


def view_joined(context: RunContext, tier: TierInForce, tokens: int, step: Move) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the CPU's part of a unit goes on the accelerator, and where it is on the host."""
    there, here, width = tier.carved.row_stage, context.host.rows, step.part_width
    return view_rows(there, tokens, width), view_rows(here, tokens, width)


def bring_weights(context: RunContext, tier: TierInForce, step: Move, after: tuple[Any, ...]) -> None:
    """Start to copy what is streamed of a unit to its slot."""
    copies = tier.copies.get(step)
    assert step.slot is not None
    if copies is None:
        unit, slot = context.spec.unit(step.unit), tier.carved.slots[step.slot]
        copies = tier.copies[step] = context.transfers.cut_portion(
            slot, divide_unit(unit, step.share).brought, step.origin
        )
    tier.arrived[step.slot] = context.transfers.bring_weights(step.unit, copies, after, step.origin)


ACTS: dict[type, Callable[[Walk, Any], None]] = {
    Launch: Walk._launch,
    HostRun: Walk._run_on_host,
    Compute: Walk._compute,
    Move: move,
    Free: Walk._free,
    AllReduce: Walk._all_reduce,
    Receive: Walk._receive,
    Send: Walk._hand_on,
    Gather: Walk._gather,
}

BRINGS: dict[type, Callable[[Walk, Move], None]] = {
    Weights: Walk._bring_weights,
    NewExperts: Walk._bring_experts,
    UnitState: Walk._fetch_state,
    Activations: Walk._hand_over,
    Part: Walk._join,
}
