"""N-grams of a layer: the state of their convolution."""

import torch

from pshard.model_config import ModelConfig
from pshard.runtime.blocks.listed_block import ListedBlock
from pshard.runtime.kernels.api import OpenNet
from pshard.runtime.memory.workspace import Workspace
from pshard.units.grams import OPEN, channels_of, grams_of
from pshard.units.state import StateShape
from pshard.units.unit import Unit


class GramsBlock(ListedBlock):
    """Its state is float32 [sequences, reach, channels]: the last inputs of the convolution, the newest last, all zeros
    where a sequence begins."""

    keeps_open = True

    def view_state(self, unit: Unit, config: ModelConfig, shape: StateShape, memory: torch.Tensor) -> torch.Tensor:
        sizes = shape.sequences, grams_of(config).reach, channels_of(config)
        return memory.view(torch.float32)[: sizes[0] * sizes[1] * sizes[2]].view(sizes)

    def open_net(self, unit: Unit, config: ModelConfig, state: torch.Tensor, space: Workspace) -> OpenNet:
        return OpenNet(state, space.tensors[OPEN])
