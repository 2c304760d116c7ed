"""Curves through measured points, as the planner and the choice of collectives look them up. No torch."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from math import exp, log

Curve = tuple[tuple[float, float], ...]  # (x, seconds), ascending in x


def interpolate(curve: Curve, x: float) -> float:
    """Value at x > 0 of a curve through positive points: log-log between, flat below, proportional above."""
    if x <= curve[0][0]:
        return curve[0][1]
    if x >= curve[-1][0]:
        return curve[-1][1] * x / curve[-1][0]
    i = bisect_left(curve, (x, 0.0))
    (x0, y0), (x1, y1) = curve[i - 1], curve[i]
    t = log(x / x0) / log(x1 / x0)
    return exp(log(y0) * (1 - t) + log(y1) * t)


def interpolate_evenly(curve: Curve, x: float) -> float:
    """The same of what takes some time and so much more for each x: straight between."""
    if not curve[0][0] < x < curve[-1][0]:
        return interpolate(curve, x)
    i = bisect_left(curve, (x, 0.0))
    (x0, y0), (x1, y1) = curve[i - 1], curve[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def curve_through(points: Iterable[tuple[float, float]]) -> Curve:
    """Points as a curve; a repeated x keeps the mean of its values."""
    groups = defaultdict(list)
    for x, y in points:
        groups[max(float(x), 1e-9)].append(max(float(y), 1e-30))
    return tuple((x, sum(ys) / len(ys)) for x, ys in sorted(groups.items()))
