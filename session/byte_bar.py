"""The progress bar of what loads or writes a model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr that counts bytes; silent on a pipe."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.advance(task, done)
