"""A test that asks what the search finds has the whole one when slow tests run, and the short one's plan else."""

import pytest


@pytest.fixture(
    params=[pytest.param("quick", marks=pytest.mark.stand_in), pytest.param("whole", marks=pytest.mark.slow)]
)
def search(request: pytest.FixtureRequest) -> str:
    """The test plans with the short search, and when slow tests run with the whole one instead."""
    if request.param == "whole":
        request.getfixturevalue("whole_search")
    return request.param
