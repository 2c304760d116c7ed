"""When other threads may run, as far as a step knows."""

from collections.abc import Callable


class Meanwhile:
    """Tells somebody, once a step, that the step's thread now leaves Python for long: it begins native work, or waits
    for the accelerator. Until then it would only have to share Python's lock with whoever is woken."""

    def __init__(self) -> None:
        self._tell: Callable[[], None] | None = None

    def expect(self, tell: Callable[[], None]) -> None:
        """Whom to tell in the step that begins."""
        self._tell = tell

    def begin(self) -> None:
        """The first such moment, or another: only the first counts."""
        tell, self._tell = self._tell, None
        if tell is not None:
            tell()
