"""One micro-batch on its way through the steps of its tier."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pshard.batch_sizes import SMALL_BATCH
from pshard.homes import ACC, CPU
from pshard.routing.expert_uses import read_nbytes
from pshard.runtime.blocks.block import Work
from pshard.runtime.devices.relay import Relay
from pshard.runtime.kernels.api import RowIndex, Segment
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.recording import CallList
from pshard.runtime.logits import Logits
from pshard.runtime.residents import Residents
from pshard.runtime.tier_in_force import RunContext, TierInForce
from pshard.runtime.walks.beside import CopiesBeside
from pshard.runtime.walks.crossings import Crossings
from pshard.runtime.walks.program import Program, Stretch, Units
from pshard.runtime.walks.unit_runs import UnitRuns
from pshard.steps.graph_runs import is_launch_bound
from pshard.steps.move import Activations, Move, Part
from pshard.steps.step import AllReduce, Compute, Free, Gather, Receive, Send


@dataclass
class MicroBatch:
    """What is to be computed: token ids (int64 [M] on either side), where their rows stand there (on the accelerator
    maybe more, that only fill it), and what the first launch brings, as places on the device and on the host: the index
    that says so, and the ids where it looks them up. grams: as of `Work`, of either side."""

    ids: torch.Tensor
    acc_ids: torch.Tensor
    segments: tuple[Segment, ...]
    host_rows: RowIndex
    acc_rows: RowIndex
    unsent: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    grams: torch.Tensor | None = None
    acc_grams: torch.Tensor | None = None


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


def key_of_calls(units: Units, tier: TierInForce, tokens: int, segments: int, longest: int) -> tuple:
    """Equal for runs of units whose native calls are equal. longest: see RowIndex."""
    return units.name, units.on, tokens, segments, longest, tier.tokens


class Walk:
    """One walk over the steps of a micro-batch.

    Attributes:
        batch, logits: as given. settled: whether the host has waited for all of it that the compute lane was given.
    """

    _lists: list[CallList] | None = None  # that `find_lists` found, maybe before the walk began

    def __init__(
        self,
        context: RunContext,
        residents: Residents,
        tier: TierInForce,
        batch: MicroBatch,
        logits: Logits,
        graphs: PromptGraphs,
    ) -> None:
        self._context, self._tier, self.batch = context, tier, batch
        self.logits, self._graphs, self._device = logits, graphs, context.device
        self._tokens, self._filled = batch.ids.shape[0], batch.acc_rows.tokens
        self._crossings = Crossings(context, tier, self._filled)
        peers = context.group.peers if context.sums else None
        acc = Work(tier.side, batch.acc_rows, batch.acc_ids, logits, peers, batch.acc_grams)
        host = Work(context.host.side, batch.host_rows, batch.ids, logits, grams=batch.grams)
        work = {"cpu": host, "acc": acc}
        self._units = UnitRuns(context, residents, tier, work)
        self._copies = CopiesBeside(context, residents, tier, batch.segments)
        self._side = CPU  # which computed last
        self._delivered = False  # whether the logits were asked for
        self._once = False  # whether nothing of this walk will be done again in the same way
        self._left: Any = None  # event after which the host has what the last graph brought: hidden states or logits
        self.settled = False

    def walk(self, program: Program) -> list[torch.Tensor]:
        """Issue all steps, in `computing()`; returns the logits, float32 on the host, or the ranks' candidates for the
        best ones."""
        for item in program.body:
            ACTS[type(item)](self, item)
        return self.logits.kept

    def find_lists(self, program: Program) -> list[CallList] | None:
        """The calls of the CPU's runs in a program that runs ahead; None where a walk by the other must come first,
        which writes them down, or where launches or calls don't repeat."""
        if self._lists is None:
            self._lists = self._look_up(program)
        return self._lists

    def _look_up(self, program: Program) -> list[CallList] | None:
        self._once = False
        if self._tokens > SMALL_BATCH or not self._may_repeat():
            return None
        keys = [self._key_on_host(run) for run in program.runs]
        on_host = self._tier.on_host
        lists = [calls for calls in map(on_host.find, keys) if calls is not None]
        whole = len(lists) == len(keys)
        self._once = not (whole or all(map(on_host.knows, keys)))  # not captured: the next one is
        return lists if whole else None

    def walk_ahead(self, program: Program, relay: Relay, lists: Sequence[CallList]) -> list[torch.Tensor]:
        """As `walk`. The CPU's runs are done when it returns. What a switch brings has arrived before they begin: under
        its copies a walk would issue kernel by kernel, which takes some 90 ms of a mixture."""
        self._crossings.relay = relay
        try:
            for event in self._tier.arriving.values():
                self._device.host_wait(event)
            self._tier.arriving.clear()
            relay.start(lists)  # an interrupt may come when it has begun
            kept = self.walk(program)
            relay.finish()
        except BaseException:
            relay.give_up()
            raise
        return kept

    # --- units --------------------------------------------------------------------------------------------------

    def _run_on_host(self, units: Units) -> None:
        if self._tier.arriving:
            self._await_arrivals(units.steps)
        self._side = CPU
        self._run_units(units)

    def _run_units(self, units: Units) -> None:
        """Their kernels; where the CPU makes them, as one native call in small batches: what differs between these is
        read from memory."""
        by_cpu = units.on == CPU or self._device.kind == "cpu"
        if not by_cpu or self._tokens > SMALL_BATCH or not self._units.can_record(units.on):
            self._units.run_all(units.steps)
            return
        for part in units.calls:
            run = partial(self._units.run_all, part.steps)
            if part.is_recorded:
                self._units.bind_all(part.computes)  # which makes tables, and is no part of what is written down
                self._tier.on_host.run(self._key_on_host(part), run)
            else:
                run()

    def _key_on_host(self, units: Units) -> tuple:
        segments, longest = len(self.batch.segments), self.batch.host_rows.longest
        return key_of_calls(units, self._tier, self._tokens, segments, longest)

    def _launch(self, stretch: Stretch) -> None:
        logits, device = self.logits, self._device
        if stretch.waits_for is not None:
            self._copies.await_inputs(stretch.waits_for)
        if self._tier.arriving:
            self._await_arrivals(stretch.steps)
        self._side = ACC
        key = self._key(stretch)
        repeats, output = self._repeats(key, stretch), stretch.gives_logits
        leaving = stretch.leaves if repeats else ()
        written = output and repeats and logits.has_some()  # maybe by a graph, without telling
        device.repeat(key, repeats, partial(self._issue, stretch, self.batch.unsent, leaving))
        if bringing := written and logits.is_brought:
            logits.bring()
        self.batch.unsent = ()
        self._context.transfers.link_bytes += sum(map(self._crossings.count_sent, stretch.brings))
        self._context.transfers.link_bytes += sum(map(self._count_read, stretch.reading))
        self._left = device.mark() if leaving or bringing else None
        if output:
            if written:
                logits.expect()
            logits.deliver(self._left)
            self._left, self.settled, self._delivered = None, written, True

    def _key(self, stretch: Stretch) -> tuple:
        """Equal for work whose kernels, addresses and launch sizes are."""
        rows, told = self.batch.acc_rows, stretch.gives_logits or self.batch.unsent
        # a prompt's launches do not depend on them, but where some of them are chosen
        chooses = self._context.spec.config.selection is not None
        cells = rows.cells if self._tokens <= SMALL_BATCH or chooses else 0
        wanted = self.logits.made if told else 0  # the others' work is the same
        return id(self._context), self._tier.tokens, stretch.name, self._filled, wanted, cells, rows.longest

    def _issue(self, stretch: Stretch, unsent: tuple[tuple[torch.Tensor, torch.Tensor], ...], leaving: tuple) -> None:
        """Its kernels, and nothing else: a graph may hold them."""
        self._tier.side.kernels.forget()
        for there, here in unsent:
            self._device.send(there, here)
        for part in stretch.parts:
            if isinstance(part, Units):
                self._run_units(part)
            else:
                self._crossings.issue(part)
        for name in leaving:
            self._crossings.bring(name)

    def _count_read(self, step: Compute) -> int:
        """Bytes that kernels are expected to read over the link: what is chosen only they know."""
        context, key = self._context, (step, self._tokens)
        if key not in self._tier.reads:
            unit = context.spec.unit(step.unit)
            known = context.spec.uses, context.spec.hits_of(step.unit, self._tier.tokens, self._tokens)
            self._tier.reads[key] = read_nbytes(unit, step.share, context.spec.config, self._tokens, *known)
        return self._tier.reads[key]

    def _may_repeat(self) -> bool:
        """Whether addresses and launch sizes are the same where the key of launches is."""
        locked = self._context.host.is_locked  # a graph cannot take transfers from or to pageable memory
        return not self._once and self._tier.side.kernels.repeatable and self.logits.fits() and locked

    def _repeats(self, key: tuple, stretch: Stretch) -> bool:
        """Whether launching costs more than computing, and all that is launched repeats where `key` does."""
        if not self._may_repeat():
            return False
        if self._tokens <= SMALL_BATCH:
            return True
        # of prompts the full micro-batches of one sequence: one size, and all that differs is read from memory
        spec, full = self._context.spec, len(self.batch.segments) == 1 and self._tokens == self._tier.tokens
        units = (spec.unit(step.unit) for step in stretch.computes)
        return full and is_launch_bound(units, spec.config, self._tokens) and self._graphs.may_repeat(key)

    def _await_arrivals(self, steps: Sequence[Compute | AllReduce]) -> None:
        """The first use of what a switch brings waits for it."""
        for step in steps:
            if step.unit in self._tier.arriving:
                self._device.wait(self._tier.arriving.pop(step.unit))

    # --- activations --------------------------------------------------------------------------------------------

    def _move(self, step: Move) -> None:
        if not isinstance(step.portion, Activations | Part):
            self._copies.start(step, self._tokens)
        elif step.is_to_acc:
            self._crossings.send(step)
            self._context.transfers.link_bytes += self._crossings.count_sent(step)
            self._side = ACC
        elif not self._delivered:  # else the last one, of logits, which go where they are wanted
            self._wait_for_rows(step.activations)
            self._side = CPU

    def _wait_for_rows(self, names: tuple[str, ...]) -> None:
        """Until the accelerator's rows are on the host, for a unit on the CPU. Its threads wake meanwhile."""
        if self._device.kind != "cpu":  # which has computed by now
            native.expect_work()
            self._context.meanwhile.begin()
        if self._left is None:
            for name in names:
                self._device.receive(*self._crossings.rows(name))
        else:
            self._device.host_wait(self._left)
            self._left = None

    def _all_reduce(self, step: AllReduce) -> None:
        self._units.sum_on(self._side, step)

    def _receive(self, step: Receive) -> None:
        self._side = ACC
        for name in step.names:
            self._context.group.receive(self._crossings.rows(name)[1], step.source)

    def _hand_on(self, step: Send) -> None:
        for name in step.names:
            self._context.group.send(self._crossings.rows(name)[1], step.target)

    def _gather(self, step: Gather) -> None:
        self.logits.gather()

    def _free(self, step: Free) -> None:
        self._copies.free()


ACTS: dict[type, Callable[[Walk, Any], None]] = {
    Stretch: Walk._launch,
    Units: Walk._run_on_host,
    Move: Walk._move,
    Free: Walk._free,
    AllReduce: Walk._all_reduce,
    Receive: Walk._receive,
    Send: Walk._hand_on,
    Gather: Walk._gather,
}
