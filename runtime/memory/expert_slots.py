"""Slots in VRAM for experts that follow use: where each expert lies now, and the copies that bring others in.

Kernels look addresses up in tables on their side, so an expert that moves is a word in a table, and graphs stay valid.
A slot is empty for one micro-batch on its way from one expert to the next; then whoever has the expert outside VRAM
computes it, as ever.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from pshard.model import ModelSpec
from pshard.plan import RankPlan
from pshard.quant import TENSOR_ALIGN, align
from pshard.routing.follow_use import Follower, HitCounts, Move, Turn
from pshard.routing.followed import follow_plan, numbers_of
from pshard.runtime.devices.device import Device
from pshard.runtime.kernels.api import ExpertWeights, Packed
from pshard.runtime.memory.host_side import HostSide
from pshard.runtime.memory.picks import Picks
from pshard.runtime.memory.transfers import Transfers
from pshard.steps.step import DEMAND, Compute
from pshard.units.divide_unit import Piece
from pshard.units.moe.expert_cache import ExpertCache, part_sizes
from pshard.units.moe.experts import DOWN, GATE, UP

ROLES = (GATE, UP, DOWN)


@dataclass
class _Table:
    """Where one side of a tier finds a pool's experts: int64 [layers, 3, experts], 0 for none. `here` on the host, of
    which `there` is the copy that kernels read. `home`: without any slot; `moved`: by layer, see ExpertWeights."""

    here: torch.Tensor
    there: torch.Tensor
    home: dict[int, np.ndarray] = field(default_factory=dict)
    moved: dict[int, dict] = field(default_factory=dict)
    stale: bool = False


class SlotPool:
    """One pool of slots, of which several tiers and both sides have tables.

    Attributes:
        follower: what lies where, and what moves next.
    """

    follower: Follower

    def __init__(
        self,
        cache: ExpertCache,
        memory: torch.Tensor,
        spec: ModelSpec,
        plan: RankPlan,
        device: Device,
        transfers: Transfers,
        host: HostSide,
    ) -> None:
        """memory: uint8, the slots, on the device. host: has page-locked memory, and perhaps a record that is played,
        which warms the slots."""
        self._units = [spec.unit(name) for name in cache.units]
        self._rows = {name: row for row, name in enumerate(cache.units)}
        self._places = [{number: i for i, number in enumerate(numbers_of(unit))} for unit in self._units]
        self._memory, self._slot_bytes, self._device, self._transfers = memory, cache.slot_bytes, device, transfers
        self.follower = follow_plan(spec, plan, cache)
        if host.picks is not None and host.picks.play is not None:
            host.picks.play.warm(self.follower, self.layers)
        shape = len(self._units), 3, self.follower.slot_of.shape[1]
        self._tokens = cache.tokens
        few = [tier.tokens for tier in plan.tiers if tier.tokens <= self._tokens]
        self._stages = {  # page-locked with the other buffers: weights take all that is left
            tokens: host.allocate(8 * math.prod(shape)).view(torch.int64).view(shape) for tokens in few
        }
        self._tables: dict[tuple[int, str], _Table] = {}  # by tier and side
        self._at, at = dict[str, int](), 0  # of each part in a slot
        for role, nbytes in part_sizes(self._units[0]).items():
            self._at[role] = at
            at += align(nbytes, TENSOR_ALIGN)
        self._brought: Any = None  # event of the last copy that a micro-batch started
        self._matrices: dict[int, tuple[Packed, Packed, Packed]] = {}  # by slot
        self._found: dict[int, list[tuple[int, int, int]]] = {}  # see `_stacks`

    @property
    def counts(self) -> HitCounts:
        """As far as was observed."""
        return self.follower.counts

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of its layers."""
        return tuple(unit.layer for unit in self._units)

    def serves(self, tokens: int, unit: str) -> bool:
        """Whether experts of that unit may lie here in the tier for `tokens` tokens."""
        return unit in self._rows and tokens <= self._tokens

    def fill(self, blobs: Callable[[str], torch.Tensor]) -> None:
        """Bring in what lies in the slots at the start. blobs: units' bytes in host memory, by name."""
        for row, expert in np.argwhere(self.follower.slot_of >= 0).tolist():
            unit = self._units[row]
            for piece in self._pieces(Move(int(self.follower.slot_of[row, expert]), row, expert)):
                self._memory[piece.to : piece.to + piece.nbytes].copy_(
                    blobs(unit.name)[piece.start : piece.start + piece.nbytes]
                )

    def attach(self, tokens: int, on: str, unit: str, weights: ExpertWeights) -> ExpertWeights:
        """The weights of a side in the tier for `tokens` tokens, looked up in the pool's table from now on."""
        row = self._rows[unit]
        if (tokens, on) not in self._tables:
            there = weights.addresses.new_zeros(len(self._units), *weights.addresses.shape)
            here = there if there.device.type == "cpu" else self._stages[tokens]
            self._tables[tokens, on] = _Table(here, there)
        table = self._tables[tokens, on]
        table.home[row], table.moved[row] = weights.addresses.cpu().numpy().copy(), {}
        table.here[row].copy_(weights.addresses)
        for expert in np.flatnonzero(self.follower.slot_of[row] >= 0).tolist():
            self._place(table, on, row, expert)
        if table.there is not table.here:
            table.there[row].copy_(table.here[row])
        return replace(weights, addresses=table.there[row], moved=table.moved[row])

    def begin(self, tokens: int) -> None:
        """A micro-batch begins in the tier for `tokens` tokens: what has come is found from now on, what leaves is not,
        and copies to its places start."""
        turn = self.follower.begin()
        if turn.arrived:
            self._device.wait(self._brought)
        for (_, on), table in self._tables.items():
            self._update(table, on, turn)
        own = self._tables.get((tokens, "acc"))
        if own is not None and own.stale and own.there is not own.here:
            self._device.send(own.there, own.here)
            own.stale = False
        after = (self._device.mark(),) if turn.started else ()  # nobody reads the slots from there on
        for move in turn.started:
            unit = self._units[move.layer].name
            copies = self._transfers.cut(self._memory, unit, self._pieces(move))
            self._brought = self._transfers.bring_weights(unit, copies, after)

    def observe(self, ids: np.ndarray) -> None:
        """What a micro-batch has chosen, ints [tokens, layers, used]: decide by it."""
        self.follower.observe(ids)

    def _update(self, table: _Table, on: str, turn: Turn) -> None:
        for row, expert in turn.victims:
            if row in table.home:
                self._send_home(table, row, expert)
                table.stale = True
        for move in turn.arrived:
            if move.layer in table.home:
                self._place(table, on, move.layer, move.expert)
                table.stale = True

    def _send_home(self, table: _Table, row: int, expert: int) -> None:
        """An expert that lies in no slot any more."""
        table.here.numpy()[row, :, expert] = table.home[row][:, expert]
        table.moved[row].pop(expert, None)

    def _place(self, table: _Table, on: str, row: int, expert: int) -> None:
        """An expert that lies in a slot: the accelerator finds it there, and the CPU leaves it to that."""
        if on == "cpu":
            table.here.numpy()[row, :, expert] = 0
            table.moved[row][expert] = None
            return
        slot = int(self.follower.slot_of[row, expert])
        first = self._memory.data_ptr() + slot * self._slot_bytes
        table.here.numpy()[row, :, expert] = [first + self._at[role] for role in ROLES]
        table.moved[row][expert] = self._view(slot)

    def _view(self, slot: int) -> tuple[Packed, Packed, Packed]:
        if slot not in self._matrices:
            unit, found = self._units[0], []
            for role, nbytes in part_sizes(unit).items():
                tensor, at = unit.by_role[role], slot * self._slot_bytes + self._at[role]
                part = Packed(self._memory[at : at + nbytes], tensor.qtype, tensor.rows // tensor.parts, tensor.cols)
                found.append((ROLES.index(role), part))
            gate, up, down = (part for _, part in sorted(found, key=lambda each: each[0]))
            self._matrices[slot] = gate, up, down
        return self._matrices[slot]

    def _pieces(self, move: Move) -> list[Piece]:
        """The ranges of its unit's blob in host memory that an expert is, and where they go in the pool."""
        first, place = move.slot * self._slot_bytes, self._places[move.layer][move.expert]
        return [Piece(start + place * nbytes, first + at, nbytes) for start, at, nbytes in self._stacks(move.layer)]

    def _stacks(self, row: int) -> list[tuple[int, int, int]]:
        """Of each stack of a layer: where the expert at place 0 would begin in the unit's blob in host memory, where a
        slot has its part, and bytes of one; worked out once."""
        if row not in self._found:
            unit = self._units[row]
            held = self._transfers.held(unit.name)
            offsets = held.unit.offsets()
            self._found[row] = [
                (offsets[role][0] - held.first * nbytes, self._at[role], nbytes)
                for role, nbytes in part_sizes(unit).items()
            ]
        return self._found[row]


class ExpertSlots:
    """All pools of one rank, and the choices by which they go."""

    def __init__(self, pools: tuple[SlotPool, ...], picks: Picks | None) -> None:
        self._pools, self._picks = pools, picks
        self._unseen = 0  # tokens of the last micro-batch, whose choices were not looked at yet

    def fill(self, blobs: Callable[[str], torch.Tensor]) -> None:
        """See SlotPool."""
        for pool in self._pools:
            pool.fill(blobs)

    def attach(self, tokens: int, step: Compute, weights: Any) -> Any:
        """A step's weights in the tier for `tokens` tokens, where some of its experts may lie in slots; else as they
        are."""
        if step.part == "rest" or not (step.source in ("link", DEMAND) or step.cpu_rows):
            return weights
        pool = next((pool for pool in self._pools if pool.serves(tokens, step.unit)), None)
        return weights if pool is None else pool.attach(tokens, step.on, step.unit, weights)

    def begin(self, tokens: int, batch: int) -> None:
        """A micro-batch of `batch` tokens begins in the tier for `tokens` tokens, on the compute lane."""
        for pool in self._pools:
            pool.begin(tokens)
        self._unseen = batch

    def observe(self) -> None:
        """The last micro-batch's choices have come to the host: decide by them. Nothing the second time."""
        if self._unseen and self._picks is not None:
            for pool in self._pools:
                pool.observe(self._picks.view(self._unseen, pool.layers))
        self._unseen = 0

    @property
    def counts(self) -> HitCounts:
        """Of all pools, as far as was observed."""
        return sum((pool.counts for pool in self._pools), HitCounts())
