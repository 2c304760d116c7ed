"""Threads of the host: what the kernels read from DRAM with each count, and which count the runtime should use."""

import itertools
import time
from collections.abc import Callable, Iterable

import torch

from pshard.machine import ReadTiming
from pshard.profile.timed.time_kernels import KernelBench
from pshard.profile.timing_loop import median_seconds
from pshard.quant import packed_nbytes
from pshard.runtime.devices.threads import use_threads
from pshard.runtime.kernels.cpu import native

CLOSE_ENOUGH = 0.03  # fewer threads are taken when they lose at most this much: the others stay free for copies
FEW_CORES = 4  # up to here a core less is too much
WORTH_ALL = 0.1  # that the last of many cores must bring
READ_BYTES = 32 << 20  # read at once: long beside waking the threads, short beside a time slice of the system
COLD_BYTES = 128 << 20  # about a unit, and more than caches hold
ROUNDS = 6
MATVEC = ("Q4_0", 4096, 4096)
UNIT = ("Q4_0", 28672, 4096)  # a matrix of a large model: what calls cost does not show


def thread_counts(cores: int, quick: bool) -> tuple[int, ...]:
    """Thread counts worth trying on so many cores: all of them up to 4, then steps towards the full count, and one
    less than it, which leaves a core to the system."""
    if cores <= FEW_CORES:
        return tuple(range(1, cores + 1))
    shares = (0.5, 1.0) if quick else (0.25, 0.5, 0.75, 1.0)
    return tuple(sorted({1, 2, 4, cores - 1, *(max(1, round(cores * share)) for share in shares)}))


def best_rates(rate: Callable[[], float], counts: Iterable[int]) -> dict[int, float]:
    """Thread count -> rate: the best of some rounds that take turns.

    Other programs can only make a count look worse than it is.
    """
    rates = dict.fromkeys(counts, 0.0)
    for _ in range(ROUNDS):
        for count in rates:
            use_threads(count)
            rates[count] = max(rates[count], rate())
    return rates


def measure_reads(bench: KernelBench, counts: Iterable[int]) -> tuple[ReadTiming, ...]:
    """DRAM read rate by thread count, from pieces of the operand pool that take turns."""
    nbytes = min(READ_BYTES, bench.pool.nbytes)
    whole = bench.pool.nbytes // nbytes * nbytes
    turn = itertools.cycle(bench.pool.memory[:whole].split(nbytes))
    rates = best_rates(lambda: nbytes / median_seconds(lambda i: _read_once(next(turn)), bench.pace), counts)
    return tuple(ReadTiming(count, rate) for count, rate in rates.items())


class MemoryReader:
    """Reads other COLD_BYTES of the operand pool with each call, all of it where it is smaller."""

    def __init__(self, bench: KernelBench) -> None:
        pieces = bench.pool.memory.split(min(COLD_BYTES, bench.pool.nbytes))
        self._turn = itertools.cycle(piece for piece in pieces if piece.nbytes == pieces[0].nbytes)
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """What reading has taken so far, also where the calls were replayed."""
        return native.read_seconds() if native.is_available() else self._seconds

    def __call__(self) -> None:
        start = time.perf_counter()
        _read_once(next(self._turn))
        self._seconds += time.perf_counter() - start


def _read_once(memory: torch.Tensor) -> None:
    if native.is_available():
        native.read_bandwidth(memory, memory.numel())
    else:
        memory.view(torch.float32).sum()


def unit_reader(bench: KernelBench) -> Callable[[], int]:
    """Like `matvec_reader`, with a matrix as large as those of large models where kernels are fast enough for that."""
    return matvec_reader(bench, UNIT if native.is_available() else MATVEC)


def matvec_reader(bench: KernelBench, matrix: tuple[str, int, int] = MATVEC) -> Callable[[], int]:
    """A function that runs one matrix-vector product and returns the bytes of weights that it read.

    matrix: quant type, rows, columns.
    """
    weights = bench.pool.rotate_weights(*matrix)
    _, rows, cols = matrix
    x, out, tile = bench.activations(1, cols), bench.activations(1, rows), torch.empty(0, dtype=torch.uint8)
    turn, nbytes = itertools.cycle(weights), packed_nbytes(*matrix)

    def read() -> int:
        bench.kernels.linear(x, next(turn), out, tile)
        return nbytes

    return read


def matvec_rates(bench: KernelBench, counts: Iterable[int]) -> dict[int, float]:
    """Bytes of weights per second that a matrix-vector product takes in, by thread count."""
    read = matvec_reader(bench)
    return best_rates(lambda: packed_nbytes(*MATVEC) / bench.seconds(lambda i: read(), 1), counts)


def pick_threads(rates: dict[int, float]) -> int:
    """The smallest thread count within 3% of the best rate; all of many cores only where they are 10% faster than all
    but one, as whatever else runs then keeps all threads waiting. `rates`: threads -> any rate, higher is better."""
    best, cores = max(rates.values()), max(rates)
    fewest = min(n for n, rate in rates.items() if rate >= best * (1 - CLOSE_ENOUGH))
    spares = cores > FEW_CORES and rates.get(cores - 1, 0.0) >= best * (1 - WORTH_ALL)
    return cores - 1 if fewest == cores and spares else fewest
