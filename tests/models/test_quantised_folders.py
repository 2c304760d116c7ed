"""Quantised folders: GPTQ, AWQ, compressed-tensors and NVFP4 have the values that decoders written out give them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import open_engine
from moe_forward import read_weights
from quantised_folders import CONFIGS, load_plain, save_tensors, write_decoded, write_quantised

from pshard.errors import UserError
from pshard.models import open_model

TYPES = {
    "gptq": "Q4_0", "gptq asymmetric": "Q5_0", "gptq v2": "Q5_0", "gptq 8": "Q8_0", "awq": "Q5_0", "w4a16": "Q4_0",
    "w4a16 asymmetric": "Q5_0", "w8a16": "Q8_0", "nvfp4 modelopt": "NVFP4", "nvfp4 ct": "NVFP4",
    "fp8 blocks": "FP8", "fp8 rows": "FP8", "fp8 tensor": "FP8",
}  # fmt: skip
ROLES = {"q_proj": "attn_q", "o_proj": "attn_output", "gate_proj": "ffn_gate", "down_proj": "ffn_down"}
IDS = [int(i) for i in np.random.default_rng(0).integers(0, 320, 24)]


def our_name(name: str) -> str:
    """model.layers.0.mlp.up_proj.weight of a dense model as units have it."""
    parts = name.split(".")
    return f"blk.{parts[2]}.{ROLES.get(parts[4], '')}.weight"


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if "order" not in kind])
def test_matrices_have_the_values_that_their_codes_stand_for(kind: str, tmp_path: Path) -> None:
    decoded = write_quantised(tmp_path, kind, "qwen2", n_layers=1)
    with open_model(tmp_path) as model:
        assert {t.qtype for u in model.spec.units for t in u.matrices} == {"F32", TYPES[kind]}
        found = read_weights(model)
    seen = 0
    for name, values in decoded.items():
        if our_name(name) in found:
            seen += 1
            np.testing.assert_allclose(found[our_name(name)], values, rtol=2e-7, atol=0)
    assert seen == len(ROLES)


@pytest.mark.parametrize(
    ("kind", "arch"),
    [
        *((kind, arch) for kind in ("awq", "nvfp4 ct", "fp8 blocks") for arch in ("llama", "qwen3_moe")),
        *(("gptq order", "llama"), ("gptq order v2", "qwen2"), ("w4a16 order", "qwen3")),
    ],
)
def test_a_folder_gives_the_logits_of_the_same_model_in_float32(kind: str, arch: str, tmp_path: Path) -> None:
    decoded = write_quantised(tmp_path / "q", kind, arch, n_layers=1, n_experts=4)
    write_decoded(tmp_path / "f", tmp_path / "q", decoded)
    logits = []
    for folder in ("q", "f"):
        with open_engine(tmp_path / folder, context=64) as engine:
            logits.append(engine.forward(IDS, all_logits=True).double().numpy())
    assert np.abs(logits[0] - logits[1]).max() < 1e-5 * logits[1].std()
    with open_engine(tmp_path / "q", kernels="fast", context=64) as engine:
        fast = engine.forward(IDS, all_logits=True).double().numpy()
    assert np.sqrt(np.mean((fast - logits[1]) ** 2)) < 0.1 * logits[1].std()


Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("kind", "name", "array", "says"),
    [
        ("gptq", "scales", np.ones((3, 256), np.float16), r"q_proj.qzeros has shape \[2, 32\], not the \[3, 32\]"),
        ("gptq", "qweight", np.zeros((30, 256), np.int32), "2 groups of 240 columns are not whole blocks of 32"),
        ("gptq", "qzeros", np.zeros((2, 32), np.float32), "q_proj.qzeros has type F32, not I32"),
        ("gptq", "qzeros", np.zeros((2, 24), np.int32), "has codes of 3 bits beside such scales, where 4 and 8 are"),
        ("gptq", "g_idx", np.zeros(255, np.int32), r"q_proj.g_idx has shape \[255\], not the \[256\]"),
        ("gptq", "g_idx", np.zeros(256, np.int64), "q_proj.g_idx has type I64, not I32"),
        ("awq", "scales", np.ones((2, 128), np.float16), r"q_proj.qweight has shape \[256, 32\], not the \[256, 16\]"),
        ("w4a16", "weight_scale", np.ones((256, 3), np.float16), "3 groups of 256 columns are not whole blocks"),
        ("w4a16", "weight_shape", np.array([128, 256]), "says 128 x 256, and .*q_proj.weight_packed has 256 rows"),
        ("w4a16", "weight_g_idx", np.zeros(255, np.int32), r"weight_g_idx has shape \[255\], not the \[256\]"),
        ("w4a16", "weight_g_idx", np.zeros(256, np.int32), r"weight has no order of columns \(g_idx\)"),
        ("nvfp4 ct", "weight_scale", np.zeros((256, 16), np.uint8), "weight_scale has type U8, not F8_E4M3"),
        ("nvfp4 ct", "weight_global_scale", np.ones(2, np.float32), r"has shape \[2\], not the \[1\]"),
        ("fp8 blocks", "weight_scale_inv", np.ones((2, 1), np.float32), r"are one number, \[256, 1\] or \[2, 2\]"),
        ("fp8 rows", "weight_scale", np.ones((256, 1), np.float64), "weight_scale has type F64, not one of F32"),
        ("nvfp4 ct", "weight_global_scale", None, "has no scales and factor of NVFP4 beside it"),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_named(
    kind: str, name: str, array: Any, says: str, tmp_path: Path
) -> None:
    write_quantised(tmp_path, kind, n_layers=1)
    change(tmp_path, Q + name, array)
    with pytest.raises(UserError, match=says):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("kind", "name", "array", "says"),
    [
        ("gptq", "g_idx", np.full(256, 2, np.int32), "g_idx names group 2 of 2: the file is damaged"),
        ("gptq", "g_idx", np.full(256, -1, np.int32), "g_idx names group -1 of 2"),
        ("gptq", "g_idx", np.arange(256, dtype=np.int32) % 2, r"and config.json does not say so \(desc_act\)"),
        ("gptq order", "g_idx", np.full(256, 4, np.int32), "g_idx names group 4 of 4: the file is damaged"),
        ("gptq order", "g_idx", np.zeros(256, np.int32), "has 256 columns in group 0, where a group has 64"),
        ("gptq order", "g_idx", np.arange(256, dtype=np.int32) % 4, "k_proj.g_idx gives columns another order than mo"),
        ("gptq", "qzeros", np.zeros((2, 32), np.int32), "zero points other than 8, where the configuration says"),
        ("awq", "scales", np.full((2, 256), np.inf, np.float16), "has scales that are no numbers"),
        ("fp8 tensor", "weight_scale", np.full(1, np.nan, np.float32), "has codes or scales that are no numbers"),
        ("nvfp4 ct", "weight_global_scale", np.zeros(1, np.float32), "is 0.0, by which no weights are multiplied"),
    ],
)
def test_numbers_that_mean_nothing_are_named_when_they_are_read(
    kind: str, name: str, array: Any, says: str, tmp_path: Path
) -> None:
    write_quantised(tmp_path, kind, n_layers=1)
    change(tmp_path, Q + name, array)
    with pytest.raises(UserError, match=says), open_engine(tmp_path, context=64):
        pass


def test_an_order_of_columns_where_none_can_be_put_in_order_is_named(tmp_path: Path) -> None:
    write_quantised(tmp_path, "gptq order", "qwen3_moe", n_layers=1, n_experts=4)
    with pytest.raises(UserError, match=r"experts\.\d.*g_idx gives columns an order of their own \(desc_act\), wh"):
        open_model(tmp_path)


def test_rows_with_biases_are_not_put_in_the_order_of_the_columns_that_take_them(tmp_path: Path) -> None:
    write_quantised(tmp_path, "gptq order", n_layers=1)
    biases = {"model.layers.0.mlp.gate_proj.bias": np.ones(512, np.float16)}
    save_tensors(load_plain(tmp_path) | biases, tmp_path)
    with pytest.raises(UserError, match=r"down_proj.*g_idx gives columns an order of their own \(desc_act\), wh"):
        open_model(tmp_path)


def test_matrices_of_one_input_have_an_order_of_columns_all_or_none(tmp_path: Path) -> None:
    decoded = write_quantised(tmp_path, "gptq order", n_layers=1)
    tensors = {name: t for name, t in load_plain(tmp_path).items() if not name.startswith(Q)}
    save_tensors(tensors | {Q + "weight": decoded[Q + "weight"]}, tmp_path)
    with pytest.raises(UserError, match=r"q_proj\.weight has no order of columns"):
        open_model(tmp_path)


def change(folder: Path, name: str, array: Any) -> None:
    """Another array under that name, or none."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    save_tensors(tensors if array is None else tensors | {name: torch.from_numpy(array)}, folder)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"quant_method": "bitsandbytes"}, r"this method are not supported \(quant_method 'bitsandbytes'\)"),
        ({"quant_method": "mxfp4"}, r"this method are not supported \(quant_method 'mxfp4'\)"),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ of version 'gemv' is not supported"),
    ],
)
def test_methods_and_settings_that_are_not_read_are_named(given: dict[str, Any], says: str, tmp_path: Path) -> None:
    write_quantised(tmp_path, "gptq", n_layers=1)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": given}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=says):
        open_model(tmp_path)


def test_biases_of_zeros_that_autogptq_adds_are_left_out(tmp_path: Path) -> None:
    write_quantised(tmp_path, "gptq", n_layers=1)
    zeros = {f"model.layers.0.mlp.{part}.bias": np.zeros(512, np.float16) for part in ("gate_proj", "up_proj")}
    save_tensors(load_plain(tmp_path) | zeros, tmp_path)
    with open_model(tmp_path) as model:
        assert "ffn_up.bias" not in model.spec.unit("blk.0.ffn").by_role
