"""Figure: where every unit of every layer lives in every tier of one plan."""

import re
from textwrap import fill
from typing import TYPE_CHECKING, Any

from pshard.homes import DIVIDED, ON_CPU, ON_DEMAND, PINNED, STREAMED, list_sorts
from pshard.plan import Placement, RankPlan, TierPlan, Variant
from pshard.reports.figures.style import (
    BLUE,
    FAINT,
    GREEN,
    ORANGE,
    OWN_STRATEGY,
    PURPLE,
    RESOURCE_NAMES,
    format_number,
    format_time,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {PINNED: BLUE, STREAMED: ORANGE, ON_CPU: FAINT, DIVIDED: GREEN}
MEANINGS = {
    PINNED: "pinned: weights stay in VRAM",
    STREAMED: "streamed: copied before use",
    ON_CPU: "cpu: computed on the host",
    ON_DEMAND: "demand: from disk, what is used",
    DIVIDED: "divided: rows on both sides",
}
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


def colour_of(sort: str) -> str:
    """The colour of units by where they are; one for all that live beyond host memory."""
    return COLOURS.get(sort, PURPLE)


def draw_placement(model: str, variant: Variant, rank: RankPlan) -> "Figure":
    """Tiers by layers, one row for each kind of unit; dots mark layers whose KV cache is in VRAM."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    layers = 1 + max((int(m[1]) for p in rank.tiers[0].placements if (m := _LAYER.match(p.unit))), default=-1)
    kinds = list(dict.fromkeys(m[2] for p in rank.tiers[0].placements if (m := _LAYER.match(p.unit))))
    width = max(8.5, 4.6 + 0.17 * layers)
    figure = new_figure(width, 2.0 + 0.3 * (len(kinds) + 0.7) * len(rank.tiers))
    ax = figure.subplots()
    at, labels = 0.0, []
    for tier in rank.tiers:
        _draw_tier(ax, tier, kinds, layers, at)
        labels += [(at + i, kind) for i, kind in enumerate(kinds)]
        middle = at + (len(kinds) - 1) / 2
        edge: dict[str, Any] = {"xycoords": ax.get_yaxis_transform(), "textcoords": "offset points", "va": "center"}
        ax.annotate(_name_tier(tier, variant), (0, middle), (-70, 0), ha="right", **edge)
        ax.annotate(_describe_tier(tier), (1, middle), (10, 0), fontsize=9, **edge)
        at += len(kinds) + 0.7
    ax.set(xlim=(-2.8, layers + 1.8), ylim=(at - 1.1, -0.6))
    ax.set_yticks([y for y, _ in labels], [kind for _, kind in labels], fontsize=8)
    step = max(1, -(-layers // 16))
    ax.set_xticks([-2, *range(0, layers, step), layers + 1], ["emb", *range(0, layers, step), "out"])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("layer")
    whose = f", rank {rank.rank} of {len(variant.ranks)}" if len(variant.ranks) > 1 else ""
    terms = variant.terms + (f", {variant.way}" if len(variant.ranks) > 1 or variant.workload.device else "")
    title = f"Where {model} lives within {rank.budget_mib} MiB of VRAM{whose}"
    figure.suptitle(f"{title}\n{fill(terms, 85)}", fontweight="bold", fontsize=11)
    used = {p.sort for tier in rank.tiers for p in tier.placements}
    handles: list = [
        Patch(color=colour_of(w), label=MEANINGS.get(w, f"{w}: copied before use"))
        for w in list_sorts(used)
        if w in used
    ]
    anywhere = any(p.has_state_in_vram for tier in rank.tiers for p in tier.placements)
    dot = "KV cache in VRAM (else host)" if anywhere else "KV cache in VRAM (no layer's here)"
    handles.append(Line2D([], [], marker="o", color="black", linestyle="", markersize=3.5, label=dot))
    figure.legend(handles=handles, loc="outside lower center", ncols=4 if width > 9.5 else 2, fontsize=9)
    return figure


def _draw_tier(ax: "Axes", tier: TierPlan, kinds: list[str], layers: int, at: float) -> None:
    for place in tier.placements:
        match = _LAYER.match(place.unit)
        if match:
            _draw_unit(ax, place, int(match[1]), at + kinds.index(match[2]), 1.0)
        else:
            x = -2 if place.unit == tier.placements[0].unit else layers + 1
            _draw_unit(ax, place, x, at + (len(kinds) - 1) / 2, float(len(kinds)))


def _draw_unit(ax: "Axes", place: Placement, x: float, y: float, height: float) -> None:
    ax.bar(x, height * 0.9, 0.9, y - height * 0.45, color=colour_of(place.sort))
    if place.has_state_in_vram:
        ax.plot(x, y, "o", color="white" if place.site.in_arena else "black", markersize=3.5)


def _name_tier(tier: TierPlan, variant: Variant) -> str:
    name = f"{tier.tokens} token{'s' if tier.tokens > 1 else ''}"
    return f"decode\n{name}" if tier.tokens == variant.workload.answer_rows else name


def _describe_tier(tier: TierPlan) -> str:
    p = tier.prediction
    rate = format_number(tier.tokens / p.seconds)
    baseline = "" if tier.solve.strategy == OWN_STRATEGY else f", plan: {tier.solve.strategy}"
    return f"{format_time(p.seconds)}, {rate} tok/s predicted\nlimit: {RESOURCE_NAMES.get(p.binds, p.binds)}{baseline}"
