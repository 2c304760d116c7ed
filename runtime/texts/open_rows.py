"""Rows that a step leaves open: states that cannot be cut back take them in once it is known how many of them hold."""

from dataclasses import replace

import torch

from pshard.errors import UserError
from pshard.runtime.blocks.find_block import find_block
from pshard.runtime.executor import Executor
from pshard.runtime.kernels.api import OpenNet


class OpenRows:
    """Those of one rank.

    Attributes:
        most: of all texts in a step; None where every state can be cut back, and no row is held back; 0 where rows
            cannot be held back from some.
        waiting: sequences with open rows of the last step, of which nobody has said yet how many hold; there is no
            other step before.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        fixed = executor.residents.fixed
        holds = all(find_block(executor.spec.unit(name).kind).keeps_open for name in fixed)
        self.most = (executor.states.open if holds else 0) if fixed else None
        self.waiting = set[int]()

    def check(self) -> None:
        """Raise UserError where rows wait."""
        if self.waiting:
            raise UserError(
                "a text has drafts that its states have not taken in; commit them, or cut them off, then go on"
            )

    def settle(self, sequence: int, rows: slice) -> None:
        """Take these rows of the last micro-batch, which left them open, into the states of their sequence. They stand
        as if the sequence had had no row behind them."""
        executor = self._executor
        device = executor.device
        on_acc, on_host, fetched = self._list_nets()
        with torch.inference_mode(), device.current(), device.computing():
            if on_acc:
                executor.acc_kernels.settle_states(on_acc, sequence, rows)
            if not (on_host or fetched):
                return
            device.synchronize()  # states on their way back to the host
            few = slice(0, rows.stop - rows.start)
            there = [replace(net, opened=net.opened[rows].to("cpu", torch.float32)) for net in fetched]
            executor.host.side.kernels.settle_states(on_host, sequence, rows)
            executor.host.side.kernels.settle_states(there, sequence, few)

    def _list_nets(self) -> tuple[list[OpenNet], ...]:
        """Nets by where states and open rows are in the tier in force: both on the accelerator, both on the host, and
        states on the host whose rows are on the accelerator. Made once for a tier."""
        executor = self._executor
        assert executor.in_force is not None
        tier, in_force = executor.in_force
        if not in_force.nets:
            found: tuple[list[OpenNet], ...] = [], [], []
            for name in executor.residents.fixed:
                place = tier.placement(name)
                side = in_force.side if place.is_on_acc else executor.host.side
                net = executor.residents.open_net(name, side.space)
                if net.tails.numel():
                    found[2 if place.stages_state else 0 if place.is_on_acc else 1].append(net)
            in_force.nets = found
        return in_force.nets
