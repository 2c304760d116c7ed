"""Ranks whose accelerators run ahead of the threads that launch: the bits of the plain walk.

The CPU is the accelerator, flags are in place of kernels that tell and await, and sums are made where GPUs make theirs.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from experts_file import WAYS
from flag_relay import open_on_flags
from model_files import write_gguf
from plan_samples import make_tier
from thread_ranks import run_ranks

from pshard.model import ModelSpec
from pshard.plan import TierPlan
from pshard.runtime.engine import Engine
from pshard.runtime.executor import Executor
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.walks.walk_ahead import AheadWalk
from pshard.units.attention import ATTENTION
from pshard.units.moe.experts import EXPERTS

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs the C++ library")
CONTEXT, AT_ONCE = 96, 4
GROUPS = [("tensor", (1.0, 1.0)), ("tensor", (3.0, 1.0)), ("tensor", (1.0, 0.0, 2.0)), ("layer", (1.0, 1.0))]


def talk(engine: Engine) -> tuple[torch.Tensor, int]:
    """Logits of prompts and single tokens, and bytes over the link."""
    prompts = ([3, 4, 5], [6], [7], [8], list(range(9, 25)), [9], [1], [2])
    return torch.cat([engine.forward(ids, all_logits=True) for ids in prompts]), engine.link_bytes


@pytest.mark.parametrize("attention", ["pinned", "cpu"])
@pytest.mark.parametrize("way", [WAYS[2], WAYS[3], WAYS[4], WAYS[6]], ids=str)
@pytest.mark.parametrize(("mode", "shares"), GROUPS)
def test_ranks_that_run_ahead_give_the_bits_and_bytes_of_the_plain_walk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, shares: tuple[float, ...], way: tuple, attention: str
) -> None:
    """way: of every second layer's experts. attention: where that of the last layer is computed."""
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q4_0", n_layers=4, d_expert=192)

    def place(spec: ModelSpec) -> tuple[TierPlan, ...]:
        places: dict[str, Any] = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
        places |= {u.name: way for u in spec.units if u.kind is EXPERTS and u.layer % 2 and u.tensors}
        last = (attention, "vram" if attention == "pinned" else "host")
        places |= {u.name: last for u in spec.units if u.kind is ATTENTION and u.layer == 3 and u.tensors}
        places["embedding"] = ("cpu", None)
        return tuple(make_tier(spec, n, places, 2, CONTEXT, 1) for n in (AT_ONCE, 16))

    real, ahead, walk_ahead = Executor._shape, list[int](), AheadWalk.walk_ahead
    monkeypatch.setattr(Executor, "_shape", lambda *given: replace(real(*given), sums_on_host=False))
    monkeypatch.setattr(HostKernels, "repeatable", True)
    monkeypatch.setattr(AheadWalk, "walk_ahead", lambda self, *rest: ahead.append(1) or walk_ahead(self, *rest))
    options: Any = {"tiers": place, "mode": mode, "kernels": "fast"}
    expected = run_ranks(path, shares, talk, CONTEXT, **options)
    assert not ahead
    monkeypatch.setattr("pshard.runtime.executor.open_relay", open_on_flags)
    got = run_ranks(path, shares, talk, CONTEXT, **options)
    assert len(ahead) >= AT_ONCE * sum(share > 0 for share in shares)
    for (logits, nbytes), (wanted, moved) in zip(got, expected, strict=True):
        assert torch.equal(logits, wanted) and nbytes == moved
