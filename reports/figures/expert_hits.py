"""Figure: what share of a run's choices found their expert in VRAM, from its first decoded tokens to its last."""

from typing import TYPE_CHECKING

from pshard.reports.figures.style import BLUE, GREEN, GREY, new_figure
from pshard.routing.hits_over_time import HitCourse

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_hits(course: HitCourse) -> "Figure":
    """Two bands, one on the other: experts that stay, and slots that follow use; a line where the plan expects their
    upper end."""
    figure = new_figure(8.5, 3.4)
    ax = figure.subplots()
    edges, top = (0, *course.ends), [a + b for a, b in zip(course.stay, course.slots)]
    bands: list[tuple[str, str, list[float], list[float]]] = [
        ("experts that stay in VRAM", BLUE, [0.0] * len(top), list(course.stay)),
        ("slots that follow use", GREEN, list(course.stay), top),
    ]
    for label, colour, low, high in bands:
        if any(b > a for a, b in zip(low, high)):
            ax.stairs(high, edges, baseline=low, fill=True, color=colour, label=label)
    expected = course.expected_stay + course.expected_slots
    ax.axhline(expected, color=GREY, linestyle="--", label=f"expected: {expected:.0%}")
    ax.set_xlim(0, course.ends[-1])
    ax.set_ylim(0, 1)
    ax.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    ax.set_xlabel("tokens decoded")
    ax.set_ylabel("choices found in VRAM")
    ax.set_title(course.title)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return figure
