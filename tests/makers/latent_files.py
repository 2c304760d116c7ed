"""Tiny models with latent attention, like DeepSeek-V2-Lite and V3: folders of transformers, and GGUF files of these."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from model_files import Shape, _add_encoded, _add_metadata, _finish, write_hf_folder

HEADS, NOPE, ROPE, VALUE, RANK, Q_RANK = 4, 48, 32, 64, 64, 96
N_EXPERTS, USED, D_EXPERT = 8, 3, 64
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 16,
    "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
SIZES = {
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE, "kv_lora_rank": RANK, "n_routed_experts": N_EXPERTS, "num_experts_per_tok": USED,
    "moe_intermediate_size": D_EXPERT, "first_k_dense_replace": 1,
}  # fmt: skip
LIKE: dict[str, dict[str, Any]] = {
    "lite": {
        "arch": "deepseek_v2", "rope": YARN, "q_lora_rank": None, "n_shared_experts": 2, "norm_topk_prob": False,
        "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    },
    "v3": {
        "arch": "deepseek_v3", "rope": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "q_lora_rank": Q_RANK,
        "n_shared_experts": 1, "norm_topk_prob": True, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
    },
}  # fmt: skip
LIKE_FLASH = {  # what the GGUF file of one like GLM-4.7-Flash has otherwise than one like V3
    f"deepseek2.{key}": value for key, value in {
        "attention.layer_norm_rms_epsilon": 1e-3, "rope.scaling.type": "none", "rope.scaling.factor": 1.0,
        "rope.scaling.yarn_log_multiplier": 0.0, "rope.freq_base": 1e6, "expert_weights_scale": 1.8,
        "expert_group_count": 1, "expert_group_used_count": 1,
    }.items()
}  # fmt: skip
FLASH = {  # and its folder
    "arch": "glm4_moe_lite", "rope": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-3,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}  # the others compute no float64


def write_latent_folder(path: Path, like: str, layers: int = 3, **config: Any) -> Any:
    """Save a random transformers model like "lite" or "v3"; returns it in eval mode."""
    settings = SIZES | LIKE[like] | {"shape": {"n_layers": layers, "head_dim": ROPE}} | EAGER | config
    return write_hf_folder(path, settings.pop("arch"), **settings)


def write_latent_gguf(
    path: Path,
    like: str,
    tensors: dict[str, np.ndarray],
    form: str = "apart",
    qtype: str = "F32",
    metadata: dict[str, Any] | None = None,
) -> Path:
    """A GGUF file of tensors by name, as `take_tensors` or `random_tensors` gives them.

    form: "apart" (attn_k_b and attn_v_b), "joint" (attn_kv_b, as files had it before April 2025) or "both". Matrices
    are of a quant type, where their rows are whole blocks of it.
    """
    writer = gguf.GGUFWriter(str(path), "deepseek2")
    writer.add_name(path.stem)
    layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blk."))
    _add_metadata(writer, {"tokenizer.ggml.model": "none", **_settings(like, layers, form), **(metadata or {})})
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[qtype]][0]
    for name, array in (found for item in tensors.items() for found in _in_form(*item, form)):
        array = np.ascontiguousarray(array)
        if array.ndim == 1 or name.endswith("ffn_gate_inp.weight"):
            writer.add_tensor(name, array)
            continue
        kind = qtype if array.shape[-1] % block == 0 else "F32"
        encoded = gguf.quants.quantize(array, gguf.GGMLQuantizationType[kind])
        _add_encoded(writer, name, encoded.view(np.uint8).reshape(*array.shape[:-1], -1), kind)
    return _finish(writer, path)


def _in_form(name: str, array: np.ndarray, form: str) -> Iterator[tuple[str, np.ndarray]]:
    if not name.endswith("attn_kv_b.weight"):
        yield name, array
        return
    if form != "apart":
        yield name, array
    if form != "joint":
        each = array.reshape(HEADS, NOPE + VALUE, RANK)
        yield name.replace("kv_b", "k_b"), each[:, :NOPE].swapaxes(1, 2)
        yield name.replace("kv_b", "v_b"), each[:, NOPE:]


def _settings(like: str, layers: int, form: str) -> dict[str, Any]:
    made, sizes = LIKE[like], Shape()
    rope, v3 = made["rope"], like == "v3"
    of_cell = {"key_length": RANK + ROPE, "value_length": RANK, "head_count_kv": 1}
    of_heads = {"key_length": NOPE + ROPE, "value_length": VALUE, "head_count_kv": HEADS}
    attention = of_heads if form == "joint" else of_cell
    attention = attention | {"head_count": HEADS, "layer_norm_rms_epsilon": sizes.norm_eps, "kv_lora_rank": RANK}
    if form != "joint":
        attention |= {"key_length_mla": NOPE + ROPE, "value_length_mla": VALUE}
    if v3:
        attention["q_lora_rank"] = Q_RANK
    keys = {
        "block_count": layers, "context_length": sizes.context, "embedding_length": sizes.d_model,
        "feed_forward_length": sizes.d_ffn, "vocab_size": sizes.vocab, "rope.dimension_count": ROPE,
        "rope.freq_base": rope["rope_theta"], "rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"], "expert_count": N_EXPERTS,
        "expert_used_count": USED, "expert_feed_forward_length": D_EXPERT,
        "expert_shared_count": made["n_shared_experts"], "expert_weights_norm": v3,
        "expert_weights_scale": made.get("routed_scaling_factor", 1.0), "expert_gating_func": 2 if v3 else 1,
        "leading_dense_block_count": 1,
    } | {f"attention.{name}": value for name, value in attention.items()}  # fmt: skip
    if v3:
        keys |= {"expert_group_count": made["n_group"], "expert_group_used_count": made["topk_group"]}
    return {f"deepseek2.{name}": value for name, value in keys.items()}


def take_tensors(model: Any) -> dict[str, np.ndarray]:
    """A transformers model's weights in float32 by GGUF name."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, model.config.num_hidden_layers)
    found = {}
    for key, weight in model.state_dict().items():
        array, block = weight.detach().float().numpy(), f"blk.{key.split('.')[2]}." if ".layers." in key else ""
        if key.endswith("mlp.experts.gate_up_proj"):
            found[f"{block}ffn_gate_exps.weight"], found[f"{block}ffn_up_exps.weight"] = np.split(array, 2, 1)
        elif key.endswith("mlp.experts.down_proj"):
            found[f"{block}ffn_down_exps.weight"] = array
        else:
            key = key.replace("e_score_correction_bias", "e_score_correction.bias")
            found[names.get_name(key, (".weight", ".bias"))] = array
    return found


