"""Searches of plans are whole here when slow tests run: what they find is what these tests ask."""

from collections.abc import Iterator

import pytest
from short_searches import lengthen_searches


@pytest.fixture(scope="module", autouse=True)
def searches_of_the_planner(share: float) -> Iterator[None]:
    """Before the module's own fixtures; those of a test that ask for another search come later."""
    with pytest.MonkeyPatch.context() as patch:
        if share == 1.0:
            lengthen_searches(patch)
        yield
