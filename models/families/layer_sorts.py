"""Models whose layers are of two sorts, as files list them: layers with a window have heads of their own number, and
turn another share of each by other angles. What each head gives may be gated; layers without experts may be anywhere.

Keys of GGUF metadata as llama.cpp reads them (laguna.cpp), those of config.json as LagunaConfig has them.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pshard.model_config import Experts, ModelConfig, Rope
from pshard.models.architectures import Architecture
from pshard.models.families.hf_positions import hf_rope
from pshard.models.hybrid.read_delta import check_layers
from pshard.models.keys import BASES, Keys
from pshard.models.stored import StoredTensor
from pshard.units.attention import GATE, HEAD_GATE

_HEADS, _KV_HEADS = "attention.head_count", "attention.head_count_kv"
_PATTERN = "attention.sliding_window_pattern"
_FILE_GATE = "attn_gate.weight"  # as GGUF files call either
_FULL, _WINDOWED = "full_attention", "sliding_attention"
_PERIOD = 4  # of layers the first has full attention, where a laguna's GGUF file does not say


def first_of(keys: Keys, key: str, default: int | None = None) -> int:
    """The number of the first layer, of a list with one for each. Raises UserError that names the key."""
    found = keys.values.get(keys.prefix + key)
    if not isinstance(found, list):
        return keys.integer(key, default)
    return Keys({key: found[0] if found else None}, keys.where).integer(key, default)


def gguf_sorts(keys: Keys, config: ModelConfig, stored: dict[str, StoredTensor]) -> ModelConfig:
    """The config with what metadata, and the tensors that there are, say of single layers. Raises UserError that names
    the key."""
    layers = config.n_layers
    check_layers(keys, layers)
    for key in ("attention.key_length_swa", "attention.value_length_swa"):
        keys.refuse_unless(key, config.head_dim)
    windows = _gguf_windows(keys, config)
    heads = _list_numbers(keys, _HEADS, layers, config.n_heads)
    kv = _list_numbers(keys, _KV_HEADS, layers, config.n_heads)
    local = Rope(
        keys.integer("rope.dimension_count_swa", config.rope.dims),
        keys.real("rope.freq_base_swa", config.rope.base, BASES),
        config.rope.pairing,
    )
    config = _with_sorts(keys, _HEADS, config, windows, heads, kv, local)
    experts = config.experts
    assert experts
    shared = keys.integer("expert_shared_feed_forward_length")
    experts = _place(keys, replace(experts, d_shared=shared), _find_routed(stored, layers))
    dense = 0 if all(experts.layers) else keys.integer("feed_forward_length")
    wide = [_is_wide(tensor, config, int(name.split(".")[1])) for name, tensor in _list_gates(stored, layers)]
    return replace(config, experts=experts, d_ffn=dense, gated=any(wide), heads_gated=not all(wide) or not wide)


def _gguf_windows(keys: Keys, config: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer has a window: one of several has full attention, the first first. llama.cpp takes four for
    lists, so others are refused."""
    layers, found = config.n_layers, keys.values.get(keys.prefix + _PATTERN)
    if not config.sliding_window:
        return (False,) * layers
    if isinstance(found, list):
        windows = tuple(i % _PERIOD != 0 for i in range(layers))
        if [bool(seen) for seen in found[:layers]] != list(windows):
            keys.refuse(_PATTERN, f"is a list of others than all but the first of each {_PERIOD}")
        return windows
    period = keys.integer(_PATTERN, _PERIOD)
    return tuple(i % period != 0 for i in range(layers))


def hf_sorts(arch: Architecture, keys: Keys, config: ModelConfig) -> ModelConfig:
    """The config with what config.json says of single layers. Raises UserError that names the key."""
    layers = config.n_layers
    check_layers(keys, layers)
    for key, known in (
        ("moe_apply_router_weight_on_input", (False,)),
        ("moe_router_logit_softcapping", (0,)),
        ("gating", (True, "per-head", "per-element")),
        ("gating_types", ()),
        ("norm_topk_prob", (True,)),
    ):
        keys.refuse_unless(key, *known)
    windows = hf_windows(keys, layers)
    heads = _list_numbers(keys, "num_attention_heads_per_layer", layers, config.n_heads)
    _, local = hf_ropes(arch, keys, config.head_dim, config.context)
    kv = (config.n_kv_heads,) * layers
    config = _with_sorts(keys, "num_attention_heads_per_layer", config, windows, heads, kv, local)
    kinds = keys.kinds("mlp_layer_types", "dense", "sparse") or ["dense", *["sparse"] * (layers - 1)]
    assert config.experts
    shared = keys.integer("shared_expert_intermediate_size")
    experts = _place(keys, replace(config.experts, d_shared=shared), [kind == "sparse" for kind in kinds])
    dense = 0 if all(experts.layers) else keys.integer("intermediate_size")
    wide = keys.values.get("gating") == "per-element"
    return replace(config, experts=experts, d_ffn=dense, gated=wide, heads_gated=not wide)


