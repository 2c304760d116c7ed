"""Texts by handle: the same logits whether a prefix was computed or adopted, alone and in company."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import open_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import write_gguf
from plan_samples import make_tier, random_places, shrink_places

from pshard import buffers
from pshard.errors import UserError
from pshard.models import open_model
from pshard.runtime.engine import Engine
from pshard.runtime.logits import Logits
from pshard.runtime.texts.text import Piece, Row, Text
from pshard.units.kv_cells import KV_BLOCK

VOCAB, CONTEXT, SEQUENCES = 320, 512, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "m.gguf", "qwen3", qtype="Q8_0", n_layers=2)


@pytest.fixture(scope="module")
def engine(model: Path):
    with open_engine(model, context=CONTEXT, sequences=SEQUENCES, tokens=(1, 4, 128), kernels="plain") as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(model: Path):
    """What computes every text from its beginning."""
    with open_engine(model, context=CONTEXT, tokens=(1, 4, 128), kernels="plain") as engine:
        yield engine


def some_ids(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


def feed(engine: Engine, text: Text, ids: list[int], size: int = 128, **wanted) -> Row:
    """Give a text what it lacks of these ids; the last one's row."""
    rows = []
    for start in range(len(text.ids), len(ids), size):
        piece = Piece(text, tuple(ids[start : min(start + size, len(ids))]), **wanted)
        rows = engine.texts.step([piece])[0]
    return rows[-1]


def logits_alone(alone: Engine, ids: list[int], size: int = 128) -> np.ndarray:
    alone.reset()
    for start in range(0, len(ids), size):
        found = alone.forward(ids[start : start + size])
    assert isinstance(found, torch.Tensor)
    return found.numpy()


def test_an_equal_prefix_is_adopted_from_a_running_text_and_from_one_that_is_closed(engine, alone) -> None:
    ids = some_ids(200)
    wanted = logits_alone(alone, ids)
    first = engine.texts.open(ids)
    assert first.cached == 0 and np.array_equal(feed(engine, first, ids, full=True).full, wanted)
    for running in (True, False):
        text = engine.texts.open(ids)
        assert text.cached == 3 * KV_BLOCK and text.ids == ids[:192]
        got = feed(engine, text, ids, full=True).full
        np.testing.assert_allclose(got, wanted, atol=1e-4)
        engine.texts.close(text)
        if running:
            engine.texts.close(first)
    counts = engine.texts.counts()
    assert (counts.used, counts.cached) == (0, 3)


def test_a_text_of_whole_blocks_computes_its_last_one(engine) -> None:
    ids = some_ids(2 * KV_BLOCK, 1)
    text = engine.texts.open(ids)
    feed(engine, text, ids)
    again = engine.texts.open(ids)
    assert again.cached == KV_BLOCK
    for one in (text, again):
        engine.texts.close(one)


def test_another_salt_shares_nothing_and_what_is_not_kept_is_gone(engine) -> None:
    ids = some_ids(100, 2)
    text = engine.texts.open(ids, "mine")
    feed(engine, text, ids)
    assert engine.texts.open(ids).cached == 0
    kept, other = engine.texts.open(ids, "mine"), engine.texts.open(ids, "other")
    assert (kept.cached, other.cached) == (KV_BLOCK, 0)
    with pytest.raises(UserError, match="all 4 sequences"):
        engine.texts.open(ids)
    reset(engine)
    text = engine.texts.open(ids, "once")
    feed(engine, text, ids)
    engine.texts.close(text, keep=False)
    assert engine.texts.open(ids, "once").cached == 0
    reset(engine)


def reset(engine: Engine) -> None:
    """Close whatever is open."""
    for text in engine.texts._blocks._open:
        if text and text.salt is not None:
            engine.texts.close(text)


STEPS = st.lists(
    st.tuples(st.sampled_from(["open", "step", "step", "step", "close"]), st.integers(0, 3), st.integers(1, 140)),
    min_size=4,
    max_size=20,
)


