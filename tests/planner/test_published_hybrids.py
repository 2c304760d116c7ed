"""Published figures of hybrids beside predictions: every row is on the page, with reasons."""

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "published.md").read_text(encoding="utf-8")
ROWS = json.loads((ROOT / "benchmarks" / "results" / "published-hybrids.json").read_text(encoding="utf-8"))
CLOSE = 0.03  # relative: a better plan may change a figure a little before the page is made anew
PREDICTED = [n for n in range(len(ROWS)) if n % 4 == (0, 3, 1, 2)[n // 4 % 4]]  # of each model and budget a context
GIGABYTES = {"Qwen3-Next-80B-A3B": 45, "Qwen3.5-122B-A10B": 69, "Qwen3.5-397B-A17B": 224}


@pytest.fixture(scope="module")
def published() -> Iterator[ModuleType]:
    """benchmarks/published_hybrids.py, which finds its neighbours as a script does."""
    before = set(sys.modules)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("published_hybrids")
    sys.path.remove(str(ROOT / "benchmarks"))
    for name in {"published_hybrids", "published_experts", "published", "planner"} - before:
        del sys.modules[name]


def test_every_published_row_of_hybrids_is_listed(published: ModuleType) -> None:
    listed = [(model, r.name, r.first_token, r.rate) for model, r in published.list_rows()]
    assert listed == [(r["model"], r["row"], r["first_token"][0], r["rate"][0]) for r in ROWS]
    assert len(listed) == 20


def test_the_page_has_the_table_and_a_reason_for_every_difference_over_a_quarter(published: ModuleType) -> None:
    assert published.compare_table(ROWS) in PAGE
    for row in ROWS:
        far = [published.published_experts.is_far(row[what][1] / row[what][0]) for what in ("first_token", "rate")]
        reasons = published.find_reasons(row)
        assert len(reasons) == sum(far), row
        assert all(f"\n- **{letter}**: " in PAGE for letter in reasons)


@pytest.mark.parametrize("model", GIGABYTES)
def test_the_models_have_the_bytes_that_the_page_says(published: ModuleType, model: str) -> None:
    units = published.make_hybrid(model).units
    assert sum(t.file_nbytes for u in units for t in u.tensors) / 1e9 == pytest.approx(GIGABYTES[model], rel=0.005)
    assert sum(u.kind.name == "delta net" for u in units) == 3 * sum(u.kind.name == "attention" for u in units)


def test_published_prompts_take_as_long_as_passes_of_2048_tokens(published: ModuleType) -> None:
    """What the page reasons from: bytes of the file at the link's rate, eight or nine times for 16384 tokens."""
    for row in (r for r in ROWS if r["context"] == 16384):
        passes = row["first_token"][0] * published.SHEET.link / (1e9 * GIGABYTES[row["model"]])
        assert 8 < passes < 9.1


@pytest.mark.slow
@pytest.mark.parametrize(("number", "seconds"), [(0, 4.4), (8, 8.1), (16, 28.0)])
def test_micro_batches_of_2048_tokens_take_what_the_page_says(
    published: ModuleType, monkeypatch: pytest.MonkeyPatch, number: int, seconds: float
) -> None:
    model, row = list(published.list_rows())[number]
    workload = replace(row.workload, max_ubatch=2048)
    monkeypatch.setattr(published.ExpertRow, "workload", workload)
    assert published.predict(model, row)[0] == pytest.approx(seconds, rel=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("number", PREDICTED)
def test_what_the_page_predicts_of_hybrids_is_what_the_code_predicts(published: ModuleType, number: int) -> None:
    model, row = list(published.list_rows())[number]
    wanted = ROWS[number]["first_token"][1], ROWS[number]["rate"][1]
    assert published.predict(model, row) == pytest.approx(wanted, rel=CLOSE)
