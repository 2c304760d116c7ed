"""Greedy answers of 24 texts at once are those of each alone, token by token; states and windows are adopted where they
are still known, and right."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import open_engine
from hybrid_files import VOCAB as HYBRID_VOCAB
from hybrid_files import random_hybrid, write_hybrid_gguf
from model_files import write_gguf
from plan_samples import make_tier, make_variant
from test_text_pool import feed
from tiles_in_use import tiles_in_use
from toy_kinds import VOCAB as TOY_VOCAB
from toy_kinds import ToyFile

from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.engine import Engine
from pshard.runtime.sampling import Sampling
from pshard.runtime.texts.text import Piece, Text
from pshard.units.kv_cells import KV_BLOCK

ROOT = Path(__file__).resolve().parents[3]
MADE, TIERS = 6, (1, 24, 96)
STATES = 1 << 20  # bytes for checkpoints


@pytest.fixture(params=["emulated", "amx"])
def tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    with tiles_in_use(request.param):
        yield


def some_ids(n: int, seed: int, vocab: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(n)]


def answer_alone(engine: Engine, prompt: list[int]) -> list[int]:
    engine.reset()
    return list(engine.generate(prompt, MADE, Sampling(temperature=0), text=False))


def answer_together(
    engine: Engine, prompts: list[list[int]], full: bool = False
) -> tuple[list[list[int]], int, list[list[np.ndarray | None]]]:
    """Texts come two at a time while others are answered; prompts are cut as they fit. Also how many were cached, and
    with `full` the logits of each text's answer."""
    pool, stops = engine.texts, engine.tokenizer.eos_ids if engine.tokenizer else frozenset()
    waiting, running = list(range(len(prompts))), dict[int, Text]()
    answers: list[list[int]] = [[] for _ in prompts]
    logits: list[list[np.ndarray | None]] = [[] for _ in prompts]
    cached = 0
    while waiting or running:
        for number in waiting[:2]:
            running[number] = pool.open(prompts[number])
            cached += running[number].cached
        del waiting[:2]
        pieces, room = {}, pool.largest_step
        for number, text in running.items():
            lacking = (prompts[number] + answers[number])[len(text.ids) :][:room]
            if lacking:
                last = len(text.ids) + len(lacking) == len(prompts[number]) + len(answers[number])
                pieces[number] = Piece(text, tuple(lacking), "last" if last else "none", best=1, full=full and last)
                room -= len(lacking)
        for number, rows in zip(pieces, pool.step(list(pieces.values()))):
            answers[number] += [int(row.ids[0]) for row in rows]
            logits[number] += [row.full for row in rows]
        for number in [n for n in running if len(answers[n]) == MADE or set(answers[n][-1:]) & stops]:
            pool.close(running.pop(number))
    return [[token for token in answer if token not in stops] for answer in answers], cached, logits


