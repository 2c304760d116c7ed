"""Figure: what the plan and published strategies are predicted to reach on a machine where nothing was run."""

from typing import TYPE_CHECKING

from pshard.reports.figures.speedup import format_factor
from pshard.reports.figures.style import OWN_STRATEGY, colour_strategies, format_number, name_strategy, new_figure
from pshard.times.outlook import Forecast, Outlook

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_outlook(outlook: Outlook) -> "Figure":
    """Hatched bars: how many times as fast as the best published strategy each plan is; labels say the figures."""
    figure = new_figure(9.5, 1.6 + 0.24 * 2 * len(outlook.forecasts))
    rivals = [each for each in outlook.forecasts if each.strategy != OWN_STRATEGY]
    best = min(rivals or outlook.forecasts, key=lambda each: each.round_seconds)
    panels = (
        ("Time to first token", lambda f: 1 / f.first_token, lambda f: f"{format_number(1e3 * f.first_token)} ms"),
        ("Decode", lambda f: f.rate, lambda f: f"{format_number(f.rate)} tok/s"),
    )
    colours = colour_strategies(each.strategy for each in outlook.forecasts)
    for ax, (title, pace, describe) in zip(figure.subplots(len(panels), 1), panels):
        widest = max(pace(each) for each in outlook.forecasts) / pace(best)
        for at, each in enumerate(outlook.forecasts):
            factor = pace(each) / pace(best)
            ax.barh(at, factor, 0.86, color="white", edgecolor=colours[each.strategy], hatch="////")
            text = f"{name_strategy(each.strategy)}  {describe(each)}" + _compare(each, best, factor)
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
            ax.text(factor + 0.01 * widest, at, text, va="center", fontsize=9, zorder=4, bbox=behind)
        ax.axvline(1, color="black", linewidth=0.8, linestyle="--", zorder=3)
        ax.set(title=title, xlim=(0, widest * 1.42), yticks=[])
        ax.invert_yaxis()
    ax.set_xlabel(f"times as fast as {name_strategy(best.strategy)} (dashed line = 1)")
    budget = " + ".join(map(str, outlook.vram_mib))
    title = f"Predicted, not run: {outlook.model} on {outlook.machine}, {budget} MiB\n{outlook.terms}"
    figure.suptitle(title, fontweight="bold", fontsize=11)
    return figure


def _compare(each: Forecast, best: Forecast, factor: float) -> str:
    return "" if each == best else f"  ({format_factor(factor)})"
