"""Hybrids in float64 NumPy, token by token, straight from a GGUF file's tensors: the oracle of everything faster.

A gated delta net is arXiv 2412.06464, its gate, norm and convolution as Qwen's models have them; attention arXiv
1706.03762 with a gate on what it gives (2505.06708). Experts are moe_forward's. Nothing here knows how the runtime
arranges tensors.
"""

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from forward_parts import rms, sigmoid, silu, softmax, swiglu
from moe_forward import _mixture, _rotate

from pshard.model_config import Delta, ModelConfig

Weights = dict[str, np.ndarray]
MISTAKES = (  # of which each gives other logits
    "heads the other way", "gate before norm", "no gate of the net", "l2 epsilon", "no l2", "no scale of queries",
    "state not reset", "padding in the state", "decay's sign", "update before decay", "no beta", "no silu",
    "convolution reversed", "tail after silu", "no gate of attention", "gate by halves", "all of a head rotated",
)  # fmt: skip


def hybrid_logits(
    config: ModelConfig, tensors: Weights, ids: list[int], mistakes: Collection[str] = (), tiled: bool | None = None
) -> np.ndarray:
    """Logits of every token of one sequence: float64 [n, vocabulary], from tensors by the names of GGUF. tiled: how the
    value heads of these stand; None: as the configuration says."""
    x = hybrid_stream(config, tensors, ids, mistakes, tiled)
    x = rms(x, tensors["output_norm.weight"].astype(np.float64), config.norm_eps)
    return x @ tensors.get("output.weight", tensors["token_embd.weight"]).astype(np.float64).T


def hybrid_stream(
    config: ModelConfig, tensors: Weights, ids: list[int], mistakes: Collection[str] = (), tiled: bool | None = None
) -> np.ndarray:
    """The residual stream after the last layer, float64 [n, d_model]."""
    delta = config.delta
    assert delta is not None
    tensors = {name: array.astype(np.float64) for name, array in tensors.items()}
    x = tensors["token_embd.weight"][ids]
    for layer in range(config.n_layers):
        own = {n.split(".", 2)[2]: w for n, w in tensors.items() if n.startswith(f"blk.{layer}.")}
        normed = rms(x, own["attn_norm.weight"], config.norm_eps)
        if layer in delta.full:
            x = x + _attend(config, own, normed, mistakes)
        else:
            x = x + _delta(config, delta, own, normed, mistakes, delta.tiled if tiled is None else tiled)
        h = rms(x, own["post_attention_norm.weight"], config.norm_eps)
        if config.experts:
            x = x + _mixture(config.experts, own, h)[0]
        else:
            x = x + swiglu(h, own["ffn_gate.weight"], own["ffn_up.weight"], own["ffn_down.weight"])
    return x


