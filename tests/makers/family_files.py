"""Tiny random models of the families as published files have them: GGUF files, and folders of the same weights."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
from family_forward import LongRope, Moe, Recipe, Weights, Yarn
from model_files import _add_metadata, _finish, _permute

_SHORT = tuple(1 + 0.05 * i for i in range(12))
_LONG = tuple(1 + 0.6 * i for i in range(12))
_GROWS = math.sqrt(1 + math.log(4) / math.log(128))
_GEMMA = Recipe(
    layers=6, gelu=True, after=True, head_norms=True, thetas=(1e6, 10000.0), slower=8.0, embed=math.sqrt(128),
    windows=(48, 48, 48, 48, 48, 0),
)  # fmt: skip


def _llama3(theta: float, original: int = 64, factor: float = 8.0) -> tuple[float, ...]:
    """Divisors of a head's 16 frequencies: none of those that turn four times within `original`, all of those that do
    not once."""
    turns = (original * theta ** (-i / 16) / (2 * math.pi) for i in range(16))
    return tuple(1 / (kept + (1 - kept) / factor) for kept in (min(1.0, max(0.0, (n - 1) / 3)) for n in turns))


RECIPES = {
    "smollm3": Recipe(layers=4, adjacent=True, still=(False, False, False, True), thetas=(2e6, 2e6)),
    "granite": Recipe(adjacent=True, embed=12.0, residual=0.22, score=0.02, logits=1 / 16),
    "seed_oss": Recipe(biases=True),
    "llama-biased": Recipe(
        adjacent=True, biases=True, out_bias=True, ffn_biases=True, tied=True, thetas=(1e7, 1e7), eps=1e-5
    ),
    "qwen3vl": Recipe(head_norms=True, thetas=(5e6, 5e6)),
    "qwen3vlmoe": Recipe(head_norms=True, thetas=(5e6, 5e6), experts=Moe(8, 2), ffn=96),
    "mistral3": Recipe(adjacent=True, thetas=(1e6, 1e6), yarn=Yarn(4.0, 64, 1.0), temperature=(0.1, 64)),
    "glm4": Recipe(adjacent=True, rotated=16, after=True, biases=True),
    "phi3": Recipe(rotated=24, longrope=LongRope(_SHORT, _LONG, 128, _GROWS)),
    "gemma3": _GEMMA,
    "gemma2": Recipe(
        layers=4,
        gelu=True,
        after=True,
        windows=(48, 0, 48, 0),
        embed=math.sqrt(128),
        tied=True,
        caps=(2.5, 4.0),
    ),
    "cohere2": Recipe(
        layers=4,
        adjacent=True,
        centred=True,
        parallel=True,
        still=(False, False, False, True),
        logits=0.25,
        windows=(48, 48, 48, 0),
        thetas=(5e4, 5e4),
        tied=True,
    ),
    "olmo2": Recipe(before=False, after=True, wide_norms=True, thetas=(5e5, 5e5)),
    "olmo3": Recipe(
        layers=4,
        before=False,
        after=True,
        wide_norms=True,
        windows=(48, 48, 48, 0),
        thetas=(5e5, 5e5),
        yarn=Yarn(4.0, 64, 1 + 0.1 * math.log(4)),
    ),
    "minimax-m2": Recipe(
        wide_norms=True,
        rotated=16,
        thetas=(5e6, 5e6),
        ffn=64,
        experts=Moe(8, 3, 64, sigmoid=True, bias=True),
    ),
    "command-r": Recipe(
        adjacent=True, kv=4, centred=True, parallel=True, logits=0.25, thetas=(8e6, 8e6), eps=1e-5, tied=True
    ),
    "exaone4": Recipe(
        layers=4,
        before=False,
        after=True,
        head_norms=True,
        windows=(48, 48, 48, 0),
        still=(False, False, False, True),
        thetas=(1e6, 1e6),
        factors=_llama3(1e6),
    ),
    "exaone-moe": Recipe(
        layers=4,
        head_norms=True,
        windows=(48, 48, 48, 0),
        still=(False, False, False, True),
        thetas=(1e6, 1e6),
        experts=Moe(8, 3, 64, sigmoid=True, scale=2.5, bias=True, shared=64, dense=1),
    ),
    "smallthinker": Recipe(
        layers=5,
        relu=True,
        windows=(0, 48, 48, 48, 0),
        still=(True, False, False, False, True),
        thetas=(1.5e6, 1.5e6),
        ffn=64,
        experts=Moe(8, 3, 64, sigmoid=True, early="scores"),
    ),
    "arctic": Recipe(layers=3, adjacent=True, thetas=(2e5, 2e5), eps=1e-4, ffn=96, experts=Moe(8, 2, early="inputs")),
    "deci": Recipe(
        layers=6,
        adjacent=True,
        thetas=(5e5, 5e5),
        eps=1e-5,
        factors=_llama3(5e5),
        layer_heads=((4, 2), (4, 0), (0, 0), (4, 1), (0, 0), (8, 4)),
        layer_ffn=(192, 96, 256, 64, 0, 128),
    ),
    "grovemoe": Recipe(
        layers=3,
        head_norms=True,
        thetas=(1e6, 1e6),
        ffn=96,
        experts=Moe(8, 3, chunk=2, chunk_rows=64, chunk_scale=0.5),
    ),
    "llama4": Recipe(
        layers=4,
        adjacent=True,
        bare_norms=True,
        chunks=True,
        windows=(48, 48, 48, 0),
        still=(False, False, False, True),
        thetas=(5e5, 5e5),
        temperature=(0.1, 8192),
        counted=True,
        factors=_llama3(5e5),
        eps=1e-5,
        experts=Moe(8, 1, 64, sigmoid=True, normed=False, shared=64, every=2, inner=True),
    ),
    "plamo": Recipe(parallel=True, kv=1, eps=1e-5),
    "command-r-plus": Recipe(
        adjacent=True,
        centred=True,
        parallel=True,
        own_norms=True,
        logits=0.8,
        thetas=(7.5e6, 7.5e6),
        eps=1e-5,
        tied=True,
    ),
    "olmo": Recipe(adjacent=True, kv=4, centred=True, bare=True, clamp=0.7, eps=1e-5, tied=True),
    "orion": Recipe(centred=True, norm_biases=True, eps=1e-5),
    "stablelm": Recipe(centred=True, norm_biases=True, biases=True, rotated=8, eps=1e-5),
    "stablelm-12b": Recipe(centred=True, norm_biases=True, parallel=True, own_norms=True, rotated=8, eps=1e-5),
    "starcoder2": Recipe(
        kv=1,
        centred=True,
        norm_biases=True,
        biases=True,
        out_bias=True,
        act="gelu",
        ffn_biases=True,
        thetas=(1e5, 1e5),
        eps=1e-5,
        tied=True,
    ),
    "jais2": Recipe(
        kv=4,
        centred=True,
        norm_biases=True,
        biases=True,
        out_bias=True,
        act="relu2",
        ffn_biases=True,
        thetas=(5e5, 5e5),
        eps=1e-5,
    ),
    "nemotron": Recipe(centred=True, norm_biases=True, rotated=16, act="relu2", eps=1e-5),
    "arcee": Recipe(adjacent=True, act="relu2", eps=1e-5, yarn=Yarn(4.0, 64, 1 + 0.1 * math.log(4))),
    "apertus": Recipe(head_norms=True, act="xielu", thetas=(1.2e7, 1.2e7), factors=_llama3(1.2e7), eps=1e-5),
    "hunyuan-dense": Recipe(head_norms=True, turned=True, thetas=2 * (1e4 * 20 ** (32 / 30),), eps=1e-5, tied=True),
    "hunyuan-moe": Recipe(
        head_norms=True,
        turned=True,
        thetas=2 * (1e4 * 20 ** (32 / 30),),
        eps=1e-5,
        ffn=64,
        experts=Moe(8, 3, 64, shared=64),
    ),
    "maincoder": Recipe(adjacent=True, head_norms=True, turned=True, thetas=(1e6, 1e6), eps=1e-5),
    "gemma": Recipe(heads=3, kv=1, head=64, rotated=64, score=64**-0.5, gelu=True, embed=math.sqrt(128), tied=True),
    "ernie4_5": Recipe(
        adjacent=True, kv=1, head=48, rotated=48, score=48**-0.5, thetas=(5e5, 5e5), tied=True, eps=1e-4
    ),
    "paddleocr": Recipe(kv=1, head=48, rotated=48, score=48**-0.5, thetas=(5e5, 5e5), eps=1e-4),
    "qwen2vl": Recipe(biases=True, thetas=(1e6, 1e6)),
    "exaone": Recipe(kv=1, factors=(1.0, 1.0, 1.0, 1.2, 1.7, 2.5, 4.0, 6.0, *[8.0] * 8), eps=1e-4),
    "internlm2": Recipe(adjacent=True, kv=1, thetas=(1e6, 1e6), eps=1e-4),
    "minicpm": Recipe(adjacent=True, embed=9.0, residual=0.8, logits=0.6, tied=True),
    "xverse": Recipe(adjacent=True, kv=4, eps=1e-4),
    "baichuan": Recipe(adjacent=True, kv=4, eps=1e-4),
    "refact": Recipe(
        heads=6, kv=1, still=(True, True), slopes=(1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8), eps=1e-5, tied=True
    ),
    "baichuan-13b": Recipe(
        layers=40, d=64, ffn=64, kv=4, adjacent=True, still=(True,) * 40, slopes=(1 / 4, 1 / 16, 1 / 64, 1 / 256)
    ),
    "lfm2": Recipe(
        layers=4, head_norms=True, convs=(True, True, False, True), thetas=(1e6, 1e6), eps=1e-5, ffn=256, tied=True
    ),
    "lfm2moe": Recipe(
        layers=4,
        head_norms=True,
        convs=(True, False, True, True),
        taps=4,
        thetas=(1e6, 1e6),
        eps=1e-5,
        tied=True,
        experts=Moe(8, 3, 64, sigmoid=True, bias=True, dense=1),
    ),
    "dots1": Recipe(
        layers=3,
        kv=4,
        head_norms=True,
        thetas=(1e6, 1e6),
        eps=1e-5,
        experts=Moe(8, 3, 64, sigmoid=True, scale=2.5, bias=True, shared=128, dense=1),
    ),
    "hy_v3": Recipe(
        layers=3,
        head_norms=True,
        thetas=(1.1e7, 1.1e7),
        eps=1e-5,
        experts=Moe(8, 3, 64, sigmoid=True, scale=1.75, bias=True, shared=64, dense=1),
    ),
    "ernie4_5-moe": Recipe(
        layers=4,
        adjacent=True,
        kv=1,
        thetas=(5e5, 5e5),
        eps=1e-5,
        experts=Moe(8, 3, 64, bias=True, shared=128, dense=1, every=2),
    ),
    "deepseek": Recipe(
        layers=3,
        adjacent=True,
        kv=4,
        experts=Moe(8, 3, 64, normed=False, scale=1.5, shared=128, dense=1),
    ),
    "bailingmoe": Recipe(
        adjacent=True,
        kv=1,
        head=48,
        rotated=48,
        score=48**-0.5,
        thetas=(6e5, 6e5),
        experts=Moe(8, 3, 64, shared=128),
    ),
    "granitemoe": Recipe(
        adjacent=True,
        embed=12.0,
        residual=0.22,
        score=0.02,
        logits=1 / 6,
        tied=True,
        ffn=64,
        experts=Moe(8, 3),
    ),
    "pangu-embedded": Recipe(biases=True, out_bias=True, kv=1, thetas=(4e6, 4e6)),
    "laguna": Recipe(
        layers=5,
        heads=4,
        local_heads=(6, 2),
        head_norms=True,
        windows=(0, 48, 48, 48, 0),
        rotated=16,
        local_rotated=32,
        thetas=(5e5, 2e4),
        yarn=Yarn(4.0, 64, 1 + 0.1 * math.log(4)),
        gate="heads",
        eps=1e-5,
        experts=Moe(8, 3, 64, sigmoid=True, scale=2.5, bias=True, shared=96, dense=1),
    ),
    "mimo2": Recipe(
        layers=4,
        head=48,
        heads=4,
        kv=1,
        local_heads=(4, 2),
        value=32,
        value_scale=0.707,
        sinks=True,
        score=48**-0.5,
        windows=(0, 48, 48, 0),
        rotated=16,
        thetas=(5e6, 1e4),
        eps=1e-5,
        experts=Moe(8, 3, 64, sigmoid=True, bias=True, dense=1),
    ),
    "step35": Recipe(
        layers=5,
        heads=4,
        kv=2,
        local_heads=(6, 2),
        head_norms=True,
        windows=(0, 48, 48, 0, 48),
        rotated=16,
        local_rotated=32,
        thetas=(5e6, 1e4),
        gate="heads",
        gate_curve="sigmoid",
        eps=1e-5,
        limits=((0.0, 0.0), (0.0, 0.5), (0.0, 0.0), (0.25, 0.0), (0.5, 0.25)),
        experts=Moe(8, 3, 64, sigmoid=True, scale=2.5, bias=True, shared=96, dense=2),
    ),
    "laguna-m": Recipe(
        layers=3,
        kv=4,
        head_norms=True,
        rotated=16,
        thetas=(5e5, 5e5),
        gate="numbers",
        eps=1e-5,
        experts=Moe(8, 3, 64, sigmoid=True, scale=1.25, bias=True, shared=64, dense=2),
    ),
}
REMOTE = (
    "deci",
    "arctic",
    "grovemoe",
    "deepseek",
    "bailingmoe",
    "exaone",
    "internlm2",
    "minicpm",
    "xverse",
    "baichuan",
    "pangu-embedded",
    "smallthinker",
    "plamo",
    "orion",
    "maincoder",
    "refact",
    "baichuan-13b",
)  # of which transformers has no class
WIDTH = dict.fromkeys(
    (
        *("qwen3vlmoe", "dots1", "hy_v3", "ernie4_5-moe", "deepseek", "bailingmoe", "granitemoe"),
        *("minimax-m2", "exaone-moe", "hunyuan-moe", "lfm2moe", "smallthinker", "laguna", "laguna-m", "mimo2"),
        *("llama4", "arctic", "step35", "grovemoe"),
    ),
    128**0.5,
)  # of embeddings: tokens must differ for routers


GGUF_NAMES = {
    "olmo3": "olmo2",
    "command-r-plus": "command-r",
    "stablelm-12b": "stablelm",
    "baichuan-13b": "baichuan",
    "laguna-m": "laguna",
    "llama-biased": "llama",
}  # of families that another's files are called as
COMPOSED = (
    *("olmo3", "minimax-m2", "command-r", "exaone4", "exaone-moe", "plamo", "orion", "stablelm", "nemotron", "arcee"),
    *("hunyuan-moe", "maincoder", "command-r-plus", "starcoder2", "baichuan-13b", "lfm2moe", "laguna-m"),
    "step35",
)  # of what others show each
FAMILIES = [pytest.param(name, marks=pytest.mark.slow) if name in COMPOSED else name for name in RECIPES]
IN_FOLDERS = [family for name, family in zip(RECIPES, FAMILIES) if name not in REMOTE]


def make_weights(recipe: Recipe, wide: float = 1.0, seed: int = 0) -> Weights:
    """Random weights that float32 has, by GGUF name; q, k and v apart, gate and up too."""
    r, drawn = recipe, _Drawn(recipe, np.random.default_rng(seed), {})
    drawn.matrix("token_embd", r.vocab, r.d, by=wide)
    for i in range(r.layers):
        b = f"blk.{i}."
        if r.before and r.counts(i)[0]:
            drawn.stream_norm(b + "attn_norm")
        drawn.attention(b, i)
        if r.before and not r.parallel and r.rows(i):
            drawn.stream_norm(b + "ffn_norm")
        drawn.ffn(b, i)
        if r.after:
            drawn.norm(b + "post_attention_norm", r.d)
            drawn.norm(b + "post_ffw_norm", r.d)
    drawn.stream_norm("output_norm")
    if not r.tied:
        drawn.matrix("output", r.vocab, r.d)
    return {name: values.astype(np.float32).astype(np.float64) for name, values in drawn.made.items()}


class _Drawn(NamedTuple):
    """What has been drawn of a model."""

    r: Recipe
    rng: np.random.Generator
    made: Weights

    def matrix(self, name: str, *shape: int, by: float = 1.0) -> None:
        self.made[f"{name}.weight"] = by * shape[-1] ** -0.5 * self.rng.standard_normal(shape)

    def norm(self, name: str, *shape: int) -> None:
        self.made[f"{name}.weight"] = 1 + 0.3 * self.rng.standard_normal(shape)

    def bias(self, name: str, n: int) -> None:
        self.made[f"{name}.bias"] = 0.3 * self.rng.standard_normal(n)

    def stream_norm(self, name: str) -> None:
        if not self.r.bare:
            self.norm(name, self.r.d)
        if self.r.norm_biases:
            self.bias(name, self.r.d)

    def attention(self, b: str, layer: int) -> None:
        r = self.r
        if r.convs and r.convs[layer]:
            self.matrix(b + "shortconv.in_proj", 3 * r.d, r.d)
            self.matrix(b + "shortconv.conv", r.d, r.taps)
            self.matrix(b + "shortconv.out_proj", r.d, r.d)
            return
        heads, groups = r.counts(layer)
        q, kv, value = heads * r.head, groups * r.head, r.value or r.head
        if not groups:
            return self.matrix(b + "attn_output", r.d, r.d) if heads else None
        for part, rows in (("q", q), ("k", kv), ("v", groups * value)):
            self.matrix(f"{b}attn_{part}", rows, r.d)
            if r.biases:
                self.bias(f"{b}attn_{part}", rows)
            if r.own_norms and part != "v":
                self.norm(f"{b}attn_{part}_norm", rows // r.head, r.head)
            if (r.head_norms or r.wide_norms) and part != "v":
                self.norm(f"{b}attn_{part}_norm", rows if r.wide_norms else r.head)
        self.matrix(b + "attn_output", r.d, heads * value)
        if r.sinks and r.window(layer):
            self.made[b + "attn_sinks.weight"] = self.rng.standard_normal(heads) + 1
        if r.gate:
            self.matrix(b + "attn_gate", heads if r.gate == "heads" else q, r.d, by=2.0)
        if r.out_bias:
            self.bias(b + "attn_output", r.d)

    def ffn(self, b: str, layer: int) -> None:
        r, moe = self.r, self.r.experts
        count = moe.count if moe.are_in(layer) else 0
        if count:
            self.matrix(b + "ffn_gate_inp", count, r.d)
        if count and moe.bias:
            self.made[b + "exp_probs_b.bias"] = 0.2 * self.rng.standard_normal(count)
        ffn = (
            [("_exps", (count,), moe.rows or r.ffn), ("_shexp", (), moe.shared)] if count else [("", (), r.rows(layer))]
        )
        if count and moe.early == "inputs":
            self.norm(b + "ffn_norm_exps", r.d)
            ffn.append(("", (), r.d))
        if count and moe.chunk:
            ffn.append(("_chexps", (count // moe.chunk,), moe.chunk_rows))
        for suffix, stack, rows in ffn:
            for role, shape in (("gate", (rows, r.d)), ("up", (rows, r.d)), ("down", (r.d, rows))):
                if rows and not (r.act and role == "gate"):
                    scaled = suffix == "_exps" and role == "down"  # rounding may choose another expert: of usual weight
                    self.matrix(f"{b}ffn_{role}{suffix}", *stack, *shape, by=1 / moe.scale if scaled else 1.0)
        for role, rows in (("gate", r.rows(layer)), ("up", r.rows(layer)), ("down", r.d)):
            if r.ffn_biases and r.rows(layer) and not (r.act and role == "gate"):
                self.bias(f"{b}ffn_{role}", rows)
        if r.limits:
            self.made[b + "limits"] = np.array(r.limits[layer])
        if r.act == "xielu":
            self.made[b + "act"] = np.array([0.3 + 0.2 * layer, 0.7 - 0.3 * layer, 0.5 + 0.125 * layer, -(2**-7)])


class Family(NamedTuple):
    """A written model: its recipe, its weights, its file."""

    recipe: Recipe
    weights: Weights
    path: Path


def write_family(path: Path, family: str, qtype: str = "F32", **metadata: Any) -> Family:
    """Write the GGUF file; `metadata`: further keys, without the architecture's prefix and with _ for points."""
    recipe = RECIPES[family]
    weights = make_weights(recipe, WIDTH.get(family, 2.0))
    arch = GGUF_NAMES.get(family, family)
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_name(path.stem)
    own = _common(recipe) | _moe_keys(recipe) | (_OWN_KEYS[family](recipe) if family in _OWN_KEYS else {})
    keys = {f"{arch}.{key}": value for key, value in own.items()} | _bends(recipe, weights)
    _add_metadata(writer, keys | {"tokenizer.ggml.model": "none"} | metadata)
    add_matrices(writer, _as_stored(family, recipe, weights), qtype)
    return Family(recipe, weights, _finish(writer, path))


