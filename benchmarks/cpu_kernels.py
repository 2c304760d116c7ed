"""CPU kernels against the DRAM read rate that the same threads reach in the same minute.

Every call reads a matrix that no cache holds (operands are rotated over 1 GiB). A pass over the same memory that only
sums it is timed between the calls: that is the ceiling. "vs torch" is dequantise to bf16 plus torch's bf16 linear with
the same threads, divided by ours. Many tokens run on AMX where the runtime does that.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

import pshard
from pshard.commands.command_line import new_parser, parse_ints, run_cli
from pshard.errors import UserError
from pshard.profile.timed.operands import random_record
from pshard.quant import QUANT_TYPES, ROW_BLOCK, packed_nbytes
from pshard.runtime.devices.threads import use_threads
from pshard.runtime.kernels.api import Packed
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host import suits_tiles

ROTATION = 1 << 30  # bytes of operands between two reads of the same matrix
PATTERN_ROWS = 320  # distinct rows of a matrix; more would only take longer to make


def main(argv: list[str]) -> int:
    """Run the benchmark; prints a table and, with -o, writes JSON."""
    parser = new_parser("cpu_kernels.py", str(__doc__).splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write")
    parser.add_argument(
        "-q", "--types", type=lambda t: t.upper().split(","), default=list(QUANT_TYPES), help="quant types"
    )
    parser.add_argument("-M", "--tokens", type=parse_ints, default=(1, 4, 16), help="tokens per call, as 1,4,16")
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=int, default=25600)
    parser.add_argument("--cols", type=int, default=5120)
    parser.add_argument("--seconds", type=float, default=0.6, help="time spent on each type and token count")
    parser.add_argument("--isa", help="force avx512_vnni, avx2 or portable")
    parser.add_argument("--torch", action=argparse.BooleanOptionalAction, default=True, help="also time torch")
    args = parser.parse_args(argv)
    if unknown := set(args.types) - set(QUANT_TYPES):
        raise UserError(f"unknown quant types {', '.join(sorted(unknown))}; known: {', '.join(QUANT_TYPES)}")
    use_native_threads(args.threads)
    if args.isa:
        native.set_isa(args.isa)
    print("| type | M | ms | GB/s | ceiling GB/s | of ceiling | best of ceiling | vs torch |")
    print("|---|---|---|---|---|---|---|---|")
    results = [r for qtype in args.types for r in time_type(qtype, args)]
    if args.output:
        write_json(args.output, "cpu_kernels", results, argv)
    return 0


def time_type(qtype: str, args: argparse.Namespace) -> list[dict]:
    """One row of results for each token count."""
    rows, cols = args.rows, args.cols
    nbytes = packed_nbytes(qtype, rows, cols)
    copies = -(-ROTATION // nbytes)
    operands = make_operands(qtype, rows, cols, copies)
    results = []
    for tokens in args.tokens:
        x = torch.randn(tokens, cols, generator=torch.Generator().manual_seed(0))
        out = torch.empty(tokens, rows)

        def ours(i: int, tokens: int = tokens, x: torch.Tensor = x, out: torch.Tensor = out) -> None:
            multiply = native.linear_tiled if suits_tiles(tokens, qtype) else native.linear
            multiply(x, operands[i % copies], out, tokens)

        def ceiling(i: int) -> None:
            native.read_bandwidth(operands[(i + copies // 2) % copies].data, nbytes)

        seconds, read_seconds = time_in_turn(ours, ceiling, args.seconds)
        result = {
            "type": qtype,
            "tokens": tokens,
            "rows": rows,
            "cols": cols,
            "weight_bytes": nbytes,
            **compare_with_ceiling(nbytes, seconds, read_seconds),
            "torch_seconds": time_torch(operands[0], x) if args.torch else None,
        }
        results.append(result)
        print_row(result)
    return results


def make_operands(qtype: str, rows: int, cols: int, copies: int) -> list[Packed]:
    """Matrices of random weights in memory that was touched once, one after the other."""
    some = min(PATTERN_ROWS, rows) // ROW_BLOCK
    part = np.concatenate([random_record(qtype, cols, i) for i in range(some)])
    nbytes = packed_nbytes(qtype, rows, cols)
    memory = np.empty(copies * nbytes, np.uint8)
    for at in range(0, memory.size, part.size):
        native.memcpy(memory[at:], part, min(part.size, memory.size - at))
    parts = torch.from_numpy(memory).split(nbytes)
    return [Packed(part, qtype, rows, cols) for part in parts]


def time_in_turn(
    first: Callable[[int], None], second: Callable[[int], None], seconds: float
) -> tuple[list[float], list[float]]:
    """Seconds of each call of the two, called in turn with a counter, after one warm-up of both."""
    first(-1)
    second(-1)
    samples: tuple[list[float], list[float]] = ([], [])
    start = time.perf_counter()
    i = 0
    while i < 5 or time.perf_counter() - start < seconds:
        for call, times in zip((first, second), samples, strict=True):
            begin = time.perf_counter()
            call(i)
            times.append(time.perf_counter() - begin)
        i += 1
    return samples


def time_torch(weight: Packed, x: torch.Tensor) -> float:
    """Median seconds of dequantising to bf16 (nothing to do for BF16) and torch's bf16 linear."""
    half = torch.empty(weight.rows, weight.cols, dtype=torch.bfloat16)
    native.dequantize(weight, 0, weight.rows, half, "bf16")
    tokens = x.to(torch.bfloat16)
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        if weight.qtype != "BF16":
            native.dequantize(weight, 0, weight.rows, half, "bf16")
        torch.nn.functional.linear(tokens, half)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def print_row(r: dict) -> None:
    """One line of the table."""
    vs_torch = f"{r['torch_seconds'] / r['seconds']:.1f}x" if r["torch_seconds"] else "-"
    print(f"| {r['type']} | {r['tokens']} | {format_rates(r)} | {vs_torch} |", flush=True)


