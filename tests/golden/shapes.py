"""Models of known shapes, as their files' headers describe them: no weights."""

from collections.abc import Iterator
from typing import Any

from pshard.model import ModelSpec
from pshard.model_config import Delta, Experts, Latent, ModelConfig, Rope
from pshard.models.architectures import find_gguf_architecture
from pshard.models.build_units import build_units
from pshard.models.hybrid.arrange_delta import split_hybrid
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
    "deepseek-v2-lite": ("deepseek2", 27, 2048, 16, 1, 576, 10944, 102400),
    "qwen3-next-80b-a3b": ("qwen3next", 48, 2048, 16, 2, 256, 5120, 151936),
    "qwen3.5-35b-a3b": ("qwen35moe", 40, 2048, 16, 2, 256, 512, 248320),
    "qwen3.5-27b": ("qwen35", 64, 5120, 24, 4, 256, 17408, 248320),
}
DELTAS = {"qwen3-next-80b-a3b": (16, 32, 128), "qwen3.5-35b-a3b": (16, 32, 128), "qwen3.5-27b": (16, 48, 128)}
LATENTS = {"deepseek-v2-lite": Latent(0, 512, 128, 64, 128, 1.5895)}
EXPERTS = {"qwen3-30b-a3b": Experts(128, 8, 768), "experts-small": Experts(32, 4, 512),
           "deepseek-v2-lite": Experts(64, 6, 1408, normed=False, d_shared=2816, dense_layers=1),
           "qwen3-next-80b-a3b": Experts(512, 10, 512, d_shared=512, shared_gate=True),
           "qwen3.5-35b-a3b": Experts(256, 8, 512, d_shared=512, shared_gate=True)}  # fmt: skip


def make_shape(name: str, qtype: str = "Q4_0") -> ModelSpec:
    """The model of that name; matrices in `qtype`, the head in Q6_K, and with "Q4_K" every third `down` too."""
    kind, layers, d_model, heads, kv_heads, head_dim, d_ffn, vocab = SHAPES[name]
    arch = find_gguf_architecture(kind, name, has_experts=name in EXPERTS)
    latent = LATENTS.get(name)
    delta = None
    if name in DELTAS:
        delta = Delta(*DELTAS[name], arch.delta == "tiled", tuple(range(3, layers, 4)))
    rope = Rope(latent.rope if latent else int(head_dim * arch.rotated), 1e6, arch.gguf_pairing)
    config = ModelConfig(
        kind, layers, d_model, heads, kv_heads, head_dim, d_ffn, vocab, 1e-6, 262144, rope, arch.qk_norm,
        experts=EXPERTS.get(name), latent=latent, gated=delta is not None, delta=delta,
    )  # fmt: skip
    no_file: Any = None
    stored = {n: StoredTensor(n, q, shape, no_file, 0) for n, q, shape in _tensors(config, kind, qtype)}
    return ModelSpec(name, "", config, build_units(arch, config, split_hybrid(config, stored), name))


def _tensors(config: ModelConfig, kind: str, qtype: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    d, q, kv = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    yield "token_embd.weight", qtype, (config.vocab, d)
    for i in range(config.n_layers):
        b = f"blk.{i}."
        yield b + "attn_norm.weight", "F32", (d,)
        if config.delta and i not in config.delta.full:
            yield from _delta(config.d_model, config.delta, b, qtype)
        elif config.latent:
            yield from _latent(config, config.latent, b, qtype)
        else:
            for role, rows in (("attn_q", 2 * q if config.gated else q), ("attn_k", kv), ("attn_v", kv)):
                yield f"{b}{role}.weight", qtype, (rows, d)
                if kind == "qwen2":
                    yield f"{b}{role}.bias", "F32", (rows,)
            yield b + "attn_output.weight", qtype, (d, q)
        if config.qk_norm and (config.delta is None or i in config.delta.full):
            yield b + "attn_q_norm.weight", "F32", (config.head_dim,)
            yield b + "attn_k_norm.weight", "F32", (config.head_dim,)
        yield b + "ffn_norm.weight", "F32", (d,)
        if config.experts and i >= config.experts.dense_layers:
            n, f, shared = config.experts.count, config.experts.d_expert, config.experts.d_shared
            for role, shape in (("gate", (shared, d)), ("up", (shared, d)), ("down", (d, shared))):
                if shared:
                    yield f"{b}ffn_{role}_shexp.weight", qtype, shape
            yield b + "ffn_gate_inp.weight", "F32", (n, d)
            if config.experts.shared_gate:
                yield b + "ffn_gate_inp_shexp.weight", "F32", (d,)
            for role, shape in (("gate", (n, f, d)), ("up", (n, f, d)), ("down", (n, d, f))):
                yield f"{b}ffn_{role}_exps.weight", qtype, shape
            continue
        yield b + "ffn_gate.weight", qtype, (config.d_ffn, d)
        yield b + "ffn_up.weight", qtype, (config.d_ffn, d)
        yield b + "ffn_down.weight", "Q6_K" if qtype == "Q4_K" and i % 3 == 0 else qtype, (d, config.d_ffn)
    yield "output_norm.weight", "F32", (d,)
    yield "output.weight", "Q6_K", (config.vocab, d)


def _delta(d: int, delta: Delta, b: str, qtype: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """A gated delta net."""
    values, heads = delta.value_heads * delta.head, delta.value_heads
    channels = 2 * delta.key_heads * delta.head + values
    yield b + "attn_qkv.weight", qtype, (channels, d)
    yield b + "attn_gate.weight", qtype, (values, d)
    if delta.tiled:
        yield b + "ssm_beta.weight", qtype, (heads, d)
        yield b + "ssm_alpha.weight", qtype, (heads, d)
    else:
        yield b + "ssm_ba.weight", qtype, (2 * heads, d)
    yield b + "ssm_conv1d.weight", "F32", (channels, 4)
    yield b + "ssm_dt.bias", "F32", (heads,)
    yield b + "ssm_a", "F32", (heads,)
    yield b + "ssm_norm.weight", "F32", (delta.head,)
    yield b + "ssm_out.weight", qtype, (d, values)


def _latent(config: ModelConfig, latent: Latent, b: str, qtype: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Latent attention whose queries are made of the hidden state."""
    d, heads = config.d_model, config.n_heads
    yield b + "attn_q.weight", qtype, (heads * latent.query, d)
    yield b + "attn_kv_a_mqa.weight", qtype, (latent.cell, d)
    yield b + "attn_kv_a_norm.weight", "F32", (latent.rank,)
    yield b + "attn_k_b.weight", qtype, (heads, latent.rank, latent.nope)
    yield b + "attn_v_b.weight", qtype, (heads, latent.value, latent.rank)
    yield b + "attn_output.weight", qtype, (d, heads * latent.value)
