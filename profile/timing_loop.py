"""The one timing loop: warm up, repeat until a time budget is spent, take what is typical."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LEAST_IN_GRAPH, MOST_IN_GRAPH = 8, 256  # calls that one CUDA graph holds while they are timed
TURNS = 7  # of a race
STALLED = 2  # times the median: a core stood still
LOAD_SECONDS, MOST_LOAD = 0.2, 2000  # of work before what heats is timed, and calls that this may be


Record = Callable[[Callable[[], object]], Callable[[], object] | None]  # does work; how to do it again, or None


@dataclass(frozen=True)
class Pace:
    """How long one timing may take. A call longer than `seconds` is timed once, after its warm-up. load: seconds of the
    same work before it is timed."""

    seconds: float
    least: int = 3
    most: int = 200
    load: float = 0.0

    def under_load(self) -> "Pace":
        """For work that heats: a GPU at its power limit lowers its clock some 0.1 s after the work began, and goes
        up and down from then on (an H100: products of 4096 tokens take 0.61 ms at first, 0.66 to 0.74 later)."""
        return replace(self, seconds=max(self.seconds, LOAD_SECONDS / 2), load=LOAD_SECONDS)

    def repetitions(self, estimate: float) -> int:
        """How often to run something that takes about `estimate` seconds."""
        if estimate > self.seconds:
            return 1
        return max(self.least, min(self.most, int(self.seconds / max(estimate, 1e-7))))


def median_seconds(run: Callable[[int], object], pace: Pace, cuda: bool = False) -> float:
    """Median seconds of run(i), i = 0, 1, 2 ...; `i` lets it choose another copy of its operands every time.

    The first call is a warm-up (compilation, first touch), the second sets the number of repetitions, and is the
    result when that number is one. On CUDA calls are issued one behind the other and timed by events between them: what
    a queue of such calls takes.
    """
    return statistics.median(_samples(run, pace, cuda))


def mean_seconds(run: Callable[[int], object], pace: Pace) -> float:
    """Like `median_seconds` on the host, but what many calls of a step add up to: the mean of all but those that took
    STALLED times the median."""
    return _mean(_samples(run, pace, False))


def replay_seconds(run: Callable[[int], object], pace: Pace, record: Record) -> float:
    """The same of calls that `record` makes and writes down, and that are then made again as they were written: nothing
    of Python is in them. Half as many; as they are where they cannot be written down. Between both times all others
    are made, so that no cache keeps what is read: calls that read little are not for this."""
    estimate, count = _begin(run, pace, _sample_cpu)
    if count == 1:
        return estimate[0]
    written = [record(partial(run, i)) for i in range(2, 2 + max(pace.least, count // 2))]
    whole = [again for again in written if again is not None]
    if len(whole) < len(written):
        return _mean(_sample_cpu(run, 2, count))
    return _mean(_sample_cpu(lambda i: whole[i](), 0, len(whole)))


def _mean(samples: Sequence[float]) -> float:
    median = statistics.median(samples)
    return statistics.mean(s for s in samples if s <= STALLED * median)


def _samples(run: Callable[[int], object], pace: Pace, cuda: bool) -> list[float]:
    sample = _sample_cuda if cuda else _sample_cpu
    estimate, count = _begin(run, pace, sample)
    before = min(MOST_LOAD, int(pace.load / max(estimate[0], 1e-7)))  # a call longer than that has heated by itself
    return sample(run, 2, before + count)[before:] if before + count > 1 else estimate


def _begin(run: Callable[[int], object], pace: Pace, sample: Callable[..., list[float]]) -> tuple[list[float], int]:
    """The first call, which is left out, and the second: its time, and how many are worth making."""
    sample(run, 0, 1)
    estimate = sample(run, 1, 1)
    return estimate, pace.repetitions(estimate[0])


def graph_seconds(run: Callable[[int], object], pace: Pace) -> float:
    """Median seconds of run(i) as part of a CUDA graph: what a call takes when launching it costs the host nothing.

    `run` must be fit for capture (see `Kernels.repeatable`).
    """
    replay, calls = _capture(run, pace)
    return median_seconds(replay, pace, cuda=True) / calls


def race_seconds(runs: Sequence[Callable[[int], object]], pace: Pace, cuda: bool) -> list[float]:
    """Median seconds of each run(i), taken by turns, so that a clock that drifts slows all alike; on CUDA in graphs.

    None of them may need compiling any more.
    """
    contenders = [_capture(run, pace) if cuda else (run, 1) for run in runs]
    sample = _sample_cuda if cuda else _sample_cpu
    samples: list[list[float]] = [[] for _ in runs]
    for turn in range(TURNS):
        for place in range(len(runs)):
            at = (turn + place) % len(runs)  # none is always the first
            run, calls = contenders[at]
            samples[at].append(sample(run, turn, 1)[0] / calls)
    return [statistics.median(found) for found in samples]


def _capture(run: Callable[[int], object], pace: Pace) -> tuple[Callable[[int], object], int]:
    """A CUDA graph of so many calls, as a function that replays it."""
    import torch

    graph, stream = torch.cuda.CUDAGraph(), _capture_stream(torch.cuda.current_device())
    with torch.cuda.stream(stream):
        _sample_cuda(run, 0, 1)  # compiles kernels and takes workspaces, which a capture must not do
        estimate = _sample_cuda(run, 1, 1)[0]
    calls = calls_in_graph(pace, estimate)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for i in range(calls):
            run(i)
    return lambda i: graph.replay(), calls


def calls_in_graph(pace: Pace, estimate: float) -> int:
    """How many calls of about `estimate` seconds one graph holds: enough that starting it does not count, but no more
    than the time meant for a timing allows."""
    wanted = max(LEAST_IN_GRAPH, min(MOST_IN_GRAPH, int(pace.seconds / 4 / estimate)))
    return max(1, min(wanted, int(pace.seconds / estimate)))


@cache
def _capture_stream(device: int) -> "torch.cuda.Stream":
    """One stream for all captures of a device: cuBLAS keeps a workspace of 32 MiB for each that it has met."""
    import torch

    return torch.cuda.Stream(device)


def _sample_cpu(run: Callable[[int], object], first: int, count: int) -> list[float]:
    samples = []
    for i in range(first, first + count):
        start = time.perf_counter()
        run(i)
        samples.append(time.perf_counter() - start)
    return samples


def _sample_cuda(run: Callable[[int], object], first: int, count: int) -> list[float]:
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for i in range(count):
        run(first + i)
        events[i + 1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
