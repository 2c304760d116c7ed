"""Slots for experts that live on disk: what a layer misses is read there before it is computed.

All that a layer misses is asked for at once. What slots have is computed first, then each of the others as it lands.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import torch

from pshard.errors import UserError
from pshard.homes import ACC
from pshard.model import ModelSpec
from pshard.plan import RankPlan
from pshard.routing.follow_use import DemandFollower, Move, Turn
from pshard.runtime.devices.device import Device
from pshard.runtime.kernels.api import ExpertWeights
from pshard.runtime.memory.expert_slots import SlotPool, _Table
from pshard.runtime.memory.host.host_memory import map_memory
from pshard.runtime.memory.host_side import HostSide
from pshard.runtime.memory.transfers import Transfers


class DemandPool(SlotPool):
    """One pool of slots that the CPU computes from, as the accelerator or beside one."""

    follower: DemandFollower

    @cached_property
    def _alone(self) -> torch.Tensor:
        """A table of one expert, the one that has just landed."""
        return torch.zeros((3, self.follower.slot_of.shape[1]), dtype=torch.int64)

    def fill(self, blobs: Callable[[str], torch.Tensor]) -> None:
        """Read what lies in the slots at the start, layer by layer; from then on prompts find it there."""
        for row, slots in enumerate(self.follower.slot_of):
            held = np.flatnonzero(slots >= 0).tolist()
            for _, number in self._ask(Turn((), tuple(Move(int(slots[expert]), row, expert) for expert in held), ())):
                self._transfers.disk.wait_part(number)
        self._transfers.disk.share_with(self)

    def find_slots(self, unit: str) -> np.ndarray | None:
        """See Holder."""
        if unit not in self._rows:
            return None
        row = self._rows[unit]
        slots = self.follower.slot_of[row, list(self._places[row])].astype(np.int64)
        return np.where(slots >= 0, self._memory.data_ptr() + slots * self._slot_bytes, 0)

    def attach(self, tokens: int, on: str, unit: str, weights: ExpertWeights) -> ExpertWeights:
        """See SlotPool. What lies in no slot is nowhere in memory, and whoever computes finds the others there."""
        count = weights.addresses.shape[1]
        weights = replace(weights, addresses=torch.zeros_like(weights.addresses))
        attached = super().attach(tokens, ACC, unit, weights)
        row = self._rows[unit]
        for expert in range(count):
            attached.moved.setdefault(expert, None)
        return replace(attached, bring=partial(self.bring, row, attached.addresses))

    def observe(self, ids: np.ndarray) -> None:
        """Everything was decided as it was looked up."""

    def bring(self, row: int, addresses: torch.Tensor, ids: torch.Tensor) -> Iterator[tuple[torch.Tensor, bool]]:
        """See ExpertWeights; ids: of the layer `row` of the pool, int32 [tokens, used]."""
        chosen = ids.numpy()
        turn = self.follower.look_up(row, chosen)
        asked = self._ask(turn)
        if len(asked) < len(set(chosen.ravel().tolist())):
            yield addresses, not asked
        alone, every = self._alone.numpy(), addresses.numpy()
        for move, number in asked:
            self._transfers.disk.wait_part(number)
            self.follower.arrive((move,))
            self._update_all(Turn((move,), (), ()))
            alone[:, move.expert] = every[:, move.expert]
            yield self._alone, move is turn.started[-1]
            alone[:, move.expert] = 0

    def _ask(self, turn: Turn) -> list[tuple[Move, int]]:
        """What starts, all asked for, with the numbers to wait for; the disk reads while tables change."""
        first, asked = self._memory.data_ptr(), []
        for move in turn.started:
            place = self._places[move.layer][move.expert]
            to = first + move.slot * self._slot_bytes
            asked.append((move, self._transfers.disk.ask_part(self._units[move.layer].name, place, to)))
        self._update_all(turn)
        return asked

    def _update_all(self, turn: Turn) -> None:
        for (_, on), table in self._tables.items():
            self._update(table, on, turn)

    def _send_home(self, table: _Table, row: int, expert: int) -> None:
        table.here.numpy()[row, :, expert] = 0
        table.moved[row][expert] = None


def open_pools(
    spec: ModelSpec,
    plan: RankPlan,
    memory: Sequence[torch.Tensor],
    device: Device,
    transfers: Transfers,
    host: HostSide,
) -> tuple[SlotPool, ...]:
    """The pools of a plan, each in its memory, or in host memory beside it. Raises UserError where the device cannot
    compute from one, or the memory cannot be had."""
    if device.kind != "cpu" and any(cache.is_on_demand and not cache.on_host for cache in plan.caches):
        raise UserError("the plan has experts come from disk one by one to a GPU, which cannot be; plan again")
    return tuple(
        (DemandPool if cache.is_on_demand else SlotPool)(
            cache, map_memory(cache.nbytes) if cache.on_host else own, spec, plan, device, transfers, host
        )
        for cache, own in zip(plan.caches, memory)
    )
