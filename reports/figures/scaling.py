"""Figure: what more devices bring, over their number, context depth and batch, measured and predicted."""

import itertools
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pshard.reports.figures.style import CYCLE, GREY, OWN_STRATEGY, new_figure
from pshard.times.measurement import Measurement, test_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

MODES = {"tensor": "tensors cut over all devices", "layer": "whole layers on each device"}
MARKERS = "osD^vP"


@dataclass(frozen=True)
class Point:
    """One test of the planner's plan on so many devices; rates in tokens per second over all sequences."""

    devices: int
    test: str  # without its depth
    prefill: bool
    depth: int
    batch: int
    measured: float
    predicted: float | None


def group_scaling(measurements: Sequence[Measurement]) -> dict[str, list[Point]]:
    """Title -> points of a model under one split mode, with the one device that they are compared with.

    Only groups with several numbers of devices. Devices have the same budget, unless each number of them ran with one
    budget only. Of runs of the same test the fastest counts.
    """
    own = [m for m in measurements if m.strategy == OWN_STRATEGY and not (m.n_prompt and m.n_gen)]
    groups: dict[str, list[Point]] = {}
    for model in dict.fromkeys(m.model for m in own):
        for mode in MODES:
            here = [m for m in own if m.model == model and (m.ranks == 1 or _mode(m) == mode)]
            for budget, chosen in _by_budget(here).items():
                points = _fastest(chosen)
                if len({p.devices for p in points}) > 1:
                    groups[f"{model}, {MODES[mode]}{budget}"] = points
    return groups


def _mode(m: Measurement) -> str:
    """The split mode; of files without it as their command says."""
    words = shlex.split(m.command)
    given = [value for flag, value in itertools.pairwise(words) if flag in ("-sm", "--split-mode")]
    return m.split_mode or (given[-1] if given else "none")


def _by_budget(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """What a title says of the budget -> measurements that are compared with each other."""
    by_number: dict[int, set[int]] = {}
    for m in measurements:
        by_number.setdefault(m.ranks, set()).add(max(m.budget_mib, default=0))
    if all(len(budgets) == 1 for budgets in by_number.values()):
        same = {budget for budgets in by_number.values() for budget in budgets}
        return {f", {same.pop()} MiB each" if len(same) == 1 else "": list(measurements)}
    grouped: dict[str, list[Measurement]] = {}
    for m in measurements:
        grouped.setdefault(f", {max(m.budget_mib, default=0)} MiB each", []).append(m)
    return grouped


def _fastest(measurements: Sequence[Measurement]) -> list[Point]:
    """A point for each test of which several numbers of devices have one, ascending."""
    found: dict[tuple, Point] = {}
    for m in measurements:
        name = test_name(m.n_prompt, m.n_gen)
        key = (name, m.n_depth, m.n_sequences, m.ranks)
        if key not in found or m.avg_ts > found[key].measured:
            prefill = bool(m.n_prompt)
            found[key] = Point(m.ranks, name, prefill, m.n_depth, m.n_sequences, m.avg_ts, m.predicted_ts)
    points = [p for key, p in found.items() if sum(key[:3] == other[:3] for other in found) > 1]
    return sorted(points, key=lambda p: (p.prefill, int(p.test[2:]), p.depth, p.batch, p.devices))


def draw_scaling(title: str, points: Sequence[Point]) -> "Figure":
    """Rows: rate and times one device, of decoding and of prompts. Columns: devices, and depth and batch if they vary.

    Solid lines are measured, dashed ones predicted.
    """
    phases = [chosen for prefill in (False, True) if (chosen := [p for p in points if p.prefill is prefill])]
    columns = [_draw_over_devices]
    columns += [_draw_over_depth] if len({p.depth for p in points}) > 1 else []
    columns += [_draw_over_batch] if len({p.batch for p in points}) > 1 else []
    figure = new_figure(1.5 + 3.7 * len(columns), 0.6 + 5.9 * len(phases))
    figure.suptitle(f"{title}\nsolid: measured, dashed: predicted", fontweight="bold", fontsize=11)
    parts = figure.subfigures(len(phases), 1, squeeze=False)[:, 0]
    for part, chosen in zip(parts, phases):
        _draw_phase(part, chosen, columns)
    return figure


def _draw_phase(part: "SubFigure", points: Sequence[Point], columns: Sequence[Callable]) -> None:
    name = "Prompts" if points[0].prefill else "Decoding"
    axes = part.subplots(2, len(columns), squeeze=False)
    fewest = min(p.devices for p in points)
    base = {(p.test, p.depth, p.batch): p for p in points if p.devices == fewest}
    compared = [p for p in points if (p.test, p.depth, p.batch) in base]
    for ratio, row in enumerate(axes):
        for draw, ax in zip(columns, row):
            draw(ax, compared if ratio else points, base if ratio else None)
            ax.grid(axis="y", color="#E5E5E5")
            ax.set_ylim(0, 1.08 * max(max(line.get_ydata()) for line in ax.lines))
        row[0].set_ylabel(f"times {_devices(fewest)}" if ratio else "tokens per second")
    for upper, lower in zip(*axes):
        upper.set_title(f"{name} over {upper.get_xlabel().split(',')[0]}", fontsize=10.5)
        upper.set_xlabel("")
        handles = _name_lines(upper, points)
        lower.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=2, fontsize=8)


