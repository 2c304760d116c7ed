"""Compiles what a profile's timings need of a GPU's kernels before they begin, on all cores at once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from pshard.profile.timed.kernel_jobs import Job
from pshard.profile.timed.time_kernels import KernelBench
from pshard.profile.tuning.compile_ahead import Request, compile_ahead, count_processes, requests_of


def compile_jobs(jobs: Sequence[Job], bench: KernelBench, seconds: float) -> None:
    """Compile for about so many seconds what the jobs of this bench's side need that are not optional, the first first.

    What is not reached, or cannot be compiled elsewhere, is compiled when it is timed.
    """
    if bench.device.type == "cuda":
        compile_ahead(list_requests([job for job in jobs if not job.optional], bench), count_processes(), seconds)


def list_requests(
    jobs: Sequence[Job], bench: KernelBench, requests: Callable[[Callable[[], object]], Sequence[Request]] = requests_of
) -> list[Request]:
    """What the jobs of this bench's side need, each once: they are rehearsed, and no kernel is started."""
    rehearsal = replace(bench, rehearses=True)
    found: dict[Request, None] = {}
    for job in jobs:
        if job.side == bench.side:
            found |= dict.fromkeys(requests(partial(job.run, rehearsal)))
            bench.kernels.forget()  # activations that a kernel would have quantised, had it been started
    return list(found)
