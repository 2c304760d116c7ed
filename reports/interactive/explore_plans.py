"""Plans of one model to look into: a grid of units by tiers for every budget, and a slider over the budgets.

Without scripts all grids stand below each other, and browsers show the titles of boxes by themselves.
"""

import re
from collections.abc import Sequence
from html import escape

from pshard.homes import list_sorts
from pshard.plan import Placement, TierPlan, Variant
from pshard.predicted_times import decode_rate, first_token_seconds
from pshard.reports.figures.style import RESOURCE_NAMES, format_number, format_time
from pshard.reports.interactive.svg import draw_box, draw_svg, write_text
from pshard.reports.summary import name_sort

MOST_BUDGETS = 24  # of one slider; a page of more is slow to open
BOX, LEFT = 11.0, 120.0
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


def explore_plans(plans: Sequence[tuple[str, Variant]]) -> list[str]:
    """HTML of a section for each model and terms, of plans on one device."""
    groups: dict[tuple[str, str], list[Variant]] = {}
    for model, variant in plans:
        if len(variant.ranks) == 1:
            groups.setdefault((model, variant.terms), []).append(variant)
    return [_explore(model, terms, variants) for (model, terms), variants in groups.items()]


def _explore(model: str, terms: str, variants: list[Variant]) -> str:
    variants = sorted(variants, key=lambda v: v.workload.vram_mib)[:MOST_BUDGETS]
    last = len(variants) - 1
    slider = (
        f'<p class="slider" hidden><label>VRAM budget <input type="range" min="0" max="{last}" value="{last}" step="1">'
        "</label> <output></output></p>"
    )
    return "\n".join(
        [
            '<section class="explorer">',
            f"<h2>Look into the plan of {escape(model)}</h2>",
            f"<p>{escape(terms)}. A box is a unit in one tier; move over it, or tap it, to see what it is.</p>",
            slider if last else "",
            *(_draw_budget(model, variant) for variant in variants),
            '<p class="told" aria-live="polite"></p>',
            "</section>",
        ]
    )


def _draw_budget(model: str, variant: Variant) -> str:
    (rank,) = variant.ranks
    kinds = dict.fromkeys(m[2] for p in rank.tiers[0].placements if (m := _LAYER.match(p.unit)))
    rows = {kind: i for i, kind in enumerate(kinds)}
    layers = 1 + max((int(m[1]) for p in rank.tiers[0].placements if (m := _LAYER.match(p.unit))), default=-1)
    step, parts = BOX * (len(rows) + 1.2), list[str]()
    for number, tier in enumerate(rank.tiers):
        top = number * step
        parts.append(write_text(0, top + BOX, f"{tier.tokens} token{'s' * (tier.tokens > 1)}"))
        parts += [_draw_unit(place, tier, rows, layers, top) for place in tier.placements]
    budget = variant.workload.vram_mib[0]
    rates = (
        f"first token after {format_time(first_token_seconds(variant))}, then "
        f"{format_number(decode_rate(variant))} tokens a second, predicted"
    )
    label = f"Where the units of {model} are within {budget} MiB, by tier. {_count(rank.tiers)}"
    grid = draw_svg(LEFT + BOX * (layers + 5), step * len(rank.tiers), label, parts)
    return (
        f'<figure data-budget="{budget} MiB"><figcaption><b>{budget} MiB</b>: {escape(rates)}</figcaption>'
        f'<div class="scroll">{grid}</div></figure>'
    )


def _count(tiers: Sequence[TierPlan]) -> str:
    """The same in words."""
    said = []
    for tier in tiers:
        sorts = [place.sort for place in tier.placements]
        where = ", ".join(f"{sorts.count(sort)} {name_sort(sort)}" for sort in list_sorts(sorts) if sort in sorts)
        said.append(f"{tier.tokens} tokens: {where}.")
    return " ".join(said)


def _draw_unit(place: Placement, tier: TierPlan, rows: dict[str, int], layers: int, top: float) -> str:
    match = _LAYER.match(place.unit)
    column = int(match[1]) + 2 if match else 0 if place.unit == tier.placements[0].unit else layers + 3
    row = rows[match[2]] if match else 0
    height = BOX - 1 if match else BOX * max(1, len(rows)) - 1
    title = f"{place.unit}, {tier.tokens} tokens: {name_sort(place.sort)}"
    if place.share:
        title += f", the CPU's share {place.share}"
    if place.kv:
        title += f"; its cache in {'VRAM' if place.kv == 'vram' else 'host memory'}"
    p = tier.prediction
    title += f". The tier takes {format_time(p.seconds)}, limited by the {RESOURCE_NAMES.get(p.binds, p.binds)}"
    return draw_box(LEFT + BOX * column, top + BOX * row, BOX - 1, height, place.sort, title)
