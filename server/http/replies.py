"""What a route gives back, and how it is sent: whole, or as a stream of server-sent events or lines."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from secrets import token_hex
from typing import Any

from starlette.types import Receive, Send

from pshard.server.shapes.write_json import encode_line, write_json

PING = b": still here\n\n"
LOOKS = 8  # at a client that takes nothing, in the time that it has
EVENTS, LINES = "text/event-stream; charset=utf-8", "application/x-ndjson"


@dataclass(frozen=True)
class Whole:
    """An answer that is sent at once."""

    data: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "application/json"})


@dataclass(frozen=True)
class Stream:
    """Pieces of server-sent events, or of lines. They are closed whatever becomes of the connection; `end` ends what
    makes them, also when none was asked for yet."""

    pieces: AsyncIterator[bytes]
    end: Callable[[], None]
    media: str = EVENTS


Reply = Whole | Stream


class Gone(Exception):
    """The client has closed its connection."""


def reply_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Whole:
    """A JSON answer."""
    return Whole(write_json(value), status, {"content-type": "application/json", **(headers or {})})


def write_event(value: Any, name: str = "") -> bytes:
    """A server-sent event with a JSON object as its data."""
    return (f"event: {name}\n" if name else "").encode() + b"data: " + write_json(value) + b"\n\n"


def write_line(value: Any) -> bytes:
    """A JSON object as a line of its own."""
    return write_json(value) + b"\n"


def prepare_event(show: Callable[[str], Any]) -> Callable[[str], bytes]:
    """Writes what `write_event` writes of `show(text)`, where the text stands in it once: all else is encoded here."""
    place = token_hex(16)  # that is nowhere else in it
    before, after = write_event(show(place)).split(f'"{place}"'.encode())
    return lambda text: before + encode_line(encode_basestring(text)) + after


class _Patience:
    """Notices a client that takes nothing for so many seconds. A piece costs a look at the clock: a timer for each took
    more than writing it."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._loop, self._since = seconds, asyncio.get_running_loop(), math.inf

    async def over(self, sending: Awaitable[None]) -> None:
        """Wait until something is sent."""
        self._since = self._loop.time()
        await sending
        self._since = math.inf

    @property
    def is_over(self) -> bool:
        return self._loop.time() - self._since >= self.seconds


async def run_until_gone(receive: Receive, work: Coroutine[Any, Any, Any], patience: "_Patience | None" = None) -> Any:
    """The result of the work. Raises Gone, and cancels it, when the client closes its connection before, or the
    patience is over; the request's body has been read."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_wait_gone(receive))
    look = patience.seconds / LOOKS if patience else None
    try:
        while not (await asyncio.wait({task, watch}, timeout=look, return_when=asyncio.FIRST_COMPLETED))[0]:
            if patience and patience.is_over:
                raise Gone
        if not task.done():
            raise Gone
        return task.result()
    finally:
        await _cancel(task)
        await _cancel(watch)


async def send_whole(send: Send, reply: Whole) -> None:
    """Send an answer."""
    headers = {**reply.headers, "content-length": str(len(reply.data))}
    await send({"type": "http.response.start", "status": reply.status, "headers": _encode(headers)})
    await send({"type": "http.response.body", "body": reply.data})


async def send_stream(receive: Receive, send: Send, stream: Stream, seconds: float) -> None:
    """Send pieces as they come. Raises Gone when the client closes its connection, or takes nothing for so long."""

    patience = _Patience(seconds)
    headers = {"content-type": stream.media, "cache-control": "no-store", "x-accel-buffering": "no"}

    async def write() -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _encode(headers)})
        async for piece in stream.pieces:
            await patience.over(send({"type": "http.response.body", "body": piece, "more_body": True}))
        await patience.over(send({"type": "http.response.body", "body": b""}))

    try:
        await run_until_gone(receive, write(), patience)
    finally:
        if close := getattr(stream.pieces, "aclose", None):
            await close()
        stream.end()


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: "asyncio.Future[Any]") -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # it has been raised, or nobody wants it any more


def _encode(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
