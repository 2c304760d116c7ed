"""What keys of GGUF headers mean: what llama.cpp b11549 computes with them, or a line that names the key."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import open_engine
from family_files import GGUF_NAMES, write_family
from family_forward import family_logits
from latent_files import random_tensors, write_latent_gguf
from model_files import write_gguf
from test_families import IDS, LONG, difference

from pshard.errors import UserError
from pshard.models import open_model

pytestmark = pytest.mark.usefixtures("exact_gelu")
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
NUMBERS = {
    "rope.scaling.yarn_attn_factor": 1.5,
    "rope.scaling.yarn_ext_factor": 0.5,
    "rope.scaling.yarn_beta_fast": 8.0,
    "rope.scaling.yarn_beta_slow": 4.0,
    "rope.scaling.yarn_log_multiplier": 0.5,
}


def keys_of(arch: str, keys: dict[str, Any]) -> dict[str, Any]:
    return {f"{arch}.{key}": value for key, value in keys.items()}


def test_numbers_of_yarn_that_llama_cpp_does_not_read_change_nothing(tmp_path: Path) -> None:
    recipe, weights, path = write_family(tmp_path / "m.gguf", "arcee", **keys_of("arcee", NUMBERS))
    with open_engine(path, context=LONG) as engine:
        assert difference(engine.forward(IDS, all_logits=True), family_logits(recipe, weights, IDS)) < 1e-5
    plain = keys_of("smollm3", {key: NUMBERS[key] for key in NUMBERS if "factor" in key})
    recipe, weights, path = write_family(tmp_path / "p.gguf", "smollm3", **plain)
    with open_engine(path, context=LONG) as engine:
        assert difference(engine.forward(IDS, all_logits=True), family_logits(recipe, weights, IDS)) < 1e-5


def test_a_multiplier_of_0_is_none_though_there_is_one_where_a_file_has_no_key(tmp_path: Path) -> None:
    none = keys_of("minicpm", {"embedding_scale": 0.0, "residual_scale": 0.0})
    recipe, weights, path = write_family(tmp_path / "m.gguf", "minicpm", **none)
    with open_engine(path, context=LONG) as engine:
        expected = family_logits(replace(recipe, embed=1.0, residual=1.0), weights, IDS)
        assert difference(engine.forward(IDS, all_logits=True), expected) < 1e-5


def test_ministral_reads_three_numbers_of_yarn(tmp_path: Path) -> None:
    with open_model(write_family(tmp_path / "m.gguf", "mistral3", **keys_of("mistral3", NUMBERS)).path) as file:
        rope = file.spec.config.rope
    assert (rope.beta_fast, rope.beta_slow) == (8.0, 4.0)
    assert rope.attention_factor == pytest.approx((1 + 0.1 * np.log(4)) / (1 + 0.05 * np.log(4)))


@pytest.mark.parametrize(
    ("family", "sections", "still"),
    [
        ("qwen3vl", [2, 3, 3, 0], (6, 14)),
        ("qwen3vl", [6, 5, 5, 0], ()),
        ("qwen2vl", [4, 4, 4, 4], (12, 13, 14, 15)),
        ("qwen2vl", [2, 1, 0, 1], (3, 7, 11, 15)),
        ("paddleocr", [8, 8, 4, 4], (20, 21, 22, 23)),
    ],
)
def test_pairs_that_turn_by_the_last_of_four_positions_stay(
    family: str, sections: list[int], still: tuple[int, ...], tmp_path: Path
) -> None:
    """In a text it is 0, and the others are equal."""
    said = keys_of(family, {"rope.dimension_sections": sections})
    recipe, weights, path = write_family(tmp_path / "m.gguf", family, **said)
    factors = tuple(1e30 if pair in still else 1.0 for pair in range(recipe.rotated // 2))
    expected = family_logits(replace(recipe, factors=factors), weights, IDS)
    with open_engine(path, context=LONG) as engine:
        assert difference(engine.forward(IDS, all_logits=True), expected) < 1e-5
    assert not still or difference(family_logits(recipe, weights, IDS), expected) > 1e-3


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("smollm3", {"rope.scaling.attn_factor": 0.0}, "rope.scaling.attn_factor is 0.0"),
    ("smollm3", {"rope.scaling.attn_factor": 1.25}, "rope.scaling.attn_factor is 1.25"),
    ("phi3", {"rope.scaling.factor": 2.0}, "rope.scaling.factor is 2 in a file with rope_factors_long.weight"),
    ("phi3", YARN, "rope.scaling.type is 'yarn'"),
    ("gemma2", {"attention.sliding_window_pattern": [False, True, False, True]}, "has windows in other layers"),
    ("gemma2", {"attention.sliding_window_pattern": 4}, "has windows in other layers"),
    ("gemma2", {"rope.dimension_count_swa": 16}, "rope.dimension_count_swa is 16"),
    ("gemma3", {"rope.dimension_count_swa": 16}, "rope.dimension_count_swa is 16"),
    ("gemma3", {"attention.key_length_swa": 16}, "attention.key_length_swa is 16"),
    ("gemma3", {"attention.value_length_swa": 16}, "attention.value_length_swa is 16"),
    ("gemma3", YARN | {"rope.scaling.attn_factor": 1.25}, "rope.scaling.attn_factor is 1.25"),
    ("gemma3", YARN | {"rope.scaling.factor": 0.5}, "rope.scaling.factor is 0.5, below 1"),
    ("gemma2", {"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, "rope.scaling.factor is 2, which counts in"),
    ("smallthinker", {"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, "scaling.factor is 2, which counts in"),
    *((name, {"rope.freq_base_swa": 500.0}, "freq_base_swa is 500.0") for name in ("cohere2", "olmo3", "exaone4")),
    ("qwen3vl", {"rope.dimension_sections": [8, 8]}, r"dimension_sections is \[8, 8\], not how many pairs"),
    ("minimax-m2", {"expert_weights_scale": 1.7}, "expert_weights_scale is 1.7"),
    ("smallthinker", {"expert_weights_scale": 1.7}, "expert_weights_scale is 1.7"),
    ("hunyuan-moe", {"expert_gating_func": 2}, "expert_gating_func is 2"),
    ("ernie4_5-moe", {"expert_gating_func": 3}, "expert_gating_func is 3"),
    ("granitemoe", {"expert_weights_scale": 1.7}, "expert_weights_scale is 1.7"),
    ("bailingmoe", {"expert_gating_func": 2}, "expert_gating_func is 2"),
    ("lfm2moe", {"expert_weights_scale": 1.7}, "expert_weights_scale is 1.7"),
    ("llama4", {"expert_group_count": 4, "expert_group_used_count": 2}, "expert_group_count is 4"),
]


@pytest.mark.parametrize(("family", "keys", "says"), REFUSED)
def test_a_key_that_changes_logits_and_is_not_computed_is_named(
    family: str, keys: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = write_family(tmp_path / "m.gguf", family, **keys_of(GGUF_NAMES.get(family, family), keys)).path
    with pytest.raises(UserError, match=says):
        open_model(path)


def test_oss_has_its_windows_in_every_other_layer(tmp_path: Path) -> None:
    for pattern in (2, [True, False]):
        said = {"gpt-oss.attention.sliding_window_pattern": pattern}
        open_model(write_gguf(tmp_path / "m.gguf", "gpt-oss", metadata=said)).close()
    for pattern in (4, [True, True]):
        said = {"gpt-oss.attention.sliding_window_pattern": pattern}
        with pytest.raises(UserError, match="has windows in other layers than the first of each 2"):
            open_model(write_gguf(tmp_path / "m.gguf", "gpt-oss", metadata=said))


def test_glm_may_have_positions_of_several_dimensions(tmp_path: Path) -> None:
    said = {"glm4moe.rope.dimension_sections": [4, 4, 4, 4]}
    with open_model(write_gguf(tmp_path / "m.gguf", "glm4moe", metadata=said)) as file:
        assert file.spec.config.rope.freq_factors == (1.0,) * 12 + (1e30,) * 4


@pytest.mark.parametrize(
    ("role", "shape"), [("layer_output_scale.weight", (1,)), ("ffn_down_exps.scale", (8,))], ids=["layer", "experts"]
)
def test_what_only_a_gemma4_multiplies_has_no_place_elsewhere(role: str, shape: tuple, tmp_path: Path) -> None:
    extra = {f"blk.0.{role}": np.full(shape, 1.5, np.float32)}
    with pytest.raises(UserError, match=f"blk.0.{role} has no place in architecture qwen3_moe"):
        open_model(write_gguf(tmp_path / "m.gguf", "qwen3moe", extra=extra))


@pytest.mark.parametrize(
    ("kind", "factor", "weight", "grows", "turns"),
    [
        ("yarn", 4.0, 0.1, 1 + 0.1 * np.log(4), 1.0),
        ("yarn", 4.0, 0.05, 1 + 0.05 * np.log(4), 1.0),
        ("yarn", 4.0, 0.0, 1 + 0.1 * np.log(4), 1 + 0.1 * np.log(4)),  # both, where no key says how much
        ("yarn", 4.0, None, 1 + 0.1 * np.log(4), 1 + 0.1 * np.log(4)),
        ("yarn", 0.5, None, 1.0, 1.0),
        ("linear", 2.0, None, 1 + 0.1 * np.log(2), None),
        ("none", 2.0, None, 1.0, None),
    ],
)
def test_scores_of_latents_grow_where_positions_are_stretched(
    kind: str, factor: float, weight: float | None, grows: float, turns: float | None, tmp_path: Path
) -> None:
    said = {
        "rope.scaling.type": kind, "rope.scaling.factor": factor, "rope.scaling.yarn_log_multiplier": weight,
        "rope.scaling.original_context_length": 64,
    }  # fmt: skip
    path = write_latent_gguf(tmp_path / "m.gguf", "v3", random_tensors("v3"), metadata=keys_of("deepseek2", said))
    with open_model(path) as file:
        config = file.spec.config
    assert config.latent and config.latent.score_scale == pytest.approx(grows**2)
    assert config.rope.attention_factor == (None if turns is None else pytest.approx(turns))
