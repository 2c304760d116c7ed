"""A short convolution: its state."""

from dataclasses import dataclass

import torch

from pshard.model_config import ModelConfig
from pshard.runtime.blocks.listed_block import ListedBlock
from pshard.units.short_conv import OUT, conv_of
from pshard.units.state import StateShape
from pshard.units.unit import Unit


@dataclass(frozen=True)
class ConvState:
    """float32 [sequences, taps - 1, channels]: the last inputs of the convolution, the newest last."""

    tails: torch.Tensor


class ConvBlock(ListedBlock):
    """Its state is a ConvState, all zeros where a sequence begins."""

    def view_state(self, unit: Unit, config: ModelConfig, shape: StateShape, memory: torch.Tensor) -> ConvState:
        channels = unit.by_role[OUT].cols if OUT in unit.by_role else 0
        n, tail = shape.sequences, conv_of(config).taps - 1
        return ConvState(memory.view(torch.float32)[: n * tail * channels].view(n, tail, channels))

    def state_parts(self, state: ConvState) -> tuple[torch.Tensor, ...]:
        return (state.tails,)