def make_prompts(vocab: int, texts: int) -> list[list[int]]:
    """Three prefixes; some prompts are equal."""
    heads = [some_ids(n, n, vocab) for n in (70, 130, 90)]
    return [heads[i % 3] + some_ids(i % 5 * 7, i // 2, vocab) for i in range(texts)]


@pytest.mark.parametrize(
    ("what", "texts"),
    [("moe", 6), *(pytest.param(what, 24, marks=pytest.mark.slow) for what in ("demo", "hybrid", "moe"))],
)
@pytest.mark.usefixtures("vectors_only")
def test_greedy_answers_of_many_texts_at_once_are_those_of_each_alone(tmp_path: Path, what: str, texts: int) -> None:
    if what == "demo":
        path, vocab = ROOT / "examples" / "demo.gguf", 256
    elif what == "hybrid":
        path, vocab = write_hybrid_gguf(tmp_path / "m.gguf", "dense", random_hybrid("dense")), HYBRID_VOCAB
    else:
        path, vocab = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q8_0", n_layers=2), 320
    prompts = make_prompts(vocab, texts)
    options = {"kernels": "fast", "tokens": TIERS, "checkpoint_bytes": STATES}
    with open_engine(path, context=512, **options) as engine:
        alone = [answer_alone(engine, prompt) for prompt in prompts]
    with open_engine(path, context=512 * texts, sequences=texts, **options) as engine:
        together, cached, _ = answer_together(engine, prompts)
        assert cached >= texts // 3 * KV_BLOCK
        assert engine.texts.counts().used == 0
    assert together == alone
    assert len({tuple(answer) for answer in alone}) > texts // 8


@pytest.mark.quick("emulated-qwen3-max-0.15")
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(  # of each token the largest difference, in deviations of its text's logits
    ("arch", "of", "close"),
    [
        ("qwen3", np.max, 0.15),  # the cut of a prompt makes up to 0.08, one other token in it 0.3 at least
        ("qwen3moe", np.median, 0.04),  # 0.02 and 0.06; now and then a token takes another expert, which makes 0.7
    ],
)
def test_on_a_matrix_unit_logits_in_company_are_those_alone_but_for_bf16(
    tmp_path: Path, arch: str, of: Callable[[list[float]], float], close: float
) -> None:
    far = find_differences(write_gguf(tmp_path / "m.gguf", arch, qtype="Q8_0", n_layers=2), TIERS)
    assert len(far) == 6 * MADE and of(far) < close


@pytest.mark.usefixtures("tiles")
def test_an_exact_engine_leaves_the_matrix_unit_alone(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q8_0", n_layers=2)
    assert not any(find_differences(path, (64,), exact=True))


def find_differences(path: Path, tiers: tuple[int, ...], exact: bool = False) -> list[float]:
    """How far logits of six answers in company are from those of the same texts alone, at most for each token."""
    prompts, far = make_prompts(320, 6), list[float]()
    with open_engine(path, context=512 * 6, kernels="fast", sequences=6, tokens=tiers, exact=exact) as engine:
        answers, _, logits = answer_together(engine, prompts, full=True)
    with open_engine(path, context=512, kernels="fast", tokens=tiers, exact=exact) as engine:
        for prompt, answer, found in zip(prompts, answers, logits, strict=True):
            engine.reset()
            wanted = engine.forward(prompt + answer[:-1], all_logits=True)[-MADE:].numpy()
            far += list(np.abs(np.stack(found) - wanted).max(1) / wanted.std())
    return far


def test_a_hybrids_prefix_is_adopted_where_a_checkpoint_of_its_states_is(tmp_path: Path) -> None:
    path = write_hybrid_gguf(tmp_path / "m.gguf", "dense", random_hybrid("dense"))
    ids = some_ids(150, 0, HYBRID_VOCAB)
    with open_engine(path, context=512, tokens=(1, 96), sequences=2, checkpoint_bytes=STATES) as engine:
        text = engine.texts.open(ids)
        wanted = feed(engine, text, ids, 96, full=True).full
        assert len(text.keys) == 2 and engine.texts.counts().cache_bytes > 0
        again = engine.texts.open(ids)  # while the first runs
        assert again.cached == 2 * KV_BLOCK
        np.testing.assert_allclose(feed(engine, again, ids, 96, full=True).full, wanted, atol=1e-5)
        engine.texts.close(text)
        engine._checkpoints._shared.clear()
        engine.texts.close(again)
        cold = engine.texts.open(ids)
        assert cold.cached == 0
        np.testing.assert_allclose(feed(engine, cold, ids, 96, full=True).full, wanted, atol=1e-5)


def test_a_hybrids_states_are_kept_where_prompts_part(tmp_path: Path) -> None:
    """The first prompt does not know where others will go another way, the second one does."""
    path = write_hybrid_gguf(tmp_path / "m.gguf", "dense", random_hybrid("dense"))
    head, cached = some_ids(140, 0, HYBRID_VOCAB), []
    with open_engine(path, context=1024, tokens=(1, 256), checkpoint_bytes=STATES) as engine:
        for seed in range(3):
            ids = head + some_ids(100, 10 + seed, HYBRID_VOCAB)
            text = engine.texts.open(ids)
            cached.append(text.cached)
            rows = engine.texts.step([Piece(text, tuple(ids[text.cached :]), "all", of=tuple(ids[text.cached :]))])[0]
            assert len(rows) == len(ids) - text.cached
            engine.texts.close(text)
        assert cached == [0, 0, 2 * KV_BLOCK]
        engine.reset()
        logits = engine.forward(ids, all_logits=True)[text.cached :]
        found = [row.of[0] for row in rows]
        np.testing.assert_allclose(found, logits.gather(1, torch.tensor(ids[text.cached :])[:, None])[:, 0], atol=1e-4)


def test_checkpoints_of_blocks_are_bounded_and_the_one_used_longest_ago_goes_first(tmp_path: Path) -> None:
    path = write_hybrid_gguf(tmp_path / "m.gguf", "dense", random_hybrid("dense"))
    prompts = [some_ids(70, seed, HYBRID_VOCAB) for seed in range(3)]
    with open_engine(path, context=1024, tokens=(1, 96), checkpoint_bytes=STATES) as engine:
        engine._checkpoints.most = 2
        for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
            text = engine.texts.open(prompt)
            feed(engine, text, prompt, 96)
            engine.texts.close(text)
        assert engine.texts.counts().cache_bytes == 2 * engine._checkpoints.each
        found = []
        for prompt in prompts:
            text = engine.texts.open(prompt)
            found.append(text.cached)
            engine.texts.close(text)
        assert found == [KV_BLOCK, 0, KV_BLOCK]


def test_a_window_is_adopted_while_its_cells_are_there_and_never_wrong() -> None:
    file = ToyFile("wawa", context=512)
    places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in file.spec.units}
    made = tuple(make_tier(file.spec, n, places, 1, 1024, 2, batch=64) for n in (2, 64))
    variant = make_variant(file.spec, made, 1024, 2)
    with build_engine(file, variant, open_device("cpu"), kernels="plain") as engine:
        first, others = some_ids(400, 0, TOY_VOCAB), some_ids(400, 1, TOY_VOCAB)
        text = engine.texts.open(first)
        feed(engine, text, first[:200], 64)
        again = engine.texts.open(first[:200])  # of a text that runs
        assert again.cached == 192
        row = feed(engine, again, first[:200], 64, full=True)
        np.testing.assert_allclose(row.full, file.logits(first[:200])[-1], atol=1e-4)
        engine.texts.close(again)
        feed(engine, text, first, 64)
        other = engine.texts.open(others)
        feed(engine, other, others, 64)  # which takes the room of what lies before the first one's window
        engine.texts.close(other)
        found = []
        for n in (70, 200, 330, 400):
            again = engine.texts.open(first[:n])
            found.append(again.cached)
            row = feed(engine, again, first[:n], 64, full=True)
            np.testing.assert_allclose(row.full, file.logits(first[:n])[-1], atol=1e-4)
            engine.texts.close(again)
        assert found == [0, 64, 320, 384]  # up to where the window is there, of what was computed since too
