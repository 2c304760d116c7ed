"""Files and folders of hybrids: what is read, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.shapes import make_shape
from hybrid_files import (
    CONTEXT,
    DELTA_HEAD,
    KEY_HEADS,
    LIKE,
    D,
    fuse_inputs,
    hf_settings,
    random_hybrid,
    write_hybrid_gguf,
)
from hybrid_forward import hybrid_logits
from moe_forward import read_weights
from planner_cases import DESKTOP, OWN
from safetensors.numpy import save_file

from pshard.errors import UserError
from pshard.model_config import Delta
from pshard.models import open_model
from pshard.planner.make_plan import plan_baseline
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.units.attention import ATTENTION
from pshard.units.delta_net import DELTA_NET
from pshard.units.state import FixedState, StateShape
from pshard.workload import Workload

NAMES = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba", "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a", "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}  # fmt: skip


def write_folder(path: Path, like: str, inner: str = "model.", **changes: Any) -> Path:
    """A folder as checkpoints are: one norm less, logarithms of decays, value heads by key head, experts one by one."""
    stored: dict[str, np.ndarray] = {}
    tensors = random_hybrid(like) if LIKE[like].tiled else fuse_inputs(random_hybrid(like))
    for name, array in tensors.items():
        if not name.startswith("blk."):
            key = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"}.get(name)
            stored[f"{inner}{key}" if key else "lm_head.weight"] = array - 1 if key == "norm.weight" else array
            continue
        _, layer, role = name.split(".", 2)
        prefix, plain = f"{inner}layers.{layer}.", role.removesuffix(".weight")
        array = untile(like, plain, array)
        if plain == "ssm_a":
            stored[f"{prefix}linear_attn.A_log"] = np.log(-array)
        elif plain == "ssm_dt.bias":
            stored[f"{prefix}linear_attn.dt_bias"] = array
        elif plain.endswith("_exps"):
            part = plain.split("_")[1]
            stored |= {f"{prefix}mlp.experts.{i}.{part}_proj.weight": matrix for i, matrix in enumerate(array)}
        else:
            less = plain.endswith("norm") and plain != "ssm_norm"
            array = array[:, None] if plain == "ssm_conv1d" else array[None] if "inp_shexp" in plain else array
            stored[f"{prefix}{NAMES[plain]}.weight"] = array - 1 if less else array
    path.mkdir()
    normed = {} if LIKE[like].tiled else {"norm_topk_prob": True}  # which the newer ones do not say
    settings = hf_settings(like) | normed | {"model_type": LIKE[like].hf} | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not ...}))
    save_file({name: np.ascontiguousarray(array) for name, array in stored.items()}, path / "model.safetensors")
    return path


def untile(like: str, role: str, array: np.ndarray) -> np.ndarray:
    """Tiled value heads by the key head that they use."""
    kind, keys, d = LIKE[like], 2 * KEY_HEADS * DELTA_HEAD, DELTA_HEAD

    def back(rows: np.ndarray, width: int) -> np.ndarray:
        by_turn = rows.reshape(kind.value_heads // KEY_HEADS, KEY_HEADS, width, *rows.shape[1:])
        return by_turn.swapaxes(0, 1).reshape(rows.shape)

    if not kind.tiled:
        return array
    if role in ("attn_qkv", "ssm_conv1d"):
        return np.concatenate((array[:keys], back(array[keys:], d)))
    if role in ("ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt.bias"):
        return back(array, 1)
    return back(array, d) if role == "attn_gate" else back(array.T, d).T if role == "ssm_out" else array


@pytest.mark.parametrize("like", LIKE)
def test_a_folder_is_the_model_of_the_file(tmp_path: Path, like: str) -> None:
    """Norms with one more, decays that are no logarithms, value heads in the order that each says."""
    tensors, ids = random_hybrid(like), [int(i) for i in np.random.default_rng(1).integers(0, 320, 12)]
    with open_model(write_hybrid_gguf(tmp_path / "m.gguf", like, tensors)) as file:
        expected, units = hybrid_logits(file.spec.config, tensors, ids), file.spec.units
        weights = read_weights(file)
    with open_model(write_folder(tmp_path / "hf", like)) as folder:
        assert [u.name for u in folder.spec.units] == [u.name for u in units]
        delta, own = folder.spec.config.delta, read_weights(folder)
        assert delta == Delta(KEY_HEADS, LIKE[like].value_heads, DELTA_HEAD, False, (3,))
        found = hybrid_logits(folder.spec.config, as_in_gguf(own), ids)
    assert np.abs(found - expected).max() < 1e-5 * expected.std()
    same = [name for name in weights if "norm" in name]
    assert same and all(np.allclose(weights[name], own[name], atol=1e-6) for name in same)


def as_in_gguf(own: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Units' tensors under the names of a file's, fused as there."""
    found = dict(own)
    for name in own:
        if name.endswith("delta_qk.weight"):
            found[name.replace("delta_qk", "attn_qkv")] = np.concatenate((own[name], own[name.replace("qk", "v")]))
        elif name.endswith("delta_conv_qk.weight"):
            whole = np.concatenate((own[name], own[name.replace("qk", "v")]))
            found[name.replace("delta_conv_qk", "ssm_conv1d")] = whole
        elif name.endswith("attn_q_gate.weight"):
            heads = [own[n].reshape(4, -1, D) for n in (name.replace("_gate", ""), name)]
            found[name.replace("_gate", "")] = np.concatenate(heads, 1).reshape(-1, D)
        elif name.endswith("ffn_norm.weight"):
            found[name.replace("ffn_norm", "post_attention_norm")] = own[name]
    return found


