"""Short convolutions of LFM2: what files say of them, and their tensors as units have them.

Keys of GGUF metadata as llama.cpp reads them (lfm2.cpp), those of config.json as Lfm2Config has them.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pshard.model_config import ModelConfig, ShortConv
from pshard.models.hybrid.made_tensors import take_rows
from pshard.models.hybrid.read_delta import check_layers, list_full, name_recurrent
from pshard.models.keys import Keys
from pshard.models.stored import StoredTensor
from pshard.units.short_conv import PARTS, PIECE, TAPS

_NAME = re.compile(r"(blk\.\d+\.)shortconv\.(conv|in_proj|out_proj)\.weight")
_EXPERTS = re.compile(r"(.*\.feed_forward\.experts\.)(w[123])(\.weight)")
_FINAL_NORM = "token_embd_norm.weight"  # so files call it
_MOST_TAPS = 16
_FFN = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def gguf_conv(keys: Keys, n_layers: int) -> ShortConv:
    """From metadata with the architecture's prefix: layers without KV heads. Raises UserError that names the key."""
    check_layers(keys, n_layers)
    key, recurrent = name_recurrent(keys)
    full = list_full(keys, n_layers, key, [False] * n_layers if recurrent is None else recurrent)
    conv = ShortConv(_taps(keys, "shortconv.l_cache"), full, keys.integer("embedding_length"))
    return _check(keys, "embedding_length", conv)


def hf_conv(keys: Keys, n_layers: int) -> ShortConv:
    """From config.json. Raises UserError that names the key."""
    check_layers(keys, n_layers)
    for key, known in (("conv_bias", False), ("tie_embedding", True)):
        keys.refuse_unless(key, known)
    kinds, full = keys.kinds("layer_types", "conv", "full_attention"), keys.values.get("full_attn_idxs")
    if kinds is not None:
        recurrent = [kind == "conv" for kind in kinds]
    elif full is None:
        keys.refuse("layer_types", "is missing, so what each layer is")
    elif not isinstance(full, list) or not all(type(i) is int and 0 <= i < n_layers for i in full):
        keys.refuse("full_attn_idxs", f"is no list of layers of {n_layers}")
    else:
        recurrent = [i not in full for i in range(n_layers)]
    layers = list_full(keys, n_layers, "layer_types", recurrent)
    return _check(keys, "hidden_size", ShortConv(_taps(keys, "conv_L_cache"), layers, keys.integer("hidden_size")))


def adjust_rows(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The settings with rows of an FFN as the model's class makes them of what it is told."""
    keys = Keys(config, where)
    rows = keys.integer("block_ff_dim" if config.get("block_ff_dim") else "intermediate_size")
    if keys.flag("block_auto_adjust_ff_dim", False):
        rows, each = int(2 * rows / 3), keys.integer("block_multiple_of", 256)
        if keys.get("block_ffn_dim_multiplier") is not None:
            rows = int(keys.real("block_ffn_dim_multiplier") * rows)
            rows = -(-rows // each) * each
    return {**config, "intermediate_size": rows}


def _taps(keys: Keys, key: str) -> int:
    taps = keys.integer(key, 3)
    if not 2 <= taps <= _MOST_TAPS:
        keys.refuse(key, f"is {taps}, where convolutions see 2 to {_MOST_TAPS} inputs")
    return taps


def _check(keys: Keys, key: str, conv: ShortConv) -> ShortConv:
    if conv.channels % PIECE:
        keys.refuse(key, f"is {conv.channels}, and short convolutions have a multiple of {PIECE} channels")
    return conv


def rename_experts(name: str) -> str:
    """A folder's name for matrices of experts, as others call them."""
    found = _EXPERTS.fullmatch(name)
    return f"{found[1]}{_FFN[found[2]]}{found[3]}".replace("feed_forward", "mlp") if found else name


def split_convs(config: ModelConfig, conv: ShortConv, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors by GGUF name, fused ones apart. Raises UserError for another shape than the configuration says."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        match = _NAME.fullmatch(name)
        parts = dict(_parts(config, conv, match[1], match[2], tensor)) if match else {name: tensor}
        found |= {("output_norm.weight" if part == _FINAL_NORM else part): t for part, t in parts.items()}
    return found


def _parts(
    config: ModelConfig, conv: ShortConv, block: str, what: str, tensor: StoredTensor
) -> Iterator[tuple[str, StoredTensor]]:
    n = conv.channels
    tensor.check_type()
    if what == "out_proj":
        yield block + "conv_out.weight", tensor
    elif what == "in_proj":
        tensor.check_shape((3 * n, config.d_model))
        for i, role in enumerate(PARTS):
            yield block + role, take_rows(block + role, tensor, [(n * i, n * (i + 1))])
    else:  # [channels, 1, taps] as checkpoints have it
        tensor.check_shape((n, 1, conv.taps) if len(tensor.shape) == 3 else (n, conv.taps))
        yield block + TAPS, replace(tensor, shape=(n * conv.taps,))
