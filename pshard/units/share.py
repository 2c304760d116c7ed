"""Share: how one unit is divided between what lies in VRAM, what is copied to it, and the CPU. No torch."""

from functools import cached_property
from typing import NamedTuple


class Share(NamedTuple):
    """What of a unit the CPU computes, and what is in the VRAM arena though the unit is streamed.

    Both in what the kind is divided by: rows of an FFN's gate and up, or parts. Of rows there is one of both.
    """

    cpu: int = 0
    kept: int = 0

    def __bool__(self) -> bool:
        return self != WHOLE

    @property
    def in_words(self) -> str:
        """As messages say it."""
        cpu, kept = f"{self.cpu} on the CPU", f"{self.kept} kept in VRAM"
        return " and ".join(text for text, n in ((cpu, self.cpu), (kept, self.kept)) if n) or cpu

    @property
    def label(self) -> str:
        """As names of a program's columns have it."""
        return f"{self.cpu}+{self.kept}kept" if self.kept else str(self.cpu)


WHOLE = Share()  # not divided


class Wave(NamedTuple):
    """Which of how many waves a streamed unit with parts comes in: each brings some parts to a slot of its own."""

    number: int = 0
    of: int = 1

    @property
    def is_last(self) -> bool:
        """Whether all parts have come then."""
        return self.number == self.of - 1


AT_ONCE = Wave()


class Divisible:
    """What a placement or a step says of its unit's division, as fields: `cpu_rows`, `kept_parts`; 0 and 0: none."""

    cpu_rows: int
    kept_parts: int

    @cached_property
    def share(self) -> Share:
        """How the unit is divided."""
        return Share(self.cpu_rows, self.kept_parts) if self.cpu_rows or self.kept_parts else WHOLE
