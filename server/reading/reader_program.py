"""The process that reads large requests: it knows the model's words, and forks for each request.

Whatever a request takes of time and memory is its own process's, and ends with it. The server's threads go on: what
parses, encodes and writes JSON keeps Python's lock of one process as long as it takes.
"""

import contextlib
import gc
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pshard.errors import UserError
from pshard.server.api.faults import Fault
from pshard.server.reading.parse_body import Work, read_body_as
from pshard.server.reading.reader import Reader

NICE = 10  # the engine's threads go first
NOTHING = b"!"  # goes along with a socket that is passed on


def main(argv: list[str]) -> int:
    """argv: the number of a socket, by which each request's own socket comes; the reader comes through stdin. Ends when
    the server does, or closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the server's
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how requests ended
    os.nice(NICE)
    with contextlib.suppress(OSError):  # as Linux has it: where memory is short this ends, and not the server
        Path("/proc/self/oom_score_adj").write_text("1000")
    reader: Reader = pickle.load(sys.stdin.buffer)
    reader.prompts.prepare()
    gc.freeze()  # pages stay shared with the forks
    with socket.socket(fileno=int(argv[0])) as server:
        while True:
            said, passed, _, _ = socket.recv_fds(server, len(NOTHING), 1)
            if not said:
                return 0
            if os.fork() == 0:
                server.close()
                try:
                    answer_request(reader, Connection(passed[0]))
                except BrokenPipeError:
                    pass  # the server is gone
                except BaseException as error:
                    print(f"a large request failed: {describe_places(error)}", file=sys.stderr, flush=True)
                finally:
                    os._exit(0)  # without what an end does for the process that was forked
            os.close(passed[0])


def answer_request(reader: Reader, pipe: Connection) -> None:
    """Read one request, and send back what it asks for or the Fault that it is told, within the seconds that it has."""
    work, seconds = pickle.loads(pipe.recv_bytes())
    signal.setitimer(signal.ITIMER_REAL, seconds)  # whose signal ends the process, in the midst of native code too
    body = pipe.recv_bytes()
    threading.Thread(target=end_when_cut, args=(pipe,), daemon=True).start()
    pipe.send_bytes(pickle.dumps(read_or_fail(reader, work, body), pickle.HIGHEST_PROTOCOL))


def end_when_cut(pipe: Connection) -> None:
    """End this process when nobody waits for it any more: nothing else comes by the pipe now."""
    pipe.poll(None)
    os._exit(0)


def read_or_fail(reader: Reader, work: Work[Any], body: bytes) -> Any:
    """What the body asks for, or a Fault; what nobody foresaw as its places."""
    try:
        return read_body_as(reader, work, body)
    except Fault as fault:
        return fault
    except UserError as error:
        return Fault(400, str(error))
    except Exception as error:
        return Unforeseen(describe_places(error))


class Unforeseen(Exception):
    """An error that no request should cause: its kind and places, without its words, which may hold a prompt."""


def describe_places(error: BaseException) -> str:
    """An error's kind, and where it was raised, the innermost place first."""
    places = " < ".join(f"{f.filename}:{f.lineno}" for f in reversed(traceback.extract_tb(error.__traceback__)[-4:]))
    return f"{type(error).__name__} at {places}"
