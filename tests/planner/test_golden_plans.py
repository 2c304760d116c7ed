"""Plans are those that are stored: a change that moves one says so with `scripts/golden --accept`."""

import json
from pathlib import Path

import pytest
from golden.cases import CASES, QUICK, Case
from golden.digests import digest_case, find_differences
from golden.run import STORED

SLOW = ("2b-cpu", "small-several", "three-layers", "tiny")  # whose plans take seconds


@pytest.mark.quick("32b-6000")
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.name in SLOW else []) for c in CASES if c.name in QUICK],
)
@pytest.mark.usefixtures("whole_search")
def test_a_plan_is_the_one_that_is_stored(case: Case) -> None:
    stored = json.loads(Path(STORED).read_text(encoding="utf-8"))[case.name]
    assert not list(find_differences(stored, json.loads(json.dumps(digest_case(case)))))
