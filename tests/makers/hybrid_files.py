"""Tiny hybrids, like Qwen3-Next and the dense and sparse Qwen3.5: GGUF files, and folders of transformers."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import gguf
import numpy as np
from model_files import _K_SCALES, _add_encoded, _add_metadata, _finish, random_matrix

D, HEADS, KV_HEADS, HEAD, ROPE, VOCAB, CONTEXT, FFN = 256, 4, 2, 64, 16, 320, 1024, 256
N_EXPERTS, USED, D_EXPERT, D_SHARED = 8, 3, 64, 64
KEY_HEADS, DELTA_HEAD = 2, 32
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}  # the others compute no float64


class Like(NamedTuple):
    """A model's architecture as GGUF files and transformers call it, and how its value heads stand in GGUF."""

    gguf: str
    hf: str
    value_heads: int
    tiled: bool
    moe: bool


LIKE = {
    "next": Like("qwen3next", "qwen3_next", 4, False, True),
    "dense": Like("qwen35", "qwen3_5_text", 6, True, False),
    "moe": Like("qwen35moe", "qwen3_5_moe_text", 4, True, True),
}


def random_hybrid(like: str, layers: int = 4, seed: int = 0) -> dict[str, np.ndarray]:
    """A model's weights in float32 by GGUF name, as newer files have them."""
    rng = np.random.default_rng(seed)
    return {name: _draw(rng, name, shape) for name, shape in _shapes(LIKE[like], layers)}


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = rng.standard_normal(shape).astype(np.float32)
    if name.endswith("ssm_a"):
        return -rng.uniform(0.02, 2, shape).astype(np.float32)
    if name.endswith("ffn_gate_inp_shexp.weight"):
        return values * np.float32(shape[0] ** -0.5)
    if len(shape) == 1:
        return 0.1 * values + np.float32(not name.endswith("bias"))
    return values if name == "token_embd.weight" else values * np.float32(shape[-1] ** -0.5)


def _shapes(like: Like, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from (("token_embd.weight", (VOCAB, D)), ("output_norm.weight", (D,)), ("output.weight", (VOCAB, D)))
    for i in range(layers):
        own = _attention() if (i + 1) % 4 == 0 else _delta(like)
        own |= {"attn_norm.weight": (D,), "post_attention_norm.weight": (D,)} | (_experts() if like.moe else _ffn())
        yield from ((f"blk.{i}.{role}", shape) for role, shape in own.items())


def _attention() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q.weight": (2 * HEADS * HEAD, D),
        "attn_output.weight": (D, HEADS * HEAD),
    }
    shapes |= {f"attn_{part}.weight": (KV_HEADS * HEAD, D) for part in "kv"}
    return shapes | {f"attn_{part}_norm.weight": (HEAD,) for part in "qk"}


def _delta(like: Like) -> dict[str, tuple[int, ...]]:
    keys, values = 2 * KEY_HEADS * DELTA_HEAD, like.value_heads * DELTA_HEAD
    heads: dict[str, tuple[int, ...]] = {f"ssm_{part}.weight": (like.value_heads, D) for part in ("beta", "alpha")}
    if like.gguf == "qwen3next":
        heads = {"ssm_ba.weight": (2 * like.value_heads, D)}
    return heads | {
        "attn_qkv.weight": (keys + values, D), "attn_gate.weight": (values, D), "ssm_conv1d.weight": (keys + values, 4),
        "ssm_dt.bias": (like.value_heads,), "ssm_a": (like.value_heads,), "ssm_norm.weight": (DELTA_HEAD,),
        "ssm_out.weight": (D, values),
    }  # fmt: skip


def _ffn() -> dict[str, tuple[int, ...]]:
    return {"ffn_gate.weight": (FFN, D), "ffn_up.weight": (FFN, D), "ffn_down.weight": (D, FFN)}


def _experts() -> dict[str, tuple[int, ...]]:
    n, f, s = N_EXPERTS, D_EXPERT, D_SHARED
    return {
        "ffn_gate_inp.weight": (n, D), "ffn_gate_exps.weight": (n, f, D), "ffn_up_exps.weight": (n, f, D),
        "ffn_down_exps.weight": (n, D, f), "ffn_gate_shexp.weight": (s, D), "ffn_up_shexp.weight": (s, D),
        "ffn_down_shexp.weight": (D, s), "ffn_gate_inp_shexp.weight": (D,),
    }  # fmt: skip


