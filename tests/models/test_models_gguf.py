"""GGUF files open as ModelSpecs: right units and bytes, header only, and any damage is a one-line error."""

import os
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import Shape, write_gguf

from pshard.errors import UserError
from pshard.models import open_model
from pshard.models.gguf_header import TENSOR_TYPES, read_gguf
from pshard.quant import QUANT_TYPES, align


def test_tensor_type_numbers_are_those_of_the_gguf_package() -> None:
    assert set(TENSOR_TYPES.values()) == set(QUANT_TYPES) - {"FP8"}  # which only folders have
    known = {n: name for n, name in TENSOR_TYPES.items() if name != "Q2_0"}  # which the package does not have yet
    assert all(gguf.GGMLQuantizationType(n).name == name for n, name in known.items())


def test_units_come_in_execution_order_with_matrices_first(tmp_path: Path) -> None:
    with open_model(write_gguf(tmp_path / "m.gguf", "qwen3", n_layers=2)) as model:
        units = model.spec.units
    names = ["embedding", "blk.0.attention", "blk.0.ffn", "blk.1.attention", "blk.1.ffn", "output"]
    assert [u.name for u in units] == names
    assert [u.layer for u in units] == [-1, 0, 0, 1, 1, -1]
    assert [t.role for t in units[1].tensors] == [
        *("attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight"),
        *("attn_norm.weight", "attn_q_norm.weight", "attn_k_norm.weight"),
    ]
    assert [t.role for t in units[2].tensors] == [
        "ffn_gate.weight",
        "ffn_up.weight",
        "ffn_down.weight",
        "ffn_norm.weight",
    ]
    assert [t.role for t in units[5].tensors] == ["output.weight", "output_norm.weight"]
    assert units[2].tensors[2].shape == (256, 512)


@pytest.mark.parametrize(
    ("arch", "pairing", "qk_norm", "biases"),
    [("llama", "adjacent", False, 0), ("qwen2", "halves", False, 3), ("qwen3", "halves", True, 0)],
)
def test_architectures_differ_as_their_table_says(
    tmp_path: Path, arch: str, pairing: str, qk_norm: bool, biases: int
) -> None:
    with open_model(write_gguf(tmp_path / "m.gguf", arch, rope_base=5e5, norm_eps=1e-5)) as model:
        config, attention = model.spec.config, model.spec.unit("blk.1.attention")
    assert (config.rope.pairing, config.qk_norm) == (pairing, qk_norm)
    assert (config.rope.base, config.rope.dims, config.rope.scaling) == (5e5, 64, "none")
    assert config.norm_eps == pytest.approx(1e-5)
    sizes = (config.n_layers, config.d_model, config.n_heads, config.n_kv_heads, config.head_dim, config.d_ffn)
    assert sizes == (2, 256, 4, 2, 64, 512) and (config.vocab, config.context) == (320, 512)
    assert sum(t.role.endswith("bias") for t in attention.tensors) == biases


def test_biases_that_llama_may_have_join_its_units(tmp_path: Path) -> None:
    extra = {f"blk.{i}.attn_{r}.bias": np.ones(n) for i in range(2) for r, n in (("q", 256), ("k", 128), ("v", 128))}
    with open_model(write_gguf(tmp_path / "m.gguf", "llama", extra=extra)) as model:
        attention = model.spec.unit("blk.0.attention")
    assert [t.role for t in attention.tensors[4:]] == ["attn_norm.weight", "attn_q.bias", "attn_k.bias", "attn_v.bias"]


def test_a_tied_model_uses_its_embedding_as_head(tmp_path: Path) -> None:
    with open_model(write_gguf(tmp_path / "m.gguf", "qwen2", tied=True)) as model:
        assert [t.name for t in model.spec.unit("output").tensors] == ["token_embd.weight", "output_norm.weight"]


