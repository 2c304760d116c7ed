"""What a micro-batch does on its lanes, measured beside what the planner simulates.

    python benchmarks/timeline.py -m MODEL --registry R --profile P --vram 6000 -c 4352 --tokens 512 -o timeline.json

Runs a full micro-batch of the tier several times on a GPU. Copies to the device and launches stand between timed events
of their streams, work on the CPU and waits between readings of the host's clock; both begin at one moment. A launch
that waits for a copy is timed with its wait. Timing adds some microseconds a step. Prints busy time by lane of the
median run and of the simulation, how long the link stood still, and the median time of each kind of unit on the CPU;
the file holds every event of both.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cpu_kernels import write_json

from pshard.batch_sizes import SMALL_BATCH
from pshard.commands.command_line import new_parser, run_cli
from pshard.errors import UserError
from pshard.planner.explain import simulate_timelines
from pshard.runtime.devices.device import CudaDevice
from pshard.runtime.walks import walk as walks
from pshard.runtime.walks.unit_runs import UnitRuns
from pshard.session.open_plan import open_plan
from pshard.session.run_request import RunRequest
from pshard.session.start_engine import start_engine

Row = tuple[str, str, float, float]  # lane, label, start and end in seconds


class Clock:
    """Events of streams and readings of the host's clock, on one axis. `rows` since `begin`."""

    def __init__(self) -> None:
        self.on = False
        self._host: list[Row] = []
        self._streams: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        """Forget what was seen; both axes begin here."""
        self._host, self._streams, self.on = [], [], True
        torch.cuda.synchronize()
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record()
        self._origin.synchronize()
        self._began = time.perf_counter()

    def on_host(self, lane: str, label: str, work: Callable[[], Any]) -> Any:
        """Do work of the host's thread."""
        start = time.perf_counter()
        done = work()
        self._host.append((lane, label, start - self._began, time.perf_counter() - self._began))
        return done

    def on_stream(self, lane: str, label: str, stream: Any, work: Callable[[], Any]) -> Any:
        """Give a stream work."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        done = work()
        end.record(stream)
        self._streams.append((lane, label, start, end))
        return done

    def rows(self) -> list[Row]:
        """What was seen, by the time of its start."""
        torch.cuda.synchronize()
        since = self._origin.elapsed_time
        timed = [(lane, label, since(a) / 1e3, since(b) / 1e3) for lane, label, a, b in self._streams]
        return sorted(self._host + timed, key=lambda row: row[2])


def watch(clock: Clock) -> None:
    """Have the runtime's copies, launches, waits and units on the CPU timed by the clock."""
    copy, launch, run, wait = CudaDevice._copy, walks.Walk._launch, UnitRuns.run, walks.Walk._wait_for_rows

    def timed_copy(self: Any, stream: int, dst: torch.Tensor, src: torch.Tensor, after: Any) -> Any:
        if not clock.on or stream != self._in.cuda_stream:
            return copy(self, stream, dst, src, after)
        for event in after:  # before the timed part, which is the copy alone
            event.hold(stream)
        return clock.on_stream("link", f"{src.nbytes >> 10} KiB", self._in, partial(copy, self, stream, dst, src, ()))

    def timed_launch(self: Any, stretch: Any) -> None:
        if not clock.on:
            return launch(self, stretch)
        work = partial(launch, self, stretch)
        return clock.on_stream("acc", stretch.name, self._device.compute, work)

    def timed_run(self: Any, step: Any, *rest: Any) -> None:
        if not clock.on or step.on != "cpu":
            return run(self, step, *rest)
        return clock.on_host("cpu", f"{step.unit} {step.part}".strip(), partial(run, self, step, *rest))

    def timed_wait(self: Any, names: Any) -> None:
        return clock.on_host("wait", "", partial(wait, self, names)) if clock.on else wait(self, names)

    CudaDevice._copy, walks.Walk._launch = timed_copy, timed_launch  # type: ignore[method-assign]
    UnitRuns.run, walks.Walk._wait_for_rows = timed_run, timed_wait  # type: ignore[method-assign]
    walks.ACTS[walks.Stretch] = timed_launch


def main(argv: list[str]) -> int:
    """Measure and print; with -o also write JSON."""
    parser = new_parser("timeline.py", str(__doc__).splitlines()[0])
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--registry", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--vram", type=int, required=True, help="MiB")
    parser.add_argument("-c", "--ctx-size", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=512, help="of the micro-batch, and so the tier")
    parser.add_argument("-r", "--repetitions", type=int, default=7)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args(argv)
    if args.tokens <= SMALL_BATCH:
        raise UserError(f"--tokens {args.tokens}: up to {SMALL_BATCH} tokens run as a few graphs; give more")
    request = RunRequest(args.model, (args.vram,), args.ctx_size, registry=args.registry, profile=args.profile)
    opened = open_plan(request)
    clock, runs = Clock(), []
    watch(clock)
    with start_engine(opened, opened.variant, checkpoints=False) as engine:
        for n in range(args.repetitions + 2):
            engine.reset()
            ids = [(17 * i + 7 * n) % engine.vocab for i in range(args.tokens)]
            clock.begin()
            start = time.perf_counter()
            engine.forward(ids)
            took = time.perf_counter() - start
            runs.append((took, clock.rows()))
    took, measured = sorted(runs[2:])[args.repetitions // 2]
    lines = simulate_timelines(opened.file.spec, opened.profile, opened.variant)
    tiers = [t.tokens for t in opened.variant.ranks[0].tiers]
    events = lines[min(i for i, n in enumerate(tiers) if n >= args.tokens)].events
    simulated = [(e.lane, e.label, e.start, e.end) for e in events]
    found = compare(measured, simulated)
    found["seconds"] = {"measured": took, "simulated": max(r[3] for r in simulated), "all": [r[0] for r in runs]}
    print(json.dumps(found, indent=1))
    if args.output:
        write_json(args.output, "timeline", [{**found, "measured": measured, "simulated": simulated}], argv)
    return 0


def compare(measured: list[Row], simulated: list[Row]) -> dict[str, Any]:
    """Busy seconds by lane of both; seconds in which the link stood still; the CPU's units by the median of both."""
    busy: dict[str, Any] = {"measured": total(measured), "simulated": total(simulated)}
    link = [r for r in measured if r[0] == "link"]
    gaps = [b[2] - a[3] for a, b in pairwise(link)]
    kinds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, rows in (("measured", measured), ("simulated", simulated)):
        for lane, label, start, end in rows:
            if lane == "cpu":
                kinds["".join(c for c in label if not c.isdigit())][name].append(end - start)
    units = {k: {n: round(median(v) * 1e6, 1) for n, v in both.items()} for k, both in kinds.items()}
    return {"busy": busy, "link_stood_still": sum(g for g in gaps if g > 2e-5), "cpu_us": units}


def total(rows: list[Row]) -> dict[str, float]:
    """Seconds by lane."""
    sums: dict[str, float] = defaultdict(float)
    for lane, _, start, end in rows:
        sums[lane] += end - start
    return dict(sums)


if __name__ == "__main__":
    sys.exit(run_cli(main))
