"""Rows of a table by token id: the embedding, as the residual stream begins, and rows that stand beside it."""

from pshard.runtime.blocks.block import Block, Laid, Residual, Work
from pshard.runtime.memory.weights import UnitWeights
from pshard.units.operations import LookUp


class EmbeddingBlock(Block):
    """Looks rows up on the side where the table is; of a table on disk the CPU reads them first."""

    def prepare(self, laid: Laid) -> tuple[UnitWeights, LookUp]:
        (operation,) = laid.operations
        assert isinstance(operation, LookUp)
        return laid.weights, operation

    def run(self, work: Work, weights: tuple[UnitWeights, LookUp], state: None, residual: Residual) -> None:
        lying, operation = weights
        role = operation.table.role
        found = work.side.space.rows(operation.out.buffer, work.ids.shape[0])
        ids, rows = work.ids, found
        if operation.each > 1 and work.grams is not None:
            ids, rows = work.grams, found.view(-1, operation.table.cols)
        if role in lying.far:
            for some in lying.far[role].read(ids):
                work.side.kernels.look_up(some.table, some.places, rows[some.ids])
        else:
            work.side.kernels.look_up(lying.matrices[role], ids, rows)
        if operation.scale != 1:
            found.mul_(operation.scale)