def random_tensors(like: str, layers: int = 3, seed: int = 0) -> dict[str, np.ndarray]:
    """Such a model's weights in float32 by GGUF name, without transformers."""
    rng = np.random.default_rng(seed)
    return {name: _draw(rng, name, shape) for name, shape in _shapes(like, layers)}


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = rng.standard_normal(shape).astype(np.float32)
    if len(shape) == 1:
        return 0.1 * values + np.float32(not name.endswith("bias"))
    return values if name == "token_embd.weight" else values * np.float32(shape[-1] ** -0.5)


def _shapes(like: str, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    s = Shape()
    d, query = s.d_model, NOPE + ROPE
    yield from (("token_embd.weight", (s.vocab, d)), ("output_norm.weight", (d,)), ("output.weight", (s.vocab, d)))
    for i in range(layers):
        found: dict[str, tuple[int, ...]] = {"attn_norm": (d,), "attn_kv_a_mqa": (RANK + ROPE, d)}
        found |= {"attn_kv_a_norm": (RANK,), "attn_kv_b": (HEADS * (NOPE + VALUE), RANK)}
        found |= {"attn_output": (d, HEADS * VALUE), "ffn_norm": (d,)}
        if like == "v3":
            found |= {"attn_q_a": (Q_RANK, d), "attn_q_a_norm": (Q_RANK,), "attn_q_b": (HEADS * query, Q_RANK)}
        else:
            found["attn_q"] = HEADS * query, d
        if i == 0:
            found |= {"ffn_gate": (s.d_ffn, d), "ffn_up": (s.d_ffn, d), "ffn_down": (d, s.d_ffn)}
        else:
            n, f, shared = N_EXPERTS, D_EXPERT, D_EXPERT * LIKE[like]["n_shared_experts"]
            found |= {"ffn_gate_inp": (n, d), "ffn_gate_exps": (n, f, d), "ffn_up_exps": (n, f, d)}
            found |= {"ffn_down_exps": (n, d, f), "ffn_gate_shexp": (shared, d), "ffn_up_shexp": (shared, d)}
            found["ffn_down_shexp"] = d, shared
            if like == "v3":
                yield f"blk.{i}.exp_probs_b.bias", (n,)
        yield from ((f"blk.{i}.{name}.weight", shape) for name, shape in found.items())
