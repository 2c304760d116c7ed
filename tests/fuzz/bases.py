"""The files that are changed: tiny, and between them of all sorts."""

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from cli_world import World, made_up_profile, make_world, tokenizer_metadata, write_profile
from family_files import RECIPES, write_family
from hybrid_files import LIKE, random_hybrid, write_hybrid_gguf
from model_files import LLAMA3_ROPE, Shape, write_gguf
from plan_samples import make_rank_plan, make_tier
from qwen4exp_files import RECIPES as SEVERAL_STREAMS
from qwen4exp_files import make_weights, write_qwen4exp
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pshard.commands import cli_plan
from pshard.models import open_model
from pshard.registries.profile_store import save_profile
from pshard.registries.store import load_registry, save_variants
from pshard.session.run_request import RunRequest
from pshard.units.moe.expert_cache import POLICIES, ExpertCache, pack_hits, slot_nbytes

TINY = {"n_layers": 1, "d_model": 32, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "d_ffn": 64, "vocab": 258}
ROUTED = {"n_experts": 4, "n_used": 2, "d_expert": 32, "d_shared": 32}
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def write_gguf_bases(folder: Path) -> list[Path]:
    """Five architectures, two of them with experts, both sorts of tokenizers, five types of weights, YaRN, another
    alignment, and a layer that drafts tokens."""
    words = tokenizer_metadata()
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(253)), "\u2581a", "\u2581"]
    sentencepiece = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [-float(i) for i in range(258)],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 253, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    mixed = {"ffn_up.weight": "F16", "ffn_gate.weight": "Q5_1"}
    scaled = words | {f"qwen2.{key}": value for key, value in yarn.items()}
    return [
        write_gguf(folder / "a.gguf", "llama", qtype="Q8_0", metadata=words, **TINY),
        write_gguf(folder / "b.gguf", "qwen3", qtypes=mixed, metadata=sentencepiece, **TINY),
        write_gguf(folder / "c.gguf", "qwen2", qtype="Q4_0", tied=True, alignment=64, metadata=scaled, **TINY),
        write_gguf(folder / "d.gguf", "qwen2moe", qtype="Q4_0", metadata=words, **TINY, **ROUTED),
        _write_drafting_glm(folder / "e.gguf", words),
    ]


def write_family_bases(folder: Path) -> list[Path]:
    """A file of each family: fused tensors, factors of frequencies, norms after, scales, temperatures, windows."""
    return [write_family(folder / f"{name}.gguf", name, **_words(320)).path for name in RECIPES]


def write_hybrid_bases(folder: Path) -> list[Path]:
    """The three hybrids, in three types, and one of several streams."""
    types = {"next": "Q4_0", "dense": "Q8_0", "moe": "F16"}
    found = [
        write_hybrid_gguf(folder / f"{like}.gguf", like, random_hybrid(like), types[like], _words(320)) for like in LIKE
    ]
    streams = SEVERAL_STREAMS["plain"]
    path = folder / "streams.gguf"
    return [*found, write_qwen4exp(path, streams, make_weights(streams), "Q8_0", tokenizer=_words(320))]


def _words(count: int) -> dict[str, Any]:
    """A tokenizer of one token per byte, and others up to so many."""
    words = tokenizer_metadata()
    tokens, types = words["tokenizer.ggml.tokens"], words["tokenizer.ggml.token_type"]
    more = [f"more{i}" for i in range(count - len(tokens))]
    return words | {"tokenizer.ggml.tokens": tokens + more, "tokenizer.ggml.token_type": types + [1] * len(more)}


def _write_drafting_glm(path: Path, words: dict[str, Any]) -> Path:
    """A dense layer, one with experts, and one of a few tensors that drafts."""
    metadata = words | {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}
    extra = {f"blk.2.{role}.weight": np.ones(32) for role in ("nextn.eh_proj", "nextn.enorm", "attn_norm")}
    sizes = TINY | ROUTED | {"n_layers": 2}
    return write_gguf(path, "glm4moe", qtypes={"ffn_up_exps.weight": "F16"}, metadata=metadata, extra=extra, **sizes)


