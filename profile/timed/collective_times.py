"""Times all-reduces between ranks as a run would make them: real processes, every way that the group has."""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pshard.batch_sizes import SMALL_BATCH
from pshard.collectives import BY_ROWS, MANY_ROWS, NORMED, PUSHED, wire_type
from pshard.errors import UserError
from pshard.jsonio import from_json, to_json
from pshard.machine import CollectiveTiming

if TYPE_CHECKING:
    import torch

    from pshard.runtime.ranks.group import Group

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
GPU_SIZES = (64 << 20,)  # prompts' parts, beside SIZES
COLUMNS = 4096  # of a row, where a part is as long
SECONDS_PER_SIZE = 0.2
SECONDS_PER_GPU_ROW = 0.03
BURST = 16  # sums per timing, back to back, as the layers of a decode step make them
LEAST_SECONDS = 5e-7  # of a sum: differences of two times may be smaller
MADE_FROM = 512  # columns of the matrix whose products are a part
COPY_BYTES = 32 << 20  # of each of the copies that run beside the sums


def measure_collectives(
    device: str, ranks: Sequence[int], sizes: Sequence[int] = SIZES, shared_memory: bool = True
) -> tuple[CollectiveTiming, ...]:
    """Median seconds of an all-reduce of each size (bytes of float32), for each number of ranks on `device`.

    On "cuda" by every algorithm, rounded to f32 and bf16, alone and while copies run; of the one that takes the norm
    after the sum along, what it adds to that norm, and how much longer it takes with a norm before. Starts the ranks on
    this machine ("cpu": on disjoint cores; "cuda": one GPU each; without `shared_memory` CPU ranks sum by gloo); takes
    about 3 s ("cuda": 15 s) and SECONDS_PER_SIZE for each size per number of ranks. Raises UserError when a group
    cannot be started.
    """
    from pshard.runtime.ranks.start_ranks import start_ranks

    timings: list[CollectiveTiming] = []
    for n in ranks:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "times.json"
            code = start_ranks(
                n,
                "pshard.profile.timed.collective_times",
                [device, str(n), str(out), str(int(shared_memory)), *map(str, sizes)],
            )
            if code != 0 or not out.exists():
                what = f"all-reduces of {n} ranks on {device} could not be timed"
                raise UserError(f"{what} (exit code {code}); mend what their lines above say")
            timings += [from_json(CollectiveTiming, row) for row in json.loads(out.read_text())]
    return tuple(timings)


def main() -> int:
    """What each rank runs: DEVICE RANKS FILE SHARED_MEMORY SIZE...; rank 0 writes the file."""
    from pshard.runtime.ranks.group import init_group

    device, ranks, out, sizes = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), [int(s) for s in sys.argv[5:]]
    group = init_group(ranks, device, shared_memory=sys.argv[4] == "1")
    timings = time_sums(group, device, sizes)
    if group.rank == 0:
        out.write_text(json.dumps(to_json(timings)))
    group.close()
    return 0


def time_sums(group: "Group", device: str, sizes: Sequence[int]) -> tuple[CollectiveTiming, ...]:
    """What `measure_collectives` says of the ranks of a group, wherever they run; all of them call it."""
    if device == "cuda":
        return tuple(_time_on_gpu(group, tuple(dict.fromkeys((*sizes, *GPU_SIZES)))))
    return tuple(CollectiveTiming(group.backend, group.size, n, _time_on_cpu(group, n)) for n in sizes)