def _inputs(delta: Delta, own: Weights, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """q, k and v of all channels before the convolution, z, b and a of every value head, from whichever tensors."""
    group, d = delta.group, delta.head
    if "ssm_in.weight" in own:  # of each key head q, k, and its value heads' v and z
        parts = (x @ own["ssm_in.weight"].T).reshape(len(x), delta.key_heads, -1)
        q, k, v, z = np.split(parts, [d, 2 * d, (2 + group) * d], 2)
        qkv = np.concatenate([part.reshape(len(x), -1) for part in (q, k, v)], 1)
        z = z.reshape(len(x), -1)
    else:
        qkv, z = x @ own["attn_qkv.weight"].T, x @ own["attn_gate.weight"].T
    if "ssm_ba.weight" in own:
        parts = (x @ own["ssm_ba.weight"].T).reshape(len(x), delta.key_heads, 2 * group)
        b, a = (part.reshape(len(x), -1) for part in np.split(parts, 2, 2))
    else:
        b, a = x @ own["ssm_beta.weight"].T, x @ own["ssm_alpha.weight"].T
    return qkv, z, b, a


def _delta(
    config: ModelConfig, delta: Delta, own: Weights, x: np.ndarray, mistakes: Collection[str], tiled: bool
) -> np.ndarray:
    n, d, keys = len(x), delta.head, delta.key_heads * delta.head
    qkv, z, b, a = _inputs(delta, own, x)
    conv = own["ssm_conv1d.weight"].reshape(-1, 4)
    conv = conv[:, ::-1] if "convolution reversed" in mistakes else conv
    before = np.concatenate((np.zeros((3, qkv.shape[1])), qkv))
    if "state not reset" in mistakes:  # as if the same text had been there before
        before[:3] = qkv[-3:]
    if "tail after silu" in mistakes:
        before[:-1] = np.concatenate((before[:3], silu(before[3:-1])))
    mixed = sum(before[i : i + n] * conv[:, i] for i in range(4))
    mixed = mixed if "no silu" in mistakes else silu(mixed)
    q, k = (part.reshape(n, -1, d) for part in (mixed[:, :keys], mixed[:, keys : 2 * keys]))
    v = mixed[:, 2 * keys :].reshape(n, -1, d)
    eps = 1e-2 if "l2 epsilon" in mistakes else 1e-6
    if "no l2" not in mistakes:
        q, k = (part / np.sqrt((part * part).sum(-1, keepdims=True) + eps) for part in (q, k))
    q = q if "no scale of queries" in mistakes else q / np.sqrt(d)
    beta = np.ones_like(b) if "no beta" in mistakes else sigmoid(b)
    g = own["ssm_a"] * np.log1p(np.exp(a + own["ssm_dt.bias"]))
    g = -g if "decay's sign" in mistakes else g
    out = np.zeros((n, delta.value_heads, d))
    tiled = tiled != ("heads the other way" in mistakes)
    number = np.arange(delta.value_heads)
    key = number % delta.key_heads if tiled else number // delta.group
    state = np.zeros((delta.value_heads, d, d))
    for _ in range(2 if "state not reset" in mistakes else 1):
        for i in range(n):
            asked, known, here = q[i, key, None], k[i, key, None], np.exp(g[i])[:, None, None]
            state = state if "update before decay" in mistakes else here * state
            state = state + known.swapaxes(1, 2) * (beta[i][:, None, None] * (v[i][:, None] - known @ state))
            if "padding in the state" in mistakes:  # a row of zeros after each token
                state = state * np.exp(own["ssm_a"] * np.log1p(np.exp(own["ssm_dt.bias"])))[:, None, None]
            state = here * state if "update before decay" in mistakes else state
            out[i] = (asked @ state)[:, 0]
    z = z.reshape(n, -1, d)
    if "gate before norm" in mistakes:
        out = rms(out * silu(z), own["ssm_norm.weight"], config.norm_eps)
    else:
        gate = 1.0 if "no gate of the net" in mistakes else silu(z)
        out = rms(out, own["ssm_norm.weight"], config.norm_eps) * gate
    return out.reshape(n, -1) @ own["ssm_out.weight"].T


def _attend(config: ModelConfig, own: Weights, x: np.ndarray, mistakes: Collection[str]) -> np.ndarray:
    n, d, heads = len(x), config.head_dim, config.n_heads
    both = x @ own["attn_q.weight"].T
    if "gate by halves" in mistakes:
        q, gate = np.split(both, 2, 1)
        q = q.reshape(n, heads, d)
    else:
        q, gate = np.split(both.reshape(n, heads, 2 * d), 2, 2)
        gate = gate.reshape(n, -1)
    k, v = ((x @ own[f"attn_{part}.weight"].T).reshape(n, -1, d) for part in "kv")
    q = rms(q, own["attn_q_norm.weight"], config.norm_eps)
    k = rms(k, own["attn_k_norm.weight"], config.norm_eps)
    if "all of a head rotated" in mistakes:
        config = replace(config, rope=replace(config.rope, dims=d))
    q, k = _rotate(config, q), _rotate(config, k)
    mixed, ahead = np.zeros_like(q), np.arange(n) > np.arange(n)[:, None]
    for head in range(heads):
        of_head = head // (heads // config.n_kv_heads)
        scores = np.where(ahead, -np.inf, q[:, head] @ k[:, of_head].T / np.sqrt(d))
        mixed[:, head] = softmax(scores) @ v[:, of_head]
    gate = np.ones_like(gate) if "no gate of attention" in mistakes else sigmoid(gate)
    return (mixed.reshape(n, -1) * gate) @ own["attn_output.weight"].T
