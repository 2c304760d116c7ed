"""Multi-head latent attention with absorbed matrices: see pshard/units/latent_attention.py."""

import torch

from pshard.model_config import ModelConfig
from pshard.runtime.blocks.block import Block, Residual, Work, leave, normalise
from pshard.runtime.memory.kv_cache import view_cells
from pshard.runtime.memory.weights import UnitWeights
from pshard.units.latent_attention import (
    KEY_B,
    KV_A,
    KV_NORM,
    NORM,
    OUT,
    QUERY,
    QUERY_A,
    QUERY_B,
    QUERY_NORM,
    VALUE_B,
    sizes_of,
)
from pshard.units.state import StateShape
from pshard.units.unit import Unit


class LatentBlock(Block):
    """Its state are cells as `Kernels.store_latent` has them."""

    def view_state(self, unit: Unit, config: ModelConfig, shape: StateShape, memory: torch.Tensor) -> torch.Tensor:
        return view_cells(memory, sizes_of(config).cell, shape)

    def state_parts(self, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (state.flatten(0, 1),)

    def run(self, work: Work, weights: UnitWeights, state: torch.Tensor, residual: Residual) -> None:
        side, rows, m, v = work.side, work.rows, weights.matrices, weights.vectors
        k, space, config, n = side.kernels, side.space, side.config, work.rows.tokens
        latent, heads, eps = sizes_of(config), config.n_heads, config.norm_eps
        normed, inner = normalise(side, v[NORM], n, residual), space.rows("latent_in", n)
        first = m[QUERY_A if latent.q_rank else QUERY]
        k.linear_group(normed, (first, m[KV_A]), inner, space.tile, (None, None))
        queries, of_rows = inner[:, : first.rows], space.rows("latent_rows", n)
        if latent.q_rank:
            lowered = normed[:, : latent.q_rank]  # the hidden states there have been read
            k.rms_norm(queries, v[QUERY_NORM], eps, lowered)
            queries = of_rows[:, : m[QUERY_B].rows]
            k.linear(lowered, m[QUERY_B], queries, space.tile)
        q = queries.unflatten(1, (heads, latent.query))
        absorbed, mixed = space.rows("latent_heads", n), space.rows("latent_mixed", n)
        k.head_products(q[..., : latent.nope], m[KEY_B], absorbed[..., : latent.rank])
        turned = absorbed[..., latent.rank :]
        rope = side.ropes["rope"]
        k.store_latent(inner[:, first.rows :], q[..., latent.nope :], turned, v[KV_NORM], eps, rope, rows, state)
        scale = latent.score_scale * latent.query**-0.5
        k.attend_latent(absorbed, latent.rank, state, rows, scale, mixed, space.tensors["partial"])
        values = of_rows[:, : heads * latent.value]
        k.head_products(mixed[..., : latent.rank], m[VALUE_B], values.unflatten(1, (heads, latent.value)))
        leave(side, values, m[OUT], None, residual)
