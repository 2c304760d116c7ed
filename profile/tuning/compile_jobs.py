"""Compiles what a profile's timings need of a GPU's kernels before they begin, on all cores at once."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from pshard.errors import KernelRefused
from pshard.profile.timed.kernel_jobs import Job
from pshard.profile.timed.time_kernels import KernelBench
from pshard.profile.tuning.compile_ahead import Request, compile_ahead, count_processes, requests_of


def compile_jobs(jobs: Sequence[Job], bench: KernelBench, seconds: float, in_time: bool = False) -> list[Job]:
    """Compile for about so many seconds what the jobs of this bench's side need that are not optional, the first first;
    returns the jobs that are to be timed.

    What is not reached, or cannot be compiled elsewhere, is compiled when it is timed, some 0.6 s each. A profile that
    is to end `in_time` cannot wait for that: there optional jobs are compiled for too, and left out if not reached.
    """
    if bench.device.type != "cuda":
        return list(jobs)
    needs = list_requests([job for job in jobs if in_time or not job.optional], bench)
    wanted = dict.fromkeys(request for found in needs.values() for request in found)
    compiled = compile_ahead(list(wanted), count_processes(), seconds)
    ready = {request for request, error in compiled.items() if error is None}
    return keep_ready(jobs, needs, ready) if in_time else list(jobs)


def keep_ready(jobs: Sequence[Job], needs: Mapping[Job, Collection[Request]], ready: Collection[Request]) -> list[Job]:
    """The jobs without optional ones that need a kernel which is not ready."""
    return [job for job in jobs if not job.optional or all(request in ready for request in needs.get(job, ()))]


def list_requests(
    jobs: Sequence[Job], bench: KernelBench, requests: Callable[[Callable[[], object]], Sequence[Request]] = requests_of
) -> dict[Job, list[Request]]:
    """What each job of this bench's side needs: they are rehearsed, and no kernel is started."""
    rehearsal = replace(bench, rehearses=True)
    found: dict[Job, list[Request]] = {}
    for job in jobs:
        if job.side == bench.side:
            try:
                found[job] = list(requests(partial(job.run, rehearsal)))
            except KernelRefused:  # told when it is timed
                found[job] = []
            bench.kernels.forget()  # activations that a kernel would have quantised, had it been started
    return found
