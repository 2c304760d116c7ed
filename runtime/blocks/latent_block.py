"""Multi-head latent attention with absorbed matrices: see pshard/units/latent_attention.py."""

import torch

from pshard.model_config import ModelConfig
from pshard.runtime.blocks.listed_block import ListedBlock
from pshard.runtime.memory.kv_cache import view_cells
from pshard.units.latent_attention import sizes_of
from pshard.units.state import StateShape
from pshard.units.unit import Unit


class LatentBlock(ListedBlock):
    """Its state are cells as `Kernels.store_latent` has them."""

    def view_state(self, unit: Unit, config: ModelConfig, shape: StateShape, memory: torch.Tensor) -> torch.Tensor:
        return view_cells(memory, sizes_of(config).cell, shape)

    def state_parts(self, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (state.flatten(0, 1),)
