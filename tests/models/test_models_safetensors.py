"""Hugging Face folders open as the same ModelSpecs as GGUF files; weights are the saved bytes, in HF's own order."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import HF_CLASSES, LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE, write_gguf_from_hf, write_hf_folder

from pshard.errors import UserError
from pshard.models import ModelFile, open_model
from pshard.models.architectures import ARCHITECTURES
from pshard.models.rope import llama3_freq_factors

DENSE = [a.name for a in ARCHITECTURES if a.name in HF_CLASSES and not a.routing]  # families: test_families.py
HF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.1.attn_norm.weight": "model.layers.1.input_layernorm.weight",
    "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
    "blk.1.attn_k.weight": "model.layers.1.self_attn.k_proj.weight",
    "blk.1.attn_v.weight": "model.layers.1.self_attn.v_proj.weight",
    "blk.1.attn_q.bias": "model.layers.1.self_attn.q_proj.bias",
    "blk.1.attn_k.bias": "model.layers.1.self_attn.k_proj.bias",
    "blk.1.attn_v.bias": "model.layers.1.self_attn.v_proj.bias",
    "blk.1.attn_output.weight": "model.layers.1.self_attn.o_proj.weight",
    "blk.1.attn_q_norm.weight": "model.layers.1.self_attn.q_norm.weight",
    "blk.1.attn_k_norm.weight": "model.layers.1.self_attn.k_norm.weight",
    "blk.1.ffn_norm.weight": "model.layers.1.post_attention_layernorm.weight",
    "blk.1.ffn_gate.weight": "model.layers.1.mlp.gate_proj.weight",
    "blk.1.ffn_up.weight": "model.layers.1.mlp.up_proj.weight",
    "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
}


def check_bytes(opened: ModelFile, model: Any) -> None:
    """Every tensor of layer 1, the embedding and the output holds the bytes of the transformers model's weight."""
    import torch

    state = model.state_dict()
    names = [t.name for u in opened.spec.units if u.layer in (-1, 1) for t in u.tensors]
    assert len(names) > 10
    for name in names:
        weight = state[HF_NAMES[name]].contiguous()
        expected = weight.view(torch.uint8).numpy() if weight.ndim else weight.numpy()
        np.testing.assert_array_equal(opened.tensor_bytes(name), expected)


@pytest.mark.parametrize("arch", DENSE)
@pytest.mark.parametrize(("dtype", "qtype"), [("float32", "F32"), ("bfloat16", "BF16"), ("float16", "F16")])
def test_a_folder_opens_with_its_own_bytes_and_types(tmp_path: Path, arch: str, dtype: str, qtype: str) -> None:
    model = write_hf_folder(tmp_path, arch, dtype=dtype)
    with open_model(tmp_path) as opened:
        check_bytes(opened, model)
        assert {t.qtype for u in opened.spec.units for t in u.tensors} == {qtype}
        assert opened.spec.config.architecture == arch
        assert opened.spec.config.rope.pairing == "halves"


@pytest.mark.parametrize("arch", DENSE)
def test_both_formats_of_a_model_meet_in_one_spec(tmp_path: Path, arch: str) -> None:
    model = write_hf_folder(tmp_path / "hf", arch, tied=arch == "qwen3")
    with open_model(tmp_path / "hf") as folder, open_model(write_gguf_from_hf(tmp_path / "m.gguf", model)) as file:
        assert [u.likeness for u in folder.spec.units] == [u.likeness for u in file.spec.units]
        assert [u.name for u in folder.spec.units] == [u.name for u in file.spec.units]
        a, b = folder.spec.config, file.spec.config
        for field in (
            "n_layers",
            "d_model",
            "n_heads",
            "n_kv_heads",
            "head_dim",
            "d_ffn",
            "vocab",
            "context",
            "qk_norm",
        ):
            assert getattr(a, field) == getattr(b, field), field
        assert b.norm_eps == pytest.approx(a.norm_eps)


