"""Tiny models with a multi-token head: GGUF files of the architectures that have one, and their tensors in float32."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from cli_world import World, make_world, tokenizer_metadata
from hybrid_files import LIKE, random_hybrid, read_hybrid_gguf, write_hybrid_gguf
from latent_files import random_tensors, write_latent_gguf
from model_files import write_gguf

HEADED = ("dense", "moe", "next", "glm", "latent", "llama")
_PLAIN: dict[str, Any] = {"n_layers": 2, "qtype": "F32"}


def write_headed(
    path: Path, like: str, seed: int = 0, own: bool = False, metadata: Mapping[str, Any] | None = None
) -> dict[str, np.ndarray]:
    """Write one; returns its tensors. own: the head has a table, and an output, of its own."""
    if like in LIKE:
        base = random_hybrid(like, seed=seed)
        head = head_tensors(base, 3, 4, seed, own)
        write_hybrid_gguf(path, like, base | head, metadata=_keys(LIKE[like].gguf, 5) | dict(metadata or {}))
    elif like == "latent":
        base = random_tensors("v3")
        layers = 1 + max(int(name.split(".")[1]) for name in base if name.startswith("blk."))
        head = head_tensors(base, layers - 1, layers, seed, own)
        keys = _keys("deepseek2", layers + 1) | dict(metadata or {})
        write_latent_gguf(path, "v3", base | head, metadata=keys)
    else:
        arch = {"glm": "glm4moe"}.get(like, like)
        write_gguf(path, arch, **_PLAIN)
        head = head_tensors(read_hybrid_gguf(path), 1, 2, seed, own)
        write_gguf(path, arch, **_PLAIN, extra=head, metadata=_keys(arch, 3) | dict(metadata or {}))
    return read_hybrid_gguf(path)


def make_headed_world(folder: Path) -> World:
    """As `make_world`, of a mixture like GLM's with a head that has its own table and output."""
    keys = tokenizer_metadata() | _keys("glm4moe", 3)
    sizes: dict[str, Any] = {"arch": "glm4moe", "n_layers": 2, "vocab": 258}
    world = make_world(folder, **sizes)
    extra = head_tensors(read_hybrid_gguf(world.model), 1, 2, own=True)
    return make_world(folder, **sizes, metadata=keys, extra=extra)


def head_tensors(
    model: Mapping[str, np.ndarray], like: int, layer: int, seed: int = 0, own: bool = False
) -> dict[str, np.ndarray]:
    """A head behind a model's last layer, which is as one of the model's layers; norms are uneven."""
    rng = np.random.default_rng(seed + 1)
    vocab, d = model["token_embd.weight"].shape
    shapes: dict[str, tuple[int, ...]] = {
        name.split(".", 2)[2]: array.shape for name, array in model.items() if name.startswith(f"blk.{like}.")
    }
    shapes |= {f"nextn.{name}.weight": (d,) for name in ("enorm", "hnorm", "shared_head_norm")}
    shapes["nextn.eh_proj.weight"] = (d, 2 * d)
    if own:
        shapes |= {"nextn.embed_tokens.weight": (vocab, d), "nextn.shared_head_head.weight": (vocab, d)}
    return {f"blk.{layer}.{role}": _draw(rng, role, shape) for role, shape in shapes.items()}


def _draw(rng: np.random.Generator, role: str, shape: tuple[int, ...]) -> np.ndarray:
    values = rng.standard_normal(shape).astype(np.float32)
    if len(shape) > 1:
        return values * np.float32(1 if "embed_tokens" in role else shape[-1] ** -0.5)
    if role.endswith("ffn_gate_inp_shexp.weight"):
        return values * np.float32(shape[0] ** -0.5)
    return 0.3 * values + np.float32(not role.endswith("bias"))


def _keys(arch: str, blocks: int) -> dict[str, Any]:
    return {f"{arch}.block_count": blocks, f"{arch}.nextn_predict_layers": 1}
