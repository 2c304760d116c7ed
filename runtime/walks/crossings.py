"""What a micro-batch hands from one side to the other, where the accelerator is given it with the kernels around it."""

import torch

from pshard.runtime.devices.relay import Relay
from pshard.runtime.residents import view_rows
from pshard.runtime.tier_in_force import RunContext, TierInForce
from pshard.runtime.walks.program import Await, Tell
from pshard.steps.move import Move


class Crossings:
    """Those of so many rows of a tier.

    Attributes:
        relay: by which the CPU is asked for its runs, of a program that runs ahead.
    """

    def __init__(self, context: RunContext, tier: TierInForce, rows: int) -> None:
        self._context, self._tier, self._rows = context, tier, rows
        self.relay: Relay | None = None

    def issue(self, part: Move | Tell | Await) -> None:
        """Give it to the compute lane: a graph may hold it."""
        if isinstance(part, Move):
            if part.is_to_acc:
                self.send(part)
            else:
                for name in part.activations:
                    self.bring(name)
        elif self.relay is not None:
            (self.relay.tell if isinstance(part, Tell) else self.relay.wait)(part.run)

    def rows(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Its rows of a port, or of "branch", on the host and on the accelerator."""
        here, there = self._context.host.side.space, self._tier.side.space
        return here.rows(name, self._rows), there.rows(name, self._rows)

    def bring(self, name: str) -> None:
        """Such rows to the host, without waiting for them."""
        self._context.device.bring(*self.rows(name))

    def send(self, step: Move) -> None:
        """What a step brings to the accelerator."""
        for there, here in self._list_sent(step):
            self._context.device.send(there, here)
        self._tier.side.kernels.forget()

    def count_sent(self, step: Move) -> int:
        """Bytes of it."""
        return sum(here.nbytes for _, here in self._list_sent(step))

    def _list_sent(self, step: Move) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Where what a step brings goes on the accelerator, and where it is on the host."""
        if width := step.part_width:
            places = self._tier.carved.row_stage, self._context.host.rows
            return [(view_rows(places[0], self._rows, width), view_rows(places[1], self._rows, width))]
        return [self.rows(name)[::-1] for name in step.activations]
