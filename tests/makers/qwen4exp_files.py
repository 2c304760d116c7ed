"""Tiny models like Qwen3.8-Flash-Next (qwen4exp): random weights, GGUF files of them, and logits in float64 NumPy.

The forward is written from the formulas of the page on families, token by token, straight from tensors by GGUF name.
Nothing of the runtime is used.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from forward_parts import rms, sigmoid, silu, softmax, swiglu
from model_files import _add_encoded, _add_metadata, _finish

Weights = dict[str, np.ndarray]
VOCAB, CONTEXT = 320, 4096


@dataclass(frozen=True)
class Recipe:
    """A model's sizes. full: of so many layers the last has attention. streams: count and rank of their gates. index:
    heads, numbers of each, tokens of a block, tokens that are chosen. grams: (longest n, heads of each, numbers of a
    row, taps, eos); table: the least rows of a head. Fields below are those that a mistake would change."""

    layers: int = 4
    d: int = 128
    heads: tuple[int, int, int] = (4, 2, 64)
    full: int = 4
    delta: tuple[int, int, int] = (2, 6, 32)
    experts: tuple[int, int, int, int] = (8, 3, 64, 64)
    streams: tuple[int, int] = (4, 32)
    index: tuple[int, int, int, int] = (4, 32, 4, 16)
    gram_layer: int = 1
    grams: tuple[int, int, int, int, int] = (3, 3, 32, 4, 5)
    table: int = 50
    turned: int = 16
    theta: float = 1e4
    eps: float = 1e-6
    mistake: str = ""

    @property
    def gram_heads(self) -> int:
        return (self.grams[0] - 1) * self.grams[1]

    @property
    def sizes(self) -> list[int]:
        """Rows of every head of n-grams: primes."""
        found, number = list[int](), self.table
        while len(found) < self.gram_heads:
            if number > 1 and all(number % q for q in range(2, int(number**0.5) + 1)):
                found.append(number)
            number += 1
        return found

    @property
    def offsets(self) -> list[int]:
        return [sum(self.sizes[:head]) for head in range(self.gram_heads)]

    @property
    def multipliers(self) -> list[int]:
        """Odd numbers of 45 bits."""
        rng = np.random.default_rng(11)
        return [int(rng.integers(1 << 44, 1 << 45)) | 1 for _ in range(self.grams[0])]

    def is_full(self, layer: int) -> bool:
        return (layer + 1) % self.full == 0


RECIPES = {
    "plain": Recipe(),
    # other numbers everywhere: two streams, blocks of 8, 4-grams in the first layer, every second layer with attention
    "other": Recipe(
        d=96, full=2, heads=(6, 2, 32), delta=(2, 2, 16), streams=(2, 24), index=(6, 16, 8, 24), gram_layer=0,
        grams=(4, 2, 32, 3, 319), table=30, turned=8, theta=7e3, eps=1e-5,
    ),
}  # fmt: skip
MISTAKES = (
    "silu of z", "no mean of streams", "norm over all streams", "not twice", "copies not kept", "keys rotated late",
    "keys normalised before", "no relu", "one block less", "tail unseen", "grams forwards", "eos crossed",
    "no dilation", "tail not normed", "no root", "no gate of attention",
)  # fmt: skip


def make_weights(recipe: Recipe, seed: int = 0) -> Weights:
    """Random weights in float32 by GGUF name."""
    rng = np.random.default_rng(seed)
    return {name: _draw(rng, name, shape) for name, shape in list_shapes(recipe)}


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = rng.standard_normal(shape).astype(np.float32)
    if name.endswith("ssm_a"):
        return -rng.uniform(0.02, 2, shape).astype(np.float32)
    if name.endswith("ffn_gate_inp_shexp.weight"):
        return values * np.float32(shape[0] ** -0.5)
    if "norm" in name or len(shape) == 1:
        return 0.1 * values + np.float32(not name.endswith("bias"))
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return values
    return values * np.float32(shape[-1] ** -0.5)


def list_shapes(r: Recipe) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor's name and shape."""
    (streams, rank), wide = r.streams, r.streams[0] * r.d
    yield from (("token_embd.weight", (VOCAB, r.d)), ("output.weight", (VOCAB, r.d)))
    yield "per_layer_token_embd.weight", (-(-sum(r.sizes) // 128) * 128, r.grams[2])
    for part in ("norm", "down", "up"):
        shape = {"norm": (streams, r.d), "down": (rank, wide), "up": (wide, rank)}[part]
        yield f"output_hc_{part}.weight", shape
    for layer in range(r.layers):
        own: dict[str, tuple[int, ...]] = {}
        for block in ("attn", "ffn"):
            own |= {f"hc_{block}_norm.weight": (streams, r.d), f"hc_{block}_down.weight": (rank, wide)}
            own |= {f"hc_{block}_up.weight": (wide, rank), f"hc_{block}_inject.weight": (streams, wide)}
        own |= _attention_shapes(r) if r.is_full(layer) else _delta_shapes(r)
        own |= _gram_shapes(r) if layer == r.gram_layer else {}
        own |= _expert_shapes(r)
        yield from ((f"blk.{layer}.{role}", shape) for role, shape in own.items())


def _attention_shapes(r: Recipe) -> dict[str, tuple[int, ...]]:
    (heads, kv, dim), (indexed, each, _, _) = r.heads, r.index
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q.weight": (2 * heads * dim, r.d),
        "attn_output.weight": (r.d, heads * dim),
    }
    shapes |= {f"attn_{part}.weight": (kv * dim, r.d) for part in "kv"}
    shapes |= {f"attn_{part}_norm.weight": (dim,) for part in "qk"}
    shapes |= {"indexer.q_proj.weight": (indexed * each, r.d), "indexer.k_proj.weight": (each, r.d)}
    return shapes | {f"indexer.{part}_norm.weight": (each,) for part in "qk"}


def _delta_shapes(r: Recipe) -> dict[str, tuple[int, ...]]:
    key_heads, value_heads, head = r.delta
    keys, values = 2 * key_heads * head, value_heads * head
    return {
        "attn_qkv.weight": (keys + values, r.d), "attn_gate.weight": (values, r.d), "ssm_a": (value_heads,),
        "ssm_conv1d.weight": (keys + values, 4), "ssm_dt.bias": (value_heads,), "ssm_norm.weight": (head,),
        "ssm_out.weight": (r.d, values), "ssm_beta.weight": (value_heads, r.d), "ssm_alpha.weight": (value_heads, r.d),
    }  # fmt: skip


def _gram_shapes(r: Recipe) -> dict[str, tuple[int, ...]]:
    row, wide = r.gram_heads * r.grams[2], r.streams[0] * r.d
    norms: dict[str, tuple[int, ...]] = {
        f"ple_norm_{part}.weight": (r.streams[0], r.d) for part in ("key", "query", "conv")
    }
    return {
        "ple_key.weight": (wide, row),
        "ple_value.weight": (r.d, row),
        **norms,
        "ple_conv1d.weight": (wide, r.grams[3]),
    }


def _expert_shapes(r: Recipe) -> dict[str, tuple[int, ...]]:
    n, _, f, s = r.experts
    return {
        "ffn_gate_inp.weight": (n, r.d), "ffn_gate_exps.weight": (n, f, r.d), "ffn_up_exps.weight": (n, f, r.d),
        "ffn_down_exps.weight": (n, r.d, f), "ffn_gate_shexp.weight": (s, r.d), "ffn_up_shexp.weight": (s, r.d),
        "ffn_down_shexp.weight": (r.d, s), "ffn_gate_inp_shexp.weight": (r.d,),
    }  # fmt: skip


def settings_of(r: Recipe) -> dict[str, Any]:
    """Keys of a GGUF file, without its architecture's prefix."""
    (heads, kv, dim), (key_heads, value_heads, head), (count, used, f, s) = r.heads, r.delta, r.experts
    return {
        "block_count": r.layers, "context_length": CONTEXT, "embedding_length": r.d, "vocab_size": VOCAB,
        "attention.head_count": heads, "attention.head_count_kv": kv, "attention.key_length": dim,
        "attention.value_length": dim, "attention.layer_norm_rms_epsilon": r.eps, "rope.dimension_count": r.turned,
        "rope.freq_base": r.theta, "ssm.conv_kernel": 4, "ssm.state_size": head, "ssm.group_count": key_heads,
        "ssm.time_step_rank": value_heads, "ssm.inner_size": value_heads * head, "full_attention_interval": r.full,
        "expert_count": count, "expert_used_count": used, "expert_feed_forward_length": f,
        "expert_shared_feed_forward_length": s, "hyper_connection.count": r.streams[0],
        "hyper_connection.low_rank": r.streams[1], "attention.indexer.head_count": r.index[0],
        "attention.indexer.key_length": r.index[1], "attention.indexer.top_k": r.index[3],
        "attention.compress_ratios": [r.index[2] if r.is_full(i) else 0 for i in range(r.layers)],
        "ple.layers": [r.gram_layer], "ple.ngram_size": r.grams[0], "ple.heads_per_ngram": r.grams[1],
        "ple.conv_kernel": r.grams[3], "ple.eos_token_id": r.grams[4], "embedding_length_per_layer_input": r.grams[2],
        "ple.layer_multipliers": r.multipliers, "ple.head_offsets": r.offsets, "ple.head_vocab_sizes": r.sizes,
    }  # fmt: skip


PLAIN = ("ffn_gate_inp.weight", "conv1d.weight", "inject.weight")  # F32 in every file


def write_qwen4exp(
    path: Path,
    r: Recipe,
    tensors: Weights,
    qtype: str = "F32",
    metadata: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
) -> Path:
    """A GGUF file; matrices whose rows are whole blocks of a quant type are of it. metadata: keys without the prefix
    that are others than the recipe's; None: left out. tokenizer: whole keys; without there is none."""
    writer = gguf.GGUFWriter(str(path), "qwen4exp")
    writer.add_name(path.stem)
    keys = settings_of(r) | (metadata or {})
    _add_metadata(writer, tokenizer or {"tokenizer.ggml.model": "none"})
    for key, value in keys.items():
        if key.startswith("ple.") and isinstance(value, list) and key != "ple.layers":
            kind = gguf.GGUFValueType.UINT64
            writer.add_key_value(f"qwen4exp.{key}", value, gguf.GGUFValueType.ARRAY, sub_type=kind)
        else:
            _add_metadata(writer, {f"qwen4exp.{key}": value})
    for name, array in tensors.items():
        plain = (
            array.ndim == 1
            or "norm" in name
            or name.endswith(("ffn_gate_inp.weight", "conv1d.weight", "inject.weight"))
        )
        block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[qtype]][0]
        if plain or qtype == "F32" or array.shape[-1] % block:
            writer.add_tensor(name, np.ascontiguousarray(array))
        else:
            encoded = gguf.quants.quantize(array, gguf.GGMLQuantizationType[qtype])
            _add_encoded(writer, name, encoded.view(np.uint8).reshape(*array.shape[:-1], -1), qtype)
    return _finish(writer, path)


