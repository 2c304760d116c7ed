"""Logits of every architecture equal transformers' own model, from a safetensors folder and from a GGUF file."""

import random
from pathlib import Path

import pytest
import torch
from engines import open_engine
from model_files import LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE, write_gguf_from_hf, write_hf_folder
from published_oss import publish_gpt_oss

CASES = {
    "llama": ("llama", {}),
    "llama llama3 rope": ("llama", {"rope": LLAMA3_ROPE}),
    "llama linear rope": ("llama", {"rope": LINEAR_ROPE}),
    "llama yarn rope": ("llama", {"rope": YARN_ROPE}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tied": True}),
    "qwen3": ("qwen3", {}),
    "qwen3 wide heads": ("qwen3", {"shape": {"head_dim": 128}}),
    "qwen3 with experts": ("qwen3_moe", {}),
    "qwen2 with experts": ("qwen2_moe", {}),
    "mixtral": ("mixtral", {}),
    "glm4 with experts": ("glm4_moe", {}),
    "glm4 with norms of heads": ("glm4_moe", {"use_qk_norm": True}),
}
RNG = random.Random(0)
IDS = [RNG.randrange(320) for _ in range(150)]


@pytest.mark.quick("qwen2 with experts")
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    arch, options = CASES[case]
    model = write_hf_folder(tmp_path / "hf", arch, **options)
    gguf = write_gguf_from_hf(tmp_path / "model.gguf", model)
    ids = IDS
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    for path in (tmp_path / "hf", gguf):
        with open_engine(path, context=256) as engine:
            got = engine.forward(ids, all_logits=True)
        assert (got - expected).abs().max() < 1e-4 * expected.abs().max(), path


def test_logits_of_gpt_oss_equal_transformers(tmp_path: Path) -> None:
    model = publish_gpt_oss(tmp_path / "hf", n_layers=4)
    gguf = write_gguf_from_hf(tmp_path / "model.gguf", model)
    ids = IDS  # the window has 32
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    for path in (tmp_path / "hf", gguf):
        with open_engine(path, context=256) as engine:
            got = engine.forward(ids, all_logits=True)
        assert (got - expected).abs().max() < 1e-4 * expected.abs().max(), path