def compare_with_ceiling(nbytes: int, seconds: list[float], read_seconds: list[float]) -> dict:
    """Fields of a result: calls that read `nbytes` each beside passes that only read as much."""
    return {
        "seconds": statistics.median(seconds),
        "gb_per_s": nbytes / statistics.median(seconds) / 1e9,
        "best_gb_per_s": nbytes / min(seconds) / 1e9,
        "ceiling_gb_per_s": nbytes / statistics.median(read_seconds) / 1e9,
        "of_ceiling": statistics.median(read_seconds) / statistics.median(seconds),
        "best_of_ceiling": min(read_seconds) / min(seconds),
        "samples_ns": [round(t * 1e9) for t in seconds],
        "ceiling_samples_ns": [round(t * 1e9) for t in read_seconds],
    }


def format_rates(r: dict) -> str:
    """Columns of the table that `compare_with_ceiling` has the figures of."""
    rates = f"{r['gb_per_s']:.1f} | {r['ceiling_gb_per_s']:.1f} | {r['of_ceiling']:.0%} | {r['best_of_ceiling']:.0%}"
    return f"{r['seconds'] * 1e3:.2f} | {rates}"


def use_native_threads(count: int) -> None:
    """Threads as the runtime has them. Raises UserError when there is no C++ library."""
    if not native.is_available():
        raise UserError(f"no CPU kernels to time: {native.why_missing()}; reinstall pshard with a C++ compiler")
    use_threads(count)


def write_json(path: Path, benchmark: str, results: list[dict], argv: list[str]) -> None:
    """The results with what is needed to redo them, replacing the file in one step."""
    report = {
        "benchmark": benchmark,
        "command": " ".join([Path(sys.argv[0]).name, *argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": cpu_name(),
        "threads": native.threads(),
        "isa": native.isa(),
        "load_average": os.getloadavg(),
        "versions": {"pshard": pshard.__version__, "torch": torch.__version__, "numpy": np.__version__},
        "python": platform.python_version(),
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report) + "\n")
    partial.replace(path)


def cpu_name() -> str:
    """The processor's own name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


if __name__ == "__main__":
    sys.exit(run_cli(main))
