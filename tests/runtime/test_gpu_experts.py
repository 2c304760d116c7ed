"""Routed experts on a CUDA GPU: in the arena, in slots, read over the link, and shared with the CPU. Skipped without
one."""

import random
from pathlib import Path

import pytest
import torch
from engines import open_engine, pinned_everywhere
from experts_file import WAYS
from model_files import write_gguf
from plan_samples import make_tier

from pshard.models import open_model
from pshard.units.moe.experts import EXPERTS
from pshard.units.moe.router import ROUTER

pytestmark = pytest.mark.gpu
CONTEXT = 256
ROUNDED = 2e-2  # of the logits' mean square: now and then bfloat16 lets another expert be chosen, which shifts a row


def talk(engine) -> torch.Tensor:
    """Prompts and single tokens: logits of every position."""
    rng = random.Random(1)
    prompts = [[rng.randrange(320) for _ in range(n)] for n in (70, 9, 1, 1, 4, 1, 1)]
    with engine:
        return torch.cat([engine.forward(p, all_logits=True) for p in prompts])


@pytest.mark.parametrize("router", ["pinned", "cpu"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_experts_give_the_reference_logits_wherever_they_are(tmp_path: Path, way: tuple, router: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q4_0", n_layers=3)
    with open_model(path) as file:
        spec = file.spec
    places: dict[str, tuple] = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
    places |= {u.name: way for u in spec.units if u.kind is EXPERTS}
    places |= {u.name: (router, None) for u in spec.units if u.kind is ROUTER}
    tiers = tuple(make_tier(spec, n, places, 2, CONTEXT, 1) for n in (4, 80))
    expected = talk(open_engine(path, pinned_everywhere(spec, (4, 80), CONTEXT), context=CONTEXT))
    got = talk(open_engine(path, tiers, "fast", CONTEXT, device="cuda"))
    assert torch.isfinite(got).all()
    assert ((got - expected) ** 2).mean() < ROUNDED * (expected**2).mean()
    assert torch.equal(got, talk(open_engine(path, tiers, "fast", CONTEXT, device="cuda")))
