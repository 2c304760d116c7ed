"""Gemma 4 on a CUDA GPU: heads of 256 and 512, experts beside an FFN, cells that other layers read, wherever units are.
Skipped without one."""

from dataclasses import replace
from pathlib import Path

import pytest
from gemma4_files import DENSE, MIXED, SMALL, Gemma4, make_gemma4, write_gemma4
from test_gpu_families import check_placement

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_gelu")]
LARGE = {"d": 128, "head": 256, "full_head": 512, "turned": 64, "window": 48}
RECIPES = {"large": replace(DENSE, **LARGE), "small": DENSE, "mixed": replace(MIXED, **LARGE)}
RECIPES |= {"borrowing": replace(SMALL, **LARGE), "of small heads": SMALL}


@pytest.mark.parametrize("weights_at", ["pinned", "streamed", "cpu"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_placement_gives_the_reference_logits(recipe: Gemma4, weights_at: str, tmp_path: Path) -> None:
    check_placement(write_gemma4(tmp_path / "m.gguf", recipe, make_gemma4(recipe), "Q8_0"), weights_at)
