"""Logits of model files with routed experts equal the float64 forward, for each architecture and type of weights."""

from pathlib import Path

import numpy as np
import pytest
from engines import open_engine
from model_files import MOE, write_gguf
from moe_forward import moe_logits, read_weights

from pshard.models import open_model

IDS = [int(i) for i in np.random.default_rng(0).integers(0, 320, 24)]


def compare_logits(path: Path, most: float) -> None:
    """The largest difference in deviations of the logits, of a prompt and of tokens after it."""
    with open_model(path) as file:
        expected = moe_logits(file.spec.config, read_weights(file), IDS)
    with open_engine(path, context=64) as engine:
        prompt = engine.forward(IDS[:-2], all_logits=True).numpy()
        tokens = [engine.forward([token], all_logits=True).numpy() for token in IDS[-2:]]
    assert np.abs(np.concatenate([prompt, *tokens]) - expected).max() < most * expected.std()


@pytest.mark.parametrize("arch", MOE)
def test_logits_equal_the_float64_forward(tmp_path: Path, arch: str) -> None:
    compare_logits(write_gguf(tmp_path / "m.gguf", arch, n_used=3), 1e-5)


@pytest.mark.parametrize("qtype", ["Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "MXFP4", "BF16"])
def test_every_type_of_experts_gives_the_float64_forwards_logits(tmp_path: Path, qtype: str) -> None:
    compare_logits(write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype=qtype, n_layers=1), 1e-5)
