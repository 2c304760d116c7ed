"""What files say about latent attention -> Latent: keys of GGUF metadata, and of config.json."""

from pshard.model_config import Latent
from pshard.models.keys import Keys
from pshard.models.rope import LOG_MULTIPLIER, scaling_factor, yarn_attention_factor, yarn_growth

HF_EPS = 1e-6  # of the norms of latents in transformers' classes, whatever config.json says; llama.cpp has the others'


def gguf_latent(keys: Keys) -> Latent:
    """From metadata with the architecture's prefix. Raises UserError that names the key.

    Files from before April 2025 have the lengths of a head's key and value where newer ones have those of the cell.
    """
    key = "attention.key_length_mla" if keys.get("attention.key_length_mla") else "attention.key_length"
    value = "attention.value_length_mla" if keys.get("attention.value_length_mla") else "attention.value_length"
    rope, query = keys.length("rope.dimension_count"), keys.length(key)
    if query <= rope:
        keys.refuse(key, f"is {query}, of which {rope} are rotated: none is left for the latent")
    keys.refuse_unless("rope.scaling.attn_factor", 1.0)  # which would multiply scores too
    scale = _scale_gguf_scores(keys)
    q_rank = keys.integer("attention.q_lora_rank") if keys.get("attention.q_lora_rank") else 0
    rank = keys.length("attention.kv_lora_rank")
    return _check(Latent(q_rank, rank, query - rope, rope, keys.length(value), scale), keys, "embedding_length")


def _scale_gguf_scores(keys: Keys) -> float:
    """By how much scores grow, as llama.cpp has it: also where positions are stretched otherwise than by YaRN, and
    where no key says how much, though sine and cosine grow then too."""
    factor, kind = scaling_factor(keys), keys.get("rope.scaling.type")
    if kind != "yarn":
        keys.refuse_unless(LOG_MULTIPLIER, 0.0)
    weight = 10 * keys.real(LOG_MULTIPLIER) if keys.get(LOG_MULTIPLIER) else 0.0
    if kind == "none" or (kind == "yarn" and factor <= 1 and not weight):
        return 1.0
    return yarn_growth(factor, weight or 1.0) ** 2


def hf_latent(keys: Keys, scaling: Keys) -> Latent:
    """From config.json, and of it what says how positions are scaled. Raises UserError that names the key."""
    keys.refuse_unless("moe_layer_freq", 1)
    keys.refuse_unless("attention_bias", False)
    scale = 1.0
    if scaling.get("mscale_all_dim") and (scaling.get("rope_type") or scaling.get("type") or "default") != "default":
        scale = scale_scores(scaling.real("factor"), scaling.real("mscale_all_dim"))
    latent = Latent(
        q_rank=keys.integer("q_lora_rank") if keys.get("q_lora_rank") is not None else 0,
        rank=keys.length("kv_lora_rank"),
        nope=keys.length("qk_nope_head_dim"),
        rope=keys.length("qk_rope_head_dim"),
        value=keys.length("v_head_dim"),
        score_scale=scale,
        eps=0.0 if keys.real("rms_norm_eps", HF_EPS) == HF_EPS else HF_EPS,
    )
    return _check(latent, keys, "hidden_size")


def scale_scores(factor: float, weight: float) -> float:
    """By how much scores grow where YaRN stretches positions: (0.1 weight ln(factor) + 1)^2, as DeepSeek's models were
    made; sine and cosine stay as they are then."""
    return yarn_attention_factor(factor, weight) ** 2


def _check(latent: Latent, keys: Keys, width: str) -> Latent:
    if latent.rope % 2:
        keys.refuse(width, f"belongs to keys of which {latent.rope} numbers are rotated, which are no pairs")
    if latent.q_rank > keys.integer(width):
        keys.refuse(width, f"is less than the {latent.q_rank} numbers that queries are made of")
    return latent
