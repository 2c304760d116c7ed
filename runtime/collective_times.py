"""Times all-reduces between ranks as a run would make them: real processes, the backend that the group chooses."""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.errors import UserError
from pshard.machine import CollectiveTiming

if TYPE_CHECKING:
    from pshard.runtime.parallel import Group

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
SECONDS_PER_SIZE = 0.2
BURST = 16  # sums per timing, back to back, as the layers of a decode step make them


def measure_collectives(
    device: str, ranks: Sequence[int], sizes: Sequence[int] = SIZES
) -> tuple[CollectiveTiming, ...]:
    """Median seconds of an all-reduce of each size (bytes of float32), for each number of ranks on `device`.

    Starts the ranks on this machine ("cpu": on disjoint cores; "cuda": one GPU each); takes about 3 s and
    SECONDS_PER_SIZE for each size per number of ranks. Raises UserError when a group cannot be started.
    """
    from pshard.runtime.launch import launch

    timings: list[CollectiveTiming] = []
    for n in ranks:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "times.json"
            code = launch(n, "pshard.runtime.collective_times", [device, str(n), str(out), *map(str, sizes)])
            if code != 0 or not out.exists():
                raise UserError(f"all-reduces of {n} ranks on {device} could not be timed (exit code {code})")
            found = json.loads(out.read_text())
        timings += [CollectiveTiming(found["backend"], n, nbytes, s) for nbytes, s in found["times"]]
    return tuple(timings)


def main() -> int:
    """What each rank runs: DEVICE RANKS FILE SIZE...; rank 0 writes the file."""
    from pshard.runtime.parallel import init_group

    device, ranks, out, sizes = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), [int(s) for s in sys.argv[4:]]
    group = init_group(ranks, device)
    times = [(nbytes, _time_sum(group, device, nbytes)) for nbytes in sizes]
    if group.rank == 0:
        out.write_text(json.dumps({"backend": group.backend, "times": times}))
    group.close()
    return 0


def _time_sum(group: "Group", device: str, nbytes: int) -> float:
    """Median seconds of one sum in bursts; every rank makes the same number of bursts, as rank 0 says."""
    import torch

    tensor = torch.zeros(nbytes // 4, device=device)

    def sums() -> None:
        for _ in range(BURST):
            group.all_reduce(tensor)

    run = _captured(sums) if device == "cuda" else sums

    def burst() -> float:
        group.barrier()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / BURST

    slowest = max(burst(), burst())
    repeats = group.broadcast(int(min(200, max(5, SECONDS_PER_SIZE / (BURST * slowest)))))
    return statistics.median(burst() for _ in range(repeats))


def _captured(work: Callable[[], None]) -> Callable[[], None]:
    """The same work as a CUDA graph, which is how a decode step makes its sums."""
    import torch

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
    return graph.replay
