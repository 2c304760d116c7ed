"""A model with routed experts in float64 NumPy, token by token from the formulas: the oracle of everything faster.

It shares nothing with the runtime but the numbers of the ModelConfig. Formulas: attention arXiv 1706.03762, rotation
2104.09864, RMS norm 1910.07467, SwiGLU 2002.05202; routing 2101.03961 (softmax) and 2412.19437, 2.1.2 (sigmoid with a
bias for the choice, groups).
"""

from typing import NamedTuple

import numpy as np
from forward_parts import rms, sigmoid, softmax, stretch, swiglu
from latent_forward import attend_by_latents
from random_blocks import dequantise_rows

from pshard.model_config import Experts, ModelConfig
from pshard.models import ModelFile

Weights = dict[str, np.ndarray]  # by GGUF name, float64; stacks are [experts, rows, cols]
CLAMP = 7  # what gpt-oss' experts take of gate and up


class Traced(NamedTuple):
    """Logits [n, vocabulary], by layer the experts of every token, the best first, [n, used], and the residual stream
    after the last layer."""

    logits: np.ndarray
    chosen: dict[int, np.ndarray]
    stream: np.ndarray


def read_weights(model: ModelFile) -> Weights:
    """All tensors of a model, decoded by the gguf package."""
    weights = {}
    for tensor in (t for unit in model.spec.units for t in unit.tensors):
        raw = model.tensor_bytes(tensor.name).reshape(tensor.rows, -1)
        if tensor.qtype == "F32":
            values = raw.view(np.float32)
        else:
            values = dequantise_rows(raw, tensor.qtype, tensor.rows, tensor.cols)
        shape = (tensor.parts, tensor.shape[0] // tensor.parts, *tensor.shape[1:]) if tensor.parts else tensor.shape
        factors = [model.factor(tensor.name, part) for part in range(max(1, tensor.parts))]
        each = np.array(factors).reshape(-1, *(1 for _ in shape[1:]))
        weights[tensor.name] = values.astype(np.float64).reshape(shape) * each
    return weights


def moe_logits(config: ModelConfig, weights: Weights, ids: list[int]) -> np.ndarray:
    """Logits of every token of one sequence: float64 [n, vocabulary]."""
    return trace_moe(config, weights, ids).logits


def trace_moe(config: ModelConfig, weights: Weights, ids: list[int]) -> Traced:
    """Logits and which experts were chosen. Dense layers, and models without experts, are computed too."""
    x = weights["token_embd.weight"][ids]
    chosen = {}
    for layer in range(config.n_layers):
        own = {n.split(".", 2)[2]: w for n, w in weights.items() if n.startswith(f"blk.{layer}.")}
        window = config.sliding_window if layer % config.window_every == 0 else 0
        normed = rms(x, own["attn_norm.weight"], config.norm_eps)
        if config.latent:
            x = x + attend_by_latents(config, own, normed)
        else:
            x = x + _attention(config, own, normed, window or len(x))
        h = rms(x, own["ffn_norm.weight"], config.norm_eps)
        if config.experts is None or layer < config.experts.dense_layers:
            x = x + swiglu(h, own["ffn_gate.weight"], own["ffn_up.weight"], own["ffn_down.weight"])
        else:
            added, chosen[layer] = _mixture(config.experts, own, h)
            x = x + added
    normed = rms(x, weights["output_norm.weight"], config.norm_eps)
    return Traced(normed @ weights.get("output.weight", weights["token_embd.weight"]).T, chosen, x)


def _attention(config: ModelConfig, own: Weights, x: np.ndarray, window: int) -> np.ndarray:
    """Each token attends to the last `window` ones, itself among them. A sink is one more column without a value."""
    n, d = len(x), config.head_dim
    heads = {}
    for part in "qkv":
        heads[part] = (x @ own[f"attn_{part}.weight"].T + own.get(f"attn_{part}.bias", 0.0)).reshape(n, -1, d)
        if f"attn_{part}_norm.weight" in own:
            heads[part] = rms(heads[part], own[f"attn_{part}_norm.weight"], config.norm_eps)
    q, k, v = _rotate(config, heads["q"]), _rotate(config, heads["k"]), heads["v"]
    mixed = np.zeros_like(q)
    group, sinks = config.n_heads // config.n_kv_heads, own.get("attn_sinks.weight", np.zeros((config.n_heads, 0)))
    place = np.arange(n)
    seen = (place <= place[:, None]) & (place > place[:, None] - window)
    for head in range(config.n_heads):
        scores = np.where(seen, q[:, head] @ k[:, head // group].T / np.sqrt(d), -np.inf)
        beside = np.broadcast_to(sinks[head], (n, np.size(sinks[head])))
        mixed[:, head] = softmax(np.hstack((scores, beside)))[:, :n] @ v[:, head // group]
    return mixed.reshape(n, -1) @ own["attn_output.weight"].T + own.get("attn_output.bias", 0.0)


def _rotate(config: ModelConfig, x: np.ndarray) -> np.ndarray:
    """Each pair of the first `dims` numbers of every head, by its position times its frequency."""
    rope = config.rope
    frequencies, factor = _frequencies(config)
    turned, half = x.copy(), rope.dims // 2
    for pair, frequency in enumerate(frequencies):
        a, b = (pair, pair + half) if rope.pairing == "halves" else (2 * pair, 2 * pair + 1)
        angle = np.arange(len(x))[:, None] * frequency
        turned[..., a] = factor * (x[..., a] * np.cos(angle) - x[..., b] * np.sin(angle))
        turned[..., b] = factor * (x[..., b] * np.cos(angle) + x[..., a] * np.sin(angle))
    return turned


def _frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """base^(-2 pair / dims), or YaRN's blend of these; and what multiplies sine and cosine."""
    rope = config.rope
    if rope.scaling == "none" and not rope.freq_factors:
        return rope.base ** (-np.arange(0, rope.dims, 2) / rope.dims), 1.0
    if rope.scaling != "yarn":
        raise NotImplementedError(f"the oracle does not scale positions this way ({rope})")
    turns = rope.beta_fast, rope.beta_slow
    blended = stretch(rope.base, rope.dims, rope.factor, rope.original_context, turns, rope.rounded)
    return blended, 1 + 0.1 * np.log(rope.factor)


def _mixture(rule: Experts, own: Weights, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What experts and shared experts add to the residual stream, and which were chosen."""
    added = np.zeros_like(x)
    logits = x @ own["ffn_gate_inp.weight"].T + own.get("ffn_gate_inp.bias", 0.0)
    routes = [_route(rule, row, own.get("exp_probs_b.bias")) for row in logits]
    chosen, shares = (np.stack(parts) for parts in zip(*routes))
    for number in np.unique(chosen):
        rows, places = np.nonzero(chosen == number)
        added[rows] += shares[rows, places][:, None] * _expert(rule, own, number, x[rows])
    if rule.d_shared:
        shared = swiglu(x, *(own[f"ffn_{role}_shexp.weight"] for role in ("gate", "up", "down")))
        if rule.shared_gate:
            shared *= sigmoid(x @ own["ffn_gate_inp_shexp.weight"])[:, None]
        added += shared
    return added, chosen


def _expert(rule: Experts, own: Weights, number: int, x: np.ndarray) -> np.ndarray:
    """One expert's results for some tokens; gpt-oss clamps both factors, and the gate's sigmoid is steeper."""
    gate, up, down = (own[f"ffn_{role}_exps.weight"][number] for role in ("gate", "up", "down"))
    if rule.activation == "silu":
        return swiglu(x, gate, up, down)
    biases = (own[f"ffn_{role}_exps.bias"].reshape(rule.count, -1) for role in ("gate", "up", "down"))
    of_gate, of_up, of_down = (bias[number] for bias in biases)
    g, u = np.minimum(x @ gate.T + of_gate, CLAMP), np.clip(x @ up.T + of_up, -CLAMP, CLAMP)
    return (g * sigmoid(1.702 * g) * (u + 1)) @ down.T + of_down


def _route(rule: Experts, logits: np.ndarray, choice_bias: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """One token's experts, the best first, and what each of their results is multiplied by."""
    scores = {"softmax": softmax, "sigmoid": sigmoid, "chosen": lambda x: x}[rule.scores](logits)
    choice = scores if choice_bias is None else scores + choice_bias
    if rule.groups > 1:
        members = choice.reshape(rule.groups, -1)
        best = np.argsort(-np.sort(members)[:, -2:].sum(1), kind="stable")[: rule.groups_used]
        choice = np.where(np.isin(np.arange(rule.count) // members.shape[1], best), choice, -np.inf)
    ids = np.argsort(-choice, kind="stable")[: rule.used]
    shares = scores[ids]
    if rule.scores == "chosen":
        shares = softmax(shares)
    elif rule.normed:
        shares = shares / shares.sum()
    return ids, shares * rule.scale
