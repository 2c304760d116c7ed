"""uvicorn, with a time limit for headers, and an end that lets requests finish."""

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from pshard.errors import UserError
from pshard.server.api.limits import DEFAULT_LIMITS
from pshard.server.life.late_app import App

HEADER_SECONDS = 20.0  # until the headers of a request must be there
SILENT_SECONDS = 30.0  # of a connection between requests
LEAVE_SECONDS = 5.0  # for streams to bring their last event, after all jobs have ended
READ_BYTES = 4 << 10  # of a connection, before the others have a turn
WAITING = 2048  # connections that the system accepts before this program does


GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"  # clients pass over it; where nobody is, the system answers with a reset
FIRST_LOOK, LAST_LOOK = 0.05, 10.0  # seconds between looks at who has said all, each four times the one before


class PatientProtocol(H11Protocol):
    """HTTP/1.1; a client that never ends its headers, or takes nothing of its answer, is let go. One that closes its
    side after a request gets its answer, unless it has closed the other side too."""

    header_seconds = HEADER_SECONDS
    write_seconds = DEFAULT_LIMITS.write_seconds
    _limit: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client is there."""
        super().connection_made(transport)
        # asyncio does so only where a listener says that it is TCP, which `open_port`'s does not: the end of an answer
        # would wait 40 ms for the client's word that its beginning has come
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(transport, "max_size"):  # of asyncio: 256 KiB may be 40,000 chunks of a letter each
            transport.max_size = READ_BYTES
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        """Bytes of it."""
        super().data_received(data)
        self._watch_headers()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """It sends no more. Whether it is gone, or waits for its answer, looks the same until something is sent."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or self.conn.their_state not in (h11.DONE, h11.MUST_CLOSE):
            return None
        cycle.keep_alive = False
        self._look_for_client(FIRST_LOOK)
        return True

    def _look_for_client(self, seconds: float) -> None:
        """Again and again until the answer is there. A stream sends enough; clients of HTTP/1.0 know no such word."""
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if not self.cycle.response_started and self.conn.their_http_version != b"1.0":
            self.transport.write(GO_ON)
        self.loop.call_later(seconds, self._look_for_client, min(4 * seconds, LAST_LOOK))

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._stop_watching()
        self._end_stall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """It takes less than is written. Closing would wait until it has taken all: it is cut off."""
        super().pause_writing()
        self._stall = self.loop.call_later(self.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """It has taken what was written."""
        self._end_stall()
        super().resume_writing()

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _watch_headers(self) -> None:
        """Begin, or end, to wait for headers. A connection that says nothing after an answer has a limit of its own."""
        waits = self.conn.their_state is h11.IDLE and (self.cycle is None or self.cycle.response_complete)
        if not waits:
            self._stop_watching()
        elif self._limit is None:
            self._limit = self.loop.call_later(self.header_seconds, self._give_up)

    def _stop_watching(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _give_up(self) -> None:
        self._limit = None
        if not self.transport.is_closing():
            self.transport.close()


class WebServer(uvicorn.Server):
    """Runs an application in the main thread until a signal, or `stop`.

    on_stop: called once, on the loop, when no more requests are taken; what it begins ends those that run, within
    `seconds`. A signal's handler only notes it: it may have interrupted someone who holds a lock.
    """

    def __init__(self, app: App, seconds: float, on_stop: Callable[[], None]) -> None:
        self._on_stop, self._stopping = on_stop, False
        config = uvicorn.Config(
            app,
            http=PatientProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(SILENT_SECONDS),
            timeout_graceful_shutdown=int(seconds + LEAVE_SECONDS),
            backlog=WAITING,
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets requests end; a second Ctrl-C ends at once."""
        if self._stopping and sig == signal.SIGINT:
            self.force_exit = True
        self.stop()

    def stop(self) -> None:
        """Take no more requests, and end when those that run have ended. From any thread."""
        self._stopping = self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn when it has seen that it is to end."""
        self._on_stop()
        await super().shutdown(sockets)


def open_port(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0: any that is free. Raises UserError when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=WAITING)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another --port or --host"
        ) from None
