"""The float64 forward that faster ones are compared with is itself compared with transformers, and sees mistakes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import HF_CLASSES, write_gguf, write_gguf_from_hf, write_hf_folder
from moe_forward import moe_logits, read_weights, trace_moe

from pshard.models import open_model
from pshard.models.architectures import ARCHITECTURES

IDS = [int(i) for i in np.random.default_rng(0).integers(0, 320, 24)]
SIZES = {"n_layers": 2, "n_experts": 8, "n_used": 3}
MOE = [
    a.name for a in ARCHITECTURES if a.routing and a.name in HF_CLASSES and not (a.sinks or a.latent)
]  # whose tests are others
PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}  # the others compute no float64


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, in standard deviations of the expected logits."""
    return float(np.abs(found - expected).max() / expected.std())


@pytest.mark.slow  # most of it for the import of transformers
@pytest.mark.parametrize("arch", MOE)
def test_the_forward_is_that_of_transformers(tmp_path: Path, arch: str) -> None:
    import torch

    model = write_hf_folder(tmp_path / "hf", arch, shape=SIZES, **PLAIN)
    write_gguf_from_hf(tmp_path / "m.gguf", model)
    with torch.no_grad():
        expected = model.double()(torch.tensor([IDS])).logits[0].numpy()
    for path in ("hf", "m.gguf"):
        with open_model(tmp_path / path) as file:
            traced = trace_moe(file.spec.config, read_weights(file), IDS)
        assert difference(traced.logits, expected) < 2e-6
        assert all(len(np.unique(ids)) == 8 for ids in traced.chosen.values())  # all experts were at work


@pytest.mark.slow
def test_the_forward_of_gpt_oss_is_that_of_transformers(tmp_path: Path) -> None:
    import torch

    model = write_hf_folder(tmp_path / "hf", "gpt_oss", shape=SIZES, **PLAIN)
    ids = IDS * 3  # more than the window
    with torch.no_grad():
        expected = model.double()(torch.tensor([ids])).logits[0].numpy()
    with open_model(write_gguf_from_hf(tmp_path / "m.gguf", model)) as file:
        config, weights = file.spec.config, read_weights(file)
    assert difference(moe_logits(config, weights, ids), expected) < 1e-5
    for wrong in (
        replace(config, window_every=1),
        replace(config, sliding_window=0),
        replace(config, rope=replace(config.rope, original_context=32)),
        replace(config, experts=replace(config.experts, activation="silu")),
        replace(config, experts=replace(config.experts, scores="softmax", normed=False)),
    ):
        assert difference(moe_logits(wrong, weights, ids), expected) > 1e-3
    assert difference(moe_logits(config, {n: w for n, w in weights.items() if "sinks" not in n}, ids), expected) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_both_ways_of_weighing_experts_are_those_of_transformers(tmp_path: Path, norm_topk_prob: bool) -> None:
    import torch

    for arch in ("qwen2_moe", "qwen3_moe"):
        model = write_hf_folder(tmp_path / arch, arch, shape=SIZES, norm_topk_prob=norm_topk_prob, **PLAIN)
        with torch.no_grad():
            expected = model.double()(torch.tensor([IDS])).logits[0].numpy()
        with open_model(tmp_path / arch) as file:
            assert difference(moe_logits(file.spec.config, read_weights(file), IDS), expected) < 2e-6


@pytest.mark.parametrize(
    ("arch", "mistake"),
    [
        ("qwen3moe", {"used": 2}),
        ("qwen3moe", {"normed": False}),
        ("qwen3moe", {"scores": "sigmoid"}),
        ("qwen3moe", {"scale": 1.1}),
        ("qwen3moe", {"groups": 4, "groups_used": 2}),
        ("qwen2moe", {"normed": True}),
        ("qwen2moe", {"shared_gate": False}),
        ("qwen2moe", {"d_shared": 0}),
    ],
)
def test_another_rule_gives_other_logits(tmp_path: Path, arch: str, mistake: dict[str, Any]) -> None:
    with open_model(write_gguf(tmp_path / "m.gguf", arch, n_used=3)) as file:
        config, weights = file.spec.config, read_weights(file)
    wrong = replace(config, experts=replace(config.experts, **mistake))
    assert difference(moe_logits(wrong, weights, IDS), moe_logits(config, weights, IDS)) > 1e-3


@pytest.mark.parametrize(
    "qtype",
    ["Q4_0", *(pytest.param(q, marks=pytest.mark.slow) for q in ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "MXFP4", "BF16"))],
)
def test_random_files_of_each_type_use_all_experts(tmp_path: Path, qtype: str) -> None:
    with open_model(write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype=qtype, n_layers=3, n_experts=16)) as file:
        chosen = trace_moe(file.spec.config, read_weights(file), list(range(96))).chosen
    for layer, ids in chosen.items():
        counts = np.bincount(ids.reshape(-1), minlength=16)
        assert counts.min() > 0 and counts.max() < 96 / 2, (layer, counts)
