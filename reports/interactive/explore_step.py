"""One step to look into: what every lane does, with what and for how long under the mouse."""

from html import escape

from pshard.reports.figures.style import format_time
from pshard.reports.figures.timeline import LANES, shorten_label
from pshard.reports.interactive.svg import draw_box, draw_svg, write_text
from pshard.times.measurement import Timeline

WIDTH, LEFT, ROW = 1150.0, 130.0, 26.0


def explore_step(timeline: Timeline) -> str:
    """HTML of a timeline's lanes; what begins before the step is drawn from its beginning on."""
    end = max(event.end for event in timeline.events)
    lanes = [(lane, name) for lane, name, _ in LANES if any(e.lane == lane for e in timeline.events)]
    parts = []
    for row, (lane, name) in enumerate(lanes):
        parts.append(write_text(0, row * ROW + 16, name))
        for event in (e for e in timeline.events if e.lane == lane):
            start = max(event.start, 0.0)
            title = (
                f"{shorten_label(event.label)}: {format_time(event.end - event.start)}, from {format_time(start)} on"
            )
            x, width = LEFT + WIDTH * start / end, WIDTH * (event.end - start) / end
            parts.append(draw_box(round(x, 2), row * ROW, max(0.4, round(width, 2)), ROW - 4, lane, title))
    busy = ", ".join(
        f"{name} busy {sum(e.end - max(e.start, 0.0) for e in timeline.events if e.lane == lane) / end:.0%}"
        for lane, name in lanes
    )
    picture = draw_svg(LEFT + WIDTH, ROW * len(lanes), f"Lanes of one step: {timeline.title}. {busy}.", parts)
    return (
        f'<section class="explorer"><div class="scroll">{picture}</div><p class="told" aria-live="polite">'
        f"{escape('Move over a bar to see what it is.')}</p></section>"
    )
