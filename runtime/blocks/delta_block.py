"""A gated delta net: norm, products, the recurrence over each sequence's state, output product."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from pshard.model_config import ModelConfig
from pshard.runtime.blocks.block import Block, Residual, Work, leave, normalise
from pshard.runtime.kernels.api import DeltaWeights, Packed
from pshard.runtime.memory.weights import UnitWeights
from pshard.units.delta_net import (
    CONV,
    DECAY,
    HEAD_NORM,
    NORM,
    OUT,
    PRODUCTS,
    STEP_BIAS,
    TAIL,
    VALUE,
    count_delta_heads,
    delta_of,
)
from pshard.units.operations import Operation
from pshard.units.state import StateShape
from pshard.units.unit import Unit


@dataclass(frozen=True)
class DeltaParts:
    """A unit's matrices by role, the norm before them, and what the recurrence takes."""

    matrices: dict[str, Packed]
    norm: torch.Tensor
    scan: DeltaWeights


@dataclass(frozen=True)
class DeltaState:
    """float32, by sequence: matrices of every value head [sequences, heads, keys, values], and the last inputs of the
    convolution [sequences, 3, channels], the newest last."""

    matrices: torch.Tensor
    tails: torch.Tensor


class DeltaBlock(Block):
    """Its state is a DeltaState, all zeros where a sequence begins."""

    def view_state(self, unit: Unit, config: ModelConfig, shape: StateShape, memory: torch.Tensor) -> DeltaState:
        keys, values = count_delta_heads(unit.by_role, config)  # a rank's slice may hold fewer than its widest layer's
        head, n, numbers = delta_of(config).head, shape.sequences, memory.view(torch.float32)
        end = n * values * head * head
        tail = TAIL * (2 * keys + values) * head
        matrices = numbers[:end].view(n, values, head, head)
        return DeltaState(matrices, numbers[end : end + n * tail].view(n, TAIL, tail // TAIL))

    def state_parts(self, state: DeltaState) -> tuple[torch.Tensor, ...]:
        return state.matrices, state.tails

    def prepare(
        self,
        unit: Unit,
        config: ModelConfig,
        weights: UnitWeights,
        device: torch.device,
        operations: tuple[Operation, ...],
    ) -> DeltaParts:
        v, heads = weights.vectors, count_delta_heads(unit.by_role, config)
        conv = _join(v[CONV[0]], v[CONV[1]]).view(-1, TAIL + 1)
        delta = delta_of(config)
        scan = DeltaWeights(
            conv, v[STEP_BIAS], v[DECAY], v[HEAD_NORM], config.norm_eps, *heads, delta.head, delta.tiled
        )
        return DeltaParts(weights.matrices, v[NORM], scan)

    def run(self, work: Work, weights: DeltaParts, state: DeltaState, residual: Residual) -> None:
        side, rows, m = work.side, work.rows, weights.matrices
        k, space, n = side.kernels, side.space, work.rows.tokens
        normed = normalise(side, weights.norm, n, residual)
        ends = tuple(accumulate(m[role].rows for role in PRODUCTS))
        inner, out = space.rows("delta_in", n)[:, : ends[-1]], space.rows("delta_out", n)[:, : m[VALUE].rows]
        k.linear_group(normed, tuple(m[role] for role in PRODUCTS), inner, space.tile, (None,) * len(PRODUCTS))
        assert rows.sequences is not None
        qkv, z, beta, alpha = (inner[:, start:stop] for start, stop in ((0, ends[1]), *pairwise(ends[1:])))
        slots, offsets, longest = rows.sequences
        k.delta_net(
            qkv, z, beta, alpha, weights.scan,
            states=state.matrices, tails=state.tails, slots=slots, offsets=offsets, out=out, longest=longest,
            scratch=space.tensors["delta_room"].view(torch.uint8),
        )  # fmt: skip
        leave(side, out, m[OUT], None, residual)


def _join(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Two vectors that follow each other in a unit's blob as one: kernels read both where they lie."""
    if second.data_ptr() != first.data_ptr() + first.nbytes:
        raise ValueError("the two vectors of a convolution do not lie together")
    return first.as_strided((first.numel() + second.numel(),), (1,), first.storage_offset())
