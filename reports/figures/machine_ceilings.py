"""Figure: what a machine can do, as its profile says."""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pshard.machine import MachineProfile, MatmulTiming
from pshard.reports.figures.style import BLUE, CYCLE, new_figure, use_plain_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_TYPES = 6  # as many as there are colours
SIDES = {"acc": "accelerator", "host": "host"}
STYLES: dict[str, dict[str, Any]] = {"acc": {"marker": "o", "ls": "-"}, "host": {"marker": "s", "ls": "--"}}
OTHER: dict[str, Any] = {"marker": "^", "ls": ":"}  # accelerators unlike the first
DIRECTIONS = {"h2d": "to device", "d2h": "from device"}


def draw_machine(profile: MachineProfile) -> "Figure":
    """Host memory rate by threads, link rate by size, matmul rate by tokens."""
    figure = new_figure(13, 4.8)
    reads, copies, matmuls = figure.subplots(1, 3)
    _draw_reads(reads, profile)
    _draw_copies(copies, profile)
    _draw_matmuls(matmuls, profile.matmuls)
    for ax in (reads, copies, matmuls):
        ax.grid(axis="y", color="#E5E5E5")
    accelerators = ", ".join(a.name for a in profile.accelerators) or "no accelerator"
    figure.suptitle(f"{profile.host.cpu} and {accelerators}", fontweight="bold", fontsize=11)
    return figure


def _draw_reads(ax: "Axes", profile: MachineProfile) -> None:
    from matplotlib.ticker import MaxNLocator

    rows = sorted((r.threads, r.rate / 1e9) for r in profile.reads)
    ax.plot([n for n, _ in rows], [rate for _, rate in rows], "o-", color=BLUE)
    ax.axvline(profile.host.threads, color="#888888", linestyle="--", linewidth=1)
    chosen = f"{profile.host.threads} chosen "
    ax.text(profile.host.threads, 0.02, chosen, ha="right", transform=ax.get_xaxis_transform(), fontsize=9)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(
        title="Reading host memory",
        xlabel="threads",
        ylabel="GB/s",
        ylim=(0, 1.12 * max((rate for _, rate in rows), default=1)),
    )
    ax.set_xlim(0, 1.08 * max(profile.host.threads, *(n for n, _ in rows), 1))


def _draw_copies(ax: "Axes", profile: MachineProfile) -> None:
    series: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for c in (c for c in profile.copies if c.device == "acc"):  # one link: those of others would hide it
        series.setdefault((c.direction, c.memory), []).append((c.nbytes, c.nbytes / c.seconds / 1e9))
    for i, ((direction, memory), points) in enumerate(sorted(series.items(), key=lambda s: s[0], reverse=True)):
        points.sort()
        style = "o-" if memory == "pinned" else "s--"
        label = f"{DIRECTIONS.get(direction, direction)}, {memory}"
        width = 2.2 if i < 2 else 1.2  # so that equal curves both show
        ax.plot(*zip(*points), style, color=CYCLE[i % len(CYCLE)], linewidth=width, label=label)
    ax.set(title="Copies over the link", xlabel="size of one copy", ylabel="GB/s", xscale="log", ylim=(0, None))
    _name_ticks(ax, {c.nbytes: _name_size(c.nbytes) for c in profile.copies})
    if series:
        ax.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def _draw_matmuls(ax: "Axes", timings: Sequence[MatmulTiming]) -> None:
    """The largest shape of each quant type; where many types were timed, those timed in most shapes."""
    from matplotlib.lines import Line2D

    counts = Counter(t.qtype for t in timings)
    shown = sorted(q for q, _ in counts.most_common(MOST_TYPES))
    colours = dict(zip(shown, CYCLE))
    devices = sorted({t.device for t in timings})
    for device, qtype in itertools.product(devices, shown):
        rows = [t for t in timings if (t.device, t.qtype) == (device, qtype)]
        largest = max(((t.rows * t.cols, t.rows, t.cols) for t in rows), default=None)
        points = sorted((t.tokens, t.seconds) for t in rows if (t.rows * t.cols, t.rows, t.cols) == largest)
        if largest:
            rates = [2 * n * largest[0] / seconds / 1e9 for n, seconds in points]
            ax.plot([n for n, _ in points], rates, color=colours[qtype], markersize=4, **STYLES.get(device, OTHER))
    some = f" ({len(shown)} of {len(counts)} quant types)" if len(shown) < len(counts) else ""
    ax.set(title=f"Matrix products{some}", xlabel="tokens", ylabel="GFLOP/s", xscale="log", yscale="log")
    _name_ticks(ax, {t.tokens: str(t.tokens) for t in timings})
    use_plain_numbers(ax.yaxis, *ax.get_ylim())
    handles = [Line2D([], [], color=colours[q], label=q) for q in shown]
    handles += [
        Line2D([], [], color="black", label=SIDES.get(d, f"accelerator {d[3:]}"), markersize=4, **STYLES.get(d, OTHER))
        for d in devices
    ]
    if handles:
        ax.legend(handles=handles, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def _name_ticks(ax: "Axes", names: dict[int, str]) -> None:
    """Name some of these values on a logarithmic x axis."""
    from matplotlib.ticker import NullLocator

    ticks = sorted(names)[:: max(1, -(-len(names) // 7))]
    ax.set_xticks(ticks, [names[tick] for tick in ticks])
    ax.xaxis.set_minor_locator(NullLocator())


def _name_size(nbytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:g} {unit}"
    return f"{nbytes} B"
