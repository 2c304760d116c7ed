"""Models whose layers are of two sorts, with a window and without: Laguna, MiMo-V2-Flash and Step 3.5.

Files list which layer is of which sort. Each sort has its own number of heads and its own rotation. What heads give may
be gated, and any layer may lack experts. Keys of GGUF metadata are read as llama.cpp does (laguna.cpp, mimo2.cpp,
step35.cpp), those of config.json as transformers does (LagunaConfig, MiMoV2FlashConfig, Step3p7TextConfig).
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from pshard.model_config import Experts, ModelConfig, Rope
from pshard.models.architectures import Architecture
from pshard.models.families.hf_positions import hf_rope, of_kind
from pshard.models.hybrid.made_tensors import take_rows
from pshard.models.hybrid.read_delta import check_layers
from pshard.models.keys import BASES, FACTORS, Keys
from pshard.models.stored import StoredTensor
from pshard.units.attention import GATE, HEAD_GATE

_HEADS, _KV_HEADS = "attention.head_count", "attention.head_count_kv"
_PATTERN = "attention.sliding_window_pattern"
_FILE_GATE = "attn_gate.weight"  # as GGUF files call either
_FULL, _WINDOWED = "full_attention", "sliding_attention"
_PERIOD = 4  # of layers the first has full attention, where a laguna's GGUF file does not say
_VALUES, _VALUE_SCALE = "attention.value_length", "attention.value_scale"


def first_of(keys: Keys, key: str, default: int | None = None) -> int:
    """The number of the first layer, of a list with one for each. Raises UserError that names the key."""
    found = keys.values.get(keys.prefix + key)
    if not isinstance(found, list):
        return keys.integer(key, default)
    return Keys({key: found[0] if found else None}, keys.where).integer(key, default)


def gguf_sorts(arch: Architecture, keys: Keys, config: ModelConfig, stored: dict[str, StoredTensor]) -> ModelConfig:
    """The config with what metadata, and the tensors that there are, say of single layers. Raises UserError that names
    the key."""
    layers = config.n_layers
    check_layers(keys, layers)
    keys.refuse_unless("attention.key_length_swa", config.head_dim)
    keys.refuse_unless("attention.value_length_swa", config.value_dim or config.head_dim)
    windows = _list_windows(keys, layers) if arch.short_values or arch.limited else _gguf_windows(keys, config)
    heads = _list_numbers(keys, _HEADS, layers, config.n_heads)
    kv = _list_numbers(keys, _KV_HEADS, layers, config.n_heads)
    local = Rope(
        keys.integer("rope.dimension_count_swa", config.rope.dims),
        keys.real("rope.freq_base_swa", 1e4 if arch.short_values or arch.limited else config.rope.base, BASES),
        config.rope.pairing,
    )
    if arch.short_values:  # whose layers with a window are turned as the others, but by another base
        keys.refuse_unless("rope.dimension_count_swa", config.rope.dims)
        local = replace(local, freq_factors=config.rope.freq_factors)
    if arch.limited:  # half as much of heads of layers without a window is turned
        half = config.rope.dims // 2
        config = replace(
            config, rope=replace(config.rope, dims=half, freq_factors=config.rope.freq_factors[: half // 2])
        )
    config = _with_sorts(keys, _HEADS, config, windows, heads, kv, local)
    experts = _gguf_experts(arch, keys, config, stored)
    dense = 0 if all(experts.layers) else keys.integer("feed_forward_length")
    config = replace(config, experts=experts, d_ffn=dense)
    if arch.limited:
        config = _with_limits(keys, config, "swiglu_clamp_exp", "swiglu_clamp_shexp")
    if not arch.gated_heads:
        return config
    wide = [_is_wide(tensor, config, int(name.split(".")[1])) for name, tensor in _list_gates(stored, layers)]
    if arch.limited:  # by heads, where layers have one
        return replace(config, heads_gated=bool(wide))
    return replace(config, gated=any(wide), heads_gated=not all(wide) or not wide)


def _gguf_experts(arch: Architecture, keys: Keys, config: ModelConfig, stored: dict[str, StoredTensor]) -> Experts:
    """The experts, in those layers that have a router. Raises UserError for what llama.cpp leaves out."""
    layers, experts = config.n_layers, config.experts
    assert experts and arch.routing
    if arch.routing.shared or arch.limited:
        least = None if arch.routing.shared else 0
        experts = replace(experts, d_shared=keys.integer("expert_shared_feed_forward_length", least, least=0))
    if arch.short_values:
        keys.refuse_unless("expert_gating_func", 0, 2)
        keys.refuse_unless("expert_weights_scale", 0, 1)
    if arch.short_values or arch.limited:
        biased = any(f"blk.{i}.exp_probs_b.bias" in stored or f"blk.{i}.exp_probs_b" in stored for i in range(layers))
        experts = replace(experts, choice_bias=biased)
        parts = ("q", "k", "v", "qkv", "output") if arch.short_values else ("qkv", "output")
        for name in (f"blk.{i}.attn_{part}.bias" for i in range(layers) for part in parts):
            if name in stored:
                stored[name].fail("has no place in a GGUF file of this architecture, where llama.cpp leaves it out")
    return _place(keys, experts, [f"blk.{i}.ffn_gate_inp.weight" in stored for i in range(layers)])


def _with_limits(keys: Keys, config: ModelConfig, of_experts: str, of_ffns: str) -> ModelConfig:
    """With what gates of each layer's experts are at most, and those of its FFN or shared experts."""
    layers, found = config.n_layers, list[tuple[float, ...]]()
    for key in (of_experts, of_ffns):
        none = (0.0 if v is None else v for v in _list_values(keys, key, layers)[:layers])
        limits = tuple(float(v) if isinstance(v, int | float) else -1.0 for v in none)
        if not all(v == 0 or FACTORS[0] <= v <= FACTORS[1] for v in limits):
            keys.refuse(key, f"is no list of numbers from {FACTORS[0]:g} to {FACTORS[1]:g}, 0 for none")
        found.append(limits if any(limits) else ())
    assert config.experts
    return replace(config, experts=replace(config.experts, limits=found[0]), ffn_limits=found[1])


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


