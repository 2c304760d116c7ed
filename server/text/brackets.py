"""Where a JSON value ends in a text that comes in pieces."""


class Brackets:
    """Follows brackets and quotes. `depth`: open brackets; `quoted`: whether the text is within a JSON text.

    Quotes are JSON's: brackets and tags within them are letters like others.
    """

    def __init__(self) -> None:
        self.depth, self.quoted, self._escaped = 0, False, False

    def find_end(self, text: str, stop: str = "") -> tuple[int, list[int], bool]:
        """Read on. Returns how many letters belong to the value, where of them control characters stand within quotes,
        and whether the value ends there. stop: what ends it too outside of quotes, and is no part of it; what may be
        the beginning of it at the end of the text is not read."""
        controls: list[int] = []
        for i, letter in enumerate(text):
            if self.quoted:
                if letter < " " and not self._escaped:
                    controls.append(i)
                self.quoted = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self.quoted = True
            elif letter in "{[":
                self.depth += 1
            elif letter in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return i + 1, controls, True
            elif stop and letter == stop[0] and (text.startswith(stop, i) or stop.startswith(text[i:])):
                return i, controls, False
        return len(text), controls, False
