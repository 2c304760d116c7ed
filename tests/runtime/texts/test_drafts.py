"""Drafts: what of them holds is as if nothing else had ever been there, and what does not is seen by nobody."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engines import open_engine
from hybrid_files import random_hybrid, write_hybrid_gguf
from model_files import write_gguf
from plan_samples import make_tier, make_variant
from test_text_pool import feed
from toy_kinds import ToyFile

from pshard.batch import VERIFY
from pshard.errors import UserError
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.engine import Engine
from pshard.runtime.texts.text import Piece, Text
from pshard.units.kv_cells import KV_BLOCK

VOCAB, CONTEXT, STEP = 96, 512, 64
KINDS = ["cells", "windows", "states", "states without checkpoints"]
Open = Callable[[], Engine]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def start(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Opens an engine of three texts of a model whose units keep such states."""
    path, sizes = tmp_path_factory.mktemp("m") / "m.gguf", dict(context=3 * CONTEXT, sequences=3, tokens=(1, 12, STEP))
    if kind == "windows":
        file = ToyFile("wawa", context=CONTEXT)
        places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in file.spec.units}
        tiers = tuple(make_tier(file.spec, n, places, 1, 3 * CONTEXT, 3, batch=STEP) for n in (1, 12, STEP))
        variant = make_variant(file.spec, tiers, 3 * CONTEXT, 3)
        return lambda: build_engine(file, variant, open_device("cpu"), kernels="plain")
    if kind == "cells":
        write_gguf(path, "qwen3", qtype="Q8_0", n_layers=2)
        return lambda: open_engine(path, **sizes)
    write_hybrid_gguf(path, "dense", random_hybrid("dense"))
    return lambda: open_engine(path, **sizes, checkpoint_bytes=(1 << 22) * (kind == "states"))