def read_tensors(path: Path) -> Weights:
    """What the gguf package makes of a file's tensors."""
    found = gguf.GGUFReader(path).tensors
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1].tolist()) for t in found}


# --- the forward ----------------------------------------------------------------------------------------------------


def qwen4exp_logits(r: Recipe, tensors: Weights, ids: list[int]) -> np.ndarray:
    """Logits of every token of one text, float64 [n, vocabulary]."""
    w = {name: array.astype(np.float64) for name, array in tensors.items()}
    table = w["per_layer_token_embd.weight"]
    streams = np.repeat(w["token_embd.weight"][ids][:, None], r.streams[0], 1)
    for layer in range(r.layers):
        own = {name.split(".", 2)[2]: array for name, array in w.items() if name.startswith(f"blk.{layer}.")}
        if layer == r.gram_layer:
            streams = streams + _grams(r, own, table[gram_rows(r, ids)].reshape(len(ids), -1), streams)
        for block in ("attn", "ffn"):
            taken, shares = _mix(r, own, f"hc_{block}", streams)
            if block == "ffn":
                made = _experts(r, own, taken)
            else:
                made = _attend(r, own, taken) if r.is_full(layer) else _delta(r, own, taken)
            streams = (0 if r.mistake == "copies not kept" else streams) + shares[..., None] * made[:, None]
    return _mix(r, w, "output_hc", streams)[0] @ w["output.weight"].T


