"""Shared experts: the gated product of what the router has normed, and its down product onto the residual stream."""

from pshard.runtime.blocks.block import Block, Laid, Residual, Work, leave
from pshard.runtime.blocks.routed_rows import take_normed, view_routed
from pshard.runtime.memory.weights import UnitWeights
from pshard.units.moe.shared_experts import DOWN, GATE, SCALE, UP


class SharedBlock(Block):
    """With a gate of its own, the sigmoid of it multiplies what `down` takes: the same as multiplying its result."""

    def prepare(self, laid: Laid) -> tuple[UnitWeights, str]:
        return laid.weights, laid.config.ffn_activation(laid.unit.layer)

    def run(self, work: Work, prepared: tuple[UnitWeights, str], state: None, residual: Residual) -> None:
        weights, activation = prepared
        side, n, m = work.side, work.rows.tokens, weights.matrices
        x, _ = take_normed(side, work.rows)
        width = m[UP].rows  # a rank's slice may have fewer in this layer than in its widest one
        both = side.space.rows("shared", n)[:, : 2 * width]
        gated = both[:, :width]
        side.kernels.gate_up(x, m[GATE], m[UP], gated, both, side.space.tile, activation)
        if SCALE in weights.vectors:
            side.kernels.scale_rows(gated, view_routed(side, work.rows)[0], weights.vectors[SCALE])
        leave(side, gated, m[DOWN], None, residual)
