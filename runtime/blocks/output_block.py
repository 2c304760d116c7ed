"""The output: final norm and head, of the rows whose logits are wanted."""

import torch

from pshard.buffers import STATES
from pshard.runtime.blocks.block import ALONE, Block, Residual, Work, normalise, take
from pshard.runtime.memory.weights import UnitWeights
from pshard.units.output import BIAS, HEADS, NORM


class OutputBlock(Block):
    """Leaves logits where the micro-batch wants them; a tied head is the embedding's table."""

    def run(self, work: Work, weights: UnitWeights, state: None, residual: Residual) -> None:
        side, k, space = work.side, work.side.kernels, work.side.space
        if STATES in space.tensors:
            normalise(side, weights.vectors[NORM], work.rows.tokens, ALONE, space.rows(STATES, work.rows.tokens))
        head = next((weights.matrices[role] for role in HEADS if role in weights.matrices), None)
        if head is None:  # a rank that has states only
            self.contribute_nothing(work, residual)
            return
        for rows, logits in work.logits.tables(side):
            n = rows.shape[0]
            picked, normed = space.rows("branch", n), space.rows("normed", n)
            torch.index_select(space.tensors["hidden"], 0, rows, out=picked)
            if side.config.centred:
                k.centre_rows(picked)
            if NORM in weights.vectors:
                k.rms_norm(picked, weights.vectors[NORM], side.config.norm_eps, normed)
            else:
                normed = take(side, picked)
            if BIAS in weights.vectors:
                k.bend_rows(normed, "plus", weights.vectors[BIAS])
            k.linear(normed, head, logits, space.tile)
            if (scale := side.config.logit_scale) != 1:
                logits.mul_(scale)
            if (cap := side.config.logit_cap) != 0:
                logits.div_(cap).tanh_().mul_(cap)

    def contribute_nothing(self, work: Work, residual: Residual) -> None:
        work.logits.bring_none()
