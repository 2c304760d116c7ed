"""What became of drafts is counted beside a registry, run after run."""

from dataclasses import replace
from pathlib import Path

import pytest

from pshard.errors import UserError
from pshard.registries.acceptance_file import keep_acceptance, recall_acceptance
from pshard.speculation import AcceptanceRecord

MODEL = (("architecture", "llama"), ("model file sizes", "1234"))
OTHER = (("architecture", "llama"), ("model file sizes", "1235"))
RECORD = AcceptanceRecord("lookup", 10, (8, 6), (6, 3))


def test_counts_of_several_runs_add_up(tmp_path: Path) -> None:
    registry = tmp_path / "m.gguf.pshard.json"
    assert recall_acceptance(registry, MODEL, "lookup") is None
    place = keep_acceptance(registry, MODEL, RECORD)
    assert place == tmp_path / "m.gguf.pshard.json.acceptance"
    assert recall_acceptance(registry, MODEL, "lookup") == RECORD.acceptance
    keep_acceptance(registry, MODEL, AcceptanceRecord("lookup", 10, (2,), (0,)))
    keep_acceptance(registry, MODEL, AcceptanceRecord("mtp", 5, (5,), (4,)))
    both = recall_acceptance(registry, MODEL, "lookup")
    assert both is not None and both.rates == pytest.approx((0.6, 0.3)) and both.share == 0.5
    found = recall_acceptance(registry, MODEL, "mtp")
    assert found is not None and found.rates == (0.8,)
    assert recall_acceptance(registry, MODEL, "lookup,mtp") == found  # until it has a record of its own
    keep_acceptance(registry, MODEL, AcceptanceRecord("lookup,mtp", 5, (4,), (1,)))
    own = recall_acceptance(registry, MODEL, "lookup,mtp")
    assert own is not None and own.rates == (0.25,)
    assert AcceptanceRecord("lookup", 10, (8, 6), (6, 3)) == RECORD


def test_counts_of_another_model_say_nothing_and_give_way(tmp_path: Path) -> None:
    registry = tmp_path / "r.json"
    keep_acceptance(registry, OTHER, RECORD)
    assert recall_acceptance(registry, MODEL, "lookup") is None
    keep_acceptance(registry, MODEL, replace(RECORD, steps=20))
    assert recall_acceptance(registry, OTHER, "lookup") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("[\n    8,", "[\n    80,"),
        lambda text: text.replace('"lookup"', '"tea"'),
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: "[]",
    ],
)
def test_a_damaged_record_is_refused_by_its_name(tmp_path: Path, change) -> None:
    registry = tmp_path / "r.json"
    place = keep_acceptance(registry, MODEL, RECORD)
    text = place.read_text()
    assert change(text) != text
    place.write_text(change(text))
    for use in (lambda: recall_acceptance(registry, MODEL, "lookup"), lambda: keep_acceptance(registry, MODEL, RECORD)):
        with pytest.raises(UserError, match=r"acceptance record .*r\.json\.acceptance .*delete it and record again"):
            use()
    assert place.read_text() == change(text)
