"""The families on a CUDA GPU: prompts, single tokens by graphs, cuts, weights and cells in VRAM or on the host. Skipped
without one."""

import random
from pathlib import Path

import pytest
import torch
from engines import open_engine, pinned_everywhere
from family_files import FAMILIES, write_family
from plan_samples import make_tier

from pshard.models import open_model
from pshard.runtime.engine import Engine

pytestmark = pytest.mark.gpu
DEVICE, CONTEXT = "cuda", 512
ROUNDED = 2e-2  # of the logits' mean square, as for experts and hybrids
RNG = random.Random(0)
IDS = [RNG.randrange(320) for _ in range(140)]


def talk(engine: Engine) -> torch.Tensor:
    """Logits of a prompt, of single tokens, and of what follows a cut."""
    with engine:
        parts = [engine.forward(part, all_logits=True) for part in (IDS[:120], *([i] for i in IDS[120:]))]
        engine.reset(0, 100)
        return torch.cat([*parts, engine.forward(IDS[100:110], all_logits=True)])


def check_placement(path: Path, weights_at: str) -> None:
    """Units there, as far as they can be, give the logits of the reference."""
    with open_model(path) as file:
        spec = file.spec
    state = "vram" if weights_at == "pinned" else "host"
    where = {
        u.name: (weights_at if (weights_at, state if u.kind.state else None) in u.kind.places else "pinned",
                 state if u.kind.state else None)
        for u in spec.units
    }  # fmt: skip
    tiers = tuple(make_tier(spec, n, where, 2, CONTEXT, 1, batch=64) for n in (1, 64))
    expected = talk(open_engine(path, pinned_everywhere(spec, (1, 64), CONTEXT), context=CONTEXT))
    got = talk(open_engine(path, tiers, "fast", CONTEXT, device=DEVICE))
    assert torch.isfinite(got).all()
    assert ((got - expected) ** 2).mean() < ROUNDED * (expected**2).mean()


@pytest.mark.parametrize("weights_at", ["pinned", "streamed", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_placement_gives_the_reference_logits(family: str, weights_at: str, tmp_path: Path) -> None:
    check_placement(write_family(tmp_path / "m.gguf", family, qtype="Q8_0").path, weights_at)
