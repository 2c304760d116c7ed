"""The one timing loop: warm up, repeat until a time budget is spent, take the median."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

LEAST_IN_GRAPH, MOST_IN_GRAPH = 8, 256  # calls that one CUDA graph holds while they are timed


@dataclass(frozen=True)
class Pace:
    """How long one timing may take. A call longer than `seconds` is timed once, after its warm-up."""

    seconds: float
    least: int = 3
    most: int = 200

    def repetitions(self, estimate: float) -> int:
        """How often to run something that takes about `estimate` seconds."""
        if estimate > self.seconds:
            return 1
        return max(self.least, min(self.most, int(self.seconds / max(estimate, 1e-7))))


def median_seconds(run: Callable[[int], object], pace: Pace, cuda: bool = False) -> float:
    """Median seconds of run(i), i = 0, 1, 2 ...; `i` lets it choose another copy of its operands every time.

    The first call is a warm-up (compilation, first touch), the second sets the number of repetitions, and is the
    result when that number is one. On CUDA calls
    are issued one behind the other and timed by events between them: what a queue of such calls takes.
    """
    sample = _sample_cuda if cuda else _sample_cpu
    sample(run, 0, 1)
    estimate = sample(run, 1, 1)[0]
    count = pace.repetitions(estimate)
    return statistics.median(sample(run, 2, count)) if count > 1 else estimate


def graph_seconds(run: Callable[[int], object], pace: Pace) -> float:
    """Median seconds of run(i) as part of a CUDA graph: what a call takes when launching it costs the host nothing.

    `run` must be fit for capture (see `Kernels.repeatable`).
    """
    import torch

    _sample_cuda(run, 0, 1)  # compiles kernels, which a capture must not do
    estimate = _sample_cuda(run, 1, 1)[0]
    calls = max(LEAST_IN_GRAPH, min(MOST_IN_GRAPH, int(pace.seconds / 4 / estimate)))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for i in range(calls):
            run(i)
    return median_seconds(lambda i: graph.replay(), pace, cuda=True) / calls


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
