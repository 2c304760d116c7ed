"""Bars for what takes more than a moment: whoever waits sees that something goes on, and for how long."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def planning_bar(what: str) -> Iterator[None]:
    """A bar with the time so far on stderr, gone when it is done; silent on a pipe. What is left is not known."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task("", total=None)
        yield


@contextmanager
def stage_bar(what: str) -> Iterator[Callable[[str, float], None]]:
    """The same for what tells its stages: a function to call with what begins, and the share that is done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda label, share: bar.update(task, description=label, completed=share)
