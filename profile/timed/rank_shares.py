"""What ranks have of one host, alone and all at once: real processes, each on its own cores and over its own link."""

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pshard.errors import UserError
from pshard.jsonio import from_json, to_json
from pshard.machine import ShareTiming
from pshard.profile.identify import count_cores
from pshard.profile.timed.operands import LEAST_ROTATION, OperandPool
from pshard.profile.timed.time_kernels import KernelBench
from pshard.profile.timed.time_links import copy_in_turn, link_from
from pshard.profile.timing_loop import Pace
from pshard.runtime.build_executor import choose_kernels
from pshard.runtime.devices.device import open_device
from pshard.runtime.devices.threads import rank_threads, use_threads

if TYPE_CHECKING:
    from pshard.runtime.ranks.group import Group

MATRIX = ("Q4_0", 14336, 4096)  # of a size whose call costs nothing beside reading it: a small one hides the DRAM
TOKENS = (1, 16, 512)  # bound by memory, by both, by arithmetic
COPY_BYTES = 32 << 20
LEAST_CALLS = 3


@dataclass(frozen=True)
class Task:
    """What the ranks are to time. `threads`: that serve the whole host best; `rotation`: bytes of operands of all ranks
    together; seconds: for each timing."""

    kind: str
    ranks: int
    threads: int
    rotation: int
    seconds: float


def measure_shares(host: KernelBench, kind: str, ranks: Sequence[int], seconds: float) -> tuple[ShareTiming, ...]:
    """Matmuls and copies of each number of ranks; matmuls beside those with all threads of `host`.

    Starts the ranks on this machine: on disjoint cores, with "cuda" one GPU each. Takes about 5 s and a dozen times
    `seconds` (alone: once for every rank) per number of ranks. Their operands take the place of the host's, which are
    released: a virtual machine's host may take seconds to find as much memory again. Raises UserError when a group
    cannot be started.
    """
    from pshard.runtime.ranks.start_ranks import start_ranks

    found: list[ShareTiming] = []
    whole = {t: _median_call(_matmul_calls(host, t), seconds) for t in TOKENS if ranks}
    host.pool.release()
    for n in ranks:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "shares.json"
            task = Task(kind, n, torch.get_num_threads(), host.pool.nbytes, seconds)
            code = start_ranks(n, "pshard.profile.timed.rank_shares", [json.dumps(asdict(task)), str(out)])
            if code != 0 or not out.exists():
                what = f"what {n} ranks have of this host could not be timed"
                raise UserError(f"{what} (exit code {code}); mend what their lines above say")
            rows = [from_json(ShareTiming, row) for row in json.loads(out.read_text())]
        found += [replace(r, whole=whole[r.size]) if r.what == "matmul" else r for r in rows]
    return tuple(found)


def main() -> int:
    """What each rank runs: TASK FILE; rank 0 writes the file."""
    from pshard.runtime.ranks.group import init_group

    task, out = Task(**json.loads(sys.argv[1])), Path(sys.argv[2])
    group = init_group(task.ranks, task.kind, task.threads)
    device = open_device(task.kind, group.local_rank)
    _, on_host, _ = choose_kernels(device, "fast", max(TOKENS))
    cpu = torch.device("cpu")
    pool = OperandPool(max(task.rotation // task.ranks, 2 * COPY_BYTES), cpu)
    bench = KernelBench("host", on_host, cpu, pool, Pace(task.seconds), 1.0)
    link = link_from(device, pool.memory[:LEAST_ROTATION], COPY_BYTES)
    try:
        calls = [("matmul", tokens, _matmul_calls(bench, tokens)) for tokens in TOKENS]
        calls.append(("copy", COPY_BYTES, copy_in_turn(link, "h2d", COPY_BYTES)))
        together = [_time_together(group, call, task.seconds) for _, _, call in calls]
        use_threads(rank_threads(task.threads, task.ranks, count_cores(), in_turns=True))
        alone = [_time_in_turn(group, call, task.seconds) for _, _, call in calls]
        rows = [_make_share(group, *call[:2], t, a) for call, t, a in zip(calls, together, alone, strict=True)]
    finally:
        link.close()
    if group.rank == 0:
        out.write_text(json.dumps(to_json(rows)))
    group.close()
    device.close()
    return 0


def _time_together(group: "Group", call: Callable[[], object], seconds: float) -> float:
    """Seconds of a call on this rank when all ranks make such calls."""
    call()
    group.barrier()
    return _median_call(call, seconds)


def _time_in_turn(group: "Group", call: Callable[[], object], seconds: float) -> float:
    """Seconds of a call on this rank while the others wait."""
    alone = 0.0
    for rank in range(group.size):
        group.barrier()
        alone = _median_call(call, seconds) if rank == group.rank else alone
    group.barrier()
    return alone


def _make_share(group: "Group", what: str, size: int, together: float, alone: float) -> ShareTiming:
    """Times of the slowest rank, of copies of that which loses most by the others, as links may differ."""
    said = group.gather((together, alone))
    together, alone = max(said, key=lambda rank: rank[0] / rank[1] if what == "copy" else rank[0])
    return ShareTiming(group.size, what, size, alone, alone, together)


def _median_call(call: Callable[[], object], seconds: float) -> float:
    """Median seconds of a call, repeated for so long: ranks that begin together end together. One that is longer than
    that is timed once, after its warm-up."""
    begun = time.perf_counter()
    call()
    least = LEAST_CALLS if time.perf_counter() - begun < seconds else 1
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end or len(samples) < least:
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _matmul_calls(bench: KernelBench, tokens: int) -> Callable[[], None]:
    """Multiplies so many tokens with another copy of the matrix in every call."""
    multiply, turn = bench.linear_calls(bench.pool.rotate_weights(*MATRIX), tokens), itertools.count()
    return lambda: multiply(next(turn))


if __name__ == "__main__":
    sys.exit(main())
