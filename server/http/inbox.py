"""Where events of requests' jobs wait to be read: left by the scheduler's thread, taken by the event loop."""

import asyncio
from collections import deque

from pshard.server.http.bell import Bell
from pshard.server.jobs import Event, Made, Progress


class Board:
    """Events for all inboxes of the event loop that runs. Leaving one is an append, without a lock or a call of the
    system; however many were left, the loop is woken once.

    Attributes:
        loop: whose it is.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._left: deque[tuple[Inbox, int, Event]] = deque()
        self._told = False
        self._bell = Bell(self._sort)

    def leave(self, inbox: "Inbox", index: int, event: Event) -> None:
        """From any thread."""
        self._left.append((inbox, index, event))

    def wake(self) -> None:
        """Have all that was left sorted into its inboxes; from any thread."""
        if not self._told:
            self._told = True
            self._bell.ring()

    def _sort(self) -> None:
        self._told = False  # first: what is left from now on may need another call
        while self._left:
            inbox, index, event = self._left.popleft()
            inbox.put(index, event)


class Inbox:
    """Events of any number of jobs, on the event loop. What nobody has read yet is merged, so that a slow reader holds
    no more than the tokens of its answers."""

    def __init__(self, board: Board) -> None:
        self._board, self._loop = board, board.loop
        self._waiting: dict[int, list[Event]] = {}
        self._reader: asyncio.Future[None] | None = None
        self._until, self._timer = 0.0, False

    def listener(self, index: int) -> "Slot":
        """A Listener whose events are taken under this number."""
        return Slot(self._board, self, index)

    def put(self, index: int, event: Event) -> None:
        """An event of a job."""
        events = self._waiting.setdefault(index, [])
        if events and (merged := merge_events(events[-1], event)):
            events[-1] = merged
        else:
            events.append(event)
        self._tell()

    async def take(self, seconds: float) -> list[tuple[int, Event]]:
        """All events that came, in order for each job; nothing when none came for so long."""
        if not self._waiting:
            self._until = self._loop.time() + seconds
            if not self._timer:  # one stands for many waits: most end long before
                self._timer = True
                self._loop.call_at(self._until, self._ring)
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        waiting, self._waiting = self._waiting, {}
        return [(index, event) for index, events in waiting.items() for event in events]

    def _tell(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _ring(self) -> None:
        self._timer = False
        if self._reader is None:
            return
        if self._loop.time() < self._until:
            self._timer = True
            self._loop.call_at(self._until, self._ring)
        else:
            self._tell()


class Slot:
    """A Listener."""

    def __init__(self, board: Board, inbox: Inbox, index: int) -> None:
        self._board, self._inbox, self._index = board, inbox, index

    def put(self, event: Event) -> None:
        self._board.leave(self._inbox, self._index, event)

    def wake(self) -> None:
        self._board.wake()


def merge_events(first: Event, second: Event) -> Event | None:
    """One event that says what both say; None where they are of different kinds."""
    if isinstance(first, Made) and isinstance(second, Made):
        return Made(first.tokens + second.tokens, first.likely + second.likely)
    if isinstance(first, Progress) and isinstance(second, Progress):
        return Progress(second.done, second.total, second.cached, first.scored + second.scored)
    return None
