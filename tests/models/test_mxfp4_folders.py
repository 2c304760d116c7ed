"""Published folders of gpt-oss: blocks and scales are read as GGUF's MXFP4 without the loss of a bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import open_engine
from model_files import write_hf_folder
from moe_forward import moe_logits, read_weights
from published_oss import publish_gpt_oss
from safetensors.numpy import load_file, save_file

from pshard.errors import UserError
from pshard.models import open_model

EXPERTS = "model.layers.0.mlp.experts."
E, F, D = 4, 64, 256


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny gpt-oss of one layer with random codes, as the Hub has it."""
    folder = tmp_path_factory.mktemp("oss")
    publish_gpt_oss(folder, n_layers=1, n_experts=E, d_expert=F)
    return folder


def test_experts_have_the_values_that_transformers_decodes(published: Path) -> None:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored = load_file(published / "model.safetensors")

    def decode(name: str) -> np.ndarray:
        """[experts, rows, cols]; transformers has the columns first."""
        packed = (torch.from_numpy(stored[f"{EXPERTS}{name}_{part}"]) for part in ("blocks", "scales"))
        return convert_moe_packed_tensors(*packed, dtype=torch.float32).numpy().swapaxes(1, 2)

    with open_model(published) as model:
        found = read_weights(model)
        for role, expected in (("gate", decode("gate_up_proj")[:, ::2]), ("up", decode("gate_up_proj")[:, 1::2])):
            np.testing.assert_array_equal(found[f"blk.0.ffn_{role}_exps.weight"], expected)
            biases = stored[f"{EXPERTS}gate_up_proj_bias"][:, role == "up" :: 2]
            np.testing.assert_array_equal(found[f"blk.0.ffn_{role}_exps.bias"], biases.reshape(-1).astype(np.float64))
        np.testing.assert_array_equal(found["blk.0.ffn_down_exps.weight"], decode("down_proj"))
        np.testing.assert_array_equal(found["blk.0.attn_sinks.weight"], stored["model.layers.0.self_attn.sinks"])
        for tensor in model.spec.unit("blk.0.experts").matrices:
            whole = model.tensor_bytes(tensor.name)
            assert whole.nbytes == tensor.file_nbytes and not whole.flags.writeable
            for part, expected_part in enumerate(np.split(whole, E)):
                np.testing.assert_array_equal(model.part_bytes(tensor.name, part), expected_part)
            model.forget_tensor(tensor.name)
        config = model.spec.config
        assert (config.window_every, config.sliding_window, config.rope.rounded) == (2, 32, False)


@pytest.mark.parametrize("kernels", ["plain", "fast"])
def test_a_published_folder_runs(published: Path, kernels: str) -> None:
    ids = [int(i) for i in np.random.default_rng(2).integers(0, 320, 60)]
    with open_model(published) as model:
        expected = moe_logits(model.spec.config, read_weights(model), ids)
    with open_engine(published, kernels=kernels) as engine:
        found = engine.forward(ids, all_logits=True).double().numpy()
    # fast kernels quantise what meets the experts' weights
    assert np.abs(found - expected).max() < (1e-5 if kernels == "plain" else 0.05) * expected.std()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(EXPERTS + "down_proj_scales"), "down_proj_blocks has no scales beside it"),
        (
            lambda t: t.update({EXPERTS + "down_proj_scales": np.zeros((E, D, 1), np.uint8)}),
            r"down_proj_scales has shape \[4, 256, 1\], not the \[4, 256, 2\]",
        ),
        (
            lambda t: t.update({EXPERTS + "down_proj_blocks": np.zeros((E, D, F), np.uint8)}),
            r"down_proj_blocks has shape \[4, 256, 64\], not the \[4, 256, 2, 16\]",
        ),
        (
            lambda t: t.update({EXPERTS + "down_proj_blocks": np.zeros((E, D, 2, 16), np.float16)}),
            "down_proj_blocks has type F16, not U8",
        ),
        (
            lambda t: t.update({EXPERTS + "gate_up_proj_bias": np.zeros((E, F), np.float32)}),
            r"gate_up_proj_bias has shape \[4, 64\], not the \[4, 128\]",
        ),
        (
            lambda t: t.update({EXPERTS + "down_proj": np.zeros((E, F, D), np.float32)}),
            "down_proj is there twice, in MXFP4 too",
        ),
        (lambda t: t.update({"lm_head.weight": np.zeros((320, D), np.uint8)}), "has type U8, which is not supported"),
    ],
)
def test_what_does_not_fit_is_named(published: Path, tmp_path: Path, change: Any, says: str) -> None:
    tensors = load_file(published / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((published / "config.json").read_text())
    with pytest.raises(UserError, match=says):
        open_model(tmp_path)


def test_windows_in_other_layers_are_refused(published: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(published / "model.safetensors")
    config = json.loads((published / "config.json").read_text()) | {"layer_types": ["full_attention", "x"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="layer_types has others than sliding_attention and full_attention"):
        open_model(tmp_path)


@pytest.mark.parametrize("method", ["mxfp4", "bitsandbytes"])
def test_other_quantised_folders_are_refused_by_name(tmp_path: Path, method: str) -> None:
    write_hf_folder(tmp_path, "qwen3_moe")
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=rf"of this method are not supported .quant_method '{method}'."):
        open_model(tmp_path)
