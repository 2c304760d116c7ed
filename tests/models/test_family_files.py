"""Files of the families as publishers have them: what is nested, left out or the other way round is read right."""

import contextlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import family_files
import gguf
import numpy as np
import pytest
import torch
from family_files import FAMILIES, GGUF_NAMES, IN_FOLDERS, RECIPES, REMOTE, hf_settings, write_bare_folder, write_family
from safetensors.numpy import load_file, save_file

from pshard.errors import UserError
from pshard.model_config import Rope, Temperature
from pshard.models import open_model
from pshard.models.architectures import find_gguf_architecture, find_hf_architecture
from pshard.models.gguf_config import gguf_config
from pshard.models.gguf_header import read_gguf
from pshard.models.hf_config import hf_config
from pshard.runtime.blocks.rope_table import inverse_frequencies

TYPES = {
    "lfm2moe": "lfm2_moe", "laguna-m": "laguna", "mimo2": "mimo_v2_flash", "step35": "step3p5",
    "minimax-m2": "minimax_m2", "command-r": "cohere", "exaone-moe": "exaone_moe", "command-r-plus": "cohere",
    "stablelm-12b": "stablelm", "hunyuan-dense": "hunyuan_v1_dense", "hunyuan-moe": "hunyuan_v1_moe",
    "qwen2vl": "qwen2_vl_text", "paddleocr": "paddleocr_vl_text", "ernie4_5-moe": "ernie4_5_moe",
    "qwen3vl": "qwen3_vl_text", "qwen3vlmoe": "qwen3_vl_moe_text", "mistral3": "ministral3", "gemma3": "gemma3_text",
    "llama4": "llama4_text", "llama-biased": "llama",
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("exact_gelu")


def published(family: str) -> dict[str, Any]:
    """The config.json of a family: the text part's settings, nested where it sees."""
    settings = hf_settings(family)
    text = settings.get("text_config", settings) | {"model_type": TYPES.get(family, family)}
    return {"model_type": "a whole", "text_config": text} if "text_config" in settings else text


@pytest.mark.parametrize("family", IN_FOLDERS)
def test_both_formats_of_a_family_meet_in_one_spec(family: str, tmp_path: Path) -> None:
    """GGUF files have rows for other pairs, numbers in float32, and say otherwise how positions are scaled."""
    folder = write_bare_folder(tmp_path / "hf", family, published(family))
    with open_model(folder) as a, open_model(write_family(tmp_path / "m.gguf", family).path) as b:
        assert [unit.likeness for unit in a.spec.units] == [unit.likeness for unit in b.spec.units]
        first, second = vars(a.spec.config), vars(b.spec.config)
    assert a.spec.config.scores_by == pytest.approx(b.spec.config.scores_by)
    for name in {f.name for f in fields(a.spec.config)} - {
        "architecture",
        "score_scale",
        "sliding_window" if family == "phi3" else "",
    }:
        found, expected = first[name], second[name]
        if isinstance(found, Rope):
            (ours, scale), (theirs, other) = (inverse_frequencies(rope, 512) for rope in (found, expected))
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
            assert scale == pytest.approx(other)
        elif isinstance(found, float):
            assert found == pytest.approx(expected), name
        elif isinstance(found, Temperature):
            assert (found.scale, found.span) == pytest.approx((expected.scale, expected.span))
        else:
            assert found == expected, name


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("laguna", "attention.head_count", [4, 6, 6, 6]),
        ("laguna", "attention.head_count", [4, 6, 6, 8, 4]),
        ("laguna", "attention.sliding_window_pattern", [True, True, True, False, False]),
        ("mimo2", "attention.value_length", 64),
        ("mimo2", "attention.sliding_window_pattern", [0, 1, 2, 0]),
        ("mimo2", "rope.dimension_count_swa", 32),
        ("step35", "swiglu_clamp_exp", [0.0] * 4),
        ("step35", "swiglu_clamp_shexp", [0.0, -1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_what_lists_say_of_layers_is_read_or_refused_by_name(
    family: str, key: str, value: object, tmp_path: Path
) -> None:
    path = write_family(tmp_path / "m.gguf", family, **{f"{family}.{key}": value}).path
    with pytest.raises(UserError, match=f"{family}.{key} "):
        open_model(path)


def test_step_s_older_settings_mean_the_same(tmp_path: Path) -> None:
    """As its publisher has them: other names, lists that go on for layers that draft, angles beside each other."""
    now = published("step35")["text_config"]
    older = dict(now) | {"num_nextn_predict_layers": 2, "hidden_act": "swigluoai"}
    kinds, rope = [*now["layer_types"], "full_attention", "full_attention"], older.pop("rope_parameters")
    full, local = rope["full_attention"], rope["sliding_attention"]
    of_layers = [local if kind == "sliding_attention" else full for kind in kinds]
    older |= {
        "layer_types": kinds, "moe_layers_enum": "2,3,4,5,6", "moe_num_experts": older.pop("n_routed_experts"),
        "moe_top_k": older.pop("num_experts_per_tok"), "num_attention_groups": older.pop("num_key_value_heads"),
        "attention_other_setting": {"num_attention_heads": older.pop("num_sliding_attention_heads")},
        "swiglu_limits": [*older["swiglu_limits"], 0.0, 0.0], "rope_theta": [own["rope_theta"] for own in of_layers],
        "partial_rotary_factors": [own["partial_rotary_factor"] for own in of_layers],
    }  # fmt: skip
    del older["mlp_layer_types"]
    found = [hf_config(find_hf_architecture("step3p5", "a"), settings, "a") for settings in (now, older)]
    assert found[0] == found[1]
    assert found[0].window_heads == 6 and found[0].experts and found[0].experts.limits == (0.0, 0.0, 0.0, 0.25, 0.5)


def test_scores_of_gemma3_of_62_layers_are_scaled_by_its_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for layers, width in ((6, 32), (62, 64 / 4)):
        recipe = replace(RECIPES["gemma3"], layers=layers, d=64, head=32, ffn=32)
        monkeypatch.setitem(RECIPES, "gemma3", recipe)
        with open_model(write_family(tmp_path / f"{layers}.gguf", "gemma3").path) as file:
            assert file.spec.config.scores_by == pytest.approx(width**-0.5)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("family", ["qwen3vl", "gemma3", "mistral3"])
def test_the_part_that_sees_is_left_out_with_a_line(family: str, prefix: str, tmp_path: Path) -> None:
    text = published(family)
    settings = text if "text_config" in text else {"model_type": "a whole", "text_config": text}
    bare = write_bare_folder(tmp_path / "bare", family, text.get("text_config", text))
    with open_model(write_bare_folder(tmp_path / "hf", family, settings, prefix)) as whole, open_model(bare) as alone:
        assert whole.notes == ("the model's vision part is left out; it is not supported yet",)
        assert not alone.notes
        assert whole.spec.units == alone.spec.units and whole.spec.config == alone.spec.config
        for name in (t.name for unit in whole.spec.units for t in unit.tensors if not t.parts):
            np.testing.assert_array_equal(whole.tensor_bytes(name), alone.tensor_bytes(name))


def test_gemma3_of_transformers_4_says_its_positions_beside(tmp_path: Path) -> None:
    new = published("gemma3")
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}  # fmt: skip
    with open_model(write_bare_folder(tmp_path / "new", "gemma3", new)) as a:
        for left_out in ((), ("rope_theta",), ("rope_local_base_freq", "sliding_window_pattern", "rms_norm_eps")):
            settings = {key: value for key, value in old.items() if key not in left_out}
            with open_model(write_bare_folder(tmp_path / f"old{len(left_out)}", "gemma3", settings)) as b:
                assert a.spec.config == b.spec.config


def test_experts_lie_either_way_round(tmp_path: Path) -> None:
    straight = write_bare_folder(tmp_path / "straight", "qwen3vlmoe", published("qwen3vlmoe"))
    turned = write_bare_folder(tmp_path / "turned", "qwen3vlmoe", published("qwen3vlmoe"))
    tensors = load_file(turned / "model.safetensors")
    tensors = {n: np.ascontiguousarray(v.swapaxes(1, 2)) if v.ndim == 3 else v for n, v in tensors.items()}
    save_file(tensors, turned / "model.safetensors")
    with open_model(straight) as a, open_model(turned) as b:
        assert a.spec.units == b.spec.units
        for role in ("gate", "up", "down"):
            name = f"blk.1.ffn_{role}_exps.weight"
            for part in range(8):
                np.testing.assert_array_equal(a.part_bytes(name, part), b.part_bytes(name, part))


@pytest.mark.parametrize(
    ("family", "keys", "says"),
    [
        ("gemma3", {"gemma3.attention.sliding_window_pattern": 4}, "windows in other layers than all but the last"),
        ("gemma3", {"gemma3.final_logit_softcapping": 30.0}, "final_logit_softcapping is 30"),
        ("granite", {"granite.rope.scaling.finetuned": False}, "rope.scaling.finetuned is False"),
        ("glm4", {"glm4.rope.dimension_sections": [4, 2, 2, 0]}, r"rope.dimension_sections is \[4"),
        ("smollm3", {"smollm3.attention.temperature_scale": 0.1}, "attention.temperature_scale is 0.1"),
        ("cohere2", {"cohere2.attention.scale": 0.5}, "attention.scale is 0.5"),
        ("seed_oss", {"seed_oss.attention.scale": 0.5}, "attention.scale is 0.5"),
        ("internlm2", {"internlm2.expert_count": 8}, "expert_count is 8"),
        ("llama4", {"llama4.expert_used_count": 2}, "expert_used_count is 2"),
        ("deci", {"deci.feed_forward_length": [192, 96, 256, 0, 0, 128]}, "is 0 in a layer with attention"),
        ("deci", {"deci.attention.head_count_kv": [3, 0, 0, 1, 0, 4]}, "is 4 in a layer with 3 KV heads"),
        ("deci", {"deci.attention.head_count_kv": [0] * 6}, "attention.head_count_kv is 0 in all layers"),
        ("deci", {"deci.attention.head_count": [4, 4]}, "has 2 values for 6 layers"),
        ("llama4", {"llama4.attention.sliding_window_pattern": 2}, "has windows in other layers"),
        ("exaone-moe", {"exaone-moe.attention.sliding_window": 0}, "no key says how long these are"),
        ("refact", {"refact.attention.head_count": 2**31 - 1}, "attn_q.weight has shape"),
        ("olmo", {"olmo.embedding_length": 2**31 - 1}, "token_embd.weight has shape"),
        ("olmo", {"olmo.attention.cl\u00e1mp_kqv": 0.5}, r"key olmo.attention.cl\S*mp_kqv is no ASCII text"),
    ],
)
def test_what_metadata_says_and_is_not_computed_is_refused(
    family: str, keys: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        open_model(write_family(tmp_path / "m.gguf", family, **keys).path)


@pytest.mark.parametrize(
    ("family", "keys", "says"),
    [
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types does not say of each of 6 layers"),
        ("lfm2", {"layer_types": [["conv"]] * 4}, "layer_types has others than conv and full_attention"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [0, 4]}, "full_attn_idxs is no list of layers of 4"),
        ("gemma3", {"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm is True"),
        ("cohere2", {"sliding_window_pattern": "LG"}, "sliding_window_pattern is 'LG', not a whole number"),
        (
            "exaone4",
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 4},
            "sliding_window does not say how long these are",
        ),
        (
            "hy_v3",
            {"mlp_layer_types": ["sparse", "dense"]},
            "mlp_layer_types does not say of each of 3 layers",
        ),
        ("hy_v3", {"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types leaves none of 3 layers with experts"),
        ("ernie4_5-moe", {"moe_layer_end_index": 2}, "moe_layer_end_index is 2"),
        ("ernie4_5-moe", {"moe_layer_interval": 9}, "one of 9 layers has experts, of 4: that leaves none"),
        ("smollm3", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers does not say of each of"),
        ("llama4", {"no_rope_layers": [1, 0]}, "no_rope_layers does not say of each of 4 layers"),
        ("llama4", {"layer_types": ["chunked_attention"] * 4}, "layer_types has chunks in layers that are not rotated"),
        ("llama4", {"attention_chunk_size": None}, "attention_chunk_size is missing, but layers see chunks"),
        ("llama4", {"moe_layers": [0, 1]}, "moe_layers does not name the last of each so many of 4 layers"),
        ("llama4", {"num_experts_per_tok": 2}, "num_experts_per_tok is 2"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "long_factor is no list"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial"),
        ("olmo", {"layer_norm_eps": 1e-6}, "layer_norm_eps is 1e-06"),
    ],
)
def test_what_a_folder_says_and_is_not_computed_is_refused(
    family: str, keys: dict[str, Any], says: str, tmp_path: Path
) -> None:
    like = "smollm3" if family == "llama" else family
    settings = published(like) | ({"model_type": "llama"} if family == "llama" else {})
    with pytest.raises(UserError, match=says):
        open_model(write_bare_folder(tmp_path / "hf", like, settings | keys))


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("qwen3vlmoe", {"routed_scaling_factor": 3.0, "moe_layers": [1], "moe_k": 1}),
        ("olmo3", {"sliding_window_pattern": 2, "use_sliding_window": False, "original_max_position_embeddings": 9}),
        ("cohere2", {"no_rope_layers": [1, 1, 0, 0], "no_rope_layer_interval": 2, "qk_layernorm": True}),
        ("hunyuan-moe", {"num_shared_experts": 2, "first_k_dense_replace": 1, "num_dense_layers": 1}),
        ("nemotron", {"layer_norm_eps": 0.01, "norm_epsilon": 0.01, "rotary_dim": 8}),
        ("gemma", {"query_pre_attn_scalar": 16, "n_group": 2}),
        ("dots1", {"topk_method": "greedy", "router_scaling_factor": 2.0, "decoder_sparse_step": 2}),
        ("mimo2", {"use_expert_bias": False, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ],
)
def test_keys_that_the_class_of_a_family_does_not_read_say_nothing(family: str, keys: dict[str, Any]) -> None:
    settings = published(family)
    settings = settings.get("text_config", settings)
    arch = find_hf_architecture(settings["model_type"], "config.json")
    assert hf_config(arch, settings | keys, "config.json") == hf_config(arch, settings, "config.json")


@pytest.mark.parametrize("family", ["granite", "gemma3"])
def test_scaling_of_transformers_4_counts_beside_what_5_says(family: str) -> None:
    """In place of it, or joined with that of layers with full attention."""
    settings = published(family)
    arch = find_hf_architecture(settings["model_type"], "config.json")
    config = hf_config(arch, settings | {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}, "config.json")
    assert (config.rope.scaling, config.rope.factor) == ("linear", 3.0)
    if family == "gemma3":
        assert config.window_rope and config.window_rope.factor == 1.0
        with pytest.raises(UserError, match="rope_scaling has type"):
            hf_config(arch, settings | {"rope_scaling": {"type": "linear", "factor": 3.0}}, "config.json")


@pytest.mark.parametrize("family", REMOTE)
def test_a_folder_with_code_of_its_own_is_refused_by_name(family: str, tmp_path: Path) -> None:
    folder = write_bare_folder(tmp_path / "hf", family, published(family))
    with pytest.raises(UserError, match=f"architecture '{family}' is not supported yet"):
        open_model(folder)


@pytest.mark.parametrize(("name", "lacks"), [("deepseek4", "hyper-connections"), ("nemotron_h", "Mamba-2")])
def test_a_model_with_what_is_not_computed_is_refused_with_its_name(name: str, lacks: str) -> None:
    for find in (find_gguf_architecture, find_hf_architecture):
        with pytest.raises(UserError, match=f"'{name}' is not supported yet: it has .*{lacks}.*; take another model"):
            find(name, "m.gguf")


def test_minicpm_without_multipliers_has_those_of_its_first_models(tmp_path: Path, monkeypatch) -> None:
    """As MiniCPM-2B was trained: embeddings 12, residuals 1.4 / sqrt(layers), logits 256 / width."""
    monkeypatch.setitem(family_files._OWN_KEYS, "minicpm", lambda recipe: {})
    with open_model(write_family(tmp_path / "m.gguf", "minicpm").path) as file:
        config, residual = file.spec.config, 1.4 / 2**0.5
    assert config.embedding_scale * residual == pytest.approx(12.0)
    assert config.norm_eps * residual**2 == pytest.approx(RECIPES["minicpm"].eps)
    assert config.logit_scale == pytest.approx(256 / RECIPES["minicpm"].d)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_qwen2vl_has_its_text_settings_beside_its_sight(model_type: str, tmp_path: Path) -> None:
    """Published folders: no text_config, and a kind of positions that is plain for text."""
    nested = published("qwen2vl")
    old = {key: value for key, value in nested["text_config"].items() if key != "rope_parameters"}
    old |= {"model_type": model_type, "rope_theta": 1e6, "vision_config": {"depth": 1}, "use_sliding_window": False,
            "sliding_window": 64, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}  # fmt: skip
    new_folder = write_bare_folder(tmp_path / "new", "qwen2vl", nested, "model.language_model.")
    with open_model(new_folder) as a, open_model(write_bare_folder(tmp_path / "old", "qwen2vl", old)) as b:
        assert replace(a.spec.config, architecture=model_type) == b.spec.config
        assert [unit.likeness for unit in a.spec.units] == [unit.likeness for unit in b.spec.units]


def test_gemma_says_gelu_and_means_its_approximation(tmp_path: Path) -> None:
    """Folders of Gemma's first release, which leave out what its class has anyway."""
    settings = {k: v for k, v in published("gemma").items() if k not in ("tie_word_embeddings", "rms_norm_eps")}
    old = settings | {"hidden_act": "gelu", "rope_theta": 1e4, "rope_parameters": None}
    new_folder = write_bare_folder(tmp_path / "new", "gemma", published("gemma"))
    with open_model(write_bare_folder(tmp_path / "old", "gemma", old)) as a, open_model(new_folder) as b:
        assert a.spec.config == b.spec.config
    with pytest.raises(UserError, match="hidden_act is 'relu'"):
        open_model(write_bare_folder(tmp_path / "relu", "gemma", old | {"hidden_act": "relu"}))


def test_ernie_counts_its_shared_experts_and_leaves_out_what_drafts(tmp_path: Path) -> None:
    """Its converter writes a length of shared experts that is right for one size only: the count says it."""
    wrong = {"ernie4_5-moe.expert_shared_feed_forward_length": 64}
    folder = write_bare_folder(tmp_path / "hf", "ernie4_5-moe", published("ernie4_5-moe"))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.mtp_linear_proj.0.weight": np.ones((4, 4), np.float32)}, folder / "model.safetensors")
    with open_model(write_family(tmp_path / "m.gguf", "ernie4_5-moe", **wrong).path) as a, open_model(folder) as b:
        assert a.spec.config.experts and a.spec.config.experts.d_shared == 128
        assert [unit.likeness for unit in a.spec.units] == [unit.likeness for unit in b.spec.units]
        assert b.notes == (
            "the model's multi-token head, which drafts further tokens, is left out; it is not supported yet",
        )


@pytest.mark.parametrize(("family", "shared"), [("granitemoe", 0), ("hy_v3", 64)])
def test_files_may_leave_out_how_many_experts_are_shared(family: str, shared: int, tmp_path: Path) -> None:
    header = read_gguf(write_family(tmp_path / "m.gguf", family).path)
    keys = {key: value for key, value in header.metadata.items() if "expert_shared" not in key}
    experts = gguf_config(find_gguf_architecture(family, "m", True), keys, header.tensors, "m.gguf").experts
    assert experts and experts.d_shared == shared


ODD: list[Any] = [0, -1, 1, 2, 7, 2**31, 2**63, 1e-9, 0.5, 3e38, "x", "yarn", "longrope", "", [], [0], [1, 2], [5] * 6,
                  True, None, {}, {"full_attention": 5}]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_damaged_settings_end_in_one_line(family: str, tmp_path: Path) -> None:
    """Every setting with every odd value: it is read, or a UserError; never anything else."""
    header = read_gguf(write_family(tmp_path / "m.gguf", family).path)
    called = GGUF_NAMES.get(family, family)
    arch = find_gguf_architecture(called, "m.gguf", has_experts=bool(RECIPES[family].experts.count))
    further = ("attention.sliding_window_pattern", "rope.dimension_sections", "attention.scale", "rope.freq_base_swa")
    for key in (*header.metadata, *(f"{called}.{name}" for name in further)):
        for value in ODD:
            with contextlib.suppress(UserError):
                gguf_config(arch, {**header.metadata, key: value}, header.tensors, "m.gguf")
    if family in REMOTE:
        return
    settings = published(family)
    text = settings.get("text_config", settings)
    text |= {"rope_scaling": None, "layer_types": None, "no_rope_layers": None, "sliding_window_pattern": None}
    folder_arch = find_hf_architecture(text["model_type"], "config.json")
    for key in text:
        for value in ODD:
            with contextlib.suppress(UserError):
                hf_config(folder_arch, {**text, key: value}, "config.json")
    rope = text["rope_parameters"]
    for key in (*rope, "factor", "original_max_position_embeddings", "llama_4_scaling_beta", "mscale_all_dim"):
        for value in ODD:
            with contextlib.suppress(UserError):
                hf_config(folder_arch, {**text, "rope_parameters": {**rope, key: value}}, "config.json")


def test_fused_tensors_must_have_all_rows(tmp_path: Path) -> None:
    folder = write_bare_folder(tmp_path / "hf", "phi3", published("phi3"))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.qkv_proj.weight"
    tensors[name] = tensors[name][:-1]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"qkv_proj.*has shape \[255, 128\], not the \[256, 128\]"):
        open_model(folder)


@pytest.mark.parametrize("family", ["phi3", "glm4"])
def test_quantised_rows_of_fused_tensors_come_apart(family: str, tmp_path: Path) -> None:
    _, weights, path = write_family(tmp_path / "m.gguf", family, qtype="Q8_0")
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    with open_model(path) as file:
        for role in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"):
            name = f"blk.1.{role}.weight"
            expected = gguf.quants.quantize(weights[name].astype(np.float32), q8_0)
            np.testing.assert_array_equal(file.tensor_bytes(name), expected)
