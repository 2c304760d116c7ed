"""A short convolution: its state."""

from dataclasses import dataclass, replace

import torch

from pshard.model_config import ModelConfig
from pshard.runtime.blocks.block import Laid
from pshard.runtime.blocks.listed_block import Listed, ListedBlock
from pshard.runtime.kernels.api import OpenNet
from pshard.runtime.memory.workspace import Workspace
from pshard.units.short_conv import OPEN, OUT, conv_of
from pshard.units.state import StateShape, count_before
from pshard.units.unit import Unit


@dataclass(frozen=True)
class ConvState:
    """float32 [sequences, taps - 1, channels]: the last inputs of the convolution, the newest last."""

    tails: torch.Tensor


class ConvBlock(ListedBlock):
    """Its state is a ConvState, all zeros where a sequence begins."""

    keeps_open = True

    def view_state(self, unit: Unit, config: ModelConfig, shape: StateShape, memory: torch.Tensor) -> ConvState:
        channels = unit.by_role[OUT].cols if OUT in unit.by_role else 0
        n, tail = shape.sequences, conv_of(config).taps - 1
        return ConvState(memory.view(torch.float32)[: n * tail * channels].view(n, tail, channels))

    def state_parts(self, state: ConvState) -> tuple[torch.Tensor, ...]:
        return (state.tails,)

    def prepare(self, laid: Laid) -> Listed:
        return replace(super().prepare(laid), net=count_before(laid.unit.layer, conv_of(laid.config).full))

    def open_net(self, unit: Unit, config: ModelConfig, state: ConvState, space: Workspace) -> OpenNet:
        return OpenNet(state.tails, space.tensors[OPEN][count_before(unit.layer, conv_of(config).full)])
