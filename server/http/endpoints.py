"""A route as an ASGI application: reads the body, asks its handler, sends what comes, and tells errors."""

import logging
from collections.abc import Awaitable, Callable, Mapping

from starlette.types import Receive, Scope, Send

from pshard.errors import UserError
from pshard.server.api.faults import Fault, show_fault_at
from pshard.server.http.bodies import read_body
from pshard.server.http.desk import Call, Desk
from pshard.server.http.replies import Gone, Reply, Stream, Whole, reply_json, run_until_gone, send_stream, send_whole
from pshard.server.http.running import as_fault
from pshard.server.jobs import Refused
from pshard.server.reading.reader_program import Unforeseen, describe_places

Handler = Callable[[Desk, Call], Awaitable[Reply]]
log = logging.getLogger("pshard.server")


class Endpoint:
    """One handler. `method`: GET takes no body."""

    def __init__(self, desk: Desk, handle: Handler, method: str) -> None:
        self._desk, self._handle, self._method = desk, handle, method

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            reply = await self._answer(scope, receive)
            if isinstance(reply, Stream):
                await send_stream(receive, send, reply, self._desk.limits.write_seconds)
            else:
                await send_whole(send, reply)
        except Gone:
            return

    async def _answer(self, scope: Scope, receive: Receive) -> Reply:
        try:
            body = await read_body(scope, receive, self._desk.limits) if self._method == "POST" else b""
            key = scope.get("state", {}).get("key", "")
            call = Call(body, key, scope["path"], tuple(sorted(scope.get("path_params", {}).items())))
            if self._method != "POST":
                return await self._handle(self._desk, call)
            return await run_until_gone(receive, _await(self._handle(self._desk, call)))
        except Gone:
            raise
        except Exception as error:
            return tell_fault(to_fault(error), scope["path"])


def to_fault(error: Exception) -> Fault:
    """What a client is told of an error. What nobody foresaw is logged, by its place alone: its words may hold a
    prompt."""
    if isinstance(error, Fault):
        return error
    if isinstance(error, Refused):
        return as_fault(error)
    if isinstance(error, UserError):
        return Fault(400, str(error))
    log.error("a request failed: %s", error if isinstance(error, Unforeseen) else describe_places(error))
    return Fault(500, "the server failed on this request; its log says where", code="server_error")


def tell_fault(fault: Fault, path: str) -> Whole:
    """An error as an answer, in the shape of the interface that was asked."""
    headers: Mapping[str, str] = {}
    if fault.retry_after is not None:
        headers = {"retry-after": str(max(1, round(fault.retry_after)))}
    elif fault.status == 500:
        headers = {"x-should-retry": "false"}  # clients would ask twice more, for the same failure
    return reply_json(show_fault_at(path, fault), fault.status, headers)


async def _await(work: Awaitable[Reply]) -> Reply:
    return await work
