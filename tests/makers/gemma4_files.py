"""Tiny Gemma 4 models: a float64 forward in NumPy from a recipe, and files of the same weights.

Formulas as modeling_gemma4.py of transformers 5 and gemma4.cpp of llama.cpp have them; nothing of the package is used.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from family_files import add_matrices
from family_forward import gelu
from forward_parts import rms, softmax
from model_files import _add_metadata, _finish

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Gemma4:
    """A recipe. windows, by layer. kv, head: of layers with a window; full_kv, full_head: of the others. experts: how
    many, how many a token takes, rows. rows: of the FFN, by layer. shared: the last so many layers use others' cells.
    each: numbers of a per-layer embedding. same: full layers have no matrix of values. table: GELU is llama.cpp's."""

    windows: tuple[bool, ...] = (True, True, False, True, False)
    window: int = 20
    d: int = 96
    heads: int = 4
    kv: int = 2
    head: int = 16
    full_kv: int = 1
    full_head: int = 32
    rows: tuple[int, ...] = (160,) * 5
    vocab: int = 320
    context: int = 512
    eps: float = 3e-3
    turned: int = 5  # pairs of full layers
    thetas: tuple[float, float] = (7e3, 300.0)
    cap: float = 4.0
    experts: tuple[int, int, int] = (0, 0, 0)
    each: int = 0
    shared: int = 0
    same: bool = True
    table: bool = False

    @property
    def layers(self) -> int:
        return len(self.windows)

    def heads_of(self, layer: int) -> tuple[int, int]:
        """KV heads, and numbers of a head."""
        return (self.kv, self.head) if self.windows[layer] else (self.full_kv, self.full_head)

    def owner(self, layer: int) -> int:
        """Whose cells a layer uses."""
        owning = range(self.layers - self.shared)
        return layer if layer in owning else max(i for i in owning if self.windows[i] == self.windows[layer])


DENSE = Gemma4()
MIXED = Gemma4(experts=(8, 3, 64))
SMALL = Gemma4(
    windows=(True, False, True, False, True, True, False), rows=(96,) * 4 + (192,) * 3, each=32, shared=3, same=False,
    kv=1, full_kv=1,
)  # fmt: skip
GEMMAS = {"dense": DENSE, "mixed": MIXED, "small": SMALL}


def make_gemma4(r: Gemma4, seed: int = 0) -> Weights:
    """Random weights that float32 has, by GGUF name."""
    rng = np.random.default_rng(seed)
    made: Weights = {}

    def matrix(name: str, *shape: int, by: float = 1.0) -> None:
        made[f"{name}.weight"] = by * shape[-1] ** -0.5 * rng.standard_normal(shape)

    def norm(name: str, n: int, by: float = 1.0) -> None:
        made[f"{name}.weight"] = by * (1 + 0.3 * rng.standard_normal(n))

    matrix("token_embd", r.vocab, r.d, by=r.d**0.5 / 4)
    if r.each:
        matrix("per_layer_token_embd", r.vocab, r.layers * r.each, by=(r.layers * r.each) ** 0.5 / 6)
        matrix("per_layer_model_proj", r.layers * r.each, r.d)
        norm("per_layer_proj_norm", r.each)
    for i in range(r.layers):
        b, (kv, head) = f"blk.{i}.", r.heads_of(i)
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            norm(b + name, r.d)
        matrix(b + "attn_q", r.heads * head, r.d)
        by = min(0.4, 3.2 * head**-0.5)  # scores are not scaled: larger ones make rounding grow
        norm(b + "attn_q_norm", head, by)
        if r.owner(i) == i:
            matrix(b + "attn_k", kv * head, r.d)
            norm(b + "attn_k_norm", head)
        if r.owner(i) == i and (r.windows[i] or not r.same):
            matrix(b + "attn_v", kv * head, r.d)
        matrix(b + "attn_output", r.d, r.heads * head)
        for role, shape in (("gate", (r.rows[i], r.d)), ("up", (r.rows[i], r.d)), ("down", (r.d, r.rows[i]))):
            matrix(f"{b}ffn_{role}", *shape)
        if r.experts[0]:
            count, _, rows = r.experts
            matrix(b + "ffn_gate_inp", count, r.d, by=1.5)
            made[b + "ffn_gate_inp.scale"] = math.sqrt(r.d) * (1 + 0.4 * rng.standard_normal(r.d))
            matrix(b + "ffn_gate_up_exps", count, 2 * rows, r.d)
            matrix(b + "ffn_down_exps", count, r.d, rows)
            made[b + "ffn_down_exps.scale"] = rng.uniform(0.5, 2, count)
            for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
                norm(b + name, r.d)
        if r.each:
            matrix(b + "inp_gate", r.each, r.d)
            matrix(b + "proj", r.d, r.each)
            norm(b + "post_norm", r.d)
        made[b + "layer_output_scale.weight"] = rng.uniform(0.6, 1.3, 1)
    norm("output_norm", r.d)
    return {name: values.astype(np.float32).astype(np.float64) for name, values in made.items()}


