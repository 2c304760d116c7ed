"""Tables for people."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDEST = 400  # characters of a table


def print_whole(table: "Table", out: "Console") -> None:
    """Print a table as wide as it is: on a pipe a console is 80 columns wide, and would cut words and figures off."""
    wide = out.measure(table, options=out.options.update(max_width=WIDEST)).maximum
    before, out.width = out.width, max(out.width, wide)
    out.print(table)
    out.width = before
