"""Searches of the planner made short: for tests in which it does not matter how fast the planned model is."""

import importlib

import pytest

SEARCH = "pshard.planner.search.small"
SHORT = {
    ("refine_units", "MOST_UNITS"): 0,  # units are not placed one by one
}
WHOLE = {at: getattr(importlib.import_module(f"{SEARCH}.{at[0]}"), at[1]) for at in SHORT}


def shorten_searches(patch: pytest.MonkeyPatch) -> None:
    """Plans of small models take a tenth of their time until the patch ends."""
    _set(patch, SHORT)


def lengthen_searches(patch: pytest.MonkeyPatch) -> None:
    """Searches are as long as users have them until the patch ends."""
    _set(patch, WHOLE)


def _set(patch: pytest.MonkeyPatch, limits: dict[tuple[str, str], int]) -> None:
    for (module, name), limit in limits.items():
        patch.setattr(f"{SEARCH}.{module}.{name}", limit)
