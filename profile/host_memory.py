"""Host DRAM: read rate by thread count, and the thread count that the runtime should use."""

from collections.abc import Callable, Iterable

from pshard.machine import ReadTiming

CLOSE_ENOUGH = 0.03  # fewer threads are taken when they lose at most this much: the others stay free for copies


def thread_counts(cores: int, quick: bool) -> tuple[int, ...]:
    """Thread counts worth trying on so many cores: all of them up to 4, then steps towards the full count."""
    if cores <= 4:
        return tuple(range(1, cores + 1))
    fractions = (0.5, 1.0) if quick else (0.25, 0.5, 0.75, 1.0)
    return tuple(sorted({1, 2, 4, *(max(1, round(cores * f)) for f in fractions)}))


def measure_reads(read_rate: Callable[[int], float], counts: Iterable[int]) -> tuple[ReadTiming, ...]:
    """DRAM read rate by thread count; `read_rate(threads)` gives bytes per second."""
    return tuple(ReadTiming(n, read_rate(n)) for n in counts)


def pick_threads(rates: dict[int, float]) -> int:
    """The smallest thread count within 3% of the best rate. `rates`: threads -> any rate, higher is better."""
    best = max(rates.values())
    return min(n for n, rate in rates.items() if rate >= best * (1 - CLOSE_ENOUGH))
