"""Tiny model files with random weights for tests: GGUF files, Hugging Face folders, and a GGUF made from the latter.

Matrices have a standard deviation near 1/sqrt(inputs), so activations keep their size through the layers; norms and
biases are random too, so that leaving one out shows. Models with experts have wider embeddings, so that
all experts are used.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from random_blocks import LATER, random_encoded

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
OSS = "gpt-oss"
MOE = ("mixtral", "qwen2moe", "qwen3moe", "glm4moe")  # as GGUF files call them, but mixtral, which they call llama
HF_CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
    "glm4_moe": "Glm4Moe",
    "gpt_oss": "GptOss",
    "deepseek_v2": "DeepseekV2",  # latent_files.py has their settings
    "deepseek_v3": "DeepseekV3",
    "glm4_moe_lite": "Glm4MoeLite",
}
OSS_ROPE = YARN_ROPE | {"factor": 32.0, "original_max_position_embeddings": 16, "truncate": False}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
MOST_WRITTEN = 16  # files that are kept, of 9 MiB at most
_written: dict[str, bytes] = {}  # what was written last, by what was asked for: tests want the same files often


@dataclass(frozen=True)
class Shape:
    """Sizes of a tiny model; columns are multiples of 256 so that every quant type fits."""

    n_layers: int = 2
    d_model: int = 256
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    d_ffn: int = 512
    vocab: int = 320
    context: int = 512
    rope_base: float = 10000.0
    norm_eps: float = 1e-6
    n_experts: int = 8  # these four only where the architecture has experts
    n_used: int = 2
    d_expert: int = 256
    d_shared: int = 256
    dense_layers: int = 1  # of glm4moe

    def tensors(self, arch: str, tied: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        """GGUF names and shapes (rows, cols) of every tensor of that architecture."""
        d, q, kv = self.d_model, self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        yield "token_embd.weight", (self.vocab, d)
        for i in range(self.n_layers):
            b = f"blk.{i}."
            yield b + "attn_norm.weight", (d,)
            for role, rows in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
                yield b + f"{role}.weight", (rows, d)
                if arch in ("qwen2", "qwen2moe", "glm4moe", OSS):  # glm4moe may be without
                    yield b + f"{role}.bias", (rows,)
            yield b + "attn_output.weight", (d, q)
            if arch == OSS:
                yield b + "attn_output.bias", (d,)
                yield b + "attn_sinks.weight", (self.n_heads,)
            if arch in ("qwen3", "qwen3moe"):
                yield b + "attn_q_norm.weight", (self.head_dim,)
                yield b + "attn_k_norm.weight", (self.head_dim,)
            yield b + ("post_attention_norm.weight" if arch in ("glm4moe", OSS) else "ffn_norm.weight"), (d,)
            if arch in (*MOE, OSS) and (arch != "glm4moe" or i >= self.dense_layers):
                yield from self._routed(arch, b)
                continue
            yield b + "ffn_gate.weight", (self.d_ffn, d)
            yield b + "ffn_up.weight", (self.d_ffn, d)
            yield b + "ffn_down.weight", (d, self.d_ffn)
        yield "output_norm.weight", (d,)
        if not tied:
            yield "output.weight", (self.vocab, d)

    def _routed(self, arch: str, block: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Router, experts and shared experts of a layer."""
        d, n, f = self.d_model, self.n_experts, self.d_expert
        yield block + "ffn_gate_inp.weight", (n, d)
        if arch == "glm4moe":
            yield block + "exp_probs_b.bias", (n,)
        for suffix, stack, rows in (("exps", (n,), f), ("shexp", (), self.d_shared)):
            if suffix == "exps" or arch in ("qwen2moe", "glm4moe"):
                yield f"{block}ffn_gate_{suffix}.weight", (*stack, rows, d)
                yield f"{block}ffn_up_{suffix}.weight", (*stack, rows, d)
                yield f"{block}ffn_down_{suffix}.weight", (*stack, d, rows)
        if arch == "qwen2moe":
            yield block + "ffn_gate_inp_shexp.weight", (d,)
        if arch == OSS:
            yield block + "ffn_gate_inp.bias", (n,)
            for role, rows in (("gate", f), ("up", f), ("down", d)):
                yield f"{block}ffn_{role}_exps.bias", (n, rows)


