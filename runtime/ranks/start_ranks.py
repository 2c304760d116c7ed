"""Starts a command as N ranks: one process each, one terminal, and all of them end together."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

GRACE_SECONDS = 3.0  # between asking a rank to end and ending it
EXIT_RANK_LOST = 75  # as in pshard.runtime.ranks.watch, which would import torch here
POLL_SECONDS = 0.05
# a rank ends without Python's own end: a library's thread that comes back from C++ meanwhile would abort it
_RUN = """
import atexit, os, sys
from {module} import main
code = main()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
"""


def start_ranks(ranks: int, module: str, argv: list[str], rank_0_interrupted: bool = False) -> int:
    """Run `module`'s main() with `argv` as `ranks` processes of this machine; returns the group's exit code.

    Rank 0 has this terminal: its input, output and progress. The other ranks' output is dropped and their errors are
    shown with their rank; what they say is dropped too when rank 0 reports a user's error, as it is the same. When a
    rank fails, the others are ended and the line on stderr names it. Ctrl-C and SIGTERM end all of them; with
    `rank_0_interrupted` rank 0 alone decides what a Ctrl-C means.
    """
    with socket.create_server(("127.0.0.1", 0)) as meeting_point:
        processes = [start_rank(r, ranks, module, argv, meeting_point) for r in range(ranks)]
    readers = [StderrReader(r, p) for r, p in enumerate(processes) if r > 0]
    previous = signal.signal(signal.SIGTERM, _terminate)
    if rank_0_interrupted:  # only now, as processes inherit what is ignored
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        failed = _wait_for_first_failure(processes)
        interrupted = False
        if failed is not None and processes[failed].returncode in (2, EXIT_RANK_LOST):
            # what is wrong for one rank is mostly wrong for all: let rank 0 say it; and one that is missed may be
            # ending, with a reason of its own
            _wait_all(processes, GRACE_SECONDS)
            failed = find_failure(processes)
    except KeyboardInterrupt as reason:
        failed, interrupted = None, True
        if not isinstance(reason, _Terminated):
            _wait_all(processes, GRACE_SECONDS)  # the terminal has sent them the Ctrl-C too
    finally:
        signal.signal(signal.SIGTERM, previous)
        if rank_0_interrupted:
            signal.signal(signal.SIGINT, interrupt)
        end_ranks(processes)
    user_error = interrupted or processes[0].returncode == 2
    if failed is not None and processes[0].returncode not in (2, EXIT_RANK_LOST):
        end_line()  # rank 0 had no time to
    for reader in readers:
        reader.finish(quiet=user_error)
    if interrupted:
        return 130
    if failed is None:
        return 0
    code = processes[failed].returncode
    if code not in (2, EXIT_RANK_LOST, 130):
        why = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        print(f"error: rank {failed} of {ranks} {why}; the other ranks were stopped", file=sys.stderr)
    return 128 - code if code < 0 else code


def start_rank(
    rank: int, ranks: int, module: str, argv: list[str], meeting_point: socket.socket, keep: tuple[int, ...] = ()
) -> subprocess.Popen:
    """Start the main() of `module` with `argv` as one of the ranks, which meet at a socket that rank 0 gets. keep: file
    descriptors that it has too."""
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(meeting_point.getsockname()[1]),
        "PSHARD_STARTED_BY": str(os.getpid()),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # torchrun may have started this process, as the only one
    }
    if rank == 0:
        environment["PSHARD_LISTEN_FD"] = str(meeting_point.fileno())  # no other program can take the port meanwhile
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _RUN.format(module=module), *argv],
        env=environment,
        stdin=None if rank == 0 else subprocess.DEVNULL,
        stdout=None if rank == 0 else subprocess.DEVNULL,
        stderr=None if rank == 0 else subprocess.PIPE,
        pass_fds=(meeting_point.fileno(), *keep) if rank == 0 else keep,
    )


def end_line() -> None:
    """Begin a line on stderr where stdout goes to the same place: there an answer may have come half-way."""
    with contextlib.suppress(OSError, ValueError):
        places = [os.fstat(stream.fileno()) for stream in (sys.stdout, sys.stderr)]
        if os.path.samestat(*places):
            print(file=sys.stderr, flush=True)


class StderrReader:
    """Shows a rank's stderr line by line behind its number; its last error line is held back until the end."""

    def __init__(self, rank: int, process: subprocess.Popen) -> None:
        self._prefix, self._stream, self._held = f"[rank {rank}] ", process.stderr, ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        assert self._stream is not None
        for raw in self._stream:
            line = raw.decode(errors="replace").rstrip("\n")
            if line.startswith("error: ") or line == "interrupted":
                self._held = line
            else:
                print(self._prefix + line, file=sys.stderr, flush=True)

    def finish(self, quiet: bool) -> None:
        """Wait for its end; show what was held back, unless quiet."""
        self._thread.join(timeout=GRACE_SECONDS)  # a grandchild may hold the pipe open
        if self._held and not quiet:
            print(self._prefix + self._held, file=sys.stderr, flush=True)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which this process alone was sent."""


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise _Terminated


def _wait_for_first_failure(processes: list[subprocess.Popen]) -> int | None:
    """The first rank that ended with an error; None when all ended well."""
    while True:
        time.sleep(POLL_SECONDS)
        running = any(p.poll() is None for p in processes)
        failed = find_failure(processes)
        if failed is not None or not running:
            return failed


def find_failure(processes: list[subprocess.Popen]) -> int | None:
    """The rank that ended with an error, if any: the first that crashed, else that said why, else that missed others.

    A rank that crashed is the reason when another one only noticed that it is gone.
    """
    failed = [r for r, p in enumerate(processes) if p.poll() not in (None, 0)]
    return min(failed, key=lambda r: {2: 1, EXIT_RANK_LOST: 2}.get(processes[r].returncode, 0), default=None)


def _wait_all(processes: list[subprocess.Popen], seconds: float, killed: bool = False) -> None:
    """Until all ended that can: a process that is stopped (SIGSTOP) ends only when it is `killed`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(p.poll() is None and (killed or not _is_stopped(p)) for p in processes):
        time.sleep(POLL_SECONDS)


def _is_stopped(process: subprocess.Popen) -> bool:
    try:
        with open(f"/proc/{process.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def end_ranks(processes: list[subprocess.Popen]) -> None:
    """Ask what still runs to end, then make it."""
    for act in ("terminate", "kill"):
        for process in processes:
            if process.poll() is None:
                getattr(process, act)()
        _wait_all(processes, GRACE_SECONDS, killed=act == "kill")
