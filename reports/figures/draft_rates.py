"""Figure: what each number of drafts a step is predicted to reach, at several acceptances, with what was measured."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pshard.plan import Variant
from pshard.reports.figures.style import CYCLE, GREY, OWN, format_number, new_figure
from pshard.times.measurement import Measurement

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MeasuredDrafts = tuple[int, float]  # drafts of a step at most, tokens a second


def pick_measured(variant: Variant, measurements: Sequence[Measurement]) -> list[MeasuredDrafts]:
    """Of a model's measurements those of decoding with drafts under the plan's budget and number of texts; and beside
    each the same without drafts. Of made-up acceptance those for which the figure has a line."""
    w, said, found = variant.workload, variant.speculation, list[MeasuredDrafts]()
    lines = said.compared() if said else ()
    for m in measurements:
        if m.drafts and not m.n_prompt and (m.budget_mib, m.n_sequences) == (w.vram_mib, w.sequences):
            if m.drafts.made_up and not any(_are_alike(m.drafts.made_up, line.rates) for line in lines):
                continue
            found += [(0, m.drafts.without_ts), (m.drafts.most, m.avg_ts)]
    return found


def _are_alike(rates: Sequence[float], others: Sequence[float]) -> bool:
    """Whether chances are the same but for how many digits they were given with."""
    return all(abs(one - other) < 0.01 for one, other in zip(rates, others))


def draw_draft_rates(model: str, variant: Variant, measured: Sequence[MeasuredDrafts] = ()) -> "Figure":
    """Tokens a second over drafts a step, a line for each acceptance, the one that was planned by in front. Raises
    ValueError for a plan for which no drafts were asked for."""
    said, chosen = variant.speculation, variant.workload.drafting.drafts
    if said is None:
        raise ValueError("no drafts were asked for")
    figure = new_figure(9.5, 4.4)
    ax = figure.subplots()
    counts, colours = [planned.drafts for planned in said.planned], iter(c for c in CYCLE if c != OWN)
    for acceptance in said.compared():
        own = acceptance == said.acceptance
        rates = [said.rate(planned, acceptance) for planned in said.planned]
        label = f"accepted: {acceptance}" + (f" ({acceptance.source}, planned by)" if own else "")
        ax.plot(counts, rates, "o-", color=OWN if own else next(colours), linewidth=2.2 if own else 1.2, label=label)
        if own:
            rate = rates[counts.index(chosen)]
            ax.plot([chosen], [rate], "o", color=OWN, markersize=11, fillstyle="none", label=f"chosen: {chosen}")
    without = said.rate(said.planned[0], said.acceptance)
    ax.axhline(without, color=GREY, linestyle=":", label=f"no drafts: {format_number(without)} tok/s")
    if measured:
        ax.plot(*zip(*measured), "D", color="black", label="measured")
    ax.set(xlabel="drafts a step", ylabel="predicted tok/s", xticks=counts)
    ax.set_ylim(0, None)
    ax.grid(axis="y", color="#E5E5E5")
    figure.legend(loc="outside right upper", fontsize=9)
    budget = " + ".join(f"{mib} MiB" for mib in variant.workload.vram_mib)
    ax.set_title(f"{model} within {budget}: drafts of {said.kind}")
    return figure
