"""Tensors that some families store otherwise than units want them: fused ones, and norms whose weights are less 1."""

import re
from collections.abc import Iterator

from pshard.model_config import ModelConfig
from pshard.models.architectures import Architecture
from pshard.models.hybrid.made_tensors import make_numbers, take_rows
from pshard.models.stored import StoredTensor

_FUSED_HEADS = re.compile(r"(blk\.\d+\.)attn_qkv\.(weight|bias)")
_FUSED_GATE = re.compile(r"(blk\.\d+\.)ffn_up\.weight")


def add_one_to_norms(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors by GGUF name, with norms' weights as they are multiplied by. Raises UserError."""
    found = dict(stored)
    for name, tensor in stored.items():
        if name.endswith("norm.weight"):
            tensor.check_type()
            if len(tensor.shape) != 1 or tensor.qtype not in ("F32", "F16", "BF16"):
                tensor.fail(f"is {tensor.qtype} of shape {list(tensor.shape)}, not a vector of F32, F16 or BF16")
            found[name] = make_numbers(tensor, lambda less: less + 1)
    return found


def split_fused(arch: Architecture, config: ModelConfig, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors by GGUF name, with q, k and v apart, and gate and up: rows of one that has the one first.

    Raises UserError for one that has other rows than these have together.
    """
    if not arch.fused:
        return stored
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        parts = dict(_parts(config, name, tensor)) or {name: tensor}
        if not found.keys().isdisjoint(parts):
            tensor.fail("is there twice, under different names")
        found |= parts
    return found


def _parts(config: ModelConfig, name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    heads, gate = _FUSED_HEADS.fullmatch(name), _FUSED_GATE.fullmatch(name)
    if heads:
        q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        rows: tuple[int, ...] = (q, kv, kv)
        names = [f"{heads[1]}attn_{part}.{heads[2]}" for part in "qkv"]
    elif gate and tensor.shape[:1] == (2 * config.d_ffn,):
        rows, names = (config.d_ffn, config.d_ffn), [f"{gate[1]}ffn_{part}.weight" for part in ("gate", "up")]
    else:
        return
    tensor.check_shape((sum(rows), *tensor.shape[1:]))
    tensor.check_type()
    if len(tensor.shape) > 1:
        tensor.check_blocks()
    at = 0
    for part, count in zip(names, rows):
        yield part, take_rows(tensor.name, tensor, [(at, at + count)])
        at += count