def _list_windows(keys: Keys, layers: int) -> tuple[bool, ...]:
    """Whether each layer has a window."""
    keys.integer("attention.sliding_window")
    values = _list_values(keys, _PATTERN, layers)
    if not all(value in (0, 1) for value in values):  # also true and false
        keys.refuse(_PATTERN, "does not say of each layer if it has a window")
    return tuple(map(bool, values[:layers]))


def read_values(arch: Architecture, keys: Keys, config: ModelConfig) -> ModelConfig:
    """With the length of values and what they are multiplied by, where a file says that these are others. Raises
    UserError that names the key."""
    if not arch.short_values:
        return config
    length, scale = (_VALUES, _VALUE_SCALE) if keys.prefix else ("v_head_dim", "attention_value_scale")
    value = keys.integer(length, config.head_dim)
    if value > config.head_dim:
        keys.refuse(length, f"is {value}, more than the {config.head_dim} numbers of a key, which is not supported")
    by = keys.factor(scale) if keys.prefix or keys.get(scale) is None else keys.real(scale)
    return replace(config, value_dim=value if value != config.head_dim or by else 0, value_scale=by or 1.0)


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
    if arch.short_values:
        config = read_values(arch, keys, _check_mimo(keys, config))
    windows = hf_windows(arch, keys, layers)
    heads = _list_numbers(keys, "num_attention_heads_per_layer", layers, config.n_heads)
    _, local = hf_ropes(arch, keys, config.head_dim, config.context)
    kv = [config.n_kv_heads * (2 if arch.short_values and seen else 1) for seen in windows]
    config = _with_sorts(keys, "num_attention_heads_per_layer", config, windows, heads, kv, local)
    kinds = keys.kinds("mlp_layer_types", "dense", "sparse") or ["dense", *["sparse"] * (layers - 1)]
    assert config.experts and arch.routing
    shared = keys.integer("shared_expert_intermediate_size") if arch.routing.shared else 0
    if arch.limited:
        keys.refuse_unless("use_bidirectional_attention", False)
        keys.refuse_unless("mlp_bias", False)
        shared = keys.integer("share_expert_dim")
        scale = keys.real("query_pre_attn_scalar", config.head_dim, FACTORS) ** -0.5
        config = _with_limits(keys, replace(config, score_scale=scale), "swiglu_limits", "swiglu_limits_shared")
    experts = config.experts
    assert experts
    experts = _place(keys, replace(experts, d_shared=shared), [kind == "sparse" for kind in kinds])
    dense = 0 if all(experts.layers) else keys.integer("intermediate_size")
    if not arch.gated_heads:
        return replace(config, experts=experts, d_ffn=dense)
    wide = keys.values.get("gating") == "per-element"
    return replace(config, experts=experts, d_ffn=dense, gated=wide, heads_gated=not wide)


