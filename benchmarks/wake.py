"""What a gap before a call of the CPU kernels costs: the pool's threads sleep by then, and must be woken.

    python benchmarks/wake.py                         # the library of this checkout
    python benchmarks/wake.py OTHER/_native.so ...    # others beside it

The thread that waits for a GPU spins, and calls the CPU kernels for its rows of an FFN after that. Here it spins for
each gap and makes that call, of one token and weights that no cache holds. "expected": the library was told 60 us after
the call before, or in the middle of a shorter gap, that work comes. "asleep": threads of the pool that slept when the
call began. Libraries take turns, each in a process of its own.
"""

import ctypes
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pshard.commands.command_line import new_parser, parse_ints, run_cli
from pshard.runtime.kernels.cpu import native

GAPS = (0, 50, 200, 500, 1000)
COLS = 5120  # of the weights, Q4_0
ROTATION = 512 << 20  # bytes of weights between two reads of the same ones
TOLD_AFTER = 60  # us: what the host's thread does between a unit on the CPU and its wait for the GPU
FFN_ARGUMENTS = "plpipipillplli"  # as native.py has them, which may be of another interface than the library
LETTERS = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int}


class Case(NamedTuple):
    """A gap in us, and whether the library was told that work comes."""

    gap: int
    expected: bool


class Call(NamedTuple):
    """Its seconds, and the pool's threads that slept when it began; None of a library that does not say."""

    seconds: float
    asleep: int | None


class Load(NamedTuple):
    """What is called: threads, MiB of weights that a call reads, and how often a turn calls after each gap."""

    threads: int
    mib: float
    gaps: tuple[int, ...]
    calls: int


def main(argv: list[str]) -> int:
    """Measure and print; with -o also write JSON."""
    cores = len(os.sched_getaffinity(0))
    parser = new_parser("wake.py", str(__doc__).splitlines()[0])
    parser.add_argument("libraries", nargs="*", type=Path, help="built libraries of other checkouts")
    parser.add_argument("-t", "--threads", type=parse_ints, default=(cores,), help="numbers of threads, as 2,16")
    parser.add_argument("--mib", type=float, default=40, help="of weights that one call reads")
    parser.add_argument("--gaps", type=parse_ints, default=GAPS, help="microseconds, as 0,200")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=60, help="after each gap in a round")
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    libraries = [native.library_path(), *args.libraries]
    results = []
    for threads in args.threads:
        results += measure(libraries, Load(threads, args.mib, args.gaps, args.calls), args.rounds)
    for number, path in enumerate(libraries):
        print(f"library {number}: {path}")
    print("| library | threads | gap us | expected | call us | best and worst tenth | over the first | asleep |")
    print("|---|---|---|---|---|---|---|---|")
    for r in results:
        asleep = "" if r["asleep"] is None else f"{r['asleep']:.1f}"
        print(
            f"| {r['library']} | {r['threads']} | {r['gap']} | {'yes' if r['expected'] else ''} "
            f"| {r['seconds'] * 1e6:.0f} | {r['best'] * 1e6:.0f} to {r['worst'] * 1e6:.0f} "
            f"| {r['over_first'] * 1e6:+.0f} | {asleep} |"
        )
    if args.output:
        from cpu_kernels import write_json  # imports torch, which the processes can do without

        write_json(args.output, "wake", results, argv)
    return 0


def measure(libraries: list[Path], load: Load, rounds: int) -> list[dict]:
    """A row for each library and case; medians of all rounds."""
    samples: list[dict[Case, list[Call]]] = [{} for _ in libraries]
    with serve_each(libraries, load) as pipes:
        for _ in range(rounds):
            for pipe, found in zip(pipes, samples, strict=True):
                pipe.send(True)
                for case, calls in pipe.recv().items():
                    found.setdefault(case, []).extend(calls)
    rows = []
    for number, (path, found) in enumerate(zip(libraries, samples, strict=True)):
        first = statistics.median(call.seconds for call in found[Case(load.gaps[0], False)])
        for case, calls in found.items():
            seconds = sorted(call.seconds for call in calls)
            row = {
                "library": number,
                "path": str(path),
                "threads": load.threads,
                **case._asdict(),
                "seconds": statistics.median(seconds),
                "best": seconds[len(seconds) // 10],
                "worst": seconds[len(seconds) * 9 // 10],
                "over_first": statistics.median(seconds) - first,
                "asleep": mean_asleep(calls),
            }
            rows.append(row)
    return rows


def mean_asleep(calls: list[Call]) -> float | None:
    """None where the library does not say."""
    counts = [call.asleep for call in calls if call.asleep is not None]
    return statistics.mean(counts) if counts else None


@contextmanager
def serve_each(libraries: list[Path], load: Load) -> Iterator[list[Connection]]:
    """A process for each library; what asks it for a turn."""
    context, pipes = multiprocessing.get_context("spawn"), []
    for path in libraries:
        here, there = context.Pipe()
        context.Process(target=serve, args=(there, path, load), daemon=True).start()
        there.close()
        here.recv()  # it is ready: one that starts would disturb the others
        pipes.append(here)
    yield pipes
    for pipe in pipes:
        pipe.send(False)


def serve(pipe: Connection, path: Path, load: Load) -> None:
    """Calls of a library in all cases, as often as the pipe asks for them."""
    library = ctypes.CDLL(str(path))
    says = b"pshard_sleeping" in path.read_bytes()
    cpus = sorted(os.sched_getaffinity(0))[: load.threads]
    library.pshard_set_threads(load.threads, (ctypes.c_int * len(cpus))(*cpus), len(cpus))
    calls = make_calls(library, load.mib, says)
    next(calls)
    pipe.send(None)
    while pipe.recv():
        found: dict[Case, list[Call]] = {}
        for case in [Case(gap, told) for gap in load.gaps for told in (False, True) if not told or (gap and says)]:
            found[case] = []
            for _ in range(load.calls):
                now = time.perf_counter()
                if case.expected:
                    spin_until(now + min(TOLD_AFTER, case.gap / 2) / 1e6)
                    library.pshard_expect()
                spin_until(now + case.gap / 1e6)
                found[case].append(next(calls))
        pipe.send(found)


def make_calls(library: ctypes.CDLL, mib: float, says: bool) -> Iterator[Call]:
    """Products of one token with the gate and up rows of an FFN, one pair of matrices after the other."""
    q4_0 = library.pshard_type(b"Q4_0")
    record = library.pshard_record_nbytes(q4_0, ctypes.c_int64(COLS))
    records = max(1, round(mib * (1 << 20) / 2 / record))
    memory = np.full((max(4, ROTATION // (records * record)), records * record), 0x2C, np.uint8)  # scales of 0.065
    x, out = np.ones(COLS, np.float32), np.empty(16 * records, np.float32)
    library.pshard_ffn.argtypes = [LETTERS[letter] for letter in FFN_ARGUMENTS]
    at = 0
    while True:
        gate, up = (memory[(at + i) % len(memory)].ctypes.data for i in (0, 1))
        at += 2
        asleep = library.pshard_sleeping() if says else None
        start = time.perf_counter()
        library.pshard_ffn(
            x.ctypes.data, COLS, gate, q4_0, up, q4_0, None, -1, COLS, out.size, out.ctypes.data, out.size, 1, 0
        )
        yield Call(time.perf_counter() - start, asleep)


def spin_until(end: float) -> None:
    """As the driver does while it waits for the GPU."""
    while time.perf_counter() < end:
        pass


if __name__ == "__main__":
    sys.exit(run_cli(main))