@pytest.mark.parametrize(
    "qtype", [q for q in QUANT_TYPES if q not in ("Q2_0", "FP8")]
)  # which its reader does not know
def test_raw_bytes_are_those_that_the_gguf_reader_sees(tmp_path: Path, qtype: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype=qtype, qtypes={"ffn_down.weight": "Q8_0"}, n_layers=1)
    expected = {t.name: t for t in gguf.GGUFReader(path).tensors}
    with open_model(path) as model:
        for unit in model.spec.units:
            for tensor in unit.tensors:
                raw = model.tensor_bytes(tensor.name)
                reference = np.ascontiguousarray(expected[tensor.name].data)
                np.testing.assert_array_equal(raw.reshape(-1), reference.view(np.uint8).reshape(-1))
                assert raw.nbytes == tensor.file_nbytes and not raw.flags.writeable
                assert tensor.qtype == expected[tensor.name].tensor_type.name
        assert model.tensor_bytes("blk.0.ffn_up.weight").shape[0] == 512


def test_arrays_outlive_the_model(tmp_path: Path) -> None:
    model = open_model(write_gguf(tmp_path / "m.gguf"))
    raw = model.tensor_bytes("output_norm.weight")
    before = raw.copy()
    model.close()
    np.testing.assert_array_equal(raw, before)


def test_metadata_values_read_as_the_gguf_reader_reads_them(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "a.text": "Grüße\n",
        "a.flag": True,
        "a.small": -3,
        "a.real": 0.25,
        "a.words": ["x", "", "中文"],
        "a.numbers": [1.5, -2.0],
        "a.flags": [True, False],
    }
    path = write_gguf(tmp_path / "m.gguf", metadata=values)
    reader = gguf.GGUFReader(path)
    with open_model(path) as model:
        assert {k: model.metadata[k] for k in values} == values
        fields = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.")}
        assert model.metadata == {k: f.contents() for k, f in fields.items()}


def write_split(folder: Path, parts: int) -> list[Path]:
    """The tensors of a tiny llama dealt out over `parts` files, as the split tool names and marks them."""
    whole = gguf.GGUFReader(write_gguf(folder / "whole.gguf", qtype="Q4_0"))
    tensors = whole.tensors
    paths = [folder / f"m-{i + 1:05d}-of-{parts:05d}.gguf" for i in range(parts)]
    for i, path in enumerate(paths):
        writer = gguf.GGUFWriter(str(path), "llama")
        if i == 0:
            for field in whole.fields.values():
                if field.name.startswith("llama."):
                    writer.add_key_value(field.name, field.contents(), field.types[0])
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", len(tensors))
        for tensor in tensors[i::parts]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_any_part_of_a_split_model_opens_all_of_it(tmp_path: Path) -> None:
    paths = write_split(tmp_path, 3)
    with open_model(tmp_path / "whole.gguf") as whole, open_model(paths[1]) as split:
        assert split.spec.units == whole.spec.units
        for unit in whole.spec.units:
            for tensor in unit.tensors:
                np.testing.assert_array_equal(split.tensor_bytes(tensor.name), whole.tensor_bytes(tensor.name))
        assert split.fingerprint_inputs()[-1][1].count(",") == 2


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    paths = write_split(tmp_path, 3)
    paths[1].unlink()
    with pytest.raises(UserError, match=r"m-00002-of-00003\.gguf"):
        open_model(paths[0])


def test_a_renamed_part_is_refused(tmp_path: Path) -> None:
    paths = write_split(tmp_path, 2)
    with pytest.raises(UserError, match="split in 2"):
        open_model(paths[0].rename(tmp_path / "only.gguf"))


