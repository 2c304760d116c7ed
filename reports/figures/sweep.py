"""Figure: what a plan is predicted to reach as the VRAM budget grows."""

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING

from pshard.cuts.layer_cuts import join_seconds
from pshard.plan import Variant
from pshard.predicted_times import decode_rate
from pshard.reports.figures.style import BLUE, ORANGE, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def group_sweeps(variants: Sequence[Variant]) -> list[list[Variant]]:
    """Variants of one workload at several budgets, ascending; workloads with one budget are left out."""
    groups: dict[tuple, list[Variant]] = {}
    for v in variants:
        w = v.workload
        key = (w.context, w.sequences, w.type_k, w.type_v, w.max_ubatch, w.prompt, w.split_mode, len(w.vram_mib))
        groups.setdefault(key, []).append(v)
    return [sorted(group, key=lambda v: sum(v.workload.vram_mib)) for group in groups.values() if len(group) > 1]


def draw_sweep(model: str, variants: Sequence[Variant]) -> "Figure":
    """Predicted decode rate and time to first token over the budget of all devices."""
    first = variants[0]
    mib = [sum(v.workload.vram_mib) for v in variants]
    per_unit, unit = (1024, "GiB") if max(mib) >= 4096 else (1, "MiB")
    budgets = [n / per_unit for n in mib]
    first_tokens = [predict_first_token(v) for v in variants]
    scale, seconds = (1, "seconds") if max(first_tokens) >= 1 else (1e3, "milliseconds")
    figure = new_figure(9.5, 4.2)
    decode, prefill = figure.subplots(1, 2)
    decode.plot(budgets, [predict_decode(v) for v in variants], "o-", color=BLUE)
    decode.set(title="Decode", ylabel="predicted tok/s")
    prefill.plot(budgets, [t * scale for t in first_tokens], "o-", color=ORANGE)
    prefill.set(title=f"Time to first token, prompt of {first.workload.prompt}", ylabel=f"predicted {seconds}")
    for ax in (decode, prefill):
        ax.set_xlabel(f"VRAM budget, {unit}")
        ax.set_ylim(0, 1.12 * max(ax.lines[0].get_ydata()))
        ax.grid(axis="y", color="#E5E5E5")
    terms = first.terms + (f", -sm {first.workload.split_mode}" if len(first.ranks) > 1 else "")
    title = f"{model}: what more VRAM buys"
    figure.suptitle(f"{title}\n{fill(terms, 85)}", fontweight="bold", fontsize=11)
    return figure


def predict_decode(variant: Variant) -> float:
    """Tokens per second over all sequences that run at once."""
    w = variant.workload
    if w.drafting.drafts:
        return decode_rate(variant)
    return w.sequences / join_seconds(w.split_mode, [_seconds(variant, w.sequences)])


def predict_first_token(variant: Variant) -> float:
    """Seconds to prefill one prompt in micro-batches, each counted as a full one of the tier that covers it."""
    w = variant.workload
    largest = min(w.max_ubatch, variant.ranks[0].tiers[-1].tokens)
    whole, rest = divmod(w.prompt, largest)
    batches = [largest] * whole + ([rest] if rest else [])
    return join_seconds(w.split_mode, [_seconds(variant, n) for n in batches])


def _seconds(variant: Variant, tokens: int) -> list[float]:
    """Predicted seconds of a micro-batch on every rank."""
    return [rank.covering(tokens).prediction.seconds for rank in variant.ranks]
