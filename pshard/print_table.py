"""Tables for people, and the sizes in them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDEST = 400  # characters of a table
TEXTS = ("binds", "plan", "way", "why")  # columns that hold no figures


def new_table(title: str, columns: tuple[str, ...], left: tuple[str, ...] = TEXTS) -> "Table":
    """A plain table of figures, which stand to the right; columns of texts, by name, to the `left`."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.pad_edge = False
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table


def show_size(nbytes: int) -> str:
    """Bytes in the largest unit of which there is one."""
    for suffix, unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {suffix}"
    return f"{nbytes} B"


def count_mib(nbytes: int) -> int:
    """MiB that hold so many bytes."""
    return -(-nbytes // (1 << 20))


def print_whole(table: "Table", out: "Console") -> None:
    """Print a table as wide as it is: on a pipe a console is 80 columns wide, and would cut words and figures off.
    What a file or a pipe gets has no spaces at the ends of lines, as cells and titles are filled up with."""
    wide = out.measure(table, options=out.options.update(max_width=WIDEST)).maximum
    before, out.width = out.width, max(out.width, wide)
    if out.is_terminal:  # where cells have colours, and nobody compares lines
        out.print(table)
    else:
        with out.capture() as printed:
            out.print(table)
        out.out("\n".join(line.rstrip() for line in printed.get().split("\n")), end="", highlight=False)
    out.width = before
