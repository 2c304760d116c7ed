"""GGUF files with routed experts open as routers and stacks of experts; numbers that do not fit are one line."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from model_files import Shape, write_gguf

from pshard.errors import UserError
from pshard.model_config import Experts
from pshard.models import ModelFile, open_model
from pshard.quant import QUANT_TYPES
from pshard.runtime.memory.kv_store import fingerprint_model
from pshard.units.attention import ATTENTION, WINDOWED_ATTENTION

ROUTED = {
    "mixtral": Experts(8, 2, 256),
    "qwen2moe": Experts(8, 2, 256, normed=False, d_shared=256, shared_gate=True),
    "qwen3moe": Experts(8, 2, 256),
    "glm4moe": Experts(8, 2, 256, "sigmoid", scale=1.5, choice_bias=True, d_shared=256, dense_layers=1),
}
STACKS = tuple(f"ffn_{part}_exps.weight" for part in ("gate", "up", "down"))
SHARED = ["ffn_gate_shexp.weight", "ffn_up_shexp.weight", "ffn_down_shexp.weight", "ffn_gate_inp_shexp.weight"]


def compare_bytes(model: ModelFile, path: Path) -> None:
    """Every tensor's bytes are those that the gguf package reads, each expert's those of its slab."""
    expected = {t.name: np.ascontiguousarray(t.data).view(np.uint8) for t in gguf.GGUFReader(path).tensors}
    expected |= {name.replace("post_attention_norm", "ffn_norm"): data for name, data in expected.items()}
    model.map_files(lambda address, nbytes: None, lambda address: None)
    for unit in model.spec.units:
        for tensor in unit.tensors:
            raw = model.tensor_bytes(tensor.name)
            np.testing.assert_array_equal(raw.reshape(-1), expected[tensor.name].reshape(-1))
            assert raw.nbytes == tensor.file_nbytes and not raw.flags.writeable
            for part in range(tensor.parts):
                rows = tensor.rows // tensor.parts
                np.testing.assert_array_equal(model.part_bytes(tensor.name, part), raw[part * rows : (part + 1) * rows])
                run = model.run_bytes(tensor.name, part, tensor.parts)
                np.testing.assert_array_equal(run, raw[part * rows :])
                assert np.shares_memory(run, raw)


@pytest.mark.parametrize("arch", ROUTED)
def test_a_layer_with_experts_is_attention_router_and_experts(tmp_path: Path, arch: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", arch)
    with open_model(path) as model:
        assert model.spec.config.experts == ROUTED[arch]
        shared = ["shared"] if ROUTED[arch].d_shared else []
        layer = [u for u in model.spec.units if u.layer == 1]
        assert [u.name for u in layer] == [f"blk.1.{what}" for what in ("attention", "router", *shared, "experts")]
        router, experts = layer[1], layer[-1]
        bias = ["exp_probs_b.bias"] if ROUTED[arch].choice_bias else []
        assert [t.role for t in router.tensors] == ["ffn_gate_inp.weight", "ffn_norm.weight", *bias]
        if shared:
            assert [t.role for t in layer[2].tensors] == SHARED[: 4 if arch == "qwen2moe" else 3]
        assert [(t.role, t.shape, t.parts) for t in experts.tensors] == [(s, (2048, 256), 8) for s in STACKS]
        assert router.tensors[0].parts == 0
        compare_bytes(model, path)


READ_BY_GGUF = [qtype for qtype in QUANT_TYPES if qtype in gguf.GGMLQuantizationType.__members__]  # not Q2_0


@pytest.mark.parametrize("qtype", READ_BY_GGUF)
def test_each_experts_bytes_are_a_slab_of_the_stack(tmp_path: Path, qtype: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype=qtype, n_layers=1, d_expert=512, n_experts=3)
    with open_model(path) as model:
        assert model.spec.unit("blk.0.experts").tensors[2].shape == (3 * 256, 512)
        compare_bytes(model, path)


@pytest.mark.parametrize("qtype", ["F32", "Q4_0", "Q6_K"])
def test_fused_gate_and_up_are_split_expert_by_expert(tmp_path: Path, qtype: str) -> None:
    def name(role: str) -> str:
        return f"blk.0.ffn_{role}_exps.weight"

    apart = write_gguf(tmp_path / "apart.gguf", "qwen2moe", qtype=qtype, n_layers=1)
    fused = fuse_gate_and_up(apart, tmp_path / "fused.gguf")
    with open_model(apart) as one, open_model(fused) as other:
        assert one.spec.units == other.spec.units
        for role in ("gate", "up", "down"):
            np.testing.assert_array_equal(one.tensor_bytes(name(role)), other.tensor_bytes(name(role)))
            np.testing.assert_array_equal(one.part_bytes(name(role), 5), other.part_bytes(name(role), 5))
            other.forget_tensor(name(role))
        assert fingerprint_model(one) == fingerprint_model(other)


def fuse_gate_and_up(path: Path, to: Path, rows: slice = slice(None)) -> Path:
    """The same file with gate and up of each expert in one tensor, gate's rows first."""
    reader = gguf.GGUFReader(path)
    tensors = {t.name: t for t in reader.tensors}
    writer = gguf.GGUFWriter(str(to), reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith(f"{writer.arch}."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for name, tensor in tensors.items():
        if name.endswith("ffn_gate_exps.weight"):
            both = np.concatenate([tensor.data, tensors[name.replace("gate", "up")].data], 1)[:, rows]
            name = name.replace("gate", "gate_up")
            writer.add_tensor(name, np.ascontiguousarray(both), raw_dtype=tensor.tensor_type)
        elif not name.endswith("ffn_up_exps.weight"):
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def test_a_fused_stack_with_a_row_too_few_is_named(tmp_path: Path) -> None:
    path = fuse_gate_and_up(write_gguf(tmp_path / "m.gguf", "qwen3moe"), tmp_path / "odd.gguf", slice(0, 511))
    with pytest.raises(UserError, match=r"ffn_gate_up_exps.weight has shape \[8, 511, 256\], not the \[8, 512, 256\]"):
        open_model(path)


def test_the_gate_of_the_shared_expert_may_be_a_matrix_of_one_row(tmp_path: Path) -> None:
    row = np.ones((1, 256), np.float32)
    extra = {f"blk.{i}.ffn_gate_inp_shexp.weight": row for i in range(2)}
    with open_model(write_gguf(tmp_path / "m.gguf", "qwen2moe", extra=extra)) as model:
        assert model.spec.unit("blk.0.shared").by_role["ffn_gate_inp_shexp.weight"].shape == (256,)
        assert model.tensor_bytes("blk.0.ffn_gate_inp_shexp.weight").shape == (1024,)


def test_rows_of_experts_that_no_key_states_are_those_that_llama_cpp_takes(tmp_path: Path) -> None:
    metadata = {"qwen2moe.expert_feed_forward_length": None, "qwen2moe.expert_shared_feed_forward_length": None}
    path = write_gguf(tmp_path / "m.gguf", "qwen2moe", metadata=metadata, d_ffn=512, d_expert=256, d_shared=512)
    with open_model(path) as model:
        assert (model.spec.config.experts.d_expert, model.spec.config.experts.d_shared) == (256, 512)
    path = write_gguf(
        tmp_path / "x.gguf", "mixtral", metadata={"llama.expert_feed_forward_length": None}, d_ffn=512, d_expert=512
    )
    with open_model(path) as model:
        assert model.spec.config.experts.d_expert == 512


def test_what_a_file_says_of_its_router_counts(tmp_path: Path) -> None:
    keys = {"expert_gating_func": 2, "expert_weights_norm": False, "expert_weights_scale": 2.5}
    groups = {"expert_group_count": 4, "expert_group_used_count": 2}
    metadata = {f"glm4moe.{key}": value for key, value in (keys | groups).items()}
    with open_model(write_gguf(tmp_path / "m.gguf", "glm4moe", metadata=metadata)) as model:
        found = model.spec.config.experts
        assert found and (found.scores, found.normed, found.scale) == ("sigmoid", False, 2.5)
        assert (found.groups, found.groups_used) == (4, 2)


@pytest.mark.parametrize(
    ("arch", "key", "value", "alike"),
    [
        ("qwen3moe", "expert_gating_func", 2, 3),
        ("qwen3moe", "expert_weights_norm", False, True),
        ("qwen3moe", "expert_weights_scale", 2.5, 0.0),
        ("qwen2moe", "expert_gating_func", 3, 1),
        ("qwen2moe", "expert_weights_norm", True, False),
        ("mixtral", "expert_weights_scale", 2.5, 1.0),
        ("gpt-oss", "expert_gating_func", 2, 1),
        ("gpt-oss", "expert_weights_scale", 2.5, 1.0),
    ],
)
def test_what_llama_cpp_does_not_read_of_a_router_must_say_what_it_does(
    tmp_path: Path, arch: str, key: str, value: object, alike: object
) -> None:
    called = "llama" if arch == "mixtral" else arch
    with open_model(write_gguf(tmp_path / "a.gguf", arch, metadata={f"{called}.{key}": alike})) as model:
        said = model.spec.config.experts
    with open_model(write_gguf(tmp_path / "b.gguf", arch)) as model:
        unsaid = model.spec.config.experts
    assert said and unsaid and (said.normed, said.scale) == (unsaid.normed, unsaid.scale)
    with pytest.raises(UserError, match=f"{called}.{key} is {value!r}, which is not supported yet"):
        open_model(write_gguf(tmp_path / "c.gguf", arch, metadata={f"{called}.{key}": value}))


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"expert_used_count": 9}, "a token takes 9 of 8 experts; take another file or model"),
        ({"expert_used_count": 0}, "expert_used_count is 0, not a whole number above 0"),
        ({"expert_used_count": None}, "expert_used_count is missing"),
        ({"expert_count": 0}, "expert_count is 0, not a whole number above 0"),
        ({"expert_count": None}, "expert_count is missing"),
        ({"expert_count": -1}, "expert_count is -1"),
        ({"expert_count": [8, 4]}, "expert_count differs from layer to layer"),
        ({"expert_count": 7}, r"blk.0.ffn_gate_inp.weight has shape \[8, 256\], not the \[7, 256\]"),
        ({"expert_count": 2**31}, r"blk.0.ffn_gate_inp.weight has shape"),
        (
            {"expert_feed_forward_length": 128},
            r"ffn_gate_exps.weight has shape \[8, 256, 256\], not the \[8, 128, 256\]",
        ),
        ({"expert_gating_func": 4}, "expert_gating_func is 4, which is not supported yet"),
        ({"expert_weights_norm": 1.0}, "expert_weights_norm is 1.0, not true or false"),
        ({"expert_weights_scale": -1.0}, "expert_weights_scale is -1.0, not a number above 0"),
        ({"expert_shared_count": 1}, "expert_shared_count is 1, which is not supported yet"),
        ({"expert_group_count": 3}, "a token takes 1 of 3 groups of 8 experts"),
        ({"expert_group_used_count": 2}, "a token takes 2 of 1 groups"),
        ({"expert_group_count": 8}, "8 groups of 8 experts have fewer than the two"),
        ({"expert_group_count": 4, "expert_used_count": 3}, "a token takes 3 experts from 1 of 4 groups of 8"),
        ({"leading_dense_block_count": 1}, r"tensor blk.0.ffn_gate.weight of shape \[512, 256\] is missing"),
        ({"leading_dense_block_count": -1}, "leading_dense_block_count is -1, not a whole number"),
    ],
)
def test_numbers_of_experts_that_do_not_fit_are_named(tmp_path: Path, metadata: dict[str, Any], says: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", metadata={f"qwen3moe.{k}": v for k, v in metadata.items()})
    with pytest.raises(UserError, match=says) as caught:
        open_model(path)
    assert "m.gguf" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("ffn_up_exps.weight", (2048, 256), r"ffn_up_exps.weight has shape \[2048, 256\], not the \[8, 256, 256\]"),
        ("ffn_down_exps.weight", (8, 256, 16, 16), r"has shape \[8, 256, 16, 16\]"),
        ("ffn_gate_inp.weight", (2048,), r"ffn_gate_inp.weight has shape \[2048\], not the \[8, 256\]"),
        ("ffn_gate.0.weight", (256, 256), "ffn_gate.0.weight holds one expert, as old files do; convert the model"),
        ("ffn_gate_exps.bias", (8, 256), "ffn_gate_exps.bias has no place in architecture qwen3_moe"),
        ("ffn_gate_shexp.weight", (256, 256), "ffn_gate_shexp.weight has no place"),
    ],
)
def test_tensors_of_another_rank_or_place_are_named(tmp_path: Path, name: str, shape: Any, says: str) -> None:
    extra = {f"blk.0.{name}": np.zeros(shape, np.float32)}
    with pytest.raises(UserError, match=says):
        open_model(write_gguf(tmp_path / "m.gguf", "qwen3moe", extra=extra, n_layers=1))


