"""One small micro-batch of which the accelerator is given all its work at once, while a thread of its own computes what
is left to the CPU, as soon as the accelerator asks for it."""

from collections.abc import Sequence
from typing import Any

import torch

from pshard.batch_sizes import SMALL_BATCH
from pshard.runtime.devices.relay import Relay
from pshard.runtime.kernels.cpu.recording import CallList
from pshard.runtime.walks.ahead_program import AheadProgram, Await, Stretch, Tell
from pshard.runtime.walks.walk import ACTS, Walk, view_joined
from pshard.runtime.walks.walk_program import Launch
from pshard.steps.step import Compute


class AheadWalk(Walk):
    """One walk over the steps of a micro-batch, by an `AheadProgram`."""

    lists: list[CallList] | None = None  # that `find_lists` found, maybe before the walk began

    def find_lists(self, program: AheadProgram) -> list[CallList] | None:
        """The calls of the CPU's runs; None where a walk by the plain program must come first, which writes them down
        and awaits units that still arrive from another tier, or where launches or calls don't repeat."""
        if self.lists is None:
            self.lists = self._look_up(program)
        return self.lists

    def _look_up(self, program: AheadProgram) -> list[CallList] | None:
        self._once = False
        if self._tokens > SMALL_BATCH or not self._may_repeat():
            return None
        keys = [self._host_key(run) for run in program.runs]
        on_host = self._tier.on_host
        lists = [calls for calls in map(on_host.find, keys) if calls is not None]
        whole = len(lists) == len(keys)
        # not captured: the next one is
        self._once = bool(self._tier.arriving) or not (whole or all(map(on_host.knows, keys)))
        return lists if whole and not self._once else None

    def walk_ahead(self, program: AheadProgram, relay: Relay, lists: Sequence[CallList]) -> list[torch.Tensor]:
        """As `walk`. The CPU's runs are done when it returns."""
        try:
            relay.start(lists)  # an interrupt may come when it has begun
            for step in program.body:
                if isinstance(step, Stretch):
                    self._run_stretch(step, relay)
                else:
                    ACTS[type(step)](self, step)
            relay.finish()
        except BaseException:
            relay.give_up()
            raise
        return self.logits.kept

    def _run_stretch(self, stretch: Stretch, relay: Relay) -> None:
        tier, logits, unsent = self._tier, self.logits, self.batch.unsent
        first = stretch.launches[0].steps[0] if stretch.launches else None
        if isinstance(first, Compute):
            self._wait_for_inputs(first)
        output = any(launch.gives_logits for launch in stretch.launches)
        wanted = logits.made if output or unsent else 0  # the others' work is the same
        rows = self.batch.acc_rows
        key = (tier.tokens, stretch.name, self._filled, wanted, rows.cells, rows.longest)
        written = output and logits.has_some()
        delivering = written and logits.is_brought

        def work() -> None:
            tier.side.kernels.forget()
            for there, here in unsent:
                self._device.send(there, here)
            for part in stretch.parts:
                self._do_part(part, relay)

        self._device.repeat(key, True, work)
        if delivering:
            logits.bring()
        self._side, self.batch.unsent = "acc", ()
        self._context.transfers.link_bytes += sum(map(self._count_bytes, stretch.parts))
        if output:
            if written:
                logits.expect()
            logits.deliver(self._device.mark() if delivering else None)
            self.settled = written

    def _do_part(self, part: Launch | Tell | Await, relay: Relay) -> None:
        """Its kernels, and nothing else: a graph may hold them."""
        if isinstance(part, Launch):
            for name in part.brought:
                self._send(name)
            self._units.run_all(part.steps)
        elif isinstance(part, Tell):
            for name in part.names:
                self._device.bring(*self._rows(name))
            relay.tell(part.run)
        else:
            relay.wait(part.run)
            for there, here in self._taken(part):
                self._device.send(there, here)
            self._tier.side.kernels.forget()

    def _taken(self, part: Await) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What is copied, to and from."""
        if part.taken.part_width:
            return [view_joined(self._context, self._tier, self._filled, part.taken)]
        return [self._rows(name)[::-1] for name in part.taken.activations]

    def _count_bytes(self, part: Any) -> int:
        """Bytes that a part brings over the link."""
        if isinstance(part, Await):
            return sum(here.nbytes for _, here in self._taken(part))
        if isinstance(part, Launch):
            return sum(self._rows(name)[0].nbytes for name in part.brought) + sum(map(self._count_read, part.reading))
        return 0
