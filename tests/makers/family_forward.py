"""Dense families, and one with experts, in float64 NumPy from their recipes: the oracle of the runtime.

It shares nothing with the package: a recipe's numbers are written down here, not read from a file. Formulas: attention
arXiv 1706.03762, rotation 2104.09864, RMS norm 1910.07467, gated FFNs 2002.05202, YaRN 2309.00071, LongRoPE 2402.13753;
multipliers, temperatures and norms after as the models' classes in transformers 5 have them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from forward_parts import rms, sigmoid, silu, softmax, stretch

Weights = dict[str, np.ndarray]  # float64 by GGUF name, q, k and v apart, norms as they are multiplied by


class Yarn(NamedTuple):
    """`grows`: what sine and cosine are multiplied by."""

    factor: float
    original: int
    grows: float


class LongRope(NamedTuple):
    """Divisors of the frequencies: `short` for contexts up to `original`, else `long`."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    grows: float


class Moe(NamedTuple):
    """Routed experts of `rows` (0: as the FFN), `used` of `count`. Their weights are divided by their sum if `normed`,
    then multiplied by `scale`; `bias` is added for the choice alone. `shared`: rows of one that all tokens take. Layers
    below `dense`, and all but the last of each `every`, have an FFN. early: scores are made of the "scores" of what the
    layer began with, or router and experts take these "inputs", by a norm of their own. inner: experts' inputs are
    weighted instead of their results. chunk: so many experts share one of `chunk_rows` rows, which takes
    what all gave (chunk_input; else what they took), weighed by the score of the expert of the chunk's number
    (chunk_scores; else of its own experts), times `chunk_scale`."""

    count: int = 0
    used: int = 0
    rows: int = 0
    sigmoid: bool = False
    normed: bool = True
    scale: float = 1.0
    bias: bool = False
    shared: int = 0
    dense: int = 0
    every: int = 1
    early: str = ""
    inner: bool = False
    chunk: int = 0
    chunk_rows: int = 0
    chunk_scale: float = 0.0
    chunk_input: bool = True
    chunk_scores: bool = True

    def are_in(self, layer: int) -> bool:
        return self.count > 0 and layer >= self.dense and (layer + 1) % self.every == 0


NONE = Moe()


@dataclass(frozen=True)
class Recipe:
    """A tiny model. windows, still, by layer: tokens that it sees (0: all), and whether its heads are not rotated.

    thetas: of layers without a window, and of those with one. temperature: scale and span. embed, residual, score,
    logits: what these are multiplied by. experts: see Moe. before, after: norms there of attention and FFN.
    wide_norms: of q and k, over all heads at once. centred: norms take the mean away. parallel: attention and FFN
    take the same. out_bias: attention's last product has one. factors: divisors of the frequencies. caps: of scores
    and of logits. slopes: of heads, by distance. convs: layers with a short convolution of so many taps. bare:
    norms of the stream have no weights; norm_biases: or biases too. act: of FFNs without a gate. ffn_biases: of all
    products of an FFN. clamp: q, k, v are within it. own_norms: of every head, as the stream's. turned: norms of heads
    follow their rotation. local_heads, local_rotated: query and KV heads of layers with a window, and how many numbers
    of each are rotated; 0: as of the others. gate: what "heads", or single "numbers" of them, give is multiplied by a
    curve of one more product. value: numbers of a head's value; 0: as of its key. value_scale: what it is multiplied
    by. sinks: of layers with a window. bare_norms: heads are normalised so without weights, in layers that are rotated.
    chunks: windows are chunks. counted: the temperature is of tokens so far, in layers that are not rotated.
    layer_heads: query and KV heads of each layer, without the latter one product, without both nothing; layer_ffn:
    rows, 0 for none. limits: by layer, of its experts and of its FFN or shared experts: silu(gate) is at most that, and
    up within it; 0: none. Weights have them under the name "limits".
    """

    layers: int = 2
    d: int = 128
    heads: int = 4
    kv: int = 2
    head: int = 32
    ffn: int = 192
    vocab: int = 320
    context: int = 512
    eps: float = 1e-6
    adjacent: bool = False
    rotated: int = 32
    thetas: tuple[float, float] = (10000.0, 10000.0)
    slower: float = 1.0
    yarn: Yarn | None = None
    longrope: LongRope | None = None
    windows: tuple[int, ...] = ()
    still: tuple[bool, ...] = ()
    temperature: tuple[float, int] = (0.0, 1)
    embed: float = 1.0
    residual: float = 1.0
    score: float = 32**-0.5
    logits: float = 1.0
    gelu: bool = False
    relu: bool = False
    before: bool = True
    after: bool = False
    wide_norms: bool = False
    centred: bool = False
    parallel: bool = False
    head_norms: bool = False
    biases: bool = False
    out_bias: bool = False
    factors: tuple[float, ...] = ()
    bare: bool = False
    norm_biases: bool = False
    act: str = ""
    ffn_biases: bool = False
    clamp: float = 0.0
    own_norms: bool = False
    turned: bool = False
    tied: bool = False
    caps: tuple[float, float] = (0.0, 0.0)
    slopes: tuple[float, ...] = ()
    convs: tuple[bool, ...] = ()
    taps: int = 3
    experts: Moe = NONE
    local_heads: tuple[int, int] = (0, 0)
    local_rotated: int = 0
    value: int = 0
    value_scale: float = 1.0
    sinks: bool = False
    limits: tuple[tuple[float, float], ...] = ()
    gate: str = ""
    gate_curve: str = "softplus"
    bare_norms: bool = False
    chunks: bool = False
    counted: bool = False
    layer_heads: tuple[tuple[int, int], ...] = ()
    layer_ffn: tuple[int, ...] = ()

    def rows(self, layer: int) -> int:
        """Of the layer's FFN."""
        return self.layer_ffn[layer] if self.layer_ffn else self.ffn

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def counts(self, layer: int) -> tuple[int, int]:
        """Query heads and KV heads."""
        if self.layer_heads:
            return self.layer_heads[layer]
        return self.local_heads if self.local_heads[0] and self.window(layer) else (self.heads, self.kv)

    def turned_numbers(self, layer: int) -> int:
        return self.local_rotated if self.local_rotated and self.window(layer) else self.rotated


