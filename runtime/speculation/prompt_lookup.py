"""Prompt lookup: drafts from the text itself. No weights, no torch."""

from collections import defaultdict
from collections.abc import Iterable

SHORTEST, LONGEST = 2, 12  # tokens at the text's end that are looked for earlier in it
LONG = 5  # of a match whose draft holds as likely as a head's: shorter ones are worth less than to ask that
NEWEST = 32  # places that are compared: the last ones that end with the same tokens


class PromptLookup:
    """Finds where the longest end of a text stood before, and drafts what followed there; of equal ends the newest.

    Where what followed reaches the text's end, the draft goes on with itself: a text that repeats itself goes on so.
    """

    def __init__(self, least: int = SHORTEST) -> None:
        """least: tokens that must be alike."""
        self._least = least
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = defaultdict(list)  # where the shortest ends stop

    def see(self, tokens: Iterable[int]) -> None:
        """What came: of the prompt, and what was told. Never drafts."""
        for token in tokens:
            if len(self._text) >= SHORTEST:  # only what something follows is found
                self._ends[tuple(self._text[-SHORTEST:])].append(len(self._text))
            self._text.append(token)

    def draft(self, most: int) -> tuple[int, ...]:
        """At most so many tokens that may come next; none where the end is new."""
        text = self._text
        places = self._ends.get(tuple(text[-SHORTEST:]), []) if len(text) >= SHORTEST and most > 0 else []
        best, follows = 0, 0
        for at in reversed(places[-NEWEST:]):
            if (same := self._count_same(at)) > best:
                best, follows = same, at
            if best >= LONGEST:
                break
        if best < self._least:
            return ()
        back = len(text) - follows  # the end repeats after so many tokens
        drafts: list[int] = []
        for i in range(most):
            drafts.append(text[follows + i] if i < back else drafts[i - back])
        return tuple(drafts)

    def _count_same(self, at: int) -> int:
        """How many tokens before a place are those at the text's end."""
        text, same = self._text, 0
        while same < min(at, LONGEST) and text[at - 1 - same] == text[-1 - same]:
            same += 1
        return same
