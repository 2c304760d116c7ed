"""Files with latent attention, old and new, and folders: what is read, and what is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from latent_files import HEADS, LIKE, NOPE, RANK, ROPE, VALUE, random_tensors, write_latent_gguf
from model_files import write_gguf
from planner_cases import DESKTOP, OWN
from quantised_folders import CONFIGS, quantise, save_tensors
from safetensors.numpy import load_file, save_file

from pshard.errors import UserError
from pshard.model_config import Latent
from pshard.models import open_model
from pshard.models.quantised.joined import JoinedMatrix
from pshard.planner.choose_mode import plan_split
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.units.kv_cells import check_kv_types
from pshard.units.latent_attention import LATENT_ATTENTION
from pshard.units.state import LatentState, StateShape
from pshard.workload import Workload

CONFIG = {
    "hidden_act": "silu", "hidden_size": 256, "intermediate_size": 512, "kv_lora_rank": RANK, "vocab_size": 320,
    "max_position_embeddings": 512, "moe_intermediate_size": 64, "n_routed_experts": 8, "num_attention_heads": HEADS,
    "num_experts_per_tok": 3, "num_hidden_layers": 3, "num_key_value_heads": HEADS, "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE, "rms_norm_eps": 1e-6, "v_head_dim": VALUE, "first_k_dense_replace": 1,
    "tie_word_embeddings": False, "rope_theta": 10000,
}  # fmt: skip
SCALING = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}


def write_folder(path: Path, like: str, extra: dict[str, np.ndarray] | None = None, **changes: Any) -> Path:
    """A folder as the checkpoints are: experts one by one, scaling in `rope_scaling`. extra: further tensors."""
    made = {key: value for key, value in LIKE[like].items() if key not in ("arch", "rope")}
    rope = {key: LIKE[like]["rope"][key] for key in ("mscale", "mscale_all_dim")}
    config = CONFIG | made | {"model_type": LIKE[like]["arch"], "rope_scaling": SCALING | rope} | changes
    names = {v: k for k, v in _hf_names(3).items()}
    stored: dict[str, np.ndarray] = extra or {}
    for name, array in random_tensors(like).items():
        if "_exps" in name:
            role = name.split(".")[2].split("_")[1]
            each = f"model.layers.{name.split('.')[1]}.mlp.experts.{{}}.{role}_proj.weight"
            stored |= {each.format(i): matrix for i, matrix in enumerate(array)}
        else:
            stored[names[name]] = array
    path.mkdir()
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    save_file({name: np.ascontiguousarray(array) for name, array in stored.items()}, path / "model.safetensors")
    return path


def _hf_names(layers: int) -> dict[str, str]:
    """GGUF names by those of checkpoints."""
    table = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": "attn_kv_b", "self_attn.o_proj": "attn_output", "mlp.gate": "ffn_gate_inp",
        **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
        **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    }  # fmt: skip
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    names = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in whole.items()}
    for i in range(layers):
        names |= {f"model.layers.{i}.{theirs}.weight": f"blk.{i}.{ours}.weight" for theirs, ours in table.items()}
        names[f"model.layers.{i}.mlp.gate.e_score_correction_bias"] = f"blk.{i}.exp_probs_b.bias"
    return names


@pytest.mark.parametrize("like", LIKE)
def test_all_forms_of_a_model_are_one_model(tmp_path: Path, like: str) -> None:
    tensors = random_tensors(like)
    paths = [write_latent_gguf(tmp_path / f"{form}.gguf", like, tensors, form) for form in ("apart", "joint", "both")]
    paths.append(write_folder(tmp_path / "hf", like))
    with open_model(paths[0]) as first:
        assert first.spec.config.latent is not None
        for path in paths[1:]:
            with open_model(path) as other:
                latent = first.spec.config.latent
                close = replace(other.spec.config.latent, score_scale=latent.score_scale)
                assert close == latent and other.spec.config.experts == first.spec.config.experts
                assert other.spec.config.latent.score_scale == pytest.approx(latent.score_scale)
                assert other.spec.config.rope.pairing == "adjacent" and other.spec.config.rope.attention_factor == 1.0
                assert [u.tensors for u in other.spec.units] == [u.tensors for u in first.spec.units]
                for tensor in (t for u in first.spec.units for t in u.tensors):
                    parts = range(tensor.parts)
                    pairs = [(first.part_bytes(tensor.name, i), other.part_bytes(tensor.name, i)) for i in parts]
                    assert all(np.array_equal(a, b) for a, b in pairs)


def test_a_cell_is_a_latent_and_a_key_whatever_the_heads(tmp_path: Path) -> None:
    with open_model(write_latent_gguf(tmp_path / "m.gguf", "lite", random_tensors("lite"))) as file:
        config, units = file.spec.config, file.spec.units
        shape = StateShape(100, 1, "bf16", "bf16")
        (state, *others) = (u.state(config, shape) for u in units if u.kind is LATENT_ATTENTION)
        assert others == [state] * 2 == [LatentState(RANK + ROPE, "bf16")] * 2
        assert state.nbytes(shape) == 128 * (RANK + ROPE) * 2
        assert state.fetched(7, 1) == 7 * (RANK + ROPE) * 2 and state.can_be_cut
        check_kv_types(config, "q8_0", "q8_0")
        with pytest.raises(UserError, match=r"latents are not kept as q4_0, .* give -ctk and -ctv bf16 or q8_0"):
            check_kv_types(config, "q4_0", "q4_0")
        with pytest.raises(UserError, match="-ctk bf16 and -ctv f16 differ; give both the same type"):
            check_kv_types(config, "bf16", "f16")


def test_quantised_joint_matrices_keep_values_as_they_are_and_keys_as_f16(tmp_path: Path) -> None:
    tensors = random_tensors("lite")
    path = write_latent_gguf(tmp_path / "m.gguf", "lite", tensors, "joint", "Q8_0")
    with open_model(path) as file:
        assert len(file.notes) == 1 and "their half becomes F16" in file.notes[0]
        unit = file.spec.unit("blk.0.attention").by_role
        assert unit["attn_k_b.weight"].qtype == "F16" and unit["attn_v_b.weight"].qtype == "Q8_0"
        raw = [file.part_bytes("blk.0.attn_k_b.weight", head).view(np.float16) for head in range(HEADS)]
        values = file.part_bytes("blk.0.attn_v_b.weight", 1)
    both = tensors["blk.0.attn_kv_b.weight"].reshape(HEADS, NOPE + VALUE, RANK)
    decoded = gguf.quants.dequantize(values, gguf.GGMLQuantizationType.Q8_0)
    assert np.abs(decoded - both[1, NOPE:]).max() < 0.01
    assert max(np.abs(m - both[h, :NOPE].T).max() for h, m in enumerate(raw)) < 0.01


def quantise_joint(folder: Path, kind: str) -> dict[str, np.ndarray]:
    """Quantise a folder's joint matrices; returns their values by layer's block."""
    tensors, rng, values = load_file(folder / "model.safetensors"), np.random.default_rng(0), {}
    for name in [n for n in tensors if n.endswith("kv_b_proj.weight")]:
        made, values[f"blk.{name.split('.')[2]}."] = quantise(kind, *tensors.pop(name).shape, rng)
        tensors |= {f"{name.removesuffix('weight')}{key}": array for key, array in made.items()}
    save_tensors(tensors, folder)
    return values


def test_a_quantised_folder_says_that_keys_become_f16_too(tmp_path: Path) -> None:
    kind = "w4a16 asymmetric"
    values = quantise_joint(write_folder(tmp_path / "hf", "lite", quantization_config=CONFIGS[kind]), kind)
    with open_model(tmp_path / "hf") as file:
        assert len(file.notes) == 1 and "their half becomes F16" in file.notes[0]
        for block, both in values.items():
            for head, (key, value) in enumerate(np.split(m, [NOPE]) for m in both.reshape(HEADS, -1, RANK)):
                raw = file.part_bytes(f"{block}attn_k_b.weight", head).view(np.float16)
                assert np.abs(raw - key.T).max() < 1e-3 * np.abs(key).max()
                raw = gguf.quants.dequantize(
                    file.part_bytes(f"{block}attn_v_b.weight", head), gguf.GGMLQuantizationType.Q5_0
                )
                assert np.abs(raw - value).max() < 1e-6


def test_a_joint_matrix_is_joined_once_for_all_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined, join = list[str](), JoinedMatrix.read
    monkeypatch.setattr(JoinedMatrix, "read", lambda tensor: joined.append(tensor.name) or join(tensor))
    kind = "w4a16 asymmetric"
    quantise_joint(write_folder(tmp_path / "hf", "lite", quantization_config=CONFIGS[kind]), kind)
    with open_model(tmp_path / "hf") as file:
        for times in (1, 2):
            first = [file.part_bytes("blk.0.attn_k_b.weight", head).copy() for head in range(HEADS)]
            assert len(joined) == times and len({raw.tobytes() for raw in first}) == HEADS
            file.forget_tensor("blk.0.attn_k_b.weight")  # so that no matrix is held for good


@pytest.mark.parametrize(("like", "drafter"), [("v3", "blk.3."), ("hf", "model.layers.3.")])
def test_the_multi_token_layer_is_left_out_with_a_note(tmp_path: Path, like: str, drafter: str) -> None:
    layer = {f"{drafter}{name}.weight": np.ones(8, np.float32) for name in ("eh_proj", "enorm", "attn_norm")}
    if like == "hf":
        path = write_folder(tmp_path / "hf", "v3", layer, num_nextn_predict_layers=1)
    else:
        layer = {name.replace("eh_proj", "nextn.eh_proj"): array for name, array in layer.items()}
        keys = {"deepseek2.block_count": 4, "deepseek2.nextn_predict_layers": 1}
        path = write_latent_gguf(tmp_path / "m.gguf", "v3", random_tensors("v3") | layer, metadata=keys)
    with open_model(path) as file:
        assert file.spec.config.n_layers == 3 and "multi-token head" in file.notes[0]


@pytest.mark.parametrize(
    ("like", "changes", "says"),
    [
        ("v3", {"quantization_config": {"quant_method": "quip"}}, r"quantised safetensors .*quant_method 'quip'.*GGUF"),
        ("lite", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}, "scored by a softmax"),
        ("v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax', which is not supported yet"),
        ("lite", {"moe_layer_freq": 2}, "moe_layer_freq is 2, which is not supported yet"),
        ("lite", {"norm_topk_prob": True}, "norm_topk_prob is True, which is not supported yet"),
        ("lite", {"attention_bias": True}, "attention_bias is True, which is not supported yet"),
        ("lite", {"kv_lora_rank": ...}, "kv_lora_rank is missing"),
        ("v3", {"q_lora_rank": 512}, "is less than the 512 numbers that queries are made of"),
        ("v3", {"qk_rope_head_dim": 31}, "31 numbers are rotated, which are no pairs"),
        ("v3", {"v_head_dim": 32}, r"kv_b_proj.* has shape \[448, 64\], not the \[320, 64\]"),
    ],
    ids=str,
)
def test_what_a_folder_has_that_is_not_computed_is_named(tmp_path: Path, like: str, changes: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        open_model(write_folder(tmp_path / "hf", like, **changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention.kv_lora_rank": None}, "attention.kv_lora_rank is missing"),
        ({"attention.key_length_mla": ROPE}, f"is {ROPE}, of which {ROPE} are rotated"),
        ({"rope.dimension_count": 2**31}, "rope.dimension_count is 2147483648, where heads have a few hundred"),
        ({"attention.kv_lora_rank": 2**31}, "kv_lora_rank is 2147483648, where heads have a few hundred dimensions"),
        ({"rope.dimension_count": 16}, "has shape"),
        ({"rope.scaling.type": "linear", "rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier is 0.1"),
        ({"expert_group_count": 4, "expert_group_used_count": 2}, "scored by a softmax are not supported yet"),
    ],
)
def test_what_a_file_says_wrong_is_named(tmp_path: Path, changes: dict, says: str) -> None:
    keys = {f"deepseek2.{key}": value for key, value in changes.items()}
    with pytest.raises(UserError, match=says):
        open_model(write_latent_gguf(tmp_path / "m.gguf", "lite", random_tensors("lite"), metadata=keys))


@pytest.mark.parametrize(("like", "scores"), [("lite", "softmax"), ("v3", "sigmoid")])
def test_where_a_file_does_not_say_how_it_scores_a_bias_tells(tmp_path: Path, like: str, scores: str) -> None:
    silent = {"deepseek2.expert_gating_func": None, "deepseek2.expert_weights_norm": None}
    with open_model(write_latent_gguf(tmp_path / "m.gguf", like, random_tensors(like), metadata=silent)) as file:
        rule = file.spec.config.experts
        assert (rule.scores, rule.normed, rule.choice_bias) == (scores, like == "v3", like == "v3")


def test_a_file_that_does_not_say_that_weights_are_normed_has_them_as_they_are(tmp_path: Path) -> None:
    silent = {"deepseek2.expert_weights_norm": None}
    with open_model(write_latent_gguf(tmp_path / "m.gguf", "v3", random_tensors("v3"), metadata=silent)) as file:
        rule = file.spec.config.experts
        assert (rule.scores, rule.normed, rule.choice_bias) == ("sigmoid", False, True)


def test_a_folder_of_kimi_is_a_v3(tmp_path: Path) -> None:
    """Whose tokenizer is not read, and says so."""
    folder = write_folder(tmp_path / "hf", "v3", model_type="kimi_k2", n_group=1, topk_group=1)
    (folder / "tiktoken.model").write_bytes(b"IQ== 0\n")
    with open_model(folder) as file:
        assert isinstance(file.spec.config.latent, Latent) and file.spec.config.experts.scores == "sigmoid"
        with pytest.raises(UserError, match=r"tiktoken\.model"):
            file.tokenizer()


def test_ranks_that_cut_every_layer_are_refused_in_one_line(tmp_path: Path) -> None:
    with open_model(write_latent_gguf(tmp_path / "m.gguf", "lite", random_tensors("lite"))) as file:
        profile = profile_from_datasheet(DESKTOP)
        profile = replace(profile, accelerators=tuple(replace(profile.accelerators[0], index=i) for i in range(2)))
        workload = Workload((OWN + 50,) * 2, context=128, max_ubatch=64, prompt=64, generated=64)
        with pytest.raises(UserError, match=r"cannot be cut over devices yet; use -sm layer"):
            plan_split(file.spec, profile, replace(workload, split_mode="tensor"), False)
        assert (
            plan_split(file.spec, profile, replace(workload, split_mode="layer"), False).workload.split_mode == "layer"
        )


def test_models_without_latents_have_none(tmp_path: Path) -> None:
    with open_model(write_gguf(tmp_path / "m.gguf", "qwen3moe")) as file:
        assert file.spec.config.latent is None