def fuse_inputs(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a grouped model with one `ssm_in` of each layer, as older files have it."""
    fused = {}
    for name, array in tensors.items():
        if name.endswith("attn_qkv.weight"):
            gate = tensors[name.replace("attn_qkv", "attn_gate")]
            keys = KEY_HEADS * DELTA_HEAD
            parts = (array[:keys], array[keys : 2 * keys], array[2 * keys :], gate)
            by_head = [part.reshape(KEY_HEADS, -1, D) for part in parts]
            fused[name.replace("attn_qkv", "ssm_in")] = np.concatenate(by_head, 1).reshape(-1, D)
        elif not name.endswith("attn_gate.weight"):
            fused[name] = array
    return fused


def write_hybrid_gguf(
    path: Path,
    like: str,
    tensors: dict[str, np.ndarray],
    qtype: str = "F32",
    metadata: dict[str, Any] | None = None,
    qtypes: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """A GGUF file of tensors by name. Matrices are of a quant type (qtypes: of another, by what they are in a layer),
    where their rows are whole blocks of it; of a type that the gguf package cannot encode their numbers are others."""
    writer = gguf.GGUFWriter(str(path), LIKE[like].gguf)
    writer.add_name(path.stem)
    layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blk."))
    keys = {f"{LIKE[like].gguf}.{key}": value for key, value in _settings(LIKE[like], layers).items()}
    _add_metadata(writer, {"tokenizer.ggml.model": "none", **keys, **(metadata or {})})
    rng = np.random.default_rng(7)
    for name, array in tensors.items():
        array = np.ascontiguousarray(array)
        if array.ndim == 1 or name.endswith(("ffn_gate_inp.weight", "conv1d.weight")):
            writer.add_tensor(name, array)
            continue
        kind = qtypes.get(name.removesuffix(".weight").split(".")[-1], qtype)
        block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
        kind = kind if array.shape[-1] % block == 0 else "F32"
        _add_encoded(writer, name, _encode(array, kind, rng), kind)
    return _finish(writer, path)


def _encode(array: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    """Bytes of the last dimension's blocks."""
    if kind in _K_SCALES:
        encoded = random_matrix(array.size // array.shape[-1], array.shape[-1], kind, rng)
    else:
        encoded = gguf.quants.quantize(array, gguf.GGMLQuantizationType[kind])
    return encoded.view(np.uint8).reshape(*array.shape[:-1], -1)


def read_hybrid_gguf(path: Path) -> dict[str, np.ndarray]:
    """What the gguf package makes of a file's tensors, in float32."""
    found = gguf.GGUFReader(path).tensors
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1].tolist()) for t in found}


def _settings(like: Like, layers: int) -> dict[str, Any]:
    keys = {
        "block_count": layers, "context_length": CONTEXT, "embedding_length": D, "vocab_size": VOCAB,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD,
        "attention.value_length": HEAD, "attention.layer_norm_rms_epsilon": 1e-6, "rope.dimension_count": ROPE,
        "rope.freq_base": 1e4, "ssm.conv_kernel": 4, "ssm.state_size": DELTA_HEAD, "ssm.group_count": KEY_HEADS,
        "ssm.time_step_rank": like.value_heads, "ssm.inner_size": like.value_heads * DELTA_HEAD,
        "full_attention_interval": 4,
    }  # fmt: skip
    if like.gguf != "qwen3next":
        keys["rope.dimension_sections"] = [3, 3, 2, 0]
    if like.gguf != "qwen35moe":
        keys["feed_forward_length"] = FFN
    if like.moe:
        keys |= {"expert_count": N_EXPERTS, "expert_used_count": USED, "expert_feed_forward_length": D_EXPERT}
        keys["expert_shared_feed_forward_length"] = D_SHARED
    return keys


# --- transformers ---------------------------------------------------------------------------------------------------


def hf_settings(like: str, layers: int = 4) -> dict[str, Any]:
    """A config.json's numbers."""
    kind = LIKE[like]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": ROPE / HEAD}
    if kind.tiled:
        rope |= {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
    settings = {
        "num_hidden_layers": layers, "hidden_size": D, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD, "intermediate_size": FFN, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6, "rope_parameters": rope, "tie_word_embeddings": False,
        "linear_num_key_heads": KEY_HEADS, "linear_num_value_heads": kind.value_heads, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": DELTA_HEAD, "linear_value_head_dim": DELTA_HEAD,
    }  # fmt: skip
    if kind.moe:
        settings |= {"num_experts": N_EXPERTS, "num_experts_per_tok": USED, "moe_intermediate_size": D_EXPERT}
        settings["shared_expert_intermediate_size"] = D_SHARED
    return settings


def write_hybrid_folder(path: Path, like: str, layers: int = 4, seed: int = 0) -> Any:
    """Save a random transformers model; returns it in eval mode."""
    import torch
    import transformers
    from transformers.models import qwen3_5, qwen3_5_moe

    classes = {
        "next": (transformers.Qwen3NextForCausalLM, transformers.Qwen3NextConfig),
        "dense": (qwen3_5.modeling_qwen3_5.Qwen3_5ForCausalLM, qwen3_5.configuration_qwen3_5.Qwen3_5TextConfig),
        "moe": (
            qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeForCausalLM,
            qwen3_5_moe.configuration_qwen3_5_moe.Qwen3_5MoeTextConfig,
        ),
    }
    model_class, config_class = classes[like]
    model = model_class(config_class(**hf_settings(like, layers), **EAGER))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=generator)
            if key.endswith("A_log"):
                weight.copy_(0.5 * values)
            elif "embed_tokens" in key:
                weight.copy_(values)
            elif weight.ndim >= 2:
                weight.copy_(values * weight.shape[-1] ** -0.5)
            else:
                weight.copy_((1.0 if key.endswith("linear_attn.norm.weight") else 0.0) + 0.1 * values)
    model.eval().save_pretrained(path)
    return model