def test_fingerprint_changes_with_what_a_plan_depends_on(tmp_path: Path) -> None:
    def inputs(name: str, **change: Any) -> dict[str, str]:
        with open_model(write_gguf(tmp_path / name, **{"arch": "qwen3", **change})) as model:
            return dict(model.fingerprint_inputs())

    base = inputs("a.gguf")
    assert inputs("b.gguf") | {"model file sizes": ""} == base | {"model file sizes": ""}
    quantised = inputs("c.gguf", qtype="Q4_0")
    assert quantised["tensor shapes and quant types"] != base["tensor shapes and quant types"]
    assert inputs("d.gguf", rope_base=5e5)["model configuration"] != base["model configuration"]
    assert inputs("e.gguf", arch="llama")["architecture"] == "llama"


ROPE = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ("none", 1.0, 0, None)),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, ("none", 1.0, 0, None)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, ("linear", 4.0, 0, None)),
        ({"rope.scaling.factor": 2.0}, ("linear", 2.0, 0, None)),
        ({"rope.scale_linear": 2.0}, ("linear", 2.0, 0, None)),
        ({"rope.scaling.factor": 0.0}, ("none", 1.0, 0, None)),
        (ROPE, ("yarn", 4.0, 128, 0.1 * np.log(4) + 1)),
        (ROPE | {"rope.scaling.factor": None}, ("yarn", 1.0, 128, 1.0)),  # not 512 / 128
        (ROPE | {"rope.scaling.factor": 0.0}, ("yarn", 1.0, 128, 1.0)),
        (ROPE | {"rope.scaling.factor": None, "rope.scale_linear": 2.0}, ("yarn", 2.0, 128, 0.1 * np.log(2) + 1)),
        (ROPE | {"rope.scaling.attn_factor": 0.5}, ("yarn", 4.0, 128, 0.5 * (0.1 * np.log(4) + 1))),
        (ROPE | {"rope.scaling.yarn_attn_factor": 1.0}, ("yarn", 4.0, 128, 0.1 * np.log(4) + 1)),  # as llama.cpp
    ],
)
def test_rope_scaling_is_read_from_its_keys(tmp_path: Path, keys: dict[str, Any], expected: tuple) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen2", metadata={f"qwen2.{k}": v for k, v in keys.items()})
    with open_model(path) as model:
        rope = model.spec.config.rope
    assert (rope.scaling, rope.factor, rope.original_context) == expected[:3]
    assert rope.attention_factor == (None if expected[3] is None else pytest.approx(expected[3]))


