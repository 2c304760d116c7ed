"""Ranks make the choices of some rows each: together they are what every rank would have chosen by itself."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pshard.model_config import Experts
from pshard.runtime.blocks import router_block
from pshard.runtime.blocks.block import ALONE
from pshard.runtime.blocks.router_block import RouterBlock
from pshard.runtime.kernels.api import Packed
from pshard.runtime.kernels.plain import PlainKernels
from pshard.units.moe.routed import ROUTED
from pshard.units.moe.router import NORMS, WEIGHT

D, RULE = 32, Experts(8, 3, 16)


def make_side(rows: int) -> Any:
    hidden = torch.randn(rows, D, generator=torch.Generator().manual_seed(1))
    tensors = {"hidden": hidden, "normed": torch.zeros(rows, D), ROUTED: torch.full((rows, D + 2 * RULE.used), -7.0)}
    space = SimpleNamespace(tensors=tensors, rows=lambda name, n: tensors[name][:n])
    config = SimpleNamespace(d_model=D, experts=RULE, norm_eps=1e-5, centred=False)
    return SimpleNamespace(kernels=PlainKernels(), space=space, config=config)


class Gathers:
    """One rank's end of an exchange: keeps what it would bring to the others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.brought = rank, size, torch.empty(0)

    def gather(self, table: torch.Tensor, widths: tuple[int, ...]) -> None:
        start = sum(widths[: self.rank])
        self.widths, self.brought = widths, table[:, start : start + widths[self.rank]].clone()


@pytest.mark.parametrize("ranks", [2, 3])
def test_choices_of_all_ranks_are_those_of_one(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_block, "DIVIDED_TOKENS", 4)
    n = 10
    matrix = torch.randn(RULE.count, D, generator=torch.Generator().manual_seed(2))
    router = Packed(matrix.view(torch.uint8).flatten(), "F32", RULE.count, D)
    weights: Any = SimpleNamespace(vectors={NORMS[0]: torch.rand(D) + 0.5}, matrices={WEIGHT: router})
    rows = SimpleNamespace(tokens=n, filled=0, begin=torch.tensor([0] * (n - 1) + [-1], dtype=torch.int32))

    def route(exchange: Any) -> Any:
        side = make_side(n)
        work: Any = SimpleNamespace(side=side, rows=rows, exchange=exchange)
        RouterBlock().run(work, weights, None, ALONE)
        return side.space.tensors[ROUTED].flatten()

    whole, ends = route(None), [Gathers(rank, ranks) for rank in range(ranks)]
    for end in ends:
        assert torch.equal(route(end)[: n * D], whole[: n * D])
    choices = torch.cat([end.brought for end in ends], dim=1)
    assert torch.equal(choices.view(torch.int32).flatten(), whole[n * D :].view(torch.int32))
    assert all(end.widths == ends[0].widths for end in ends)
    assert route(Gathers(0, ranks))[-1] == -7  # the last rows are the others' work
