"""What a Hugging Face folder says of positions -> Rope: the layout of transformers 4 and that of transformers 5."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pshard.errors import UserError
from pshard.model_config import Rope
from pshard.models.keys import BASES, FACTORS, Keys
from pshard.models.rope import llama3_freq_factors, yarn_attention_factor
from pshard.models.stored import ANOTHER


def position_keys(config: Mapping[str, Any], where: str) -> Keys:
    """What a folder says of positions. Raises UserError."""
    # transformers 5 keeps everything in rope_parameters, in place of which it takes rope_scaling where both are there
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(name) or {}
    if not isinstance(given, dict) or any(isinstance(v, dict) for v in given.values()):
        raise UserError(f"{where}: {name} differs from layer to layer, which is not supported yet; {ANOTHER}")
    beside = {k: config[k] for k in ("rope_theta", "partial_rotary_factor") if config.get(k) is not None}
    if config.get("original_max_position_embeddings"):
        given = {**given, "original_max_position_embeddings": config["original_max_position_embeddings"]}
    return Keys({**beside, **given}, f"{where}: {name}")


def split_positions(config: Mapping[str, Any], window_base: float, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings for layers with full attention and for those with a window, where these differ in positions: each
    sort's own rope_parameters, with which rope_scaling is joined for the former. What rope_parameters say of all layers
    at once is not read, as in transformers. window_base: of the latter where a folder does not say. Raises UserError.
    """
    given, scaling = config.get("rope_parameters"), config.get("rope_scaling") or {}
    given = given if isinstance(given, dict) else {}
    full, local = (of_kind(given, kind) or {} for kind in ("full_attention", "sliding_attention"))
    if not all(isinstance(one, dict) for one in (full, local, scaling)):
        raise UserError(f"{where}: rope_parameters or rope_scaling has others than keys and values; {ANOTHER}")
    if "type" in scaling and not scaling.get("rope_type"):
        raise UserError(f"{where}: rope_scaling has type, where models of this family have rope_type; {ANOTHER}")
    own = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")
    rest = {key: value for key, value in config.items() if key not in own}
    bases = config.get("rope_theta"), config.get("rope_local_base_freq") or window_base
    rounded = {"truncate": given.get("truncate", True)}  # see of_kind
    return (
        {**rest, "rope_theta": bases[0], "rope_parameters": {**full, **scaling, **rounded}},
        {**rest, "rope_theta": bases[1], "rope_parameters": local},
    )


def of_kind(given: Mapping[str, Any], kind: str) -> Any:
    """What rope_parameters say of layers of one kind. Whether YaRN's range is rounded is said of all kinds at once, as
    transformers reads it."""
    found = given.get(kind)
    return {**found, "truncate": given.get("truncate", True)} if isinstance(found, dict) and found else found


def hf_rope(
    config: Mapping[str, Any], rotated: float, head_dim: int, context: int, where: str, alpha: bool = False
) -> Rope:
    """How heads of so many numbers are rotated. alpha: models of the family scale bases by it, as Hunyuan's do. Raises
    UserError that names the key."""
    keys = position_keys(config, where)
    kind = keys.get("rope_type") or keys.get("type") or "default"
    share, base = keys.real("partial_rotary_factor", rotated), keys.real("rope_theta", 10000.0, BASES)
    if share > 1:
        keys.refuse("partial_rotary_factor", f"is {share}, more than the whole head")
    dims = int(head_dim * share)
    if kind in ("default", "mrope"):  # the latter is the former, at positions of text
        return Rope(dims, base, "halves")
    if kind == "dynamic" and not keys.get("alpha"):  # the same within a model's context, and texts have no more
        return Rope(dims, base, "halves")
    if kind == "dynamic":  # of a fixed factor, whatever a text's length
        if not alpha:
            keys.refuse("alpha", "is of Hunyuan's models, and those of this family have none")
        if dims <= 2:
            keys.refuse("alpha", f"scales the base of heads of which {dims} numbers are rotated")
        return Rope(dims, base * keys.real("alpha", span=FACTORS) ** (dims / (dims - 2)), "halves")
    original = keys.integer("original_max_position_embeddings", context)
    if kind == "linear":
        return Rope(dims, base, "halves", "linear", keys.real("factor", span=FACTORS))
    if kind == "llama3":
        factor = keys.real("factor", span=FACTORS)
        low, high = keys.real("low_freq_factor"), keys.real("high_freq_factor")
        if high <= low:
            keys.refuse("high_freq_factor", f"is {high}, not above low_freq_factor {low}")
        factors = llama3_freq_factors(dims, base, factor, low, high, original)
        return Rope(dims, base, "halves", "llama3", factor, original, freq_factors=factors)
    if kind == "yarn":
        return _hf_yarn(keys, dims, base, original, context)
    if kind in ("longrope", "su"):
        return _hf_longrope(keys, Rope(dims, base, "halves", "longrope", original_context=original), context)
    supported = "default, linear, dynamic, llama3, yarn, longrope"
    raise UserError(f"{where}: RoPE scaling {kind!r} is not supported (supported: {supported}); {ANOTHER}")


def _hf_longrope(keys: Keys, rope: Rope, context: int) -> Rope:
    """arXiv 2402.13753; cos and sin grow by sqrt(1 + ln(factor) / ln(original context)), as transformers has it."""
    if rope.original_context < 2:
        keys.refuse("original_max_position_embeddings", f"is {rope.original_context}, and texts are longer")
    factor = keys.real("factor", context / rope.original_context, FACTORS)
    grown = math.sqrt(1 + math.log(factor) / math.log(rope.original_context)) if factor > 1 else 1.0
    return replace(
        rope,
        factor=factor,
        attention_factor=keys.real("attention_factor", grown, FACTORS),
        freq_factors=keys.reals("short_factor", FACTORS),
        long_factors=keys.reals("long_factor", FACTORS),
    )


def _hf_yarn(keys: Keys, dims: int, base: float, original: int, context: int) -> Rope:
    factor = keys.real("factor", context / original, FACTORS)
    attention = yarn_attention_factor(factor)
    if keys.get("mscale") and keys.get("mscale_all_dim"):
        attention = yarn_attention_factor(factor, keys.real("mscale"))
        attention /= yarn_attention_factor(factor, keys.real("mscale_all_dim"))
    return Rope(
        dims,
        base,
        "halves",
        scaling="yarn",
        rounded=keys.flag("truncate", True),
        factor=factor,
        original_context=original,
        beta_fast=keys.real("beta_fast", 32.0),
        beta_slow=keys.real("beta_slow", 1.0),
        attention_factor=keys.real("attention_factor", attention, FACTORS),
    )