def add_matrices(writer: gguf.GGUFWriter, weights: Weights, qtype: str) -> None:
    """Write tensors, of which matrices become that type; vectors, norms and routers stay float32."""
    for name, values in weights.items():
        array = values.astype(np.float32)
        if array.ndim == 1 or "_norm" in name or qtype == "F32" or "ffn_gate_inp" in name or "shortconv.conv." in name:
            writer.add_tensor(name, array)
        else:
            encoded = gguf.quants.quantize(array, gguf.GGMLQuantizationType[qtype])
            writer.add_tensor(name, encoded, raw_dtype=gguf.GGMLQuantizationType[qtype])


def _bends(r: Recipe, weights: Weights) -> dict[str, Any]:
    """What files say of xIELU, without the architecture's prefix."""
    if r.act != "xielu":
        return {}
    layers = [weights[f"blk.{i}.act"] for i in range(r.layers)]
    names = ("alpha_p", "alpha_n", "beta", "eps")
    return {f"xielu.{name}": [float(own[at]) for own in layers] for at, name in enumerate(names)}


def _common(r: Recipe) -> dict[str, Any]:
    return {
        "block_count": r.layers, "context_length": r.context, "embedding_length": r.d, "feed_forward_length": r.ffn,
        "attention.head_count": r.heads, "attention.head_count_kv": r.kv, "attention.key_length": r.head,
        "attention.value_length": r.head, "rope.dimension_count": r.rotated, "rope.freq_base": r.thetas[0],
        f"attention.layer_norm_{'' if r.centred else 'rms_'}epsilon": r.eps, "vocab_size": r.vocab,
    }  # fmt: skip