def write_folder(folder: Path, parts: int, routed: bool = False) -> Path:
    """A Hugging Face folder of a llama, or of a qwen2_moe, with a tokenizer; its weights in one file, or several with
    an index.

    Written without transformers, which takes seconds to import.
    """
    folder.mkdir(parents=True)
    sizes, rng = Shape(**TINY, **ROUTED, context=256), np.random.default_rng(0)
    named = _named(sizes, "qwen2moe" if routed else "llama")
    tensors = {name: (dims[-1] ** -0.5 * rng.standard_normal(dims)).astype(np.float16) for name, dims in named}
    names = list(tensors)
    if parts == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        places = {name: f"model-{i % parts + 1:05d}-of-{parts:05d}.safetensors" for i, name in enumerate(names)}
        for place in set(places.values()):
            save_file({name: tensors[name] for name in names if places[name] == place}, folder / place)
        _write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    config = {
        "model_type": "llama",
        "num_hidden_layers": sizes.n_layers,
        "hidden_size": sizes.d_model,
        "num_attention_heads": sizes.n_heads,
        "num_key_value_heads": sizes.n_kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.d_ffn,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": sizes.context,
        "rms_norm_eps": sizes.norm_eps,
        "rope_parameters": LLAMA3_ROPE,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "eos_token_id": 257,
        **(_routed_settings(sizes) if routed else {}),
    }
    _write(folder / "config.json", config)
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True})
    _write(folder / "generation_config.json", {"eos_token_id": [257, 5]})
    return folder


def _routed_settings(sizes: Shape) -> dict[str, Any]:
    return {
        "model_type": "qwen2_moe",
        "num_experts": sizes.n_experts,
        "num_experts_per_tok": sizes.n_used,
        "moe_intermediate_size": sizes.d_expert,
        "shared_expert_intermediate_size": sizes.d_shared,
        "norm_topk_prob": False,
        "mlp_only_layers": [],
    }


def _named(sizes: Shape, arch: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Hugging Face names and shapes of an architecture's tensors; each expert has its own."""
    words = {"attn_norm": "input_layernorm", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm"}
    words |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"}
    for x in ("gate", "up", "down"):
        words |= {f"ffn_{x}": f"mlp.{x}_proj", f"ffn_{x}_exps": f"mlp.experts.N.{x}_proj"}
        words |= {f"ffn_{x}_shexp": f"mlp.shared_expert.{x}_proj"}
    words |= {"ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
    words |= {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    words |= {"output": "lm_head", "blk": "model.layers"}
    for name, dims in sizes.tensors(arch, tied=False):
        given = ".".join(words.get(part, part) for part in name.split("."))
        if len(dims) < 3:
            yield given, dims
        for expert in range(dims[0]) if len(dims) == 3 else ():
            yield given.replace(".N.", f".{expert}."), dims[1:]


def _write(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data))


def plan_world(folder: Path) -> tuple[World, RunRequest]:
    """A model of 4 MiB, planned for 2 MiB of VRAM: units are pinned, streamed, divided and on the CPU."""
    sizes = {"n_layers": 4, "d_model": 128, "n_heads": 2, "n_kv_heads": 1, "head_dim": 64, "d_ffn": 512}
    world, profile = make_world(folder, **sizes, context=256), made_up_profile()
    rows = tuple(row for row in profile.matmuls if row.qtype == "F32")  # the others only take time to read
    save_profile(replace(profile, matmuls=rows), world.profile)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert cli_plan.main(["-m", str(world.model), "--vram", "2", "-c", "64", "--profile", str(world.profile)]) == 0
    return world, RunRequest(world.model, profile=world.profile)


def cached_world(folder: Path) -> tuple[World, RunRequest]:
    """A model with experts, under a plan that has slots for those that follow use, in two pools."""
    sizes = {"n_layers": 2, "d_model": 64, "n_heads": 2, "n_kv_heads": 1, "head_dim": 32, "d_ffn": 64, "n_experts": 6}
    world = make_world(folder, arch="qwen3moe", **sizes, n_used=2, d_expert=64, context=256)
    write_profile(world.profile)
    flags = ["--vram", "8", "-c", "64", "-ctk", "f32", "-ctv", "f32", "--profile", str(world.profile)]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert cli_plan.main(["-m", str(world.model), *flags]) == 0
    (plans,) = load_registry(world.registry).sets
    (variant,), (rank,) = plans.variants, plans.variants[0].ranks
    with open_model(world.model) as file:
        spec = file.spec
    routed = [unit for unit in spec.units if unit.kind.parts]
    hits = pack_hits([0.5] * 6)
    caches = tuple(
        ExpertCache((unit.name,), 3, slot_nbytes(unit), policy, 2, hits, 0.5, 1.0)
        for unit, policy in zip(routed, POLICIES, strict=True)
    )
    places = {u.name: ("streamed" if u.kind.parts else "pinned", "vram" if u.kind.state else None) for u in spec.units}
    bytes_of = sum(cache.nbytes for cache in caches)
    tiers = tuple(make_tier(spec, tier.tokens, places, 2, 64, 1) for tier in rank.tiers)
    tiers = tuple(replace(tier, buffers=replace(tier.buffers, cached=bytes_of)) for tier in tiers)
    made = replace(make_rank_plan(spec, tiers), budget_mib=rank.budget_mib, caches=caches)
    world.registry.unlink()
    save_variants(world.registry, plans.model, plans.inputs, [replace(variant, ranks=(made,))])
    return world, RunRequest(world.model, type_k="f32", type_v="f32", profile=world.profile)