def write_gguf(
    path: Path,
    arch: str = "llama",
    *,
    qtype: str = "F32",
    qtypes: dict[str, str] | None = None,
    tied: bool = False,
    seed: int = 0,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    omit: tuple[str, ...] = (),
    alignment: int | None = None,
    **shape: Any,
) -> Path:
    """Write a random model of architecture "llama", "qwen2" or "qwen3", or one of MOE, and return its path.

    Every matrix has quant type `qtype` unless `qtypes` names another for its role ("ffn_down.weight": "Q6_K"); vectors
    are F32. `shape` overrides fields of Shape; `metadata` sets further keys (values: str, bool, int, float, lists);
    `extra` adds or replaces tensors (float32) and `omit` leaves some out. `alignment`: of tensors, 32 when not given.
    """
    asked = repr((path.stem, arch, qtype, qtypes, tied, seed, metadata, omit, alignment, shape))
    if extra:
        return _write_gguf(path, arch, qtype, qtypes, tied, seed, metadata, extra, omit, alignment, Shape(**shape))
    data = _written.pop(asked, None)
    if data is None:
        _write_gguf(path, arch, qtype, qtypes, tied, seed, metadata, {}, omit, alignment, Shape(**shape))
        data = path.read_bytes()
    else:
        path.write_bytes(data)
    _written[asked] = data
    if len(_written) > MOST_WRITTEN:
        _written.pop(next(iter(_written)))
    return path


def _write_gguf(
    path: Path,
    arch: str,
    qtype: str,
    qtypes: dict[str, str] | None,
    tied: bool,
    seed: int,
    metadata: dict[str, Any] | None,
    extra: dict[str, np.ndarray],
    omit: tuple[str, ...],
    alignment: int | None,
    sizes: Shape,
) -> Path:
    writer = _start_writer(path, arch, sizes)
    _add_metadata(writer, {"tokenizer.ggml.model": "none", **(metadata or {})})
    if alignment:
        writer.add_custom_alignment(alignment)
    for name, array, kind in _draw_tensors(
        arch, qtype, tuple((qtypes or {}).items()), tied, seed, (*omit, *extra), sizes
    ):
        if kind:
            _add_encoded(writer, name, array, kind)
        else:
            writer.add_tensor(name, array)
    for name, array in extra.items():
        writer.add_tensor(name, array.astype(np.float32))
    return _finish(writer, path)


@lru_cache(maxsize=8)
def _draw_tensors(
    arch: str,
    qtype: str,
    qtypes: tuple[tuple[str, str], ...],
    tied: bool,
    seed: int,
    without: tuple[str, ...],
    sizes: Shape,
) -> tuple[tuple[str, np.ndarray, str], ...]:
    """Names, numbers and quant types ("" of vectors) of a file's tensors: kept, as many files differ in keys alone."""
    rng, drawn = np.random.default_rng(seed), list[tuple[str, np.ndarray, str]]()
    for name, dims in sizes.tensors(arch, tied):
        role = name.split(".", 2)[2] if name.startswith("blk.") else name
        if name in without:
            continue
        if len(dims) == 1 or name.endswith(".bias"):
            drawn.append((name, random_vector(name, prod(dims), rng).reshape(dims), ""))
        else:
            kind = dict(qtypes).get(role, qtype)
            kind = "F32" if role == "ffn_gate_inp.weight" else kind
            wide = _width_for_routing(role, dims[-1]) if arch in (*MOE, OSS) else 1.0
            encoded = random_matrix(prod(dims[:-1]), dims[-1], kind, rng, wide)
            drawn.append((name, encoded.reshape(*dims[:-1], -1), kind))
    return tuple(drawn)


def _width_for_routing(role: str, cols: int) -> float:
    """Tokens must differ for routers: embeddings are wide, and what layers give all tokens alike is not."""
    if role == "token_embd.weight":
        return cols**0.5
    return 0.5 if role.startswith(("attn_output", "ffn_down")) else 1.0


