"""A router: norm, scores of all experts, choice. What it finds stays beside the residual stream."""

from itertools import pairwise

import torch

from pshard.runtime.blocks.block import Block, Residual, Work, normalise
from pshard.runtime.blocks.routed_rows import view_choices, view_routed
from pshard.runtime.kernels.api import Routes
from pshard.runtime.memory.weights import UnitWeights
from pshard.units.moe.routed import rule_of
from pshard.units.moe.router import BIAS, CHOICE_BIAS, FACTORS, NORMS, WEIGHT
from pshard.units.ports import ENTERED

DIVIDED_TOKENS = 2048  # from here on half of the scores take longer than bringing the other half's choices


class RouterBlock(Block):
    """Scores are of float32 hidden states on every side, so that as few choices as can be hang on rounding. Ranks that
    exchange them make some rows' choices each, of prompts; all must choose the same, whoever does."""

    def first_norm(self, weights: UnitWeights) -> torch.Tensor | None:
        return _find_norm(weights)

    def run(self, work: Work, weights: UnitWeights, state: None, residual: Residual) -> None:
        side, n, rule = work.side, work.rows.tokens, rule_of(work.side.config)
        x, routes = view_routed(side, work.rows, filled=True)
        norm = _find_norm(weights)
        entered = side.space.rows(ENTERED, n) if rule.early or norm is None else x
        if norm is None:
            side.kernels.place(entered, x)
        elif rule.early == "inputs":
            side.kernels.rms_norm(entered, norm, side.config.norm_eps, x)
        else:
            normalise(side, norm, n, residual, x)
        _route(work, weights, entered if rule.early == "scores" else x, routes)
        if rule.weighs_inputs:
            side.kernels.weigh_rows(x, routes.weights[:n])


def _route(work: Work, weights: UnitWeights, x: torch.Tensor, routes: Routes) -> None:
    """The choices of all rows of x, which ranks may share out."""
    side, n, vectors, router = work.side, work.rows.tokens, weights.vectors, weights.matrices[WEIGHT]
    rule, begin = rule_of(side.config), work.rows.begin
    biases, factors = (vectors.get(BIAS), vectors.get(CHOICE_BIAS)), vectors.get(FACTORS)
    if work.exchange is None or n < DIVIDED_TOKENS:
        side.kernels.route(x, router, rule, routes, *biases, begin=begin, factors=factors)
        return
    ends = [n * rank // work.exchange.size for rank in range(work.exchange.size + 1)]
    own = slice(*ends[work.exchange.rank :][:2])
    part = Routes(routes.ids[own], routes.weights[own])
    side.kernels.route(x[own], router, rule, part, *biases, begin=begin[own], factors=factors)
    widths = tuple(rule.used * (end - start) for start, end in pairwise(ends))
    work.exchange.gather(view_choices(side, work.rows), widths)


def _find_norm(weights: UnitWeights) -> torch.Tensor | None:
    """None where a mix of streams is taken as it is."""
    return next((weights.vectors[role] for role in NORMS if role in weights.vectors), None)