def hf_windows(keys: Keys, layers: int) -> tuple[bool, ...]:
    """Whether each layer has a window."""
    kinds = keys.kinds("layer_types", _FULL, _WINDOWED) or [_FULL] * layers
    if len(kinds) != layers:
        keys.refuse("layer_types", f"does not say of each of {layers} layers if it has sliding or full attention")
    return tuple(kind == _WINDOWED for kind in kinds)


def hf_ropes(arch: Architecture, keys: Keys, head_dim: int, context: int) -> tuple[Rope, Rope]:
    """How heads of layers with full attention are turned, and those of layers with a window: each as the other where a
    folder has no layers of it. Raises UserError that names the key."""
    given = keys.values.get("rope_parameters")
    found = given if isinstance(given, dict) else {}
    here = {kind for kind in (_FULL, _WINDOWED) if isinstance(found.get(kind), dict)}
    lacking = set(keys.kinds("layer_types", _FULL, _WINDOWED) or [_FULL]) - here
    if lacking or not here:
        keys.refuse("rope_parameters", f"says nothing of layers with {' and '.join(sorted(lacking or {_FULL}))}")
    ropes = {
        kind: hf_rope({"rope_parameters": found[kind]}, arch.rotated, head_dim, context, keys.where) for kind in here
    }
    one = next(iter(ropes.values()))
    return ropes.get(_FULL, one), ropes.get(_WINDOWED, one)


def _list_numbers(keys: Keys, key: str, layers: int, default: int) -> tuple[int, ...]:
    """A number above 0 for each layer: of a list, which may also have those of layers that draft, or one for all."""
    found = keys.values.get(keys.prefix + key)
    if not isinstance(found, list):
        return (keys.integer(key, default),) * layers
    total = keys.values.get(f"{keys.prefix}block_count", layers) if keys.prefix else layers
    if len(found) not in (layers, total):
        keys.refuse(key, f"has {len(found)} values for {layers} layers")
    if not all(type(n) is int and n > 0 for n in found):
        keys.refuse(key, "is no list of whole numbers above 0")
    return tuple(found[:layers])


def _with_sorts(
    keys: Keys, key: str, config: ModelConfig, windows: tuple[bool, ...], heads: Iterable[int], kv: Iterable[int],
    local: Rope,
) -> ModelConfig:  # fmt: skip
    """With heads of layers with a window and of the others, which must be alike among themselves; of a sort that there
    is not, as of the other one."""
    sorts: dict[bool, set[tuple[int, int]]] = {}
    for sort, *own in zip(windows, heads, kv):
        sorts.setdefault(sort, set()).add((own[0], own[1]))
    for found in sorts.values():
        if len(found) > 1:
            keys.refuse(key, "differs among layers with a window, or among those without one, which is not supported")
    full, own_window = (next(iter(sorts.get(sort) or sorts[not sort])) for sort in (False, True))
    for q, k in (full, own_window):
        if q % k:
            keys.refuse(key, f"has {q} query heads, not a multiple of {k} KV heads")
    config = replace(config, n_heads=full[0], n_kv_heads=full[1])
    if not any(windows):
        return replace(config, sliding_window=0)
    if local.dims % 2 or local.dims > config.head_dim:
        keys.refuse(key, f"belongs to heads of {config.head_dim}, of which {local.dims} numbers cannot be turned")
    local = replace(local, pairing=config.rope.pairing)
    return replace(
        config, windows_in=windows, window_heads=own_window[0], window_kv_heads=own_window[1], window_rope=local
    )


def _place(keys: Keys, experts: Experts, layers: Iterable[bool]) -> Experts:
    """With experts in these layers. Raises UserError where there are none, or too few are said."""
    found = tuple(layers)
    total = keys.values.get("num_hidden_layers", len(found))
    if not any(found) or len(found) != total:
        keys.refuse("mlp_layer_types", "leaves no layer with experts, or does not say of each what it has")
    return replace(experts, layers=found, dense_layers=found.index(True), every=1)


def _find_routed(stored: dict[str, StoredTensor], layers: int) -> list[bool]:
    return [f"blk.{i}.ffn_gate_inp.weight" in stored for i in range(layers)]


def _list_gates(stored: dict[str, StoredTensor], layers: int) -> list[tuple[str, StoredTensor]]:
    names = (f"blk.{i}.{_FILE_GATE}" for i in range(layers))
    return [(name, stored[name]) for name in names if name in stored]


def _is_wide(gate: StoredTensor, config: ModelConfig, layer: int) -> bool:
    """Whether a gate has a number for each that a head gives, and not one for each head."""
    own = config.windowed if config.windows_in and config.windows_in[layer] else config
    return gate.shape[:1] == (own.n_heads * own.head_dim,)


def arrange_sorts(config: ModelConfig, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors by GGUF name as units have them: gates of heads and of single numbers apart."""
    found: dict[str, Any] = dict(stored)
    for i in range(config.n_layers):
        name = f"blk.{i}.{_FILE_GATE}"
        if gate := found.pop(name, None):
            role = GATE if _is_wide(gate, config, i) else HEAD_GATE
            found[f"blk.{i}.{role}"] = gate
    return found


def rename_choice(name: str) -> str:
    """By the name that other folders have for it, the bias of a choice among experts that a laguna's has there."""
    return name.replace(".mlp.experts.e_score_correction", ".mlp.gate.e_score_correction")
