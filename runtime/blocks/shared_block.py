"""Shared experts: the gated product of what the router has normed, and its down product onto the residual stream."""

from pshard.runtime.blocks.block import Block, Residual, Work, leave
from pshard.runtime.blocks.routed_rows import take_normed, view_routed
from pshard.runtime.memory.weights import UnitWeights
from pshard.units.moe.shared_experts import DOWN, GATE, SCALE, UP


class SharedBlock(Block):
    """With a gate of its own, the sigmoid of it multiplies what `down` takes: the same as multiplying its result."""

    def run(self, work: Work, weights: UnitWeights, state: None, residual: Residual) -> None:
        side, n, m = work.side, work.rows.tokens, weights.matrices
        x, _ = take_normed(side, work.rows)
        width = m[UP].rows  # a rank's slice may have fewer in this layer than in its widest one
        both = side.space.rows("shared", n)[:, : 2 * width]
        gated = both[:, :width]
        side.kernels.gate_up(x, m[GATE], m[UP], gated, both, side.space.tile)
        if SCALE in weights.vectors:
            side.kernels.scale_rows(gated, view_routed(side, work.rows)[0], weights.vectors[SCALE])
        leave(side, gated, m[DOWN], None, residual)
