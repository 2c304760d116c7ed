"""Searches of plans are whole here when slow tests run: what they find is what these tests ask."""

from collections.abc import Iterator

import pytest
from short_searches import lengthen_searches, shorten_searches


@pytest.fixture(scope="module", autouse=True)
def searches_of_the_planner(share: float) -> Iterator[None]:
    """Before the module's own fixtures; those of a test that ask for another search come later."""
    with pytest.MonkeyPatch.context() as patch:
        if share == 1.0:
            lengthen_searches(patch)
        yield


@pytest.fixture
def quick_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of small models take a tenth of their time: where it does not matter how fast the planned model is."""
    shorten_searches(monkeypatch)


@pytest.fixture(
    params=[pytest.param("quick", marks=pytest.mark.stand_in), pytest.param("whole", marks=pytest.mark.slow)]
)
def search(request: pytest.FixtureRequest) -> str:
    """The test plans with the quick search, and when slow tests run with the whole one instead."""
    if request.param == "quick":
        request.getfixturevalue("quick_search")
    return request.param
