"""The tiny models of qwen4exp_files as transformers has them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hybrid_files import EAGER
from qwen4exp_files import CONTEXT, VOCAB, Recipe, Weights


def build_reference(r: Recipe, weights: Weights) -> Any:
    """transformers' model with these weights, float64, and the recipe's multipliers."""
    model = _load(hf_settings(r), r, weights)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_multipliers"):
            buffer.copy_(torch.tensor(r.multipliers))
    return model.double()


def save_folder(path: Path, r: Recipe, weights: Weights, parts: int, **settings: Any) -> Any:
    """A folder as transformers saves it, the table of n-grams in so many parts; returns the model in float64, whose
    multipliers follow from its seed."""
    model = _load(hf_settings(r) | {"split_ngram_parts": parts} | settings, r, weights)
    model.save_pretrained(path)
    return model.double()


def spread_folder(path: Path, r: Recipe, weights: Weights, rows: tuple[int, ...], kind: type = np.float32) -> Path:
    """A folder of these weights, made without transformers: the table of n-grams in parts of so many rows, and the
    rest, each in a file of its own."""
    from safetensors.numpy import save_file

    tensors = {name: np.ascontiguousarray(array, kind) for name, array in name_as_folders(r, weights).items()}
    name = next(name for name in tensors if name.endswith("ngram_embedding.weight"))
    parts = np.split(tensors.pop(name), np.cumsum(rows))
    files = [{name.replace("weight", f"shard_{number}.weight"): part} for number, part in enumerate(parts)]
    path.mkdir()
    (path / "config.json").write_text(json.dumps(hf_settings(r)))
    placed = dict[str, str]()
    for number, held in enumerate((tensors, *files)):
        save_file({name: np.ascontiguousarray(array) for name, array in held.items()}, path / f"{number}.safetensors")
        placed |= dict.fromkeys(held, f"{number}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return path


def leave_out(folder: Path, *ending: str) -> None:
    """Save the tensors of a folder again without those whose names end so."""
    from safetensors.numpy import load_file, save_file

    (path,) = folder.glob("*.safetensors")
    kept = {name: array for name, array in load_file(path).items() if not name.endswith(ending)}
    save_file(kept, path, {"format": "pt"})


def _load(settings: dict[str, Any], r: Recipe, weights: Weights) -> Any:
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

    model = Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**settings)).eval()
    found = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in name_as_folders(r, weights).items()}
    lacking = {name for name, _ in model.named_parameters()} - found.keys()
    assert not lacking, lacking
    model.load_state_dict(found, strict=False)
    return model


def hf_settings(r: Recipe) -> dict[str, Any]:
    """config.json."""
    (heads, kv, dim), (key_heads, value_heads, head), (count, used, f, s) = r.heads, r.delta, r.experts
    kinds = ["full_attention" if r.is_full(i) else "linear_attention" for i in range(r.layers)]
    return {
        "model_type": "qwen4_exp_text", "vocab_size": VOCAB, "hidden_size": r.d, "num_hidden_layers": r.layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": dim, "max_position_embeddings": CONTEXT,
        "rms_norm_eps": r.eps, "linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads,
        "linear_key_head_dim": head, "linear_value_head_dim": head, "linear_conv_kernel_dim": 4, "layer_types": kinds,
        "moe_intermediate_size": f, "shared_expert_intermediate_size": s, "num_experts_per_tok": used,
        "num_experts": count, "hc_count": r.streams[0], "hc_lowrank": r.streams[1], "eos_token_id": r.grams[4],
        "ple_layer_ids": [r.gram_layer + 1], "ple_embed_dim": r.gram_heads * r.grams[2], "ngram_size": r.grams[0],
        "heads_per_ngram": r.grams[1], "ple_conv_kernel_size": r.grams[3], "ngram_vocab_size_base": r.table,
        "indexer_n_heads": r.index[0], "indexer_kv_heads": 1, "indexer_head_dim": r.index[1],
        "indexer_budget": r.index[3], "indexer_compress_ratio": r.index[2], "output_gate_type": "sigmoid",
        "tie_word_embeddings": False, "norm_topk_prob": True, "split_ngram_parts": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": r.theta, "partial_rotary_factor": r.turned / dim},
        **EAGER,
    }  # fmt: skip


_ROLES = {
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight", "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight", "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight", "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_dt.bias": "linear_attn.dt_bias", "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight", "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight", "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_down_exps.weight": "mlp.experts.down_proj", "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight", "ple_key.weight": "ple.key_proj.weight",
    "ple_value.weight": "ple.value_proj.weight",
}  # fmt: skip
_NORMS = {
    "attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight",
    "indexer.q_norm.weight": "self_attn.indexer.q_layernorm.weight",
    "indexer.k_norm.weight": "self_attn.indexer.k_layernorm.weight",
    **{f"ple_norm_{part}.weight": f"ple.norm_{part}.weight" for part in ("key", "query", "conv")},
    **{f"hc_{a}_norm.weight": f"{b}_hyper_connection.hc_norm.weight" for a, b in (("attn", "attn"), ("ffn", "mlp"))},
}  # fmt: skip
_MIXES = {"down": "input_mix_weight_down", "up": "input_mix_weight_up", "inject": "block_inject_weight"}


def name_as_folders(r: Recipe, weights: Weights) -> Weights:
    """The weights by the names of folders, as these have them: value heads by key head, norms less 1."""
    found: Weights = {}
    for name, array in weights.items():
        if not name.startswith("blk."):
            found |= _name_outside(r, name, array)
            continue
        _, layer, role = name.split(".", 2)
        own, array = f"model.layers.{layer}.", _order_heads(r, role, array)
        if role in _ROLES:
            found[own + _ROLES[role]] = array
        elif role in _NORMS:
            found[own + _NORMS[role]] = array.reshape(-1) - 1
        elif role.startswith("hc_"):
            block, part = role.removesuffix(".weight").split("_")[1:]
            found[f"{own}{'mlp' if block == 'ffn' else block}_hyper_connection.{_MIXES[part]}.weight"] = array
        elif role in ("ssm_conv1d.weight", "ple_conv1d.weight"):
            found[own + ("linear_attn.conv1d" if role[0] == "s" else "ple.conv1d") + ".weight"] = array[:, None]
        elif role == "ssm_a":
            found[f"{own}linear_attn.A_log"] = np.log(-array)
        elif role == "ffn_gate_inp_shexp.weight":
            found[f"{own}mlp.shared_expert_gate.weight"] = array[None]
        elif role == "ffn_gate_exps.weight":
            up = weights[name.replace("gate_exps", "up_exps")]
            found[f"{own}mlp.experts.gate_up_proj"] = np.concatenate((array, up), 1)
        elif role == "indexer.q_proj.weight":
            both = array, weights[name.replace("q_proj", "k_proj")]
            found[f"{own}self_attn.indexer.index_qk_proj.weight"] = np.concatenate(both)
    return found


def _name_outside(r: Recipe, name: str, array: np.ndarray) -> Weights:
    mixer = "model.hyper_connection_mixer."
    called = {
        "token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight",
        "per_layer_token_embd.weight": f"model.layers.{r.gram_layer}.ple.ple_embedding.ngram_embedding.weight",
        **{f"output_hc_{part}.weight": f"{mixer}{_MIXES[part]}.weight" for part in ("down", "up")},
    }  # fmt: skip
    return {f"{mixer}hc_norm.weight": array.reshape(-1) - 1} if name.endswith("_norm.weight") else {called[name]: array}


def _order_heads(r: Recipe, role: str, array: np.ndarray) -> np.ndarray:
    """Value heads that stand one of each key head in turn as those of each key head together."""
    key_heads, value_heads, d = r.delta
    keys, order = 2 * key_heads * d, np.arange(value_heads).reshape(-1, key_heads).T.ravel()
    if role in ("attn_qkv.weight", "ssm_conv1d.weight"):
        values = array[keys:].reshape(value_heads, d, -1)[order].reshape(value_heads * d, -1)
        return np.concatenate((array[:keys], values))
    if role == "attn_gate.weight":
        return array.reshape(value_heads, d, -1)[order].reshape(array.shape)
    if role == "ssm_out.weight":
        return array.reshape(-1, value_heads, d)[:, order].reshape(array.shape)
    return array[order] if role in ("ssm_beta.weight", "ssm_alpha.weight", "ssm_dt.bias", "ssm_a") else array
