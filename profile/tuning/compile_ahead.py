"""Compiles kernels of the GPU in processes of their own, into Triton's cache.

Most of a compilation is Python code, so threads would not help. The processes import Triton without torch, which takes
ten times as long, and leave the GPU alone: Triton's driver is replaced there by one that only names it.
"""

import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from pshard.profile.identify import count_cores, usable_memory
from pshard.runtime.kernels.gpu.stable_keys import keep_keys_stable

MOST_PROCESSES = 32
PROCESS_BYTES = 1 << 30  # of memory, at most; all together take a quarter of it


class Request(NamedTuple):
    """A kernel, by its module and name, and what it is to be compiled for, in Triton's words."""

    module: str
    kernel: str
    words: str


def requests_of(call: Callable[[], object]) -> tuple[Request, ...]:
    """What Triton would have to compile in a call; nothing is compiled, and no kernel is started.

    Nor those that were compiled before: they would read what others leave that are not started here. Tiles of pairs
    that nobody wrote name experts that do not exist, at whose addresses a GPU ends the process.
    """
    from triton import knobs
    from triton.runtime.jit import JITFunction

    found: list[Request] = []

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found.append(Request(fn.module, fn.jit_function.__name__, compile["specialization_data"]))
        return True  # Triton then leaves it

    before, start, seen = knobs.runtime.jit_cache_hook, JITFunction.run, set[tuple[Any, ...]]()

    def warm_up(kernel: Any, *arguments: Any, **named: Any) -> None:
        alike = id(kernel), _likeness(arguments), tuple((name, _likeness(value)) for name, value in named.items())
        if alike not in seen:  # layers of a model start the same ones again and again
            seen.add(alike)
            start(kernel, *arguments, **{**named, "warmup": True})

    knobs.runtime.jit_cache_hook, JITFunction.run = note, warm_up
    try:
        call()
    finally:
        knobs.runtime.jit_cache_hook, JITFunction.run = before, start
    return tuple(found)


def _likeness(value: Any) -> Any:
    """What Triton may compile for: arguments that are alike here ask for one kernel."""
    if isinstance(value, tuple | list):
        return tuple(map(_likeness, value))
    if hasattr(value, "data_ptr"):
        return value.dtype, value.data_ptr() % 16
    return type(value), value


def count_processes() -> int:
    """How many processes compile at once: as many as there are cores, and memory for them."""
    return max(1, min(count_cores(), MOST_PROCESSES, usable_memory() // 4 // PROCESS_BYTES))


class Compiling:
    """Kernels that processes of their own compile for the GPU that is current, in this order, until `finish`."""

    def __init__(self, requests: Sequence[Request], processes: int) -> None:
        from triton.runtime import driver

        self._requests, target = requests, driver.active.get_current_target()
        self._pool = ProcessPoolExecutor(min(processes, len(requests)), multiprocessing.get_context("spawn"))
        self._futures, self._broken = dict[Request, Future[None]](), None
        try:
            with _interrupts_ignored(), _main_hidden():
                self._futures = {request: self._pool.submit(_compile, target, request) for request in requests}
        except BrokenExecutor as error:  # the processes end as they start
            self._broken = error

    @property
    def left(self) -> int:
        """Those that are not compiled yet."""
        return sum(not future.done() for future in self._futures.values())

    def finish(self, seconds: float) -> dict[Request, BaseException | None]:
        """Wait for so long at most: the error, or None, of those that were reached by then."""
        try:
            wait(self._futures.values(), max(0.0, seconds))
        finally:
            self._pool.shutdown(cancel_futures=True)  # waits for those at work, which would disturb what is timed next
        if self._broken:
            return dict.fromkeys(self._requests, self._broken)
        return {request: future.exception() for request, future in self._futures.items() if not future.cancelled()}


def compile_ahead(requests: Sequence[Request], processes: int, seconds: float) -> dict[Request, BaseException | None]:
    """Compile these for the GPU that is current, in this order: the error, or None, of those reached in the time."""
    deadline = time.monotonic() + seconds
    return Compiling(requests, processes).finish(deadline - time.monotonic()) if requests else {}


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes that start meanwhile ignore Ctrl-C from their first moment on: this one ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Processes that start meanwhile do not run the program's main module, as they else would: a script that loads a
    model, and does so whenever it is imported, would load another one in each."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def become(capability: int) -> Any:
    """Make this process compile for a GPU of a capability (86 for 8.6) that it leaves alone; Triton's name of it."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", capability, 32)
    driver.set_active(OnlyTarget(target))
    return target


def _compile(target: Any, request: Request) -> None:
    """What a process of the pool does."""
    from triton.runtime import driver

    driver.set_active(OnlyTarget(target))
    keep_keys_stable()
    getattr(import_module(request.module), request.kernel).preload(request.words)


class OnlyTarget:
    """As much of a Triton driver as it takes to compile for a GPU that is not there."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
