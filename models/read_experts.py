"""What files say about routed experts -> Experts: keys of GGUF metadata, and of config.json."""

from dataclasses import replace

from pshard.errors import UserError
from pshard.model_config import Chunks, Experts
from pshard.models.architectures import Routing
from pshard.models.hybrid.read_delta import check_layers
from pshard.models.keys import FACTORS, Keys
from pshard.models.stored import ANOTHER

_SCORES = {1: "softmax", 2: "sigmoid", 3: "chosen"}  # llama.cpp's numbers of gating functions; 0: as the architecture
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # transformers 5 writes others
_USED = ("top_k_experts", "num_experts_per_tok", "moe_k", "moe_topk")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SCALES = ("routed_scaling_factor", "router_scaling_factor", "moe_routed_scaling_factor", "moe_router_scaling_factor")
_STEPS = ("moe_layer_interval", "interleave_moe_layer_step")
_LEADS = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")


def gguf_experts(routing: Routing, keys: Keys) -> Experts:
    """From metadata with the architecture's prefix. Raises UserError that names the key."""
    count, used = keys.integer("expert_count"), keys.integer("expert_used_count")
    d_expert = _expert_rows(routing, keys, used)
    gating = keys.integer("expert_gating_func", 0, least=0)
    if gating and gating not in _SCORES:
        keys.refuse("expert_gating_func", f"is {gating!r}, which is not supported yet")
    experts = Experts(
        count,
        used,
        d_expert,
        scores=_SCORES.get(gating, routing.scores),
        normed=routing.normed if routing.norm_fixed else keys.flag("expert_weights_norm", routing.normed),
        scale=1.0 if keys.get("expert_weights_scale") == 0 else keys.real("expert_weights_scale", 1.0, FACTORS),
        choice_bias=routing.choice_bias,
        activation=routing.activation,
        biases=routing.biases,
        groups=keys.integer("expert_group_count", 1),
        groups_used=keys.integer("expert_group_used_count", 1),
        d_shared=_shared_rows(routing, keys, d_expert),
        shared_gate=routing.shared_gate,
        dense_layers=keys.integer("leading_dense_block_count", 0, least=0),
        early=routing.early,
        beside=bool(routing.beside),
        weighs_inputs=routing.weighs_inputs,
        every=keys.integer("interleave_moe_layer_step", 1),
        chunks=_read_chunks(keys, count) if routing.chunked else None,
    )
    _refuse_unread(routing, keys)
    if routing.weighs_inputs:
        keys.refuse_unless("expert_weights_scale", 0.0, 1.0)
        keys.refuse_unless("expert_gating_func", 0, 2)
        keys.refuse_unless("expert_used_count", 1)
        keys.refuse_unless("expert_group_count", 0, 1)
    return check_experts(experts, keys.where)


def _refuse_unread(routing: Routing, keys: Keys) -> None:
    """Raise UserError that names a key which llama.cpp does not read in this architecture and which says otherwise."""
    if "scores" in routing.fixed:
        plain = routing.scores == "softmax" and routing.normed and not routing.choice_bias
        alike = (1, 3) if plain or routing.scores == "chosen" else ()  # normed, a softmax is that over the chosen
        keys.refuse_unless(
            "expert_gating_func", 0, *(n for n, name in _SCORES.items() if name == routing.scores), *alike
        )
    if "norm" in routing.fixed:
        keys.refuse_unless("expert_weights_norm", routing.normed)
    if "scale" in routing.fixed:
        keys.refuse_unless("expert_weights_scale", 0.0, 1.0)


def _read_chunks(keys: Keys, count: int) -> Chunks:
    """Of a grovemoe file. Raises UserError that names the key."""
    keys.refuse_unless("expert_gating_func", 0, 1)
    keys.refuse_unless("expert_group_count", 1, 0)
    each = keys.integer("experts_per_group")
    if count % each:
        keys.refuse("experts_per_group", f"is {each}, which does not divide {count} experts")
    rows = keys.integer("expert_chunk_feed_forward_length", 0, least=0) or keys.integer("attention.key_length")
    return Chunks(each, rows, keys.real("expert_group_scale", None, FACTORS))


def _expert_rows(routing: Routing, keys: Keys, used: int) -> int:
    """A Mixtral's experts have the rows that a llama's FFN has; others share them out among those that a token takes,
    unless the key says how many: as llama.cpp reads them."""
    if keys.get("expert_feed_forward_length"):
        return keys.integer("expert_feed_forward_length")
    rows = keys.integer("feed_forward_length")
    return rows if routing.sizes_as_dense else rows // used


def _shared_rows(routing: Routing, keys: Keys, d_expert: int) -> int:
    if not routing.shared:
        keys.refuse_unless("expert_shared_count", 0, int(routing.beside == "expert"))
        return 0
    count, length = "expert_shared_count", "expert_shared_feed_forward_length"  # ERNIE's files may have a wrong length
    if routing.shared_sized and keys.get(length):
        return keys.integer(length)
    if not routing.shared_gate and (keys.get(count) is not None or not keys.get(length)):
        return keys.integer(count, routing.shared_unsaid, least=0) * d_expert
    if keys.get(length):
        return keys.integer(length)
    return keys.integer("feed_forward_length")