def test_a_folder_that_sees_pictures_is_read_without_them(tmp_path: Path) -> None:
    text = hf_settings("dense") | {"model_type": "qwen3_5_text"}
    path = write_folder(tmp_path / "hf", "dense", "model.language_model.")
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text, "vision_config": {}}))
    further = {"model.visual.patch.weight": np.ones(8, np.float32), "mtp.fc.weight": np.ones(8, np.float32)}
    save_file(further, path / "more.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "more.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_model(path) as file:
        assert file.spec.config.architecture == "qwen3_5_text"
        assert any("vision part is left out" in note for note in file.notes)
        assert any("multi-token head" in note for note in file.notes)


def test_the_multi_token_layer_of_a_file_is_left_out_with_a_note(tmp_path: Path) -> None:
    layer = {f"blk.4.{name}.weight": np.ones(8, np.float32) for name in ("nextn.eh_proj", "nextn.enorm", "attn_norm")}
    keys = {"qwen35moe.block_count": 5, "qwen35moe.nextn_predict_layers": 1}
    path = write_hybrid_gguf(tmp_path / "m.gguf", "moe", random_hybrid("moe") | layer, metadata=keys)
    with open_model(path) as file:
        assert file.spec.config.n_layers == 4 and "multi-token head" in file.notes[0]


def test_layers_that_a_file_names_have_attention(tmp_path: Path) -> None:
    """Not each fourth one."""
    tensors = random_hybrid("moe", 5)
    keys = {"qwen35moe.attention.recurrent_layers": [True, True, True, False, True]}
    with open_model(write_hybrid_gguf(tmp_path / "m.gguf", "moe", tensors, metadata=keys)) as file:
        kinds = [u.kind for u in file.spec.units if u.kind in (DELTA_NET, ATTENTION)]
        assert kinds == [DELTA_NET, DELTA_NET, DELTA_NET, ATTENTION, DELTA_NET]


@pytest.mark.parametrize("qtype", ["Q4_0", "Q8_0", "BF16"])
def test_rows_of_fused_matrices_keep_their_bits(tmp_path: Path, qtype: str) -> None:
    tensors = random_hybrid("next")
    paths = [
        write_hybrid_gguf(tmp_path / f"{i}.gguf", "next", found, qtype)
        for i, found in enumerate((tensors, fuse_inputs(tensors)))
    ]
    with open_model(paths[0]) as new, open_model(paths[1]) as old:
        assert [u.tensors for u in new.spec.units] == [u.tensors for u in old.spec.units]
        for tensor in (t for u in new.spec.units for t in u.tensors):
            assert np.array_equal(new.tensor_bytes(tensor.name), old.tensor_bytes(tensor.name)), tensor.name


def test_a_state_has_the_size_of_the_net_s_heads_and_not_of_the_text(tmp_path: Path) -> None:
    with open_model(write_hybrid_gguf(tmp_path / "m.gguf", "dense", random_hybrid("dense"))) as file:
        config, shape = file.spec.config, StateShape(CONTEXT, 3, "bf16", "bf16")
        laws = {u.state(config, shape) for u in file.spec.units if u.kind is DELTA_NET}
    each = 4 * (6 * 32 * 32 + 3 * (2 * 2 + 6) * 32)
    assert laws == {FixedState(each)}
    (law,) = laws
    assert law.nbytes(shape) == 3 * each and law.fetched(0, 2) == law.written(7, 2) == 2 * each


def test_64_sequences_of_qwen3_next_have_the_states_that_a_plan_counts() -> None:
    spec = make_shape("qwen3-next-80b-a3b")
    each = 4 * (32 * 128 * 128 + 3 * (2 * 16 + 32) * 128)
    for sequences in (1, 64):
        shape = StateShape(65536, sequences, "bf16", "bf16")
        sizes = spec.state_sizes(shape)
        assert sum(sizes[u.name] for u in spec.units if u.kind is DELTA_NET) == sequences * 36 * each
    assert 36 * each / 2**20 == pytest.approx(75.4, abs=0.1)


@pytest.mark.parametrize("strategy", ["attention-first", "cpu-moe", "layer-stream"])
def test_published_strategies_keep_states_in_vram(tmp_path: Path, strategy: str) -> None:
    with open_model(write_hybrid_gguf(tmp_path / "m.gguf", "moe", random_hybrid("moe"), "Q8_0")) as file:
        workload = Workload((OWN + 30,), context=256, max_ubatch=64, prompt=64, generated=64)
        variant = plan_baseline(strategy, file.spec, profile_from_datasheet(DESKTOP), workload)
        nets = [u.name for u in file.spec.units if u.kind is DELTA_NET]
    places = {(p.where, p.kv) for t in variant.ranks[0].tiers for p in t.placements if p.unit in nets}
    assert all(kv == "vram" for _, kv in places) and places


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ssm.conv_kernel": 3}, "ssm.conv_kernel is 3, which is not supported yet"),
        ({"ssm.inner_size": 96}, "ssm.inner_size is 96, not 4 value heads of 32"),
        ({"ssm.group_count": 3}, "ssm.group_count is 3, which does not divide 4 value heads"),
        ({"ssm.state_size": None}, "ssm.state_size is missing"),
        ({"block_count": 1 << 31}, "2147483648 layers, where models have a few hundred: the file is damaged"),
        ({"full_attention_interval": 3}, "has shape|is missing"),
        ({"rope.dimension_sections": [3, 3, 3, 0]}, "rope.dimension_sections has 9 pairs, not the 8 that are rotated"),
    ],
    ids=str,
)
def test_what_a_file_says_wrong_is_named(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    keys = {f"qwen35moe.{key}": value for key, value in changes.items()}
    with pytest.raises(UserError, match=says):
        open_model(write_hybrid_gguf(tmp_path / "m.gguf", "moe", random_hybrid("moe"), metadata=keys))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim is 3, which is not supported yet"),
        ({"linear_value_head_dim": 64}, "linear_value_head_dim is 64, which is not supported yet"),
        ({"linear_num_key_heads": ...}, "linear_num_key_heads is missing"),
        ({"layer_types": ["mamba"] * 4}, "layer_types has others than linear_attention and full_attention"),
        ({"layer_types": [["mamba"]] * 4}, "layer_types has others than linear_attention and full_attention"),
        ({"layer_types": ["full_attention"]}, "does not say of each of 4 layers what it is"),
    ],
    ids=str,
)
def test_what_a_folder_has_that_is_not_computed_is_named(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        open_model(write_folder(tmp_path / "hf", "next", **changes))
