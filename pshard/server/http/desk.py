"""What all routes have in common: the service, the model, the limits, and a place for slow work."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, TypeVar

from pshard.runtime.sampling import Sampling
from pshard.server.api.faults import Fault
from pshard.server.api.limits import Limits
from pshard.server.api.openapi import request_tables
from pshard.server.http.inbox import Board
from pshard.server.jobs import Service
from pshard.server.shapes.show_completion import Heading
from pshard.server.snapshot import ServedModel
from pshard.server.text.guides import Guides
from pshard.server.text.prompts import Prompts
from pshard.server.text.token_words import TokenWords

Result = TypeVar("Result")
THREADS, MOST_WAITING = 2, 256  # of slow work: more would only take turns


@dataclass(frozen=True)
class Call:
    """A request that was read. key: who asks, as a word that is no secret."""

    body: dict[str, Any]
    key: str = ""
    path: str = ""
    arguments: tuple[tuple[str, str], ...] = ()  # of the path


class Desk:
    """Holds what routes need.

    Attributes: `service`, `model`, `limits`, `usual` (how tokens are drawn where a request does not say), `names` (of
    the model, the first one is told), `tables` (of fields, by path), `prompts`, `guides`, `words`, `apart` (whether
    those who ask share no computed beginnings: how soon an answer begins would tell one what another has asked).
    """

    def __init__(
        self, service: Service, model: ServedModel, limits: Limits, usual: Sampling, aliases: tuple[str, ...]
    ) -> None:
        self.service, self.model, self.limits, self.usual = service, model, limits, usual
        self.names = (model.name, *aliases)
        self.tables = request_tables(limits, model.vocab)
        self.prompts, self.guides = Prompts(model, limits.template_steps), Guides(model)
        self.words = TokenWords(model.tokenizer)
        self._pool = ThreadPoolExecutor(THREADS, "pshard-requests")
        self._waiting = 0
        self.apart = False
        self._board: Board | None = None

    @property
    def board(self) -> Board:
        """Where events of jobs are left for the event loop that runs."""
        if self._board is None or self._board.loop is not asyncio.get_running_loop():
            self._board = Board()
        return self._board

    def check_model(self, name: str) -> None:
        """Raises Fault 404 for the name of another model; none is this one."""
        if name and name not in self.names:
            told = f"there is no model {name[:100]!r} here; there is {self.model.name!r}"
            raise Fault(404, told, param="model", code="model_not_found")

    def head(self, prefix: str) -> Heading:
        """What the objects of a new answer begin with."""
        return Heading(f"{prefix}{token_hex(12)}", int(time.time()), self.model.name)

    async def off_loop(self, work: Callable[..., Result], *given: Any, seconds: float = 120.0) -> Result:
        """The result of slow work, done beside the event loop. Raises Fault when too much waits, or it takes too
        long."""
        if self._waiting >= MOST_WAITING:
            raise Fault(429, "too many requests are being read", code="rate_limit", retry_after=1)
        self._waiting += 1
        task = asyncio.get_running_loop().run_in_executor(self._pool, work, *given)
        task.add_done_callback(self._count_down)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(task)
        except TimeoutError:
            raise Fault(400, f"the request takes more than {seconds:.0f} seconds to read", code="too_complex") from None

    def _count_down(self, task: "asyncio.Future[Any]") -> None:
        self._waiting -= 1
        if not task.cancelled():
            task.exception()  # whoever awaited it has it, or has gone