def test_shards_and_tied_heads(tmp_path: Path) -> None:
    model = write_hf_folder(tmp_path, "qwen2", tied=True, shard_bytes=600_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    with open_model(tmp_path) as opened:
        check_bytes(opened, model)
        assert opened.spec.unit("output").tensors[0].name == "token_embd.weight"


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_hf_folder(tmp_path, shard_bytes=600_000)
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(UserError, match=r"model-00002-of-\d+.safetensors: there is no such file.*; fetch it too"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    "rope",
    [None, LINEAR_ROPE, YARN_ROPE, LLAMA3_ROPE, YARN_ROPE | {"beta_fast": 8.0}, YARN_ROPE | {"truncate": False}],
)
@pytest.mark.parametrize("layout", ["transformers 5", "transformers 4"])
def test_rope_gives_the_frequencies_of_transformers(tmp_path: Path, rope: dict[str, Any] | None, layout: str) -> None:
    from pshard.runtime.blocks.rope_table import inverse_frequencies

    model = write_hf_folder(tmp_path, "llama", rope=rope)
    if layout == "transformers 4":

        def rewrite(config: dict[str, Any]) -> None:
            given = config.pop("rope_parameters")
            config["rope_theta"] = given.pop("rope_theta")
            config["rope_scaling"] = None if given["rope_type"] == "default" else given

        edit_config(tmp_path, rewrite)
    with open_model(tmp_path) as opened:
        frequencies, scale = inverse_frequencies(opened.spec.config.rope)
    rotary = model.model.rotary_emb
    np.testing.assert_allclose(frequencies.numpy(), rotary.inv_freq.numpy(), rtol=1e-6)
    assert scale == pytest.approx(rotary.attention_scaling)


def test_llama3_factors_equal_transformers_at_true_sizes(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings_ = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    given = settings_ | {"rope_type": "llama3", "rope_theta": 5e5, "original_max_position_embeddings": 8192}
    config = LlamaConfig(head_dim=128, rope_parameters=given, max_position_embeddings=131072)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    factors = llama3_freq_factors(128, 5e5, original_context=8192, **settings_)
    plain = 5e5 ** -(np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(plain / np.array(factors), expected.numpy(), rtol=2e-6)


def edit_config(folder: Path, change: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def set_keys(**keys: Any) -> Any:
    def change(config: dict[str, Any]) -> None:
        for key, value in keys.items():
            config.pop(key, None)
            if value is not ...:
                config[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            set_keys(model_type="gemma9"),
            "'gemma9' is not supported yet; take a model of one of these: apertus, arcee, cohere, cohere2, ",
        ),
        (set_keys(model_type=...), "architecture None"),
        (set_keys(hidden_size="big"), "hidden_size is 'big'"),
        (set_keys(hidden_size=...), "hidden_size is missing"),
        (set_keys(hidden_act="gelu"), "hidden_act is 'gelu', which is not supported"),
        (
            set_keys(quantization_config={"quant_method": "bitsandbytes"}),
            "quantised safetensors of this method are not supported",
        ),
        (set_keys(sliding_window=128), "sliding-window attention"),
        (set_keys(rope_parameters={"rope_type": "ntk", "factor": 2.0}), "RoPE scaling 'ntk' is not supported"),
        (set_keys(rope_parameters={"rope_type": "linear"}), "rope_parameters: factor is missing"),
        (set_keys(rope_parameters={"partial_rotary_factor": 0.5}), "rotates 32 of 64 dimensions"),
        (set_keys(rope_parameters={"full_attention": {}}), "differs from layer to layer"),
        (set_keys(head_dim=2**63), "head_dim is 9223372036854775808, where heads have"),
        (set_keys(rope_parameters={"partial_rotary_factor": 1e300}), r"partial_rotary_factor is 1e\+300"),
        (
            set_keys(rope_parameters=LLAMA3_ROPE | {"rope_theta": 1e-320}),
            r"rope_theta is .*, where models have 2 to 1e\+18",
        ),
        (set_keys(rope_parameters=LLAMA3_ROPE | {"factor": 1e-320}), r"factor is .*, where models have 0.001 to"),
        (set_keys(intermediate_size=256), r"gate_proj.weight has shape \[512, 256\], not the \[256, 256\]"),
        (set_keys(num_hidden_layers=3), "tensor blk.2.attn_norm.weight of shape .256. is missing"),
        (set_keys(num_hidden_layers=1), "has no place in architecture llama"),
    ],
)
def test_what_cannot_be_run_is_named(tmp_path: Path, change: Any, says: str) -> None:
    write_hf_folder(tmp_path, "llama")
    edit_config(tmp_path, change)
    with pytest.raises(UserError, match=says):
        open_model(tmp_path)


@pytest.mark.parametrize("offset", [b"1e999", b"0.5  ", b"null ", b"-4   "])
def test_an_offset_that_is_no_whole_number_is_damage(tmp_path: Path, offset: bytes) -> None:
    write_hf_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    start = data.index(b'"data_offsets":[') + len(b'"data_offsets":[0,')
    path.write_bytes(data[:start] + offset + data[start + 5 :])
    with pytest.raises(UserError, match="damaged"):
        open_model(tmp_path)


def edit_header(path: Path, change: Any) -> None:
    """Change the header of a safetensors file, and leave its data as it is."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


FFN = "model.layers.{}.mlp.{}_proj.weight"


def shift(name: str, by: int) -> Any:
    def change(header: dict[str, Any]) -> None:
        header[name]["data_offsets"] = [n + by for n in header[name]["data_offsets"]]

    return change


def overlap(header: dict[str, Any]) -> None:
    header[FFN.format(0, "up")]["data_offsets"] = header[FFN.format(0, "gate")]["data_offsets"]


def halve_type(header: dict[str, Any]) -> None:
    entry = header["lm_head.weight"]
    first, last = entry["data_offsets"]
    entry |= {"dtype": "BF16", "data_offsets": [first, (first + last) // 2]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (shift(FFN.format(0, "up"), 1), "begins at byte"),
        (shift(FFN.format(0, "up"), -4), "begins at byte"),
        (shift(FFN.format(1, "up"), 1 << 40), "begins at byte|beyond the end"),
        (overlap, r"tensor model.layers.0.mlp.\w+_proj.weight begins at byte"),
        (halve_type, r"begins at byte .* lm_head.weight \(BF16\)"),
        (lambda header: header.pop("model.layers.0.self_attn.q_proj.weight"), "begins at byte"),
        (lambda header: header["model.norm.weight"].update(dtype="F16"), "has 1024 bytes, not the 512"),
        (lambda header: header["model.norm.weight"].update(shape=[255]), "has 1024 bytes, not the 1020"),
    ],
)
def test_tensors_that_overlap_or_leave_gaps_are_named(tmp_path: Path, change: Any, says: str) -> None:
    write_hf_folder(tmp_path)
    edit_header(tmp_path / "model.safetensors", lambda header: None)
    open_model(tmp_path).close()
    edit_header(tmp_path / "model.safetensors", change)
    with pytest.raises(UserError, match=rf"model.safetensors: .*({says}).*fetch it again"):
        open_model(tmp_path)


def test_bytes_that_no_tensor_uses_are_said(tmp_path: Path) -> None:
    write_hf_folder(tmp_path)
    with open(tmp_path / "model.safetensors", "ab") as file:
        file.write(b"\0")
    with pytest.raises(UserError, match=r"1 bytes follow .*, the last tensor"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("arch", "keys", "window"),
    [
        ("mistral", {"sliding_window": None}, 0),
        ("mistral", {"sliding_window": 512}, 512),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": False}, 0),
        ("qwen3", {"sliding_window": 128, "layer_types": ["full_attention"] * 2}, 0),
    ],
)
def test_a_sliding_window_that_never_slides_is_full_attention(
    tmp_path: Path, arch: str, keys: dict[str, Any], window: int
) -> None:
    write_hf_folder(tmp_path, arch)
    edit_config(tmp_path, set_keys(**keys))
    with open_model(tmp_path) as opened:
        assert opened.spec.config.sliding_window == window


def test_an_untied_model_without_head_is_refused(tmp_path: Path) -> None:
    write_hf_folder(tmp_path, "llama", tied=True)
    edit_config(tmp_path, set_keys(tie_word_embeddings=False))
    with pytest.raises(UserError, match=r"lm_head.weight is missing"):
        open_model(tmp_path)


def test_what_is_no_model_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model is in this folder; give a GGUF file"):
        open_model(tmp_path)
    write_hf_folder(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "kept.json")
    with pytest.raises(UserError, match=r"config.json: there is no such file; fetch it too, or give a GGUF file"):
        open_model(tmp_path)
    (tmp_path / "kept.json").rename(tmp_path / "config.json")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"neither model.safetensors nor"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        open_model(tmp_path)
    with pytest.raises(UserError, match="give the folder"):
        open_model(tmp_path / "model.safetensors")


NESTED = "[" * 100_000


def test_json_that_is_nested_too_deeply_is_damage(tmp_path: Path) -> None:
    write_hf_folder(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(struct.pack("<Q", len(NESTED)) + NESTED.encode() + whole)
    with pytest.raises(UserError, match=r"model.safetensors: not a safetensors file, or its header is damaged"):
        open_model(tmp_path)
    weights.write_bytes(whole)
    (tmp_path / "config.json").write_text(NESTED)
    with pytest.raises(UserError, match=r"config.json: not valid JSON .nested too deeply"):
        open_model(tmp_path)


def test_an_unsupported_dtype_is_named(tmp_path: Path) -> None:
    write_hf_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"dtype":"F32"', b'"dtype":"I32"', 1))
    with pytest.raises(UserError, match="has type I32, which is not supported"):
        open_model(tmp_path)


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a second copy of its weights, `whole`."""
    folder = tmp_path_factory.mktemp("hf")
    write_hf_folder(folder, "qwen3", shape={"n_layers": 1})
    shutil.copy(folder / "model.safetensors", folder / "whole")
    return folder


@settings(max_examples=100)
@given(st.data())
def test_a_file_cut_or_damaged_anywhere_never_gives_a_traceback(small_folder: Path, data: Any) -> None:
    folder, content = small_folder, (small_folder / "whole").read_bytes()
    header = 8 + struct.unpack_from("<Q", content)[0]
    cut = data.draw(st.one_of(st.integers(0, header), st.integers(0, len(content) - 1)))
    (folder / "model.safetensors").write_bytes(content[:cut])
    with pytest.raises(UserError):
        open_model(folder)
    damaged = bytearray(content)
    damaged[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    (folder / "model.safetensors").write_bytes(damaged)
    try:
        open_model(folder).close()
    except UserError as error:
        assert "\n" not in str(error)
