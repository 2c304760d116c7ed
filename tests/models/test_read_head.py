"""Multi-token heads of files: read with their model or alone beside it, and left out with a reason."""

import json
from pathlib import Path

import numpy as np
import pytest
from family_files import hf_settings, write_bare_folder
from head_files import HEADED, head_tensors, write_headed
from hybrid_files import (
    random_hybrid,
    read_hybrid_gguf,
    take_hybrid_tensors,
    write_hybrid_folder,
    write_hybrid_gguf,
)
from latent_files import take_tensors, write_latent_folder, write_latent_gguf
from safetensors.numpy import load_file, save_file

from pshard.errors import UserError
from pshard.models import open_model


@pytest.mark.parametrize("like", HEADED)
def test_a_head_is_a_program_that_is_lent_what_it_shares(tmp_path: Path, like: str) -> None:
    write_headed(tmp_path / "m.gguf", like)
    write_headed(tmp_path / "own.gguf", like, own=True)
    with open_model(tmp_path / "m.gguf") as lent, open_model(tmp_path / "own.gguf") as own:
        assert lent.notes == own.notes == ()
        for file, shares in ((lent, True), (own, False)):
            head = file.spec.head
            assert head is not None and head.units[0].kind is file.spec.units[0].kind
            assert bool(head.embedding.lent) == bool(head.output.lent) == shares
            assert {u.layer for u in head.units} == {-1, file.spec.config.n_layers}
            for tensor in (t for unit in head.units for t in unit.tensors):
                assert file.of_head().tensor_bytes(tensor.name).nbytes == tensor.file_nbytes


def write_alone(path: Path, tensors: dict[str, np.ndarray], blocks: int = 5) -> Path:
    """A file of a head alone, with copies of what it shares."""
    kept = {n: t for n, t in tensors.items() if n.startswith("blk.4.") or not n.startswith("blk.")}
    return write_hybrid_gguf(path, "dense", kept, metadata={"qwen35.block_count": blocks})


def test_a_head_may_lie_alone_beside_its_model(tmp_path: Path) -> None:
    tensors = write_headed(tmp_path / "whole.gguf", "dense")
    with open_model(tmp_path / "whole.gguf") as whole:
        expected = whole.spec.head
    folder = tmp_path / "apart"
    folder.mkdir()
    path = write_hybrid_gguf(folder / "m.gguf", "dense", {n: t for n, t in tensors.items() if "blk.4." not in n})
    with open_model(path) as file:
        assert file.spec.head is None and file.notes == ()
        inputs = file.fingerprint_inputs()
        with pytest.raises(UserError, match=r"there is no multi-token head to draft with: the file has none"):
            file.of_head()
    alone = write_alone(folder / "mtp-m.gguf", tensors)
    with pytest.raises(UserError, match=r"mtp-m.gguf: has the multi-token head of a model alone; give the model"):
        open_model(alone)
    with open_model(path) as file:
        assert file.notes == () and file.fingerprint_inputs() == inputs
        assert expected is not None and file.spec.head is not None
        assert [u.tensors for u in file.spec.head.units] == [u.tensors for u in expected.units]
        name = "blk.4.nextn.eh_proj.weight"
        raw = file.of_head().tensor_bytes(name)
        assert np.array_equal(raw.view(np.float32).reshape(tensors[name].shape), tensors[name])


def test_a_head_of_another_model_is_left_out_with_a_reason(tmp_path: Path) -> None:
    tensors = write_headed(tmp_path / "whole.gguf", "dense")
    model = write_hybrid_gguf(tmp_path / "m.gguf", "dense", random_hybrid("dense"))
    write_alone(tmp_path / "mtp-m.gguf", tensors, blocks=9)
    with open_model(model) as file:
        assert file.spec.head is None and "is no multi-token head of this model" in file.notes[0]
    narrow = tensors | {"blk.4.nextn.eh_proj.weight": np.zeros((256, 256), np.float32)}
    write_alone(tmp_path / "mtp-m.gguf", narrow)
    with open_model(model) as file:
        assert file.spec.head is None and "nextn.eh_proj.weight has shape" in file.notes[0]
    (tmp_path / "mtp-m.gguf").write_bytes(b"GGUF")
    with open_model(model) as file:
        assert file.spec.head is None and "is left out" in file.notes[0]


def test_several_heads_are_left_out(tmp_path: Path) -> None:
    tensors = write_headed(tmp_path / "m.gguf", "dense")
    more = {n.replace("blk.4.", "blk.5."): t for n, t in tensors.items() if n.startswith("blk.4.")}
    keys = {"qwen35.block_count": 6, "qwen35.nextn_predict_layers": 2}
    path = write_hybrid_gguf(tmp_path / "two.gguf", "dense", tensors | more, metadata=keys)
    with open_model(path) as file:
        assert file.spec.head is None and "there are several" in file.notes[0]


