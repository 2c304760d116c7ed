"""Hit rates as a table for people."""

from typing import TYPE_CHECKING

from pshard.print_table import print_whole
from pshard.routing.replay import Replay

if TYPE_CHECKING:
    from rich.console import Console


def print_replay(replay: Replay, out: "Console") -> None:
    """One row for each policy, with its hit rate at each size."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"Choices that find their expert in VRAM, by replay of {replay.tokens} tokens"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("experts of each layer in VRAM", no_wrap=True)
    for places in replay.places:
        table.add_column(f"{places} of {replay.experts}", justify="right", no_wrap=True)
    for policy in replay.policies:
        table.add_row(policy.policy, *(f"{share:.1%}" for share in policy.shares))
    print_whole(table, out)
