"""Gemma 4 on a CUDA GPU: heads of 256 and 512, experts beside an FFN, wherever weights and cells are. Skipped without
one."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import open_engine, pinned_everywhere
from gemma4_files import DENSE, MIXED, Gemma4, make_gemma4, write_gemma4
from plan_samples import make_tier

from pshard.models import open_model
from pshard.runtime.engine import Engine

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_gelu")]
CONTEXT, ROUNDED = 512, 2e-2  # of the logits' mean square, as for other families
RNG = random.Random(0)
IDS = [RNG.randrange(320) for _ in range(140)]
LARGE = {"d": 128, "head": 256, "full_head": 512, "turned": 64, "window": 48}
RECIPES = {"large": replace(DENSE, **LARGE), "small": DENSE, "mixed": replace(MIXED, **LARGE)}


def talk(engine: Engine) -> torch.Tensor:
    """Logits of a prompt, of single tokens, and of what follows a cut."""
    with engine:
        parts = [engine.forward(part, all_logits=True) for part in (IDS[:120], *([i] for i in IDS[120:]))]
        engine.reset(0, 100)
        return torch.cat([*parts, engine.forward(IDS[100:110], all_logits=True)])


@pytest.mark.parametrize("weights_at", ["pinned", "streamed", "cpu"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_placement_gives_the_reference_logits(recipe: Gemma4, weights_at: str, tmp_path: Path) -> None:
    path = write_gemma4(tmp_path / "m.gguf", recipe, make_gemma4(recipe), "Q8_0")
    with open_model(path) as file:
        spec = file.spec
    home = "vram" if weights_at == "pinned" else "host"
    where = {}
    for unit in spec.units:
        wished = weights_at, home if unit.kind.state else None
        where[unit.name] = wished if wished in unit.kind.places else ("pinned", wished[1])
    tiers = tuple(make_tier(spec, n, where, 2, CONTEXT, 1, batch=64) for n in (1, 64))
    expected = talk(open_engine(path, pinned_everywhere(spec, (1, 64), CONTEXT), context=CONTEXT))
    got = talk(open_engine(path, tiers, "fast", CONTEXT, device="cuda"))
    assert torch.isfinite(got).all()
    assert ((got - expected) ** 2).mean() < ROUNDED * (expected**2).mean()