def test_rope_factors_of_the_file_are_read(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 32).astype(np.float32)
    with open_model(write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": factors})) as model:
        assert model.spec.config.rope.freq_factors == tuple(factors.tolist())


def test_settings_per_layer_that_are_all_equal_are_one(tmp_path: Path) -> None:
    keys = {"llama.attention.head_count": [4, 4], "llama.feed_forward_length": [512, 512]}
    with open_model(write_gguf(tmp_path / "m.gguf", metadata=keys)) as model:
        assert (model.spec.config.n_heads, model.spec.config.d_ffn) == (4, 512)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        (
            {"general.architecture": "qwen4"},
            "'qwen4' is not supported yet; take a model of one of these: apertus, arcee, ",
        ),
        ({"general.architecture": None}, "architecture None"),
        ({"llama.attention.head_count": [4, 2]}, "head_count differs from layer to layer"),
        ({"llama.attention.head_count": "four"}, "head_count is 'four'"),
        ({"llama.attention.head_count_kv": 3}, "4 query heads are not a multiple of 3"),
        ({"llama.attention.value_length": 32}, "keys and values of different lengths"),
        ({"llama.rope.dimension_count": 32}, "rotates 32 of 64 dimensions"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
        ({"llama.rope.freq_base": 0.0}, "rope.freq_base is 0.0"),
        ({"llama.rope.freq_base": 1e-40}, "rope.freq_base is 1e-40, where models have 2 to 1e"),
        ({"llama.rope.scaling.factor": 1e-30}, "rope.scaling.factor is 1e-30, where models have 0.001 to 1e"),
        ({"llama.attention.layer_norm_rms_epsilon": 1e10}, "rms_epsilon is 1e.10, where models have"),
        ({"llama.vocab_size": 319}, "token_embd.weight has 320 rows, but the vocabulary 319 tokens"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"]},
            "320 rows, but the vocabulary 2 tokens",
        ),
        (
            {"llama.attention.sliding_window": 128},
            "sliding-window attention .a window of 128 tokens in a context of 512",
        ),
        ({"llama.embedding_length": None}, "llama.embedding_length is missing"),
        ({"llama.block_count": 3}, "tensor blk.2.attn_norm.weight of shape .256. is missing"),
        ({"llama.block_count": 2**31}, "blk.2.attn_norm.weight"),
        ({"llama.rope.scaling.alpha": 3.0}, "rope.scaling.alpha is 3.0, which is not supported yet"),
        ({"llama.attention.key_length": 2**30}, "attention.key_length is 1073741824, where heads have a few hundred"),
        ({"llama.block_count": 1}, "tensor blk.1.attn_norm.weight has no place"),
        ({"llama.feed_forward_length": 256}, r"blk.0.ffn_gate.weight has shape \[512, 256\], not the \[256, 256\]"),
        ({"general.alignment": 48}, "alignment is 48"),
    ],
)
def test_what_cannot_be_run_is_named(tmp_path: Path, metadata: dict[str, Any], says: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(UserError, match=says) as caught:
        open_model(path)
    assert "m.gguf" in str(caught.value)


def test_a_window_as_long_as_the_context_is_full_attention(tmp_path: Path) -> None:
    with open_model(write_gguf(tmp_path / "m.gguf", metadata={"llama.attention.sliding_window": 512})) as model:
        assert model.spec.config.sliding_window == 512


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"blk.1.ffn_up.weight of shape \[512, 256\] is missing"):
        open_model(write_gguf(tmp_path / "m.gguf", omit=("blk.1.ffn_up.weight",)))


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"blk\.0\.mystery\.weight has no place"):
        open_model(write_gguf(tmp_path / "m.gguf", extra={"blk.0.mystery.weight": np.ones(4)}))


def test_an_unsupported_quant_type_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", qtype="Q4_0", n_layers=1)
    data = bytearray(path.read_bytes())
    entry = data.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 16
    assert struct.unpack_from("<I", data, entry) == (2,)
    struct.pack_into("<I", data, entry, 28)
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"blk\.0\.ffn_up\.weight has type F64, which is not supported; supported: F32"):
        open_model(path)
    struct.pack_into("<I", data, entry, 9999)
    path.write_bytes(data)
    with pytest.raises(UserError, match="has type number 9999"):
        open_model(path)


def entry_fields(data: bytes, name: str) -> tuple[int, int]:
    """Where a matrix's type and offset stand in the header."""
    at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name) + 4 + 16
    return at, at + 4


def move(path: Path, name: str, change: Any) -> None:
    """Put another offset into the header."""
    data = bytearray(path.read_bytes())
    _, at = entry_fields(data, name)
    struct.pack_into("<Q", data, at, change(*struct.unpack_from("<Q", data, at)))
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("blk.0.ffn_up.weight", lambda at: at + 1),
        ("blk.0.ffn_up.weight", lambda at: at - 32),
        ("blk.0.ffn_up.weight", lambda at: 0),
        ("blk.0.ffn_up.weight", lambda at: at - 512 * 256 // 32 * 18),  # onto ffn_gate, which has its size
        ("token_embd.weight", lambda at: 32),
        ("output.weight", lambda at: at + 32),
        ("output.weight", lambda at: 2**63),
    ],
)
def test_an_offset_that_was_moved_is_named(tmp_path: Path, name: str, change: Any) -> None:
    path = write_gguf(tmp_path / "m.gguf", qtype="Q4_0")
    move(path, name, change)
    with pytest.raises(UserError, match=rf"m\.gguf: tensor {name} begins at byte .* fetch it again"):
        open_model(path)


