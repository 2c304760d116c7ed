"""A server's load: how many requests run at once, and how often. No torch."""

from functools import lru_cache
from math import exp, lgamma, log

MOST_CONCURRENCY = 4096  # that a load may have
CONCURRENCY = {"1": 1, "few": 4, "many": 16}  # words for how many run at once on average
DECODE_WIDTHS = (1, 2, 4, 8, 16, 32, 64)  # texts that decode at once, of which each gets a tier
LEAST_SLOTS = 4  # a person's tools ask beside the person
SELDOM = 1e-3  # what happens in fewer of the steps is left out
COVERED = 0.99  # share of the time in which the cells that are planned hold all requests


@lru_cache(64)
def running_shares(mean: int, most: int) -> tuple[float, ...]:
    """How often 1, 2, ... `most` requests run at once: shares of the steps in which any runs, which sum to 1.

    Requests come independently of each other, and each stays for about as many steps: then the number that runs is
    spread as Poisson's law says (Palm: so it is whatever each one's length is). `mean` is how many run on average while
    any does, 1 or more; with 1 there is never a second. Those above `most` wait, so their share is that of `most`.
    Shares below SELDOM are 0, those of more requests than ever run are left out.
    """
    if mean == 1 or most == 1:
        return (1.0,)
    rate, wide = _rate_of(mean), min(most, 4 * mean + 16)
    least = rate + log(1 - exp(-rate))
    shares = [exp(n * log(rate) - least - lgamma(n + 1)) for n in range(1, wide)]
    left = max(0.0, 1 - sum(shares))
    often = [share if share >= SELDOM else 0.0 for share in (*shares, left)]
    return tuple(share / sum(often) for share in often)


def _rate_of(mean: float) -> float:
    """Poisson's parameter with which so many run on average while any does."""
    rate = float(mean)
    for _ in range(100):
        rate = mean * (1 - exp(-rate))
    return rate


def covered_requests(mean: int) -> int:
    """How many requests run at once at most in COVERED of the time."""
    total, n = 0.0, 0
    for share in running_shares(mean, 4 * mean + 16):
        total, n = total + share, n + 1
        if total >= COVERED:
            break
    return n


def suggest_slots(mean: int) -> int:
    """How many requests are let run at once: a width of the ladder that covers the load, or its end, or `mean`."""
    covered = max(LEAST_SLOTS, covered_requests(mean))
    return max(mean, next((width for width in DECODE_WIDTHS if width >= covered), DECODE_WIDTHS[-1]))
