"""Multi-head latent attention: the logits of a float64 forward and of transformers, wherever the units are."""

import random
from dataclasses import replace
from pathlib import Path

import latent_forward
import moe_forward
import numpy as np
import pytest
import torch
from engines import open_engine, pinned_everywhere
from latent_files import FLASH, LIKE, LIKE_FLASH, random_tensors, take_tensors, write_latent_folder, write_latent_gguf
from moe_forward import moe_logits, read_weights
from plan_samples import make_tier, random_places, shrink_places
from thread_ranks import random_tiers, run_ranks

from pshard.errors import UserError
from pshard.models import ModelFile, open_model
from pshard.units.latent_attention import LATENT_ATTENTION

CONTEXT, VOCAB = 128, 320
CLOSE = 1e-5  # of the logits' deviation


@pytest.fixture(scope="module", params=list(LIKE))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_latent_gguf(tmp_path_factory.mktemp("m") / "m.gguf", request.param, random_tensors(request.param))


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, in standard deviations of the expected logits."""
    return float(np.abs(found - expected).max() / expected.std())


def check_talk(engine, file: ModelFile, sequences: int, seed: int, close: float = CLOSE, of=np.max) -> None:
    """Turns of unequal length and single tokens: all logits are those of every text alone. of: which of the tokens'
    largest differences must be small."""
    rng, texts = random.Random(seed), [list[int]() for _ in range(sequences)]
    found = [list[np.ndarray]() for _ in range(sequences)]
    for sizes in [(21, 3, 9), (1, 1, 1), (1, 0, 1), (2, 30, 1), (33, 1, 2), (1, 1, 1)]:
        new = [[rng.randrange(VOCAB) for _ in range(n)] for n in sizes[:sequences]]
        for s, logits in enumerate(engine.forward(new, all_logits=True)):
            texts[s] += new[s]
            found[s].append(logits.numpy())
    weights, far = read_weights(file), list[float]()
    for text, rows in zip(texts, found, strict=True):
        expected = moe_logits(file.spec.config, weights, text)
        far += list(np.abs(np.concatenate(rows) - expected).max(axis=1) / expected.std())
    assert of(far) < close


@pytest.mark.quick("v3-('streamed', 'host')-1")
@pytest.mark.parametrize(
    ("path", "place", "sequences"),
    [(like, place, 3 - i % 2 * 2) for i, (like, place) in enumerate(zip([*LIKE] * 3, LATENT_ATTENTION.places))],
    indirect=["path"],
    ids=str,
)
def test_every_placement_gives_the_logits_of_a_float64_forward(path: Path, place: tuple, sequences: int) -> None:
    with open_model(path) as file:
        places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in file.spec.units}
        places |= {u.name: place for u in file.spec.units if u.kind is LATENT_ATTENTION}
        tiers = tuple(make_tier(file.spec, n, places, 2, CONTEXT * sequences, sequences) for n in (sequences, 16))
        with open_engine(path, tiers, "plain", CONTEXT * sequences, sequences) as engine:
            check_talk(engine, file, sequences, 1)


@pytest.mark.parametrize(("path", "seed"), zip(LIKE, range(2)), indirect=["path"])
def test_random_placements_of_all_units_give_the_same_in_every_tier(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with open_model(path) as file:
        large = random_places(file.spec, rng)
        small = shrink_places(file.spec, large, rng)
        tiers = tuple(make_tier(file.spec, n, p, 2, 2 * CONTEXT, 2) for n, p in ((16, large), (2, small))[::-1])
        with open_engine(path, tiers, "plain", 2 * CONTEXT, 2) as engine:
            check_talk(engine, file, 2, seed)
            assert engine.switches > 1


@pytest.mark.quick("lite-2")
@pytest.mark.parametrize("sequences", [1, 2])
def test_the_host_s_fast_kernels_give_them_too(path: Path, sequences: int) -> None:
    """Of prompts that go by torch, and of few tokens, whose calls are recorded."""
    with open_model(path) as file, open_engine(path, None, "fast", 512 * sequences, sequences, (16, 256)) as engine:
        check_talk(engine, file, sequences, 2, 1e-4)
        rng = random.Random(3)
        ids = [rng.randrange(VOCAB) for _ in range(150)]
        engine.reset()
        found = engine.forward([ids, []][:sequences], all_logits=True)[0]
        assert difference(found.double().numpy(), moe_logits(file.spec.config, read_weights(file), ids)) < 1e-4


@pytest.mark.parametrize("parts", [(64, 64, 1), (1,) * 129], ids=["64 at a time", "one at a time"])
def test_a_text_of_bf16_weights_that_is_cut_back_gets_the_bits_of_its_first_reading(
    parts: tuple[int, ...], tmp_path: Path
) -> None:
    """Up to 64 rows, as activations stay float32; above, torch rounds them to bf16 where there is no matrix unit."""
    path = write_latent_gguf(tmp_path / "m.gguf", "v3", random_tensors("v3"), qtype="BF16")
    rng = random.Random(5)
    ids = [rng.randrange(VOCAB) for _ in range(sum(parts))]
    with open_engine(path, None, "fast", 256, tokens=(1, 64), exact=True) as engine, open_model(path) as file:
        reading = iter(ids)
        first = torch.cat([engine.forward([next(reading) for _ in range(n)], all_logits=True) for n in parts])
        for kept in (79, 64, 3):
            engine.reset(0, kept)
            assert torch.equal(engine.forward(ids[kept:], all_logits=True), first[kept:])
        expected = moe_logits(file.spec.config, read_weights(file), ids)
    assert difference(first.double().numpy(), expected) < CLOSE


@pytest.mark.quick("v3-q8_0-0.1")
@pytest.mark.parametrize(("kind", "close"), [("bf16", 0.04), ("f16", 0.005), ("q8_0", 0.1)])
def test_cells_of_other_types_lose_only_their_rounding(path: Path, kind: str, close: float) -> None:
    """Of most tokens: a few choose another expert."""
    kernels = "plain" if kind == "f16" else "fast"
    with open_model(path) as file, open_engine(path, None, kernels, CONTEXT, kv_types=(kind, kind)) as engine:
        check_talk(engine, file, 1, 4, close, np.median)


@pytest.mark.quick("v3-q8_0")
@pytest.mark.parametrize(("path", "kind"), zip(LIKE, ["f32", "q8_0"]), indirect=["path"])
def test_a_saved_sequence_goes_on_as_it_was(path: Path, tmp_path: Path, kind: str) -> None:
    ids, file = [random.Random(7).randrange(VOCAB) for _ in range(70)], tmp_path / "cells"
    settings = {"context": CONTEXT, "kv_types": (kind, kind)}
    with open_engine(path, **settings) as engine:
        engine.forward(ids)
        engine.save(file)
        wanted = engine.forward([1, 2], all_logits=True)
    with open_engine(path, **settings) as engine:
        assert engine.load(file) == tuple(ids)
        assert torch.equal(engine.forward([1, 2], all_logits=True), wanted)
    at = file.stat().st_size - 3
    file.write_bytes(file.read_bytes()[:at] + b"\x11\x11\x11")
    with open_engine(path, **settings) as engine, pytest.raises(UserError, match="is damaged"):
        engine.load(file)


@pytest.mark.quick("v3-(1.0, 3.0, 1.0)")
@pytest.mark.parametrize(("path", "shares"), zip(LIKE, [(1.0, 1.0), (1.0, 3.0, 1.0)]), indirect=["path"], ids=str)
def test_ranks_with_layers_of_their_own_give_one_rank_s_logits(path: Path, shares: tuple[float, ...]) -> None:
    ids = [[random.Random(n).randrange(VOCAB) for _ in range(n)] for n in (37, 1, 5, 1)]

    def talk(engine) -> torch.Tensor:
        return torch.cat([engine.forward(part, all_logits=True) for part in ids])

    with open_engine(path, None, "plain", CONTEXT, tokens=(4, 16)) as engine:
        wanted = talk(engine)
    for found in run_ranks(path, shares, talk, CONTEXT, random_tiers(5, CONTEXT), mode="layer"):
        assert difference(found.numpy(), wanted.numpy()) < CLOSE


# --- mistakes -------------------------------------------------------------------------------------------------------

IDS = [int(i) for i in np.random.default_rng(0).integers(0, VOCAB, 40)]
OF_CONFIG = {
    "rope pairs": lambda c: replace(c, rope=replace(c.rope, pairing="halves")),
    "scale of scores": lambda c: replace(c, latent=replace(c.latent, score_scale=1.0)),
    "scale of sine and cosine": lambda c: replace(c, rope=replace(c.rope, attention_factor=1.2)),
    "no YaRN": lambda c: replace(c, rope=replace(c.rope, scaling="none")),
    "scores of experts": lambda c: replace(
        c, experts=replace(c.experts, scores={"softmax": "sigmoid", "sigmoid": "softmax"}[c.experts.scores])
    ),
    "weights' norm": lambda c: replace(c, experts=replace(c.experts, normed=not c.experts.normed)),
    "weights' scale": lambda c: replace(c, experts=replace(c.experts, scale=1.1 * c.experts.scale)),
    "experts used": lambda c: replace(c, experts=replace(c.experts, used=2)),
    "shared experts": lambda c: replace(c, experts=replace(c.experts, d_shared=0)),
}
OF_V3 = {
    "no groups": lambda c: replace(c, experts=replace(c.experts, groups=1, groups_used=1)),
    "other groups": lambda c: replace(c, experts=replace(c.experts, groups=2, groups_used=1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("like", LIKE)
def test_every_other_rule_gives_other_logits(tmp_path: Path, like: str) -> None:
    with open_model(write_latent_gguf(tmp_path / "m.gguf", like, random_tensors(like))) as file:
        config, weights = file.spec.config, read_weights(file)
    right = moe_logits(config, weights, IDS)
    for mistake, change in (OF_CONFIG | (OF_V3 if like == "v3" else {})).items():
        assert difference(moe_logits(change(config), weights, IDS), right) > 1e-3, mistake


@pytest.mark.parametrize("mistake", ["latent", "queries"])
def test_a_norm_that_is_left_out_gives_other_logits(
    tmp_path: Path, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_model(write_latent_gguf(tmp_path / "m.gguf", "v3", random_tensors("v3"))) as file:
        config, weights = file.spec.config, read_weights(file)
    expected, norm_rows = moe_logits(config, weights, IDS), latent_forward.norm_rows
    width = config.latent.rank if mistake == "latent" else config.latent.q_rank
    monkeypatch.setattr(
        latent_forward, "norm_rows", lambda x, w, eps: x if x.shape[-1] == width else norm_rows(x, w, eps)
    )
    assert difference(moe_logits(config, weights, IDS), expected) > 1e-3


@pytest.mark.parametrize("mistake", ["in the weights too", "left out"])
def test_the_bias_of_the_choice_counts_there_and_nowhere_else(
    tmp_path: Path, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_model(write_latent_gguf(tmp_path / "m.gguf", "v3", random_tensors("v3"))) as file:
        config, weights = file.spec.config, read_weights(file)
    expected, route = moe_logits(config, weights, IDS), moe_forward._route

    def wrong(rule, logits, bias):
        if mistake == "left out":
            return route(rule, logits, None)
        ids, _ = route(rule, logits, bias)
        shares = (1 / (1 + np.exp(-logits)) + bias)[ids]
        return ids, shares / shares.sum() * rule.scale

    monkeypatch.setattr(moe_forward, "_route", wrong)
    assert difference(moe_logits(config, weights, IDS), expected) > 1e-3


# --- transformers ---------------------------------------------------------------------------------------------------


@pytest.mark.slow  # most of it for the import of transformers
@pytest.mark.parametrize("like", LIKE)
def test_logits_equal_transformers(like: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = write_latent_folder(tmp_path / "hf", like)
    tensors = take_tensors(model)
    rng = random.Random(0)
    ids = [rng.randrange(VOCAB) for _ in range(150)]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
        exact = model.double()(torch.tensor([ids])).logits[0].numpy()
    paths = [tmp_path / "hf"]
    paths += [write_latent_gguf(tmp_path / f"{form}.gguf", like, tensors, form) for form in ("apart", "joint", "both")]
    for path in paths:
        with open_model(path) as file:
            tiers = pinned_everywhere(file.spec, (1, 64), 256)
            assert difference(moe_logits(file.spec.config, read_weights(file), ids), exact) < 5e-6
        with open_engine(path, tiers, context=256) as engine:
            got = engine.forward(ids, all_logits=True)
        assert (got - expected).abs().max() < 1e-4 * expected.abs().max(), path


def test_norms_of_latents_are_those_of_the_program_that_the_file_is_for(tmp_path: Path) -> None:
    """GLM-4.7-Flash: transformers norms latents with 1e-6 whatever config.json says, llama.cpp as all else."""
    pytest.importorskip("transformers")
    model = write_latent_folder(tmp_path / "hf", "v3", **FLASH)
    ids = [random.Random(11).randrange(VOCAB) for _ in range(40)]
    with torch.no_grad():
        expected = model.double()(torch.tensor([ids])).logits[0].numpy()
    with open_engine(tmp_path / "hf", context=CONTEXT) as engine:
        assert difference(engine.forward(ids, all_logits=True).numpy(), expected) < CLOSE
    path = write_latent_gguf(tmp_path / "m.gguf", "v3", take_tensors(model), metadata=LIKE_FLASH)
    with open_model(path) as file, open_engine(path, context=CONTEXT) as engine:
        found = engine.forward(ids, all_logits=True).numpy()
        assert difference(found, moe_logits(file.spec.config, read_weights(file), ids)) < CLOSE
    assert difference(found, expected) > 1e-4
