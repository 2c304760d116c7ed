"""Runs micro-batches of one model, or of one rank's slice of it, under the tiers of a plan."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from pshard.batch import Batch
from pshard.batch_sizes import SMALL_BATCH
from pshard.buffers import logit_rows as most_logit_rows
from pshard.homes import Home
from pshard.model import ModelSpec
from pshard.plan import RankPlan, TierPlan
from pshard.routing.play_record import RoutingPlay
from pshard.runtime.best_logits import choose_best
from pshard.runtime.blocks.rope_table import list_tables
from pshard.runtime.devices.device import MOST_PROMPT_GRAPHS, Device
from pshard.runtime.devices.relay import Relay, open_relay
from pshard.runtime.kernels.api import Kernels, Segment
from pshard.runtime.kernels.cpu.recording import Recordings
from pshard.runtime.memory.arena import Arena
from pshard.runtime.memory.beyond_host import Store
from pshard.runtime.memory.demand_slots import open_pools
from pshard.runtime.memory.expert_slots import ExpertSlots
from pshard.runtime.memory.host_side import HostSide
from pshard.runtime.memory.kv_cache import JOIN_BYTES, cell_nbytes
from pshard.runtime.memory.states import reach_old
from pshard.runtime.memory.transfers import Transfers
from pshard.runtime.memory.weights import HostWeights, LentWeights, UnitWeights
from pshard.runtime.ranks.group import Group
from pshard.runtime.residents import Residents
from pshard.runtime.texts.choose_rows import RowChooser
from pshard.runtime.tier_in_force import RunContext, TierInForce, make_tier
from pshard.runtime.walks.beside import bring_weights
from pshard.runtime.walks.program import Program, compile_ahead, compile_steps
from pshard.runtime.walks.ready_walk import Foresee, WalkMaker
from pshard.runtime.walks.walk import PromptGraphs, Walk
from pshard.steps.emit import emit_steps, list_residents
from pshard.steps.move import Pins
from pshard.steps.step import StepShape
from pshard.units.state import StateShape


class Executor:
    """Runs micro-batches of one model (or one rank's slice) under a plan.

    Attributes:
        states: what sizes the states of units; residents: where they and the pins are; walks: makes walks.
        in_force: the tier; switches: how often they changed; least: tokens of the smallest in use. meanwhile: see it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: RankPlan,
        device: Device,
        arena: torch.Tensor,
        weights: HostWeights | LentWeights,
        states: StateShape,
        kernels: tuple[Kernels, Kernels],
        group: Group,
        records: bool = False,
        play: RoutingPlay | None = None,
        stores: Mapping[Home, Store] | None = None,
        lent: Mapping[str, UnitWeights] | None = None,  # see Residents
    ) -> None:
        """records, play: see `HostSide.take_picks`. stores: of homes beyond host memory."""
        self.spec, self.plan, self.device, self.group, self.states = spec, plan, device, group, states
        (self.acc_kernels, host_kernels), self.weights = kernels, weights
        self.arena = Arena(arena, spec, plan, states, self.acc_kernels.act_dtype)
        self.host, self.transfers = HostSide(device), Transfers(device, spec, weights, stores)
        # cells of a layer that the link moves while one more copy is issued
        join_cells = JOIN_BYTES // max(1, cell_nbytes(spec, states))
        widths = group.logit_widths(sum(t.rows for t in spec.output.matrices), _has_logits_on_device(spec, plan))
        self.in_force: tuple[TierPlan, TierInForce] | None = None
        # by tier: one is always carved alike, so what graphs and recorded runs know is true when it comes back
        self._tiers: dict[int, TierInForce] = {}
        self._recorded = Recordings()
        self._programs: dict[tuple[int, bool], tuple[Program, Program | None]] = {}
        self._relay: Relay | None = None
        self._sent: Any = None
        self.switches = self.least = self.process = 0  # process: see MemoryReport
        try:
            self.host.take(spec, plan, states, host_kernels, group.size > 1 and spec.neighbours is None)
            self.host.take_picks(spec, plan, records, play)
            pools = open_pools(spec, plan, self.arena.pools, device, self.transfers, self.host)
            slots = ExpertSlots(pools, self.host.picks)
            context = RunContext(spec, device, group, self.host, self.transfers, widths or (), join_cells, slots)
            self._context, self.meanwhile = context, context.meanwhile
            self.transfers.make_rings(self.host.is_locked)
            if self.host.is_locked:
                self._relay = open_relay(device, len(spec.units))
            self.residents = Residents(spec, states, self.arena, self.host, weights, self.transfers, lent or {})
            self.walks = WalkMaker(context, self.residents, states, PromptGraphs(MOST_PROMPT_GRAPHS), self._relay)
        except BaseException:
            self._unlock_host_memory()
            raise

    @property
    def slots(self) -> ExpertSlots:
        """Experts that follow use."""
        return self._context.slots

    @property
    def link_bytes(self) -> int:
        """Bytes moved host to device since the start: weights, states, activations."""
        return self.transfers.link_bytes

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
        return self.transfers.ring_nbytes

    @property
    def locked_nbytes(self) -> int:
        """Bytes of host memory that are page-locked."""
        buffers = sum(memory.numel() for memory in self.host.locked)
        return buffers + self.staging_nbytes + self.weights.nbytes - self.weights.pageable

    def lock_weights(self) -> None:
        """Page-lock the weights as far as the system lets us; the first refusal, of whatever, is the last question."""
        if self.host.is_locked:
            self.transfers.lock_weights()

    def load_pins(self, names: Iterable[str], blobs: Callable[[str], torch.Tensor]) -> None:
        """Bring the first pins into the arena from anything that maps a name to a blob."""
        self.residents.load_pins(names, blobs)

    def enter(self, tier: TierPlan, used: Callable[[], Sequence[Segment]]) -> TierInForce:
        """Put a tier in force; `used` tells what sequences have, see `run`. Moves only what changes hands.

        What arrives does so under the first units of the micro-batch that follows: each waits for its own.
        """
        if self.in_force is not None and self.in_force[0] is tier:
            return self.in_force[1]
        self.device.synchronize()
        self.switches += self.in_force is not None
        reach = reach_old(used(), self._context.join_cells)
        self.residents.leave(tier, reach)
        self.device.synchronize()  # what arrives, and scratch, may lie where states were
        if tier.tokens not in self._tiers:
            given = self.arena, self.acc_kernels, self._recorded, self.states
            self._tiers[tier.tokens] = make_tier(self.spec, tier, *given)
        in_force = self._tiers[tier.tokens].begin()
        self.walks.forget()
        with self.device.computing():  # angles that the host has: computing them again takes milliseconds
            for name in list_tables(tables := in_force.side.space.tensors):
                tables[name].copy_(self.host.side.space.tensors[name])
        self.in_force = tier, in_force
        pins, states = self.residents.settle(tier)
        for step in self.program(tier, False)[0].entering:
            if step.slot is not None:
                bring_weights(self._context, in_force, step, ())
            elif step.unit in (pins if isinstance(step.portion, Pins) else states):
                arrived = self.residents.bring(step, reach)
                if arrived is not None:  # of two copies the last: those of a lane happen in turn
                    in_force.arriving[step.unit] = arrived
        return in_force

    def program(self, tier: TierPlan, has_past: bool) -> tuple[Program, Program | None]:
        """The tier's steps as they are launched; and for running ahead, where that can be."""
        key = tier.tokens, has_past
        if key not in self._programs:
            steps = emit_steps(self.spec, tier, self.shape_of(tier, has_past))
            number = {unit.name: i for i, unit in enumerate(self.spec.units)}
            entering = [*list_residents(self.spec, self.plan, tier), *steps.enter]
            program = compile_steps(steps.body, tuple(sorted(entering, key=lambda step: number[step.unit])))
            self._programs[key] = program, compile_ahead(steps.body) if self._relay else None
        return self._programs[key]

    def shape_of(self, tier: TierPlan, has_past: bool) -> StepShape:
        """The largest micro-batch of a tier: none moves more than its steps say."""
        states, tokens = self.states, tier.tokens
        return StepShape(
            tokens,
            max(1, states.context - tokens) if has_past else 0,
            most_logit_rows(tokens, states.sequences),
            min(tokens, states.sequences),
            states.type_k,
            states.type_v,
            ranks=self.group.size,
            sums_on_host=self.device.kind == "cpu",
        )

    def run(
        self,
        ids: Sequence[int],
        segments: tuple[Segment, ...],
        batch: Batch,
        used: Callable[[], Sequence[Segment]],
        best_only: bool = False,
        chooser: RowChooser | None = None,
        foresee: Foresee | None = None,
        grams: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Compute one micro-batch under the smallest tier that covers it, or `least`.

        Args:
            ids: of the tokens, all in the vocabulary. grams: see `ReadyWalk.begin`.
            segments: which rows belong to which sequence, in row order.
            batch: the same tokens as spans of texts; it says whose logits are wanted.
            used: tells what every sequence has behind it before this micro-batch, as segments without new tokens.
            best_only: the largest logit of each row will do.
            chooser: takes what is wanted of each row instead of it being returned.
            foresee: called while the accelerator computes; tells the next one's segments, which is then made ready.

        Returns:
            float32 on the host, fresh: [batch.rows, vocabulary], or [batch.rows, 2], logit and id; with a chooser none.
        """
        tokens, logit_rows = batch.tokens, list(batch.wanted)
        tier = self.plan.covering(max(tokens, self.least))
        in_force = self.enter(tier, used)
        self.begin(segments)
        self.host.deal_picks(tokens)
        # few rows: torch's small operators stay on this thread, so that its threads don't spin beside the C++ pool
        threads = torch.get_num_threads()
        torch.set_num_threads(1 if tokens <= SMALL_BATCH else threads)
        walk = self.walks.make(in_force, ids, segments, logit_rows, grams)
        best_only = best_only or (chooser is not None and chooser.is_quick)
        walk.logits.ask(best_only, chooser)
        program, ahead = self.program(tier, batch.cells > 0)
        if foresee is not None:
            walk.logits.make_next = partial(self.walks.make_next, in_force, foresee, logit_rows, ahead)
        try:
            with torch.inference_mode(), self.device.computing():
                self.group.finish_send()  # the last micro-batch's hidden states may still be read
                logits = self._walk(walk, program, ahead)
        finally:
            torch.set_num_threads(threads)
        if self.host.picks is not None and self.host.picks.records:
            if not walk.settled:
                self.device.synchronize()
            self.host.picks.keep(tokens)
        self._sent = None if walk.settled else self.device.mark()
        self.group.check()
        self.transfers.check()
        table = join_logits(logits, best_only, self.spec.config.vocab)
        if chooser is None or not table.shape[0]:
            return table
        (chooser.take_best if best_only else chooser.take)(table)
        return table[:0]

    def begin(self, segments: Sequence[Segment]) -> None:
        """Make all ready for micro-batches of these segments, which come next."""
        if self._sent is not None:
            self.device.host_wait(self._sent)  # the last micro-batch may still read the host buffers
        _begin_sequences(self.residents, self.device, segments)
        self.slots.observe()

    def _walk(self, walk: Walk, program: Program, ahead: Program | None) -> list[torch.Tensor]:
        """The logits; by the program that runs ahead where that can be."""
        if self._relay and ahead:
            lists = walk.find_lists(ahead)
            if lists is not None:
                return walk.walk_ahead(ahead, self._relay, lists)
        return walk.walk(program)

    def close(self) -> None:
        """Wait for all lanes, drop graphs, which know addresses of this executor only, and unlock host memory."""
        with contextlib.suppress(RuntimeError):  # whoever used what a failed copy brought has been told
            if self._relay is not None:
                self._relay.give_up()  # where an interrupt kept a step from it, the GPU would wait for ever
            self.transfers.cancel()
            self.device.synchronize()
        self.walks.forget()
        self.in_force, self._sent = None, None  # with their events, whose handles the device destroys
        self._tiers.clear()
        self.residents.written.clear()
        self.device.forget_repeats()
        self._unlock_host_memory()
        self.weights.close()

    def _unlock_host_memory(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None
        self.host.unlock()
        self.transfers.close()


def join_logits(kept: list[torch.Tensor], best_only: bool, vocab: int) -> torch.Tensor:
    """What a walk has kept of its logits, as `Executor.run` returns it without a chooser."""
    if not kept:
        return torch.empty(0, 2 if best_only else vocab)
    table = kept[0] if len(kept) == 1 else torch.cat(kept)
    return choose_best(table) if best_only else table


def _begin_sequences(residents: Residents, device: Device, segments: Sequence[Segment]) -> None:
    """States that do not grow are all zeros where a sequence begins: here, as a captured graph runs for any."""
    fresh = [s.sequence for s in segments if not s.past]
    if fresh and residents.fixed:
        device.synchronize()  # the last text there may still be copied to the host
        with torch.inference_mode(), device.computing():
            residents.begin_states(fresh)


def _has_logits_on_device(spec: ModelSpec, plan: RankPlan) -> bool:
    """Whether this rank's columns of the logits are always on its GPU, or, of a pipeline, another rank's come there."""
    output = spec.output
    elsewhere = spec.neighbours is not None and not output.tensors
    return elsewhere or all(t.placement(output.name).is_on_acc for t in plan.tiers)
