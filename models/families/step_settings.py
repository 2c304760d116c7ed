"""config.json of Step 3.5 and 3.7, of their publisher or as transformers saves it, by one set of names.

As Step3p7TextConfig of transformers reads it: lists may go on for layers that draft, and settings have older names.
"""

from typing import Any

from pshard.errors import UserError
from pshard.models.keys import BASES, Keys
from pshard.models.stored import ANOTHER

_OTHER_NAMES = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
    "num_mtp_layers": "num_nextn_predict_layers",
}
_LISTS = (
    *("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"),
    *("rope_theta", "partial_rotary_factors"),
)
_FULL, _WINDOWED = "full_attention", "sliding_attention"


def adjust_step(given: dict[str, Any], where: str) -> dict[str, Any]:
    """The settings by the names that others have too. Raises UserError that names the key."""
    config = {_OTHER_NAMES.get(key, key): value for key, value in given.items()}
    keys = Keys(config, where)
    layers, drafting = keys.integer("num_hidden_layers"), keys.integer("num_nextn_predict_layers", 0, least=0)
    for name in _LISTS:
        found = config.get(name)
        if isinstance(found, list) and len(found) == layers + drafting:
            config[name] = found[:layers]
    config["hidden_act"] = "silu"  # whatever it says
    kinds = keys.kinds("layer_types", _FULL, _WINDOWED)
    if kinds is None:
        config["layer_types"] = kinds = [_FULL] * min(layers, 1 << 14)
    if not isinstance(config.get("mlp_layer_types"), list):
        routed = _list_routed(config.get("moe_layers_enum"), layers, where)
        config["mlp_layer_types"] = ["sparse" if i in routed else "dense" for i in range(len(kinds))]
    other = config.get("attention_other_setting") or {}
    if (
        config.get("num_sliding_attention_heads") is None
        and isinstance(other, dict)
        and other.get("num_attention_heads")
    ):
        config["num_sliding_attention_heads"] = other["num_attention_heads"]
    config["num_attention_heads_per_layer"] = _list_heads(keys, kinds)
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or not all(isinstance(rope.get(kind), dict) for kind in kinds):
        config["rope_parameters"] = _make_rope(keys, kinds)
    return config


def _list_routed(given: Any, layers: int, where: str) -> set[int]:
    if given is None:
        return set(range(3, min(layers, 1 << 14)))
    items = given.split(",") if isinstance(given, str) else given
    if not isinstance(items, list) or not all(str(item).strip().isdecimal() for item in items if str(item).strip()):
        raise UserError(f"{where}: moe_layers_enum is no list of layers; {ANOTHER}")
    return {int(str(item)) for item in items if str(item).strip()}


def _list_heads(keys: Keys, kinds: list[str]) -> list[int]:
    """Query heads of each layer."""
    heads = keys.integer("num_attention_heads")
    windowed = keys.integer("num_sliding_attention_heads", heads)
    given = keys.values.get("per_layer_config")
    if given is None:
        return [windowed if kind == _WINDOWED else heads for kind in kinds]
    if not isinstance(given, dict):
        keys.refuse("per_layer_config", "does not say what is of which layer")
    found = [heads] * len(kinds)
    for number, own in given.items():
        known = isinstance(own, dict) and not own.keys() - {"num_attention_heads"}
        if not known or not str(number).isdecimal() or int(number) >= len(kinds):
            keys.refuse("per_layer_config", f"has settings of layer {number} that are not supported")
        found[int(number)] = Keys(own, f"{keys.where}: per_layer_config").integer("num_attention_heads", heads)
    return found


def _make_rope(keys: Keys, kinds: list[str]) -> dict[str, Any]:
    """What each kind of layers turns, as the first one of it says."""
    made: dict[str, Any] = {}
    for kind in set(kinds):
        first = kinds.index(kind)
        own: dict[str, Any] = {}
        for name, key in (("rope_theta", "rope_theta"), ("partial_rotary_factor", "partial_rotary_factors")):
            found = keys.values.get(key)
            if isinstance(found, list) and len(found) < len(kinds):
                keys.refuse(key, f"has {len(found)} values for {len(kinds)} layers")
            value = found[first] if isinstance(found, list) else found
            if value is not None:
                own[name] = value
        Keys(own, keys.where).real("rope_theta", 10000.0, BASES)
        made[kind] = {"rope_type": "default", "rope_theta": 10000.0} | own
    scaling = keys.values.get("rope_scaling")
    if isinstance(scaling, dict) and _FULL in made:
        made[_FULL] |= scaling
    return made