def _name_lines(ax: "Axes", points: Sequence[Point]) -> list[Any]:
    """Legend entries: each colour once and, when there are several tests, each marker once."""
    from matplotlib.lines import Line2D

    tests = list(dict.fromkeys(p.test for p in points))
    colours = {str(line.get_label()): line.get_color() for line in ax.lines}
    handles = [
        Line2D([], [], color=colour, label=label, linewidth=3) for label, colour in colours.items() if label[0] != "_"
    ]
    if len(tests) == 1:
        return handles
    markers = zip(tests, itertools.cycle(MARKERS))
    return handles + [Line2D([], [], color=GREY, marker=m, label=t, linewidth=0) for t, m in markers]


Base = dict[tuple[str, int, int], Point] | None


def _draw_over_devices(ax: "Axes", points: Sequence[Point], base: Base) -> None:
    """A colour for each depth and batch."""
    counts = sorted({p.devices for p in points})
    conditions = dict.fromkeys((p.depth, p.batch) for p in sorted(points, key=lambda p: (p.depth, p.batch)))
    for i, (depth, batch) in enumerate(conditions):
        chosen = [p for p in points if (p.depth, p.batch) == (depth, batch)]
        _draw_tests(ax, chosen, lambda p: p.devices, base, CYCLE[i % len(CYCLE)], f"depth {depth}, batch {batch}")
    if base:
        ax.plot(counts, [n / counts[0] for n in counts], color=GREY, linewidth=1, linestyle=":")
    ax.set_xticks(counts)
    ax.set_xlabel("devices")


def _draw_over_depth(ax: "Axes", points: Sequence[Point], base: Base) -> None:
    batch = min(p.batch for p in points)
    _draw_by_devices(ax, [p for p in points if p.batch == batch], base, lambda p: p.depth)
    ax.set_xticks(sorted({p.depth for p in points}))
    ax.set_xlabel("depth, tokens cached before" + (f" (batch {batch})" if batch > 1 else ""))


def _draw_over_batch(ax: "Axes", points: Sequence[Point], base: Base) -> None:
    depth = min(p.depth for p in points)
    _draw_by_devices(ax, [p for p in points if p.depth == depth], base, lambda p: p.batch)
    batches = sorted({p.batch for p in points})
    ax.set_xscale("log", base=2)
    ax.set_xticks(batches, [str(n) for n in batches])
    ax.set_xlabel("batch, sequences at once" + (f" (depth {depth})" if depth else ""))


def _draw_by_devices(ax: "Axes", points: Sequence[Point], base: Base, x: Callable[[Point], int]) -> None:
    """A colour for each number of devices."""
    counts = sorted({p.devices for p in points})
    for n, colour in zip(counts, itertools.cycle(CYCLE)):
        if not base or n > counts[0]:  # else all ones
            _draw_tests(ax, [p for p in points if p.devices == n], x, base, colour, _devices(n))
    if base:
        ax.axhline(1, color=GREY, linewidth=1, linestyle=":")


def _draw_tests(
    ax: "Axes", points: Sequence[Point], x: Callable[[Point], int], base: Base, colour: str, label: str
) -> None:
    """A line with its own marker for each test."""
    for test, marker in zip(dict.fromkeys(p.test for p in points), itertools.cycle(MARKERS)):
        chosen = [p for p in points if p.test == test]
        _draw_lines(ax, chosen, [x(p) for p in chosen], base, colour, marker, label)


def _draw_lines(
    ax: "Axes", points: Sequence[Point], x: Sequence[int], base: Base, colour: str, marker: str, label: str
) -> None:
    """One measured line and, where there are predictions, one predicted."""
    ones = [base[p.test, p.depth, p.batch] if base else None for p in points]
    measured = [p.measured / (one.measured if one else 1) for p, one in zip(points, ones)]
    ax.plot(x, measured, color=colour, marker=marker, markersize=5, label=label)
    expected = [
        (at, p.predicted / (one.predicted if one and one.predicted else 1))
        for at, p, one in zip(x, points, ones)
        if p.predicted and (one is None or one.predicted)
    ]
    if expected:
        ax.plot(*zip(*expected), color=colour, marker=marker, markersize=5, markerfacecolor="white", linestyle="--")


def _devices(n: int) -> str:
    return "one device" if n == 1 else f"{n} devices"
