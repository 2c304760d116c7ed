"""The join of a head that drafts: token and state before it, each normalised, times one matrix."""

from pshard.runtime.blocks.block import ALONE, Block, Residual, Work, normalise
from pshard.runtime.memory.weights import UnitWeights
from pshard.units.join import JOINT, MATRIX, OF_STATE, OF_TOKEN
from pshard.units.ports import PRIOR


class JoinBlock(Block):
    """Takes the states before its tokens from the side's scratch, where whoever runs the head has put them."""

    def run(self, work: Work, weights: UnitWeights, state: None, residual: Residual) -> None:
        side, n, d = work.side, work.rows.tokens, work.side.config.d_model
        joint, hidden = side.space.rows(JOINT, n), side.space.rows("hidden", n)
        normalise(side, weights.vectors[OF_TOKEN], n, ALONE, joint[:, :d])
        eps = side.config.norm_eps
        side.kernels.rms_norm(side.space.rows(PRIOR, n), weights.vectors[OF_STATE], eps, joint[:, d:])
        side.kernels.linear(joint, weights.matrices[MATRIX], hidden, side.space.tile)
