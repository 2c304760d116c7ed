"""Model files in forms that others publish: they load, or a line names what is wrong with them."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import open_engine
from family_files import write_family, write_family_folder
from hybrid_files import LIKE, random_hybrid, write_hybrid_gguf
from model_files import write_gguf, write_hf_folder
from test_models_gguf import write_split

from pshard.errors import UserError
from pshard.models import open_model
from pshard.models.text.gguf_tokenizer import PRE_TOKENIZERS

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
SIGHT = {"v.patch_embd.weight": np.zeros((8, 32), np.float32), "mm.0.weight": np.zeros((8, 32), np.float32)}
VISION, DRAFTS = "the model's vision part is left out", "the model's multi-token head"


def logits(path: Path) -> Any:
    with open_engine(path, tokens=(1, 16), context=32) as engine:
        return engine.forward([5, 77, 200, 3], all_logits=True)


def ollama_form(like: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors as Ollama's converter names them, with parts that see and that draft."""
    named = {name.removesuffix(".bias") if "ssm_dt" in name else name: array for name, array in tensors.items()}
    return named | SIGHT | {"mtp.fc.weight": np.zeros((8, 32), np.float32)}


@pytest.mark.parametrize("like", ["dense", "moe"])
def test_a_hybrid_in_ollamas_form_gives_the_same_logits(tmp_path: Path, like: str) -> None:
    tensors, prefix = random_hybrid(like, layers=8), LIKE[like].gguf
    own = {
        f"{prefix}.attention.head_count_kv": [0, 0, 0, 2] * 2,
        f"{prefix}.ssm.v_head_reordered": True,
        f"{prefix}.rope.mrope_interleaved": True,
        f"{prefix}.rope.dimension_sections": [3, 3, 2],
        f"{prefix}.vision.block_count": 2,
    }
    theirs = write_hybrid_gguf(tmp_path / "o.gguf", like, ollama_form(like, tensors), metadata=own)
    with open_model(theirs) as file:
        assert [note[: len(start)] for note, start in zip(file.notes, (DRAFTS, VISION))] == [DRAFTS, VISION]
    assert logits(theirs).equal(logits(write_hybrid_gguf(tmp_path / "l.gguf", like, tensors)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention.head_count_kv": [0, 0, 0, 2, 0, 0, 0, 1]}, "head_count_kv has others than 0 and one number"),
        ({"attention.head_count_kv": [0, 0, 0, 2]}, "head_count_kv does not say of each of 8 layers"),
        ({"attention.head_count_kv": [0] * 8}, "head_count_kv has others than 0 and one number"),
        ({"attention.head_count_kv": [0, 0, 2, 0] * 2}, "has shape|is missing"),
        ({"attention.recurrent_layers": [True, True, True, False] * 3}, "recurrent_layers does not say of each of 8"),
        ({"norm_top_k_prob": False}, "norm_top_k_prob is False"),
    ],
)
def test_what_ollamas_form_says_wrongly_is_named(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    metadata = {f"qwen35.{key}": value for key, value in changes.items()}
    path = write_hybrid_gguf(tmp_path / "m.gguf", "dense", random_hybrid("dense", layers=8), metadata=metadata)
    with pytest.raises(UserError, match=says):
        open_model(path)


def test_value_heads_stand_in_the_order_that_the_file_says(tmp_path: Path) -> None:
    tensors = random_hybrid("dense")
    other = write_hybrid_gguf(tmp_path / "g.gguf", "dense", tensors, metadata={"qwen35.ssm.v_head_reordered": False})
    with open_model(other) as file:
        assert file.spec.config.delta and not file.spec.config.delta.tiled
    assert not logits(other).allclose(logits(write_hybrid_gguf(tmp_path / "t.gguf", "dense", tensors)))


def test_parts_that_see_within_a_gguf_file_are_left_out_with_a_note(tmp_path: Path) -> None:
    seeing, blind = write_gguf(tmp_path / "v.gguf", extra=SIGHT), write_gguf(tmp_path / "b.gguf")
    with open_model(seeing) as file:
        assert [note[: len(VISION)] for note in file.notes] == [VISION]
    assert logits(seeing).equal(logits(blind))


def test_joyai_texts_are_cut_as_deepseeks() -> None:
    assert PRE_TOKENIZERS["joyai-llm"] == PRE_TOKENIZERS["deepseek-v3"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_told_to_be_one(tmp_path: Path, name: str) -> None:
    write_hf_folder(tmp_path)
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(UserError, match=f"{name}: a pointer of Git LFS, not the file .* git lfs pull"):
        open_model(tmp_path).tokenizer()
    path = tmp_path / "m.gguf"
    path.write_text(POINTER)
    with pytest.raises(UserError, match=r"m\.gguf: a pointer of Git LFS, not the file .* git lfs pull"):
        open_model(path)


def test_a_whole_file_with_the_name_of_a_part_loads(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf")
    merged = tmp_path / "m-00001-of-00003.gguf"
    os.link(whole, merged)
    assert logits(merged).equal(logits(whole))
    merged.unlink()
    parts = write_split(tmp_path, 3)
    parts[1].unlink()
    with pytest.raises(UserError, match="is missing"):  # a part of a model is no whole one
        open_model(parts[0])


def test_a_folder_with_one_part_and_no_index_loads(tmp_path: Path) -> None:
    write_hf_folder(tmp_path)
    expected = logits(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    assert logits(tmp_path).equal(expected)


@pytest.mark.parametrize(("key", "value"), [("attention.head_count_kv", 2), ("feed_forward_length", 512)])
def test_numbers_by_layer_are_as_many_as_layers(tmp_path: Path, key: str, value: int) -> None:
    right = write_gguf(tmp_path / "a.gguf", metadata={f"llama.{key}": [value] * 2})
    with open_model(right) as file:
        assert file.spec.config.n_kv_heads == 2
    for count in (1, 3):
        wrong = write_gguf(tmp_path / "b.gguf", metadata={f"llama.{key}": [value] * count})
        with pytest.raises(UserError, match=f"llama.{key} has {count} values for 2 layers"):
            open_model(wrong)


@pytest.mark.parametrize("blocks", [3, 4])
def test_a_drafting_layer_that_is_not_there_is_told_by_its_key(tmp_path: Path, blocks: int) -> None:
    metadata = {"glm4moe.nextn_predict_layers": 1, "glm4moe.block_count": blocks}
    path = write_gguf(tmp_path / "m.gguf", "glm4moe", n_layers=4, metadata=metadata)
    with pytest.raises(UserError, match=r"glm4moe\.nextn_predict_layers is 1, but layer [23] is none of those"):
        open_model(path)


def test_seed_oss_may_have_no_biases(tmp_path: Path) -> None:
    path = write_family(tmp_path / "s.gguf", "seed_oss").path
    folder = tmp_path / "folder"
    folder.mkdir()
    write_family_folder(folder, "seed_oss")
    config = json.loads((folder / "config.json").read_text())
    with open_model(path) as file:
        assert "blk.0.attn_q.bias" in {t.name for unit in file.spec.units for t in unit.tensors}
    bare = drop_biases(folder)
    with pytest.raises(UserError, match=r"q_proj\.bias is missing, though attention_bias is true"):
        open_model(bare)
    (bare / "config.json").write_text(json.dumps(config | {"attention_bias": False}))
    with open_model(bare) as file:
        assert not [t for unit in file.spec.units for t in unit.tensors if t.name.endswith(".bias")]


def drop_biases(folder: Path) -> Path:
    from safetensors.numpy import load_file, save_file

    (path,) = folder.glob("*.safetensors")
    save_file({name: array for name, array in load_file(path).items() if not name.endswith(".bias")}, path)
    return folder


@pytest.mark.parametrize("letter", ["\0", "\ud800"])
def test_a_part_whose_name_is_no_name_is_told(tmp_path: Path, letter: str) -> None:
    write_hf_folder(tmp_path)
    names = {"model.embed_tokens.weight": f"model{letter}.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(UserError, match=r"cannot be read \(No file can have that name\)"):
        open_model(tmp_path)