def test_offsets_that_two_tensors_of_one_size_exchanged_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", qtype="Q4_0")
    nbytes = 512 * 256 // 32 * 18
    move(path, "blk.0.ffn_gate.weight", lambda at: at + nbytes)
    move(path, "blk.0.ffn_up.weight", lambda at: at - nbytes)
    with pytest.raises(UserError, match=r"tensor blk.0.ffn_gate.weight begins at byte"):
        open_model(path)


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("blk.0.ffn_up.weight", 8, r"tensor blk.0.ffn_down.weight begins .* blk.0.ffn_up.weight \(Q8_0\) before it"),
        ("blk.0.ffn_up.weight", 0, "tensor blk.0.ffn_down.weight begins at byte"),
        ("blk.0.ffn_up.weight", 14, "tensor blk.0.ffn_down.weight begins at byte"),
        ("output.weight", 8, "tensor output.weight ends .* bytes beyond the end of the file"),
        ("output.weight", 39, r"bytes follow output.weight \(MXFP4\), the last tensor"),
    ],
)
def test_a_type_of_another_size_is_named(tmp_path: Path, name: str, kind: int, says: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", qtype="Q4_0")
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, entry_fields(data, name)[0], kind)
    path.write_bytes(data)
    with pytest.raises(UserError, match=says):
        open_model(path)


@pytest.mark.parametrize("more", [1, 31, 32, 4096])
def test_what_is_appended_to_a_file_is_said(tmp_path: Path, more: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", qtype="Q4_0")
    path.write_bytes(path.read_bytes() + bytes(more))
    with pytest.raises(UserError, match=rf"{more} bytes follow output.weight \(Q4_0\), the last tensor"):
        open_model(path)


def test_the_last_tensor_needs_no_padding(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", head_dim=36, extra={"rope_freqs.weight": np.ones(18, np.float32)})
    whole = path.read_bytes()
    path.write_bytes(whole[:-24])
    open_model(path).close()
    path.write_bytes(whole[:-12])
    with pytest.raises(UserError, match=r"12 bytes follow rope_freqs.weight"):
        open_model(path)


@pytest.mark.parametrize("lost", [1, 7, 24, 31])
def test_a_header_that_lost_bytes_shifts_no_weights(tmp_path: Path, lost: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", qtype="Q4_0", metadata={"general.description": "x" * 31})
    data = path.read_bytes()
    at = data.index(b"x" * 31)
    path.write_bytes(data[: at - 8] + struct.pack("<Q", 31 - lost) + data[at + lost :])
    with pytest.raises(UserError, match=r"fetch it again"):
        open_model(path)


def test_a_smaller_type_that_leaves_weights_as_padding_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen2", alignment=1024)  # a bias of 256 float16 would be padded to the same
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, entry_fields(data, "blk.0.attn_q.bias")[0] - 8, 1)
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"tensor \S+ has no padding before it, behind blk.0.attn_q.bias \(F16\)"):
        open_model(path)


def test_a_file_of_another_alignment_opens(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", "qwen2", qtype="Q4_0")
    path = write_gguf(tmp_path / "m.gguf", "qwen2", qtype="Q4_0", alignment=4096)
    with open_model(path) as model, open_model(whole) as expected:
        for name in ("blk.0.attn_k.bias", "output.weight"):
            np.testing.assert_array_equal(model.tensor_bytes(name), expected.tensor_bytes(name))
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, data.index(b"general.alignment") + 17 + 4, 2048)
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"begins at byte|bytes follow"):
        open_model(path)


def test_a_tensor_name_that_runs_into_what_follows_is_damage(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, data.index(b"blk.0.ffn_up.weight") - 8, 5000)
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"a tensor's name has \d+ letters: the file is damaged"):
        open_model(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "the file is empty"),
        (b"PK\x03\x04 something else", "not a GGUF file"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1"),
        (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "GGUF version 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), "ends inside its header"),
    ],
)
def test_what_is_no_gguf_file_is_said(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError, match=says):
        open_model(path)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"none.gguf: there is no such file; give .* ORG/REPO:QUANT; pshard models lists"
    ):
        open_model(tmp_path / "none.gguf")


