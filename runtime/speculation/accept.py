"""Which drafts hold: the next token is drawn as ever, and drafts hold while they equal it. No torch."""

from collections.abc import Callable, Collection, Sequence

from pshard.speculation import Acceptance

GOLDEN = (5**0.5 - 1) / 2  # places so far apart, modulo 1, fill the numbers from 0 to 1 evenly, however many there are


def match_drafts(draw: Callable[[int], int], drafts: Sequence[int], stops: Collection[int] = ()) -> list[int]:
    """Tokens that a step tells, at least one: those of the drafts that hold, and the one after them.

    draw: the next token, from the logits of a row; it is asked for told tokens only, so that each of them takes one
    random number. stops: tokens behind which nothing is told.
    """
    told: list[int] = []
    for row in range(len(drafts) + 1):
        told.append(draw(row))
        if told[-1] in stops or row == len(drafts) or told[-1] != drafts[row]:
            break
    return told


class MadeUp:
    """Makes up how many drafts hold, at given chances: for random weights, whose drafts never do. The text means
    nothing. Steps are spread evenly over the chances, so that a text of some dozens of steps has what they say."""

    def __init__(self, acceptance: Acceptance) -> None:
        self.acceptance, self._place = acceptance, 0.5

    def count(self, drafts: int) -> int:
        """How many of the first drafts of a step hold."""
        place, self._place = self._place, (self._place + GOLDEN) % 1
        return next((i for i in range(drafts) if place >= self.acceptance.at(i + 1)), drafts)
