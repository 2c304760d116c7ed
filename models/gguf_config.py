"""GGUF metadata -> ModelConfig. Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

import re
from dataclasses import replace
from typing import Any

from pshard.errors import UserError
from pshard.model_config import Experts, ModelConfig
from pshard.models.architectures import Architecture
from pshard.models.arrange_tensors import part_drafters
from pshard.models.build_units import TABLE
from pshard.models.families.by_layer import gguf_uneven, with_rows_beside
from pshard.models.families.layer_sorts import first_of, gguf_sorts, read_values
from pshard.models.families.read_numbers import CAPS, gguf_numbers
from pshard.models.gguf_rope import gguf_rope, leave_unread
from pshard.models.hybrid.many_streams import read_streams
from pshard.models.hybrid.read_delta import count_kv_heads, gguf_delta
from pshard.models.hybrid.short_convs import gguf_conv
from pshard.models.keys import EPSILONS, Keys, check_config
from pshard.models.latent.read_latent import gguf_latent
from pshard.models.read_experts import gguf_experts
from pshard.models.stored import ANOTHER, FETCH_AGAIN, StoredTensor

NORM = "blk.0.ffn_norm.weight"
_LAYER = re.compile(r"blk\.(\d{1,9})\.")
_EXPERTS_OF_MAVERICK = 128
_CLAMP = "attention.clamp_kqv"
# Keys that change the computation in ways pshard does not do, and the values that change nothing.
_HARMLESS = {
    _CLAMP: (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.causal": (True,),
    **dict.fromkeys(CAPS, (0.0,)),
    "rope.scaling.alpha": (0.0, 1.0),
}


def gguf_config(
    arch: Architecture, metadata: dict[str, Any], stored: dict[str, StoredTensor], where: str
) -> ModelConfig:
    """The model's numbers from metadata and the shape of the embedding. Raises UserError that names the key."""
    keys = Keys(leave_unread(arch, metadata), where, f"{arch.gguf}.")
    arch = arch.of_windows(keys.get("attention.sliding_window"))
    if not arch.routing:
        keys.refuse_unless("expert_count", 0)
    known = (*((_CLAMP,) if arch.clamped else ()), *(CAPS if arch.capped else CAPS[1:] if arch.by_layer else ()))
    for key, harmless in _HARMLESS.items():
        if key not in known:
            keys.refuse_unless(key, *harmless)
    if TABLE not in stored:
        raise UserError(f"{where}: tensor {TABLE} is missing: the file is incomplete; {FETCH_AGAIN}")
    _check_vocabulary(keys, metadata, stored[TABLE])
    d_model, n_heads = keys.integer("embedding_length"), _count_heads(arch, keys)
    latent = gguf_latent(keys) if arch.latent else None
    head_dim = latent.cell if latent else keys.length("attention.key_length", d_model // n_heads)
    if not (latent or arch.short_values) and keys.integer("attention.value_length", head_dim) != head_dim:
        raise UserError(f"{where}: keys and values of different lengths are not supported yet; {ANOTHER}")
    routing = arch.routing
    if routing and latent and any(name.endswith(".exp_probs_b.bias") for name in stored):  # as V3, which V2 has not
        silent = keys.get("expert_gating_func") in (None, 0)  # of what says that weights are normed, too
        routing = replace(routing, scores="sigmoid", normed=silent, choice_bias=True)
    experts = gguf_experts(routing, keys) if routing else None
    n_layers = keys.integer("block_count") - count_drafters(arch, metadata, where)
    arch = arch.of_layers(n_layers)
    window = _sliding_window(arch, keys)
    rope = gguf_rope(arch, keys, latent.rope if latent else head_dim, stored, window > 0)
    if window and not (arch.by_layer or arch.sorted):
        _check_window_heads(keys, head_dim, rope.dims)
    config = ModelConfig(
        architecture=arch.name,
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=_count_kv_heads(arch, keys, n_heads),
        head_dim=head_dim,
        d_ffn=0
        if arch.by_layer or arch.sorted or arch.uneven or (experts and experts.are_in(0))
        else keys.integer("feed_forward_length"),
        vocab=stored[TABLE].shape[0],
        norm_eps=keys.real(f"attention.layer_norm_{'' if arch.centred else 'rms_'}epsilon", span=EPSILONS),
        context=keys.integer("context_length"),
        rope=rope,
        qk_norm=_norms_heads(arch, experts, stored),
        sliding_window=window,
        experts=experts,
        latent=latent,
        gated=bool(arch.delta),
        delta=gguf_delta(arch, keys, n_layers) if arch.delta else None,
        conv=gguf_conv(keys, n_layers) if arch.conv else None,
        own_head_norms=arch.own_head_norms and "blk.0.attn_q_norm.weight" in stored,
        clamp=keys.factor(_CLAMP),
        **arch.declared | ({"parallel": True} if arch.may_be_parallel and NORM not in stored else {}),
    )
    if arch.turned_norms or (arch.bare_head_norms and config.qk_norm):
        config = config.normed_once_turned()
    if experts and experts.beside:
        config = with_rows_beside(arch, keys, config, keys.integer("feed_forward_length", experts.d_expert))
    config = gguf_uneven(keys, config) if arch.uneven else config
    config = read_streams(keys, config, stored) if arch.streamed else config
    config = gguf_numbers(arch, keys, read_values(arch, keys, config))
    return check_config(arch, gguf_sorts(arch, keys, config, stored) if arch.sorted else config, where)


def _count_heads(arch: Architecture, keys: Keys) -> int:
    found = keys.values.get(f"{keys.prefix}attention.head_count")
    if arch.uneven and isinstance(found, list):  # some layers may have none
        return next((n for n in found if type(n) is int and n > 0), 1)
    return first_of(keys, "attention.head_count") if arch.sorted else keys.integer("attention.head_count")


def _norms_heads(arch: Architecture, experts: Experts | None, stored: dict[str, StoredTensor]) -> bool:
    """Files do not say it of Llama 4: as llama.cpp has it, the number of experts does."""
    if arch.bare_head_norms:
        return experts is not None and experts.count != _EXPERTS_OF_MAVERICK
    return arch.qk_norm or (arch.optional_qk_norm and "blk.0.attn_q_norm.weight" in stored)


def _count_kv_heads(arch: Architecture, keys: Keys, n_heads: int) -> int:
    if arch.latent:
        return 1
    if arch.by_layer or arch.sorted or arch.uneven:  # see gguf_layers, gguf_uneven, gguf_sorts
        return n_heads
    return (
        count_kv_heads(keys, n_heads) if arch.delta or arch.conv else keys.integer("attention.head_count_kv", n_heads)
    )


def _sliding_window(arch: Architecture, keys: Keys) -> int:
    """Tokens of the window, 0 for none. An architecture that has one in some layers says how large it is."""
    has_one = arch.window_every > 1 or arch.full_every or keys.get("attention.sliding_window")
    return keys.integer("attention.sliding_window", arch.window_unsaid or None) if has_one else 0


def _check_window_heads(keys: Keys, head_dim: int, turned: int) -> None:
    """Raise UserError that names the key where layers with a window have other heads than those without."""
    for key, other in (("attention.key_length_swa", head_dim), ("attention.value_length_swa", head_dim),
                       ("rope.dimension_count_swa", turned)):  # fmt: skip
        keys.refuse_unless(key, other)


def count_drafters(arch: Architecture, metadata: dict[str, Any], where: str) -> int:
    """The last so many layers draft further tokens (multi-token prediction); the model runs without them."""
    keys = Keys(metadata, where, f"{arch.gguf}.")
    count = keys.integer("nextn_predict_layers", 0, least=0)
    if count >= keys.integer("block_count"):
        keys.refuse("nextn_predict_layers", f"is {count}, which leaves no layer of {keys.get('block_count')}")
    return count


def part_gguf_drafters(
    arch: Architecture, n_layers: int, metadata: dict[str, Any], stored: dict[str, StoredTensor], where: str
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """The tensors without those of layers that draft, and these. Raises UserError that names the
    key where layers that it counts do not draft, or follow all that `block_count` has."""
    count = count_drafters(arch, metadata, where)
    layers = range(n_layers, n_layers + count)
    left, drafting = part_drafters(stored, "blk.", layers)
    beyond = {int(found[1]) for name in left if (found := _LAYER.match(name))}
    if count and any(layer >= n_layers for layer in beyond):
        keys, key = Keys(metadata, where, f"{arch.gguf}."), "nextn_predict_layers"
        blocks = f"{keys.prefix}block_count of {keys.get('block_count')}"
        what = f"is {count}, but layer {min(n for n in beyond if n >= n_layers)} is none of those that draft"
        keys.refuse(key, f"{what} within a {blocks}: one of the two is wrong")
    return left, drafting


def _check_vocabulary(keys: Keys, metadata: dict[str, Any], table: StoredTensor) -> None:
    """The rows of the embedding are as many as the tokens; without a tokenizer, as many as `vocab_size` says."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if metadata.get("tokenizer.ggml.model", "none") != "none" and isinstance(tokens, list):
        count = len(tokens)
    else:
        count = keys.integer("vocab_size", table.shape[0])
    if table.shape[0] != count:
        table.fail(f"has {table.shape[0]} rows, but the vocabulary {count} tokens: the header is damaged", FETCH_AGAIN)