def test_version_2_reads_like_version_3(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    with open_model(path) as model:
        expected = model.spec
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 4, 2)
    path.write_bytes(data)
    with open_model(path) as model:
        assert model.spec == expected


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = {"tokenizer.ggml.tokens": ["a", "bc", "é"], "a.reals": [1.0, 2.0]}
    path = tmp_path_factory.mktemp("small") / "m.gguf"
    return write_gguf(path, "qwen3", qtype="Q2_K", n_layers=1, metadata=words)


@settings(max_examples=200)
@given(st.data())
def test_a_file_cut_anywhere_is_a_one_line_error(
    small_file: Path, tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    content = small_file.read_bytes()
    header = content.index(b"output.weight") + 64
    end = data.draw(st.one_of(st.integers(0, header), st.integers(0, len(content) - 1)))
    path = tmp_path_factory.getbasetemp() / "cut.gguf"
    path.write_bytes(content[:end])
    with pytest.raises(UserError) as caught:
        open_model(path)
    assert "\n" not in str(caught.value)


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_header_opens_or_is_a_user_error(
    small_file: Path, tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    damaged = bytearray(small_file.read_bytes())
    header = damaged.index(b"output.weight") + 64
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, header))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        with open_model(path) as model:
            model.fingerprint_inputs()
            for unit in model.spec.units:
                for tensor in unit.tensors:
                    assert model.tensor_bytes(tensor.name).nbytes == tensor.file_nbytes
            model.tokenizer()
    except UserError:
        pass


def test_opening_reads_only_the_header_of_a_large_file(tmp_path: Path) -> None:
    sizes = Shape(n_layers=64, d_model=5120, n_heads=64, n_kv_heads=8, head_dim=128, d_ffn=25600, vocab=151936)
    path = tmp_path / "large.gguf"
    writer = gguf.GGUFWriter(str(path), "qwen3")
    numbers = {
        **{"block_count": 64, "context_length": 32768, "embedding_length": 5120, "feed_forward_length": 25600},
        **{"attention.head_count": 64, "attention.head_count_kv": 8, "attention.key_length": 128},
    }
    for key, value in numbers.items():
        writer.add_uint32(f"qwen3.{key}", value)
    writer.add_uint32("qwen3.attention.value_length", 128)
    writer.add_float32("qwen3.attention.layer_norm_rms_epsilon", 1e-6)
    tokens = [f"token{i}" for i in range(151936)]
    writer.add_token_list(tokens)
    writer.add_token_merges([f"{t} {t}" for t in tokens])
    total = 0
    for name, dims in sizes.tensors("qwen3", tied=False):
        if len(dims) == 1:
            writer.add_tensor_info(name, dims, np.dtype(np.float32), 4 * dims[0])
            total += align(4 * dims[0], 32)
        else:
            row = (dims[0], dims[1] // 32 * 18)
            nbytes = row[0] * row[1]
            writer.add_tensor_info(name, row, np.dtype(np.uint8), nbytes, gguf.GGMLQuantizationType.Q4_0)
            total += align(nbytes, 32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, align(path.stat().st_size, 32) + total)  # sparse: nothing is written
    assert path.stat().st_size > 18 * 10**9
    before = psutil.Process().memory_info().rss
    start = time.process_time()
    model = open_model(path)
    seconds = time.process_time() - start
    grown = psutil.Process().memory_info().rss - before
    assert len(model.spec.units) == 130
    assert seconds < 2 and grown < 200e6  # 0.2 s and 50 MB; the rest is room for a busy machine
    assert len(read_gguf(path).metadata["tokenizer.ggml.tokens"]) == 151936
    model.close()
