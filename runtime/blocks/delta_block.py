"""A gated delta net: its state, and what the recurrence takes of its tensors."""

from dataclasses import dataclass, replace

import torch

from pshard.model_config import ModelConfig
from pshard.runtime.blocks.block import Laid
from pshard.runtime.blocks.listed_block import Listed, ListedBlock
from pshard.runtime.kernels.api import DeltaWeights, OpenNet
from pshard.runtime.memory.workspace import Workspace
from pshard.units.delta_net import (
    CONV,
    DECAY,
    HEAD_NORM,
    OPEN,
    STEP_BIAS,
    TAIL,
    count_delta_heads,
    delta_of,
)
from pshard.units.state import StateShape, count_before
from pshard.units.unit import Unit


@dataclass(frozen=True)
class DeltaState:
    """float32, by sequence: matrices of every value head [sequences, heads, keys, values], and the last inputs of the
    convolution [sequences, 3, channels], the newest last."""

    matrices: torch.Tensor
    tails: torch.Tensor


class DeltaBlock(ListedBlock):
    """Its state is a DeltaState, all zeros where a sequence begins."""

    keeps_open = True

    def view_state(self, unit: Unit, config: ModelConfig, shape: StateShape, memory: torch.Tensor) -> DeltaState:
        keys, values = count_delta_heads(unit.by_role, config)  # a rank's slice may hold fewer than its widest layer's
        head, n, numbers = delta_of(config).head, shape.sequences, memory.view(torch.float32)
        end = n * values * head * head
        tail = TAIL * (2 * keys + values) * head
        matrices = numbers[:end].view(n, values, head, head)
        return DeltaState(matrices, numbers[end : end + n * tail].view(n, TAIL, tail // TAIL))

    def state_parts(self, state: DeltaState) -> tuple[torch.Tensor, ...]:
        return state.matrices, state.tails

    def prepare(self, laid: Laid) -> Listed:
        v, config = laid.weights.vectors, laid.config
        heads = count_delta_heads(laid.unit.by_role, config)
        conv = _join(v[CONV[0]], v[CONV[1]]).view(-1, TAIL + 1)
        delta = delta_of(config)
        scan = DeltaWeights(
            conv,
            v[STEP_BIAS],
            v[DECAY],
            v[HEAD_NORM],
            config.norm_eps,
            *heads,
            delta.head,
            delta.tiled,
            gate=delta.gate,
        )
        return replace(super().prepare(laid), scan=scan, net=count_before(laid.unit.layer, delta.full))

    def open_net(self, unit: Unit, config: ModelConfig, state: DeltaState, space: Workspace) -> OpenNet:
        delta, (keys, _) = delta_of(config), count_delta_heads(unit.by_role, config)
        opened = space.tensors[OPEN][count_before(unit.layer, delta.full)]
        return OpenNet(state.tails, opened, state.matrices, keys, delta.tiled)


def _join(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Two vectors that follow each other in a unit's blob as one: kernels read both where they lie."""
    if second.data_ptr() != first.data_ptr() + first.nbytes:
        raise ValueError("the two vectors of a convolution do not lie together")
    return first.as_strided((first.numel() + second.numel(),), (1,), first.storage_offset())
