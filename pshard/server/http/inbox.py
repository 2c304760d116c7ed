"""Where events of a request's jobs wait to be read: put by the scheduler's thread, taken by the event loop."""

import asyncio
import threading

from pshard.server.jobs import Event, Made, Progress


class Inbox:
    """Events of any number of jobs. What nobody has read yet is merged, so that a slow reader holds no more than the
    tokens of its answers, and nobody ever waits to put."""

    def __init__(self) -> None:
        """Belongs to the event loop that runs."""
        self._loop, self._ready = asyncio.get_running_loop(), asyncio.Event()
        self._lock, self._told = threading.Lock(), False
        self._waiting: dict[int, list[Event]] = {}

    def listener(self, index: int) -> "Slot":
        """A Listener whose events are taken under this number."""
        return Slot(self, index)

    def put(self, index: int, event: Event) -> None:
        """An event of a job; from any thread."""
        with self._lock:
            events = self._waiting.setdefault(index, [])
            if events and (merged := merge_events(events[-1], event)):
                events[-1] = merged
            else:
                events.append(event)
            told, self._told = self._told, True
        if not told and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ready.set)

    async def take(self, seconds: float) -> list[tuple[int, Event]]:
        """All events that came, in order for each job; nothing when none came for so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._ready.wait()
        except TimeoutError:
            return []
        self._ready.clear()
        with self._lock:
            waiting, self._waiting, self._told = self._waiting, {}, False
        return [(index, event) for index, events in waiting.items() for event in events]


class Slot:
    """A Listener."""

    def __init__(self, inbox: Inbox, index: int) -> None:
        self._inbox, self._index = inbox, index

    def put(self, event: Event) -> None:
        self._inbox.put(self._index, event)


def merge_events(first: Event, second: Event) -> Event | None:
    """One event that says what both say; None where they are of different kinds."""
    if isinstance(first, Made) and isinstance(second, Made):
        return Made(first.tokens + second.tokens, first.likely + second.likely)
    if isinstance(first, Progress) and isinstance(second, Progress):
        return Progress(second.done, second.total, second.cached, first.scored + second.scored)
    return None
