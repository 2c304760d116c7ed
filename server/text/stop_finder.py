"""Stop strings in a text that comes in pieces."""


class StopFinder:
    """Gives out what cannot be part of a stop string any more, and says when one came.

    `found`: the stop string that ended the text, else "".
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        """`stops`: none of them empty."""
        self._stops, self._held = stops, ""
        self.found = ""

    def push(self, text: str) -> str:
        """What is certain after some more text; nothing after a stop string."""
        if not self._stops:
            return text
        if self.found:
            return ""
        self._held += text
        places = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if places:
            at, self.found = min(places)
            ready, self._held = self._held[:at], ""
            return ready
        keep = max((_begun(self._held, stop) for stop in self._stops), default=0)
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return ready

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        ready, self._held = self._held, ""
        return ready


def _begun(text: str, stop: str) -> int:
    """How many letters at the end of the text may be the beginning of a stop string."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