def random_vector(name: str, n: int, rng: np.random.Generator) -> np.ndarray:
    """A norm's weight around 1 or a bias around 0, float32."""
    centre = 0.0 if name.endswith("bias") else 1.0
    if name.endswith("ffn_gate_inp_shexp.weight"):  # a product of one row
        return (n**-0.5 * rng.standard_normal(n)).astype(np.float32)
    return (centre + 0.1 * rng.standard_normal(n)).astype(np.float32)


def random_matrix(rows: int, cols: int, qtype: str, rng: np.random.Generator, wide: float = 1.0) -> np.ndarray:
    """Encoded random weights, u8 [rows, bytes of a row], with standard deviation near wide/sqrt(cols)."""
    std = wide * cols**-0.5
    if qtype in LATER:
        return random_encoded(qtype, rows, cols, std, rng)
    if qtype in _K_SCALES:  # the gguf package cannot encode these: random codes under scales that give the same spread
        return _random_k_blocks(rows, cols, qtype, std, rng)
    weights = (std * rng.standard_normal((rows, cols))).astype(np.float32)
    encoded = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[qtype])
    return np.ascontiguousarray(encoded).view(np.uint8).reshape(rows, -1)


# K types: offset of the float16 scale (and of the scale of minimums), standard deviation of weight / scale for random
# codes, and the ratio of the two scales that centres the weights at zero.
_K_SCALES = {
    "Q2_K": (80, 82, 15.0, 1.5),
    "Q3_K": (108, None, 42.0, 0.0),
    "Q4_K": (0, 2, 260.0, 7.5),
    "Q5_K": (0, 2, 530.0, 15.5),
    "Q6_K": (208, None, 1370.0, 0.0),
    "IQ4_NL": (0, None, 67.0, 0.0),
    "IQ4_XS": (0, None, 1244.0, 0.0),
}


