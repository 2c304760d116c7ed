"""Server-sent events for those who look: parts of the page that have changed, a few times a second."""

import asyncio
import json
from collections.abc import AsyncIterator
from time import monotonic
from typing import TYPE_CHECKING

from pshard.server.page.show_parts import show_parts

if TYPE_CHECKING:
    from pshard.server.jobs import Service

PERIOD = 0.4  # seconds between looks
QUIET = 5.0  # seconds after which a comment says that the server is still there
MOST_WATCHERS = 16
LAST_STATES = ("draining", "failed")  # a stream that stays open would hold the server's end up


class Watch:
    """Looks at a service for any number of watchers, and not at all without one.

    Attributes: `watchers`, how many there are; `looks`, how often it looked.
    """

    def __init__(self, service: "Service", period: float = PERIOD) -> None:
        self._service, self._period = service, period
        self.watchers = self.looks = 0
        self._looked, self._state = -1e9, ""
        self._parts: dict[str, str] = {}

    def look(self) -> dict[str, str]:
        """The page's parts; those who ask within half a period share them."""
        now = monotonic()
        if now - self._looked > self._period / 2:
            snapshot = self._service.snapshot()
            self._looked, self._state, self._parts = now, snapshot.state, show_parts(snapshot)
            self.looks += 1
        return self._parts

    async def stream(self) -> AsyncIterator[str]:
        """Events with the parts that are new to this watcher, until the server ends or the watcher goes."""
        self.watchers += 1
        seen: dict[str, str] = {}
        told = monotonic()
        try:
            while True:
                parts = self.look()
                changed = {name: html for name, html in parts.items() if seen.get(name) != html}
                if changed:
                    yield f"event: parts\ndata: {json.dumps(changed)}\n\n"
                    seen, told = parts, monotonic()
                elif monotonic() - told > QUIET:
                    yield ": still here\n\n"
                    told = monotonic()
                if self._state in LAST_STATES:
                    return
                await asyncio.sleep(self._period)
        finally:
            self.watchers -= 1