def _moe_keys(r: Recipe) -> dict[str, Any]:
    moe = r.experts
    if not moe.count:
        return {}
    keys = {"expert_count": moe.count, "expert_used_count": moe.used}
    if moe.rows:
        keys |= {"expert_feed_forward_length": moe.rows, "expert_weights_scale": moe.scale,
                 "expert_weights_norm": moe.normed, "expert_gating_func": 2 if moe.sigmoid else 1,
                 "leading_dense_block_count": moe.dense, "expert_shared_count": moe.shared // moe.rows}  # fmt: skip
    return keys


def _laguna(r: Recipe) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "expert_shared_feed_forward_length": r.experts.shared, "expert_shared_count": 1,
        "attention.head_count": [r.counts(i)[0] for i in range(r.layers)],
    }  # fmt: skip
    if r.windows:
        keys |= {"attention.sliding_window": max(r.windows), "rope.dimension_count_swa": r.local_rotated,
                 "rope.freq_base_swa": r.thetas[1]}  # fmt: skip
    if r.yarn:
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": r.yarn.factor,
                 "rope.scaling.original_context_length": r.yarn.original}  # fmt: skip
    return keys


_OWN_KEYS: dict[str, Any] = {
    "step35": lambda r: {
        "expert_shared_feed_forward_length": r.experts.shared, "rope.dimension_count": r.local_rotated,
        "expert_shared_count": 0, "attention.head_count": [r.counts(i)[0] for i in range(r.layers)],
        "attention.head_count_kv": [r.counts(i)[1] for i in range(r.layers)], "rope.freq_base_swa": r.thetas[1],
        "attention.sliding_window": max(r.windows),
        "attention.sliding_window_pattern": [w > 0 for w in r.windows],
        "swiglu_clamp_exp": [experts for experts, _ in r.limits], "swiglu_clamp_shexp": [ffn for _, ffn in r.limits],
    },
    "mimo2": lambda r: {
        "attention.head_count_kv": [r.counts(i)[1] for i in range(r.layers)], "attention.value_length": r.value,
        "attention.value_scale": r.value_scale, "attention.sliding_window": max(r.windows),
        "attention.sliding_window_pattern": [int(w > 0) for w in r.windows], "rope.freq_base_swa": r.thetas[1],
    },
    **dict.fromkeys(("laguna", "laguna-m"), _laguna),
    **dict.fromkeys(("granite", "granitemoe"), lambda r: {
        "embedding_scale": r.embed, "residual_scale": r.residual, "attention.scale": r.score,
        "logit_scale": 1 / r.logits,
    }),
    "minicpm": lambda r: {
        "embedding_scale": r.embed, "residual_scale": r.residual, "logit_scale": 1 / r.logits,
    },
    "qwen2vl": lambda r: {"rope.dimension_sections": [4, 6, 6, 0]},
    "paddleocr": lambda r: {"rope.dimension_sections": [8, 8, 8, 0]},
    "qwen3vl": lambda r: {"rope.dimension_sections": [6, 5, 5, 0], "n_deepstack_layers": 1},
    "qwen3vlmoe": lambda r: {
        "rope.dimension_sections": [6, 5, 5, 0], "n_deepstack_layers": 1,
        "expert_feed_forward_length": r.ffn,
    },
    "ernie4_5-moe": lambda r: {
        "interleave_moe_layer_step": r.experts.every, "expert_shared_feed_forward_length": r.experts.shared,
    },
    "hy_v3": lambda r: {"expert_shared_feed_forward_length": r.experts.shared},
    "mistral3": lambda r: {
        "rope.scaling.type": "yarn", "rope.scaling.factor": r.yarn.factor, "rope.scaling.yarn_log_multiplier": 1.0,
        "rope.scaling.original_context_length": r.yarn.original, "attention.temperature_scale": r.temperature[0],
        "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0,
    },
    "phi3": lambda r: {
        "rope.scaling.original_context_length": r.longrope.original, "rope.scaling.attn_factor": r.longrope.grows,
        "attention.sliding_window": max(r.windows, default=r.context),
    },
    "hunyuan-moe": lambda r: {"expert_shared_feed_forward_length": r.experts.shared},
    "olmo": lambda r: {"attention.clamp_kqv": r.clamp},
    "arcee": lambda r: {
        "rope.scaling.type": "yarn", "rope.scaling.factor": r.yarn.factor,
        "rope.scaling.original_context_length": r.yarn.original,
    },
    "command-r-plus": lambda r: {"logit_scale": r.logits, "rope.scaling.type": "none"},
    "command-r": lambda r: {"logit_scale": r.logits, "rope.scaling.type": "none"},
    "olmo3": lambda r: {
        "attention.sliding_window": max(r.windows), "attention.sliding_window_pattern": [w > 0 for w in r.windows],
        "rope.scaling.type": "yarn", "rope.scaling.factor": r.yarn.factor,
        "rope.scaling.original_context_length": r.yarn.original,
    },
    **dict.fromkeys(("exaone4", "exaone-moe"), lambda r: {
        "attention.sliding_window": max(r.windows), "attention.sliding_window_pattern": [w > 0 for w in r.windows],
    }),
    "deci": lambda r: {
        "attention.head_count": [q for q, _ in r.layer_heads],
        "attention.head_count_kv": [kv for _, kv in r.layer_heads],
        "feed_forward_length": list(r.layer_ffn),
    },
    "llama4": lambda r: {
        "attention.sliding_window": max(r.windows), "interleave_moe_layer_step": r.experts.every,
    },
    "grovemoe": lambda r: {
        "expert_feed_forward_length": r.ffn, "expert_chunk_feed_forward_length": r.experts.chunk_rows,
        "expert_group_scale": r.experts.chunk_scale, "experts_per_group": r.experts.chunk,
    },
    "smallthinker": lambda r: {"attention.sliding_window": max(r.windows)},
    "cohere2": lambda r: {
        "logit_scale": r.logits, "attention.sliding_window": max(r.windows), "rope.scaling.type": "none",
    },
    **dict.fromkeys(("lfm2", "lfm2moe"), lambda r: {
        "shortconv.l_cache": r.taps, "attention.head_count_kv": [0 if conv else r.kv for conv in r.convs],
    }),
    "gemma2": lambda r: {
        "attention.sliding_window": max(r.windows), "attn_logit_softcapping": r.caps[0],
        "final_logit_softcapping": r.caps[1],
    },
    "gemma3": lambda r: {
        "attention.sliding_window": max(r.windows), "rope.scaling.type": "linear", "rope.scaling.factor": r.slower,
    },
}  # fmt: skip


