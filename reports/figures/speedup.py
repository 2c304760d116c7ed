"""Figure: how many times as fast as the baseline, for time to first token, decode and end to end."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pshard.reports.compare_runs import Comparison
from pshard.reports.figures.style import OWN_STRATEGY, colour_strategies, format_number, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = (("prefill", "Time to first token"), ("decode", "Decode"), ("end to end", "Prefill and decode, end to end"))


def draw_speedup(comparisons: Sequence[Comparison]) -> "Figure":
    """Bars by test and strategy; 1 is the reference baseline, and each bar's label says the measured figure too.

    Whiskers are one standard deviation of the samples to either side."""
    panels = [(title, [c for c in comparisons if c.quantity == quantity]) for quantity, title in PANELS]
    panels = [(title, group) for title, group in panels if group]
    strategies = order_strategies(comparisons)
    rows = [sum(len(c.seconds) + 1 for c in group) for _, group in panels]
    figure = new_figure(9.5, 0.7 + 0.24 * sum(rows) + 0.5 * len(panels))
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=rows)[:, 0]
    several = len({c.model for c in comparisons}) > 1
    widest = max(c.speedup(name) * (1 + spread) for c in comparisons for name, spread in c.spreads)
    for ax, (title, group) in zip(axes, panels):
        _draw_panel(ax, group, strategies, several, widest)
        ax.set(title=title, xlim=(0, widest * 1.42))
    references = " or ".join(sorted({c.name(c.reference) for c in comparisons}))
    axes[-1].set_xlabel(f"times as fast as {references} (dashed line = 1)")
    return figure


def order_strategies(comparisons: Sequence[Comparison]) -> list[str]:
    """The planner's plan first, then the baselines as they were met."""
    met = dict.fromkeys(name for c in comparisons for name, _ in c.seconds)
    return [OWN_STRATEGY, *(name for name in met if name != OWN_STRATEGY)]


def _draw_panel(
    ax: "Axes", group: Sequence[Comparison], strategies: list[str], several_models: bool, widest: float
) -> None:
    colours = colour_strategies(strategies)
    at, ticks, labels = 0.0, [], []
    for comparison in group:
        seconds, spreads = dict(comparison.seconds), dict(comparison.spreads)
        present = [name for name in strategies if name in seconds]
        for i, name in enumerate(present):
            speedup = comparison.speedup(name)
            whisker = speedup * spreads[name]
            ax.barh(at + i, speedup, 0.86, color=colours[name], xerr=whisker, error_kw={"linewidth": 0.8, "capsize": 2})
            text = f"{comparison.name(name)}  {_describe(comparison, seconds[name])}"
            text += "" if name == comparison.reference else f"  ({format_factor(speedup)})"
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # the dashed line stops at the text
            ax.text(speedup + whisker + 0.008 * widest, at + i, text, va="center", fontsize=9, zorder=4, bbox=behind)
        ticks.append(at + (len(present) - 1) / 2)
        labels.append(_label(comparison, several_models))
        at += len(present) + 0.8
    ax.axvline(1, color="black", linewidth=0.8, linestyle="--", zorder=3)
    ax.set_yticks(ticks, labels)
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()


def _describe(comparison: Comparison, seconds: float) -> str:
    if comparison.quantity == "decode":
        return f"{format_number(comparison.tokens / seconds)} tok/s"
    return f"{format_number(seconds)} s"


def _label(comparison: Comparison, several_models: bool) -> str:
    budget = " + ".join(f"{mib}" for mib in comparison.budget_mib)
    lines = [comparison.model] if several_models else []
    return "\n".join([*lines, comparison.test, f"{budget} MiB"])


def format_factor(value: float) -> str:
    """A speedup with two digits, such as 2.4x or 0.013x."""
    return f"{value:.1f}×" if value >= 1 else f"{value:.2g}×"
