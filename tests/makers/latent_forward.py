"""Multi-head latent attention in float64 NumPy, head by head with keys and values made of the latents (arXiv
2405.04434, 2.1; rotation 2104.09864; YaRN 2309.00071): what the runtime does with absorbed matrices."""

import numpy as np
from forward_parts import rms as norm_rows
from forward_parts import softmax, stretch

from pshard.model_config import ModelConfig

Weights = dict[str, np.ndarray]  # by role, float64


def attend_by_latents(config: ModelConfig, own: Weights, x: np.ndarray) -> np.ndarray:
    """What a layer's attention adds to the residual stream; x: normed hidden states [n, d]."""
    latent = config.latent
    assert latent is not None
    queries = make_queries(config, own, x).reshape(len(x), config.n_heads, latent.query)
    kept = x @ own["attn_kv_a_mqa.weight"].T
    latents = norm_rows(kept[:, : latent.rank], own["attn_kv_a_norm.weight"], config.norm_eps)
    shared = turn(config, kept[:, latent.rank :])
    scale = latent.score_scale / np.sqrt(latent.query)
    mixed = np.zeros((len(x), config.n_heads, latent.value))
    past = np.tril(np.ones((len(x), len(x)), bool))
    for head in range(config.n_heads):
        keys = latents @ own["attn_k_b.weight"][head]
        values = latents @ own["attn_v_b.weight"][head].T
        plain, turned = queries[:, head, : latent.nope], turn(config, queries[:, head, latent.nope :])
        scores = np.where(past, (plain @ keys.T + turned @ shared.T) * scale, -np.inf)
        mixed[:, head] = softmax(scores) @ values
    return mixed.reshape(len(x), -1) @ own["attn_output.weight"].T


def make_queries(config: ModelConfig, own: Weights, x: np.ndarray) -> np.ndarray:
    """All heads' queries: of the hidden states, or of a normed vector of fewer numbers."""
    if "attn_q.weight" in own:
        return x @ own["attn_q.weight"].T
    lowered = norm_rows(x @ own["attn_q_a.weight"].T, own["attn_q_a_norm.weight"], config.norm_eps)
    return lowered @ own["attn_q_b.weight"].T


def turn(config: ModelConfig, x: np.ndarray) -> np.ndarray:
    """x [n, dims], row i rotated by position i."""
    rope = config.rope
    turned = np.empty_like(x)
    for pair, frequency in enumerate(list_frequencies(config)):
        a, b = (2 * pair, 2 * pair + 1) if rope.pairing == "adjacent" else (pair, pair + rope.dims // 2)
        angle = np.arange(len(x)) * frequency
        turned[:, a] = x[:, a] * np.cos(angle) - x[:, b] * np.sin(angle)
        turned[:, b] = x[:, b] * np.cos(angle) + x[:, a] * np.sin(angle)
    factor = 1.0 if rope.attention_factor is None else rope.attention_factor
    return factor * turned


def list_frequencies(config: ModelConfig) -> np.ndarray:
    """base^(-2 pair / dims), or YaRN's blend of these and slower ones, between whole pairs."""
    rope = config.rope
    if rope.scaling == "none":
        return rope.base ** (-np.arange(0, rope.dims, 2) / rope.dims)
    assert rope.scaling == "yarn" and rope.rounded
    return stretch(rope.base, rope.dims, rope.factor, rope.original_context, (rope.beta_fast, rope.beta_slow))
