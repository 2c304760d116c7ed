"""Figure: rate over the number of ranks of a tensor-parallel group."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pshard.measurement import Measurement
from pshard.reports.style import CYCLE, OWN_STRATEGY, format_number, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Series = list[tuple[int, float]]


def group_scaling(measurements: Sequence[Measurement]) -> dict[str, dict[str, Series]]:
    """Model and budget per device -> test -> (ranks, best tok/s), ascending; only tests that ran on several counts."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for m in measurements:
        if m.strategy == OWN_STRATEGY:
            per_device = max(m.budget_mib, default=0)
            rates = found.setdefault(f"{m.model}, {per_device} MiB per device", {}).setdefault(m.test, {})
            rates[m.ranks] = max(m.avg_ts, rates.get(m.ranks, 0.0))
    kept = {
        model: {test: sorted(rates.items()) for test, rates in tests.items() if len(rates) > 1}
        for model, tests in found.items()
    }
    return {model: tests for model, tests in kept.items() if tests}


def draw_scaling(title: str, tests: dict[str, Series]) -> "Figure":
    """Speedup over the smallest number of ranks, with the line of perfect scaling."""
    figure = new_figure(7.5, 4.4)
    ax = figure.subplots()
    counts = sorted({n for series in tests.values() for n, _ in series})
    ideal = [n / counts[0] for n in counts]
    ax.plot(counts, ideal, color="#888888", linestyle="--", linewidth=1, label="perfect scaling")
    for i, (test, series) in enumerate(tests.items()):
        base = series[0][1]
        label = f"{test}: {format_number(base)} to {format_number(series[-1][1])} tok/s"
        ax.plot(
            [n for n, _ in series], [rate / base for _, rate in series], "o-", color=CYCLE[i % len(CYCLE)], label=label
        )
    ax.set_xticks(counts)
    ax.set(xlabel="ranks", ylabel=f"times the rate of {counts[0]} rank{'s' if counts[0] > 1 else ''}", ylim=(0, None))
    ax.set_title(f"Tensor parallel: {title}")
    ax.legend(loc="upper left")
    return figure
