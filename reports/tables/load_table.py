"""Loads of servers as a table for people: a row for each load."""

from collections.abc import Sequence

from pshard.reports.tables.markdown_table import draw_table
from pshard.times.server_load import LoadPoint, ServerLoad, Spread

TIMES = tuple(f"{what} ms, p50 / 95 / 99" for what in ("first token", "gap", "end"))
HEADINGS = ("server", "load", "requests", "errors", *TIMES, "prompt t/s", "answer t/s")


def format_loads(loads: Sequence[ServerLoad]) -> str:
    """A Markdown table of `list_loads`."""
    headings, rows = list_loads(loads)
    return draw_table(headings, rows, [i > 1 for i in range(len(headings))])


def list_loads(loads: Sequence[ServerLoad]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows; times are those that 50, 95 and 99 of a hundred do not exceed."""
    promised = any(point.kept is not None for load in loads for point in load.points)
    headings = [*HEADINGS, *(("kept", "goodput/s") if promised else ())]
    return headings, [_row(load, point, promised) for load in loads for point in load.points]


def name_load(point: LoadPoint) -> str:
    """Such as "16 clients", "0.5/s", "2/s in bursts of 8"."""
    if point.pattern == "clients":
        return f"{point.load:g} client{'s' if point.load > 1 else ''}"
    return f"{point.load:g}/s" + (f" in bursts of {point.burst}" if point.burst > 1 else "")


def _row(load: ServerLoad, point: LoadPoint, promised: bool) -> list[str]:
    errors = sum(n for _, n in point.errors)
    kinds = ", ".join(f"{n} x {what}" for what, n in point.errors)
    odd = ", ".join(f"{n} {what}" for n, what in ((point.cancelled, "left"), (point.slow, "slow")) if n)
    requests = f"{point.requests} ({odd})" if odd else str(point.requests)
    row = [load.server, name_load(point), requests, f"{errors} ({kinds})" if errors else "0"]
    row += [_spread(spread) for spread in (point.first_token, point.gap, point.end)]
    row += [f"{point.prompt_rate:.1f}", _rates(point)]
    if promised:
        asked = point.requests - point.cancelled - point.slow
        row += ["-" if point.kept is None else f"{point.kept}/{asked}"]
        row += ["-" if point.goodput is None else f"{point.goodput:.3g}"]
    return row


def _rates(point: LoadPoint) -> str:
    steady = "" if point.steady_rate is None else f" ({point.steady_rate:.1f} steady)"
    return f"{point.answer_rate:.1f}{steady}"


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return " / ".join(f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}" for ms in (spread.p50, spread.p95, spread.p99))