def _as_stored(family: str, r: Recipe, weights: Weights) -> Weights:
    """What the GGUF file has: fused tensors and divisors of frequencies, and the names that this family has."""
    found = {name: values for name, values in weights.items() if not name.endswith((".act", ".limits"))}
    for i in range(r.layers):
        b = f"blk.{i}."
        if family == "hy_v3" and b + "exp_probs_b.bias" in found:
            found[b + "exp_probs_b"] = found.pop(b + "exp_probs_b.bias")
        if family == "seed_oss":
            found[b + "post_attention_norm.weight"] = found.pop(b + "ffn_norm.weight")
        if family == "phi3":
            found[b + "attn_qkv.weight"] = np.concatenate([found.pop(f"{b}attn_{part}.weight") for part in "qkv"])
        if family in ("phi3", "glm4"):
            both = [found.pop(f"{b}ffn_{role}.weight") for role in ("gate", "up")]
            found[b + "ffn_up.weight"] = np.concatenate(both)
    if family.startswith("lfm2"):
        found["token_embd_norm.weight"] = found.pop("output_norm.weight")
    if r.longrope:
        found["rope_factors_short.weight"] = np.array(r.longrope.short)
        found["rope_factors_long.weight"] = np.array(r.longrope.long)
    if r.factors:
        found["rope_freqs.weight"] = np.array(r.factors)
    return found


