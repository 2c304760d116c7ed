"""config.json of a Hugging Face folder -> ModelConfig: the layout of transformers 4 and that of transformers 5."""

from dataclasses import replace
from typing import Any

from pshard.model_config import ModelConfig, Rope
from pshard.models.architectures import Architecture
from pshard.models.families.by_layer import with_rows_beside
from pshard.models.families.hf_positions import hf_rope, position_keys, split_positions
from pshard.models.families.layer_sorts import hf_ropes
from pshard.models.families.read_by import keep_read
from pshard.models.families.read_numbers import hf_numbers
from pshard.models.families.step_settings import adjust_step
from pshard.models.hybrid.read_delta import hf_delta
from pshard.models.hybrid.short_convs import adjust_rows, hf_conv
from pshard.models.hybrid.stream_folders import hf_streams, name_layers_as_published
from pshard.models.keys import EPSILONS, Keys, check_config
from pshard.models.latent.read_latent import hf_latent
from pshard.models.read_experts import hf_experts

_ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu": ("gelu_pytorch_tanh", "gelu"),  # Gemma's first say the latter
    "relu2": ("relu2",),
    "xielu": ("xielu",),
}
_EPSILONS = ("layer_norm_eps", "norm_epsilon", "norm_eps")  # of layer norms
_HEAD_NORMS = {"cohere": "use_qk_norm", "stablelm": "qk_layernorm"}


def hf_config(arch: Architecture, config: dict[str, Any], where: str) -> ModelConfig:
    """The model's numbers from config.json. Raises UserError that names the key."""
    config = {**arch.defaults, **keep_read(arch.name, config)}
    if arch.conv and not arch.routing:
        config = adjust_rows(config, where)
    if arch.chunked:
        config["sliding_window"] = Keys(config, where).integer("attention_chunk_size", arch.window_unsaid)
    config = adjust_step(config, where) if arch.limited else config
    config = name_layers_as_published(config) if arch.streamed else config
    if arch.by_layer:
        config["rope_scaling"] = None  # which its class does not read
    arch, keys = arch.of_windows(config.get("sliding_window")), Keys(config, where)
    for key in ("hidden_act", "hidden_activation"):
        keys.refuse_unless(key, *_ACTIVATIONS[arch.activation])
    keys.refuse_unless("swiglu_limit", 7.0)
    keys.refuse_unless("swiglu_alpha", 1.702)
    keys.refuse_unless("is_causal", True)
    if not (arch.optional_qk_norm or arch.qk_norm or arch.own_head_norms):
        keys.refuse_unless("use_qk_norm", False)
    if arch.unweighted:  # what its layer norms add is written out in transformers
        keys.refuse_unless("layer_norm_eps", 1e-5)
    d_model, n_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    latent = hf_latent(keys, position_keys(config, where)) if arch.latent else None
    head_dim = latent.cell if latent else keys.length("head_dim", d_model // n_heads)
    context = keys.integer("max_position_embeddings")
    experts = hf_experts(arch.routing, keys) if arch.routing else None
    n_layers = keys.integer("num_hidden_layers")
    if arch.partial and config.get("rotary_dim"):
        config.setdefault("partial_rotary_factor", keys.integer("rotary_dim") / head_dim)
    parallel = arch.may_be_parallel and keys.flag("use_parallel_residual", False)
    own_positions = arch.full_every and not arch.still_every
    positions = config
    if own_positions or arch.by_layer:  # of the latter's full layers: see hf_layers
        positions = split_positions(config, arch.window_base, where)[int(arch.by_layer)]
    turned = latent.rope if latent else head_dim
    if arch.sorted:
        rope, _ = hf_ropes(arch, keys, head_dim, context)
    else:
        rope = hf_rope(positions, arch.rotated, turned, context, where, alpha=arch.turned_norms)
    made = ModelConfig(
        architecture=arch.name,
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=1 if latent else keys.integer("num_key_value_heads", n_heads),
        head_dim=head_dim,
        d_ffn=0
        if arch.sorted or (experts and all(map(experts.are_in, range(n_layers))))
        else keys.integer("intermediate_size"),
        vocab=keys.integer("vocab_size"),
        norm_eps=keys.real(_name_eps(arch), span=EPSILONS),
        context=context,
        rope=_pair(arch, keys, rope),
        qk_norm=arch.qk_norm or (arch.optional_qk_norm and keys.flag("use_qk_norm", False)),
        sliding_window=_sliding_window(arch, config, keys),
        experts=experts,
        latent=latent,
        gated=bool(arch.delta),
        delta=hf_delta(keys, n_layers) if arch.delta else None,
        conv=hf_conv(keys, n_layers) if arch.conv else None,
        own_head_norms=arch.own_head_norms and keys.flag(_HEAD_NORMS[arch.name], False),
        clamp=keys.factor("clip_qkv") if arch.clamped else 0.0,
        **arch.declared | ({"parallel": True} if parallel else {}),
    )
    if arch.turned_norms or (arch.bare_head_norms and made.qk_norm):
        made = made.normed_once_turned()
    made = hf_streams(keys, made) if arch.streamed else made
    if experts and experts.beside:
        made = with_rows_beside(arch, keys, made, keys.integer("intermediate_size_mlp", 16384))
    return check_config(arch, hf_numbers(arch, keys, made), where)


def _name_eps(arch: Architecture) -> str:
    """Its classes have one each, which they have a value for."""
    if not arch.centred:
        return "norm_eps" if arch.conv else "rms_norm_eps"
    return next(name for name in _EPSILONS if name in arch.defaults)


def count_hf_drafters(config: dict[str, Any], where: str) -> int:
    """So many layers follow the model's, which draft further tokens (multi-token prediction); it runs without them."""
    return Keys(config, where).integer("num_nextn_predict_layers", 0, least=0)


def _sliding_window(arch: Architecture, config: dict[str, Any], keys: Keys) -> int:
    """Tokens of the window, 0 for none. Qwen files state one that `use_sliding_window` switches on."""
    kinds = config.get("layer_types")
    full = isinstance(kinds, list) and kinds and all(kind == "full_attention" for kind in kinds)
    listed = isinstance(kinds, list) and arch.still_every  # by which SmolLM3 goes then
    if full or (config.get("use_sliding_window") is False and not listed):
        return 0
    has_one = arch.window_every > 1 or arch.full_every or config.get("sliding_window") is not None
    return keys.integer("sliding_window") if has_one else 0


def _pair(arch: Architecture, keys: Keys, rope: Rope) -> Rope:
    """Latent attention rotates neighbours, unless its folder says otherwise."""
    adjacent = arch.latent and keys.flag("rope_interleave", True)
    return replace(rope, pairing="adjacent" if adjacent else arch.hf_pairing)
