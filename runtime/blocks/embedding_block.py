"""The embedding: rows of a table by token id, as the residual stream begins."""

from pshard.runtime.blocks.block import Block, Residual, Work
from pshard.runtime.memory.weights import UnitWeights
from pshard.units.embedding import TABLE


class EmbeddingBlock(Block):
    """Looks rows up on the side where the table is."""

    def run(self, work: Work, weights: UnitWeights, state: None, residual: Residual) -> None:
        hidden = work.side.space.rows("hidden", work.ids.shape[0])
        work.side.kernels.look_up(weights.matrices[TABLE], work.ids, hidden)
        if (scale := work.side.config.embedding_scale) != 1:
            hidden.mul_(scale)
