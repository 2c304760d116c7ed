"""Figure: how many routed experts of every layer lie where, in every tier of one plan."""

from textwrap import fill
from typing import TYPE_CHECKING

from pshard.reports.figures.style import BLUE, FAINT, ORANGE, SKY, format_number, new_figure
from pshard.routing.expert_map import PLACES, ExpertMap, TierExperts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = dict(zip(PLACES, (BLUE, ORANGE, SKY, FAINT)))
MEANINGS = dict(
    zip(
        PLACES,
        (
            "in VRAM",
            "streamed: copied before use",
            "read over the link, those that were chosen",
            "computed on the CPU",
        ),
    )
)


def draw_experts(experts: ExpertMap) -> "Figure":
    """A strip for each tier; a bar for each layer with experts, as high as there are experts."""
    from matplotlib.patches import Patch

    layers = [layer.layer for layer in experts.tiers[0].layers]
    width = max(8.5, 4.6 + 0.17 * (layers[-1] + 1))
    figure = new_figure(width, 1.9 + 0.75 * len(experts.tiers))
    strips = figure.subplots(len(experts.tiers), 1, sharex=True, squeeze=False)[:, 0]
    for ax, tier in zip(strips, experts.tiers):
        _draw_tier(ax, tier, experts)
    strips[-1].set_xlabel("layer")
    strips[-1].set_xlim(layers[0] - 0.7, layers[-1] + 0.7)
    title = f"Where the {experts.count} experts of each layer of {experts.model} lie within {experts.budget_mib} MiB"
    title += f" of rank {experts.rank}" if experts.rank else ""
    figure.suptitle(f"{title}\n{fill(experts.terms, 85)}", fontweight="bold", fontsize=11)
    used = [place for i, place in enumerate(PLACES) if any(each.counts[i] for t in experts.tiers for each in t.layers)]
    handles = [Patch(color=COLOURS[place], label=MEANINGS[place]) for place in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=4 if width > 9.5 else 2, fontsize=9)
    return figure


def _draw_tier(ax: "Axes", tier: TierExperts, experts: ExpertMap) -> None:
    layers = [each.layer for each in tier.layers]
    at = [0] * len(layers)
    for i, place in enumerate(PLACES):
        heights = [each.counts[i] for each in tier.layers]
        if any(heights):
            ax.bar(layers, heights, 0.9, at, color=COLOURS[place])
            at = [low + more for low, more in zip(at, heights)]
    ax.set_ylim(0, experts.count)
    ax.set_yticks([0, experts.count])
    ax.tick_params(length=0, labelsize=8)
    ax.spines[:].set_visible(False)
    ax.set_ylabel(f"{tier.tokens} token{'s' if tier.tokens > 1 else ''}", rotation=0, ha="right", va="center")
    text = f"{format_number(tier.link_nbytes / tier.tokens / 1e6)} MB a token\nover the link"
    text += f"\n{tier.found:.0%} in {sum(s.count for s in experts.slots)} slots" if tier.found else ""
    ax.annotate(
        text, (1, 0.5), (8, 0), xycoords="axes fraction", textcoords="offset points", va="center", fontsize=9
    )  # fmt: skip