@settings(max_examples=8)
@given(STEPS, st.integers(0, 3))
def test_whatever_is_opened_stepped_and_closed_the_logits_are_those_of_the_whole_text(
    engine: Engine, alone: Engine, steps: list[tuple[str, int, int]], seed: int
) -> None:
    """Contents are few, so that prefixes are shared; the pool is too small for all, so that blocks are dropped."""
    reset(engine)
    pool, texts, rows = engine.texts, dict[int, tuple[Text, list[int]]](), dict[Text, Row]()

    def close(number: int) -> None:
        text, _ = texts.pop(number)
        pool.close(text)
        if text in rows:
            np.testing.assert_allclose(rows[text].full, logits_alone(alone, text.ids), atol=1e-4)

    for what, number, n in steps:
        if what == "close" and number in texts:
            close(number)
        elif what == "open" and number not in texts:
            ids = some_ids(CONTEXT, seed + number % 2)
            texts[number] = pool.open(ids[:n]), ids
        elif what == "step" and texts:
            new = max(1, n // len(texts) if n < 128 else 128 // len(texts))
            pieces = [Piece(t, tuple(ids[len(t.ids) : len(t.ids) + new]), full=True) for t, ids in texts.values()]
            pieces = [piece for piece in pieces if piece.ids]
            if pieces and pool.missing({p.text: len(p.text.ids) + len(p.ids) for p in pieces}):
                before = pool.counts()
                with pytest.raises(UserError, match="KV blocks"):
                    pool.step(pieces)
                assert pool.counts() == before
            elif pieces:
                rows.update({piece.text: row for piece, (row,) in zip(pieces, pool.step(pieces))})
        counts = pool.counts()
        assert counts.used + counts.cached + counts.free == counts.total
    for number in list(texts):
        close(number)
    engine.reset()
    assert pool.counts().used == 0


@pytest.mark.parametrize("kernels", ["plain", "fast"])
def test_the_same_pieces_give_the_same_bits_with_and_without_sharing(model: Path, kernels: str) -> None:
    ids = some_ids(150, 5)
    with open_engine(model, context=CONTEXT, sequences=2, tokens=(1, 64), kernels=kernels) as engine:
        first = engine.texts.open(ids)
        wanted = feed(engine, first, ids, 64, full=True).full
        second = engine.texts.open(ids)
        assert second.cached == 128
        got = feed(engine, second, ids, 64, full=True).full
    assert np.array_equal(got, wanted)


@pytest.mark.quick("0")
@pytest.mark.parametrize("seed", range(2))
def test_shared_blocks_are_right_wherever_units_and_caches_are_and_whenever_tiers_change(
    model: Path, seed: int
) -> None:
    rng, context = random.Random(seed), 2 * CONTEXT
    with open_model(model) as file:
        spec = file.spec
    small = random_places(spec, rng)
    tiers = ((3, small), (96, shrink_places(spec, small, rng)))
    tiers = tuple(make_tier(spec, n, places, 2, context, 3) for n, places in tiers)
    ids = [some_ids(260, seed), some_ids(260, seed + 50)]
    ids.append(ids[0][:200] + ids[1][:60])
    with open_engine(model, tiers, context=context, sequences=3) as engine, open_engine(model, context=CONTEXT) as one:
        for turn in range(2):  # in the second all is found
            texts = [engine.texts.open(i[:230]) for i in ids]
            assert [t.cached for t in texts] == ([0, 0, 0] if not turn else [192, 192, 192])
            for text, whole in zip(texts, ids):
                feed(engine, text, whole[:230], 96)
            for at in range(230, 240):
                found = engine.texts.step([Piece(t, (i[at],), full=True) for t, i in zip(texts, ids)])
            for (row,), whole in zip(found, ids):
                np.testing.assert_allclose(row.full, logits_alone(one, whole[:240], 64), atol=1e-4)
            for text in texts:
                engine.texts.close(text)


@pytest.mark.parametrize("room", [True, False])
def test_texts_that_share_blocks_may_have_more_of_them_than_there_are(
    model: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """In one micro-batch where the tables of their blocks have room in the arena, else in turn."""
    if not room:
        monkeypatch.setattr(buffers, "MOST_TABLE", 0)
    ids = some_ids(330, 8)
    with open_engine(model, context=CONTEXT, sequences=2, tokens=(2, 64)) as engine:
        texts = []
        for _ in range(2):
            texts.append(engine.texts.open(ids))
            feed(engine, texts[-1], ids, 64)
        assert engine.texts.counts().used == 7  # of 8, where the texts have six each
        runs, run = [], engine._executor.run
        monkeypatch.setattr(engine._executor, "run", lambda *a, **named: (runs.append(len(a[0])), run(*a, **named)))
        (first,), (second,) = engine.texts.step([Piece(t, (5,), full=True) for t in texts])
        assert runs == ([2] if room else [1, 1])
        np.testing.assert_allclose(first.full, second.full, atol=1e-5)


def test_sequences_of_lists_and_texts_stand_on_one_pool(engine) -> None:
    ids = some_ids(100, 7)
    reset(engine)
    engine.forward([[], [], ids])
    texts = [engine.texts.open(ids) for _ in range(3)]
    assert {t.number for t in texts} == {0, 1, 3} and texts[0].cached == 0
    with pytest.raises(UserError, match="sequence 1 belongs to a text"):
        engine.forward([[], [3]])
    with pytest.raises(UserError, match="sequence 1 belongs to a text"):
        engine.reset(1)
    feed(engine, texts[0], ids)
    assert engine.texts.counts().used == 4
    engine.reset()  # what belongs to texts stays
    assert engine.lengths == (100, 0, 0, 0)
    reset(engine)


def test_bad_steps_are_refused_before_anything_changes(engine) -> None:
    reset(engine)
    text, other = engine.texts.open([1]), engine.texts.open([1])
    before = engine.texts.counts()
    for pieces, said in (
        ([], "1 to 128 tokens"),
        ([Piece(text, ())], "at least one"),
        ([Piece(text, (1,) * 129)], "1 to 128 tokens"),
        ([Piece(text, (1,)), Piece(text, (2,))], "two pieces"),
        ([Piece(text, (1,)), Piece(other, (VOCAB,))], "token ids"),
        ([Piece(text, (1,), "some")], "none, last or all"),
        ([Piece(text, (1,), best=VOCAB + 1)], "best logits"),
        ([Piece(text, (1,), of=(0, VOCAB))], "token ids 0..320"),
        ([Piece(text, (1,), mask=np.zeros(9, dtype=np.uint32))], "10 words"),
    ):
        with pytest.raises(UserError, match=said):
            engine.texts.step(pieces)
    assert engine.texts.counts() == before and text.ids == []
    engine.texts.close(text)
    engine.texts.close(text)
    with pytest.raises(UserError, match="the text is closed"):
        engine.texts.step([Piece(text, (1,))])
    reset(engine)


@pytest.mark.parametrize("kernels, tokens", [("plain", 3), ("fast", 3), ("fast", 90)])
def test_a_step_tells_once_and_before_its_kernels_that_it_leaves_python(model, kernels, tokens, monkeypatch):
    with open_engine(model, context=CONTEXT, sequences=SEQUENCES, tokens=(1, 4, 128), kernels=kernels) as engine:
        text, told = engine.texts.open(some_ids(CONTEXT)), []
        engine.texts.step([Piece(text, tuple(some_ids(tokens)), best=1)])  # writes down what is replayed
        deliver = Logits.deliver
        monkeypatch.setattr(Logits, "deliver", lambda *given: told.append("logits") or deliver(*given))
        engine.texts.step([Piece(text, tuple(some_ids(tokens)), best=1)], lambda: told.append("leaves"))
    assert told.count("leaves") == 1
    assert (kernels == "plain" and tokens == 3) or told[0] == "leaves"
