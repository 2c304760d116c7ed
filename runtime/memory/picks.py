"""Picks: which experts routers chose, brought to the host where a run records them or slots follow them; elsewhere
there is none of it. A trial may have them choose what a record says instead."""

from collections.abc import Callable

import numpy as np
import torch

from pshard.batch_sizes import SMALL_BATCH
from pshard.model import ModelSpec
from pshard.routing.play_record import RoutingPlay
from pshard.routing.record import RoutingRecord, id_type
from pshard.runtime.blocks.block import Side
from pshard.runtime.blocks.routed_rows import view_routed
from pshard.runtime.devices.device import Device
from pshard.runtime.kernels.api import RowIndex
from pshard.units.moe.routed import rule_of


class Picks:
    """A stage in host memory for one micro-batch, and what was recorded of those before it.

    Attributes:
        records: whether all micro-batches are recorded; else only those of tiers for up to `tokens` tokens are brought.

        play: what is chosen instead of what routers find; None: what these find.

    The copy to the stage is part of what a router runs, also in a graph: nobody waits for it but the end of the
    micro-batch.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tokens: int,
        allocate: Callable[[int], torch.Tensor],
        records: bool = True,
        play: RoutingPlay | None = None,
    ) -> None:
        """tokens: of the largest tier that is brought. allocate: uint8 host memory that the link can write, by
        bytes."""
        self.records, self.play, self._tokens = records, play, tokens
        routers = [unit for unit in spec.units if unit.kind.routes]
        self._rule = rule_of(spec.config)
        self._layers = {unit.name: i for i, unit in enumerate(routers)}
        self._numbers = tuple(unit.layer for unit in routers)
        shape = len(routers), tokens, self._rule.used
        self._stage = allocate(4 * shape[0] * shape[1] * shape[2]).view(torch.int32).view(shape)
        self._kept: list[np.ndarray] = []

    def wants(self, tokens: int) -> bool:
        """Whether choices in the tier for so many tokens are brought."""
        return tokens <= self._tokens

    def view(self, n: int, layers: tuple[int, ...]) -> np.ndarray:
        """What came for n tokens in these layers: int32 [n, layers, used], valid until the next micro-batch begins."""
        rows = [self._numbers.index(layer) for layer in layers]
        return self._stage[:, :n].numpy()[rows].transpose(1, 0, 2)

    def deal(self, n: int) -> None:
        """A micro-batch of n tokens begins, and the last one is done: what it is to choose, where that is played."""
        if self.play is not None:
            chosen = self.play.deal(n)[:, [self.play.layers.index(layer) for layer in self._numbers]]
            self._stage[:, :n].numpy()[:] = chosen.transpose(1, 0, 2)
            self._stage[:, n : max(n, SMALL_BATCH)] = -1  # of rows that only fill the micro-batch

    def bring(self, router: str, side: Side, rows: RowIndex, device: Device) -> None:
        """Start to bring what that router has found for a side's rows, or to replace it by what is played; on
        the host's side it is copied at once."""
        ids, here = view_routed(side, rows)[1].ids, self._stage[self._layers[router], : rows.tokens]
        if self.play is not None:
            device.send(ids, here) if ids.device.type != "cpu" else ids.copy_(here)
        elif ids.device.type == "cpu":
            here.copy_(ids)
        else:
            device.bring(here, ids)

    def keep(self, n: int) -> None:
        """All routers' choices of a micro-batch of n tokens have come."""
        ids = self._stage[:, :n].numpy().transpose(1, 0, 2)
        self._kept.append(ids.astype(id_type(self._rule.count)))

    def record(self, fingerprint: str) -> RoutingRecord:
        """All that was kept. Raises ValueError when that is nothing."""
        ids = np.concatenate(self._kept)
        batches = tuple(len(part) for part in self._kept)
        return RoutingRecord(fingerprint, self._numbers, self._rule.count, ids, batches)