def gram_rows(r: Recipe, ids: list[int]) -> np.ndarray:
    """Rows of the table that every token takes, [n, heads]: by whole numbers of Python."""
    longest, each, _, _, eos = r.grams
    found = []
    for at in range(len(ids)):
        seen, ended = [ids[at]], False
        for back in range(1, longest):
            token = ids[at - back] if at >= back else eos
            ended = ended or at < back or (token == eos and r.mistake != "eos crossed")
            seen.append(eos if ended else token)
        seen = seen[::-1] if r.mistake == "grams forwards" else seen
        rows = []
        for n in range(2, longest + 1):
            mixed = 0
            for token, multiplier in zip(seen[:n], r.multipliers):
                mixed ^= token * multiplier
            first = (n - 2) * each
            heads = range(first, first + each)
            rows += [mixed % r.sizes[head] + r.offsets[head] for head in heads]
        found.append(rows)
    return np.array(found)


def _mix(r: Recipe, own: Weights, name: str, streams: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What a block takes of the streams [n, S, d], and the share of its result that each stream is given [n, S]."""
    n, count, d = streams.shape
    weight = own[f"{name}_norm.weight"]
    if r.mistake == "norm over all streams":
        normed = rms(streams.reshape(n, -1), weight.reshape(-1), r.eps).reshape(streams.shape)
    else:
        normed = rms(streams, weight, r.eps)
    flat = normed.reshape(n, count * d)
    gates = sigmoid(silu(flat @ own[f"{name}_down.weight"].T / count) @ own[f"{name}_up.weight"].T)
    taken = (gates.reshape(streams.shape) * normed).sum(1) / (1 if r.mistake == "no mean of streams" else count)
    if f"{name}_inject.weight" not in own:
        return taken, np.zeros((n, count))
    twice = 1 if r.mistake == "not twice" else 2
    return taken, twice * sigmoid(flat @ own[f"{name}_inject.weight"].T / count)


def _rotate(r: Recipe, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The first numbers of the last axis of x [n, ..., dim], in halves."""
    half = r.turned // 2
    angle = positions[:, None] * r.theta ** (-2 * np.arange(half) / r.turned)
    shape = (len(x), *(1 for _ in x.shape[1:-1]), half)
    cos, sin = np.cos(angle).reshape(shape), np.sin(angle).reshape(shape)
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), -1)