def test_glm_has_dense_layers_first_and_rotates_half_of_a_head(tmp_path: Path) -> None:
    with open_model(write_gguf(tmp_path / "m.gguf", "glm4moe", n_layers=3, dense_layers=2)) as model:
        config, names = model.spec.config, [u.name for u in model.spec.units[1:-1]]
        biases = [t.role for t in model.spec.unit("blk.2.attention").tensors if t.role.endswith("bias")]
    layers = [("attention", "ffn"), ("attention", "ffn"), ("attention", "router", "shared", "experts")]
    assert names == [f"blk.{i}.{unit}" for i, units in enumerate(layers) for unit in units]
    assert (config.rope.dims, config.rope.pairing, config.head_dim) == (32, "halves", 64)
    assert (config.d_ffn, config.qk_norm, biases) == (512, False, ["attn_q.bias", "attn_k.bias", "attn_v.bias"])


def test_glm_files_with_norms_of_heads_and_without_biases_open(tmp_path: Path) -> None:
    norms = {f"blk.{i}.attn_{part}_norm.weight": np.ones(64) for i in range(2) for part in "qk"}
    biases = tuple(f"blk.{i}.attn_{part}.bias" for i in range(2) for part in "qkv")
    with open_model(write_gguf(tmp_path / "m.gguf", "glm4moe", extra=norms, omit=biases)) as model:
        roles = [t.role for t in model.spec.unit("blk.1.attention").tensors]
    assert model.spec.config.qk_norm
    assert roles[4:] == ["attn_norm.weight", "attn_q_norm.weight", "attn_k_norm.weight"]


