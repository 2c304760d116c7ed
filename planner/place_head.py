"""Where a head that drafts lives: a program of its own, whole on one side, in a part of the budget that the model does
not have."""

from collections.abc import Collection

from pshard.batch_sizes import SMALL_BATCH
from pshard.buffers import scratch_bytes
from pshard.homes import HOST, ON_CPU, PINNED, VRAM
from pshard.model import ModelSpec
from pshard.plan import Buffers, Placement, Prediction, RankPlan, Solve, TierPlan
from pshard.quant import TENSOR_ALIGN, align
from pshard.units.state import StateShape

_UNPREDICTED = Prediction(0.0, 0.0, (), "", 0, 0)
_BY_RULE = Solve("by rule", 0.0, 0.0, "", "head")


def place_head(
    head: ModelSpec, states: StateShape, act_bytes: int, resident: Collection[str], on_acc: bool, reserve_mib: int
) -> RankPlan:
    """The plan of a head: all of it in VRAM, or all on the CPU.

    states: those of the model's plan. act_bytes: of an activation on the accelerator. resident: units of the model that
    are in VRAM under all its tiers, which a head in VRAM can be lent there. reserve_mib: as of the model's plan.
    """
    placements = tuple(_place(head, unit.name, resident, on_acc) for unit in head.units)
    pins = tuple(place.unit for place in placements if place.in_arena)
    kept = tuple(place.unit for place in placements if place.has_state_in_vram)
    sizes = head.state_sizes(states)
    tiers = []
    for tokens in sorted({min(SMALL_BATCH, states.batch or states.context), 1}):
        buffers = Buffers(
            pinned=sum(align(head.unit(name).packed_nbytes, TENSOR_ALIGN) for name in pins),
            scratch=scratch_bytes(head, tokens, states, act_bytes),
            slots=0,
            slot_bytes=0,
            kv=sum(sizes[name] for name in kept),
        )
        tiers.append(TierPlan(tokens, placements, buffers, _UNPREDICTED, _BY_RULE))
    budget = -(-max(tier.buffers.total + TENSOR_ALIGN for tier in tiers) >> 20) + reserve_mib
    return RankPlan(0, budget, 1.0, pins, kept, tuple(tiers), reserve_mib=reserve_mib)


def _place(head: ModelSpec, name: str, resident: Collection[str], on_acc: bool) -> Placement:
    unit = head.unit(name)
    here = on_acc and (not unit.lent or name in resident)
    state = (VRAM if here else HOST).name if unit.kind.state else None
    return Placement(name, PINNED if here else ON_CPU, state)
