"""Tiny folders of every family that transformers has a class for, and other values for the keys of their config.json.

A folder is what transformers saves of random weights; its config.json is written apart, so that it may have any keys.
"""

import copy
import importlib
import inspect
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from family_files import _HF, hf_settings
from gemma4_files import GEMMAS
from gemma4_files import hf_settings as gemma4_settings
from hybrid_files import hf_settings as hybrid_settings
from latent_files import FLASH, LIKE, Q_RANK, ROPE, SIZES
from model_files import HF_CLASSES, OSS_ROPE, Shape, _hf_expert_settings
from qwen4exp_files import Recipe
from qwen4exp_folder import hf_settings as qwen4exp_settings

VOCAB, GONE = 320, "gone"  # the latter in place of a key's value: without the key
FULL, SEEN = "full_attention", "sliding_attention"
Keys = dict[str, Any]

_HYBRIDS = ("next", "dense", "moe")
_PLAIN = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss")
_LATENT = {"deepseek_v2": LIKE["lite"], "deepseek_v3": LIKE["v3"], "glm4_moe_lite": FLASH}
FOLDERS = (
    *_HF,
    *_PLAIN,
    *_LATENT,
    *(f"gemma4-{name}" for name in GEMMAS),
    *(f"hybrid-{name}" for name in _HYBRIDS),
    "qwen4exp",
)


class Family(NamedTuple):
    """Classes of transformers, what a config.json of the family says, and the text of what reads it."""

    of_config: Any
    of_model: Any
    config: Keys
    source: str

    @property
    def text(self) -> Keys:
        return self.config.get("text_config", self.config)

    def with_keys(self, keys: Keys) -> Keys:
        """The config.json with other values in its text part."""
        made = copy.deepcopy(self.config)
        text = made.get("text_config", made)
        text |= copy.deepcopy(keys)
        for key in [key for key, value in text.items() if value is GONE or value == GONE]:
            del text[key]
        return made

    def reads(self, key: str) -> bool:
        """Whether any code of the classes has the key's name, or config.json has it already."""
        return key in self.source or key in self.text

    def build(self, config: Keys) -> Any:
        """transformers' model of a config.json, its random weights the same in every call for a name and shape."""
        made = self.of_config.from_dict(copy.deepcopy(config))
        for part in filter(None, (made, getattr(made, "text_config", None), getattr(made, "vision_config", None))):
            part._attn_implementation = part._experts_implementation = "eager"
            part.dtype = None
        torch.manual_seed(0)
        with _unfilled():
            model = self.of_model(made).float().eval()
        with torch.no_grad():
            named = (*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if "_bias" in n))
            for name, weight in named:
                own = _draw(name, weight.shape)
                weight.copy_(weight + own if weight.dim() < 2 and not name.endswith(_DRAWN) else own)
        return model


