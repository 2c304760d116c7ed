"""What a server can promise, as tables for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pshard.planner.serving.promise import Promise
from pshard.print_table import print_whole

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = ("requests at once", "tok/s of all", "gap ms", "gap beside a prompt ms", "first token s")


def describe_promise(each: Promise) -> str:
    """A line: what the expected number of requests gets, and how many have room."""
    pace = max((p for p in each.paces if p.requests <= max(1, each.concurrency)), key=lambda p: p.requests)
    verb = "have" if each.at_once > 1 else "has"
    many = f"{pace.requests} requests at once get" if pace.requests > 1 else "one request alone gets"
    return (
        f"predicted for requests of {each.prompt} + {each.generated} tokens, of which {each.at_once} {verb} room: "
        f"{many} {show_rate(pace.rate)} tok/s, a token every {1e3 * pace.gap:.0f} ms ({1e3 * pace.longest_gap:.0f} "
        f"beside a prompt), the first after {pace.first_token:.2g} s"
    )


def print_promises(promises: Sequence[Promise], out: "Console") -> None:
    """A table for each budget; nothing where no plan is for a server."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    for each in promises:
        budget = ",".join(map(str, each.vram_mib))
        text = (
            f"\nA server under {budget} MiB runs up to {each.at_once} requests of {each.prompt} + {each.generated} "
            f"tokens at once, prompts in steps of {each.chunk} tokens. Predicted:"
        )
        out.print(text, highlight=False, soft_wrap=True)
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for name in COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for pace in each.paces:
            gaps = (f"{1e3 * seconds:.0f}" for seconds in (pace.gap, pace.longest_gap))
            table.add_row(str(pace.requests), show_rate(pace.rate), *gaps, f"{pace.first_token:.3g}")
        print_whole(table, out)


def show_rate(tokens_per_second: float) -> str:
    """Four figures, and whole numbers above them."""
    return f"{tokens_per_second:.4g}" if tokens_per_second < 1e4 else f"{tokens_per_second:.0f}"
