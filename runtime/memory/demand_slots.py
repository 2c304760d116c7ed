"""Slots for experts that live on disk: what a layer misses is read there before it is computed.

The C++ library does that within its call of a layer's experts (csrc/experts/demand.cpp), or this file for kernels that
are not its own. Both decide alike who leaves.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from pshard.errors import UserError
from pshard.homes import ACC
from pshard.model import ModelSpec
from pshard.plan import RankPlan
from pshard.routing.follow_use import DemandFollower, HitCounts, Move, Turn
from pshard.runtime.devices.device import Device
from pshard.runtime.kernels.api import ExpertWeights
from pshard.runtime.kernels.cpu import native
from pshard.runtime.memory.disk.reader import PieceList
from pshard.runtime.memory.expert_slots import ROLES, SlotPool, _Table
from pshard.runtime.memory.host.host_memory import map_memory
from pshard.runtime.memory.host_side import HostSide
from pshard.runtime.memory.transfers import Transfers


class DemandPool(SlotPool):
    """One pool of slots that the CPU computes from, as the accelerator or beside one."""

    follower: DemandFollower
    _library: "_Library | None" = None  # which looks up and reads instead, once it was asked to

    @property
    def counts(self) -> HitCounts:
        """See SlotPool."""
        return super().counts + (self._library.counts if self._library else HitCounts())

    def fill(self, blobs: Callable[[str], torch.Tensor]) -> None:
        """Read what lies in the slots at the start, layer by layer; from then on prompts find it there."""
        for row, slots in enumerate(self.follower.slot_of):
            held = np.flatnonzero(slots >= 0).tolist()
            self._read([Move(int(slots[expert]), row, expert) for expert in held])
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
        if self._library:
            self._library.add_table(self._tables[tokens, ACC].here)
        for expert in range(count):
            attached.moved.setdefault(expert, None)
        return replace(attached, demand=_Layer(self, self._rows[unit]))

    def observe(self, ids: np.ndarray) -> None:
        """Everything was decided as it was looked up."""

    def bring(self, row: int, ids: torch.Tensor) -> None:
        """Let the experts that a micro-batch chooses in the pool's layer `row` be there; ids: int32 [tokens, used]."""
        assert self._library is None, "who leaves is the library's to decide"
        turn = self.follower.look_up(row, ids.numpy())
        self._update_all(turn)
        self._read(turn.started)
        self.follower.arrive(turn.started)
        self._update_all(Turn(turn.started, (), ()))

    def _read(self, moves: Sequence[Move]) -> None:
        """Experts to their slots, all asked for at once."""
        disk, first, asked = self._transfers.disk, self._memory.data_ptr(), list[tuple[int, PieceList]]()
        for move in moves:
            table, starts = self._pieces_by_row[move.layer]
            own = PieceList((), table[starts[move.expert] : starts[move.expert + 1]])
            asked.append((disk.ask(own, first + move.slot * self._slot_bytes), own))  # which lives until it is there
        for number, _ in asked:
            disk.wait(number)

    @cached_property
    def _pieces_by_row(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each layer its experts' pieces, and where those of each expert begin; see DiskStore.list_pieces."""
        numbers, count = [np.array([*places]) for places in self._places], self.follower.slot_of.shape[1]
        return [self._transfers.disk.list_pieces(unit.name, own, count) for unit, own in zip(self._units, numbers)]

    def open(self) -> int:
        """The pool for the C++ library, which looks up and reads from now on."""
        if self._library is None:
            reader, at = self._transfers.disk.address, [self._at[role] for role in ROLES]
            place = self._memory.data_ptr(), self._slot_bytes, np.array(at, np.int64)
            self._library = _Library(reader, self.follower, place)
            for row, pieces in enumerate(self._pieces_by_row):
                self._library.add_layer(row, *pieces)
            for table in self._tables.values():
                self._library.add_table(table.here)
        return self._library.address

    def _update_all(self, turn: Turn) -> None:
        for (_, on), table in self._tables.items():
            self._update(table, on, turn)

    def _send_home(self, table: _Table, row: int, expert: int) -> None:
        table.here.numpy()[row, :, expert] = 0
        table.moved[row][expert] = None


@dataclass(frozen=True)
class _Layer:
    """See Demand: a layer of a pool, by its place there."""

    pool: DemandPool
    row: int

    def bring(self, ids: torch.Tensor) -> None:
        self.pool.bring(self.row, ids)

    def open(self) -> tuple[int, int]:
        return self.pool.open(), self.row


class _Library:
    """A pool as csrc/experts/demand.cpp has it. It begins where a follower is, and writes to its `slot_of`; the
    follower must not be asked again. address: what calls take."""

    def __init__(self, reader: int, follower: DemandFollower, place: tuple[int, int, np.ndarray]) -> None:
        """reader: its address. place: where the slots begin, bytes of each, and where gate, up and down lie in one."""
        calls, (memory, slot_nbytes, at) = native.functions_of("demand"), place
        owner, order = follower.list_owners(), follower.list_ages()
        self._counts, self._slot_of, self._eligible = np.zeros(3, np.int64), follower.slot_of, follower.eligible
        shared = self._slot_of.ctypes.data, self._eligible.ctypes.data
        starts = [array.ctypes.data for array in (at, owner, order, self._counts)]
        self._add_layer, self._add_table = calls["layer"], calls["table"]
        self._kept, self._tables = list[np.ndarray](), set[int]()
        self.address = calls["open"](reader, *self._slot_of.shape, len(owner), *shared, memory, slot_nbytes, *starts)
        weakref.finalize(self, calls["close"], self.address)

    @property
    def counts(self) -> HitCounts:
        """Over all that it has looked up."""
        return HitCounts(*self._counts.tolist())

    def add_layer(self, row: int, pieces: np.ndarray, starts: np.ndarray) -> None:
        """The pieces of a layer's experts (int64 [pieces, words]), and where those of each begin."""
        self._kept += [pieces, starts]
        self._add_layer(self.address, row, pieces.ctypes.data, starts.ctypes.data)

    def add_table(self, table: torch.Tensor) -> None:
        """A table that says where matrices lie, int64 [layers, 3, experts]; once."""
        if table.data_ptr() not in self._tables:
            self._tables.add(table.data_ptr())
            self._add_table(self.address, table.data_ptr())


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