def choose_cells(r: Recipe, own: Weights, x: np.ndarray) -> np.ndarray:
    """Which cells every token sees: bool [n, n]."""
    n, (heads, dim, each, budget) = len(x), r.index
    queries = rms((x @ own["indexer.q_proj.weight"].T).reshape(n, heads, dim), own["indexer.q_norm.weight"], r.eps)
    queries = _rotate(r, queries, np.arange(n))
    raw = x @ own["indexer.k_proj.weight"].T
    if r.mistake == "keys normalised before":
        raw = rms(raw, own["indexer.k_norm.weight"], r.eps)
    pools = np.array([raw[at : at + each].mean(0) for at in range(0, n - each + 1, each)]).reshape(-1, dim)
    pools = pools if r.mistake == "keys normalised before" else rms(pools, own["indexer.k_norm.weight"], r.eps)
    late = each - 1 if r.mistake == "keys rotated late" else 0
    pools = _rotate(r, pools, np.arange(len(pools)) * each + late)
    most = budget // each - (r.mistake == "one block less")
    seen = np.zeros((n, n), bool)
    for token in range(n):
        complete = (token + 1) // each
        scores = pools[:complete] @ queries[token].T
        scores = (scores if r.mistake == "no relu" else np.maximum(scores, 0)).sum(1) / np.sqrt(dim)
        for block in np.argsort(-scores, kind="stable")[:most]:
            seen[token, block * each : (block + 1) * each] = True
        seen[token, complete * each : token + 1] = r.mistake != "tail unseen"
    return seen