def gemma4_logits(r: Gemma4, weights: Weights, ids: list[int]) -> np.ndarray:
    """Logits of every token of one sequence, [n, vocabulary]."""
    x = weights["token_embd.weight"][ids] * math.sqrt(r.d)
    beside = _per_layer(r, weights, ids, x) if r.each else None
    cells: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for i in range(r.layers):
        own = {n.split(".", 2)[2].removesuffix(".weight"): w for n, w in weights.items() if n.startswith(f"blk.{i}.")}
        mixed = _attend(r, own, _norm(r, x, own["attn_norm"]), i, cells)
        x = x + _norm(r, mixed, own["post_attention_norm"])
        f = _gate(r, *(own[f"ffn_{role}"] for role in ("gate", "up", "down")), _norm(r, x, own["ffn_norm"]))
        if r.experts[0]:
            f = _norm(r, f, own["post_ffw_norm_1"]) + _norm(r, _mix(r, own, x), own["post_ffw_norm_2"])
        x = x + _norm(r, f, own["post_ffw_norm"])
        if beside is not None:
            g = _gelu(r, x @ own["inp_gate"].T) * beside[:, i]
            x = x + _norm(r, g @ own["proj"].T, own["post_norm"])
        x = x * own["layer_output_scale"]
    logits = _norm(r, x, weights["output_norm.weight"]) @ weights["token_embd.weight"].T
    return r.cap * np.tanh(logits / r.cap)


def _norm(r: Gemma4, x: np.ndarray, weight: np.ndarray | float = 1.0) -> np.ndarray:
    return rms(x, weight, r.eps)


def _per_layer(r: Gemma4, weights: Weights, ids: list[int], x: np.ndarray) -> np.ndarray:
    made = (x @ weights["per_layer_model_proj.weight"].T / math.sqrt(r.d)).reshape(len(ids), r.layers, r.each)
    rows = weights["per_layer_token_embd.weight"][ids].reshape(len(ids), r.layers, r.each) * math.sqrt(r.each)
    return (_norm(r, made, weights["per_layer_proj_norm.weight"]) + rows) / math.sqrt(2)


