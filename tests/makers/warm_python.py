"""Python processes that need not import torch: a process that has done so forks them. For tests that start many.

What runs is what `python ...` would have run: the same words, environment, files and exit code. It is no test of what a
process imports or does when it starts.
"""

import atexit
import contextlib
import errno
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Protocol

import pytest

MAKERS = Path(__file__).parent
BENCH = "pshard.session.bench_engine"
ENGINES = ("torch.distributed", "engines", "pshard.runtime.ranks.group", "pshard.runtime.build_engine", BENCH)
COMMANDS = (  # import these inside functions: half of what a short run takes
    "pshard.commands.cli_run", "pshard.session.find_model", "pshard.session.start_engine", "pshard.session.open_plan",
    "pshard.session.readiness.fill_ahead", "pshard.session.readiness.first_profile", "pshard.models.text.chat",
    "pshard.models.text.gguf_tokenizer", "pshard.models.attach_draft", "pshard.planner.choose_mode",
    "pshard.registries.choose", "pshard.server.life.load_model", "pshard.profile.effort", "pshard.profile.identify",
    "pshard.runtime.kernels.cpu.host", "rich.progress", "tokenizers", "psutil",
)  # fmt: skip
POLL_SECONDS = 0.01


class Forker(Protocol):
    """Starts children. `pid`: of their parent."""

    pid: int

    def start(self, what: dict[str, Any], files: Sequence[int]) -> int:
        """The process id of a child that runs `what`; `files` become the file descriptors what["numbers"]."""

    def poll(self, pid: int) -> int | None:
        """The exit code of a child that has ended."""


class ForksItself:
    """Forks this process, which has no threads yet."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def start(self, what: dict[str, Any], files: Sequence[int]) -> int:
        pid = os.fork()
        if not pid:
            _become(what, files)
        return pid

    def poll(self, pid: int) -> int | None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None


class AsksForForks:
    """Has another process fork, as this one has threads, and more in memory than a child needs.

    That process is itself forked from one that all workers of a run of tests share.
    """

    def __init__(self) -> None:
        self._line, self.pid = _meet_forker(f"\0{__file__} of {os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}")
        self._lock = threading.Lock()

    def start(self, what: dict[str, Any], files: Sequence[int]) -> int:
        return self._ask(["start", what], files)

    def poll(self, pid: int) -> int | None:
        return self._ask(["poll", pid])

    def _ask(self, question: list[Any], files: Sequence[int] = ()) -> Any:
        with self._lock, tempfile.TemporaryFile() as said:
            said.write(json.dumps(question).encode())
            said.seek(0)
            socket.send_fds(self._line, [b"?"], [said.fileno(), *files])
            return json.loads(self._line.recv(100))


def _meet_forker(address: str) -> tuple[socket.socket, int]:
    """A line to a process that forks for this one alone, and its id. Started is what is asked for it, if nobody has."""
    started = None
    while True:
        line = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(ConnectionRefusedError, ConnectionResetError):  # it may just be ending
            line.connect(address)
            if pid := line.recv(100):
                return line, int(pid)
        line.close()
        if started is None or started.poll() == 0:
            started = _listen_at(address)
        elif started.poll():
            raise RuntimeError("what forks for tests has failed")
        time.sleep(POLL_SECONDS)


def _listen_at(address: str) -> subprocess.Popen | None:
    """A process that listens there, unless another worker's does."""
    with socket.socket(socket.AF_UNIX) as listening:
        try:
            listening.bind(address)
        except OSError as taken:
            if taken.errno == errno.EADDRINUSE:
                return None
            raise
        listening.listen()
        command = [sys.executable, "-P", __file__, str(listening.fileno())]
        return subprocess.Popen(command, pass_fds=(listening.fileno(),), stdin=subprocess.DEVNULL)


@cache
def _forker() -> Forker:
    """Of this process; it ends when this one does."""
    return AsksForForks()


def listen(listening: socket.socket) -> None:
    """Fork a process for each that asks for one; end when all of them are gone."""
    for name in (*ENGINES, *COMMANDS):
        importlib.import_module(name)
    pytest.MonkeyPatch().setattr(f"{BENCH}.WARM_SECONDS", 0.0)  # as in the tests' own process
    read_size_quickly(pytest.MonkeyPatch())
    assert threading.active_count() == 1
    gc.freeze()
    asked = select.poll()
    asked.register(listening)
    forks = dict[int, int]()  # process ids, by files that can be read when the process has ended
    while True:
        for file, _ in asked.poll():
            if file == listening.fileno():
                pid = _fork_forker(listening)
                file = os.pidfd_open(pid)
                forks[file] = pid
                asked.register(file)
            else:
                asked.unregister(file)
                os.waitpid(forks.pop(file), 0)
                os.close(file)
        if not forks:
            return


def _fork_forker(listening: socket.socket) -> int:
    """The id of a process that forks for the next that asks."""
    line, _ = listening.accept()
    with line:
        pid = os.fork()
        if not pid:
            listening.close()
            answer(line)
            os._exit(0)
    return pid