def _time_on_cpu(group: "Group", nbytes: int) -> float:
    """Median seconds of one sum in bursts; every rank makes the same number of bursts, as rank 0 says."""
    import torch

    tensor = torch.zeros(nbytes // 4)

    def burst() -> float:
        group.barrier()
        start = time.perf_counter()
        for _ in range(BURST):
            group.all_reduce(tensor)
        return (time.perf_counter() - start) / BURST

    slowest = max(burst(), burst())
    repeats = group.broadcast(int(min(200, max(5, SECONDS_PER_SIZE / (BURST * slowest)))))
    return statistics.median(burst() for _ in range(repeats))


def _time_on_gpu(group: "Group", sizes: Sequence[int]) -> Iterator[CollectiveTiming]:
    """Every algorithm in CUDA graphs, which is how a decode step makes its sums."""
    import torch

    host = torch.zeros(COPY_BYTES, dtype=torch.uint8).pin_memory()
    there, lane = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda"), torch.cuda.Stream()

    def copy_for(seconds: float) -> None:
        with torch.cuda.stream(lane):
            for _ in range(2 + int(seconds * 60e9 / COPY_BYTES)):  # no link is faster: they outlast the sums
                there.copy_(host, non_blocking=True)

    def time_of(timer: _GpuTimer, beside: Sequence[_GpuTimer], copies: bool = False) -> float:
        first, *others = (one.median(copy_for if copies else None) for one in (timer, *beside))
        return first - sum(others)

    # bytes, timers, what each visit found
    pushed: list[tuple[int, tuple[_GpuTimer, tuple[_GpuTimer, ...]], list[float]]] = []
    for nbytes in sizes:
        columns = min(COLUMNS, nbytes // 4)
        tensor = torch.zeros(nbytes // 4 // columns, columns, device="cuda")
        for dtype in ("f32", "bf16"):
            group.reduce_dtype = dtype
            for algorithm in group.algorithms(*tensor.shape):
                along = algorithm in (BY_ROWS, MANY_ROWS)
                works = _sum_with_norm(group, tensor) if along else _Works(partial(group.all_reduce, tensor, algorithm))
                whole, beside = _GpuTimer(group, works.whole), tuple(_GpuTimer(group, work) for work in works.beside)
                for copies in (False, True):
                    seconds = max(time_of(whole, beside, copies), LEAST_SECONDS)
                    yield CollectiveTiming(algorithm, group.size, nbytes, seconds, dtype, copies)
                if works.normed and dtype == wire_type("auto", tensor.shape[0], on_gpu=True):
                    seconds = max(time_of(_GpuTimer(group, works.normed), (whole,)), LEAST_SECONDS)
                    yield CollectiveTiming(NORMED, group.size, nbytes, seconds, dtype)
                if works.pushed:
                    pushed.append((nbytes, (_GpuTimer(group, works.pushed), beside), []))
        for _, (early, beside), found in pushed:
            found.append(time_of(early, beside))
    for nbytes, _, found in pushed:
        yield CollectiveTiming(PUSHED, group.size, nbytes, max(statistics.mean(found), LEAST_SECONDS))


class _Works(NamedTuple):
    """What is timed of a way: `whole`, less what is `beside` the sum in it; the same with a norm of the sum before it
    is added; and with a part that is pushed."""

    whole: Callable[[], None]
    beside: tuple[Callable[[], None], ...] = ()
    normed: Callable[[], None] | None = None
    pushed: Callable[[], None] | None = None


def _sum_with_norm(group: "Group", part: "torch.Tensor") -> _Works:
    """A product, the sum of its parts by rows and the norm of the sum; the same without the sum, as others need the
    norm too; with a norm of the sum before it is added; and for one row of float32, as in decoding, with a part that
    leaves for the peers from its product (each batch and type would be one more kernel to compile). Of many rows
    without the product, whose time does not hang on what follows.

    Leaving so takes 1 us less on some machines, and on others for seconds at a time 8 us more: it is to be timed again
    and again, and its mean counts.
    """
    import torch

    from pshard.quant import packed_nbytes
    from pshard.runtime.kernels.api import Packed, PendingSum
    from pshard.runtime.kernels.gpu.cuda import CudaKernels
    from pshard.runtime.ranks.sum_norm import NO_SUM_NORM, SumNorm

    exchange, rows = group.row_exchange(*part.shape), part.shape[0]
    assert exchange is not None  # without timings it is the first choice
    kernels, hidden, wire = CudaKernels(part.device, part.shape[0]), torch.zeros_like(part), group.reduce_dtype
    weight, out = torch.ones(part.shape[1], device=part.device), torch.empty_like(part, dtype=CudaKernels.act_dtype)
    own = SumNorm(weight, torch.ones(1, device=part.device))
    if rows > SMALL_BATCH:
        sums = PendingSum(exchange, part.to(group.part_dtype(*part.shape)), wire)
        return _Works(
            lambda: kernels.sum_rms_norm(sums, hidden, weight, 1e-6, out),
            (lambda: kernels.rms_norm(hidden, weight, 1e-6, out),),
            lambda: kernels.sum_rms_norm(replace(sums, norm=own), hidden, weight, 1e-6, out),
        )
    data = torch.zeros(packed_nbytes("Q4_0", part.shape[1], MADE_FROM), dtype=torch.uint8, device=part.device)
    matrix, x = Packed(data, "Q4_0", part.shape[1], MADE_FROM), out.new_zeros(part.shape[0], MADE_FROM)
    sums = PendingSum(exchange, part, wire)

    def sum_up(norm: SumNorm = NO_SUM_NORM) -> None:
        kernels.sum_rms_norm(replace(sums, norm=norm), hidden, weight, 1e-6, out)

    def with_sum(norm: SumNorm = NO_SUM_NORM) -> None:
        kernels.linear(x, matrix, part, data)
        sum_up(norm)

    def without() -> None:
        kernels.linear(x, matrix, part, data)
        kernels.rms_norm(hidden, weight, 1e-6, out)

    def pushed() -> None:
        kernels.linear_part(exchange, wire, x, matrix, part, data)
        sum_up()

    early = pushed if wire == "f32" and rows == 1 else None
    return _Works(with_sum, (without,), partial(with_sum, own), early)


class _GpuTimer:
    """A graph of BURST sums, timed by the device from the end of one more sum, for which the ranks have met."""

    def __init__(self, group: "Group", work: Callable[[], None]) -> None:
        import torch

        self._group, self._work = group, work
        self._stream, self._graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            work()
            self._stream.synchronize()
            with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
                for _ in range(BURST):
                    work()

    def median(self, beside: Callable[[float], None] | None) -> float:
        """Median seconds of one sum; `beside` starts work for at least so many seconds before each burst."""
        first = max(self._burst(beside, 1e-3), self._burst(beside, 1e-3))
        repeats = self._group.broadcast(int(min(50, max(5, SECONDS_PER_GPU_ROW / (BURST * first)))))
        return statistics.median(self._burst(beside, BURST * first) for _ in range(repeats))

    def _burst(self, beside: Callable[[float], None] | None, seconds: float) -> float:
        import torch

        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        self._group.barrier()
        if beside:
            beside(seconds + 1e-3)
        with torch.cuda.stream(self._stream):
            self._work()
            events[0].record()
            self._graph.replay()
            events[1].record()
        self._stream.synchronize()
        self._group.check()
        return events[0].elapsed_time(events[1]) / 1e3 / BURST


if __name__ == "__main__":
    sys.exit(main())