def take_hybrid_tensors(like: str, model: Any) -> dict[str, np.ndarray]:
    """A transformers model's weights in float32 as a GGUF file has them."""
    kind, found = LIKE[like], dict[str, np.ndarray]()
    names = {
        "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "post_attention_norm.weight",
        "self_attn.q_proj.weight": "attn_q.weight", "self_attn.k_proj.weight": "attn_k.weight",
        "self_attn.v_proj.weight": "attn_v.weight", "self_attn.o_proj.weight": "attn_output.weight",
        "self_attn.q_norm.weight": "attn_q_norm.weight", "self_attn.k_norm.weight": "attn_k_norm.weight",
        "linear_attn.in_proj_qkv.weight": "attn_qkv.weight", "linear_attn.in_proj_z.weight": "attn_gate.weight",
        "linear_attn.in_proj_b.weight": "ssm_beta.weight", "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
        "linear_attn.in_proj_ba.weight": "ssm_ba.weight", "linear_attn.in_proj_qkvz.weight": "ssm_in.weight",
        "linear_attn.conv1d.weight": "ssm_conv1d.weight", "linear_attn.dt_bias": "ssm_dt.bias",
        "linear_attn.A_log": "ssm_a", "linear_attn.norm.weight": "ssm_norm.weight",
        "linear_attn.out_proj.weight": "ssm_out.weight", "mlp.gate.weight": "ffn_gate_inp.weight",
        "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight", "mlp.experts.down_proj": "ffn_down_exps.weight",
        **{f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
        **{f"mlp.shared_expert.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")},
    }  # fmt: skip
    whole = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}
    for key, weight in model.state_dict().items():
        array = weight.detach().float().numpy()
        if key == "model.norm.weight":
            found["output_norm.weight"] = 1 + array
        elif key in whole:
            found[whole[key]] = array
        elif key.endswith("mlp.experts.gate_up_proj"):
            block = f"blk.{key.split('.')[2]}."
            found[block + "ffn_gate_exps.weight"], found[block + "ffn_up_exps.weight"] = np.split(array, 2, 1)
        else:
            _, _, layer, inner = key.split(".", 3)
            role = names[inner]
            found[f"blk.{layer}.{role}"] = _convert(kind, role, array)
    return found


def _convert(kind: Like, role: str, array: np.ndarray) -> np.ndarray:
    """One tensor of a layer by GGUF's rules."""
    if role.endswith("norm.weight") and role != "ssm_norm.weight":
        return 1 + array
    if role == "ffn_gate_inp_shexp.weight":
        return array[0]
    if role == "ssm_a":
        array = -np.exp(array)
    if role == "ssm_conv1d.weight":
        array = array[:, 0]
    if not kind.tiled:
        return array
    keys, d = 2 * KEY_HEADS * DELTA_HEAD, DELTA_HEAD
    if role in ("attn_qkv.weight", "ssm_conv1d.weight"):
        return np.concatenate((array[:keys], tile(kind, array[keys:], d)))
    if role == "attn_gate.weight":
        return tile(kind, array, d)
    if role in ("ssm_beta.weight", "ssm_alpha.weight", "ssm_a", "ssm_dt.bias"):
        return tile(kind, array, 1)
    return tile(kind, array.T, d).T if role == "ssm_out.weight" else array


def tile(kind: Like, rows: np.ndarray, width: int) -> np.ndarray:
    """Value heads of `width` rows each that stand by key head, one of each key head in turn."""
    by_head = rows.reshape(KEY_HEADS, kind.value_heads // KEY_HEADS, width, *rows.shape[1:])
    return by_head.swapaxes(0, 1).reshape(rows.shape)
