"""The one timing loop: warm up, repeat until a time budget is spent, take the median."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise


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
