"""Checkpoints: a hybrid's text that is cut anywhere goes on as one that never was longer."""

import random
from pathlib import Path

import numpy as np
import pytest
from engines import open_engine
from hybrid_files import LIKE, VOCAB, random_hybrid, write_hybrid_gguf
from hybrid_forward import hybrid_logits

from pshard.errors import UserError
from pshard.models import open_model
from pshard.runtime.checkpoints import checkpoints
from pshard.runtime.engine import Engine

CLOSE = 1e-4  # of the logits' deviation
EACH = 3 * 4 * (6 * 32 * 32 + 3 * 10 * 32)  # bytes of a sequence's states: three layers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid_gguf(tmp_path_factory.mktemp("m") / "m.gguf", "dense", random_hybrid("dense"))


def expect(model: Path, ids: list[int]) -> np.ndarray:
    with open_model(model) as file:
        return hybrid_logits(file.spec.config, random_hybrid("dense"), ids)


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / expected.std())


def lengths_of(engine: Engine, number: int = 0) -> list[int]:
    return [one.length for one in engine._checkpoints.all_of(number)]


@pytest.mark.quick("2")
@pytest.mark.parametrize("most", [0, 2, 50])
def test_a_text_that_is_cut_anywhere_goes_on_as_if_it_had_ended_there(model: Path, most: int) -> None:
    rng = random.Random(most)
    ids = [rng.randrange(VOCAB) for _ in range(41)]
    expected = expect(model, ids)
    with open_engine(model, tokens=(1, 16), checkpoint_bytes=most * EACH) as engine:
        engine.forward(ids)
        for cut in (40, 39, *range(36, 12, -4), 9, 8, 1, 0):
            engine.reset(0, cut)
            assert engine.lengths == (cut,) and len(lengths_of(engine)) <= most
            found = engine.forward(ids[cut:], all_logits=True).numpy()
            assert difference(found, expected[cut:]) < CLOSE


def test_they_are_made_where_prompts_end_and_before_their_last_micro_batch(model: Path) -> None:
    with open_engine(model, tokens=(1, 16), checkpoint_bytes=8 * EACH) as engine:
        engine.forward(list(range(41)))
        assert lengths_of(engine) == [32, 41]
        engine.forward([1])
        engine.forward([2, 3, 4])
        assert lengths_of(engine) == [32, 41, 45]
        engine.reset(0, 44)
        assert lengths_of(engine) == [32, 41, 44]  # computed from 41 on, which is a prompt of its own
        engine.reset(0, 40)
        assert lengths_of(engine) == [32, 40]
        engine.reset()
        assert lengths_of(engine) == []


def test_they_are_made_every_so_many_tokens(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "EVERY", 16)
    with open_engine(model, tokens=(1, 8), checkpoint_bytes=8 * EACH) as engine:
        engine.forward(list(range(50)))
        assert lengths_of(engine) == [16, 32, 48, 50]
        for token in range(20):
            engine.forward([token])
        assert lengths_of(engine) == [16, 32, 48, 50, 66]


def test_where_room_is_short_the_one_goes_that_saves_fewest_tokens(model: Path) -> None:
    with open_engine(model, tokens=(1, 64), sequences=2, context=256, checkpoint_bytes=3 * EACH + 5) as engine:
        engine.forward([list(range(30)), list(range(10))])
        engine.forward([list(range(4)), []])
        assert (lengths_of(engine, 0), lengths_of(engine, 1)) == ([30, 34], [10])
        engine.forward([[], list(range(40))])
        assert (lengths_of(engine, 0), lengths_of(engine, 1)) == ([30], [10, 50])
        engine.reset(1)
        engine.forward([[], list(range(5))])
        assert (lengths_of(engine, 0), lengths_of(engine, 1)) == ([30], [5])


def test_what_they_may_take_is_said(model: Path) -> None:
    with open_engine(model, checkpoint_bytes=8 * EACH) as engine:
        assert "states of 0.0813 MiB a sequence cannot be cut back: up to 8 checkpoints" in engine.notes[-1]
    with open_engine(model) as engine:
        assert "a text that is cut is computed again" in engine.notes[-1]


@pytest.mark.quick("4")
@pytest.mark.parametrize("most", [0, 4])
def test_a_saved_text_goes_on_and_can_be_cut_as_before(model: Path, tmp_path: Path, most: int) -> None:
    ids, kept = [random.Random(5).randrange(VOCAB) for _ in range(41)], tmp_path / "kept"
    expected = expect(model, [*ids, 1, 2])
    with open_engine(model, tokens=(1, 16), checkpoint_bytes=most * EACH) as engine:
        engine.forward(ids)
        engine.save(kept)
        wanted = engine.forward([1, 2], all_logits=True)
    with open_engine(model, tokens=(1, 16), sequences=2, context=256, checkpoint_bytes=most * EACH) as engine:
        assert engine.load(kept, 1) == tuple(ids)
        assert lengths_of(engine, 1) == ([32, 41] if most else [])
        assert difference(engine.forward([[], [1, 2]], all_logits=True)[1].numpy(), wanted.numpy()) < CLOSE
        engine.reset(1, 36)
        found = engine.forward([[], ids[36:]], all_logits=True)[1].numpy()
        assert difference(found, expected[36:41]) < CLOSE


def test_a_damaged_state_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with open_engine(model) as engine:
        engine.forward([1, 2, 3])
        engine.save(kept)
    whole = kept.read_bytes()
    for damaged, says in (
        (whole[:-3] + b"\x11\x11\x11", r"is damaged \(state of blk\.2\.delta\)"),
        (whole[:-3], "is cut off or damaged"),
    ):
        kept.write_bytes(damaged)
        with open_engine(model) as engine, pytest.raises(UserError, match=says):
            engine.load(kept)


@pytest.mark.slow
@pytest.mark.parametrize("like", LIKE)
def test_a_soak_of_cuts_resets_and_turns_gives_the_logits_of_fresh_texts(tmp_path: Path, like: str) -> None:
    weights, rng = random_hybrid(like), random.Random(3)
    path = write_hybrid_gguf(tmp_path / "m.gguf", like, weights)
    texts = [list[int]() for _ in range(3)]
    with (
        open_model(path) as file,
        open_engine(path, None, "fast", 600, 3, (3, 32), checkpoint_bytes=5 * EACH) as engine,
    ):
        for _ in range(40):
            number = rng.randrange(3)
            if texts[number] and rng.random() < 0.5:
                cut = rng.choice((0, rng.randrange(len(texts[number]))))
                engine.reset(number, cut)
                del texts[number][cut:]
            new = [[rng.randrange(VOCAB) for _ in range(rng.choice((0, 1, 1, 3, 20)))] for _ in range(3)]
            new = [ids if len(text) + len(ids) <= 60 else [] for ids, text in zip(new, texts)]
            if not any(new):
                continue
            for s, logits in enumerate(engine.forward(new, all_logits=True)):
                texts[s] += new[s]
                if new[s]:
                    expected = hybrid_logits(file.spec.config, weights, texts[s])[-len(new[s]) :]
                    assert difference(logits.numpy(), expected) < CLOSE