def write_with_drafter(path: Path, **more: Any) -> Path:
    """A GLM of two layers and one that drafts tokens, as published files have it."""
    head = {"attn_norm": (256,), "attn_q": (256, 256), "nextn.eh_proj": (256, 512), "nextn.enorm": (256,)}
    extra = {f"blk.2.{role}.weight": np.ones(shape) for role, shape in head.items()}
    metadata = {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1} | more
    return write_gguf(path, "glm4moe", extra=extra, metadata=metadata)


def test_a_layer_that_drafts_tokens_is_left_out_with_a_note(tmp_path: Path) -> None:
    with open_model(write_gguf(tmp_path / "plain.gguf", "glm4moe")) as plain:
        assert plain.notes == ()
        with open_model(write_with_drafter(tmp_path / "m.gguf")) as model:
            assert [u.name for u in model.spec.units] == [u.name for u in plain.spec.units]
            assert len(model.notes) == 1 and "multi-token head" in model.notes[0]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"glm4moe.nextn_predict_layers": 0}, r"tensor blk\.2\.attn_q.bias of shape .* is missing"),
        ({"glm4moe.nextn_predict_layers": 3}, "nextn_predict_layers is 3, which leaves no layer of 3"),
        ({"glm4moe.nextn_predict_layers": -1}, "nextn_predict_layers is -1, not a whole number"),
        ({"glm4moe.nextn_predict_layers": 2}, "the first 1 of 1 layers have no experts, which leaves none with"),
        ({"glm4moe.block_count": 2}, "the first 1 of 1 layers have no experts"),
        ({"glm4moe.expert_shared_count": None}, "expert_shared_count is missing"),
        ({"glm4moe.expert_shared_count": 2}, r"ffn_gate_shexp.weight has shape .256, 256., not the .512, 256."),
        ({"glm4moe.expert_shared_count": 0}, r"ffn_gate_shexp.weight has no place"),
        ({"glm4moe.rope.dimension_count": 33}, "rotates 33 of 64 dimensions per head, which are not pairs"),
        ({"glm4moe.rope.dimension_count": 66}, "rotates 66 of 64 dimensions"),
    ],
)
def test_numbers_of_glm_that_do_not_fit_are_named(tmp_path: Path, more: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        open_model(write_with_drafter(tmp_path / "m.gguf", **more))


def test_no_layer_of_the_model_is_left_out_for_one_that_drafts(tmp_path: Path) -> None:
    metadata = {"glm4moe.nextn_predict_layers": 1}
    path = write_gguf(tmp_path / "m.gguf", "glm4moe", n_layers=3, metadata=metadata)
    with pytest.raises(UserError, match=r"nextn_predict_layers is 1, but layer 2 is none of those that draft"):
        open_model(path)


@pytest.mark.parametrize(
    ("arch", "name", "shape"),
    [("glm4moe", "ffn_norm.weight", (256,)), ("qwen3moe", "ffn_gate_up_exps.weight", (8, 512, 256))],
)
def test_a_tensor_that_is_there_under_two_names_is_refused(tmp_path: Path, arch: str, name: str, shape: Any) -> None:
    with pytest.raises(UserError, match="is there twice, under different names"):
        open_model(write_gguf(tmp_path / "m.gguf", arch, extra={f"blk.1.{name}": np.ones(shape)}))


def test_experts_that_would_share_records_are_refused(tmp_path: Path) -> None:
    types = dict.fromkeys(STACKS, "F16")
    open_model(write_gguf(tmp_path / "plain.gguf", "qwen3moe", qtypes=types, d_expert=40)).close()
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtypes=types | {STACKS[1]: "Q4_0"}, d_expert=40)
    with pytest.raises(UserError, match=r"ffn_up_exps.weight has experts of 40 rows in Q4_0, which records of 16 rows"):
        open_model(path)


