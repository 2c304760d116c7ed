"""Figure: the report in one picture, beside its three sentences."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pshard.plan import Variant
from pshard.reports.figures.placement_map import colour_of
from pshard.reports.figures.style import OWN, OWN_STRATEGY, colour_strategies, format_number, name_strategy, new_figure
from pshard.reports.summary import Gain, count_places, name_sort

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_in_short(
    rates: Sequence[tuple[str, float]], plan: tuple[str, Variant] | None, gains: Sequence[Gain]
) -> "Figure":
    """A panel each for what there is: GB/s that the machine moves, where the plan has units, measured rates of the plan
    and of its best alternative. Whiskers end at the slowest and at the fastest repeat."""
    panels = [bool(rates), plan is not None, *(True for _ in gains)]
    figure = new_figure(3.4 * sum(panels), 2.9)
    axes = iter(figure.subplots(1, sum(panels), squeeze=False)[0])
    if rates:
        _draw_rates(next(axes), rates)
    if plan:
        _draw_places(next(axes), plan[1])
    for gain in gains:
        _draw_gain(next(axes), gain)
    return figure


def _draw_rates(ax: "Axes", rates: Sequence[tuple[str, float]]) -> None:
    bars = ax.bar(
        [name.replace(" to the ", "\nto the ") for name, _ in rates], [rate for _, rate in rates], 0.6, color=OWN
    )
    ax.bar_label(bars, [format_number(rate) for _, rate in rates])
    ax.set(title="The machine moves", ylabel="GB/s")


def _draw_places(ax: "Axes", variant: Variant) -> None:
    tiers = variant.ranks[0].tiers
    for x, tier in enumerate((tiers[0], tiers[-1])):
        below = 0
        for sort, count in count_places(tier).items():
            ax.bar(x, count, 0.6, below, color=colour_of(sort), label=name_sort(sort))
            below += count
    ax.set_xticks([0, 1], ["answers", "prompts"])
    handles = {label: handle for handle, label in zip(*ax.get_legend_handles_labels())}
    ax.legend(handles.values(), handles.keys(), fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
    ax.set(title="The plan has units", ylabel="units")


def _draw_gain(ax: "Axes", gain: Gain) -> None:
    runs = (gain.own, gain.best)
    colours = colour_strategies([OWN_STRATEGY, gain.best.strategy])
    means = [m.avg_ts for m in runs]
    below, above = ([m.avg_ts - min(m.samples_ts) for m in runs], [max(m.samples_ts) - m.avg_ts for m in runs])
    bars = ax.bar(
        [name_strategy(m.strategy) for m in runs], means, 0.6, color=[colours[m.strategy] for m in runs],
        yerr=(below, above), error_kw={"linewidth": 1, "capsize": 3},
    )  # fmt: skip
    ax.bar_label(bars, [format_number(mean) for mean in means], label_type="center", color="white", fontweight="bold")
    what = f"Prompts of {gain.own.n_prompt}" if gain.is_prompt else "Answers"
    ax.set(title=f"{what}: {gain.times:.2f} times", ylabel="tokens/s, measured")
