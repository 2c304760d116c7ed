"""Markdown tables, padded so that they read well in a terminal too."""

from collections.abc import Sequence


def draw_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """The table, ending in a newline; `right`: whether a column is aligned right."""
    widths = [
        max(2, *(len(row[i]) for row in [headings, *rows])) for i in range(len(headings))
    ]  # 2: a dash and a colon

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right))
        return f"| {' | '.join(padded)} |"

    rule = "|".join(f" {'-' * (w - 1)}: " if r else f" {'-' * w} " for w, r in zip(widths, right))
    return "\n".join([line(headings), f"|{rule}|", *map(line, rows)]) + "\n"
