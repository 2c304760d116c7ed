"""Files in types with a codebook, NVFP4 and types of one or two bits give the logits of the weights they stand for."""

from pathlib import Path

import numpy as np
import pytest
from engines import open_engine
from model_files import write_gguf
from moe_forward import moe_logits, read_weights
from plan_samples import make_tier
from random_blocks import LATER

from pshard.errors import UserError
from pshard.models import open_model

IDS = [int(i) for i in np.random.default_rng(0).integers(0, 320, 24)]
MIXED = {  # as published UD-Q2_K_XL files mix them
    "attn_q.weight": "IQ2_XS", "attn_k.weight": "IQ3_XXS", "attn_v.weight": "IQ3_S", "attn_output.weight": "IQ2_S",
    "ffn_gate_exps.weight": "IQ2_XXS", "ffn_up_exps.weight": "IQ2_XXS", "ffn_down_exps.weight": "IQ3_XXS",
    "output.weight": "IQ1_M", "token_embd.weight": "IQ1_S",
}  # fmt: skip
NVFP4 = {"ffn_gate_exps.weight": "NVFP4", "ffn_down_exps.weight": "NVFP4", "attn_q.weight": "NVFP4"}


def check_logits(path: Path, where: str = "cpu") -> None:
    """Plain kernels are exact; fast ones round activations to int8."""
    with open_model(path) as file:
        spec = file.spec
        expected = moe_logits(spec.config, read_weights(file), IDS)
    with open_engine(path, context=64) as engine:
        exact = engine.forward(IDS, all_logits=True).numpy()
    assert np.abs(exact - expected).max() < 1e-4 * expected.std()
    places = {u.name: ("cpu" if u.kind.is_looked_up else where, "host" if u.kind.state else None) for u in spec.units}
    tiers = tuple(make_tier(spec, n, places, 2, 64, 1, batch=32) for n in (1, 32))
    with open_engine(path, tiers, "fast", 64) as engine:
        found = engine.forward(IDS, all_logits=True).numpy()
    assert np.sqrt(np.mean((found - expected) ** 2)) < 0.1 * expected.std()


@pytest.mark.parametrize("qtype", sorted({*LATER} - {*MIXED.values(), "NVFP4"}))
def test_a_model_in_one_type_gives_the_logits_of_its_weights(qtype: str, tmp_path: Path) -> None:
    check_logits(write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype=qtype, n_layers=1))


@pytest.mark.parametrize("where", ["pinned", "streamed"])
def test_a_mix_of_nine_types_gives_the_logits_of_its_weights(where: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q8_0", qtypes=MIXED, n_layers=2)
    with open_model(path) as file:
        assert set(MIXED.values()) <= {t.qtype for u in file.spec.units for t in u.matrices}
    check_logits(path, where)


def test_matrices_and_experts_of_nvfp4_are_multiplied_by_the_factors_beside_them(tmp_path: Path) -> None:
    factors = {
        "blk.0.ffn_gate_exps.scale": np.linspace(0.5, 3, 8, dtype=np.float32),
        "blk.0.ffn_down_exps.scale": np.full(1, 1.75, np.float32),
        "blk.1.attn_q.scale": np.full(1, 0.37, np.float32),
        "blk.1.attn_q.input_scale": np.full(1, 9, np.float32),
        "blk.1.attn_k.scale": np.ones(1, np.float32),  # of a matrix of another type: nothing to multiply
    }
    sizes = {"n_layers": 2, "n_experts": 8}
    with_them = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q8_0", qtypes=NVFP4, extra=factors, **sizes)
    check_logits(with_them)
    without = write_gguf(tmp_path / "n.gguf", "qwen3moe", qtype="Q8_0", qtypes=NVFP4, **sizes)
    logits = []
    for path in (with_them, without):
        with open_model(path) as file:
            logits.append(moe_logits(file.spec.config, read_weights(file), IDS))
    assert np.abs(logits[0] - logits[1]).max() > 0.1 * logits[1].std()


@pytest.mark.parametrize(
    ("name", "factor", "wrong"),
    [
        ("blk.0.attn_q.scale", np.ones(2, np.float32), r"factors of blk.0.attn_q.weight are F32 of \[1\];"),
        ("blk.0.ffn_gate_exps.scale", np.ones(7, np.float32), r"are F32 of \[1\] or \[8\];"),
        ("blk.0.attn_q.scale", np.full(1, np.nan, np.float32), "has a factor that is not a number"),
        ("blk.0.attn_k.scale", np.full(1, 2, np.float32), "attn_k.scale has no place in architecture"),
    ],
)
def test_factors_that_cannot_be_applied_are_refused(name: str, factor: np.ndarray, wrong: str, tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", "qwen3moe", qtype="Q8_0", qtypes=NVFP4, extra={name: factor}, n_layers=2, n_experts=8
    )
    with pytest.raises(UserError, match=wrong):
        open_model(path)
