"""Gemma 4's logits equal a float64 forward written from a recipe, wherever its units are, and transformers'."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import open_engine
from gemma4_files import (
    GEMMAS,
    Gemma4,
    Weights,
    gemma4_logits,
    make_gemma4,
    write_gemma4,
    write_gemma4_folder,
    write_published_config,
)
from plan_samples import make_tier
from thread_ranks import mixed_tiers, random_tiers, run_ranks, split_tiers

from pshard.errors import UserError
from pshard.models import open_model
from pshard.runtime.engine import Engine

pytestmark = pytest.mark.usefixtures("exact_gelu")
RNG = random.Random(0)
IDS = [RNG.randrange(320) for _ in range(100)]
LONG = 512
CLOSE = 3e-5  # of the logits' deviation: scores are not scaled, so differences of angles and sums grow


@pytest.fixture(params=GEMMAS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def recipe(name: str) -> Gemma4:
    return GEMMAS[name]


@pytest.fixture
def weights(recipe: Gemma4) -> Weights:
    return make_gemma4(recipe)


def difference(found: np.ndarray | torch.Tensor, expected: np.ndarray) -> float:
    """The largest difference, in standard deviations of the expected logits."""
    return float(np.abs(np.asarray(found) - expected).max() / expected.std())


def run(engine: Engine) -> torch.Tensor:
    """Logits of all ids: of a prompt, and of single tokens."""
    return torch.cat([engine.forward(part, all_logits=True) for part in (IDS[:90], *([i] for i in IDS[90:]))])


@pytest.mark.quick("mixed")
def test_logits_equal_a_float64_forward(recipe: Gemma4, weights: Weights, tmp_path: Path) -> None:
    path = write_gemma4(tmp_path / "m.gguf", recipe, weights)
    with open_engine(path, context=LONG) as engine:  # the fast kernels run below, wherever units are
        assert difference(run(engine), gemma4_logits(recipe, weights, IDS)) < CLOSE


MISTAKES = {
    "dense": [{"window": 19}, {"window": 21}, {"cap": 1e9}, {"turned": 4}, {"thetas": (300.0, 7e3)}, {"eps": 1e-6}],
    "mixed": [{"experts": (8, 2, 64)}],
    "small": [{"window": 19}, {"eps": 1e-6}],
}  # fmt: skip
LEFT_OUT = {
    "dense": ["blk.1.layer_output_scale.weight", "blk.0.attn_q_norm.weight", "blk.2.post_ffw_norm.weight"],
    "mixed": [
        "blk.0.ffn_gate_inp.scale", "blk.0.ffn_down_exps.scale", "blk.0.pre_ffw_norm_2.weight",
        "blk.1.post_ffw_norm_1.weight", "blk.1.post_ffw_norm_2.weight",
    ],
    "small": ["per_layer_proj_norm.weight", "blk.0.post_norm.weight"],
}  # fmt: skip


@pytest.mark.slow
def test_every_easy_mistake_would_show(name: str, recipe: Gemma4, weights: Weights) -> None:
    expected = gemma4_logits(recipe, weights, IDS)
    for mistake in MISTAKES[name]:
        assert difference(gemma4_logits(replace(recipe, **mistake), weights, IDS), expected) > 1e-3, mistake
    for left_out in LEFT_OUT[name]:
        other = weights | {left_out: np.ones_like(weights[left_out])}
        assert difference(gemma4_logits(recipe, other, IDS), expected) > 1e-3, left_out
    assert difference(gemma4_logits(replace(recipe, table=True), weights, IDS), expected) > 1e-4, "GELU by a table"


@pytest.mark.quick("small-cpu")
@pytest.mark.parametrize("place", ["streamed", "cpu", "pinned"])
def test_every_placement_gives_the_same_logits(place: str, recipe: Gemma4, weights: Weights, tmp_path: Path) -> None:
    path, expected = write_gemma4(tmp_path / "m.gguf", recipe, weights), gemma4_logits(recipe, weights, IDS)
    with open_model(path) as file:
        spec = file.spec
    where = {}
    for unit in spec.units:
        wished = place, "host" if unit.kind.state else None
        where[unit.name] = wished if wished in unit.kind.places else ("pinned", "vram" if unit.kind.state else None)
    tiers = tuple(make_tier(spec, n, where, 2, LONG, 1, batch=64) for n in (1, 64))
    with open_engine(path, tiers, "fast", LONG) as engine:
        assert difference(run(engine), expected) < CLOSE
        engine.reset(0, 60)  # what the next token sees of windows may be gone: computed again
        assert difference(engine.forward(IDS[60:], all_logits=True), expected[60:]) < CLOSE
        engine.save(tmp_path / "cache")
        engine.reset(0)
        assert engine.load(tmp_path / "cache") == tuple(IDS)
        assert difference(engine.forward([IDS[0]])[None], gemma4_logits(recipe, weights, [*IDS, IDS[0]])[-1:]) < CLOSE


@pytest.mark.quick("dense")
def test_logits_equal_transformers(recipe: Gemma4, weights: Weights, tmp_path: Path) -> None:
    model = write_gemma4_folder(tmp_path / "hf", recipe, weights)
    with torch.no_grad():
        expected = model.double()(torch.tensor([IDS])).logits[0].numpy()
    assert difference(gemma4_logits(recipe, weights, IDS), expected) < CLOSE
    for published in (False, True):
        if published:
            write_published_config(tmp_path / "hf", recipe)
        with open_engine(tmp_path / "hf", context=LONG) as engine:
            assert difference(engine.forward(IDS, all_logits=True), expected) < CLOSE


@pytest.mark.parametrize(
    ("shares", "mode", "name"),
    [*(((1.0, 0.0, 3.0), "tensor", name) for name in GEMMAS), ((2.0, 1.0), "layer", "small")],
    ids=str,
)
def test_ranks_give_the_same_logits(
    shares: tuple[float, ...], mode: str, name: str, recipe: Gemma4, weights: Weights, tmp_path: Path
) -> None:
    path, expected = write_gemma4(tmp_path / "m.gguf", recipe, weights), gemma4_logits(recipe, weights, IDS)
    mixed = mixed_tiers(1, LONG) if recipe.experts[0] else split_tiers(1, LONG)
    for found in run_ranks(path, shares, run, LONG, random_tiers(5, LONG) if mode == "tensor" else mixed, mode=mode):
        assert difference(found, expected) < CLOSE


def test_logits_are_capped_at_30_where_a_file_does_not_say(tmp_path: Path) -> None:
    recipe = GEMMAS["mixed"]
    weights = make_gemma4(recipe)
    path = write_gemma4(tmp_path / "m.gguf", recipe, weights, **{"gemma4.final_logit_softcapping": None})
    expected = gemma4_logits(replace(recipe, cap=30.0), weights, IDS)
    with open_engine(path, context=LONG) as engine:
        assert difference(run(engine), expected) < CLOSE


def test_several_texts_of_a_file_of_small_types_stay_apart(tmp_path: Path) -> None:
    recipe = GEMMAS["dense"]
    path = write_gemma4(tmp_path / "m.gguf", recipe, make_gemma4(recipe), "Q8_0")
    texts = [IDS[:40], IDS[30:70]]
    alone = []
    for text in texts:
        with open_engine(path, context=LONG) as engine:
            alone.append(engine.forward(text))
    with open_engine(path, context=LONG, sequences=2) as engine:
        engine.forward([texts[0][:30], texts[1][:5]])
        found = engine.forward([texts[0][30:], texts[1][5:]])
    assert torch.allclose(torch.stack(found), torch.stack(alone), atol=1e-4)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("attention.shared_kv_layers", 5, "shared_kv_layers is 5, which leaves layers without one like them"),
        ("attention.shared_kv_layers", 3, "shared_kv_layers is 3, which leaves layers without one like them"),
        ("embedding_length_per_layer_input", 32, "tensor per_layer_token_embd.weight of shape .* is missing"),
        ("attention.sliding_window_pattern", [True, False], "sliding_window_pattern has 2 values for 5 layers"),
        ("attention.sliding_window_pattern", [True] * 5, "or leaves none of either"),
        ("attention.head_count_kv", [2, 1, 1, 2, 1], "head_count_kv differs among layers with a window"),
        ("attention.head_count_kv", [3, 3, 1, 3, 1], "head_count is 4, not a multiple of the 3 KV heads"),
        ("feed_forward_length", [160, 0, 160, 160, 160], "is no list of whole numbers from 1 on"),
        ("rope.dimension_count_swa", 8, "in layers with a window, which are not turned as a whole"),
    ],
)
def test_what_a_file_says_wrongly_of_layers_is_named(key: str, value: object, says: str, tmp_path: Path) -> None:
    recipe = GEMMAS["dense"]
    path = write_gemma4(tmp_path / "m.gguf", recipe, make_gemma4(recipe), **{f"gemma4.{key}": value})
    with pytest.raises(UserError, match=says):
        open_model(path)
