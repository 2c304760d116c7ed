"""A toy kind of units with parts, and a model with it: some parts are pinned, some streamed, some on the CPU, at once.

The issue on mixture of experts deletes it when the real ones come. A unit of kind "parts" has eight matrices; a token's
id says which two of them it takes (`choose`), and the sum of W norm(x) over these is added to the residual stream. It
is known only between `know_parts` and the end of a test.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from toy_kinds import ToyFile, attention_forward, make_unit, norm

from pshard.model_config import ModelConfig
from pshard.runtime.blocks import find_block
from pshard.runtime.blocks.block import Block, Residual, Work, normalise
from pshard.runtime.memory.weights import UnitWeights
from pshard.units.attention import ATTENTION
from pshard.units.ffn import FFN
from pshard.units.kinds import KINDS
from pshard.units.operations import EachPart, Norm, Operation, PlaceRows, Product
from pshard.units.ranges import Targets, place_rows
from pshard.units.unit import Cut, Division, Tensors, Unit, UnitKind

NORM, N_PARTS, CHOSEN = "parts_norm.weight", 8, 2
ROLES = tuple(f"part{i}.weight" for i in range(N_PARTS))


def choose(ids: torch.Tensor) -> torch.Tensor:
    """The parts that every token takes: int64 [M, 2], two different ones."""
    first = ids % N_PARTS
    return torch.stack((first, (first + 1 + ids // N_PARTS % (N_PARTS - 1)) % N_PARTS), 1)


def part_of(role: str) -> int | None:
    return ROLES.index(role) if role in ROLES else None


def _operations(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    parts = tuple((Product(tensors[role], adds=True),) for role in ROLES if role in tensors)
    return Norm(tensors.get(NORM), config.d_model), EachPart(parts, CHOSEN, N_PARTS)


def _divide(on_acc: Tensors, on_cpu: Tensors, config: ModelConfig) -> Division:
    return Division(_operations(on_acc, config), _operations(on_cpu, config), (PlaceRows(config.d_model),))


def _bounds(config: ModelConfig, tensors: Tensors, targets: Targets) -> tuple[int, ...]:
    return place_rows(config.d_model, config.d_model, targets)  # a rank holds all of it or nothing


PARTS = UnitKind(
    "parts",
    position="layer",
    places=FFN.places,
    operations=_operations,
    cut=Cut(
        {NORM: ("none", "all")} | dict.fromkeys(ROLES, ("rows", "cut")),
        length=lambda config: config.d_model,
        bounds=_bounds,
    ),
    adds=True,
    strategy="bulk",
    part_of=part_of,
    chosen=lambda config: (CHOSEN, N_PARTS),
    divide=_divide,
    joins=lambda share, config: config.d_model,
    contends="weights",
    phase=0.65,
    lock_order=0,
)


class PartsBlock(Block):
    """Whichever parts `weights` holds: those of one side, or all."""

    def run(self, work: Work, weights: UnitWeights, state: None, residual: Residual) -> None:
        self.run_share(work, weights, residual, None)

    def run_share(self, work: Work, weights: UnitWeights, residual: Residual, out: torch.Tensor | None) -> None:
        side, n = work.side, work.rows.tokens
        normed = normalise(side, weights.vectors[NORM], n, residual)
        total = side.space.rows("hidden", n) if out is None else out.zero_()
        taken = choose(work.ids)
        for part, role in enumerate(ROLES):
            rows = (taken == part).any(1).nonzero()[:, 0]
            if rows.numel() and role in weights.matrices:
                result = torch.empty(rows.numel(), total.shape[1])
                side.kernels.linear(normed[rows], weights.matrices[role], result, side.space.tile)
                total.index_add_(0, rows, result)

    def run_rest(self, work: Work, weights: UnitWeights, residual: Residual, from_cpu: torch.Tensor) -> None:
        work.side.space.rows("hidden", work.rows.tokens).add_(from_cpu)

    def choose_parts(self, unit: Unit, ids: torch.Tensor) -> Collection[int]:
        return frozenset(choose(ids).flatten().tolist())


@pytest.fixture
def know_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kind and its block are known during a test."""
    monkeypatch.setitem(KINDS._known, PARTS.name, PARTS)
    monkeypatch.setitem(find_block.BLOCKS, PARTS.name, PartsBlock())
    yield


class PartsFile(ToyFile):
    """A model file in memory: attention and a unit with parts in every layer."""

    def __init__(self, layers: int = 3, d_model: int = 64, seed: int = 0) -> None:
        super().__init__("a" * layers, d_model, 16, seed)
        shapes = {NORM: (d_model,), **dict.fromkeys(ROLES, (d_model, d_model))}
        self.spec = replace(
            self.spec,
            units=tuple(
                make_unit(f"blk.{u.layer}.parts", PARTS, u.layer, shapes) if u.kind is FFN else u
                for u in self.spec.units
            ),
        )
        rng = np.random.default_rng(seed)
        self.values = {t.name: self._draw(rng, t.shape) for unit in self.spec.units for t in unit.tensors}

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Of every token, the plain way in float64: [n, vocabulary]."""
        w = {name: torch.from_numpy(values).double() for name, values in self.values.items()}
        x, taken = w["token_embd.weight"][ids], choose(torch.tensor(ids))
        for unit in self.spec.units:
            own = {t.role: w[t.name] for t in unit.tensors}
            if unit.kind is ATTENTION:
                x = x + attention_forward(norm(x, own["attn_norm.weight"]), own, self.spec.config)
            elif unit.kind is PARTS:
                y, each = norm(x, own[NORM]), torch.stack([own[role] for role in ROLES])
                x = x + torch.einsum("nkij,nj->ni", each[taken], y)
        return norm(x, w["output_norm.weight"]) @ w["output.weight"].T
