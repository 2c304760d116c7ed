"""Attention over a KV cache: norm, q, k and v, rotation and store, attention, output product."""

import torch

from pshard.model_config import ModelConfig
from pshard.runtime.blocks.block import Block, Residual, Side, Work, enter, leave_normed
from pshard.runtime.kernels.api import LayerKV, RowIndex
from pshard.runtime.kernels.unpack import PLAIN
from pshard.runtime.memory.kv_cache import view_layer
from pshard.runtime.memory.weights import UnitWeights
from pshard.units.attention import (
    AFTER,
    GATE,
    HEAD_NORMS,
    MIXED,
    NORM,
    OUT,
    OUT_BIAS,
    PRODUCTS,
    QKV,
    SINKS,
    TEMPERATURE,
    WINDOWED_ATTENTION,
    bias_of,
    count_heads,
    group_roles,
    pick_rope,
)
from pshard.units.state import StateShape
from pshard.units.unit import Unit, UnitKind


class AttentionBlock(Block):
    """Its state is a LayerKV. kind: which of the kinds of attention, some of which see the last cells only."""

    def __init__(self, kind: UnitKind) -> None:
        self._kind, self._windowed = kind.name, kind is WINDOWED_ATTENTION

    def view_state(self, unit: Unit, config: ModelConfig, shape: StateShape, memory: torch.Tensor) -> LayerKV:
        _, n_kv_heads = count_heads(unit.by_role, config)  # a rank's slice may hold fewer than in its widest layer
        return view_layer(memory, n_kv_heads, config.head_dim, shape, config.window if self._windowed else 0)

    def state_parts(self, state: LayerKV) -> tuple[torch.Tensor, ...]:
        return state.k.flatten(0, 1), state.v.flatten(0, 1)

    def first_norm(self, weights: UnitWeights) -> torch.Tensor | None:
        m = weights.matrices
        packed = all(m[role].qtype not in PLAIN for role in (*QKV, GATE) if role in m)
        return weights.vectors.get(NORM) if packed else None

    def ends_in_product(self, weights: UnitWeights) -> bool:
        return AFTER not in weights.vectors

    def run(self, work: Work, weights: UnitWeights, state: LayerKV, residual: Residual) -> None:
        side, m, v = work.side, weights.matrices, weights.vectors
        rows = work.rows.recent if self._windowed else work.rows
        assert rows is not None
        k, space, config, n = side.kernels, side.space, side.config, rows.tokens
        normed = enter(side, v.get(NORM), n, residual)
        if OUT not in m:
            self.contribute_nothing(work, residual)
            return
        # a rank's slice may hold fewer heads in this layer than in its widest one
        q_width, kv_width = m[QKV[0]].rows, m[QKV[1]].rows
        heads = (q_width // config.head_dim, kv_width // config.head_dim, config.head_dim)
        group, width = group_roles(m, config), q_width + 2 * kv_width
        whole, first = space.rows(PRODUCTS, n), q_width + kv_width if config.wide_qk_norm else 0
        products = whole[:, first : first + sum(m[role].rows for role in group)]
        qkv, gate, mixed = whole[:, :width], products[:, width:], space.rows(MIXED, n)[:, :q_width]
        biases = tuple(v.get(bias_of(role)) for role in group)
        k.linear_group(normed, tuple(m[role] for role in group), products, space.tile, biases)
        q_norm, k_norm = (v.get(role) for role in HEAD_NORMS)
        if config.wide_qk_norm:
            assert q_norm is not None and k_norm is not None
            k.rms_norm(whole[:, width : width + q_width], q_norm, config.norm_eps, whole[:, :q_width])
            k.rms_norm(whole[:, width + q_width :][:, :kv_width], k_norm, config.norm_eps, whole[:, q_width:first])
            q_norm = k_norm = None
        rope = side.ropes[pick_rope(config, self._kind)[0]]
        k.rope_store(qkv, heads, q_norm, k_norm, config.norm_eps, rope, rows, state)
        _warm(side, qkv[:, :q_width], rows)
        k.attention(qkv, heads, state, rows, config.scores_by, mixed, space.tensors["partial"], v.get(SINKS))
        if GATE in m:
            k.gate_rows(mixed, gate)
        leave_normed(side, mixed, m[OUT], v.get(OUT_BIAS), v.get(AFTER), residual)


def _warm(side: Side, queries: torch.Tensor, rows: RowIndex) -> None:
    """Multiply queries by the temperature of their positions, where any position has another one than 1."""
    if TEMPERATURE in side.space.tensors:
        side.kernels.warm_rows(queries, side.space.tensors[TEMPERATURE], rows.position)
