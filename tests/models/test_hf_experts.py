"""Hugging Face folders with routed experts: their tensors stack to the stacks of GGUF files, and damage is one line."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import HF_CLASSES, write_gguf_from_hf, write_hf_folder
from safetensors.numpy import load_file, save_file

from pshard.errors import UserError
from pshard.models import open_model
from pshard.models.architectures import ARCHITECTURES
from pshard.runtime.memory.kv_store import fingerprint_model

MOE = [
    a.name for a in ARCHITECTURES if a.routing and a.name in HF_CLASSES and not (a.sinks or a.latent)
]  # whose tests are others


@pytest.mark.parametrize(("arch", "shard_bytes"), [*((arch, None) for arch in MOE), (MOE[-1], 1 << 20)])
def test_experts_of_both_formats_meet_in_one_spec(tmp_path: Path, arch: str, shard_bytes: int | None) -> None:
    model = write_hf_folder(tmp_path / "hf", arch, shard_bytes=shard_bytes)
    with open_model(tmp_path / "hf") as folder, open_model(write_gguf_from_hf(tmp_path / "m.gguf", model)) as file:
        assert folder.spec.config.experts == file.spec.config.experts
        assert folder.spec.config.d_ffn == file.spec.config.d_ffn
        assert [u.likeness for u in folder.spec.units] == [u.likeness for u in file.spec.units]
        for tensor in (t for u in folder.spec.units for t in u.tensors):
            if arch == "mixtral" and ".attn_" in tensor.name:
                continue  # rows of q and k stand in another order
            np.testing.assert_array_equal(folder.tensor_bytes(tensor.name), file.tensor_bytes(tensor.name))
            assert not folder.tensor_bytes(tensor.name).flags.writeable
            for part in range(tensor.parts):
                one = folder.part_bytes(tensor.name, part)
                np.testing.assert_array_equal(one, file.part_bytes(tensor.name, part))
                assert one.base is not None  # mapped, not copied
                np.testing.assert_array_equal(
                    folder.run_bytes(tensor.name, part, tensor.parts), one
                )  # all over the files
            folder.forget_tensor(tensor.name)
        assert len(fingerprint_model(folder)) == 64


@pytest.mark.parametrize(("dtype", "qtype"), [("bfloat16", "BF16"), ("float16", "F16")])
def test_stacks_keep_the_type_of_the_folder(tmp_path: Path, dtype: str, qtype: str) -> None:
    write_hf_folder(tmp_path, "qwen3_moe", dtype=dtype, shape={"n_layers": 1})
    with open_model(tmp_path) as opened:
        assert {t.qtype for u in opened.spec.units for t in u.tensors} == {qtype}


def test_a_folder_decides_whether_weights_are_divided_by_their_sum(tmp_path: Path) -> None:
    write_hf_folder(tmp_path, "qwen3_moe", norm_topk_prob=False)
    with open_model(tmp_path) as opened:
        assert not opened.spec.config.experts.normed


def test_glm_may_normalise_heads_and_brings_a_layer_that_drafts_tokens(tmp_path: Path) -> None:
    write_hf_folder(tmp_path, "glm4_moe", use_qk_norm=True)
    with open_model(tmp_path) as opened:
        expected = opened.spec
        assert expected.config.qk_norm and expected.config.rope.dims == 32 and opened.notes == ()
        assert "attn_k_norm.weight" in expected.unit("blk.0.attention").by_role
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {
        f"model.layers.2.{role}.weight": np.ones(8, np.float32) for role in ("eh_proj", "mlp.experts.0.up_proj")
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with open_model(tmp_path) as opened:
        assert opened.spec == expected and "multi-token head" in opened.notes[0]
    edit_config(tmp_path, {"num_nextn_predict_layers": 0})
    with pytest.raises(UserError, match="has its like of other experts, but not of number 1"):
        open_model(tmp_path)


def edit_config(folder: Path, keys: dict[str, Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def test_the_names_of_transformers_4_are_read(tmp_path: Path) -> None:
    write_hf_folder(tmp_path, "qwen3_moe")
    with open_model(tmp_path) as opened:
        expected = opened.spec.config
    edit_config(tmp_path, {"num_local_experts": ..., "num_experts": 8})
    with open_model(tmp_path) as opened:
        assert opened.spec.config == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe")
    write_hf_folder(path, "qwen3_moe", shape={"n_layers": 1})
    return path


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"num_experts_per_tok": 9}, "config.json: a token takes 9 of 8 experts; take another file or model"),
        ({"num_local_experts": 0}, "num_local_experts is 0, not a whole number above 0"),
        ({"num_local_experts": ...}, "num_experts is missing"),
        ({"num_local_experts": 7}, "of an expert too many: the configuration says 7"),
        ({"num_local_experts": 9}, "has its like of other experts, but not of number 8 of 9: the files are incomplete"),
        ({"num_local_experts": 2**62}, "but not of number 8 of 46116860"),
        ({"moe_intermediate_size": 128}, r"gate_proj.weight has shape \[8, 256, 256\], not the \[8, 128, 256\]"),
        ({"norm_topk_prob": ...}, "norm_topk_prob is missing"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes', not true or false"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers leaves none of 1 layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step leaves none of 1 layers"),
    ],
)
def test_numbers_of_experts_that_do_not_fit_are_named(
    folder: Path, tmp_path: Path, keys: dict[str, Any], says: str
) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    edit_config(tmp_path, keys)
    with pytest.raises(UserError, match=says):
        open_model(tmp_path)


UP = "model.layers.0.mlp.experts.{}.up_proj.weight"


def unlike(tensors: dict[str, np.ndarray]) -> None:
    tensors[UP.format(3)] = tensors[UP.format(3)].astype(np.float16)


def flat(tensors: dict[str, np.ndarray]) -> None:
    tensors[UP.format(3)] = tensors[UP.format(3)].reshape(-1)


def padded(tensors: dict[str, np.ndarray]) -> None:
    tensors[UP.format("03")] = tensors.pop(UP.format(3))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda tensors: tensors.pop(UP.format(3)),
            f"{UP.format(0)} has its like of other experts, but not of number 3",
        ),
        (unlike, rf"tensor {UP.format(3)} is F16 of shape \[256, 256\], unlike {UP.format(0)}"),
        (flat, rf"tensor {UP.format(3)} is F32 of shape \[65536\], unlike {UP.format(0)}"),
        (padded, "but not of number 3 of 8"),
    ],
)
def test_experts_that_do_not_stack_are_named(folder: Path, tmp_path: Path, change: Any, says: str) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=re.sub(r"(?<!\\)\.", r"\.", says)):
        open_model(tmp_path)
