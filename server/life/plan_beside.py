"""Makes a plan while a server runs, in a process of its own: planning would keep Python's lock from those who serve."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable

from pshard.errors import UserError

LOOK_SECONDS = 0.5  # between looks at whether a plan is still wanted
NICE = 10  # the engine's threads go first
RUN = "import os, sys; os.nice({nice}); from pshard.commands.cli_plan import main; sys.exit(main(sys.argv[1:]))"


def plan_beside(command: str, stopped: Callable[[], bool]) -> None:
    """Run a pshard-plan command, without trying its plans: the device is in use. stopped: whether nobody waits any
    more. Raises UserError with what the command said, and when it was stopped."""
    words = [*shlex.split(command)[1:], "--no-validate"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", RUN.format(nice=NICE), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that solvers that it starts end with it
    )
    while True:
        try:
            _, said = process.communicate(timeout=LOOK_SECONDS)
            break
        except subprocess.TimeoutExpired:
            if stopped():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                raise UserError("the server stops; ask again when it is there again") from None
    if process.returncode:
        lines = said.decode(errors="replace").strip().splitlines() or [f"it ended with code {process.returncode}"]
        told = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1])
        raise UserError(f"no plan could be made: {told.removeprefix('error: ')}; run: {command}")
