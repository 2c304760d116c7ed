"""Compiles the GPU kernels that a plan's steps start before its first run: on all cores, while the model is loaded.

Triton compiles a kernel when it is first started, one after another: some 80 for a model of one quant type, some
300 for a mix of fifteen. So a process of its own finds them before (`compile_kernels`).
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.jsonio import from_json, to_json
from pshard.plan import Variant
from pshard.session.planning_bar import stage_bar

if TYPE_CHECKING:
    from pshard.session.open_plan import Opened
    from pshard.session.readiness.compile_kernels import Task

RUN = "import os; os.nice(5); from pshard.session.readiness.compile_kernels import main; main()"
ONE_BY_ONE = "GPU kernels are compiled one by one as they are first used"


@contextmanager
def kernels_ready(opened: "Opened", variant: Variant, index: int, notes: list[str]) -> Iterator[None]:
    """What is done meanwhile loads a model to the GPU of that index; at the end its kernels are compiled.

    A plan of which that is known is not looked at again. Nor are plans of several ranks, or with a limit of host
    memory, which processes that compile would exceed. notes: gets a line where it could not be done.
    """
    try:
        begun = _begin(opened, variant, index)
    except Exception as error:  # whatever it is, a run needs none of this
        notes.append(f"{ONE_BY_ONE} ({type(error).__name__}: {error})")
        begun = None
    if begun is None:
        yield
        return
    process, mark = begun
    try:
        yield
        if why := _wait(process):
            notes.append(f"{ONE_BY_ONE} ({why})")
        else:
            with suppress(OSError):  # else it is looked at again, and found compiled
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _begin(opened: "Opened", variant: Variant, index: int) -> "tuple[subprocess.Popen[str], Path] | None":
    """The process that compiles, and the file that says so afterwards; None where there is nothing to do."""
    if len(variant.ranks) != 1 or variant.workload.ram_mib or variant.ranks[0].beyond_host:
        return None
    from triton import __version__, knobs
    from triton.runtime import driver

    from pshard.runtime.kernels.gpu.card_limits import card_limits
    from pshard.session.readiness.compile_kernels import Task

    driver.active.get_current_target()  # tells processes from now on which GPU is here, where it is taken for another
    file, tiles, limits = opened.file, tuple(opened.profile.tiles_of(index)), card_limits(f"cuda:{index}")
    task = Task(file.spec.path, file.draft_path, variant, tiles, limits)
    programs = [file.spec, *([file.spec.head] if file.spec.head else ())]
    models = [(spec.config, [unit.tensors for unit in spec.units]) for spec in programs]
    asked = repr((__version__, _digest_sources(), task, models))
    # beside the kernels, so that it goes with them
    mark = Path(knobs.cache.dir) / f"pshard-{sha256(asked.encode()).hexdigest()[:32]}"
    return None if mark.exists() else (_start(task), mark)


def _start(task: "Task") -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", RUN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C is for whoever started it, who ends it with the processes that it starts
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(to_json(task)) + "\n")
    process.stdin.flush()
    return process


def _digest_sources() -> str:
    """Names the kernels and what starts them."""
    import pshard.runtime

    read = sha256()
    for path in sorted(Path(str(pshard.runtime.__file__)).parent.rglob("*.py")):
        read.update(path.read_bytes())
    return read.hexdigest()


def _wait(process: "subprocess.Popen[str]") -> str:
    """Until all is compiled, with a bar on a terminal; why it is not, or nothing."""
    from pshard.session.readiness.compile_kernels import Heard

    started, heard = time.monotonic(), Heard(error="the process ended")
    assert process.stdout is not None
    with stage_bar("compiling GPU kernels, once") as show:
        for line in process.stdout:
            try:
                heard = from_json(Heard, json.loads(line))
            except ValueError as error:
                return f"{type(error).__name__}: {error}"
            show(f"{heard.left} left", 1 - heard.left / max(1, heard.kernels))
    if heard.compiled is None:
        return heard.error or "the process ended"
    if (seconds := time.monotonic() - started) >= 1.0:
        print(
            f"note: {heard.compiled} GPU kernels were compiled for this plan, while the model was loaded and for "
            f"{seconds:.0f} s after that; later runs find them in Triton's cache",
            file=sys.stderr,
        )
    return ""
