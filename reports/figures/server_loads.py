"""Figure: what clients of servers wait for, and how much they get, over the load; servers beside each other."""

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pshard.reports.figures.style import CYCLE, GREY, new_figure, use_plain_numbers
from pshard.times.server_load import PATTERNS, LoadPoint, ServerLoad, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[ServerLoad, tuple[LoadPoint, ...]]]


def group_loads(loads: Sequence[ServerLoad]) -> dict[str, list[tuple[ServerLoad, tuple[LoadPoint, ...]]]]:
    """Key of PATTERNS -> the servers that were under such loads, each with its points, ascending."""
    groups: dict[str, list[tuple[ServerLoad, tuple[LoadPoint, ...]]]] = {}
    for load in loads:
        for pattern in PATTERNS:
            points = sorted((p for p in load.points if p.pattern == pattern), key=lambda p: p.load)
            if points:
                groups.setdefault(pattern, []).append((load, tuple(points)))
    return groups


def draw_loads(pattern: str, group: Points) -> "Figure":
    """Three panels over the load: first token, gap, and answer tokens per second. Lines are medians with a band up to
    what 95 of a hundred stay within; dotted: what was promised."""
    figure = new_figure(12.5, 4.2)
    first, gap, rate = figure.subplots(1, 3)
    colours = [colour for _, colour in zip(group, itertools.cycle(CYCLE))]
    _draw_times(first, group, colours, lambda p: p.first_token, "ttft")
    _draw_times(gap, group, colours, lambda p: p.gap, "gap")
    for (load, points), colour in zip(group, colours):
        rate.plot(*zip(*((p.load, p.answer_rate) for p in points)), color=colour, marker="o", label=load.server)
    for ax, title, unit in (
        (first, "Until the first token", "ms"),
        (gap, "Between tokens", "ms"),
        (rate, "Answers", "tokens per second"),
    ):
        ax.set_title(title)
        ax.set_ylabel(unit)
        ax.set_ylim(bottom=0)
        ax.grid(axis="y", color="#E5E5E5")
        _scale_loads(ax, pattern, [p.load for _, points in group for p in points])
    rate.legend(loc="best", fontsize=9)
    dots = ". Dotted: what was promised" if any(load.promise for load, _ in group) else ""
    told = f"Lines with dots: medians. Bands: up to what 95 of a hundred stay within{dots}."
    figure.supxlabel(told, fontsize=9, color=GREY)
    return figure


def _draw_times(
    ax: "Axes", group: Points, colours: Sequence[str], pick: Callable[[LoadPoint], Spread | None], promised: str
) -> None:
    for (load, points), colour in zip(group, colours):
        known = [(p.load, spread) for p in points if (spread := pick(p))]
        if not known:
            continue
        at = [x for x, _ in known]
        ax.plot(at, [s.p50 for _, s in known], color=colour, marker="o", label=load.server)
        ax.plot(at, [s.p95 for _, s in known], color=colour, linewidth=0.8)
        ax.fill_between(at, [s.p50 for _, s in known], [s.p95 for _, s in known], color=colour, alpha=0.15, linewidth=0)
    for most in sorted({ms for load, _ in group for what, ms in load.promise if what == promised}):
        ax.axhline(most, color=GREY, linestyle=":", linewidth=1.2)


def _scale_loads(ax: "Axes", pattern: str, loads: Sequence[float]) -> None:
    low, high = min(loads), max(loads)
    if high >= 4 * low:
        ax.set_xscale("log", base=2)
        use_plain_numbers(ax.xaxis, low, high)
    if len(set(loads)) <= 8:
        ax.set_xticks(sorted(set(loads)), [f"{n:g}" for n in sorted(set(loads))])
    ax.set_xlabel(PATTERNS[pattern])
