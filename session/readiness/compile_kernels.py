"""Finds the GPU kernels that a plan's steps start, and compiles them: in a process that leaves the GPU alone.

It reads a `Task` as a line of JSON, writes lines of JSON (`Heard`), and ends with whoever started it, whose words end
then.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from pathlib import Path

from pshard.jsonio import from_json, to_json
from pshard.plan import Variant
from pshard.profile.tuning.compile_ahead import Compiling, Request, become, count_processes, requests_of
from pshard.runtime.kernels.gpu.card_limits import CardLimits
from pshard.times.gpu_tiles import TileChoice

MOST_SECONDS = 900.0  # what is not compiled by then is when it is first started
LOOK = 0.5  # seconds between two lines
LOST = (OSError, MemoryError, BrokenExecutor)  # not of the kernel


@dataclass(frozen=True)
class Task:
    """A plan of one rank, its model's file or folder and that of the draft model ("" without one), and the GPU's limits
    and chosen tiles."""

    model: str
    draft: str
    variant: Variant
    tiles: tuple[TileChoice, ...]
    limits: CardLimits


@dataclass(frozen=True)
class Heard:
    """What is left of so many kernels, and at the end how many were compiled; or why none can be."""

    kernels: int = 0
    left: int = 0
    compiled: int | None = None
    error: str = ""


def main() -> None:
    """Carry out the task on stdin."""
    task = sys.stdin.readline()
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def say(heard: Heard) -> None:
        print(json.dumps(to_json(heard)), flush=True)

    try:
        compile_plan(from_json(Task, json.loads(task)), say)
    except Exception as error:  # whatever it is, a run needs none of this
        say(Heard(error=f"{type(error).__name__}: {error}"))


def _end_with_parent() -> None:
    while os.read(0, 1):  # without a lock of Python's, which its end would wait for
        pass
    os.killpg(0, signal.SIGKILL)  # with the processes that compile


def compile_plan(task: Task, say: Callable[[Heard], None]) -> None:
    """Compile a plan's kernels; `say` hears how far it is."""
    become(task.limits.capability)
    requests = list_kernels(task)
    if not requests:
        raise ValueError("no kernel was found")
    compiling, deadline = Compiling(requests, count_processes()), time.monotonic() + MOST_SECONDS
    while (left := compiling.left) and time.monotonic() < deadline:
        say(Heard(len(requests), left))
        time.sleep(LOOK)
    errors = compiling.finish(0.0)
    lost = next((error for error in errors.values() if isinstance(error, LOST)), None)
    if lost or len(errors) < len(requests):  # it is worth another try
        raise lost or TimeoutError(f"{len(errors)} of {len(requests)} kernels were reached in {MOST_SECONDS:.0f} s")
    say(Heard(len(requests), 0, sum(error is None for error in errors.values())))


def list_kernels(task: Task) -> list[Request]:
    """What the steps of a plan start, each once; nothing is started."""
    import torch

    from pshard.models.attach_draft import open_drafted
    from pshard.runtime.kernels.gpu.cuda import CudaKernels
    from pshard.runtime.kernels.gpu.products.many_rows import library_left_out
    from pshard.runtime.rehearse import rehearse_steps

    most = task.variant.ranks[0].tiers[-1].tokens
    kernels = CudaKernels(torch.device("cpu"), most, task.tiles, limits=task.limits)
    with open_drafted(Path(task.model), Path(task.draft) if task.draft else None) as file, library_left_out():
        found = requests_of(lambda: rehearse_steps(file, task.variant, kernels))
    return list(dict.fromkeys(found))
