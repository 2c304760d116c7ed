"""What is chosen of rows of logits is what NumPy finds, wherever ranks put the rows together."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import write_gguf
from thread_ranks import random_tiers, run_ranks

from pshard.runtime.texts import choose_rows
from pshard.runtime.texts.choose_rows import PART, RowChooser, find_largest
from pshard.runtime.texts.text import Piece, Row

ANY: Any = None  # the text of a piece, which choosing asks nothing of


def first_largest(row: np.ndarray, k: int) -> list[int]:
    return np.argsort(-row, kind="stable")[:k].tolist()


def total(row: np.ndarray) -> float:
    wide = row.astype(np.float64)
    return float(np.log(np.exp(wide - wide.max()).sum()) + wide.max())


@settings(max_examples=100)
@given(
    st.sampled_from([1, 5, PART, 3 * PART + 1, 20 * PART, 40 * PART + 77]),
    st.integers(1, 9),
    st.sampled_from([2, 1000]),
    st.integers(0, 99),
)
def test_the_largest_are_in_order_and_of_equal_ones_the_first_come_first(
    columns: int, k: int, values: int, seed: int
) -> None:
    k = min(k, columns)
    rng = np.random.default_rng(seed)
    table = (rng.integers(-values, values, (3, columns)) / 2).astype(np.float32)
    table[0, :] *= -0.0 if values == 2 else 1
    found, ids = find_largest(torch.from_numpy(table), k)
    for row, logits, at in zip(table, found.numpy(), ids.tolist()):
        assert at == first_largest(row, k)
        assert logits.tolist() == row[at].tolist()


def wish(rows: int, **wanted) -> list[tuple[Piece, tuple[int, ...]]]:
    piece = Piece(ANY, (0,) * rows, **wanted)
    return [(piece, piece.of)] * rows


def make_mask(allowed: list[int], columns: int) -> np.ndarray:
    words = np.zeros(-(-columns // 32), dtype=np.uint32)
    for i in allowed:
        words[i // 32] |= np.uint32(1 << i % 32)
    return words


@pytest.mark.parametrize("room", [1, 16 << 20])
@pytest.mark.parametrize("columns", [50, 2000])
def test_rows_of_all_kinds_in_one_micro_batch_get_what_each_asked_for(
    columns: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_rows, "ROOM_BYTES", room)
    table = np.random.default_rng(0).standard_normal((6, columns)).astype(np.float32)
    allowed = [3, 31, 32, 33, columns - 1]
    wishes = [
        *wish(1, best=1),
        *wish(1, full=True),
        *wish(1, best=3, of=(7, 1, 7)),
        *wish(1, best=2, mask=make_mask(allowed, columns)),
        *wish(1, best=1, mask=make_mask([9], columns)),
        *wish(1, of=(4,)),
    ]
    chooser = RowChooser(wishes)
    chooser.take(torch.from_numpy(table[:4].copy()))
    chooser.take(torch.from_numpy(table[4:].copy()))
    greedy, full, best, masked, forced, scored = chooser.rows
    assert greedy.ids.tolist() == first_largest(table[0], 1) and np.isnan(greedy.log_total)
    assert np.array_equal(full.full, table[1]) and full.ids.size == 0 and greedy.full is None
    assert best.ids.tolist() == first_largest(table[2], 3)
    assert best.log_total == pytest.approx(total(table[2]), abs=1e-5)
    assert np.array_equal(best.of, table[2][[7, 1, 7]])
    barred = np.full(columns, -np.inf, dtype=np.float32)
    barred[allowed] = table[3][allowed]
    assert masked.ids.tolist() == first_largest(barred, 2) and np.array_equal(masked.logits, barred[masked.ids])
    assert masked.log_total == pytest.approx(total(table[3]), abs=1e-5)
    assert forced.ids.tolist() == [9] and np.isnan(forced.log_total)
    assert scored.of.tolist() == [table[5][4]] and scored.log_total == pytest.approx(total(table[5]), abs=1e-5)
    assert not any(row.bad for row in chooser.rows)


@pytest.mark.parametrize("wanted", [{"best": 1}, {"best": 3}, {"full": True}, {"best": 1, "mask": make_mask([2], 40)}])
def test_a_nan_marks_its_own_row_only(wanted: dict) -> None:
    table = torch.zeros(3, 40)
    table[1, 11] = float("nan")
    chooser = RowChooser(wish(3, **wanted))
    chooser.take(table)
    assert [row.bad for row in chooser.rows] == [False, True, False]


def talk(engine: Any) -> list[Row]:
    text = engine.texts.open([1])
    allowed = make_mask([5, 6, 300], 333)
    pieces = [
        Piece(text, (3, 1, 4, 1, 5, 9, 2, 6), best=1),
        Piece(text, (7,), best=4, of=(1, 332)),
        Piece(text, (7,), full=True),
        Piece(text, (8,), best=2, mask=allowed),
        Piece(text, (8,), "none"),
        Piece(text, (1, 2, 3), "all", of=(2, 3, 4)),
    ]
    return [row for piece in pieces for row in engine.texts.step([piece])[0]]


@pytest.mark.parametrize(("mode", "shares"), [("tensor", (2.0, 0.0, 5.0)), ("layer", (1.0, 2.0))])
def test_ranks_choose_what_one_rank_chooses(tmp_path: Path, mode: str, shares: tuple[float, ...]) -> None:
    path = write_gguf(tmp_path / "m.gguf", arch="qwen3", qtype="Q4_0", vocab=333)

    def run(shares: tuple[float, ...]) -> list[list[Row]]:
        return run_ranks(path, shares, talk, 128, random_tiers(3, 128), mode=mode)

    (expected,) = run((1.0,))
    assert len(expected) == 4 + 3 and expected[2].full is not None and expected[2].full.shape == (333,)
    for rows in run(shares):
        for row, wanted in zip(rows, expected, strict=True):
            assert row.ids.tolist() == wanted.ids.tolist()
            np.testing.assert_allclose(row.logits, wanted.logits, atol=1e-4)
            np.testing.assert_allclose(row.of, wanted.of, atol=1e-4)
            np.testing.assert_allclose(row.log_total, wanted.log_total, atol=1e-4)
            assert (row.full is None) == (wanted.full is None)
