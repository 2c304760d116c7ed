"""Operands: what operations read and write, as columns of scratch buffers with one row a token. No torch."""

from dataclasses import dataclass

from pshard.units.ports import ENTERED, HIDDEN, IDS, LAYERED, LOGITS, ROUTED, STREAMS


@dataclass(frozen=True)
class Rows:
    """Columns of a buffer of the side that computes; a port's buffer has its name. width 0: all columns."""

    buffer: str
    first: int = 0
    width: int = 0

    def beside(self, *widths: int) -> tuple["Rows", ...]:
        """Columns of such widths that stand side by side from its first one on."""
        found, at = [], self.first
        for width in widths:
            found.append(Rows(self.buffer, at, width))
            at += width
        return tuple(found)


TOKENS, STREAM, TAKEN, CHOSEN, FOUND = (Rows(port) for port in (IDS, HIDDEN, ENTERED, ROUTED, LOGITS))
NORMED = Rows("normed")  # what products take, in the type of activations
BRANCH = Rows("branch")  # what a unit adds, before it is normalised; float32
NOWHERE = Rows("")  # of an operation that only stands for its like in tables
ROWS = Rows(LAYERED)
ALL_STREAMS = Rows(STREAMS)
JOINED = Rows("joined")  # what the CPU has computed of a divided unit
