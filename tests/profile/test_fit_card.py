"""What is timed on a GPU fits its free memory."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pshard.errors import KernelRefused
from pshard.profile import measure
from pshard.profile.effort import Shapes, fit_card, full_effort, largest_case
from pshard.profile.measure import ProfileRequest, fit_request
from pshard.profile.timed.operands import OperandPool

GIB = 1 << 30
FULL = full_effort(32 << 20, 32 * GIB)


def test_large_batches_are_left_out_where_memory_is_short() -> None:
    """8192 tokens of the grid take 880 MiB beside the pool: too much for a card of 4 GB of which some is taken."""
    assert largest_case(FULL.grid, 8192) >> 20 == 880
    assert fit_card(FULL, None, 24 * GIB) == (FULL, ())
    small, (note,) = fit_card(FULL, None, GIB)
    assert max(small.acc_tokens) == 4096 and small.host_tokens == FULL.host_tokens
    assert "more than 4096 tokens were not timed: 1024 MiB of VRAM were free" in note
    assert max(fit_card(FULL, None, 1 << 20)[0].acc_tokens) == 64  # what decodes is timed on any card


def test_a_model_s_own_shapes_count_too() -> None:
    wide = Shapes((("Q4_0", 1 << 20, 4096),), (), (), (), (), 4096)
    assert max(fit_card(FULL, wide, 24 * GIB)[0].acc_tokens) == 4096


def test_operands_that_do_not_fit_are_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before them are given back first: both at once may not fit."""
    held: list[int] = []

    def take(nbytes: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
        held.append(pool._buffer.numel() if held else 0)
        if nbytes > 3 << 20:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return torch.empty(nbytes, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", take)
    pool = OperandPool(1 << 20, torch.device("cuda"))
    pool._split(2 << 20)
    with pytest.raises(KernelRefused, match="operands of 4 MiB do not fit the GPU's free memory; end other programs"):
        pool._split(4 << 20)
    assert held == [0, 0, 0]


def test_a_profile_asks_the_card_and_its_pool_is_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 4 * GIB))
    gpu: Any = SimpleNamespace(kind="cuda", torch_device="cuda:0")
    cpu: Any = SimpleNamespace(kind="cpu", torch_device="cpu")
    request = ProfileRequest("cuda", FULL, None, None, "pshard-profile")
    fitted, notes = fit_request(request, gpu)
    assert (fitted.effort, notes) == fit_card(FULL, None, GIB)
    assert fit_request(request, cpu) == (request, ())
    assert measure._pool_bytes(FULL, gpu) == 256 << 20
    assert measure._pool_bytes(replace(FULL, rotation=64 << 20), gpu) == 64 << 20
    assert measure._pool_bytes(FULL, cpu) == 512 << 20