_HF = {  # configuration and model of transformers, and where the text part's tensors begin
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
    "granite": ("GraniteConfig", "GraniteForCausalLM"),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM"),
    "llama-biased": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen3vl": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration"),
    "qwen3vlmoe": ("Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration"),
    "mistral3": ("Ministral3Config", "Ministral3ForCausalLM"),
    "glm4": ("Glm4Config", "Glm4ForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM"),
    "lfm2moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM"),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM"),
    "minimax-m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM"),
    "command-r": ("CohereConfig", "CohereForCausalLM"),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM"),
    "command-r-plus": ("CohereConfig", "CohereForCausalLM"),
    "olmo": ("OlmoConfig", "OlmoForCausalLM"),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM"),
    "stablelm-12b": ("StableLmConfig", "StableLmForCausalLM"),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM"),
    "jais2": ("Jais2Config", "Jais2ForCausalLM"),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM"),
    "arcee": ("ArceeConfig", "ArceeForCausalLM"),
    "apertus": ("ApertusConfig", "ApertusForCausalLM"),
    "hunyuan-dense": ("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM"),
    "hunyuan-moe": ("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM"),
    "exaone-moe": ("ExaoneMoeConfig", "ExaoneMoeForCausalLM"),
    "gemma": ("GemmaConfig", "GemmaForCausalLM"),
    "ernie4_5": ("Ernie4_5Config", "Ernie4_5ForCausalLM"),
    "dots1": ("Dots1Config", "Dots1ForCausalLM"),
    "hy_v3": ("HYV3Config", "HYV3ForCausalLM"),
    "ernie4_5-moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM"),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM"),
    "paddleocr": ("PaddleOCRVLConfig", "PaddleOCRVLForConditionalGeneration"),
    "step35": ("Step3p7Config", "Step3p7ForConditionalGeneration"),
    "mimo2": ("MiMoV2FlashConfig", "MiMoV2FlashForCausalLM"),
    **dict.fromkeys(("laguna", "laguna-m"), ("LagunaConfig", "LagunaForCausalLM")),
    "qwen2vl": ("Qwen2VLConfig", "Qwen2VLForConditionalGeneration"),
}
_HF_NAMES = {
    "attn_norm": "input_layernorm", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_down": "mlp.down_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_gate_inp": "mlp.gate", "ffn_norm_exps": "residual_norm",
    **{f"ffn_{part}_chexps": f"mlp.chunk_experts.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj", "exp_probs_b": "mlp.gate.e_score_correction",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_gate": "self_attn.g_proj", "attn_sinks": "self_attn.sinks",
}  # fmt: skip
_AFTER_ONLY = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_SANDWICH = _AFTER_ONLY | {"ffn_norm": "pre_feedforward_layernorm"}
_QUERY_KEY = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_LFM2 = {
    "attn_norm": "operator_norm", "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm", "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2", "ffn_up": "feed_forward.w3", "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b": "feed_forward.expert", "shortconv.in_proj": "conv.in_proj", "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}  # fmt: skip
_AFTER_NAMES = {
    "lfm2": _LFM2,
    "lfm2moe": _LFM2,
    "granitemoe": {"ffn_gate_inp": "block_sparse_moe.router"},
    "llama4": {
        "ffn_gate_inp": "feed_forward.router", "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
        "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
        "ffn_down_shexp": "feed_forward.shared_expert.down_proj", "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj", "ffn_down": "feed_forward.down_proj",
    },
    "hy_v3": {"exp_probs_b": "mlp.e_score_correction"},
    "ernie4_5-moe": {"exp_probs_b": "mlp.gate.moe_statics.e_score_correction"},
    "glm4": {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
    "olmo2": _AFTER_ONLY,
    "olmo3": _AFTER_ONLY,
    "exaone4": _AFTER_ONLY,
    "minimax-m2": {"exp_probs_b": "mlp.e_score_correction"},
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    "apertus": {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
    "hunyuan-dense": _QUERY_KEY,
    "hunyuan-moe": _QUERY_KEY | {
        "ffn_gate_inp": "mlp.gate.wg", "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
        "ffn_up_shexp": "mlp.shared_mlp.up_proj", "ffn_down_shexp": "mlp.shared_mlp.down_proj",
    },
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
}  # fmt: skip


def write_family_folder(folder: Path, family: str) -> tuple[Family, Any]:
    """Save the same weights as a transformers model; returns it in eval mode too."""
    import torch
    import transformers

    recipe = RECIPES[family]
    weights = make_weights(recipe, WIDTH.get(family, 2.0))
    of_config, of_model = (getattr(transformers, name) for name in _HF[family])
    model = of_model(of_config(**_hf_settings(family, recipe))).eval()
    state = {name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in _hf_tensors(family, recipe, weights)}
    known = model.state_dict()
    prefix = "model.language_model." if "model.language_model.norm.weight" in known else "model."
    for name, values in state.items():
        name = name if name == "lm_head.weight" else prefix + name
        values = values.reshape(known[name].shape) if values.numel() == 1 else values  # some have no dimension
        assert known.pop(name).shape == values.shape, name
        with torch.no_grad():
            dict(model.state_dict(keep_vars=True))[name].copy_(values)  # biases of choices are buffers
    assert not [name for name in known if name.startswith(prefix) and ".visual." not in name], known.keys()
    model.save_pretrained(folder)
    return Family(recipe, weights, folder), model


_PUBLISHED = (  # what transformers names otherwise once a folder is read
    ("mlp.gate.moe_statics.", "mlp.moe_statics."),
    ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
    ("block_sparse_moe.experts.down_proj", "block_sparse_moe.output_linear.weight"),
    ("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight"),
    ("mlp.e_score_correction_bias", "mlp.expert_bias"),
)


def _publish(name: str) -> str:
    for ours, theirs in _PUBLISHED:
        name = name.replace(ours, theirs)
    return name


def write_bare_folder(folder: Path, family: str, settings: dict[str, Any], prefix: str = "model.") -> Path:
    """The same weights with another config.json, without transformers; `prefix`: before the text part's tensors."""
    from safetensors.numpy import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    recipe = RECIPES[family]
    tensors = dict(_hf_tensors(family, recipe, make_weights(recipe, WIDTH.get(family, 2.0))))
    head = {"lm_head.weight": tensors.pop("lm_head.weight")} if not recipe.tied else {}
    named = head | {prefix + _publish(name): values for name, values in tensors.items()}
    arrays = {name: np.ascontiguousarray(v, dtype=np.float32) for name, v in named.items()}
    if prefix != "model.":
        arrays["model.visual.patch_embed.weight"] = np.ones((4, 4), np.float32)
    save_file(arrays, folder / "model.safetensors")
    return folder


def hf_settings(family: str) -> dict[str, Any]:
    """What transformers' configuration class is made of."""
    return _hf_settings(family, RECIPES[family])


def _hf_settings(family: str, r: Recipe) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": r.thetas[0]}
    settings: dict[str, Any] = {
        "num_hidden_layers": r.layers, "hidden_size": r.d, "num_attention_heads": r.heads,
        "num_key_value_heads": r.kv, "head_dim": r.head, "intermediate_size": r.ffn, "vocab_size": r.vocab,
        "max_position_embeddings": r.context, "rms_norm_eps": r.eps, "tie_word_embeddings": False,
        "attn_implementation": "eager", "pad_token_id": 0,
    }  # fmt: skip
    if family.startswith("granite"):
        settings |= {"embedding_multiplier": r.embed, "residual_multiplier": r.residual,
                     "attention_multiplier": r.score, "logits_scaling": 1 / r.logits}  # fmt: skip
    if r.centred:
        settings |= {"layer_norm_eps": r.eps, "logit_scale": r.logits}
    if family in ("cohere2", "olmo3", "exaone4", "exaone-moe"):
        settings |= {"sliding_window": max(r.windows)}
    settings |= _HF_OWN[family](r) if family in _HF_OWN else {}
    settings["tie_word_embeddings"] = r.tied
    settings |= _hf_moe(family, r.experts)
    if r.yarn:
        rope |= {"rope_type": "yarn", "factor": r.yarn.factor, "mscale": 1.0, "mscale_all_dim": 1.0,
                 "original_max_position_embeddings": r.yarn.original, "beta_fast": 32.0, "beta_slow": 1.0,
                 "llama_4_scaling_beta": r.temperature[0]}  # fmt: skip
    if family == "arcee":
        rope = {k: v for k, v in rope.items() if "scal" not in k}
    if family == "olmo3":
        plain = {"rope_type": "default", "rope_theta": r.thetas[1]}
        rope = {"full_attention": {k: v for k, v in rope.items() if "scal" not in k}, "sliding_attention": plain}
    if r.factors:
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 64}  # fmt: skip
    if family.startswith("hunyuan"):
        rope |= {"rope_theta": 1e4, "rope_type": "dynamic", "alpha": 20.0, "factor": 1.0}
    if r.rotated < r.head:
        rope["partial_rotary_factor"] = r.rotated / r.head
    if r.longrope:
        rope |= {"rope_type": "longrope", "short_factor": list(r.longrope.short),
                 "long_factor": list(r.longrope.long)}  # fmt: skip
        settings["original_max_position_embeddings"] = r.longrope.original
        settings["sliding_window"] = max(r.windows, default=None)
        rope["original_max_position_embeddings"] = r.longrope.original
    if family == "gemma3":
        rope = {"full_attention": rope | {"rope_type": "linear", "factor": r.slower},
                "sliding_attention": {"rope_type": "default", "rope_theta": r.thetas[1]}}  # fmt: skip
        settings |= {"sliding_window": max(r.windows), "query_pre_attn_scalar": r.head}
    if family in ("step35", "mimo2"):
        share = (r.local_rotated or r.rotated) / r.head
        local = {"rope_type": "default", "rope_theta": r.thetas[1], "partial_rotary_factor": share}
        rope = {"full_attention": rope, "sliding_attention": local}
    if family.startswith("laguna"):
        if not r.windows:
            rope = {"full_attention": rope}
        else:
            rope = {
                "full_attention": {k: v for k, v in rope.items() if "scal" not in k},
                "sliding_attention": {"rope_type": "default", "rope_theta": r.thetas[1]},
            }
    settings["rope_parameters"] = rope
    if family == "step35":
        sight = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
        return {"text_config": settings, "vision_config": sight | {"patch_size": 14, "mlp_ratio": 2.0}}
    if family in ("qwen2vl", "paddleocr"):
        pairs = r.head // 2
        settings["rope_parameters"] = rope | {"mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}
        sight = {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": r.d}
        if family == "paddleocr":
            sight = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
        return {"text_config": settings, "vision_config": sight, "tie_word_embeddings": r.tied}
    if family.startswith("qwen3vl"):
        settings["rope_parameters"] = rope | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
        if r.experts.count:
            settings |= {"num_experts": r.experts.count, "num_experts_per_tok": r.experts.used,
                         "moe_intermediate_size": r.ffn}  # fmt: skip
        sight = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": r.d,
                 "deepstack_visual_indexes": [0]}  # fmt: skip
        return {
            "text_config": settings,
            "vision_config": sight,
            "tie_word_embeddings": False,
            "experts_implementation": "eager",
        }
    return settings


_HF_OWN: dict[str, Any] = {
    **dict.fromkeys(
        ("lfm2", "lfm2moe"),
        lambda r: {
            "norm_eps": r.eps,
            "conv_L_cache": r.taps,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv" if conv else "full_attention" for conv in r.convs],
        },
    ),
    "gemma2": lambda r: {
        "sliding_window": max(r.windows),
        "query_pre_attn_scalar": r.head,
        "attn_logit_softcapping": r.caps[0],
        "final_logit_softcapping": r.caps[1],
    },
    **dict.fromkeys(
        ("laguna", "laguna-m"),
        lambda r: {
            "num_attention_heads_per_layer": [r.counts(i)[0] for i in range(r.layers)],
            "layer_types": ["sliding_attention" if r.window(i) else "full_attention" for i in range(r.layers)],
            "sliding_window": max(r.windows, default=512),
            "gating": "per-head" if r.gate == "heads" else "per-element",
        },
    ),
    "step35": lambda r: {
        "layer_types": ["sliding_attention" if r.window(i) else "full_attention" for i in range(r.layers)],
        "sliding_window": max(r.windows),
        "num_sliding_attention_heads": r.local_heads[0],
        "swiglu_limits": [experts or None for experts, _ in r.limits],
        "swiglu_limits_shared": [ffn for _, ffn in r.limits],
    },
    "mimo2": lambda r: {
        "layer_types": ["sliding_attention" if r.window(i) else "full_attention" for i in range(r.layers)],
        "sliding_window": max(r.windows),
        "v_head_dim": r.value,
        "attention_value_scale": r.value_scale,
        "attention_bias": r.biases,
    },
    "command-r-plus": lambda r: {"use_qk_norm": True},
    "llama4": lambda r: {
        "attention_chunk_size": max(r.windows),
        "intermediate_size": r.experts.rows,
        "intermediate_size_mlp": r.ffn,
        "interleave_moe_layer_step": r.experts.every,
        "num_local_experts": r.experts.count,
        "attn_scale": r.temperature[0],
        "floor_scale": r.temperature[1],
    },
    "olmo": lambda r: {"clip_qkv": r.clamp},
    "stablelm": lambda r: {"layer_norm_eps": r.eps, "use_qkv_bias": True},
    "stablelm-12b": lambda r: {"layer_norm_eps": r.eps, "use_parallel_residual": True, "qk_layernorm": True},
    "starcoder2": lambda r: {"norm_epsilon": r.eps, "use_bias": True},
    "jais2": lambda r: {"layer_norm_eps": r.eps},
    "llama-biased": lambda r: {"attention_bias": r.biases, "mlp_bias": r.ffn_biases},
    "nemotron": lambda r: {"norm_eps": r.eps},
}


def _hf_moe(family: str, moe: Moe) -> dict[str, Any]:
    """What the configurations of families with experts call these numbers."""
    own = {
        "dots1": {
            "n_routed_experts": moe.count, "num_experts_per_tok": moe.used, "first_k_dense_replace": moe.dense,
            "routed_scaling_factor": moe.scale, "n_shared_experts": moe.shared // (moe.rows or 1),
            "norm_topk_prob": True, "sliding_window": None,
        },
        "hy_v3": {
            "num_experts": moe.count, "num_experts_per_tok": moe.used, "router_scaling_factor": moe.scale,
            "num_shared_experts": moe.shared // (moe.rows or 1), "enable_moe_fp32_combine": False,
        },
        "ernie4_5-moe": {
            "moe_num_experts": moe.count, "moe_k": moe.used, "moe_layer_start_index": moe.dense,
            "moe_layer_interval": moe.every, "moe_num_shared_experts": moe.shared // (moe.rows or 1),
        },
        "laguna": {
            "num_experts": moe.count, "num_experts_per_tok": moe.used, "moe_routed_scaling_factor": moe.scale,
            "shared_expert_intermediate_size": moe.shared,
            "mlp_layer_types": ["dense" if i < moe.dense else "sparse" for i in range(RECIPES[family].layers)]
            if family.startswith("laguna") else [],
        },
        "step35": {
            "n_routed_experts": moe.count, "num_experts_per_tok": moe.used, "moe_router_scaling_factor": moe.scale,
            "share_expert_dim": moe.shared,
            "mlp_layer_types": ["dense" if i < moe.dense else "sparse" for i in range(RECIPES["step35"].layers)],
        },
        "mimo2": {
            "n_routed_experts": moe.count, "num_experts_per_tok": moe.used, "routed_scaling_factor": moe.scale,
            "mlp_layer_types": ["dense" if i < moe.dense else "sparse" for i in range(RECIPES["mimo2"].layers)],
        },
        "minimax-m2": {"num_local_experts": moe.count, "num_experts_per_tok": moe.used},
        "hunyuan-moe": {"num_experts": moe.count, "moe_topk": moe.used},
        "exaone-moe": {
            "num_experts": moe.count, "num_experts_per_tok": moe.used, "first_k_dense_replace": moe.dense,
            "routed_scaling_factor": moe.scale, "num_shared_experts": moe.shared // (moe.rows or 1),
        },
        "granitemoe": {"num_local_experts": moe.count, "num_experts_per_tok": moe.used},
        "lfm2moe": {"num_experts": moe.count, "num_experts_per_tok": moe.used, "num_dense_layers": moe.dense},
    }.get(family.removesuffix("-m"))  # fmt: skip
    if own is None:
        return {}
    return own | {"experts_implementation": "eager"} | ({"moe_intermediate_size": moe.rows} if moe.rows else {})


def _hf_tensors(family: str, r: Recipe, weights: Weights) -> list[tuple[str, np.ndarray]]:
    """Names below `model.`: rows as transformers rotates them, fused where it has them so, norms of gemmas less 1."""
    found = [("embed_tokens.weight", weights["token_embd.weight"])]
    final = "embedding_norm" if family.startswith("lfm2") else "norm"
    found += [
        (n.replace("output_norm", final), values) for n, values in weights.items() if n.startswith("output_norm.")
    ]
    if not r.tied:
        found.append(("lm_head.weight", weights["output.weight"]))
    names = _HF_NAMES | _AFTER_NAMES.get(family, {})
    for i in range(r.layers):
        own = {n.split(".", 2)[2]: w for n, w in weights.items() if n.startswith(f"blk.{i}.")}
        if (
            r.adjacent
            and "attn_q.weight" in own
            and family
            not in (
                "glm4",
                "cohere2",
                "ernie4_5",
                "ernie4_5-moe",
                "command-r",
                "command-r-plus",
                "llama4",
            )
        ):  # which transformers turns by neighbours too
            for part, heads in (("q", r.heads), ("k", r.kv)):
                for role in {f"attn_{part}.weight", f"attn_{part}.bias"} & own.keys():
                    own[role] = _apart(own[role], heads)
        if family == "phi3":
            fused = np.concatenate([own.pop(f"attn_{part}.weight") for part in "qkv"])
            found.append((f"layers.{i}.self_attn.qkv_proj.weight", fused))
        if family in ("phi3", "glm4"):
            fused = np.concatenate([own.pop(f"ffn_{role}.weight") for role in ("gate", "up")])
            found.append((f"layers.{i}.mlp.gate_up_proj.weight", fused))
        if r.experts.are_in(i):
            at = {"granitemoe": "block_sparse_moe", "lfm2moe": "feed_forward", "llama4": "feed_forward"}.get(
                family, "mlp"
            )
            fused = np.concatenate([own.pop(f"ffn_{role}_exps.weight") for role in ("gate", "up")], 1)
            down = own.pop("ffn_down_exps.weight")
            if family == "llama4":  # whose folders hold experts the other way round
                fused, down = fused.swapaxes(1, 2), down.swapaxes(1, 2)
            found.append((f"layers.{i}.{at}.experts.gate_up_proj", fused))
            found.append((f"layers.{i}.{at}.experts.down_proj", down))
        own.pop("limits", None)
        for part, numbers in zip(("alpha_p", "alpha_n", "beta", "eps"), own.pop("act", ())):
            found.append((f"layers.{i}.mlp.act_fn.{part}", np.array([numbers] if "alpha" in part else numbers)))
        if family == "stablelm-12b":
            for part in "qk":
                for head, values in enumerate(own.pop(f"attn_{part}_norm.weight")):
                    found.append((f"layers.{i}.self_attn.{part}_layernorm.norms.{head}.weight", values))
        for role, values in own.items():
            stem, kind = role.rsplit(".", 1)
            full = f"layers.{i}.{names[stem]}.{kind}".replace("correction.bias", "correction_bias")
            full = full.replace("sinks.weight", "sinks")
            full = full.replace("expert.bias", "expert_bias")
            values = values[:, None] if "conv.conv" in full else values
            found.append((full, values[None] if "moe_statics" in full else values))
    if family in ("gemma", "gemma2", "gemma3", "nemotron", "step35"):
        found = [(name, values - 1 if name.endswith("norm.weight") else values) for name, values in found]
    return found


def _apart(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `_permute`: partners that stand next to each other, half a head apart."""
    apart = rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    assert (_permute(apart, heads) == rows).all()
    return np.ascontiguousarray(apart)