def family_logits(recipe: Recipe, weights: Weights, ids: list[int]) -> np.ndarray:
    """Logits of every token of one sequence, [n, vocabulary]."""
    x = weights["token_embd.weight"][ids] * recipe.embed
    for layer in range(recipe.layers):
        began = x
        own = {n.split(".", 2)[2]: w for n, w in weights.items() if n.startswith(f"blk.{layer}.")}
        if recipe.parallel:
            h = _normalise(recipe, x, own, "attn_norm")
            x = x + _attend(recipe, own, h, layer) + _gate(recipe, own, h)
            continue
        for norm, after, branch in (
            ("attn_norm", "post_attention_norm", lambda h, own=own, layer=layer: _attend(recipe, own, h, layer)),
            ("ffn_norm", "post_ffw_norm", lambda h, own=own, began=began: _gate(recipe, own, h, began)),
        ):
            if recipe.before and f"{norm}.weight" not in own and not recipe.bare:
                continue  # a layer without it
            added = branch(_normalise(recipe, x, own, norm) if recipe.before else x)
            if recipe.after:
                added = rms(added, own[f"{after}.weight"], recipe.eps)
            x = x + recipe.residual * added
    x = _normalise(recipe, x, weights, "output_norm")
    return cap(recipe.logits * (x @ weights.get("output.weight", weights["token_embd.weight"]).T), recipe.caps[1])


def cap(x: np.ndarray, at: float) -> np.ndarray:
    return at * np.tanh(x / at) if at else x


def _normalise(recipe: Recipe, x: np.ndarray, own: Weights, name: str) -> np.ndarray:
    return _centre(recipe, x, own.get(f"{name}.weight", 1.0)) + (own[f"{name}.bias"] if recipe.norm_biases else 0.0)


def _centre(recipe: Recipe, x: np.ndarray, weight: np.ndarray | float) -> np.ndarray:
    return rms(x - x.mean(-1, keepdims=True) if recipe.centred else x, weight, recipe.eps)


def _convolve(recipe: Recipe, own: Weights, h: np.ndarray) -> np.ndarray:
    """A gated short convolution: every channel's last inputs times its taps, the newest by the last."""
    given, gate, by = np.split(h @ own["shortconv.in_proj.weight"].T, 3, axis=1)
    inputs = np.concatenate([np.zeros((recipe.taps - 1, recipe.d)), given * by])
    mixed = sum(inputs[j : j + len(h)] * own["shortconv.conv.weight"][:, j] for j in range(recipe.taps))
    return (gate * mixed) @ own["shortconv.out_proj.weight"].T