def test_heads_of_layers_with_windows_are_left_out(tmp_path: Path) -> None:
    layers = hf_settings("exaone4")["num_hidden_layers"]
    settings = hf_settings("exaone4") | {"model_type": "exaone4", "num_nextn_predict_layers": 1}
    folder = write_bare_folder(tmp_path / "hf", "exaone4", settings)
    tensors = load_file(folder / "model.safetensors")
    of_head = {f"model.layers.{layers}.eh_proj.weight": np.zeros((4, 8), np.float32)}
    save_file(tensors | of_head, folder / "model.safetensors")
    with open_model(folder) as file:
        assert file.spec.head is None and "layers of this model have a window" in file.notes[0]


FOLDER_NAMES = {  # of Qwen's folders, by those of GGUF
    "nextn.eh_proj": "fc", "nextn.enorm": "pre_fc_norm_embedding", "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm", "attn_norm": "layers.0.input_layernorm",
    "post_attention_norm": "layers.0.post_attention_layernorm", "attn_output": "layers.0.self_attn.o_proj",
    **{f"attn_{part}": f"layers.0.self_attn.{part}_proj" for part in "qkv"},
    **{f"attn_{part}_norm": f"layers.0.self_attn.{part}_norm" for part in "qk"},
    **{f"ffn_{part}": f"layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")},
}  # fmt: skip


def test_a_folders_head_is_that_of_its_gguf_file_with_norms_less_one(tmp_path: Path) -> None:
    model = write_hybrid_folder(tmp_path / "hf", "dense")
    base = take_hybrid_tensors("dense", model)
    head = head_tensors(base, 3, 4)
    stored = {}
    for name, array in head.items():
        role = name.removeprefix("blk.4.").removesuffix(".weight")
        stored[f"mtp.{FOLDER_NAMES[role]}.weight"] = array - 1 if role.endswith("norm") else array
    add_tensors(tmp_path / "hf", stored)
    keys = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    write_hybrid_gguf(tmp_path / "m.gguf", "dense", base | head, metadata=keys)
    check_alike(tmp_path / "hf", tmp_path / "m.gguf")


def test_a_head_in_layers_of_a_folder_is_that_of_its_gguf_file(tmp_path: Path) -> None:
    model = write_latent_folder(tmp_path / "hf", "v3", num_nextn_predict_layers=1)
    path = write_latent_gguf(tmp_path / "base.gguf", "v3", take_tensors(model), "apart")
    head = head_tensors(read_hybrid_gguf(path), 2, 3)
    base = {f"model.layers.2.{k}": v for k, v in model.model.layers[2].state_dict().items()}
    rng, stored = np.random.default_rng(3), {}
    for name, weight in base.items():
        stored[name.replace("layers.2.", "layers.3.")] = rng.standard_normal(weight.shape).astype(np.float32)
    for role in ("eh_proj", "enorm", "hnorm", "shared_head_norm"):
        where = "shared_head.norm" if role == "shared_head_norm" else role
        stored[f"model.layers.3.{where}.weight"] = head[f"blk.3.nextn.{role}.weight"]
    add_tensors(tmp_path / "hf", stored)
    with open_model(tmp_path / "hf") as file:
        assert file.notes == () and file.spec.head is not None
        shapes = {t.name: t.shape for u in file.spec.head.units for t in u.tensors if t.name.startswith("blk.3.")}
        own = file.of_head().tensor_bytes("blk.3.nextn.eh_proj.weight")
        assert np.array_equal(own.view(np.float32).reshape(-1), head["blk.3.nextn.eh_proj.weight"].reshape(-1))
    assert shapes.keys() >= {name.replace("nextn.shared_head_norm", "output_norm") for name in head}


def add_tensors(folder: Path, stored: dict[str, np.ndarray]) -> None:
    """Further tensors of a folder, in a file of their own."""
    names = list(load_file(folder / "model.safetensors"))
    save_file({name: np.ascontiguousarray(array) for name, array in stored.items()}, folder / "more.safetensors")
    index = dict.fromkeys(names, "model.safetensors") | dict.fromkeys(stored, "more.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def check_alike(one: Path, other: Path) -> None:
    """Both heads have the same units of the same numbers."""
    with open_model(one) as first, open_model(other) as second:
        assert first.notes == second.notes == ()
        heads = first.spec.head, second.spec.head
        assert heads[0] is not None and heads[1] is not None
        assert [u.tensors for u in heads[0].units] == [u.tensors for u in heads[1].units]
        for tensor in (t for unit in heads[1].units for t in unit.tensors):
            raw = [file.of_head().tensor_bytes(tensor.name).view(np.float32) for file in (first, second)]
            assert np.allclose(*raw, atol=1e-6)
