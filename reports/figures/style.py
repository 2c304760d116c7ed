"""How figures look and how they are saved: colours that stay apart for colour-blind readers, no fonts to fetch."""

import io
import itertools
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.jsonio import write_text_atomically

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's palette, "Color Universal Design", 2008
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, GREY = "#CC79A7", "#56B4E9", "#F0E442", "#9A9A9A"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY)
OWN, FAINT = BLUE, "#D8D8D8"  # the planner's own plan; what recedes

OWN_STRATEGY = "ilp"
STRATEGY_COLOURS = {OWN_STRATEGY: OWN, "fit": ORANGE, "accelerate": GREEN}
RESOURCE_NAMES = {"acc": "accelerator", "cpu": "CPU", "link": "link", "dram": "host memory", "vram": "VRAM"}


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of that size in inches, drawn without a display."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(
        {
            "font.family": "DejaVu Sans",  # comes with matplotlib
            "font.size": 10,
            "axes.titlesize": 11,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "svg.hashsalt": "pshard",  # the same input gives the same bytes
        }
    )
    return Figure(figsize=(width, height), layout="constrained")


def use_plain_numbers(axis: "Axis", low: float, high: float) -> None:
    """Name values of a logarithmic axis without exponents; 2 and 5 as well where low to high is short."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.7g}"))
    axis.set_minor_formatter(NullFormatter())


def name_strategy(strategy: str) -> str:
    """Name of a strategy for readers."""
    return "pshard" if strategy == OWN_STRATEGY else strategy


def colour_strategies(strategies: Iterable[str]) -> dict[str, str]:
    """A colour for each strategy: the same in every figure for the known ones."""
    others = itertools.cycle((PURPLE, SKY, RED, GREY))
    return {s: STRATEGY_COLOURS.get(s) or next(others) for s in dict.fromkeys(strategies)}


def format_time(seconds: float) -> str:
    """Seconds, or milliseconds below one second."""
    return f"{format_number(seconds)} s" if seconds >= 1 else f"{format_number(1e3 * seconds)} ms"


def format_number(value: float) -> str:
    """Three significant digits, or all digits before the point, without an exponent for what a report shows."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def save_figure(figure: "Figure", folder: Path, name: str) -> str:
    """Write `name`.png and `name`.svg into the folder, each whole or not at all; returns the SVG's text."""
    svg, png = io.StringIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    figure.set_layout_engine("none")  # it is laid out, which takes longer than drawing it again
    figure.savefig(png, format="png", dpi=150)
    write_text_atomically(folder / f"{name}.svg", svg.getvalue())
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(png.getvalue())
        os.chmod(temporary, 0o644)
        os.replace(temporary, folder / f"{name}.png")
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return svg.getvalue()
