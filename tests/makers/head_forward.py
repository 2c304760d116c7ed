"""A multi-token head in float64 NumPy, from a file's tensors: the oracle of everything faster.

For token x_p at position p and h_{p-1}, the model's state after output_norm one position before (DeepSeek-V3, arXiv
2412.19437, 2.2; the layout of cells as llama.cpp has it): z = eh_proj [norm(E[x_p]); norm(h_{p-1})], y = block(z), s =
norm(y), logits of x_{p+1} = head s. Drafts are chained by s. The blocks themselves are other makers'.
"""

from collections.abc import Collection

import numpy as np
from forward_parts import rms, swiglu
from hybrid_forward import _attend, hybrid_stream
from latent_forward import attend_by_latents
from moe_forward import _attention, _mixture, trace_moe

from pshard.model_config import ModelConfig

Weights = dict[str, np.ndarray]
MISTAKES = (  # of which each gives other logits
    "no norm of the token", "no norm of the state", "halves swapped", "output's norm", "state before its norm",
    "state of the same position", "first cell left out", "no past", "chained before the norm",
    "the model's table", "the model's head",
)  # fmt: skip
LATER = ("chained before the norm",)  # seen from the second draft on
OF_OWN = ("the model's table", "the model's head")  # where the head has its own


def head_logits(
    config: ModelConfig, tensors: Weights, ids: list[int], drafts: int, mistakes: Collection[str] = ()
) -> np.ndarray:
    """Logits of so many drafts behind these tokens, of which the last one is drafted from and not computed by the
    model; each draft but the first follows the likeliest one before it. float64 [drafts, vocabulary]."""
    w = {name: array.astype(np.float64) for name, array in tensors.items()}
    own = {n.split(".", 2)[2]: a for n, a in w.items() if n.startswith(f"blk.{config.n_layers}.")}
    stream = _stream(config, w, ids[:-1])
    states = rms(stream, w["output_norm.weight"], config.norm_eps)
    states = stream if "state before its norm" in mistakes else states
    before = [np.zeros(config.d_model), *states]
    if "state of the same position" in mistakes:
        before = [*states, states[-1]]
    ids, found = list(ids), []
    for _ in range(drafts):
        y = _block(config, own, _join(config, w, own, ids, before, mistakes), mistakes)
        norm = w["output_norm.weight"] if "output's norm" in mistakes else own["nextn.shared_head_norm.weight"]
        s = rms(y, norm, config.norm_eps)
        head = w.get("output.weight", w["token_embd.weight"])
        if "the model's head" not in mistakes:
            head = own.get("nextn.shared_head_head.weight", head)
        found.append(head @ s[-1])
        before.append((y if "chained before the norm" in mistakes else s)[-1])
        ids.append(int(found[-1].argmax()))
    return np.stack(found)


def _stream(config: ModelConfig, w: Weights, ids: list[int]) -> np.ndarray:
    if config.delta:
        return hybrid_stream(config, w, ids)
    named = {name.replace("post_attention_norm", "ffn_norm"): array for name, array in w.items()}
    return trace_moe(config, named, ids).stream


def _join(
    config: ModelConfig,
    w: Weights,
    own: Weights,
    ids: list[int],
    before: list[np.ndarray],
    mistakes: Collection[str],
) -> np.ndarray:
    table = w["token_embd.weight"]
    if "the model's table" not in mistakes:
        table = own.get("nextn.embed_tokens.weight", table)
    token, state = table[ids], np.stack(before)
    if "no norm of the token" not in mistakes:
        token = rms(token, own["nextn.enorm.weight"], config.norm_eps)
    if "no norm of the state" not in mistakes:
        state = rms(state, own["nextn.hnorm.weight"], config.norm_eps)
    both = (state, token) if "halves swapped" in mistakes else (token, state)
    return np.concatenate(both, 1) @ own["nextn.eh_proj.weight"].T


def _block(config: ModelConfig, own: Weights, z: np.ndarray, mistakes: Collection[str]) -> np.ndarray:
    normed = rms(z, own["attn_norm.weight"], config.norm_eps)
    skip = 1 if "first cell left out" in mistakes else len(z) - 1 if "no past" in mistakes else 0
    if config.latent:
        y = z[skip:] + attend_by_latents(config, own, normed[skip:])
    elif config.delta:
        y = z[skip:] + _attend(config, own, normed[skip:], ())
    else:
        y = z[skip:] + _attention(config, own, normed[skip:], len(z))
    after = own["ffn_norm.weight"] if "ffn_norm.weight" in own else own["post_attention_norm.weight"]
    h = rms(y, after, config.norm_eps)
    if config.experts:
        return y + _mixture(config.experts, own, h)[0]
    return y + swiglu(h, own["ffn_gate.weight"], own["ffn_up.weight"], own["ffn_down.weight"])