def _check_mimo(keys: Keys, config: ModelConfig) -> ModelConfig:
    """The config with the window that a MiMo's folder means. Raises UserError for what publishers' folders say and
    transformers does not read, where it is not as transformers has it."""
    windows = [i > 0 and (i + 1) % 6 > 0 for i in range(config.n_layers)]
    heads, value = config.head_dim, keys.integer("v_head_dim")
    for key, known in (
        ("hybrid_layer_pattern", [int(seen) for seen in windows]),
        ("moe_layer_freq", [int(i > 0) for i in range(config.n_layers)]),
    ):
        if keys.values.get(key) not in (None, known):
            keys.refuse(key, "is another one than that of MiMo-V2-Flash, which is not supported")
    for key, other in (
        ("swa_num_attention_heads", config.n_heads),
        ("swa_num_key_value_heads", 2 * config.n_kv_heads),
        ("swa_head_dim", heads),
        ("swa_v_head_dim", value),
        ("add_swa_attention_sink_bias", True),
        ("add_full_attention_sink_bias", False),
    ):
        keys.refuse_unless(key, other)
    if keys.get("sliding_window_size") is None:
        return config
    return replace(config, sliding_window=keys.integer("sliding_window_size") + 1)


def hf_windows(arch: Architecture, keys: Keys, layers: int) -> tuple[bool, ...]:
    """Whether each layer has a window."""
    unsaid = [_WINDOWED if arch.short_values and i and (i + 1) % 6 else _FULL for i in range(layers)]
    kinds = keys.kinds("layer_types", _FULL, _WINDOWED) or unsaid
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
    turned = {kind: arch.rotated if found[kind].get("rope_type", "default") == "default" else 1.0 for kind in here}
    if lacking or not here:
        keys.refuse("rope_parameters", f"says nothing of layers with {' and '.join(sorted(lacking or {_FULL}))}")
    beside = {} if arch.limited else {"partial_rotary_factor": keys.values.get("partial_rotary_factor")}
    ropes = {
        kind: hf_rope({**beside, "rope_parameters": of_kind(found, kind)}, turned[kind], head_dim, context, keys.where)
        for kind in here
    }
    one = next(iter(ropes.values()))
    return ropes.get(_FULL, one), ropes.get(_WINDOWED, one)


def _list_values(keys: Keys, key: str, layers: int) -> list[Any]:
    """The value of each layer: of a list, which may go on for layers that draft, or one for all. Raises UserError for
    another number of values."""
    found = keys.values.get(keys.prefix + key)
    values = found if isinstance(found, list) else [found] * layers
    if len(values) not in (layers, keys.values.get(f"{keys.prefix}block_count")):
        keys.refuse(key, f"has {len(values)} values for {layers} layers")
    return values


def _list_numbers(keys: Keys, key: str, layers: int, default: int) -> tuple[int, ...]:
    """A number above 0 for each layer."""
    if not isinstance(keys.values.get(keys.prefix + key), list):
        return (keys.integer(key, default),) * layers
    found = _list_values(keys, key, layers)
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


def _list_gates(stored: dict[str, StoredTensor], layers: int) -> list[tuple[str, StoredTensor]]:
    names = (f"blk.{i}.{_FILE_GATE}" for i in range(layers))
    return [(name, stored[name]) for name in names if name in stored]


def _is_wide(gate: StoredTensor, config: ModelConfig, layer: int) -> bool:
    """Whether a gate has a number for each that a head gives, and not one for each head."""
    own = config.windowed if config.windows_in and config.windows_in[layer] else config
    return gate.shape[:1] == (own.n_heads * own.head_dim,)


def arrange_sorts(config: ModelConfig, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors by GGUF name as units have them: gates of heads and of single numbers apart, and q, k and v."""
    found: dict[str, Any] = dict(stored)
    for i in range(config.n_layers):
        for part in ("weight", "bias"):
            if fused := found.pop(f"blk.{i}.attn_qkv.{part}", None):
                found |= _split_heads(config, i, part, fused)
        name = f"blk.{i}.{_FILE_GATE}"
        if gate := found.pop(name, None):
            role = GATE if _is_wide(gate, config, i) else HEAD_GATE
            found[f"blk.{i}.{role}"] = gate
    return found


def _split_heads(config: ModelConfig, layer: int, part: str, fused: StoredTensor) -> dict[str, StoredTensor]:
    own = config.windowed if config.windows_in and config.windows_in[layer] else config
    value = own.value_dim or own.head_dim
    rows = own.n_heads * own.head_dim, own.n_kv_heads * own.head_dim, own.n_kv_heads * value
    fused.check_shape((sum(rows), *fused.shape[1:]))
    fused.check_type()
    ends = [sum(rows[:n]) for n in range(4)]
    names = (f"blk.{layer}.attn_{which}.{part}" for which in "qkv")
    return {name: take_rows(fused.name, fused, [span]) for name, span in zip(names, pairwise(ends))}


def rename_choice(name: str) -> str:
    """A tensor's name in a folder, as most folders have it: Laguna and Step 3.5 call the bias of a choice among experts
    otherwise, and MiMo its sinks."""
    name = name.replace(".self_attn.attention_sink_bias", ".self_attn.sinks")
    name = name.replace(".moe.router_bias", ".mlp.gate.e_score_correction_bias")
    return name.replace(".mlp.experts.e_score_correction", ".mlp.gate.e_score_correction")