def some_ids(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


def draft(engine: Engine, text: Text, ids: list[int]) -> list[np.ndarray]:
    """Logits after each of some drafts."""
    return [row.full for row in engine.texts.step([Piece(text, tuple(ids), "all", full=True, kind=VERIFY)])[0]]


def settle(engine: Engine, text: Text, length: int) -> None:
    """Commit, and give the text again what it lacks of these tokens."""
    again = engine.texts.commit(text, length)
    if again:
        feed(engine, text, text.ids + again, STEP)
    assert len(text.ids) == text.committed == length


@pytest.mark.quick("states-126-3")
@pytest.mark.parametrize(  # drafts end within a block, or go over its end
    ("length", "holds"), [(30, 0), (62, 2), (62, 4), (126, 3)]
)
def test_a_text_goes_on_as_if_what_does_not_hold_had_never_been_there(start: Open, length: int, holds: int) -> None:
    ids, found = some_ids(length), list[np.ndarray]()
    with start() as engine:
        for seed in (1, 2):  # of the drafts that do not hold
            text = engine.texts.open(ids, str(seed))
            feed(engine, text, ids, STEP)
            right = some_ids(holds, 9)
            rows = draft(engine, text, right + some_ids(4 - holds, seed))
            settle(engine, text, length + holds)
            assert text.ids == ids + right
            row = feed(engine, text, [*text.ids, 7], full=True)
            found.append(np.stack([*rows[:holds], row.full]))
            engine.texts.close(text)
        whole = engine.forward([*ids, *right, 7], all_logits=True).numpy()
        np.testing.assert_allclose(found[-1], whole[length:], atol=2e-3 * whole.std())
    assert np.array_equal(*found)


@pytest.mark.quick("states")
def test_states_that_take_in_later_what_holds_are_as_if_they_had_at_once(
    start: Open, kind: str, tmp_path: Path
) -> None:
    """Asked for, or by whatever asks for the text's states before."""
    ids, right, found = some_ids(30), some_ids(3, 9), list[np.ndarray]()

    def save(engine: Engine, text: Text) -> None:
        engine.texts.save(text, tmp_path / "text")

    ways: list[Callable[[Engine, Text], object]] = [
        lambda engine, text: None,  # at once
        lambda engine, text: None,
        lambda engine, text: engine.texts.settle(),
        lambda engine, text: engine.texts.commit(text, 33),
        lambda engine, text: engine.texts.cut(text, 40),
        *([] if kind == "windows" else [save]),
    ]
    with start() as engine:
        for number, way in enumerate(ways):
            text = engine.texts.open(ids, str(number))
            feed(engine, text, ids, STEP)
            draft(engine, text, right + some_ids(2, number))
            assert engine.texts.commit(text, 33, later=number > 0) == [] and text.ids == ids + right
            assert bool(engine.texts._commits._due) == (number > 0 and kind.startswith("states"))
            way(engine, text)
            found.append(feed(engine, text, [*text.ids, 7], full=True).full)
            engine.texts.close(text)
        text = engine.texts.open(ids, "closed")
        feed(engine, text, ids, STEP)
        draft(engine, text, right)
        engine.texts.commit(text, 31, later=True)
        engine.texts.close(text)  # nobody waits for its states
        feed(engine, engine.texts.open(ids, "next"), ids, STEP)
    assert all(np.array_equal(found[0], other) for other in found[1:])


def test_a_block_is_adopted_when_what_fills_it_holds_and_not_before(start: Open, kind: str) -> None:
    ids, right = some_ids(KV_BLOCK - 2), some_ids(4, 3)
    with start() as engine:
        text = engine.texts.open(ids)
        feed(engine, text, ids, STEP)
        draft(engine, text, right)
        other = engine.texts.open([*ids, *right])
        assert other.cached == 0 and engine.texts.counts().cached == 0
        engine.texts.close(other)
        settle(engine, text, len(ids) + 4)
        other = engine.texts.open([*ids, *right])
        assert other.cached == (0 if kind.startswith("states") else KV_BLOCK)  # no checkpoint is there


@pytest.mark.quick("states")
def test_drafts_push_out_nothing_that_a_window_sees_of_what_holds(start: Open, kind: str) -> None:
    """Also while the other texts need the room, for longer than the window."""
    ids, others = some_ids(140), [some_ids(400, 5), some_ids(400, 6)]
    with start() as engine:
        text, *rest = (engine.texts.open(i) for i in (ids, *others))
        feed(engine, text, ids, STEP)
        if kind.startswith("states"):  # which hold one step's drafts back, and no other step comes before they hold
            draft(engine, text, some_ids(12, 7))
            for piece in (Piece(text, (1,), kind=VERIFY), Piece(rest[0], (1,))):
                with pytest.raises(UserError, match="a text has drafts that its states"):
                    engine.texts.step([piece])
        else:
            draft(engine, text, some_ids(60, 7))
            draft(engine, text, some_ids(60, 8))
            for other, own in zip(rest, others):
                feed(engine, other, own, STEP)
        settle(engine, text, len(ids) + 1)
        got = feed(engine, text, [*text.ids, 7], full=True).full
        whole = text.ids
        engine.texts.close(text)
        wanted = engine.forward(whole).numpy()
        np.testing.assert_allclose(got, wanted, atol=2e-3 * wanted.std())


@pytest.mark.quick("windows", "states")
def test_texts_that_are_cut_within_a_block_leave_it_to_others_who_hold_it(start: Open, kind: str) -> None:
    ids = some_ids(2 * KV_BLOCK + 9)
    with start() as engine:
        first = engine.texts.open(ids)
        feed(engine, first, ids, STEP)
        second = engine.texts.open(ids)
        feed(engine, second, ids, STEP)
        before = feed(engine, first, [*ids, 5], full=True).full
        lacks = engine.texts.cut(first, len(ids))
        assert first.ids + lacks == ids and (not lacks or kind.startswith("states"))
        if lacks:
            feed(engine, first, ids, STEP)
        again = engine.texts.cut(second, KV_BLOCK + 20)
        assert second.ids + again == ids[: KV_BLOCK + 20] and second.cached <= len(second.ids)
        other = second.ids + again + some_ids(60, 4)
        got = feed(engine, second, other, STEP, full=True).full
        after = feed(engine, first, [*ids, 5], full=True).full
        np.testing.assert_allclose(after, before, atol=1e-4 * before.std())
        third = engine.texts.open(ids)  # adopts no block that the second has written to
        last = feed(engine, third, [*ids, 5], STEP, full=True).full
        np.testing.assert_allclose(last, before, atol=2e-3 * before.std())
        for text in (first, second, third):
            engine.texts.close(text)
        counts = engine.texts.counts()
        assert counts.used == 0 and counts.cached + counts.free == counts.total
        wanted = engine.forward(other).numpy()
        np.testing.assert_allclose(got, wanted, atol=2e-3 * wanted.std())


def test_a_text_with_drafts_is_neither_saved_nor_extended_and_only_drafts_are_forgotten(
    start: Open, tmp_path: Path
) -> None:
    with start() as engine:
        text = engine.texts.open([1])
        feed(engine, text, [1, 2, 3])
        draft(engine, text, [4, 5])
        for refused in (
            lambda: engine.texts.save(text, tmp_path / "cache"),
            lambda: engine.texts.step([Piece(text, (6,))]),
            lambda: engine.texts.extend([(text, [6])]),
        ):
            with pytest.raises(UserError, match="2 tokens of the text are drafts; commit them"):
                refused()
        for length in (2, 6):
            with pytest.raises(UserError, match=f"3 to 5 tokens can hold of the text; {length} were committed"):
                engine.texts.commit(text, length)
        assert text.ids == [1, 2, 3, 4, 5] and not (tmp_path / "cache").exists()
        settle(engine, text, 4)
        engine.texts.save(text, tmp_path / "cache")
        other = engine.texts.load(tmp_path / "cache", "")
        assert other.ids == [1, 2, 3, 4] and not other.drafts
        rows = engine.texts.step([Piece(one, (8,), full=True) for one in (text, other)])
        np.testing.assert_allclose(rows[0][0].full, rows[1][0].full, atol=1e-4)
