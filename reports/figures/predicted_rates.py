"""Figure: predicted against measured rates, each point named."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pshard.reports.figures.style import FAINT, colour_strategies, name_strategy, new_figure, use_plain_numbers
from pshard.times.measurement import Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAND = 0.15  # predictions within this share of the measured rate count as good


def draw_predicted(measurements: Sequence[Measurement]) -> "Figure":
    """Scatter of the measurements that have a prediction, with the line of equality and a band of ±15%."""
    points = predicted_measurements(measurements)
    figure = new_figure(9.5, max(5.0, 0.19 * len(points) + 1.5))
    ax = figure.subplots()
    values = [v for m, predicted in points for v in (m.avg_ts, predicted)]
    low, high = min(values) / 1.6, max(values) * 1.6
    line = [low, high]
    ax.fill_between(line, [v * (1 - BAND) for v in line], [v * (1 + BAND) for v in line], color=FAINT, linewidth=0)
    ax.plot(line, line, color="black", linewidth=0.8)
    for strategy, colour in colour_strategies(m.strategy for m, _ in points).items():
        group = [point for point in points if point[0].strategy == strategy]
        for mark, decode in (("o", False), ("^", True)):
            chosen = [(m.avg_ts, predicted) for m, predicted in group if bool(m.n_gen) == decode]
            label = f"{name_strategy(strategy)}, {'decode' if decode else 'prefill'}"
            if chosen:
                ax.plot(*zip(*chosen), mark, color=colour, label=label, zorder=3)
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    for axis in (ax.xaxis, ax.yaxis):
        use_plain_numbers(axis, low, high)
    _label_points(ax, points, several_models=len({m.model for m, _ in points}) > 1)
    inside = sum(abs(predicted / m.avg_ts - 1) <= BAND for m, predicted in points)
    ax.set(xlabel="measured tok/s", ylabel="predicted tok/s")
    ax.set_title(f"Predictions within ±{BAND:.0%} of what was measured (grey): {inside} of {len(points)}")
    ax.legend(loc="upper left")
    return figure


def predicted_measurements(measurements: Sequence[Measurement]) -> list[tuple[Measurement, float]]:
    """Those with a prediction, and it."""
    return [(m, m.predicted_ts) for m in measurements if m.predicted_ts]


def _label_points(ax: "Axes", points: Sequence[tuple[Measurement, float]], several_models: bool) -> None:
    """Names in a column right of the plot, at the points' heights, pushed apart where they would overlap."""
    from math import log

    low, high = ax.get_ylim()
    ordered = sorted(points, key=lambda point: point[1])
    wanted = [log(predicted / low) / log(high / low) for _, predicted in ordered]
    for (m, predicted), height in zip(ordered, spread_apart(wanted, min(0.042, 0.98 / len(points)))):
        budget = "+".join(map(str, m.budget_mib))
        name = f"{m.model} " if several_models else ""
        off = predicted / m.avg_ts - 1
        ax.annotate(
            f"{name}{m.test}, {name_strategy(m.strategy)}, {budget} MiB ({off:+.0%})",
            (m.avg_ts, predicted),
            (1.03, height),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            arrowprops={
                "arrowstyle": "-",
                "color": "#888888",
                "linewidth": 0.5,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 3,
            },
        )


def spread_apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Ascending positions in 0..1, as near the ascending wanted ones as a simple pass up and one down allow."""
    placed: list[float] = []
    for position in wanted:
        placed.append(max(position, placed[-1] + gap) if placed else position)
    ceiling = 1.0
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - gap
    return placed
