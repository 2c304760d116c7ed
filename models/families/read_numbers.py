"""Numbers that only some families have -> ModelConfig: multipliers, temperatures, which layers see or turn what.

Keys of GGUF metadata as llama.cpp reads them, those of config.json as the classes of transformers have them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from pshard.model_config import ModelConfig, Rope, Temperature
from pshard.models.architectures import Architecture
from pshard.models.families.by_layer import gguf_layers, hf_chunks, hf_layers
from pshard.models.families.hf_positions import hf_rope, position_keys, split_positions
from pshard.models.families.layer_sorts import hf_sorts
from pshard.models.hybrid.read_delta import check_layers
from pshard.models.keys import BASES, FACTORS, Keys

_GGUF_MULTIPLIERS = {
    "embedding": "embedding_scale", "residual": "residual_scale", "score": "attention.scale", "logits": "logit_scale",
}  # fmt: skip
_HF_MULTIPLIERS = {
    "embedding": "embedding_multiplier", "residual": "residual_multiplier", "score": "attention_multiplier",
    "logits": "logit_scale", "1/logits": "logits_scaling",
}  # fmt: skip
_UNSAID: dict[str, Callable[[ModelConfig], dict[str, float]]] = {  # by files without the keys, as MiniCPM's first
    "minicpm": lambda c: {"embedding": 12.0, "residual": 1.4 / math.sqrt(c.n_layers), "1/logits": c.d_model / 256},
}
_PATTERN = "sliding_window_pattern"
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")  # of scores, of logits
GGUF_GELU = "gelu16"  # as llama.cpp, which such files are made for, computes it
_LAYERS_OF_27B = {"gemma3": 62, "gemma2": 46}  # files do not say how scores are scaled, which differs in these


def gguf_numbers(arch: Architecture, keys: Keys, config: ModelConfig) -> ModelConfig:
    """The config with what metadata says of these. Raises UserError that names the key."""
    _check_gguf_layers(arch, keys, config)
    if arch.activation == "gelu":
        config = replace(config, activation=GGUF_GELU)
    if "residual" in arch.multiplied:  # Granite, whose heads are not rotated otherwise
        keys.refuse_unless("rope.scaling.finetuned", True)
    for what, key in _GGUF_MULTIPLIERS.items():
        if what not in arch.multiplied and f"1/{what}" not in arch.multiplied:
            keys.refuse_unless(key, 0.0, *(() if what == "score" else (1.0,)))
    named = {what: _GGUF_MULTIPLIERS[what.removeprefix("1/")] for what in arch.multiplied}
    given = {what: keys.factor(key) for what, key in named.items() if keys.get(key) is not None}
    unsaid = _UNSAID[arch.name](config) if arch.name in _UNSAID else {}
    config = _multiply(config, unsaid | given)
    if arch.embedded_by_root:
        config = replace(config, embedding_scale=math.sqrt(config.d_model))
        if arch.by_layer:
            return gguf_layers(keys, replace(config, score_scale=1.0, values_normed=True))
        if config.n_layers == _LAYERS_OF_27B.get(arch.gguf):
            config = replace(config, score_scale=(config.d_model / config.n_heads) ** -0.5)
    if arch.capped:  # as llama.cpp has it where files do not say
        scores, logits = (keys.real(key, cap, FACTORS) for key, cap in zip(CAPS, (50.0, 30.0)))
        config = replace(config, score_cap=scores, logit_cap=logits)
    if (arch.first_full and not arch.still_every) or arch.window_every > 1 or arch.one_base:
        keys.refuse_unless("rope.freq_base_swa", config.rope.base)
    if arch.full_every and not arch.still_every and not arch.first_full:
        base = keys.real("rope.freq_base_swa", arch.window_base or config.rope.base, BASES)
        return replace(config, window_rope=Rope(config.rope.dims, base, config.rope.pairing))
    if arch.chunked and config.sliding_window:  # as llama.cpp has it, whatever files say
        config = replace(config, temperature=Temperature(0.1, 8192, counts=True, still=True))
    if arch.still_every and config.sliding_window:  # where windows are in all layers that are rotated
        base = keys.real("rope.freq_base_swa", config.rope.base, BASES)
        config = replace(config, rope=replace(config.rope, base=base))
    if not arch.warmed:
        keys.refuse_unless("attention.temperature_scale", 0.0)
    elif keys.get("attention.temperature_scale"):
        span = keys.integer("rope.scaling.original_context_length", config.context)
        return replace(config, temperature=Temperature(keys.real("attention.temperature_scale", span=FACTORS), span))
    return config


def hf_numbers(arch: Architecture, keys: Keys, config: ModelConfig) -> ModelConfig:
    """The config with what config.json says of these. Raises UserError that names the key."""
    if arch.chunked:
        return hf_chunks(keys, config)
    config = _place_layers(arch, keys, config)
    config = _multiply(config, {what: keys.real(_HF_MULTIPLIERS[what], 1.0, FACTORS) for what in arch.multiplied})
    if arch.sorted:
        return hf_sorts(arch, keys, config)
    if arch.by_layer:
        keys.refuse_unless("use_bidirectional_attention", False, "vision")  # the latter is of what a model sees
        root = math.sqrt(config.d_model)
        config = replace(config, embedding_scale=root, score_scale=1.0, values_normed=True)
        return hf_layers(arch, keys, config)
    if arch.embedded_by_root:
        for key in () if arch.capped else CAPS:
            keys.refuse_unless(key, 0.0)
        keys.refuse_unless("use_bidirectional_attention", False)
        scale = keys.real("query_pre_attn_scalar", config.head_dim, FACTORS) ** -0.5
        config = replace(config, embedding_scale=math.sqrt(config.d_model), score_scale=scale)
    if arch.capped:
        config = replace(config, score_cap=keys.factor(CAPS[0]), logit_cap=keys.factor(CAPS[1]))
    if arch.full_every and not arch.still_every:
        if not config.sliding_window:
            return config
        _, of_windows = split_positions(keys.values, arch.window_base, keys.where)
        local = hf_rope(of_windows, arch.rotated, config.head_dim, config.context, keys.where)
        if local.dims != config.rope.dims:
            keys.refuse("rope_parameters", f"turns {local.dims} numbers of heads in layers with a window")
        return replace(config, window_rope=replace(local, pairing=config.rope.pairing))
    positions = position_keys(keys.values, keys.where)
    if arch.warmed and positions.get("llama_4_scaling_beta"):
        scale = positions.real("llama_4_scaling_beta", span=FACTORS)
        return replace(config, temperature=Temperature(scale, positions.integer("original_max_position_embeddings")))
    return config


def _multiply(config: ModelConfig, by: Mapping[str, float]) -> ModelConfig:
    """With the stream that is divided by what layers' results are multiplied by: see ModelConfig. by: numbers as
    `Architecture.multiplied` calls them; 0 for none."""
    residual, divided = by.get("residual") or 1.0, by.get("1/logits") or 1.0
    return replace(
        config,
        embedding_scale=(by.get("embedding") or 1.0) / residual,
        norm_eps=config.norm_eps / residual**2,
        score_scale=by.get("score") or config.score_scale,
        logit_scale=(by.get("logits") or 1.0) / divided,
    )


def _check_gguf_layers(arch: Architecture, keys: Keys, config: ModelConfig) -> None:
    """Raise UserError where windows are in other layers than the architecture has them in, and for positions of
    several dimensions where heads store their pairs otherwise for them."""
    pattern = keys.values.get(f"{keys.prefix}attention.sliding_window_pattern")
    if arch.may_lack_windows and not config.sliding_window and (any(pattern) if isinstance(pattern, list) else pattern):
        keys.refuse("attention.sliding_window_pattern", "has layers with windows, but no key says how long these are")
    every = arch.full_every or (arch.window_every if arch.window_every > 1 else 0)
    if every and isinstance(pattern, list):
        _check_windows(keys, config, "attention.sliding_window_pattern", [bool(seen) for seen in pattern])
    elif every and pattern is not None and pattern != every:
        _refuse_windows(keys, config, "attention.sliding_window_pattern")
    sections = keys.values.get(f"{keys.prefix}rope.dimension_sections")
    if arch.gguf_pairing == "adjacent" and (any(sections) if isinstance(sections, list) else sections):
        keys.refuse("rope.dimension_sections", f"is {sections}, which is not supported in this architecture")


def _place_layers(arch: Architecture, keys: Keys, config: ModelConfig) -> ModelConfig:
    """The config with windows, and heads that are not turned, in the layers that config.json lists. Raises UserError
    that names the key for a list of another length, or windows whose length nothing says."""
    check_layers(keys, config.n_layers)
    config = _place_still(arch, keys, _place_windows(arch, keys, config))
    if config.sliding_window and any(config.has_window(i) and config.is_still(i) for i in range(config.n_layers)):
        keys.refuse("layer_types", "has windows in layers that are not rotated, which is not supported yet")
    return config


def _place_windows(arch: Architecture, keys: Keys, config: ModelConfig) -> ModelConfig:
    windows = _list_windows(arch, keys, config)
    if windows:
        if any(windows) and not keys.values.get("sliding_window"):
            keys.refuse("layer_types", "has layers with windows, but sliding_window does not say how long these are")
        if windows != tuple(map(config.has_window, range(config.n_layers))) or arch.folder_windows:
            length = config.sliding_window if any(windows) else 0
            still = tuple(not seen for seen in windows) if arch.full_every and arch.still_every else ()
            return replace(config, sliding_window=length, windows_in=windows, still_in=still)
    return config


def _place_still(arch: Architecture, keys: Keys, config: ModelConfig) -> ModelConfig:
    turned = keys.values.get("no_rope_layers")
    if not arch.still_every or (turned is None and keys.get("no_rope_layer_interval") is None):
        return config
    if turned is None:
        step = keys.integer("no_rope_layer_interval")
        turned = [int((i + 1) % step != 0) for i in range(config.n_layers)]
    still = tuple(not one for one in turned) if isinstance(turned, list) else ()
    if len(still) != config.n_layers or not all(one in (0, 1) for one in turned):
        keys.refuse("no_rope_layers", f"does not say of each of {config.n_layers} layers if it is rotated")
    return config if still == tuple(map(config.is_still, range(config.n_layers))) else replace(config, still_in=still)


def _list_windows(arch: Architecture, keys: Keys, config: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer has a window, as config.json says it; (): as the architecture has them."""
    if arch.folder_windows == "all" and config.sliding_window:
        return (True,) * config.n_layers
    if not (arch.full_every or arch.window_every > 1 or arch.folder_windows or arch.may_lack_windows):
        return ()
    kinds, pattern = keys.kinds("layer_types", "sliding_attention", "full_attention"), keys.get(_PATTERN)
    if kinds is None and (pattern in (None, arch.full_every, "L" * (arch.full_every - 1) + "G") or not arch.full_every):
        return ()
    if kinds is None:
        each = keys.integer(_PATTERN)
        return tuple((i + 1) % each != 0 for i in range(config.n_layers))
    if len(kinds) != config.n_layers:
        keys.refuse("layer_types", f"does not say of each of {config.n_layers} layers if it has a window")
    return tuple(kind == "sliding_attention" for kind in kinds)


def _check_windows(keys: Keys, config: ModelConfig, key: str, found: list[bool]) -> None:
    if len(found) != config.n_layers or found != [config.has_window(i) for i in range(config.n_layers)]:
        _refuse_windows(keys, config, key)


def _refuse_windows(keys: Keys, config: ModelConfig, key: str) -> None:
    every = config.full_every
    where = f"all but the last of each {every}" if every else f"the first of each {config.window_every}"
    keys.refuse(key, f"has windows in other layers than {where}")
