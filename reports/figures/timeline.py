"""Figure: what the link, the CPU and the accelerator do during one step."""

from textwrap import fill
from typing import TYPE_CHECKING, Any

from pshard.homes import BACK, LINK, list_lanes
from pshard.reports.figures.style import BLUE, FAINT, GREEN, ORANGE, PURPLE, RED, new_figure
from pshard.times.measurement import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NARROW = 0.014  # of the step: narrower bars have no room for a label, not even an upright one
THIN = 0.004  # of the step: narrower bars get no white edge, which would hide them
LANES = (
    ("link", "link, to device", ORANGE),
    ("d2h", "link, from device", PURPLE),
    ("acc", "accelerator", BLUE),
    ("cpu", "CPU", GREEN),
)


def draw_timeline(timeline: Timeline) -> "Figure":
    """One bar per event in the lane of its resource; idle time is left grey, its share is named at the right."""
    further = [(lane.name, lane.name, RED) for lane in list_lanes() if lane not in (LINK, BACK)]
    lanes = [lane for lane in (*further, *LANES) if any(e.lane == lane[0] for e in timeline.events)]
    end = max(e.end for e in timeline.events)
    scale, unit = (1e3, "ms") if end < 10 else (1.0, "s")
    figure = new_figure(11, 1.5 + 0.72 * len(lanes))
    ax = figure.subplots()
    for row, (lane, _, colour) in enumerate(lanes):
        ax.barh(row, end * scale, 0.8, color=FAINT, alpha=0.5)
        events = [e for e in timeline.events if e.lane == lane]
        starts = [max(e.start, 0.0) for e in events]
        widths = [(e.end - start) * scale for e, start in zip(events, starts)]
        lefts = [start * scale for start in starts]
        edges = ["white" if width > THIN * end * scale else colour for width in widths]
        ax.barh([row] * len(events), widths, 0.8, lefts, color=colour, edgecolor=edges, linewidth=0.4)
        for event, left, width in zip(events, lefts, widths):
            label, share = shorten_label(event.label), width / (end * scale)
            if share > NARROW:
                rotation = 0 if share > 0.01 * len(label) else 90
                ink = "black" if colour == ORANGE else "white"
                place: dict[str, Any] = {"ha": "center", "va": "center", "rotation": rotation}
                ax.text(left + width / 2, row, label, color=ink, fontsize=8, **place)
        busy = sum(widths) / (end * scale)
        ax.text(1.01, row, f"busy {busy:.0%}", va="center", transform=ax.get_yaxis_transform())
    ax.set_yticks(range(len(lanes)), [name for _, name, _ in lanes])
    ax.set(
        xlim=(0, end * scale),
        ylim=(len(lanes) - 0.5, -0.5),
        xlabel=f"{unit} since the step began",
        title="\n".join(fill(line, 85) for line in timeline.title.splitlines()),
    )
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    return figure


def shorten_label(label: str) -> str:
    """A unit's name without what every name has: "blk.3.attention" becomes "3.attn"."""
    return label.replace("blk.", "").replace("attention", "attn")
