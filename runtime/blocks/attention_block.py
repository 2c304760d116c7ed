"""Attention over a KV cache: its state, and what may be made with its neighbours' sums and products."""

import torch

from pshard.model_config import ModelConfig
from pshard.runtime.blocks.listed_block import Listed, ListedBlock
from pshard.runtime.kernels.api import LayerKV
from pshard.runtime.kernels.unpack import BY_ROWS
from pshard.runtime.memory.kv_cache import view_layer
from pshard.units.attention import AFTER, GATE, HEAD_GATE, NORM, QKV, count_heads
from pshard.units.state import CellState, StateShape
from pshard.units.unit import Unit


class AttentionBlock(ListedBlock):
    """Its state is a LayerKV."""

    def view_state(self, unit: Unit, config: ModelConfig, shape: StateShape, memory: torch.Tensor) -> LayerKV:
        law, config = unit.state(config, shape), unit.kind.sees(config)
        _, n_kv_heads = count_heads(unit.by_role, config)  # a rank's slice may hold fewer than in its widest layer
        window, index = (law.window, law.index) if isinstance(law, CellState) else (0, 0)
        return view_layer(memory, n_kv_heads, config.head_dim, shape, window, index)

    def state_parts(self, state: LayerKV) -> tuple[torch.Tensor, ...]:
        parts = (state.k, state.v) if state.index is None else (state.k, state.v, state.index)
        return tuple(part.flatten(0, 1) for part in parts)

    def first_norm(self, weights: Listed) -> torch.Tensor | None:
        m = weights.weights.matrices
        packed = all(m[role].qtype not in BY_ROWS for role in (*QKV, GATE, HEAD_GATE) if role in m)
        return weights.weights.vectors.get(NORM) if packed else None

    def ends_in_product(self, weights: Listed) -> bool:
        return AFTER not in weights.weights.vectors
