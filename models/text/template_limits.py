"""What a chat template may do: a file's template is a stranger's program, which must come to an end."""

import re
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from jinja2.sandbox import SecurityError

MOST_STEPS, MOST_SECONDS = 1_000_000, 20.0
LARGEST_NUMBER = 1 << 63
LONGEST_WIDTH = 1 << 16  # of padding and repeating: a template writes words, not posters
LONGEST_TEXT = 1 << 26  # letters of one value; requests are an eighth of that
WIDE = re.compile(r"\d{6}|%[-+ #0(\w)]*\*")  # in a layout


class Steps(threading.local):
    """Counts what a template does: a step for each turn of a loop, each call, each filter, and for what they make. Each
    thread that renders has a count of its own.

    Raises SecurityError, which ends the template, when there are more than `most`, or when it takes too long.
    """

    def __init__(self) -> None:
        self.begin(MOST_STEPS)

    def begin(self, most: int) -> None:
        """Count from here on, for this thread's next text."""
        self._most, self._left = most, most
        self._ends = time.monotonic() + MOST_SECONDS

    def take(self, made: Any = None, pieces: bool = False) -> None:
        """One step, which made that value; `pieces`: a list of new texts, each of which is a step."""
        size = len(made) if isinstance(made, str | bytes | list | tuple | dict) else 0
        held = 8 if isinstance(made, str | bytes) else 0 if pieces else 4
        self._left -= 1 + (size >> held)
        if self._left < 0:
            raise SecurityError(f"it takes more than {self._most} steps")
        if time.monotonic() > self._ends:
            raise SecurityError(f"it takes longer than {MOST_SECONDS:.0f} seconds")
        if size > LONGEST_TEXT or (isinstance(made, int) and abs(made) >= LARGEST_NUMBER):
            raise SecurityError("it makes a value beyond all use")

    def count(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items, each of which is a step."""
        for item in items:
            self.take()
            yield item

    def count_lightly(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items, of which sixteen are a step."""
        for i, item in enumerate(items):
            if i % 16 == 15:
                self.take()
            yield item


def check_widths(values: Iterable[Any]) -> None:
    """Numbers given to calls and filters, which may be widths and counts. Raises SecurityError for large ones."""
    for value in values:
        if isinstance(value, int) and abs(value) > LONGEST_WIDTH:
            raise SecurityError(f"it gives {value} to a call; {LONGEST_WIDTH} at most")


def check_layout(layout: Any) -> None:
    """Raises SecurityError for a layout of text, as "%9d" or "{:>9}", with widths that are large or not known."""
    if isinstance(layout, str) and WIDE.search(layout):
        raise SecurityError("it formats text in a width that is large or not known")


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Raises SecurityError for an operation whose result may be huge."""
    if operator == "**" and (not isinstance(right, int | float) or not abs(right) <= 64):
        raise SecurityError("it raises to a power above 64")
    if operator == "*":
        for times, other in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(other, str | bytes | list | tuple):
                check_widths((times * max(1, len(other)),))
    if operator == "+" and sum(len(x) for x in (left, right) if isinstance(x, str | bytes | list)) > LONGEST_TEXT:
        raise SecurityError("it makes a value beyond all use")
    if operator == "%":
        check_layout(left)
