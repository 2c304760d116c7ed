"""Vectors that units have and files of some families lack, or have otherwise: norms without weights, norms that follow
the rotation, norms of every head, numbers of an activation, slopes of ALiBi."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pshard.errors import UserError
from pshard.model_config import ModelConfig
from pshard.models.architectures import Architecture
from pshard.models.arrange_tensors import gather_numbered, stack_alike
from pshard.models.build_units import TABLE
from pshard.models.hybrid.made_tensors import give_numbers, make_numbers, read_numbers
from pshard.models.stored import ANOTHER, FETCH_AGAIN, StoredTensor

_BLOCK = re.compile(r"blk\.([0-9]+)\.")
_HEAD_NORM = re.compile(r"(.*\.self_attn\.[qk])_layernorm\.norms\.(0|[1-9]\d{0,5})\.weight")
_BENDS = ("alpha_p", "alpha_n", "beta", "eps")
_LARGEST = 1e4  # of numbers of an activation


def stack_head_norms(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors by Hugging Face name, the norms of a layer's heads as one matrix of a row each. Raises UserError for one
    that is missing or unlike the others."""
    found, stacks = gather_numbered(stored, _HEAD_NORM, "{}_norm.weight")
    for name, heads in stacks.items():
        if set(heads) != set(range(len(heads))) or name in found:
            first = next(iter(heads.values()))
            first.fail("has its like of other heads, but not of all: the files are incomplete", FETCH_AGAIN)
        found[name] = stack_alike(name, [heads[number] for number in sorted(heads)])
    return found


def make_vectors(
    arch: Architecture, config: ModelConfig, metadata: Mapping[str, Any], stored: dict[str, StoredTensor], where: str
) -> dict[str, StoredTensor]:
    """The tensors by GGUF name with what units have beside them. metadata: of a GGUF file. Raises UserError."""
    found = dict(stored)
    lender = next(iter(stored.values()))
    layers = _list_layers(stored, config.n_layers)
    if table := stored.get(TABLE):  # a damaged header may say billions: no vector becomes as long before a tensor is
        table.check_shape((config.vocab, config.d_model))
    if arch.unweighted:
        names = [f"blk.{i}.{role}_norm" for i in layers for role in ("attn", "ffn")]
        for name in (*names, "output_norm"):
            found.setdefault(f"{name}.weight", give_numbers(f"{name}.weight", (1.0,) * config.d_model, lender))
    for i in layers:
        block = f"blk.{i}."
        if config.own_head_norms or config.wide_qk_norm:
            _flatten(block, found)
        if arch.turned_norms:
            _turn(block, config, found)
        if arch.bare_head_norms and config.qk_norm and _has_heads(block, config, found) and not config.is_still(i):
            for part in "qk":
                name = f"{block}attn_{part}_norm.weight"
                found[name] = give_numbers(name, (1.0,) * config.head_dim, lender)
        if arch.routing and arch.routing.beside == "expert" and block + "ffn_gate_inp.weight" in found:
            norm = found.get(block + "ffn_norm.weight")  # of the expert that all share and of the router
            found |= {block + "ffn_norm_exps.weight": norm} if norm else {}
        if config.sloped and _has_heads(block, config, found):
            found[block + "attn_slopes.weight"] = give_numbers(
                block + "attn_slopes.weight", _slopes(config.n_heads), lender
            )
        if config.activation == "xielu":
            found[block + "ffn_act.weight"] = _bends(i, config, metadata, found, where)
    return found


def _has_heads(block: str, config: ModelConfig, found: Mapping[str, StoredTensor]) -> bool:
    """Whether the layer has queries, of as many heads as the configuration says. Without them units say what is
    missing. Raises UserError for others."""
    query = found.get(block + "attn_q.weight")
    if query:
        query.check_shape((config.n_heads * config.head_dim, config.d_model))
    return query is not None


def _list_layers(stored: Mapping[str, StoredTensor], most: int) -> list[int]:
    """The layers, at most so many, that have tensors: a file may say that it has billions."""
    numbers = {int(found[1]) for name in stored if (found := _BLOCK.match(name))}
    return sorted(i for i in numbers if i < most)


def _flatten(block: str, found: dict[str, StoredTensor]) -> None:
    """Norms in which every head has weights of its own are vectors of all heads' weights."""
    for part in "qk":
        if tensor := found.pop(f"{block}attn_{part}_norm.weight", None):
            shape = (int(np.prod(tensor.shape)),)
            found[f"{block}attn_{part}_norms.weight"] = replace(tensor, shape=shape)


def _turn(block: str, config: ModelConfig, found: dict[str, StoredTensor]) -> None:
    """Norms of heads that follow the rotation: rotating changes no length, so heads are normalised before it, without
    weights; as only products of queries and keys matter, both weights multiply the query afterwards."""
    q, k = (found.get(f"{block}attn_{part}_norm.weight") for part in "qk")
    if q is None or k is None:
        return  # units say which is missing
    for tensor in (q, k):
        tensor.check_shape((config.head_dim,))
    found[block + "attn_q_stretch.weight"] = replace(
        make_numbers(q, lambda own: own * read_numbers(k)), name=block + "attn_q_stretch.weight"
    )
    for part in "qk":
        name = f"{block}attn_{part}_norm.weight"
        found[name] = give_numbers(name, (1.0,) * config.head_dim, q)


def _slopes(heads: int) -> tuple[float, ...]:
    """Of ALiBi (arXiv 2108.12409): of a power of two of heads 2^(-8/heads), its square, and so on; the heads beyond one
    have every second slope of twice as many."""
    whole = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8 * (h + 1) / whole) for h in range(whole)]
    return (*first, *(2.0 ** (-4 * (2 * h + 1) / whole) for h in range(heads - whole)))


def _bends(
    layer: int, config: ModelConfig, metadata: Mapping[str, Any], found: dict[str, StoredTensor], where: str
) -> StoredTensor:
    """xIELU's four numbers of a layer as `Kernels.bend_rows` takes them; files hold the first two before softplus."""
    name, lender = f"blk.{layer}.ffn_act.weight", next(iter(found.values()))
    tensors = [found.pop(f"model.layers.{layer}.mlp.act_fn.{part}", None) for part in _BENDS]
    if all(tensors):
        raw = [float(read_numbers(replace(t, shape=(1,)))[0]) for t in tensors if t]
    else:
        raw = []
        for part in _BENDS:
            values = metadata.get(f"xielu.{part}")
            if not isinstance(values, list) or len(values) != config.n_layers:
                what = f"xielu.{part} is no list of {config.n_layers} numbers, one for each layer"
                raise UserError(f"{where}: {what}; {ANOTHER}")
            raw.append(values[layer])
    if not all(type(v) in (int, float) and abs(v) <= _LARGEST for v in raw):
        raise UserError(f"{where}: xielu of layer {layer} is {raw}, not numbers within {_LARGEST:g}; {ANOTHER}")
    above, below, slope, eps = raw
    return give_numbers(name, (_softplus(above), slope + _softplus(below), slope, eps), lender)


def _softplus(x: float) -> float:
    return float(np.logaddexp(0.0, x))