def answer(line: socket.socket) -> None:
    """Fork for the process at the other end until it is gone."""
    forks = ForksItself()
    line.sendall(str(forks.pid).encode())
    while True:
        asked, files, _, _ = socket.recv_fds(line, 1, 20)
        if not asked:
            return
        with open(files[0]) as said:
            verb, what = json.load(said)
        found = forks.start(what, files[1:]) if verb == "start" else forks.poll(what)
        for file in files[1:]:
            os.close(file)
        line.sendall(json.dumps(found).encode())


def _become(what: dict[str, Any], files: Sequence[int]) -> None:
    """Be the child: never returns."""
    code = 1
    try:
        _take_files(files, what["numbers"])
        os.chdir(what["folder"])
        os.environ.clear()
        os.environ.update(what["environment"])
        sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        warm_ranks(pytest.MonkeyPatch(), ForkedChild)
        import numpy

        numpy.random.seed()  # Python's own random numbers start anew by themselves
        code = _run(what["words"])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _take_files(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Have nothing open but `files` under their numbers."""
    high = max(numbers) + len(files) + 100
    for i, file in enumerate(files):
        os.dup2(file, high + i)
    os.closerange(0, high)
    for i, number in enumerate(numbers):
        os.dup2(high + i, number)
    os.closerange(max(numbers) + 1, high + len(files))
    for free in set(range(max(numbers))) - set(numbers):
        with contextlib.suppress(OSError):
            os.close(free)


def _run(words: Sequence[str]) -> int:
    """As `python` runs its words."""
    how, *rest = (word for word in words if word != "-P")
    if how == "-m":
        sys.argv = [how, *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv = [how, *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [how, *rest]
        sys.path.insert(0, str(Path(how).parent))
        runpy.run_path(how, run_name="__main__")
    return 0


class WarmProcess:
    """Stands in for `subprocess.Popen` of Python: what tests and start_ranks.py use of it."""

    forker = staticmethod(_forker)

    def __init__(
        self,
        args: Sequence[str],
        env: dict[str, str] | None = None,
        stdin: int | IO | None = None,
        stdout: int | IO | None = None,
        stderr: int | IO | None = None,
        pass_fds: Sequence[int] = (),
        cwd: Path | None = None,
    ) -> None:
        assert args[0] == sys.executable
        self.args, self.returncode, self.stderr = list(args), None, None
        self._forker = self.forker()
        environment = dict(os.environ if env is None else env)
        if "PSHARD_STARTED_BY" in environment:
            environment["PSHARD_STARTED_BY"] = str(self._forker.pid)  # a rank ends with its parent
        with contextlib.ExitStack() as stack:
            nothing = stack.enter_context(open(os.devnull, "r+b"))
            files = []
            for number, file in enumerate((stdin, stdout, stderr)):
                if file == subprocess.PIPE:
                    assert number == 2
                    reading, writing = os.pipe()
                    self.stderr = open(reading, "rb")  # noqa: SIM115
                    file = stack.enter_context(open(writing, "wb"))
                files.append(number if file is None else (nothing if file == subprocess.DEVNULL else file).fileno())
            what = {
                "words": self.args[1:],
                "environment": environment,
                "folder": str(cwd or os.getcwd()),
                "numbers": [0, 1, 2, *pass_fds],
            }
            self.pid = self._forker.start(what, [*files, *pass_fds])

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def _wait(self, seconds: float | None) -> int | None:
        if self.returncode is None:
            end = os.pidfd_open(self.pid)  # to ask the forker again and again would cost more than most children
            try:
                if select.select([end], [], [], seconds)[0]:
                    self.returncode = self._forker.poll(self.pid)
            finally:
                os.close(end)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_warm(
    args: Sequence[str],
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    input: str = "",
    timeout: float = 100,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with all output captured as text."""
    with tempfile.TemporaryFile() as typed, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        typed.write(input.encode())
        typed.seek(0)
        process = WarmProcess(args, env, typed, out, errors, cwd=cwd)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        for file in (out, errors):
            file.seek(0)
        return subprocess.CompletedProcess(list(args), code, out.read().decode(), errors.read().decode())


class ForkedChild(WarmProcess):
    """The same where this process is warm itself, and shall be the parent."""

    forker = staticmethod(cache(ForksItself))


def read_size_quickly(patch: pytest.MonkeyPatch) -> None:
    """Engines count as host memory of their process all that is in memory and no page of a file, also what processes
    share, until the patch ends."""
    patch.setattr("pshard.runtime.build_engine.measure_process", _resident_bytes)


def _resident_bytes() -> int:
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def warm_ranks(patch: pytest.MonkeyPatch, process: type[WarmProcess] = WarmProcess) -> None:
    """Ranks that this process starts are forked until the patch ends."""
    pipes = SimpleNamespace(Popen=process, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    patch.setattr("pshard.runtime.ranks.start_ranks.subprocess", pipes)


if __name__ == "__main__":
    sys.path.insert(0, str(MAKERS))
    listen(socket.socket(fileno=int(sys.argv[1])))
