"""Share: how one unit is divided between what lies in VRAM, what is copied to it, and the CPU. No torch."""

from typing import NamedTuple


class Share(NamedTuple):
    """What of a unit the CPU computes, and what is in the VRAM arena though the unit is streamed.

    cpu: in what the kind is divided by: rows of an FFN's gate and up, or parts. kept: parts.
    """

    cpu: int = 0
    kept: int = 0

    def __bool__(self) -> bool:
        return self != WHOLE

    @property
    def in_words(self) -> str:
        """As messages say it."""
        kept = f" and {self.kept} kept in VRAM" if self.kept else ""
        return f"{self.cpu} on the CPU{kept}"

    @property
    def label(self) -> str:
        """As names of a program's columns have it."""
        return f"{self.cpu}+{self.kept}kept" if self.kept else str(self.cpu)


WHOLE = Share()  # not divided
