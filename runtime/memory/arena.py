"""The arena of one accelerator.

[experts that follow use | pinned weights | scratch | state stage | row stage | staging slots | rows that wait in a
sweep | free | states from the right, first those that stand in every tier]
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pshard.buffers import (
    row_stage_bytes,
    scratch_bytes,
    shared_index_words,
    state_stage_bytes,
    table_room,
    widest_join,
)
from pshard.model import ModelSpec
from pshard.plan import RankPlan, TierPlan
from pshard.quant import TENSOR_ALIGN, align
from pshard.runtime.memory.workspace import Workspace, carve_workspace
from pshard.steps.sweep import list_moving, waiting_bytes
from pshard.units.divide_unit import arena_portion
from pshard.units.state import StateShape


class Arena:
    """One allocation of device memory. Pins and states never move: each tier holds a prefix of the plan's
    orders.

    Attributes:
        pools: slots of experts that follow use, uint8, of each of the plan's caches; empty where they are elsewhere.
    """

    def __init__(
        self, memory: torch.Tensor, spec: ModelSpec, plan: RankPlan, shape: StateShape, act: torch.dtype
    ) -> None:
        self.memory, self._spec, self._plan, self._shape, self._act = memory, spec, plan, shape, act
        self.pools: list[torch.Tensor] = []  # of each cache
        at = 0
        for cache in plan.caches:
            nbytes = 0 if cache.on_host else cache.nbytes
            self.pools.append(memory[at : at + nbytes])
            at += nbytes
        self._pools_end, self._pin_at = at, {}
        # a divided unit has the same bytes there in every tier that has any
        places = {p.unit: p for t in plan.tiers for p in t.placements if p.in_arena}
        portions = {name: arena_portion(spec.unit(name), p.where, p.share) for name, p in places.items()}
        self._pin_nbytes = {name: portion.nbytes for name, portion in portions.items() if portion}
        for name in plan.pin_order:
            self._pin_at[name] = at
            at += align(self._pin_nbytes[name], TENSOR_ALIGN)
        self._rooms: dict[int, int] = {}  # by tier
        self._state_at, end = {}, memory.numel() // TENSOR_ALIGN * TENSOR_ALIGN
        for name in (*(unit.name for unit in spec.units if unit.kind.stands), *plan.kv_order):
            end -= self._state_nbytes(name)
            self._state_at[name] = end

    def pinned(self, unit: str) -> torch.Tensor:
        """The place of a pinned unit's blob, of a divided one what it has there."""
        at = self._pin_at[unit]
        return self.memory[at : at + self._pin_nbytes[unit]]

    def pinned_units(self, tier: TierPlan) -> tuple[str, ...]:
        """Units pinned in the tier, also in part, in pin order. Raises ValueError when they are no prefix of it."""
        return _prefix(self._plan.pin_order, {p.unit for p in tier.placements if p.in_arena})

    def state_units(self, tier: TierPlan) -> tuple[str, ...]:
        """Units whose state is in VRAM in the tier, in the plan's order. Raises ValueError when they are no prefix of
        it."""
        return _prefix(self._plan.kv_order, {p.unit for p in tier.placements if p.has_state_in_vram})

    def state(self, unit: str) -> torch.Tensor:
        """The place of a unit's state when it is in VRAM."""
        at = self._state_at[unit]
        return self.memory[at : at + self._state_nbytes(unit)]

    def _state_nbytes(self, unit: str) -> int:
        return self._spec.unit(unit).state_nbytes(self._spec.config, self._shape)

    def carve(self, tier: TierPlan) -> "Carved":
        """Lay out a tier behind its pins.

        Raises ValueError when the tier does not fit: a plan that was checked does.
        """
        spec, shape = self._spec, self._shape
        at = self._pools_end + sum(align(self._pin_nbytes[u], TENSOR_ALIGN) for u in self.pinned_units(tier))
        end = self.memory.numel() - spec.standing_nbytes(shape)
        end -= sum(map(self._state_nbytes, self.state_units(tier)))
        size = scratch_bytes(spec, tier.tokens, shape, self._act.itemsize)
        space = carve_workspace(self.memory[at : at + size], spec, tier.tokens, shape, self._act)
        at += size
        state_stage = self.memory[at:at]
        if stages_states(tier):
            size = state_stage_bytes(spec, shape)
            state_stage = self.memory[at : at + size]
            at += size
        size = row_stage_bytes(tier.tokens, widest_join(spec, tier.placements))
        row_stage = self.memory[at : at + size].view(torch.float32)
        at += size
        slots = []
        for _ in range(tier.buffers.slots):
            slots.append(self.memory[at : at + tier.buffers.slot_bytes])
            at += align(tier.buffers.slot_bytes, TENSOR_ALIGN)
        sizes, waiting = waiting_bytes(spec, tier.tokens, shape, list_moving(tier), tier.most_swept), []
        for _ in range(tier.most_swept if sizes else 0):
            places = {}
            for name, nbytes in sizes.items():
                places[name] = self.memory[at : at + nbytes]
                at += nbytes
            waiting.append(places)
        if at > end:
            raise ValueError(f"tier {tier.tokens} needs {at - end} bytes more than the arena of {self.memory.numel()}")
        self._lengthen_index(space, at, end)
        return Carved(space, state_stage, row_stage, tuple(slots), tuple(waiting))

    def _lengthen_index(self, space: Workspace, at: int, end: int) -> None:
        """Put the index into what a tier leaves free, where tables for sequences that share blocks fit there."""
        words = shared_index_words(self._spec, space.tokens, self._shape)
        at = align(at, TENSOR_ALIGN)
        if words > space.tensors["index"].numel() and at + 4 * words <= end:
            space.tensors["index"] = self.memory[at : at + 4 * words].view(torch.int32)

    def table_room(self, tier: TierPlan) -> int:
        """Blocks, counted for each sequence that has them, that the index of a tier's micro-batch has room for."""
        if tier.tokens not in self._rooms:
            words = self.carve(tier).space.tensors["index"].numel()
            self._rooms[tier.tokens] = table_room(self._spec, tier.tokens, self._shape, words)
        return self._rooms[tier.tokens]


@dataclass(frozen=True)
class Carved:
    """A tier's memory beside pins and states. `state_stage`: one unit's state, when some unit keeps it on the host;
    `row_stage`: float32, what the CPU has computed of a divided unit; `slots`: staging slots; `waiting`: for each
    micro-batch of a sweep, uint8 by buffer, where its rows wait."""

    space: Workspace
    state_stage: torch.Tensor
    row_stage: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    waiting: tuple[Mapping[str, torch.Tensor], ...] = ()


def stages_states(tier: TierPlan) -> bool:
    """Whether some unit of the tier runs on the accelerator and keeps its state on the host."""
    return any(p.stages_state for p in tier.placements)


def _prefix(order: tuple[str, ...], names: set[str] | Mapping) -> tuple[str, ...]:
    if set(order[: len(names)]) != set(names):
        raise ValueError("the plan's units are not a prefix of its order: re-plan")
    return order[: len(names)]
