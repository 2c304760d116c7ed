"""Folders with settings that no published one has: logits equal transformers'."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import open_engine

from pshard.models import open_model

transformers = pytest.importorskip("transformers")

IDS = [(7 * i * i + 3 * i) % 131 for i in range(70)]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
FULL, SEEN = "full_attention", "sliding_attention"
SIZES: dict[str, Any] = dict(
    vocab_size=131, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0,
)  # fmt: skip
MOE: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
GEMMA4: dict[str, Any] = dict(
    layer_types=[SEEN, FULL, FULL],
    sliding_window=9,
    head_dim=16,
    global_head_dim=16,
    hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=131,
    rope_parameters={FULL: {**PLAIN, "rope_type": "proportional", "partial_rotary_factor": 0.5}, SEEN: PLAIN},
)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a head where the embedding is the head elsewhere": ("Gemma", {"tie_word_embeddings": False, "head_dim": 16}),
    "windows of Gemma 3 in any layers": (
        "Gemma3",
        {"layer_types": [FULL, SEEN, FULL], "sliding_window": 9, "rope_parameters": {FULL: PLAIN, SEEN: YARN}},
    ),
    "an OLMo 3 without windows": (
        "Olmo3",
        {"layer_types": [FULL] * 3, "attention_bias": True, "rope_parameters": {FULL: YARN, SEEN: PLAIN}},
    ),
    "a range of YaRN that is said of one kind": (
        "Olmo3",
        {
            "layer_types": [FULL, SEEN, SEEN],
            "sliding_window": 9,
            "rope_parameters": {FULL: {**YARN, "truncate": False}},
        },
    ),
    "windows of Cohere 2 in any layers": (
        "Cohere2",
        {"layer_types": [FULL, SEEN, FULL], "sliding_window": 9, "head_dim": 16, "tie_word_embeddings": False},
    ),
    "windows of EXAONE 4 in no layer": ("Exaone4", {"layer_types": [FULL] * 3, "sliding_window": 9}),
    "layers of SmolLM3 that are not rotated": ("SmolLM3", {"no_rope_layers": [0, 1, 0], "attention_bias": True}),
    "windows of Mixtral": ("Mixtral", {"sliding_window": 9, "num_local_experts": 4}),
    "windows of Qwen3 in the last layers": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "a Granite with biases of gates": ("Granite", {"attention_bias": True, "mlp_bias": True, "logits_scaling": 4.0}),
    "a SmolLM3 with biases of gates": ("SmolLM3", {"mlp_bias": True}),
    "a Seed-OSS with biases of gates": ("SeedOss", {"mlp_bias": True, "attention_bias": False}),
    "a Llama with biases of gates, not of heads": ("Llama", {"mlp_bias": True, "intermediate_size": 100}),
    "a Jais 2 without biases": ("Jais2", {"attention_bias": False, "mlp_bias": False}),
    "heads of ERNIE that are as wide as the stream": ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2}),
    "weights of LFM2 that are not normed": (
        "Lfm2Moe",
        {**MOE, "norm_topk_prob": False, "use_expert_bias": False, "layer_types": ["conv", FULL, "conv"]},
    ),
    "a factor on angles before Hunyuan's norms": (
        "HunYuanDenseV1",
        {"rope_parameters": YARN, "rms_norm_eps": 1e-2, "head_dim": 16},
    ),
    "a window beyond the context, whose layers are turned otherwise": (
        "Gemma3",
        {"sliding_window": 4096, "layer_types": [SEEN, FULL, SEEN], "rope_parameters": {FULL: YARN, SEEN: PLAIN}},
    ),
    "an FFN between experts": ("Qwen3Moe", {**MOE, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "experts that a list names": (
        "Glm4MoeLite",
        {
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1},
            **{"mlp_layer_types": ["sparse", "dense", "sparse"], "num_key_value_heads": 4, "q_lora_rank": 32},
            **{"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
        },
    ),
    "a gpt-oss that is not quantised": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 9},
    ),
    "angles that would change beyond the context": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "heads of Gemma 4 that are alike": ("Gemma4Text", GEMMA4),
    "rows of tokens in a Gemma 4 with experts": (
        "Gemma4Text",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 16,
            "enable_moe_block": True,
            **{"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
        },
    ),
}


def make_model(family: str, settings: dict[str, Any]) -> Any:
    """A model of transformers with random weights, norms among them."""
    of_config = {"Gemma3": "Gemma3Text"}.get(family, family)
    config = getattr(transformers, f"{of_config}Config")(**SIZES | settings)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(1)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    for name, weight in model.named_parameters():
        own = torch.randn_like(weight)
        weight.data.add_(0.3 * own) if weight.dim() < 2 else weight.data.copy_(own * weight.shape[-1] ** -0.5)
        if "embed" in name:
            weight.data.copy_(own)
    return model


def difference(model: Any, folder: Path) -> float:
    """The largest difference of a prompt's logits and single tokens', in standard deviations of those expected."""
    with torch.no_grad():
        expected = model.double()(torch.tensor([IDS])).logits[0]
    with open_engine(folder, kernels="fast", tokens=(1, 16)) as engine:
        got = torch.cat([engine.forward(ids, all_logits=True) for ids in (IDS[:67], *([token] for token in IDS[67:]))])
    return float((got - expected).abs().max() / expected.std())


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model = make_model(*CASES[case])
    model.save_pretrained(tmp_path)
    assert difference(model, tmp_path) < 1e-4


@pytest.mark.parametrize("copied", [False, True])
def test_a_head_beside_the_embedding_of_a_tied_folder(copied: bool, tmp_path: Path) -> None:
    """Another one counts, as in transformers; a copy is left out."""
    model = make_model("Llama", {"tie_word_embeddings": False})
    if copied:
        model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data)
    model.config.tie_word_embeddings = True
    model.save_pretrained(tmp_path)
    assert difference(model, tmp_path) < 1e-4
    with open_model(tmp_path) as file:
        assert ("output.weight" in {t.name for t in file.spec.unit("output").tensors}) != copied


def test_a_hybrid_with_attention_alone_keeps_no_states(tmp_path: Path) -> None:
    make_model("Lfm2", {"layer_types": [FULL] * 3}).save_pretrained(tmp_path)
    with open_engine(tmp_path, checkpoint_bytes=1 << 20) as engine:
        expected = engine.forward(IDS, all_logits=True)
        engine.reset(0, 9)
        engine.save(tmp_path / "cache")
        engine.reset(0)
        assert engine.load(tmp_path / "cache") == tuple(IDS[:9])
        assert torch.allclose(engine.forward(IDS[9:], all_logits=True), expected[9:], atol=1e-4)
