"""A router: norm, scores of all experts, choice. What it finds stays beside the residual stream."""

import torch

from pshard.runtime.blocks.block import Block, Residual, Work, normalise
from pshard.runtime.blocks.routed_rows import view_routed
from pshard.runtime.memory.weights import UnitWeights
from pshard.units.moe.routed import rule_of
from pshard.units.moe.router import BIAS, CHOICE_BIAS, NORM, WEIGHT


class RouterBlock(Block):
    """Scores are of float32 hidden states on every side, so that as few choices as can be hang on rounding."""

    def first_norm(self, weights: UnitWeights) -> torch.Tensor | None:
        return weights.vectors[NORM]

    def run(self, work: Work, weights: UnitWeights, state: None, residual: Residual) -> None:
        side, n, vectors = work.side, work.rows.tokens, weights.vectors
        x, routes = view_routed(side, work.rows, filled=True)
        normalise(side, vectors[NORM], n, residual, x)
        rule = rule_of(side.config)
        biases = vectors.get(BIAS), vectors.get(CHOICE_BIAS)
        side.kernels.route(x, weights.matrices[WEIGHT], rule, routes, *biases, begin=work.rows.begin)