def _attend(r: Recipe, own: Weights, x: np.ndarray) -> np.ndarray:
    n, (heads, kv, dim) = len(x), r.heads
    q, gate = np.split((x @ own["attn_q.weight"].T).reshape(n, heads, 2 * dim), 2, 2)
    k, v = ((x @ own[f"attn_{part}.weight"].T).reshape(n, kv, dim) for part in "kv")
    positions = np.arange(n)
    q = _rotate(r, rms(q, own["attn_q_norm.weight"], r.eps), positions)
    k = _rotate(r, rms(k, own["attn_k_norm.weight"], r.eps), positions)
    seen = choose_cells(r, own, x)
    mixed = np.zeros_like(q)
    for head in range(heads):
        scores = q[:, head] @ k[:, head // (heads // kv)].T / np.sqrt(dim)
        for token in range(n):
            own_scores = scores[token, seen[token]]
            if own_scores.size:
                mixed[token, head] = softmax(own_scores) @ v[seen[token], head // (heads // kv)]
    gate = np.ones(1) if r.mistake == "no gate of attention" else sigmoid(gate.reshape(n, -1))
    return (mixed.reshape(n, -1) * gate) @ own["attn_output.weight"].T


def _delta(r: Recipe, own: Weights, x: np.ndarray) -> np.ndarray:
    n, (key_heads, value_heads, d) = len(x), r.delta
    qkv, z = x @ own["attn_qkv.weight"].T, (x @ own["attn_gate.weight"].T).reshape(n, value_heads, d)
    before = np.concatenate((np.zeros((3, qkv.shape[1])), qkv))
    mixed = silu(sum(before[i : i + n] * own["ssm_conv1d.weight"][:, i] for i in range(4)))
    q, k, v = (part.reshape(n, -1, d) for part in np.split(mixed, [key_heads * d, 2 * key_heads * d], 1))
    q, k = (part / np.sqrt((part * part).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
    beta = sigmoid(x @ own["ssm_beta.weight"].T)
    decay = np.exp(own["ssm_a"] * np.log1p(np.exp(x @ own["ssm_alpha.weight"].T + own["ssm_dt.bias"])))
    out = np.zeros((n, value_heads, d))
    for head in range(value_heads):
        state, key = np.zeros((d, d)), head % key_heads
        for token in range(n):
            state = decay[token, head] * state
            state = state + np.outer(k[token, key], beta[token, head] * (v[token, head] - k[token, key] @ state))
            out[token, head] = q[token, key] / np.sqrt(d) @ state
    gate = silu(z) if r.mistake == "silu of z" else sigmoid(z)
    return (rms(out, own["ssm_norm.weight"], r.eps) * gate).reshape(n, -1) @ own["ssm_out.weight"].T


def _grams(r: Recipe, own: Weights, rows: np.ndarray, streams: np.ndarray) -> np.ndarray:
    """What the layer's n-grams add to the streams [n, S, d]. rows: of the table, those of a token in a row."""
    n, count, d = streams.shape
    keys = rms((rows @ own["ple_key.weight"].T).reshape(streams.shape), own["ple_norm_key.weight"], r.eps)
    scores = (keys * rms(streams, own["ple_norm_query.weight"], r.eps)).sum(-1) / np.sqrt(d)
    bent = scores if r.mistake == "no root" else np.sign(scores) * np.sqrt(np.maximum(np.abs(scores), 1e-6))
    given = sigmoid(bent)[..., None] * (rows @ own["ple_value.weight"].T)[:, None]
    normed = given if r.mistake == "tail not normed" else rms(given, own["ple_norm_conv.weight"], r.eps)
    taps, apart = own["ple_conv1d.weight"], 1 if r.mistake == "no dilation" else r.grams[0]
    inputs = np.concatenate((np.zeros((apart * (taps.shape[1] - 1), count * d)), normed.reshape(n, -1)))
    mixed = sum(inputs[apart * tap : apart * tap + n] * taps[:, tap] for tap in range(taps.shape[1]))
    return given + silu(mixed).reshape(streams.shape)


def _experts(r: Recipe, own: Weights, x: np.ndarray) -> np.ndarray:
    out = np.zeros_like(x)
    scores = softmax(x @ own["ffn_gate_inp.weight"].T)
    for token, row in enumerate(x):
        chosen = np.argsort(-scores[token], kind="stable")[: r.experts[1]]
        for expert, share in zip(chosen, scores[token, chosen] / scores[token, chosen].sum()):
            gate, up, down = (own[f"ffn_{part}_exps.weight"][expert] for part in ("gate", "up", "down"))
            out[token] += share * (down @ (silu(gate @ row) * (up @ row)))
    shared = swiglu(x, *(own[f"ffn_{part}_shexp.weight"] for part in ("gate", "up", "down")))
    return out + sigmoid(x @ own["ffn_gate_inp_shexp.weight"])[:, None] * shared
