"""Keys of config.json that the classes of some families read, by the names of their architectures.

Of other families they say nothing, as in transformers: folders are saved with keys of other models' classes.
"""

from collections.abc import Mapping
from typing import Any

_QWEN_VL = ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text")
_GROUPED = (
    *("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite", "dots1", "exaone_moe", "mimo_v2_flash"),
)
_SPARSE = ("qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text", "qwen3_next")
_READERS: dict[str, tuple[str, ...]] = {
    "use_sliding_window": ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3", *_QWEN_VL),
    "sliding_window_pattern": ("gemma3_text", "cohere2", "exaone4", "exaone_moe"),
    "query_pre_attn_scalar": ("gemma2", "gemma3_text", "step3p5"),
    "topk_method": ("deepseek_v2",),
    "n_group": _GROUPED,
    "topk_group": _GROUPED,
    "norm_topk_prob": (*_GROUPED, *_SPARSE[:2], "qwen3_next", "qwen4_exp_text", "lfm2_moe"),
    "use_expert_bias": ("lfm2_moe",),
    "first_k_dense_replace": ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe", "dots1", "exaone_moe"),
    "n_shared_experts": ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite", "dots1"),
    "num_shared_experts": ("hy_v3", "exaone_moe"),
    "moe_num_shared_experts": ("ernie4_5_moe",),
    "moe_k": ("ernie4_5_moe",),
    "moe_topk": ("hunyuan_v1_moe",),
    "top_k_experts": ("gemma4_text",),
    "rotary_dim": ("minimax_m2",),
    "num_dense_layers": ("lfm2_moe",),
    "moe_layer_start_index": ("ernie4_5_moe",),
    "moe_layer_end_index": ("ernie4_5_moe",),
    "moe_layer_interval": ("ernie4_5_moe",),
    "interleave_moe_layer_step": ("llama4_text",),
    "moe_layers": ("llama4_text",),
    "no_rope_layers": ("smollm3", "llama4_text"),
    "no_rope_layer_interval": ("smollm3", "llama4_text"),
    "routed_scaling_factor": (*_GROUPED, "lfm2_moe"),
    "router_scaling_factor": ("hy_v3",),
    "moe_routed_scaling_factor": ("laguna",),
    "moe_router_scaling_factor": ("step3p5",),
    "decoder_sparse_step": _SPARSE,
    "mlp_only_layers": _SPARSE,
}


def keep_read(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those that the class of this architecture does not read."""
    return {key: value for key, value in config.items() if name in _READERS.get(key, (name,))}
