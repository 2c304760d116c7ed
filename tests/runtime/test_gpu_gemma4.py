"""Gemma 4 on a CUDA GPU: heads of 256 and 512, experts beside an FFN, cells that other layers read, wherever units are.
Skipped without one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import open_engine
from gemma4_files import DENSE, MIXED, SMALL, Gemma4, make_gemma4, write_gemma4
from test_gpu_families import CONTEXT, DEVICE, ROUNDED, check_placement, talk

from pshard.batch_sizes import SMALL_BATCH
from pshard.runtime.kernels.gpu.cuda import CudaKernels
from pshard.units import rewrites

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_gelu")]
LARGE = {"d": 128, "head": 256, "full_head": 512, "turned": 64, "window": 48}
RECIPES = {"large": replace(DENSE, **LARGE), "small": DENSE, "mixed": replace(MIXED, **LARGE)}
RECIPES |= {"borrowing": replace(SMALL, **LARGE), "of small heads": SMALL}


@pytest.mark.parametrize("weights_at", ["pinned", "streamed", "cpu"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_placement_gives_the_reference_logits(recipe: Gemma4, weights_at: str, tmp_path: Path) -> None:
    check_placement(write_gemma4(tmp_path / "m.gguf", recipe, make_gemma4(recipe), "Q8_0"), weights_at)


@pytest.mark.parametrize("recipe", ["large", "mixed"])
def test_norms_of_two_units_in_one_launch_give_the_numbers_of_launches_apart(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt, of single tokens, and of what follows a cut."""
    path = write_gemma4(tmp_path / "m.gguf", RECIPES[recipe], make_gemma4(RECIPES[recipe]), "Q8_0")
    made, kernel = list[int](), CudaKernels.add_normed

    def add_normed(self: CudaKernels, inner: Any, hidden: torch.Tensor, *rest: Any) -> None:
        made.append(hidden.shape[0])
        kernel(self, inner, hidden, *rest)

    monkeypatch.setattr(CudaKernels, "add_normed", add_normed)
    how: dict[str, Any] = {"kernels": "fast", "context": CONTEXT, "tokens": (1, 128), "device": DEVICE}
    together = talk(open_engine(path, **how))
    assert 1 in made and max(made) > SMALL_BATCH
    made.clear()
    monkeypatch.setattr(rewrites, "FUSED", rewrites.FUSED - {rewrites.END_NORMS})
    apart = talk(open_engine(path, **how))
    assert not made and ((together - apart) ** 2).mean() < ROUNDED * (apart**2).mean()
