"""A SwiGLU FFN (arXiv 2002.05202) or GeGLU, whole or divided: norm, gated product, down product."""

import torch

from pshard.runtime.blocks.block import Block, Residual, Side, Work, add_normed, enter, leave_normed
from pshard.runtime.memory.weights import UnitWeights
from pshard.units.ffn import AFTER, DOWN, GATE, GATED, NORM, UP


class FfnBlock(Block):
    """A side's share of a divided one are rows of gate and up: of their gated product act(gate x) * (up x). The last
    of these may lie in a slot while all else is in the arena."""

    def run(self, work: Work, weights: UnitWeights, state: None, residual: Residual) -> None:
        side, n, m, after = work.side, work.rows.tokens, weights.matrices, weights.vectors.get(AFTER)
        normed = _enter(work, weights, residual)
        out, adds = residual.target(side, n) if after is None else (side.space.rows("branch", n), False)
        apart = weights.last is not None or residual.leaving is not None
        if not apart and side.kernels.ffn(normed, m[GATE], m[UP], m[DOWN], out, adds, side.config.activation):
            add_normed(side, n, after)
            return
        _gate(side, weights, n, normed, None)
        if weights.last is not None:
            _gate(side, weights.last, n, normed, None, m[UP].rows)
        leave_normed(side, _gated(side, weights, n), m[DOWN], None, after, residual)

    def run_share(self, work: Work, weights: UnitWeights, residual: Residual, out: torch.Tensor | None) -> None:
        side, n = work.side, work.rows.tokens
        _gate(side, weights, n, _enter(work, weights, residual), out)

    def run_rest(self, work: Work, weights: UnitWeights, residual: Residual, from_cpu: torch.Tensor) -> None:
        side = work.side
        gated = _gated(side, weights, work.rows.tokens)
        side.kernels.place(from_cpu, gated[:, gated.shape[1] - from_cpu.shape[1] :])
        leave_normed(side, gated, weights.matrices[DOWN], None, weights.vectors.get(AFTER), residual)


def _enter(work: Work, weights: UnitWeights, residual: Residual) -> torch.Tensor:
    return enter(work.side, weights.vectors.get(NORM), work.rows.tokens, residual, follows=True)


def _gate(
    side: Side, weights: UnitWeights, n: int, normed: torch.Tensor, out: torch.Tensor | None, first: int = 0
) -> None:
    """The gated product of the rows that `weights` holds, number `first` and those after it; out None: where `_gated`
    finds it."""
    m, width = weights.matrices, weights.matrices[UP].rows
    both = side.space.rows(GATED, n)[:, first : first + 2 * width]
    out, tile = both[:, :width] if out is None else out, side.space.tile
    side.kernels.gate_up(normed, m[GATE], m[UP], out, both, tile, side.config.activation)


def _gated(side: Side, weights: UnitWeights, n: int) -> torch.Tensor:
    """All rows of the gated product in the side's scratch."""
    return side.space.rows(GATED, n)[:, : weights.matrices[DOWN].cols]
