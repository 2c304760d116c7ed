"""qwen4exp's logits equal a float64 forward written from formulas, wherever its units are, and transformers'."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import open_engine
from plan_samples import make_tier
from qwen4exp_files import (
    MISTAKES,
    RECIPES,
    VOCAB,
    Recipe,
    Weights,
    make_weights,
    qwen4exp_logits,
    read_tensors,
    write_qwen4exp,
)
from thread_ranks import Tiers, mixed_tiers, random_tiers, run_ranks

from pshard.batch import VERIFY
from pshard.errors import UserError
from pshard.models import open_model
from pshard.runtime.engine import Engine
from pshard.runtime.texts.text import Piece

RNG = random.Random(0)
IDS = [RNG.randrange(VOCAB) for _ in range(110)]
LONG = 512
CLOSE = 1e-5  # of the logits' deviation


@pytest.fixture(params=RECIPES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def recipe(name: str) -> Recipe:
    return RECIPES[name]


@pytest.fixture
def ids(recipe: Recipe) -> list[int]:
    """With ends of texts among them, which n-grams do not cross."""
    end = recipe.grams[4]
    return [end if at in (20, 92, 104) else token for at, token in enumerate(IDS)]


@pytest.fixture
def weights(recipe: Recipe) -> Weights:
    return make_weights(recipe)


@pytest.fixture
def path(recipe: Recipe, weights: Weights, tmp_path: Path) -> Path:
    return write_qwen4exp(tmp_path / "m.gguf", recipe, weights)


def difference(found: np.ndarray | torch.Tensor, expected: np.ndarray) -> float:
    """The largest difference, in standard deviations of the expected logits."""
    return float(np.abs(np.asarray(found) - expected).max() / expected.std())


def run(engine: Engine, ids: list[int]) -> torch.Tensor:
    """Logits of all ids: of a prompt in two pieces, and of single tokens."""
    parts = ids[:50], ids[50:97], *([token] for token in ids[97:])
    return torch.cat([engine.forward(part, all_logits=True) for part in parts])


@pytest.mark.quick("other-fast")
@pytest.mark.parametrize("kernels", ["plain", "fast"])
def test_logits_equal_a_float64_forward(
    kernels: str, recipe: Recipe, weights: Weights, path: Path, ids: list[int]
) -> None:
    with open_engine(path, context=LONG, kernels=kernels) as engine:
        assert difference(run(engine, ids), qwen4exp_logits(recipe, weights, ids)) < CLOSE


def test_logits_equal_transformers(recipe: Recipe, weights: Weights, ids: list[int]) -> None:
    pytest.importorskip("transformers.models.qwen4_exp", reason="this transformers does not know qwen4_exp")
    from qwen4exp_folder import build_reference

    with torch.no_grad():
        expected = build_reference(recipe, weights)(torch.tensor([ids])).logits[0].numpy()
    assert difference(qwen4exp_logits(recipe, weights, ids), expected) < CLOSE


@pytest.mark.parametrize(("parts", "gate", "seed"), [(1, "sigmoid", 1234), (5, "silu", 7)])
def test_folders_give_the_logits_of_transformers(
    parts: int, gate: str, seed: int, recipe: Recipe, weights: Weights, ids: list[int], tmp_path: Path
) -> None:
    pytest.importorskip("transformers.models.qwen4_exp", reason="this transformers does not know qwen4_exp")
    from qwen4exp_folder import leave_out, save_folder

    model = save_folder(tmp_path / "folder", recipe, weights, parts, output_gate_type=gate, seed=seed)
    if parts > 1:  # then what they hold follows from the settings
        leave_out(tmp_path / "folder", "layer_multipliers", "vocab_sizes", "heads_offsets")
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    with open_engine(tmp_path / "folder", context=LONG, kernels="fast") as engine:
        assert difference(run(engine, ids), expected) < CLOSE


@pytest.mark.parametrize(
    ("changed", "lacking", "told"),
    [
        ({"ple_layer_ids": [1, 2]}, "none", "ple_layer_ids is [1, 2], where n-grams in one layer are supported"),
        ({"ple_layer_ids": [9]}, "none", "ple_layer_ids is [9], which is none of 4 layers"),
        ({"ple_embed_dim": 190}, "none", "ple_embed_dim is 190, which 6 rows a token do not divide"),
        ({"eos_token_id": None}, "none", "eos_token_id is None, not a token"),
        ({"indexer_kv_heads": 2}, "none", "indexer_kv_heads"),
        ({"indexer_compress_ratio": 3}, "none", "indexer_compress_ratio has blocks of 3 tokens"),
        ({"output_gate_type": "tanh"}, "none", "output_gate_type is 'tanh', where silu and sigmoid are supported"),
        ({"ngram_vocab_size_base": 90}, "offsets", "ngram_vocab_size_base reaches"),
        ({}, "shard_1.weight", "is one of 3 pieces, of which 1 are missing"),
    ],
)  # fmt: skip
def test_folders_that_do_not_fit_are_refused(
    changed: dict[str, object], lacking: str, told: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers.models.qwen4_exp", reason="this transformers does not know qwen4_exp")
    from qwen4exp_folder import leave_out, save_folder

    save_folder(tmp_path, RECIPES["plain"], make_weights(RECIPES["plain"]), 3)
    leave_out(tmp_path, lacking, "_sizes")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changed))
    with pytest.raises(UserError) as error:
        open_model(tmp_path)
    assert told in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_every_easy_mistake_would_show(recipe: Recipe, weights: Weights, ids: list[int]) -> None:
    expected = qwen4exp_logits(recipe, weights, ids)
    for mistake in MISTAKES:
        found = qwen4exp_logits(replace(recipe, mistake=mistake), weights, ids)
        assert difference(found, expected) > 1e-2, mistake


@pytest.mark.quick("cpu-other")
@pytest.mark.parametrize(("place", "name"), [("streamed", "plain"), ("cpu", "other"), ("pinned", "other")])
def test_every_placement_gives_the_same_logits(
    place: str, recipe: Recipe, weights: Weights, path: Path, ids: list[int], tmp_path: Path
) -> None:
    expected = qwen4exp_logits(recipe, weights, ids)
    with open_model(path) as file:
        spec = file.spec
    where = {}
    for unit in spec.units:
        wished = place, "host" if unit.kind.state else None
        where[unit.name] = wished if wished in unit.kind.places else ("pinned", "vram" if unit.kind.state else None)
    tiers = tuple(make_tier(spec, n, where, 2, LONG, 1, batch=64) for n in (1, 64))
    with open_engine(path, tiers, "fast", LONG, checkpoint_bytes=1 << 30) as engine:
        assert difference(run(engine, ids), expected) < CLOSE
        engine.reset(0, 63)  # cut back within a block of the index
        assert difference(engine.forward(ids[63:], all_logits=True), expected[63:]) < CLOSE
        engine.save(tmp_path / "cache")
        engine.reset(0)
        assert engine.load(tmp_path / "cache") == tuple(ids)
        more = [*ids, *ids[:9]]
        assert difference(engine.forward(ids[:9], all_logits=True), qwen4exp_logits(recipe, weights, more)[-9:]) < CLOSE


@pytest.mark.parametrize("name", ["other"])
def test_several_texts_at_once_give_what_each_gives(
    recipe: Recipe, weights: Weights, path: Path, ids: list[int]
) -> None:
    texts = [ids[:61], ids[20:45], ids[40:101]]
    with open_engine(path, context=3 * LONG, sequences=3) as engine:
        found = [list[torch.Tensor]() for _ in texts]
        for start, stop in ((0, 23), (23, 40), *((n, n + 1) for n in range(40, 61))):
            for own, logits in zip(found, engine.forward([text[start:stop] for text in texts], all_logits=True)):
                own.append(logits)
        for text, own in zip(texts, found):
            assert difference(torch.cat(own), qwen4exp_logits(recipe, weights, text)) < CLOSE


@pytest.mark.parametrize(
    ("shares", "mode", "tiers", "name"),
    [
        ((3.0, 0.0, 1.0), "tensor", mixed_tiers(1, LONG), "plain"),
        ((3.0, 1.0, 2.0), "layer", random_tiers(5, LONG), "other"),
    ],
    ids=["tensor", "layer"],
)
def test_ranks_give_the_same_logits(
    shares: tuple[float, ...], mode: str, tiers: Tiers, recipe: Recipe, weights: Weights, path: Path, ids: list[int]
) -> None:
    expected = qwen4exp_logits(recipe, weights, ids)
    for found in run_ranks(path, shares, lambda engine: run(engine, ids), LONG, tiers, mode=mode):
        assert difference(found, expected) < CLOSE


@pytest.mark.quick("plain-2-plain")
@pytest.mark.parametrize(
    ("name", "holds", "kernels"),
    [("plain", 0, "fast"), ("plain", 2, "plain"), ("other", 2, "fast"), ("other", 5, "fast")],
)
def test_drafts_that_do_not_hold_leave_nothing(
    holds: int, kernels: str, recipe: Recipe, weights: Weights, path: Path, ids: list[int]
) -> None:
    drafts = [*ids[61 : 61 + holds], *(RNG.randrange(VOCAB) for _ in range(5 - holds))]
    with open_engine(path, context=LONG, kernels=kernels, drafts=5) as engine:
        text = engine.texts.open(ids[:61])
        engine.texts.extend([(text, ids[:61])])
        rows = engine.texts.step([Piece(text, tuple(drafts), "all", full=True, kind=VERIFY)])[0]
        expected = qwen4exp_logits(recipe, weights, [*ids[:61], *drafts])
        assert difference(np.array([row.full for row in rows]), expected[61:]) < CLOSE
        assert not engine.texts.commit(text, 61 + holds)
        found = engine.texts.extend([(text, ids[61 + holds : 90])], all_logits=True)[0]
        assert difference(torch.stack(list(found)), qwen4exp_logits(recipe, weights, ids[:90])[61 + holds :]) < CLOSE


@pytest.mark.parametrize("name", ["plain"])
def test_logits_of_quantised_files_equal_those_of_their_numbers(tmp_path: Path, ids: list[int], recipe: Recipe) -> None:
    path = write_qwen4exp(tmp_path / "m.gguf", recipe, make_weights(recipe), "Q8_0")
    with open_engine(path, context=LONG, kernels="plain") as engine:
        assert difference(run(engine, ids), qwen4exp_logits(recipe, read_tensors(path), ids)) < CLOSE


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"attention.indexer.top_k": 18}, "attention.indexer.top_k is 18, which are no whole blocks of 4 tokens"),
        ({"attention.indexer.top_k": 8192}, "attention.indexer.top_k is 8192, more than the 4096 tokens of a context"),
        ({"attention.indexer.key_length": 8}, "attention.indexer.key_length is 8, of which 16 cannot be rotated"),
        (
            {"attention.compress_ratios": [0, 0, 4]},
            "attention.compress_ratios has no whole number for each of 4 layers",
        ),
        ({"attention.compress_ratios": [0, 4, 0, 4]}, "attention.compress_ratios has 4 for layer 1, which has none"),
        ({"attention.compress_ratios": [0, 0, 0, 3]}, "has blocks of 3 tokens, not one that divides 64"),
        ({"hyper_connection.count": 1}, "hyper_connection.count is 1, where models have 2 to 64 streams"),
        ({"ple.layers": [4]}, "ple.layers is [4], which is none of 4 layers"),
        ({"ple.layers": [0, 1]}, "ple.layers is [0, 1], where n-grams in one layer are supported"),
        ({"ple.layer_multipliers": [3, 5]}, "ple.layer_multipliers has 2 numbers, not the 3 that the n-grams take"),
        ({"ple.layer_multipliers": [3, 5, 1 << 62]}, "ple.layer_multipliers has others than whole numbers from 0 to"),
        ({"ple.head_offsets": [0] * 5}, "ple.head_offsets has 5 numbers, not the 6 that the n-grams take"),
        ({"ple.head_vocab_sizes": [50] * 7}, "ple.head_vocab_sizes has 7 numbers, not the 6 that the n-grams take"),
        ({"ple.head_vocab_sizes": [53] * 5 + [0]}, "ple.head_vocab_sizes has a head without rows"),
        ({"ple.head_vocab_sizes": [53] * 5 + [400]}, "per_layer_token_embd.weight, which has 384"),
        ({"ple.eos_token_id": VOCAB}, "ple.eos_token_id is 320, which is none of 320 tokens"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_their_key(
    changed: dict[str, object], told: str, tmp_path: Path
) -> None:
    path = write_qwen4exp(tmp_path / "m.gguf", RECIPES["plain"], make_weights(RECIPES["plain"]), metadata=changed)
    with pytest.raises(UserError) as error:
        open_model(path)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("lacking", ["blk.3.indexer.k_norm.weight", "blk.1.ple_conv1d.weight", "output_hc_up.weight"])
def test_tensors_that_are_missing_are_named(lacking: str, tmp_path: Path) -> None:
    weights = make_weights(RECIPES["plain"])
    del weights[lacking]
    path = write_qwen4exp(tmp_path / "m.gguf", RECIPES["plain"], weights)
    with pytest.raises(UserError, match=f"tensor {lacking} of shape .* is missing"):
        open_model(path)


def test_a_table_of_other_rows_is_refused(tmp_path: Path) -> None:
    weights = make_weights(RECIPES["plain"])
    weights["per_layer_token_embd.weight"] = weights["per_layer_token_embd.weight"][:256]
    path = write_qwen4exp(tmp_path / "m.gguf", RECIPES["plain"], weights)
    with pytest.raises(UserError, match=r"ple\.head_vocab_sizes and ple\.head_offsets reach .* which has 256"):
        open_model(path)
