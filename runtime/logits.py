"""The logits of one micro-batch: computed in tables on either side, put together over ranks, brought to the host."""

from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import torch

from pshard.batch_sizes import LOGIT_ROWS
from pshard.runtime.best_logits import find_best
from pshard.runtime.blocks.block import Side
from pshard.runtime.texts.choose_rows import RowChooser
from pshard.runtime.tier_in_force import RunContext, TierInForce


class Logits:
    """Logits of the `wanted` rows (int32 [R] on the host and on the device) of a micro-batch.

    Attributes:
        count: how many rows are wanted. made: how many the device computes, the wanted ones first.
        gathered: whether the ranks' logits are put together on the GPUs: few rows, so that each rank has them in one
            piece.
        kept: what has come to the host, float32.
        make_next: makes the next micro-batch's walk; called once, before the first logits are waited for.
    """

    def __init__(
        self,
        context: RunContext,
        tier: TierInForce,
        wanted: tuple[torch.Tensor, torch.Tensor],
        count: int,
    ) -> None:
        self._context, self._tier, self._wanted = context, tier, wanted
        self.count, self.made = count, wanted[1].shape[0]
        self.gathered = bool(context.logit_widths) and 0 < count <= LOGIT_ROWS
        self._best_only = False
        self._chooser: RowChooser | None = None
        self.kept: list[torch.Tensor] = []
        self.make_next: Callable[[], None] | None = None
        self._pending: torch.Tensor | None = None  # on the device
        self._lent: torch.Tensor | None = None  # where they come to the host, to stay

    def ask(self, best_only: bool, chooser: RowChooser | None) -> None:
        """What is asked of the rows, before they are computed. best_only: of each only the best logit, as candidates of
        this rank's columns. chooser: takes whole rows where they are, instead of `kept`."""
        self._best_only = best_only
        # of rows that are whole nowhere before they are put together on the host, `Executor.run` chooses
        whole = self.gathered or self._context.group.size == 1
        self._chooser = chooser if whole and not best_only else None

    def tables(self, side: Side) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Row numbers and where their logits go, as many at once as the scratch holds; the last ones stay on the
        device."""
        on_device, capacity = side is self._tier.side, side.space.tensors["logits"].shape[0]
        wanted = self._wanted[on_device]
        self._pending = None
        for start in range(0, wanted.shape[0], capacity):
            self.deliver()
            rows = wanted[start : start + capacity]
            self._pending, own = self._view(side, rows.shape[0])
            yield rows, own
            if self.gathered:
                self._context.group.gather_logits(self._pending, self._context.logit_widths)
            self._pending = self._pending[: self.count - start]
            if not on_device:
                self._take(self._pending)
                self._pending = None

    def bring_none(self) -> None:
        """This rank has no column: it takes the others' where they are put together on the GPUs."""
        if self.gathered:
            table = self._view(self._tier.side, self.made)[0]
            self._context.group.gather_logits(table, self._context.logit_widths)
            self._pending = table[: self.count]

    @property
    def on_device(self) -> torch.Tensor:
        """Where all wanted rows are left on the device."""
        return self._view(self._tier.side, self.count)[0]

    def fits(self) -> bool:
        """Whether the scratch on the device holds all its rows at once."""
        return self.made <= self._tier.side.space.tensors["logits"].shape[0]

    def has_some(self) -> bool:
        """Whether rows are wanted that are computed or put together on this rank's device."""
        return self.count > 0 and bool(self._context.spec.output.matrices or self.gathered)

    @property
    def is_brought(self) -> bool:
        """Whether rows come to the host as they are."""
        return self._chooser is None and not self._best_only

    def bring(self) -> None:
        """Start to copy all wanted rows from the device to the host."""
        table = self.on_device
        if table.shape[1] == self._context.spec.config.vocab:
            self._lent = self._context.host.lent.take(self.count)
        self._context.device.bring(self._on_host(table), table)

    def expect(self) -> None:
        """All wanted rows are on the device: a replayed graph has written them without telling."""
        self._pending = self.on_device

    def deliver(self, brought: Any = None) -> None:
        """Keep the logits that are on the device. brought: event after which the host has them; None: not started."""
        if self._pending is None:
            return
        best = self._bring_best(self._pending) if self._best_only else None
        if self.make_next is not None:
            self.make_next()
            self.make_next = None
        self._context.meanwhile.begin()
        if best is not None:
            self._context.device.host_wait(best[1])
            self.kept.append(best[0].clone())
        elif self._chooser is not None:
            self._chooser.take(self._pending)
        else:
            here = self._on_host(self._pending)
            if brought is None:
                self._context.device.receive(here, self._pending)
            else:
                self._context.device.host_wait(brought)
            self._take(here)
        self._pending = None

    def _bring_best(self, table: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start to bring the best of rows on the device, before the host does, or launches, anything else: where they
        come, and the event after which they are there."""
        best = find_best(table)
        here = self._context.host.logits[: best.numel()].view(best.shape)
        self._context.device.bring(here, best)
        return here, self._context.device.mark()

    def gather(self) -> None:
        """One gather of all wanted rows, whatever number of pieces each rank computed them in."""
        group, spec = self._context.group, self._context.spec
        pipeline = spec.neighbours is not None
        if self.count and not self.gathered and self._chooser is None:
            own = torch.cat(self.kept) if self.kept else self._keep(torch.empty(self.count, 0))
            # in a pipeline a rank is done long before the last one
            self.kept[:] = [group.gather_columns(own, inf if pipeline else None, alike=self._best_only)]
        elif self.count and pipeline and not spec.output.tensors:
            group.finish_send()  # a gather that spins on all of the GPU would keep NCCL's kernel from starting
            self.bring_none()
            self.deliver()

    def _on_host(self, table: torch.Tensor) -> torch.Tensor:
        if self._lent is not None:
            return self._lent
        return self._context.host.logits[: table.numel()].view(table.shape)

    def _view(self, side: Side, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where n rows of logits are left on a side, and this rank's columns of them."""
        key = n, self.gathered, side is self._tier.side
        tables = self._tier.tables
        if key not in tables:
            tables[key] = self._carve(side, n)
        return tables[key]

    def _carve(self, side: Side, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        flat, own = side.space.tensors["logits"].flatten(), sum(t.rows for t in self._context.spec.output.matrices)
        if not self.gathered:
            table = flat[: n * own].view(n, own)
            return table, table
        widths = self._context.logit_widths
        table = flat[: n * sum(widths)].view(n, sum(widths))
        start = sum(widths[: self._context.group.rank])
        return table, table[:, start : start + own]

    def _take(self, here: torch.Tensor) -> None:
        """Logits that are on the host."""
        if self._chooser is not None:
            self._chooser.take(here)
        else:
            self.kept.append(self._keep(here))

    def _keep(self, logits: torch.Tensor) -> torch.Tensor:
        """What is kept of logits on the host: a copy, or candidates for the best ones."""
        if self._best_only:
            return find_best(logits)
        # numpy's copy takes half the time of torch's, in whose fresh memory every page is a fault
        return logits if logits is self._lent else torch.from_numpy(logits.numpy().copy())
