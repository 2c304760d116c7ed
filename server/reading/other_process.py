"""Has large requests read in another process, which is started with the first of them."""

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from pshard.server.api.faults import Fault
from pshard.server.reading.parse_body import Result, Work
from pshard.server.reading.reader import Reader
from pshard.server.reading.reader_program import NOTHING

RUN = "import os, sys; from pshard.server.reading.reader_program import main; os._exit(main(sys.argv[1:]))"
IDLE_SECONDS = 300.0  # after the last large request; then the memory of its words is given back
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # it forks, which goes well without threads


class Line:
    """A request's way to the process that reads it."""

    def __init__(self) -> None:
        self.here, self.there = socket.socketpair()

    def cut(self) -> None:
        """Nobody waits for the answer any more: who reads the request ends. From any thread, also after the answer."""
        with contextlib.suppress(OSError):
            self.here.shutdown(socket.SHUT_RDWR)


class OtherProcess:
    """Reads requests, any number at once. For threads that may wait."""

    def __init__(self, reader: Reader) -> None:
        """The reader is pickled now: later that would keep Python's lock for a moment."""
        self._reader = pickle.dumps(reader, pickle.HIGHEST_PROTOCOL)
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._line: socket.socket | None = None
        self._at_work, self._last = 0, 0.0

    def read(self, line: Line, work: Work[Result], body: bytes, seconds: float) -> Result:
        """What a body asks for, in so many seconds. Raises Fault, also when the line is cut."""
        begun = time.monotonic()
        with self._lock:
            self._at_work += 1
        try:
            with line.here, line.there, Connection(os.dup(line.here.fileno())) as pipe:
                self._pass_on(line.there)
                line.there.close()
                pipe.send_bytes(pickle.dumps((work, seconds)))
                pipe.send_bytes(body)
                found: Any = pickle.loads(pipe.recv_bytes())
        except (OSError, EOFError):
            if time.monotonic() - begun >= seconds:
                raise too_complex(seconds) from None
            told = "the process that reads large requests ended, as it does when memory is short; try again later"
            raise Fault(503, told, code="unavailable", retry_after=5) from None
        finally:
            with self._lock:
                self._at_work -= 1
                self._last = time.monotonic()
        if isinstance(found, Exception):
            raise found
        return found

    def close_when_idle(self) -> None:
        """End the process where nothing was asked of it for long."""
        with self._lock:
            if not self._at_work and time.monotonic() - self._last >= IDLE_SECONDS:
                self._close()

    def close(self) -> None:
        """End the process; another read starts one again."""
        with self._lock:
            self._close()

    def _pass_on(self, there: socket.socket) -> None:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._line is not None
            socket.send_fds(self._line, [NOTHING], [there.fileno()])

    def _start(self) -> None:
        self._close()
        self._line, there = socket.socketpair()
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", RUN, str(there.fileno())],
                env=os.environ | ENVIRONMENT,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(there.fileno(),),
            )
        assert self._process.stdin is not None
        with self._process.stdin as words:
            words.write(self._reader)

    def _close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._process is not None:
            self._process.wait()
            self._process = None


def too_complex(seconds: float) -> Fault:
    """A request that takes longer to read than it may."""
    return Fault(400, f"the request takes more than {seconds:.0f} seconds to read", code="too_complex")
