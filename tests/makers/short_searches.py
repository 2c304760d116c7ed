"""Searches of the planner made short: for tests in which it does not matter how fast the planned model is."""

import pytest

SEARCH = "pshard.planner.search"


def shorten_searches(patch: pytest.MonkeyPatch) -> None:
    """Plans of small models take a tenth of their time until the patch ends.

    The random search unit by unit takes a hundred steps a pass instead of thousands, that of all tiers ten; placements
    of a tier and mixes of all tiers are not enumerated.
    """
    patch.setattr(f"{SEARCH}.anneal.TRIES", 100)
    patch.setattr(f"{SEARCH}.anneal.TRIES_PER_UNIT", 1)
    patch.setattr(f"{SEARCH}.anneal_tiers.TRIES", 10)
    patch.setattr(f"{SEARCH}.exact.MOST_UNITS", 0)
    patch.setattr(f"{SEARCH}.exact_tiers.MOST_UNITS", 0)
