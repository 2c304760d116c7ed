"""Attention over a KV cache: norm, q, k and v, rotation and store, attention, output product."""

import torch

from pshard.model_config import ModelConfig
from pshard.runtime.blocks.block import Block, Residual, Work, leave, normalise
from pshard.runtime.kernels.api import LayerKV
from pshard.runtime.memory.kv_cache import view_layer
from pshard.runtime.memory.weights import UnitWeights
from pshard.units.attention import GATE, HEAD_NORMS, NORM, OUT, OUT_BIAS, QKV, QKV_BIASES, SINKS, count_heads
from pshard.units.state import StateShape
from pshard.units.unit import Unit


class AttentionBlock(Block):
    """Its state is a LayerKV. windowed: of the layers that see the last cells only."""

    def __init__(self, windowed: bool = False) -> None:
        self._windowed = windowed

    def view_state(self, unit: Unit, config: ModelConfig, shape: StateShape, memory: torch.Tensor) -> LayerKV:
        _, n_kv_heads = count_heads(unit.by_role, config)  # a rank's slice may hold fewer than in its widest layer
        return view_layer(memory, n_kv_heads, config.head_dim, shape, config.window if self._windowed else 0)

    def state_parts(self, state: LayerKV) -> tuple[torch.Tensor, ...]:
        return state.k.flatten(0, 1), state.v.flatten(0, 1)

    def run(self, work: Work, weights: UnitWeights, state: LayerKV, residual: Residual) -> None:
        side, m, v = work.side, weights.matrices, weights.vectors
        rows = work.rows.recent if self._windowed else work.rows
        assert rows is not None
        k, space, config, n = side.kernels, side.space, side.config, rows.tokens
        normed = normalise(side, v[NORM], n, residual)
        # a rank's slice may hold fewer heads in this layer than in its widest one
        q_width, kv_width = m[QKV[0]].rows, m[QKV[1]].rows
        heads = (q_width // config.head_dim, kv_width // config.head_dim, config.head_dim)
        group, width = ((*QKV, GATE) if GATE in m else QKV), q_width + 2 * kv_width
        products = space.rows("qkv", n)[:, : width + (q_width if GATE in m else 0)]
        qkv, gate, mixed = products[:, :width], products[:, width:], space.rows("mixed", n)[:, :q_width]
        biases = tuple(v.get(role) for role in QKV_BIASES) + (None,) * (len(group) - len(QKV))
        k.linear_group(normed, tuple(m[role] for role in group), products, space.tile, biases)
        q_norm, k_norm = (v.get(role) for role in HEAD_NORMS)
        k.rope_store(qkv, heads, q_norm, k_norm, config.norm_eps, side.rope, rows, state)
        k.attention(qkv, heads, state, rows, config.head_dim**-0.5, mixed, space.tensors["partial"], v.get(SINKS))
        if GATE in m:
            k.gate_rows(mixed, gate)
        leave(side, mixed, m[OUT], v.get(OUT_BIAS), residual)
