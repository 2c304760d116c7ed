"""config.json of a Hugging Face folder -> ModelConfig: the layout of transformers 4 and that of transformers 5."""

from dataclasses import replace
from typing import Any

from pshard.errors import UserError
from pshard.model_config import ModelConfig, Rope
from pshard.models.architectures import Architecture
from pshard.models.hybrid.read_delta import hf_delta
from pshard.models.keys import BASES, EPSILONS, FACTORS, Keys, check_config
from pshard.models.latent.read_latent import hf_latent
from pshard.models.read_experts import hf_experts
from pshard.models.rope import llama3_freq_factors, yarn_attention_factor

LARGEST_HEAD = 1 << 16


def hf_config(arch: Architecture, config: dict[str, Any], where: str) -> ModelConfig:
    """The model's numbers from config.json. Raises UserError that names the key."""
    keys = Keys(config, where)
    keys.refuse_unless("hidden_act", "silu", "swish")
    keys.refuse_unless("swiglu_limit", 7.0)
    if (method := _quant_method(config)) and not (method == "mxfp4" and arch.sinks):
        what = f"quantised safetensors are not supported (quant_method {method!r})"
        raise UserError(f"{where}: {what}; use a GGUF file of the model")
    d_model, n_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    latent = hf_latent(keys, _position_keys(config, where)) if arch.latent else None
    head_dim = latent.cell if latent else keys.integer("head_dim", d_model // n_heads)
    context = keys.integer("max_position_embeddings")
    if head_dim > LARGEST_HEAD:  # else its angles take for ever, before the shapes of tensors tell
        keys.refuse("head_dim", f"is {head_dim}; heads of models have a few hundred dimensions")
    experts = hf_experts(arch.routing, keys) if arch.routing else None
    n_layers = keys.integer("num_hidden_layers")
    made = ModelConfig(
        architecture=arch.name,
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=1 if latent else keys.integer("num_key_value_heads", n_heads),
        head_dim=head_dim,
        d_ffn=0 if experts and not experts.dense_layers else keys.integer("intermediate_size"),
        vocab=keys.integer("vocab_size"),
        norm_eps=keys.real("rms_norm_eps", span=EPSILONS),
        context=context,
        rope=_pair(arch, keys, _hf_rope(config, arch.rotated, latent.rope if latent else head_dim, context, where)),
        qk_norm=arch.qk_norm or (arch.optional_qk_norm and keys.flag("use_qk_norm", False)),
        sliding_window=_sliding_window(arch, config, keys),
        window_every=arch.window_every,
        experts=experts,
        latent=latent,
        gated=bool(arch.delta),
        delta=hf_delta(keys, n_layers) if arch.delta else None,
    )
    return check_config(arch, made, where)


def count_hf_drafters(config: dict[str, Any], where: str) -> int:
    """So many layers follow the model's, which draft further tokens (multi-token prediction); it runs without them."""
    return Keys(config, where).integer("num_nextn_predict_layers", 0, least=0)


def _quant_method(config: dict[str, Any]) -> str:
    """How a folder's weights are quantised; "" when they are not."""
    given = config.get("quantization_config")
    if isinstance(given, dict):
        return str(given.get("quant_method", "unknown"))[:40]
    return "unknown" if given else ""


def _sliding_window(arch: Architecture, config: dict[str, Any], keys: Keys) -> int:
    """Tokens of the window, 0 for none. Qwen files state one that `use_sliding_window` switches off."""
    kinds = config.get("layer_types")
    if config.get("use_sliding_window") is False or (isinstance(kinds, list) and set(kinds) == {"full_attention"}):
        return 0
    names = ("full_attention", "sliding_attention")
    if (
        arch.window_every > 1
        and isinstance(kinds, list)
        and kinds != [names[i % arch.window_every == 0] for i in range(keys.integer("num_hidden_layers"))]
    ):
        raise UserError(
            f"{keys.where}: layer_types has windows in other layers than the first of each {arch.window_every}"
        )
    has_one = arch.window_every > 1 or config.get("sliding_window") is not None
    return keys.integer("sliding_window") if has_one else 0


def _pair(arch: Architecture, keys: Keys, rope: Rope) -> Rope:
    """Latent attention rotates neighbours, unless its folder says otherwise."""
    adjacent = arch.latent and keys.flag("rope_interleave", True)
    return replace(rope, pairing="adjacent") if adjacent else rope


def _position_keys(config: dict[str, Any], where: str) -> Keys:
    """What a folder says of positions. Raises UserError."""
    # transformers 5 keeps everything in rope_parameters; before, rope_theta stood beside rope_scaling
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given = config.get(name) or {}
    if not isinstance(given, dict) or any(isinstance(v, dict) for v in given.values()):
        raise UserError(f"{where}: {name} differs from layer to layer, which is not supported yet")
    beside = {k: config[k] for k in ("rope_theta", "partial_rotary_factor") if config.get(k) is not None}
    if config.get("original_max_position_embeddings"):
        given = {**given, "original_max_position_embeddings": config["original_max_position_embeddings"]}
    return Keys({**beside, **given}, f"{where}: {name}")


def _hf_rope(config: dict[str, Any], rotated: float, head_dim: int, context: int, where: str) -> Rope:
    keys = _position_keys(config, where)
    kind = keys.get("rope_type") or keys.get("type") or "default"
    share, base = keys.real("partial_rotary_factor", rotated), keys.real("rope_theta", 10000.0, BASES)
    if share > 1:
        keys.refuse("partial_rotary_factor", f"is {share}, more than the whole head")
    dims = int(head_dim * share)
    if kind == "default":
        return Rope(dims, base, "halves")
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
    raise UserError(f"{where}: RoPE scaling {kind!r} is not supported; supported: default, linear, llama3, yarn")


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
