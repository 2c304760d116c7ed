"""Tensors of hybrids as units want them, whatever way a file stores them: each of one kind of rows.

Queries and keys are cut over ranks otherwise than values, and what gates attention otherwise than its queries' rotation
reads them: so fused matrices come apart here, by whole rows.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from pshard.model_config import Delta, ModelConfig
from pshard.models.architectures import Architecture
from pshard.models.arrange_tensors import DRAFTS_LEFT_OUT
from pshard.models.hybrid.made_tensors import make_numbers, take_rows
from pshard.models.hybrid.short_convs import split_convs
from pshard.models.stored import StoredTensor

_NAME = re.compile(r"(blk\.(\d+)\.)(.+)")
_HF_DELTA = re.compile(r"model\.layers\.(\d+)\.linear_attn\.(.+)")
_DRAFTS = "mtp."
_HF_NAMES = {
    "in_proj_qkvz.weight": "ssm_in.weight",
    "in_proj_ba.weight": "ssm_ba.weight",
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}


def name_folder(arch: Architecture, stored: dict[str, StoredTensor]) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """A folder's tensors by the names of a text model, those of a delta net by GGUF's, with GGUF's numbers; and notes
    on what is left out."""
    if not arch.delta:
        return stored, ()
    named = {}
    for key, tensor in stored.items():
        if not key.startswith(_DRAFTS):
            inner = _HF_DELTA.fullmatch(key)
            if inner and inner[2] in _HF_NAMES:
                key = f"blk.{inner[1]}.{_HF_NAMES[inner[2]]}"
            named[key] = _as_gguf(key, tensor)
    return named, _note_drafts(stored)


def name_gguf(arch: Architecture, stored: dict[str, StoredTensor]) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """A GGUF file's tensors by the names of llama.cpp's converter, where Ollama's has others; and notes on what is left
    out. Raises UserError for one that is there under two names."""
    if not arch.delta:
        return stored, ()
    named: dict[str, StoredTensor] = {}
    for key, tensor in stored.items():
        if not key.startswith(_DRAFTS):
            key = f"{key}.bias" if key.endswith(".ssm_dt") else key
            if key in named:
                tensor.fail("is there twice, under different names")
            named[key] = tensor
    return named, _note_drafts(stored)


def _note_drafts(stored: dict[str, StoredTensor]) -> tuple[str, ...]:
    return (DRAFTS_LEFT_OUT,) if any(key.startswith(_DRAFTS) for key in stored) else ()


def _as_gguf(key: str, tensor: StoredTensor) -> StoredTensor:
    """Norms of these models hold what is added to one, but those within a delta net; and the decay is a logarithm."""
    if key.endswith(".ssm_a"):
        return make_numbers(tensor, lambda logs: -np.exp(logs))
    if key.endswith("norm.weight") and not key.endswith(".ssm_norm.weight"):
        return make_numbers(tensor, lambda less: less + 1)
    return tensor


def split_hybrid(config: ModelConfig, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors by GGUF name, fused ones apart. Raises UserError for one of another shape than the configuration says."""
    if config.conv:
        return split_convs(config, config.conv, stored)
    if config.delta is None:
        return stored
    arranged: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        found = _NAME.fullmatch(name)
        parts = {name: tensor}
        if found and int(found[2]) in config.delta.full:
            parts = dict(_split_attention(config, found[1], found[3], tensor)) or parts
        elif found:
            parts = dict(_split_delta(config.delta, config.d_model, found[1], found[3], tensor)) or parts
        for part in parts.values():
            if part.name in arranged:
                tensor.fail("is there twice, under different names")
        arranged |= parts
    return arranged


def _split_attention(
    config: ModelConfig, block: str, role: str, tensor: StoredTensor
) -> Iterator[tuple[str, StoredTensor]]:
    """Of each head the rows of its query, then those of its gate."""
    if role != "attn_q.weight":
        return
    d, heads = config.head_dim, range(config.n_heads)
    tensor.check_shape((2 * config.n_heads * d, config.d_model))
    tensor.check_type()
    for what, first in (("attn_q.weight", 0), ("attn_q_gate.weight", d)):
        yield block + what, take_rows(block + what, tensor, [(2 * d * h + first, 2 * d * h + first + d) for h in heads])


def _split_delta(
    delta: Delta, d_model: int, block: str, role: str, tensor: StoredTensor
) -> Iterator[tuple[str, StoredTensor]]:
    keys, values = 2 * delta.key_heads * delta.head, delta.value_heads * delta.head
    if role == "attn_qkv.weight":
        tensor.check_shape((keys + values, d_model))
        spans = {"delta_qk.weight": [(0, keys)], "delta_v.weight": [(keys, keys + values)]}
    elif role == "ssm_conv1d.weight":
        yield from _split_convolution(keys, values, block, tensor)
        return
    elif role == "ssm_in.weight":
        tensor.check_shape((keys + 2 * values, d_model))
        q, k, v, z = _spans_by_key_head(delta, (1, 1, delta.group, delta.group), delta.head)
        spans = {"delta_qk.weight": q + k, "delta_v.weight": v, "attn_gate.weight": z}
    elif role == "ssm_ba.weight":
        tensor.check_shape((2 * delta.value_heads, d_model))
        b, a = _spans_by_key_head(delta, (delta.group, delta.group), 1)
        spans = {"ssm_beta.weight": b, "ssm_alpha.weight": a}
    else:
        return
    tensor.check_type()
    for what, rows in spans.items():
        yield block + what, take_rows(block + what, tensor, rows)


def _spans_by_key_head(delta: Delta, counts: tuple[int, ...], width: int) -> list[list[tuple[int, int]]]:
    """Where each of several things lies in a matrix that has them by key head, so many times `width` rows of each."""
    ends = [width * sum(counts[:i]) for i in range(len(counts) + 1)]
    heads = range(delta.key_heads)
    return [[(ends[-1] * h + start, ends[-1] * h + stop) for h in heads] for start, stop in pairwise(ends)]


def _split_convolution(keys: int, values: int, block: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """[channels, 4], or [channels, 1, 4] as checkpoints have it, as vectors."""
    shape = (keys + values, 4)
    if len(tensor.shape) == 3:
        tensor.check_shape((shape[0], 1, shape[1]))
    else:
        tensor.check_shape(shape)
    tensor.check_type()
    flat = replace(tensor, shape=shape)
    for what, span in (("delta_conv_qk.weight", (0, keys)), ("delta_conv_v.weight", (keys, keys + values))):
        part = take_rows(block + what, flat, [span])
        yield block + what, replace(part, shape=(4 * part.shape[0],))
