"""qwen4exp on a CUDA GPU: streams, an index of cells and n-grams, wherever units are, and by graphs. Skipped without
one."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import open_engine
from qwen4exp_files import RECIPES, VOCAB, Recipe, make_weights, write_qwen4exp
from test_gpu_families import check_placement

pytestmark = pytest.mark.gpu
# of "wide" all cells are seen; of the others rounding may choose a few others than the reference does
SIZES = {"plain": RECIPES["plain"], "wide": replace(RECIPES["plain"], index=(4, 32, 4, 1024))}


@pytest.mark.parametrize("weights_at", ["pinned", "streamed", "cpu"])
@pytest.mark.parametrize("recipe", SIZES.values(), ids=SIZES)
def test_every_placement_gives_the_reference_logits(recipe: Recipe, weights_at: str, tmp_path: Path) -> None:
    check_placement(write_qwen4exp(tmp_path / "m.gguf", recipe, make_weights(recipe), "Q8_0"), weights_at)


@pytest.mark.parametrize("weights_at", ["pinned", "streamed", "cpu"])
def test_other_sizes_give_the_reference_logits_too(weights_at: str, tmp_path: Path) -> None:
    recipe = replace(RECIPES["other"], index=(6, 16, 8, 1024))  # all cells are seen
    check_placement(write_qwen4exp(tmp_path / "m.gguf", recipe, make_weights(recipe), "Q8_0"), weights_at)


def test_a_prompt_takes_no_memory_beside_the_arena(tmp_path: Path) -> None:
    path, rng = (
        write_qwen4exp(tmp_path / "m.gguf", RECIPES["plain"], make_weights(RECIPES["plain"]), "Q8_0"),
        random.Random(3),
    )
    with open_engine(path, None, "fast", 1024, 1, (2, 512), device="cuda") as engine:
        for n in (512, 1):
            engine.forward([rng.randrange(VOCAB) for _ in range(n)])
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.reset(0)
        engine.forward([rng.randrange(VOCAB) for _ in range(512)])
        assert torch.cuda.max_memory_allocated() - before < 1 << 20


def test_decoding_by_graphs_is_decoding_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_qwen4exp(tmp_path / "m.gguf", RECIPES["plain"], make_weights(RECIPES["plain"]), "Q8_0")

    def decode() -> torch.Tensor:
        rng, found = random.Random(2), list[torch.Tensor]()
        with open_engine(path, None, "fast", 1024, 2, (2, 32), device="cuda") as engine:
            for sizes in ((70, 9), *([(1, 1)] * 12), (0, 40), *([(1, 0)] * 4), *([(1, 1)] * 4)):
                new = [[rng.randrange(VOCAB) for _ in range(n)] for n in sizes]
                found += [logits for logits in engine.forward(new, all_logits=True) if logits.numel()]
        return torch.cat(found)

    by_graphs = decode()
    monkeypatch.setattr("pshard.runtime.devices.device.CudaDevice.repeat", lambda self, key, worth_it, work: work())
    assert torch.equal(by_graphs, decode())