def _attend(recipe: Recipe, own: Weights, h: np.ndarray, layer: int) -> np.ndarray:
    if recipe.convs and recipe.convs[layer]:
        return _convolve(recipe, own, h)
    n = len(h)
    if "attn_q.weight" not in own:
        return h @ own["attn_output.weight"].T
    parts = {}
    for part in "qkv":
        parts[part] = h @ own[f"attn_{part}.weight"].T
        if recipe.biases:
            parts[part] = parts[part] + own[f"attn_{part}.bias"]
        if recipe.clamp:
            parts[part] = np.clip(parts[part], -recipe.clamp, recipe.clamp)
        if recipe.wide_norms and part != "v":
            parts[part] = rms(parts[part], own[f"attn_{part}_norm.weight"], recipe.eps)
        parts[part] = parts[part].reshape(n, -1, recipe.value or recipe.head if part == "v" else recipe.head)
        if recipe.own_norms and part != "v":
            parts[part] = _centre(recipe, parts[part], own[f"attn_{part}_norm.weight"])
        if recipe.head_norms and part != "v" and not recipe.turned:
            parts[part] = rms(parts[part], own[f"attn_{part}_norm.weight"], recipe.eps)
    position = np.arange(n)
    q, k = (_turn(recipe, parts[part], position, layer) for part in "qk")
    if recipe.bare_norms and not recipe.still[layer]:
        q, k = (rms(x, 1.0, recipe.eps) for x in (q, k))
    if recipe.turned:
        q, k = (rms(x, own[f"attn_{part}_norm.weight"], recipe.eps) for x, part in ((q, "q"), (k, "k")))
    scale, span = recipe.temperature
    if not recipe.counted or recipe.still[layer]:
        q = q * (1 + scale * np.log1p((position + recipe.counted) // span))[:, None, None]
    window = recipe.window(layer) or n
    first = position // window * window if recipe.chunks else position - window + 1
    seen = (position[None] <= position[:, None]) & (position[None] >= first[:, None])
    mixed = np.empty((n, len(q[0]), parts["v"].shape[2]))
    sinks = own.get("attn_sinks.weight")
    heads, kv = recipe.counts(layer)
    for i in range(heads):
        own_kv = i // (heads // kv)
        scores = cap(recipe.score * (q[:, i] @ k[:, own_kv].T), recipe.caps[0])
        if recipe.slopes:
            scores = scores - recipe.slopes[i] * (position[:, None] - position)
        scores = np.where(seen, scores, -np.inf)
        most = scores.max(1, keepdims=True)
        shares = np.exp(scores - most)
        beside = np.exp(sinks[i] - most) if sinks is not None and recipe.sinks else 0.0
        mixed[:, i] = shares / (shares.sum(1, keepdims=True) + beside) @ parts["v"][:, own_kv] * recipe.value_scale
    mixed = mixed.reshape(n, -1)
    if recipe.gate:
        curve = np.log1p if recipe.gate_curve == "softplus" else lambda grown: grown / (1 + grown)
        gates = curve(np.exp(h @ own["attn_gate.weight"].T))
        mixed = mixed * np.repeat(gates, mixed.shape[1] // gates.shape[1], axis=1)
    given = mixed @ own["attn_output.weight"].T
    return given + own["attn_output.bias"] if recipe.out_bias else given


def _turn(recipe: Recipe, x: np.ndarray, position: np.ndarray, layer: int) -> np.ndarray:
    """Each pair of a head's first numbers, by its position times its frequency."""
    if recipe.still and recipe.still[layer]:
        return x
    half, turned = recipe.turned_numbers(layer) // 2, x.copy()
    frequencies, grows = _frequencies(recipe, layer)
    for pair in range(half):
        a, b = (2 * pair, 2 * pair + 1) if recipe.adjacent else (pair, pair + half)
        cos, sin = (grows * f(position * frequencies[pair])[:, None] for f in (np.cos, np.sin))
        turned[..., a] = x[..., a] * cos - x[..., b] * sin
        turned[..., b] = x[..., b] * cos + x[..., a] * sin
    return turned


def _frequencies(recipe: Recipe, layer: int) -> tuple[np.ndarray, float]:
    dims, local = recipe.turned_numbers(layer), bool(recipe.window(layer))
    theta = recipe.thetas[local]
    plain = theta ** (-np.arange(0, dims, 2) / dims)
    if recipe.yarn and not local:
        factor, original, grows = recipe.yarn
        return stretch(theta, dims, factor, original), grows
    if recipe.longrope:
        by = recipe.longrope
        return plain / np.array(by.long if recipe.context > by.original else by.short), by.grows
    if recipe.factors:
        return plain / np.array(recipe.factors), 1.0
    return plain if local else plain / recipe.slower, 1.0


def _gate(recipe: Recipe, own: Weights, h: np.ndarray, began: np.ndarray | None = None) -> np.ndarray:
    rule = recipe.experts
    if recipe.act:
        up, down = (own[f"ffn_{role}.bias"] if recipe.ffn_biases else 0.0 for role in ("up", "down"))
        return _bend(recipe.act, h @ own["ffn_up.weight"].T + up, own.get("act")) @ own["ffn_down.weight"].T + down
    if "ffn_gate_inp.weight" not in own:
        matrices = (own[f"ffn_{role}.weight"] for role in ("gate", "up", "down"))
        biases = (own[f"ffn_{role}.bias"] if recipe.ffn_biases else 0.0 for role in ("gate", "up", "down"))
        return _expert(recipe, *matrices, h, _limit(recipe, own, 1), *biases)
    beside: np.ndarray | float = 0.0
    if rule.early == "inputs" and began is not None:
        matrices = (own[f"ffn_{role}.weight"] for role in ("gate", "up", "down"))
        beside = _expert(recipe, *matrices, h, _limit(recipe, own, 1))
        h = rms(began, own["ffn_norm_exps.weight"], recipe.eps)
    logits = (began if rule.early == "scores" else h) @ own["ffn_gate_inp.weight"].T
    shares = sigmoid(logits) if rule.sigmoid else softmax(logits)
    chosen = np.argsort(-(shares + own["exp_probs_b.bias"] if rule.bias else shares), 1)[:, : rule.used]
    weights = np.take_along_axis(shares, chosen, 1)
    weights = rule.scale * weights / (weights.sum(1, keepdims=True) if rule.normed else 1)
    added = np.zeros_like(h)
    for number, rows, weight in _tokens_by_expert(chosen, weights):
        matrices = (own[f"ffn_{role}_exps.weight"][number] for role in ("gate", "up", "down"))
        if rule.inner:
            added[rows] += _expert(recipe, *matrices, weight * h[rows], _limit(recipe, own, 0))
        else:
            added[rows] += weight * _expert(recipe, *matrices, h[rows], _limit(recipe, own, 0))
    if rule.chunk:
        taken, few = (added if rule.chunk_input else h), min(rule.used, rule.count // rule.chunk)
        follow, chunks = np.zeros_like(h), chosen[:, :few] // rule.chunk
        weights = np.take_along_axis(shares, chunks if rule.chunk_scores else chosen[:, :few], 1)
        weights = rule.scale * rule.chunk_scale * weights / np.maximum(weights.sum(1, keepdims=True), 2.0**-14)
        for place in range(few):  # a token may have a chunk twice
            for number, rows, weight in _tokens_by_expert(chunks[:, [place]], weights[:, [place]]):
                matrices = (own[f"ffn_{role}_chexps.weight"][number] for role in ("gate", "up", "down"))
                follow[rows] += weight * _expert(recipe, *matrices, taken[rows], np.inf)
        added = added + follow
    if rule.shared:
        matrices = (own[f"ffn_{role}_shexp.weight"] for role in ("gate", "up", "down"))
        added = added + _expert(recipe, *matrices, h, _limit(recipe, own, 1))
    return added + beside


def _tokens_by_expert(chosen: np.ndarray, weights: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Each expert that some tokens have, which these are, and the expert's weight for each of them, [tokens, 1]."""
    for number in np.unique(chosen):
        rows, places = np.nonzero(chosen == number)
        yield number, rows, weights[rows, places][:, None]


def gelu(x: np.ndarray) -> np.ndarray:
    """By its approximation with tanh."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _bend(act: str, x: np.ndarray, numbers: np.ndarray | None) -> np.ndarray:
    if act == "relu2":
        return np.maximum(x, 0) ** 2
    if act == "gelu":
        return gelu(x)
    assert numbers is not None, "xielu"
    alpha_p, alpha_n, beta, eps = numbers
    above, below = np.log1p(np.exp(alpha_p)), beta + np.log1p(np.exp(alpha_n))
    return np.where(x > 0, above * x * x, below * (np.expm1(np.minimum(x, eps)) - x)) + beta * x


def _limit(recipe: Recipe, own: Weights, which: int) -> float:
    return (own["limits"][which] if recipe.limits else 0.0) or np.inf


def _expert(
    recipe: Recipe,
    gate: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    h: np.ndarray,
    limit: float,
    gate_bias: np.ndarray | float = 0.0,
    up_bias: np.ndarray | float = 0.0,
    down_bias: np.ndarray | float = 0.0,
) -> np.ndarray:
    g = h @ gate.T + gate_bias
    bent = gelu(g) if recipe.gelu else np.maximum(g, 0) if recipe.relu else silu(g)
    return (np.minimum(bent, limit) * np.clip(h @ up.T + up_bias, -limit, limit)) @ down.T + down_bias
