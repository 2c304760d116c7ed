"""Runs each kernel of a GPU once against the plain one: what a person with a card that nobody had tried runs first."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from pshard.profile.checked.kernel_cases import KernelCase, list_cases
from pshard.profile.tuning.compile_ahead import Request, compile_ahead, count_processes, requests_of
from pshard.runtime.kernels.api import Kernels
from pshard.runtime.kernels.plain import PlainKernels

CLOSE = 0.03  # relative error that int8 and bfloat16 explain; a kernel that computes something else is off by far more
CALLS = 5  # timed, on a GPU
COMPILE_SECONDS = 600.0
LONGEST = 200  # characters of an error


@dataclass(frozen=True)
class Checked:
    """What came of a case. `off`: relative error against the plain kernel; `seconds`: of a call; `failed`: the error in
    words, "" where it ran."""

    kernel: str
    what: str
    off: float | None
    seconds: float | None
    failed: str = ""

    @property
    def passed(self) -> bool:
        """Whether it ran and computed what the plain one does."""
        return not self.failed and self.off is not None and self.off < CLOSE


def check_kernels(device: torch.device, fast: Kernels, show: Callable[[str], None]) -> Iterator[Checked]:
    """Every case, one after the other; `show` hears what begins. Nothing of it is raised."""
    cases = list(list_cases())
    if device.type == "cuda":
        show("compiling")
        compile_cases(cases, fast, device)
    for case in cases:
        show(f"{case.kernel}: {case.what}")
        yield check_case(case, fast, device)


def compile_cases(cases: Iterable[KernelCase], fast: Kernels, device: torch.device) -> None:
    """What the cases need, on all cores at once; what cannot be compiled fails again, and is told, where it is run."""
    wanted: dict[Request, None] = {}
    for case in cases:
        try:
            call, _ = case.make(fast, device)
            wanted |= dict.fromkeys(requests_of(call))
        except Exception:
            continue
        finally:
            fast.forget()  # activations that a kernel would have quantised, had it been started
    compile_ahead(list(wanted), count_processes(), COMPILE_SECONDS)


def check_case(case: KernelCase, fast: Kernels, device: torch.device) -> Checked:
    """One case, by both kinds of kernels."""
    try:
        with torch.inference_mode():
            call, result = case.make(fast, device)
            call()
            found = result().clone()
            seconds = _time(call, device)
            fast.forget()
            plain, expected = case.make(PlainKernels(), device)
            plain()
            wanted = expected()
        off = float((found - wanted).norm() / wanted.norm())
    except Exception as error:
        fast.forget()
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return Checked(case.kernel, case.what, None, None, words[:LONGEST])
    return Checked(case.kernel, case.what, off if off == off else float("inf"), seconds)


def _time(call: Callable[[], object], device: torch.device) -> float | None:
    """Seconds of a call, launch included; None where an interpreter does it."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / CALLS
