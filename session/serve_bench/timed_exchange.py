"""One HTTP/1.1 request over a connection of its own, and its answer with the time at which every piece arrived.

Only what the clock needs is done while bytes of a stream arrive: they get a time stamp. Chunks are told apart when the
last one seems to be there, and what they say is read later still, so that pieces of many streams which arrive together
are not late by the work on each other.
"""

import asyncio
import ssl
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any
from urllib.parse import SplitResult

LONGEST_HEAD = 1 << 16  # bytes of a status line with headers
LAST_CHUNK = b"0\r\n\r\n"  # what a chunked body ends with; data may end so too
_ROOM = memoryview(bytearray(1 << 16))  # one for all: each read is taken out of it before the next one begins


@dataclass(frozen=True)
class Manner:
    """How a client behaves. leave_after: it closes the connection when so many events have come; None: it stays.
    bytes_per_read: it takes so many bytes, and then pauses for `pause` seconds; 0: it reads what there is."""

    leave_after: int | None = None
    bytes_per_read: int = 0
    pause: float = 0.1


POLITE = Manner()


@dataclass
class Reply:
    """What came back. status: of HTTP, 0 without an answer. pieces: the body without its framing, each with the
    perf_counter_ns at which it was there. began, ended: of the exchange. failure: "", "connect", "cut" (the connection
    ended before the answer), "timeout" or "left" (we closed it, as planned)."""

    began: int
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[tuple[int, bytes]] = field(default_factory=list)
    ended: int = 0
    failure: str = ""

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)


class Exchange(asyncio.BufferedProtocol):
    """Sends `message` when connected and fills a Reply; `done` is set when nothing more will come."""

    def __init__(self, message: bytes, manner: Manner) -> None:
        self.message, self.manner = message, manner
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()
        self.reply = Reply(perf_counter_ns())
        self.transport: Any = None
        self.raw: list[tuple[int, bytes]] = []  # what came, with its time, and was not looked into yet
        self.tail = b""  # the last bytes of it
        self.lazy = False  # whether looking into it can wait for the last chunk
        self.rest = b""  # bytes of a head or a chunk's head that are not whole yet
        self.left: int | None = None  # bytes that are missing of the body, or of its chunk; None: a head comes next
        self.chunked = False
        self.events = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        if self.done.done():  # it took longer than anyone waits
            transport.abort()
        else:
            transport.write(self.message)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _ROOM[: self.manner.bytes_per_read] if self.manner.bytes_per_read else _ROOM

    def buffer_updated(self, nbytes: int) -> None:
        now = perf_counter_ns()
        if self.done.done():
            return
        data = bytes(_ROOM[:nbytes])
        self.raw.append((now, data))
        self.tail = (self.tail + data)[-len(LAST_CHUNK) :]
        if not self.lazy or self.tail == LAST_CHUNK:
            self._look()
        if self.manner.bytes_per_read and not self.done.done():
            self.transport.pause_reading()
            self.loop.call_later(self.manner.pause, self._read_on)

    def _read_on(self) -> None:
        if not self.done.done():
            self.transport.resume_reading()

    def eof_received(self) -> None:
        self.connection_lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        until_close = self.reply.status and not self.chunked and "content-length" not in self.reply.headers
        self.finish("" if until_close else "cut")

    def finish(self, failure: str) -> None:
        """Close the connection, unless the answer is whole already; nothing that comes later counts."""
        self._look()
        self._end(failure)

    def _end(self, failure: str) -> None:
        if self.done.done():
            return
        self.reply.ended, self.reply.failure = perf_counter_ns(), failure
        self.done.set_result(None)
        if self.transport is not None:
            self.transport.abort()

    def _look(self) -> None:
        """Take apart what came and was not looked into."""
        raw, self.raw = self.raw, []
        try:
            for now, data in raw:
                if not self.done.done():
                    self._take(now, data)
        except ValueError:
            self._end("cut")

    def _take(self, now: int, data: bytes) -> None:
        if not self.reply.status:
            self.rest += data
            head, found, data = self.rest.partition(b"\r\n\r\n")
            if not found:
                if len(self.rest) > LONGEST_HEAD:
                    raise ValueError("no end of the headers")
                return
            self._read_head(head)
            self.rest = b""
        if self.chunked:
            self._take_chunks(now, data)
        else:
            self._keep(now, data)
            if self.left is not None:
                self.left -= len(data)
        if self.left == 0 and not self.chunked:
            self._end("")

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        self.reply.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self.chunked = "chunked" in self.reply.headers.get("transfer-encoding", "").lower()
        if not self.chunked and "content-length" in self.reply.headers:
            self.left = int(self.reply.headers["content-length"])
        self.lazy = self.chunked and self.manner.leave_after is None
        self.reply.status = int(first.split()[1])

    def _take_chunks(self, now: int, data: bytes) -> None:
        """Frames: a length in hex, a line end, so many bytes, a line end; one of length 0 is the last."""
        data, self.rest = self.rest + data, b""
        body: list[bytes] = []
        while data:
            if self.left is None:
                line, found, after = data.partition(b"\r\n")
                if not found:
                    self.rest = data
                    break
                size = int(line.split(b";")[0], 16)
                if size == 0:
                    self._keep(now, b"".join(body))
                    self._end("")
                    return
                self.left, data = size + 2, after
            part = data[: self.left]
            body.append(part if len(part) <= self.left - 2 else part[: self.left - 2])
            data = data[len(part) :]
            self.left = self.left - len(part) or None
        self._keep(now, b"".join(body))

    def _keep(self, now: int, data: bytes) -> None:
        if not data:
            return
        self.reply.pieces.append((now, data))
        if self.manner.leave_after is not None:
            self.events += data.count(b"\n\n")
            if self.events >= self.manner.leave_after:
                self._end("left")


async def exchange(address: SplitResult, message: bytes, timeout: float, manner: Manner = POLITE) -> Reply:
    """Send a request and wait for its answer, or for what ends it; raises nothing of the network's."""
    made = Exchange(message, manner)
    loop = asyncio.get_running_loop()
    timer = loop.call_later(timeout, made.finish, "timeout")
    if manner.leave_after == 0:  # gone before anything came
        loop.call_later(manner.pause, made.finish, "left")
    secure = ssl.create_default_context() if address.scheme == "https" else None
    port = address.port or (443 if secure else 80)
    connecting = loop.create_task(loop.create_connection(lambda: made, str(address.hostname), port, ssl=secure))
    connecting.add_done_callback(lambda task: made.finish("connect") if task.exception() else None)
    try:
        await made.done
    finally:  # whoever waits no longer leaves no connection behind
        timer.cancel()
        made.finish("left")
    return made.reply


def write_request(address: SplitResult, method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
    """The bytes of a request that asks for the connection to be closed after its answer."""
    host = address.netloc.rpartition("@")[2]
    lines = [f"{method} {address.path.rstrip('/')}{path} HTTP/1.1", f"Host: {host}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