@contextmanager
def _unfilled() -> Iterator[None]:
    """Weights that are drawn here later are not drawn by transformers before, which takes longer than all else."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("normal_", "uniform_"):
            patch.setattr(torch.Tensor, name, lambda weight, *_, **__: weight.zero_())
        yield


_DRAWN = ("correction_bias", "expert_bias", "sinks", "A_log")  # vectors that are drawn whole, others vary


@lru_cache(maxsize=512)
def _draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    own = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if len(shape) < 2:
        return own * {"correction_bias": 0.2, "expert_bias": 0.2, "sinks": 0.5, "A_log": 0.5}.get(_ending(name), 0.3)
    return own if "embed_tokens" in name else own * shape[-1] ** -0.5


def _ending(name: str) -> str:
    return next((end for end in _DRAWN if name.endswith(end)), "")


def find_family(name: str) -> Family:
    """One of FOLDERS."""
    of_config, of_model, settings = _find(name)
    made = of_config(**copy.deepcopy({k: v for k, v in settings.items() if "_implementation" not in k}))
    modules = [inspect.getmodule(of_config), inspect.getmodule(of_model)]
    modules += [importlib.import_module(f"transformers.{m}") for m in ("modeling_rope_utils", "masking_utils")]
    modules.append(importlib.import_module("transformers.configuration_utils"))
    config = json.loads(json.dumps(made.to_diff_dict(), default=str))
    return Family(of_config, of_model, config, "\n".join(map(inspect.getsource, filter(None, modules))))


def _find(name: str) -> tuple[Any, Any, Keys]:
    import transformers
    from transformers.models import qwen3_5, qwen3_5_moe

    if name in _HF:
        return *(getattr(transformers, kind) for kind in _HF[name]), hf_settings(name)
    if name == "qwen4exp":
        models = pytest.importorskip("transformers.models.qwen4_exp", reason="this transformers does not know it")
        return models.Qwen4ExpTextConfig, models.Qwen4ExpForCausalLM, qwen4exp_settings(Recipe())
    kind, _, form = name.partition("-")
    if kind == "gemma4":
        return transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM, gemma4_settings(GEMMAS[form])
    if kind == "hybrid":
        found = {
            "next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
            "dense": (qwen3_5.Qwen3_5TextConfig, qwen3_5.Qwen3_5ForCausalLM),
            "moe": (qwen3_5_moe.Qwen3_5MoeTextConfig, qwen3_5_moe.Qwen3_5MoeForCausalLM),
        }
        return *found[form], hybrid_settings(form, 4)
    of_config, of_model = (getattr(transformers, HF_CLASSES[name] + end) for end in ("Config", "ForCausalLM"))
    return of_config, of_model, _plain_settings(name)


def _plain_settings(name: str) -> Keys:
    s = Shape()
    settings: Keys = {
        "num_hidden_layers": 3, "hidden_size": s.d_model, "num_attention_heads": s.n_heads, "head_dim": s.head_dim,
        "num_key_value_heads": s.n_kv_heads, "intermediate_size": s.d_ffn, "vocab_size": VOCAB, "pad_token_id": 0,
        "max_position_embeddings": 256, "rms_norm_eps": s.norm_eps, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": s.rope_base}, **_hf_expert_settings(name, s),
    }  # fmt: skip
    if name == "mistral":
        settings["sliding_window"] = None
    if name == "gpt_oss":
        settings |= {"rope_parameters": dict(OSS_ROPE), "sliding_window": 32}
    if name in _LATENT:
        latent = {key: value for key, value in _LATENT[name].items() if key not in ("arch", "rope")}
        settings |= SIZES | {"head_dim": ROPE, "rope_parameters": dict(_LATENT[name]["rope"])} | latent
    if name == "glm4_moe_lite":
        settings |= {"q_lora_rank": Q_RANK, "n_shared_experts": 1}
    return settings


def save_folder(folder: Path, model: Any, config: Keys) -> None:
    """As transformers saves it, with another config.json."""
    model.save_pretrained(folder)
    write_config(folder, config)


def write_config(folder: Path, config: Keys) -> None:
    (folder / "config.json").write_text(json.dumps(config))


# --- other values ----------------------------------------------------------------------------------------------------
_FLAGS = (
    *("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "use_qkv_bias", "conv_bias", "tie_word_embeddings"),
    *("norm_topk_prob", "use_expert_bias", "use_qk_norm", "qk_layernorm", "use_parallel_residual", "rope_interleave"),
    *("use_sliding_window", "attn_output_gate", "attention_k_eq_v", "use_double_wide_mlp", "enable_moe_block"),
    *("moe_apply_router_weight_on_input", "attn_temperature_tuning", "add_swa_attention_sink_bias", "tie_embedding"),
    *("use_bidirectional_attention", "is_causal", "block_auto_adjust_ff_dim", "use_cache", "output_router_logits"),
    *("is_decoder", "scale_attn_weights", "qk_norm", "enable_moe_fp32_combine", "use_mrope", "alibi"),
)
_FACTORS = (
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"),
    *("attention_value_scale", "attn_scale", "routed_scaling_factor", "router_scaling_factor", "clip_qkv"),
    *("moe_routed_scaling_factor", "moe_router_scaling_factor", "attn_logit_softcapping", "final_logit_softcapping"),
    *(
        "moe_router_logit_softcapping",
        "scale_emb",
        "scale_depth",
        "embedding_scale",
        "softmax_scale",
        "attention_scale",
    ),
)


def list_fields(text: Keys) -> dict[str, list[Any]]:
    """Values to try, by key; most families have few of the keys, and of others they must say nothing."""
    n, heads = text["num_hidden_layers"], text["num_attention_heads"]
    epsilons = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")
    sparse = ["sparse"] * (n - 1)
    return {
        **{key: [0.01] for key in epsilons},
        **{key: [not text.get(key)] for key in _FLAGS},
        **{key: [3.0] for key in _FACTORS},
        "hidden_act": ["gelu", "gelu_pytorch_tanh", "relu2"], "hidden_activation": ["gelu", "silu"],
        "head_dim": [16], "num_key_value_heads": [1, None], "num_attention_heads": [2 * heads],
        "rope_theta": [500.0], "partial_rotary_factor": [0.5], "rotary_dim": [16], "rope_local_base_freq": [500.0],
        "original_max_position_embeddings": [48], "max_position_embeddings": [1024],
        "sliding_window": [16, None], "max_window_layers": [1], "sliding_window_pattern": [2, "LLG"],
        "sliding_window_size": [16], "attention_chunk_size": [16],
        "layer_types": [[FULL] * n, [SEEN] * n, [SEEN if i % 2 else FULL for i in range(n)]],
        "query_pre_attn_scalar": [200], "n_group": [2], "topk_group": [2], "scoring_func": ["softmax", "sigmoid"],
        "topk_method": ["greedy", "noaux_tc"], "num_experts_per_tok": [2], "moe_k": [2], "moe_topk": [2],
        "top_k_experts": [2], "moe_top_k": [2], "swiglu_limit": [0.5], "swiglu_alpha": [1.0],
        "first_k_dense_replace": [0, 2], "num_dense_layers": [2], "mlp_only_layers": [[1]], "moe_layers": [[1]],
        "decoder_sparse_step": [2], "moe_layer_freq": [2], "moe_layer_interval": [2], "moe_layer_start_index": [2],
        "moe_layer_end_index": [1], "interleave_moe_layer_step": [1, 3], "n_shared_experts": [2],
        "mlp_layer_types": [[*sparse, "dense"], ["dense", *sparse]], "num_shared_experts": [2],
        "moe_num_shared_experts": [0], "swiglu_limits": [[0.5] * n], "swiglu_limits_shared": [[0.5] * n],
        "no_rope_layers": [[i % 2 for i in range(n)]], "no_rope_layer_interval": [2], "floor_scale": [20],
        "q_lora_rank": [None], "v_head_dim": [16], "pretraining_tp": [2], "torch_dtype": ["bfloat16"],
        "conv_L_cache": [4], "block_ff_dim": [96], "full_attn_idxs": [[0]], "full_attention_interval": [2],
        "output_gate_type": ["sigmoid"], "linear_conv_kernel_dim": [3], "num_kv_shared_layers": [1],
        "gating": ["per-head", "per-element"], "num_attention_heads_per_layer": [[heads] * n],
        "num_nextn_predict_layers": [1], "per_layer_config": [{"0": {"head_dim": 16}}], "attention_dropout": [0.5],
        "activation_function": ["relu"], "mlp_hidden_act": ["relu2"], "position_embedding_type": ["alibi"],
        "use_rope": [False], "rotary_pct": [0.5], "indexer_budget": [8, 32], "ple_layer_ids": [[3], []],
    }  # fmt: skip


def list_positions(text: Keys) -> list[Keys]:
    """What config.json may say of positions: in rope_parameters, of one kind of layers, or as transformers 4 did."""
    given = text.get("rope_parameters") or {}
    nested = [kind for kind, own in given.items() if isinstance(own, dict)]
    one = given[nested[0]] if nested else given
    own = ("rope_theta", "partial_rotary_factor", "mrope_section", "llama_4_scaling_beta")
    kept = {key: one[key] for key in own if key in one}
    head = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    pairs = int(text.get("qk_rope_head_dim", head) * (one.get("partial_rotary_factor") or 1)) // 2
    forms = list_forms(pairs)
    found: list[Keys] = []
    for form in forms.values():
        if not nested:
            found.append({"rope_parameters": kept | form})
        found += [{"rope_parameters": {**given, kind: kept | given[kind] | form}} for kind in nested]
    yarn, old = forms["yarn"], {"rope_parameters": GONE}
    return [
        *found,
        old,
        old | {"rope_theta": 500.0},
        old | {"rope_theta": 500.0, "rope_scaling": yarn},
        old | {"rope_scaling": {"type": "yarn", **{k: v for k, v in yarn.items() if k != "rope_type"}}},
        {"rope_scaling": yarn},
        {"rope_parameters": kept | yarn},
    ]


def list_forms(pairs: int) -> dict[str, Keys]:
    """Each way to scale positions, and each of its numbers."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    longrope = {
        "rope_type": "longrope", "short_factor": [1 + 0.05 * i for i in range(pairs)],
        "long_factor": [1 + 0.6 * i for i in range(pairs)], "original_max_position_embeddings": 32,
    }  # fmt: skip
    return {
        "another share": {"rope_type": "default", "partial_rotary_factor": 0.25},
        "linear": {"rope_type": "linear", "factor": 2.0},
        "dynamic": {"rope_type": "dynamic", "factor": 1.0, "alpha": 20.0},
        "yarn": yarn,
        "yarn, grown": yarn | {"attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0},
        "yarn, of two": yarn | {"mscale": 0.7, "mscale_all_dim": 1.2},
        "yarn, not rounded": yarn | {"truncate": False, "mscale_all_dim": 0.7, "factor": 6.0},
        "yarn, warmed": yarn | {"llama_4_scaling_beta": 0.3},
        "llama3": llama3 | {"original_max_position_embeddings": 64},
        "llama3 of the context": llama3 | {"low_freq_factor": 2.0, "factor": 3.0},
        "longrope": longrope,
        "longrope, grown": longrope | {"attention_factor": 1.3, "factor": 3.0},
        "shares": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
        "of several dimensions": {"rope_type": "mrope", "mrope_section": [4, 6, 6]},
        "what nobody reads": {"rope_type": "default", "factor": 2.0, "attention_factor": 1.3},
    }


def list_pairs(text: Keys) -> list[Keys]:
    """Keys that mean something together."""
    n = text["num_hidden_layers"]
    seen: Keys = {"sliding_window": 16}
    return [
        seen | {"layer_types": [SEEN] * n},
        seen | {"layer_types": [SEEN] * n, "use_sliding_window": False},
        seen | {"layer_types": [SEEN, *[FULL] * (n - 1)], "use_sliding_window": True},
        seen | {"use_sliding_window": True, "max_window_layers": 1, "layer_types": GONE},
        seen | {"layer_types": GONE, "sliding_window_pattern": 2},
        seen | {"layer_types": GONE},
        {"n_group": 4, "topk_group": 2, "topk_method": "greedy"},
        {"n_group": 4, "topk_group": 2, "topk_method": "noaux_tc"},
        {"norm_topk_prob": True, "routed_scaling_factor": 3.0},
        {"mlp_layer_types": GONE, "first_k_dense_replace": 2},
        {"no_rope_layers": GONE, "no_rope_layer_interval": 2, "layer_types": GONE},
        {"attention_bias": True, "mlp_bias": True},
    ]


_SIZES = (  # whose defaults are those of large models
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "share_expert_dim", "intermediate_size_mlp", "vocab_size_per_layer_input"),
    *("num_attention_heads_per_layer", "num_sliding_attention_heads", "max_position_embeddings", "model_type"),
    *("global_head_dim", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("ngram_vocab_size_base", "ple_embed_dim", "hc_lowrank", "indexer_n_heads", "indexer_head_dim", "heads_per_ngram"),
    *("linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim"),
)


_UNUSED = (  # by what computes logits
    *("transformers_version", "use_cache", "initializer_range", "attention_dropout", "output_router_logits"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "router_aux_loss_coef", "architectures", "dtype"),
)


def list_missing(text: Keys) -> list[Keys]:
    """Without each key that transformers has a value for, but those of sizes; without those that are for nothing."""
    kept = (*_SIZES, *_UNUSED, "rope_parameters")
    unused = {key: GONE for key in _UNUSED if key in text and "ple_layer_ids" not in text}  # whose texts end at a token
    return [unused, *({key: GONE} for key in text if key not in kept)]
