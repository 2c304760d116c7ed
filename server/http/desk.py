"""What all routes have in common: the service, the model, the limits, and a place for slow work."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from pshard.runtime.sampling import Sampling
from pshard.server.api.faults import Fault
from pshard.server.api.limits import Limits
from pshard.server.http.inbox import Board
from pshard.server.jobs import Service
from pshard.server.reading.other_process import IDLE_SECONDS, Line, OtherProcess, too_complex
from pshard.server.reading.parse_body import Result, Work, read_body_as
from pshard.server.reading.reader import Reader
from pshard.server.shapes.show_completion import Heading
from pshard.server.snapshot import ServedModel
from pshard.server.text.guides import Guides

THREADS, MOST_WAITING = 2, 256  # of slow work: more would only take turns
READ_SECONDS = 120.0
# bytes of a body that is read in another process: what is smaller keeps Python's lock, and so all streams, for some
# milliseconds at most
LARGE = 256 << 10


@dataclass(frozen=True)
class Call:
    """A request with its body, whose JSON `Desk.read` reads. key: who asks, as a word that is no secret."""

    body: bytes
    key: str = ""
    path: str = ""
    arguments: tuple[tuple[str, str], ...] = ()  # of the path


class Desk:
    """Holds what routes need.

    Attributes: `service`, `reader` (of requests) with its `model`, `limits`, `usual`, `names`, `tables` and `words`,
    `guides`, `apart` (whether those who ask share no computed prefixes: how soon an answer begins would tell one what
    another has asked).
    """

    def __init__(
        self, service: Service, model: ServedModel, limits: Limits, usual: Sampling, aliases: tuple[str, ...]
    ) -> None:
        self.service = service
        self.reader = reader = Reader(model, limits, usual, (model.name, *aliases))
        self.model, self.limits, self.usual, self.names = model, limits, usual, reader.names
        self.tables, self.words, self.guides = reader.tables, reader.words, Guides(model)
        self._pool = ThreadPoolExecutor(THREADS, "pshard-requests")
        self._elsewhere, self._waits = OtherProcess(reader), ThreadPoolExecutor(THREADS, "pshard-large-requests")
        self._waiting = 0
        self.apart = False
        self._board: Board | None = None

    @property
    def board(self) -> Board:
        """Where events of jobs are left for the event loop that runs."""
        if self._board is None or self._board.loop is not asyncio.get_running_loop():
            self._board = Board()
        return self._board

    def head(self, prefix: str, drafts: int | None = None) -> Heading:
        """What the objects of a new answer begin with. drafts: of a step at most, where the request says it."""
        if drafts is not None:
            plan = self.service.snapshot().plan
            drafts = min(drafts, plan.drafts if plan else 0)
        return Heading(f"{prefix}{token_hex(12)}", int(time.time()), self.model.name, drafts)

    async def read(self, work: Work[Result], body: bytes) -> Result:
        """What a body asks for, by a function of a module. Raises Fault."""
        if len(body) <= LARGE:
            return await self.off_loop(read_body_as, self.reader, work, body)
        line = Line()
        try:
            read = self._elsewhere.read
            found = await self._wait_for(self._waits, READ_SECONDS, read, line, work, body, READ_SECONDS)
        finally:
            line.cut()
        loop = asyncio.get_running_loop()
        loop.call_later(IDLE_SECONDS, loop.run_in_executor, self._waits, self._elsewhere.close_when_idle)
        return found

    async def off_loop(self, work: Callable[..., Result], *given: Any, seconds: float = READ_SECONDS) -> Result:
        """The result of slow work, done beside the event loop. Raises Fault when too much waits, or it takes too
        long."""
        return await self._wait_for(self._pool, seconds, work, *given)

    async def _wait_for(
        self, pool: ThreadPoolExecutor, seconds: float, work: Callable[..., Result], *given: Any
    ) -> Result:
        if self._waiting >= MOST_WAITING:
            raise Fault(429, "too many requests are being read", code="rate_limit", retry_after=1)
        self._waiting += 1
        task = asyncio.get_running_loop().run_in_executor(pool, work, *given)
        task.add_done_callback(self._count_down)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(task)
        except TimeoutError:
            raise too_complex(seconds) from None
        except asyncio.CancelledError:
            task.cancel()  # if it has not begun
            raise

    def _count_down(self, task: "asyncio.Future[Any]") -> None:
        self._waiting -= 1
        if not task.cancelled():
            task.exception()  # whoever awaited it has it, or has gone
