"""A request's jobs, from their submission until the last has ended."""

from collections import deque
from collections.abc import AsyncGenerator, Sequence

from pshard.server.api.faults import Fault
from pshard.server.http.inbox import Board, Inbox
from pshard.server.jobs import Ended, Event, Job, Refused, Service


class Running:
    """Jobs of one request. Those that the queue has no room for follow when others of the same request have ended."""

    def __init__(self, service: Service, jobs: Sequence[Job], board: Board) -> None:
        self._service, self._jobs, self._inbox = service, jobs, Inbox(board)
        self._left = deque(range(len(jobs)))
        self._live: set[int] = set()

    def start(self) -> None:
        """Submit them. Raises Fault when the first is refused, or any for ever."""
        try:
            self._submit()
        except BaseException:
            self.cancel()
            raise

    async def events(self, ping_seconds: float) -> AsyncGenerator[list[tuple[int, Event]], None]:
        """Events with the numbers of their jobs as they come; an empty list when none came for so long. However it is
        left, no job goes on."""
        try:
            while self._live or self._left:
                events = await self._inbox.take(ping_seconds)
                ended = [index for index, event in events if isinstance(event, Ended)]
                self._live.difference_update(ended)
                if ended and self._left:
                    self._submit()
                yield events
        finally:
            self.cancel()

    def stop(self, index: int) -> None:
        """End one job, whose answer is complete."""
        if index in self._live:
            self._service.cancel(self._jobs[index].id)

    def cancel(self) -> None:
        """End all that run or wait."""
        self._left.clear()
        for index in self._live:
            self._service.cancel(self._jobs[index].id)

    def _submit(self) -> None:
        while self._left:
            index = self._left[0]
            try:
                self._service.submit(self._jobs[index], self._inbox.listener(index))
            except Refused as refused:
                if refused.status == 429 and self._live:
                    return
                raise as_fault(refused) from None
            self._left.popleft()
            self._live.add(index)


def as_fault(refused: Refused) -> Fault:
    """What a client is told when a job is not taken."""
    return Fault(refused.status, str(refused), code=refused.code or None, retry_after=refused.retry_after)
