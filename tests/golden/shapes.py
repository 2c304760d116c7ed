"""Models of known shapes, as their files' headers describe them: no weights."""

from collections.abc import Iterator
from typing import Any

from pshard.model import ModelSpec
from pshard.model_config import Experts, ModelConfig, Rope
from pshard.models.architectures import find_gguf_architecture
from pshard.models.build_units import build_units
from pshard.models.stored import StoredTensor

# architecture, layers, d_model, heads, KV heads, head size, d_ffn, vocabulary
SHAPES = {
    "one-layer": ("qwen3", 1, 256, 4, 2, 64, 512, 1024),
    "qwen3-tiny": ("qwen3", 2, 256, 4, 2, 64, 512, 1024),
    "llama-tiny": ("llama", 2, 256, 4, 2, 64, 512, 1024),
    "three-layers": ("qwen3", 3, 1024, 8, 2, 128, 4096, 8192),
    "qwen2-small": ("qwen2", 12, 1024, 16, 4, 64, 4096, 32000),
    "qwen3-2b": ("qwen3", 8, 4096, 32, 8, 128, 14336, 32000),
    "llama3-8b": ("llama", 32, 4096, 32, 8, 128, 14336, 128256),
    "qwen3-32b": ("qwen3", 64, 5120, 64, 8, 128, 25600, 151936),
    "llama3-70b": ("llama", 80, 8192, 64, 8, 128, 28672, 128256),
    "qwen3-30b-a3b": ("qwen3moe", 48, 2048, 32, 4, 128, 6144, 151936),
    "experts-small": ("qwen3moe", 6, 1024, 8, 2, 128, 2048, 32000),
}
EXPERTS = {"qwen3-30b-a3b": Experts(128, 8, 768), "experts-small": Experts(32, 4, 512)}


def make_shape(name: str, qtype: str = "Q4_0") -> ModelSpec:
    """The model of that name; matrices in `qtype`, the head in Q6_K, and with "Q4_K" every third `down` too."""
    kind, layers, d_model, heads, kv_heads, head_dim, d_ffn, vocab = SHAPES[name]
    arch = find_gguf_architecture(kind, name, has_experts=name in EXPERTS)
    rope = Rope(head_dim, 1e6, arch.gguf_pairing)
    config = ModelConfig(
        kind, layers, d_model, heads, kv_heads, head_dim, d_ffn, vocab, 1e-6, 262144, rope, arch.qk_norm,
        experts=EXPERTS.get(name),
    )  # fmt: skip
    no_file: Any = None
    stored = {n: StoredTensor(n, q, shape, no_file, 0) for n, q, shape in _tensors(config, kind, qtype)}
    return ModelSpec(name, "", config, build_units(arch, config, stored, name))


def _tensors(config: ModelConfig, kind: str, qtype: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    d, q, kv = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    yield "token_embd.weight", qtype, (config.vocab, d)
    for i in range(config.n_layers):
        b = f"blk.{i}."
        yield b + "attn_norm.weight", "F32", (d,)
        for role, rows in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
            yield f"{b}{role}.weight", qtype, (rows, d)
            if kind == "qwen2":
                yield f"{b}{role}.bias", "F32", (rows,)
        yield b + "attn_output.weight", qtype, (d, q)
        if config.qk_norm:
            yield b + "attn_q_norm.weight", "F32", (config.head_dim,)
            yield b + "attn_k_norm.weight", "F32", (config.head_dim,)
        yield b + "ffn_norm.weight", "F32", (d,)
        if config.experts:
            n, f = config.experts.count, config.experts.d_expert
            yield b + "ffn_gate_inp.weight", "F32", (n, d)
            for role, shape in (("gate", (n, f, d)), ("up", (n, f, d)), ("down", (n, d, f))):
                yield f"{b}ffn_{role}_exps.weight", qtype, shape
            continue
        yield b + "ffn_gate.weight", qtype, (config.d_ffn, d)
        yield b + "ffn_up.weight", qtype, (config.d_ffn, d)
        yield b + "ffn_down.weight", "Q6_K" if qtype == "Q4_K" and i % 3 == 0 else qtype, (d, config.d_ffn)
    yield "output_norm.weight", "F32", (d,)
    yield "output.weight", "Q6_K", (config.vocab, d)