def _attend(r: Gemma4, own: Weights, h: np.ndarray, layer: int, cells: dict[int, Any]) -> np.ndarray:
    n, (kv, head), position = len(h), r.heads_of(layer), np.arange(len(h))
    q = _turn(r, _norm(r, (h @ own["attn_q"].T).reshape(n, -1, head), own["attn_q_norm"]), layer)
    if r.owner(layer) == layer:
        raw = (h @ own["attn_k"].T).reshape(n, kv, head)
        values = (h @ own["attn_v"].T).reshape(n, kv, head) if "attn_v" in own else raw
        cells[layer] = _turn(r, _norm(r, raw, own["attn_k_norm"]), layer), _norm(r, values)
    k, v = cells[r.owner(layer)]
    seen = position[None] <= position[:, None]
    if r.windows[layer]:
        seen &= position[None] > position[:, None] - r.window
    mixed = np.empty_like(q)
    for i in range(r.heads):
        scores = np.where(seen, q[:, i] @ k[:, i // (r.heads // kv)].T, -np.inf)
        mixed[:, i] = softmax(scores) @ v[:, i // (r.heads // kv)]
    return mixed.reshape(n, -1) @ own["attn_output"].T


def _turn(r: Gemma4, x: np.ndarray, layer: int) -> np.ndarray:
    """Pairs half a head apart; of layers without a window the first few alone, by frequencies of the whole head."""
    head, local = x.shape[-1], r.windows[layer]
    pairs = np.arange(head // 2 if local else r.turned)
    angle = (np.arange(len(x))[:, None] * r.thetas[local] ** (-2 * pairs / head))[:, None]
    a, b, turned = x[..., pairs], x[..., pairs + head // 2], x.copy()
    turned[..., pairs] = a * np.cos(angle) - b * np.sin(angle)
    turned[..., pairs + head // 2] = b * np.cos(angle) + a * np.sin(angle)
    return turned


def _gelu(r: Gemma4, x: np.ndarray) -> np.ndarray:
    if not r.table:
        return gelu(x)
    half = x.astype(np.float32).astype(np.float16).astype(np.float64)
    return np.where(abs(x) < 10, gelu(half).astype(np.float16).astype(np.float64), np.maximum(x, 0))


def _gate(r: Gemma4, gate: np.ndarray, up: np.ndarray, down: np.ndarray, h: np.ndarray) -> np.ndarray:
    return (_gelu(r, h @ gate.T) * (h @ up.T)) @ down.T


def _mix(r: Gemma4, own: Weights, x: np.ndarray) -> np.ndarray:
    """The experts, which a router of its own norm chooses."""
    _, used, rows = r.experts
    logits = (_norm(r, x) * own["ffn_gate_inp.scale"] / math.sqrt(r.d)) @ own["ffn_gate_inp"].T
    shares = softmax(logits)
    chosen, h, added = np.argsort(-shares, 1)[:, :used], _norm(r, x, own["pre_ffw_norm_2"]), np.zeros_like(x)
    for t, numbers in enumerate(chosen):
        for e in numbers:
            weight = shares[t, e] / shares[t, numbers].sum() * own["ffn_down_exps.scale"][e]
            gate, up = own["ffn_gate_up_exps"][e][:rows], own["ffn_gate_up_exps"][e][rows:]
            added[t] += weight * _gate(r, gate, up, own["ffn_down_exps"][e], h[t])
    return added


def write_gemma4(path: Path, r: Gemma4, weights: Weights, qtype: str = "F32", **metadata: Any) -> Path:
    """The GGUF file. metadata: further keys, as they are."""
    writer, half = gguf.GGUFWriter(str(path), "gemma4"), r.full_head // 2
    writer.add_name(path.stem)
    keys: dict[str, Any] = {
        "block_count": r.layers, "context_length": r.context, "embedding_length": r.d,
        "feed_forward_length": list(r.rows) if len(set(r.rows)) > 1 else r.rows[0],
        "attention.head_count": r.heads, "attention.head_count_kv": [r.heads_of(i)[0] for i in range(r.layers)],
        "attention.key_length": r.full_head, "attention.value_length": r.full_head,
        "attention.key_length_swa": r.head, "attention.value_length_swa": r.head,
        "rope.dimension_count": r.full_head, "rope.dimension_count_swa": r.head, "rope.freq_base": r.thetas[0],
        "rope.freq_base_swa": r.thetas[1], "attention.layer_norm_rms_epsilon": r.eps,
        "attention.sliding_window": r.window, "attention.sliding_window_pattern": list(r.windows),
        "attention.shared_kv_layers": r.shared, "embedding_length_per_layer_input": r.each,
        "final_logit_softcapping": r.cap, "vocab_size": r.vocab,
    }  # fmt: skip
    if r.experts[0]:
        keys |= dict(zip(("expert_count", "expert_used_count", "expert_feed_forward_length"), r.experts))
    keys = {f"gemma4.{key}": value for key, value in keys.items()}
    _add_metadata(writer, keys | {"tokenizer.ggml.model": "none"} | metadata)
    turned = np.array([1.0] * r.turned + [1e30] * (half - r.turned))
    add_matrices(writer, weights | {"rope_freqs.weight": turned}, qtype)
    return _finish(writer, path)


_HF_NAMES = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "router.proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2", "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
}  # fmt: skip
_HF_WHOLE = {
    "token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight",
    "per_layer_token_embd.weight": "embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "per_layer_projection_norm.weight",
}  # fmt: skip
_HF_OTHER = {
    "ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj", "ffn_down_exps.weight": "experts.down_proj",
    "layer_output_scale.weight": "layer_scalar",
}  # fmt: skip


def hf_name(name: str) -> str:
    """What transformers calls a tensor, below `model.`."""
    if name in _HF_WHOLE:
        return _HF_WHOLE[name]
    _, layer, role = name.split(".", 2)
    return f"layers.{layer}." + (_HF_OTHER.get(role) or f"{_HF_NAMES[role.removesuffix('.weight')]}.weight")


def hf_settings(r: Gemma4) -> dict[str, Any]:
    """What Gemma4TextConfig is made of."""
    rope = {
        "full_attention": {
            "rope_type": "proportional", "rope_theta": r.thetas[0], "partial_rotary_factor": 2 * r.turned / r.full_head,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": r.thetas[1]},
    }  # fmt: skip
    settings: dict[str, Any] = {
        "num_hidden_layers": r.layers, "hidden_size": r.d, "num_attention_heads": r.heads, "head_dim": r.head,
        "num_key_value_heads": r.kv, "global_head_dim": r.full_head, "intermediate_size": r.rows[0],
        "vocab_size": r.vocab, "vocab_size_per_layer_input": r.vocab, "max_position_embeddings": r.context,
        "rms_norm_eps": r.eps, "sliding_window": r.window, "rope_parameters": rope, "attention_k_eq_v": r.same,
        "layer_types": [f"{'sliding' if seen else 'full'}_attention" for seen in r.windows],
        "hidden_size_per_layer_input": r.each, "num_kv_shared_layers": r.shared, "final_logit_softcapping": r.cap,
        "use_double_wide_mlp": len(set(r.rows)) > 1, "attn_implementation": "eager", "pad_token_id": 0,
    }  # fmt: skip
    if r.same:
        settings["num_global_key_value_heads"] = r.full_kv
    if r.experts[0]:
        names = ("num_experts", "top_k_experts", "moe_intermediate_size")
        settings |= {"enable_moe_block": True, "experts_implementation": "eager"} | dict(zip(names, r.experts))
    return settings


def write_gemma4_folder(folder: Path, r: Gemma4, weights: Weights) -> Any:
    """Save the same weights as a transformers model, which is returned in eval mode."""
    import torch
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    model = Gemma4ForCausalLM(Gemma4TextConfig(**hf_settings(r))).eval()
    places = dict(model.state_dict(keep_vars=True))
    for name, values in weights.items():
        place = places.pop(f"model.{hf_name(name)}")
        with torch.no_grad():
            place.copy_(torch.from_numpy(values).reshape(place.shape))
    assert places.keys() == {"lm_head.weight"}, places.keys()
    model.save_pretrained(folder)
    return model


def write_published_config(folder: Path, r: Gemma4) -> None:
    """The config.json beside saved weights, as folders of whole models have it."""
    text = hf_settings(r) | {"model_type": "gemma4_text", "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": text}))