def test_gpt_oss_has_sinks_and_a_window_in_every_second_layer(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "gpt-oss", qtype="Q8_0", qtypes=dict.fromkeys(STACKS, "MXFP4"), n_layers=4)
    with open_model(path) as model:
        kinds = [u.kind for u in model.spec.units if u.kind in (ATTENTION, WINDOWED_ATTENTION)]
        assert kinds == [WINDOWED_ATTENTION, ATTENTION] * 2
        config, attention = model.spec.config, model.spec.unit("blk.1.attention")
        assert config.experts == Experts(8, 2, 256, "chosen", activation="clamped", biases=True)
        assert (config.sliding_window, config.window_every, config.rope.rounded) == (32, 2, False)
        assert {"attn_sinks.weight", "attn_output.bias"} <= attention.by_role.keys()
        assert [t.role for t in model.spec.unit("blk.1.router").tensors[1:]] == ["ffn_norm.weight", "ffn_gate_inp.bias"]
        experts = model.spec.unit("blk.1.experts")
        assert [(t.qtype, t.shape) for t in experts.tensors] == [("MXFP4", (2048, 256))] * 3 + [("F32", (2048,))] * 3
        compare_bytes(model, path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("attn_sinks.weight", r"blk.0.attn_sinks.weight of shape \[4\] is missing"),
        ("ffn_gate_inp.bias", r"ffn_gate_inp.bias of shape \[8\] is missing"),
        ("ffn_up_exps.bias", r"ffn_up_exps.bias of shape \[8, 256\] is missing"),
    ],
)
def test_a_tensor_that_gpt_oss_lacks_is_named_first(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        open_model(write_gguf(tmp_path / "m.gguf", "gpt-oss", omit=(f"blk.0.{name}",)))


def test_a_dense_architecture_with_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"qwen3\.expert_count is 8, which is not supported"):
        open_model(write_gguf(tmp_path / "m.gguf", "qwen3", metadata={"qwen3.expert_count": 8}))


def test_a_llama_without_experts_is_no_mixtral(tmp_path: Path) -> None:
    with open_model(write_gguf(tmp_path / "m.gguf", "llama", metadata={"llama.expert_count": 0})) as model:
        assert model.spec.config.experts is None and model.spec.config.architecture == "llama"


def test_all_tensors_of_a_true_size_find_their_place() -> None:
    assert sum(1 for _ in Shape(n_layers=48).tensors("qwen3moe", tied=False)) == 579  # the published 30B-A3B's count
