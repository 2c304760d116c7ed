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
from pshard.runtime.memory.kv_file import fingerprint_model

ROUTED = {
    "mixtral": Experts(8, 2, 256),
    "qwen2moe": Experts(8, 2, 256, normed=False, d_shared=256, shared_gate=True),
    "qwen3moe": Experts(8, 2, 256),
}
SHARED = ["ffn_gate_shexp.weight", "ffn_up_shexp.weight", "ffn_down_shexp.weight"]


def compare_bytes(model: ModelFile, path: Path) -> None:
    """Every tensor's bytes are those that the gguf package reads, each expert's those of its slab."""
    expected = {t.name: np.ascontiguousarray(t.data).view(np.uint8) for t in gguf.GGUFReader(path).tensors}
    for unit in model.spec.units:
        for tensor in unit.tensors:
            raw = model.tensor_bytes(tensor.name)
            np.testing.assert_array_equal(raw.reshape(-1), expected[tensor.name].reshape(-1))
            assert raw.nbytes == tensor.file_nbytes and not raw.flags.writeable
            for part in range(tensor.parts):
                rows = tensor.rows // tensor.parts
                np.testing.assert_array_equal(model.part_bytes(tensor.name, part), raw[part * rows : (part + 1) * rows])


@pytest.mark.parametrize("arch", ROUTED)
def test_a_layer_with_experts_is_attention_router_and_experts(tmp_path: Path, arch: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", arch)
    with open_model(path) as model:
        assert model.spec.config.experts == ROUTED[arch]
        kinds = ["attention", "router", *(["shared"] if arch == "qwen2moe" else []), "experts"]
        layer = [u for u in model.spec.units if u.layer == 0]
        assert [u.name for u in layer] == [f"blk.0.{kind}" for kind in kinds]
        router, experts = layer[1], layer[-1]
        assert [t.role for t in router.tensors] == ["ffn_gate_inp.weight", "ffn_norm.weight"]
        if arch == "qwen2moe":
            assert [t.role for t in layer[2].tensors] == [*SHARED, "ffn_gate_inp_shexp.weight"]
        assert [(t.role, t.shape, t.parts) for t in experts.tensors] == [
            ("ffn_gate_exps.weight", (8 * 256, 256), 8),
            ("ffn_up_exps.weight", (8 * 256, 256), 8),
            ("ffn_down_exps.weight", (8 * 256, 256), 8),
        ]
        assert router.tensors[0].parts == 0
        compare_bytes(model, path)


@pytest.mark.parametrize("qtype", QUANT_TYPES)
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
    metadata = {f"qwen3moe.{key}": value for key, value in (keys | groups).items()}
    with open_model(write_gguf(tmp_path / "m.gguf", "qwen3moe", metadata=metadata)) as model:
        expected = Experts(8, 2, 256, scores="sigmoid", normed=False, scale=2.5, groups=4, groups_used=2)
        assert model.spec.config.experts == expected


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"expert_used_count": 9}, "a token takes 9 of 8 experts; the file is damaged"),
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
        open_model(write_gguf(tmp_path / "m.gguf", "qwen3moe", extra=extra))


def test_a_dense_architecture_with_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"qwen3\.expert_count is 8, which is not supported"):
        open_model(write_gguf(tmp_path / "m.gguf", "qwen3", metadata={"qwen3.expert_count": 8}))


def test_a_llama_without_experts_is_no_mixtral(tmp_path: Path) -> None:
    with open_model(write_gguf(tmp_path / "m.gguf", "llama", metadata={"llama.expert_count": 0})) as model:
        assert model.spec.config.experts is None and model.spec.config.architecture == "llama"


def test_all_tensors_of_a_true_size_find_their_place() -> None:
    assert sum(1 for _ in Shape(n_layers=48).tensors("qwen3moe", tied=False)) == 579  # the published 30B-A3B's count
