"""Published figures of mixtures of experts beside predictions: every row that can be planned is on the page."""

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
ROWS = json.loads((ROOT / "benchmarks" / "results" / "published-experts.json").read_text(encoding="utf-8"))
CLOSE = 0.03  # relative: a better plan may change a figure a little before the page is made anew


@pytest.fixture(scope="module")
def published() -> Iterator[ModuleType]:
    """benchmarks/published_experts.py, which finds its neighbours as a script does."""
    before = set(sys.modules)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("published_experts")
    sys.path.remove(str(ROOT / "benchmarks"))
    for name in {"published_experts", "published", "planner"} - before:
        del sys.modules[name]


def test_every_published_row_of_gpt_oss_is_listed(published: ModuleType) -> None:
    rows = list(published.list_rows())
    assert [(r.name, r.first_token, r.rate) for r in rows] == [
        (r["row"], r["first_token"][0], r["rate"][0]) for r in ROWS
    ]
    assert [r.name for r in rows] == [f"{k}K, {mib} MiB" for mib in (15000, 8000) for k in (16, 64, 128, 256)]


def test_the_page_has_the_table_and_a_reason_for_every_difference_over_a_quarter(published: ModuleType) -> None:
    assert published.compare_table(ROWS) in PAGE
    for row in ROWS:
        far = [published.is_far(row[what][1] / row[what][0]) for what in ("first_token", "rate")]
        reasons = published.find_reasons(row)
        assert bool(reasons) == any(far), row["row"]
        assert all(f"\n- **{letter}**: " in PAGE for letter in reasons)


def test_the_model_has_the_published_files_bytes(published: ModuleType) -> None:
    units = published.make_gpt_oss().units
    experts = sum(t.file_nbytes for u in units if u.kind.parts for t in u.tensors if t.parts)
    rest = sum(t.file_nbytes for u in units if not u.kind.parts and u.name != "embedding" for t in u.tensors)
    assert experts / 2**30 == pytest.approx(56.9, rel=0.005) and rest / 2**30 == pytest.approx(1.57, rel=0.01)


@pytest.mark.slow
def test_experts_as_fast_as_memory_and_dense_products_would_bring_prompts_sooner(published: ModuleType) -> None:
    """What the page says of the rate that is assumed."""
    row = next(published.list_rows())
    own, (full, rate) = (ROWS[0]["first_token"][1], published.predict(row, rates=replace(published.SHEET, card=None)))
    assert full == pytest.approx(1.83, rel=CLOSE) and own == pytest.approx(2.21, rel=CLOSE)
    assert rate == pytest.approx(ROWS[0]["rate"][1], rel=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("row", [ROWS[n] for n in (3, 5)], ids=lambda row: row["row"])
def test_what_the_page_predicts_of_experts_is_what_the_code_predicts(published: ModuleType, row: dict) -> None:
    wanted = next(r for r in published.list_rows() if r.name == row["row"])
    assert published.predict(wanted) == pytest.approx((row["first_token"][1], row["rate"][1]), rel=CLOSE)