def hf_experts(routing: Routing, keys: Keys) -> Experts:
    """From config.json. Raises UserError that names the key."""
    keys.refuse_unless("scoring_func", routing.scores)
    if routing.weighs_inputs:
        keys.refuse_unless("num_experts_per_tok", 1)
    keys.refuse_unless("moe_layer_end_index", -1, keys.integer("num_hidden_layers") - 1)
    if routing.shared and routing.scores == "softmax" and not (routing.normed or routing.shared_gate):
        # DeepSeek-V2: its own code then leaves the scale out, that of transformers the norm
        keys.refuse_unless("norm_topk_prob", False)
    d_expert = keys.integer("intermediate_size" if routing.sizes_as_dense else "moe_intermediate_size")
    d_shared = 0
    if routing.shared_gate:
        d_shared = keys.integer("shared_expert_intermediate_size")
    elif routing.shared:
        d_shared = keys.integer(_name(keys, _SHARED), 0, least=0) * d_expert
    experts = Experts(
        keys.integer(_name(keys, _COUNTS)),
        keys.integer(_name(keys, _USED)),
        d_expert,
        scores=routing.scores,
        normed=routing.normed
        if routing.norm_fixed and not routing.norm_told
        else keys.flag("norm_topk_prob", True if routing.sizes_as_dense else None),
        scale=keys.real(_name(keys, _SCALES), 1.0, FACTORS),
        choice_bias=routing.choice_bias and keys.flag("use_expert_bias", True),
        activation=routing.activation,
        biases=routing.biases,
        groups=1 if keys.get("topk_method") == "greedy" else keys.integer("n_group", 1),
        groups_used=1 if keys.get("topk_method") == "greedy" else keys.integer("topk_group", 1),
        d_shared=d_shared,
        shared_gate=routing.shared_gate,
        beside=bool(routing.beside),
        weighs_inputs=routing.weighs_inputs,
        every=_layer_step(keys),
    )
    return check_experts(experts if routing.listed else _place(keys, experts), keys.where)


def _name(keys: Keys, names: tuple[str, ...]) -> str:
    """Which of these keys the file has."""
    return next((name for name in names if keys.get(name) is not None), names[0])


def _place(keys: Keys, experts: Experts) -> Experts:
    """The same in the layers that config.json says."""
    found = _list_layers(keys)
    if not found:
        return replace(experts, dense_layers=keys.integer(_name(keys, _LEADS), 0, least=0))
    dense = found.index(True)
    return replace(experts, dense_layers=dense) if all(found[dense:]) else replace(experts, layers=found)


def _list_layers(keys: Keys) -> tuple[bool, ...]:
    """Whether each layer has experts, where config.json lists those that have, or those that have none; () where it
    does not. Raises UserError for a list that does not fit, or has none."""
    layers, kinds = keys.integer("num_hidden_layers"), keys.kinds("mlp_layer_types", "dense", "sparse")
    check_layers(keys, layers)
    step, dense = keys.integer("decoder_sparse_step", 1), keys.values.get("mlp_only_layers") or []
    key, found = "mlp_layer_types", tuple(kind == "sparse" for kind in kinds or ())
    if not kinds and (step > 1 or dense):
        key = "mlp_only_layers" if dense else "decoder_sparse_step"
        if not isinstance(dense, list) or not all(type(i) is int and 0 <= i < layers for i in dense):
            keys.refuse(key, f"is no list of layers of {layers}")
        found = tuple((i + 1) % step == 0 and i not in dense for i in range(layers))
    if found and len(found) != layers:
        keys.refuse(key, f"does not say of each of {layers} layers if it has experts")
    if found and not any(found):
        keys.refuse(key, f"leaves none of {layers} layers with experts")
    return found


def _layer_step(keys: Keys) -> int:
    """Of so many layers the last has experts. Raises UserError where others have."""
    listed = keys.values.get("moe_layers")
    if listed is None:
        return keys.integer(_name(keys, _STEPS), 1)
    layers = keys.integer("num_hidden_layers")
    step = listed[0] + 1 if isinstance(listed, list) and listed and type(listed[0]) is int else 0
    if step < 1 or listed != list(range(step - 1, layers, step)):
        keys.refuse("moe_layers", f"does not name the last of each so many of {layers} layers")
    return step


def check_experts(experts: Experts, where: str) -> Experts:
    """The same experts, when their numbers fit each other. Raises UserError."""
    count, used, groups, groups_used = experts.count, experts.used, experts.groups, experts.groups_used
    what = ""
    if used > count:
        what = f"a token takes {used} of {count} experts"
    elif count % groups or groups_used > groups:
        what = f"a token takes {groups_used} of {groups} groups of {count} experts"
    elif groups > 1 and count // groups < 2:
        what = f"{groups} groups of {count} experts have fewer than the two that a group's score is made of"
    elif used > count // groups * groups_used:
        what = f"a token takes {used} experts from {groups_used} of {groups} groups of {count}"
    if what:
        raise UserError(f"{where}: {what}; {ANOTHER}")
    if groups_used < groups and experts.scores == "softmax":  # DeepSeek-V2, whose groups count by their best expert
        raise UserError(
            f"{where}: groups of experts that are scored by a softmax are not supported yet; use -Lite or V3"
        )
    return experts
