"""Breaks lines of a text between words while it comes, for a window of some width."""

import unicodedata
from collections.abc import Callable


def count_columns(text: str) -> int:
    """Columns of a terminal that a text takes: wide letters two, marks on others none."""
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )


class WordWrap:
    """Gives out whole words, each in the line where it has room. What has no spaces is cut by the terminal."""

    def __init__(self, width: Callable[[], int]) -> None:
        """width: columns of the window, which may change."""
        self._width = width
        self._at, self._word, self._space = 0, "", ""
        self._cut = False  # whether what comes goes on a word of which a part was shown

    def push(self, text: str) -> str:
        """What can be shown after some more text: all but its last word, which may go on."""
        told: list[str] = []
        for letter in text:
            if not letter.isspace():
                if self._word and unicodedata.east_asian_width(letter) in "WF":  # these break anywhere
                    told.append(self._put())
                self._word += letter
                continue
            told.append(self._put())
            self._cut = False
            if letter == "\n":
                self._at, self._space = 0, ""
                told.append("\n")
            else:
                self._space += letter
        if count_columns(self._word) >= self._width():  # no line has room for it: the terminal cuts it
            told.append(self._put())
            self._cut = True
        return "".join(told)

    def finish(self) -> str:
        """The rest, at the end of a text or before what is written another way."""
        return self._put()

    def restart(self) -> None:
        """The next text begins a line."""
        self._at, self._word, self._space, self._cut = 0, "", "", False

    def _put(self) -> str:
        word, space = self._word, self._space
        if not word:
            return ""
        self._word = self._space = ""
        wide, width = count_columns(word), self._width()
        if self._at and not self._cut and self._at + len(space) + wide > width:
            self._at = wide
            return f"\n{word}"
        self._at += len(space) + wide
        if self._at > width:
            self._at = self._at % width or width
        return space + word