def _random_k_blocks(rows: int, cols: int, qtype: str, std: float, rng: np.random.Generator) -> np.ndarray:
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[qtype]]
    at_scale, at_min, spread, ratio = _K_SCALES[qtype]
    blocks = rng.integers(0, 256, (rows, cols // block, nbytes), dtype=np.uint8)
    scale = std / spread * rng.uniform(0.8, 1.2, blocks.shape[:2])
    blocks[..., at_scale : at_scale + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    if at_min is not None:
        blocks[..., at_min : at_min + 2] = (ratio * scale).astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def _start_writer(path: Path, arch: str, s: Shape) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(str(path), "llama" if arch == "mixtral" else arch)
    writer.add_name(path.stem)
    writer.add_block_count(s.n_layers)
    writer.add_context_length(s.context)
    writer.add_embedding_length(s.d_model)
    writer.add_feed_forward_length(s.d_ffn)
    writer.add_head_count(s.n_heads)
    writer.add_head_count_kv(s.n_kv_heads)
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_rope_dimension_count(s.head_dim // 2 if arch == "glm4moe" else s.head_dim)
    writer.add_rope_freq_base(s.rope_base)
    writer.add_layer_norm_rms_eps(s.norm_eps)
    writer.add_vocab_size(s.vocab)
    if arch in (*MOE, OSS):
        writer.add_expert_count(s.n_experts)
        writer.add_expert_used_count(s.n_used)
        writer.add_expert_feed_forward_length(s.d_expert)
    if arch == OSS:
        writer.add_sliding_window(s.context // 16)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(s.context // 32)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(s.d_shared)
    if arch == "glm4moe":
        writer.add_expert_shared_count(s.d_shared // s.d_expert)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(1.5)
        writer.add_expert_weights_norm(True)
        writer.add_leading_dense_block_count(s.dense_layers)
    return writer


def _add_metadata(writer: gguf.GGUFWriter, values: dict[str, Any]) -> None:
    """Add keys, replacing those that are there; a value of None removes the key."""
    for key, value in values.items():
        writer.kv_data[0].pop(key, None)
        if value is None:
            continue
        kind = gguf.GGUFValueType.get_type(value)
        if kind == gguf.GGUFValueType.INT32 and value >= 0:
            kind = gguf.GGUFValueType.UINT32
        sub_type = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(key, value, kind, sub_type=sub_type)


Q2_0: Any = 42  # ggml's number, of which the gguf package does not know yet
gguf.GGML_QUANT_SIZES.setdefault(Q2_0, (64, 18))


def _add_encoded(writer: gguf.GGUFWriter, name: str, encoded: np.ndarray, qtype: str) -> None:
    if qtype in ("F32", "F16"):
        writer.add_tensor(name, encoded.view(np.float32 if qtype == "F32" else np.float16))
    else:
        writer.add_tensor(name, encoded, raw_dtype=Q2_0 if qtype == "Q2_0" else gguf.GGMLQuantizationType[qtype])


def _finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=False)
    writer.close()
    return path


def write_hf_folder(
    path: Path,
    arch: str = "llama",
    *,
    tied: bool = False,
    rope: dict[str, Any] | None = None,
    seed: int = 0,
    dtype: str = "float32",
    shard_bytes: int | None = None,
    shape: dict[str, Any] | None = None,
    **config: Any,
) -> Any:
    """Save a random transformers model (one of HF_CLASSES, by its model_type) to the folder; returns it in eval mode.

    `rope` is a `rope_parameters` dict (LLAMA3_ROPE, YARN_ROPE, LINEAR_ROPE); `dtype` that of the saved tensors;
    `shard_bytes` splits the file; `shape` overrides fields of Shape, `config` those of the transformers config.
    """
    import torch
    import transformers

    s = dataclasses.replace(Shape(), **(shape or {}))
    name = HF_CLASSES[arch]
    window = {"sliding_window": None} if arch == "mistral" else {}
    settings = {
        "num_hidden_layers": s.n_layers,
        "hidden_size": s.d_model,
        "num_attention_heads": s.n_heads,
        "num_key_value_heads": s.n_kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": s.d_ffn,
        "vocab_size": s.vocab,
        "max_position_embeddings": s.context,
        "rms_norm_eps": s.norm_eps,
        "rope_parameters": rope or {"rope_type": "default", "rope_theta": s.rope_base},
        "tie_word_embeddings": tied,
        **window,
        **_hf_expert_settings(arch, s),
        **config,
    }
    # the constructor may edit the dict of RoPE parameters: give it its own
    settings["rope_parameters"] = dict(settings["rope_parameters"])
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=generator)
            if "embed_tokens" in key and hasattr(model.config, "num_experts_per_tok"):
                weight.copy_(values)
            elif weight.ndim >= 2:
                weight.copy_(values * weight.shape[-1] ** -0.5)
            else:
                weight.copy_((0.0 if key.endswith("bias") else 1.0) + 0.1 * values)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model = model.to(getattr(torch, dtype)).eval()
    sharding = {"max_shard_size": shard_bytes} if shard_bytes else {}
    model.save_pretrained(path, **sharding)
    return model


def _hf_expert_settings(arch: str, s: Shape) -> dict[str, Any]:
    sizes = {"num_experts_per_tok": s.n_used, "moe_intermediate_size": s.d_expert}
    if arch == "mixtral":
        return {"num_local_experts": s.n_experts, "num_experts_per_tok": s.n_used, "intermediate_size": s.d_expert}
    if arch == "gpt_oss":
        return {"num_local_experts": s.n_experts, "num_experts_per_tok": s.n_used, "intermediate_size": s.d_expert,
                "sliding_window": s.context // 16, "rope_parameters": OSS_ROPE}  # fmt: skip
    if arch == "qwen2_moe":
        return sizes | {"num_experts": s.n_experts, "shared_expert_intermediate_size": s.d_shared}
    if arch == "qwen3_moe":
        return sizes | {"num_experts": s.n_experts, "norm_topk_prob": True}
    if arch == "glm4_moe":
        shared = {"n_shared_experts": s.d_shared // s.d_expert, "first_k_dense_replace": s.dense_layers}
        return sizes | shared | {"n_routed_experts": s.n_experts, "routed_scaling_factor": 1.5, "attention_bias": True}
    return {}


def write_gguf_from_hf(path: Path, model: Any, qtype: str = "F32") -> Path:
    """Write a transformers model as GGUF; q and k rows of llama and mistral are permuted for adjacent RoPE pairs."""
    config = model.config
    arch = "llama" if config.model_type == "mistral" else config.model_type.replace("_moe", "moe")
    arch = OSS if arch == "gpt_oss" else arch
    s = Shape(
        n_layers=config.num_hidden_layers,
        d_model=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        d_ffn=config.intermediate_size,
        vocab=config.vocab_size,
        context=config.max_position_embeddings,
        rope_base=config.rope_parameters["rope_theta"],
        norm_eps=config.rms_norm_eps,
        **_expert_sizes(config),
    )
    writer = _start_writer(path, arch, s)
    writer.add_tokenizer_model("none")
    for name, array in _gguf_tensors(model, writer.arch, s.n_layers):
        if writer.arch == "llama" and ".attn_q." in name:
            array = _permute(array, s.n_heads)
        if writer.arch == "llama" and ".attn_k." in name:
            array = _permute(array, s.n_kv_heads)
        if array.ndim == 1 or name.endswith(".bias"):
            writer.add_tensor(name, np.ascontiguousarray(array))
        else:
            encoded = gguf.quants.quantize(np.ascontiguousarray(array), gguf.GGMLQuantizationType[qtype])
            _add_encoded(writer, name, encoded.view(np.uint8).reshape(*array.shape[:-1], -1), qtype)
    _add_rope_scaling(writer, model, s)
    return _finish(writer, path)


def _expert_sizes(config: Any) -> dict[str, int]:
    if not hasattr(config, "num_experts_per_tok"):
        return {}
    d_expert = getattr(config, "moe_intermediate_size", config.intermediate_size)
    shared = getattr(config, "shared_expert_intermediate_size", d_expert * getattr(config, "n_shared_experts", 0))
    dense = getattr(config, "first_k_dense_replace", 0)
    count = config.num_experts if config.model_type == "qwen2_moe" else config.num_local_experts
    sizes = {"n_experts": count, "n_used": config.num_experts_per_tok, "d_expert": d_expert}
    return sizes | {"d_shared": shared, "dense_layers": dense}


def _gguf_tensors(model: Any, arch: str, n_layers: int) -> Iterator[tuple[str, np.ndarray]]:
    """A transformers model's weights in float32 by GGUF name; gate and up of experts apart."""
    known = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(known, n_layers)
    for key, weight in model.state_dict().items():
        array = weight.detach().float().numpy()
        if arch == OSS and ".mlp.experts." in key:
            yield from _oss_experts(f"blk.{key.split('.')[2]}.ffn_", key.rsplit(".", 1)[1], array)
        elif key.endswith(".self_attn.sinks"):
            yield f"blk.{key.split('.')[2]}.attn_sinks.weight", array
        elif key.endswith("mlp.experts.gate_up_proj"):
            for role, half in zip(("gate", "up"), np.split(array, 2, 1)):
                yield f"blk.{key.split('.')[2]}.ffn_{role}_exps.weight", half
        elif key.endswith("mlp.experts.down_proj"):
            yield f"blk.{key.split('.')[2]}.ffn_down_exps.weight", array
        elif key.endswith("shared_expert_gate.weight"):
            yield names.get_name(key, (".weight",)), array[0]
        elif key != "lm_head.weight" or not model.config.tie_word_embeddings:
            key = key.replace("e_score_correction_bias", "e_score_correction.bias")
            yield names.get_name(key, (".weight", ".bias")), array


def _oss_experts(prefix: str, key: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """transformers multiplies from the other side and has gate and up in turns."""
    suffix = "_exps.bias" if key.endswith("_bias") else "_exps.weight"
    rows = array if key.endswith("_bias") else array.swapaxes(1, 2)
    if key.startswith("down"):
        yield f"{prefix}down{suffix}", rows
        return
    yield f"{prefix}gate{suffix}", rows[:, ::2]
    yield f"{prefix}up{suffix}", rows[:, 1::2]


def _permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of each head so that the partners i and i + dims/2 stand next to each other."""
    return np.ascontiguousarray(rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape))


def _add_rope_scaling(writer: gguf.GGUFWriter, model: Any, s: Shape) -> None:
    rope = model.config.rope_parameters
    kind = rope.get("rope_type", "default")
    if writer.arch == OSS:
        return  # written already
    if kind == "llama3":  # as divisors of the plain frequencies, taken from what transformers computed
        plain = s.rope_base ** -(np.arange(0, s.head_dim, 2) / s.head_dim)
        scaled = model.model.rotary_emb.inv_freq.double().numpy()
        writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
    elif kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
