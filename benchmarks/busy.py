"""Decoding on the CPU while other programs hold some of its cores, beside the rate on idle ones.

    python benchmarks/busy.py -m examples/demo.gguf --rounds 5 -o busy.json

A core is held by a program that loops on it. Each round measures with no core held, with one, and with every one, for
`--seconds` each; rates are medians of the rounds. The goals: with one of n cores held 0.7 (n - 1/2) / n of the idle
rate, with all held 0.35.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cpu_kernels import use_native_threads, write_json

from pshard.commands.command_line import new_parser, parse_ints, run_cli
from pshard.models import open_model
from pshard.planner.make_plan import plan_variant
from pshard.registries.profile_store import load_profile
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.kernels.cpu import native
from pshard.workload import Workload

if TYPE_CHECKING:
    from pshard.runtime.engine import Engine

TOKENS = 64  # decoded after each other, from an empty context
HOLD = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"


def main(argv: list[str]) -> int:
    """Measure and print; with -o also write JSON."""
    cores = sorted(os.sched_getaffinity(0))
    parser = new_parser("busy.py", str(__doc__).splitlines()[0])
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("-t", "--threads", type=parse_ints, default=(len(cores),), help="numbers of threads, as 1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one measurement")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    results = [row for threads in args.threads for row in measure(args, threads, cores)]
    print("| threads | cores held | tok/s | of idle | goal | recalls |\n|---|---|---|---|---|---|")
    for r in results:
        goal = "" if r["goal"] is None else f"{r['goal']:.0%}"
        print(f"| {r['threads']} | {r['held']} | {r['rate']:.0f} | {r['share']:.0%} | {goal} | {r['recalls']} |")
    if args.output:
        write_json(args.output, "busy", results, argv)
    return 0


def measure(args: argparse.Namespace, threads: int, cores: list[int]) -> list[dict]:
    """A row for each number of cores held."""
    use_native_threads(threads)
    cases = sorted({0, 1, len(cores)})
    rates: dict[int, list[float]] = {held: [] for held in cases}
    recalls = dict.fromkeys(cases, 0)
    with contextlib.closing(open_on_cpu(args.model, args.profile)) as engine:
        decode(engine, args.seconds)
        for _ in range(args.rounds):
            for held in cases:
                with hold(cores[:held]):
                    before = native.recalls()
                    rates[held].append(decode(engine, args.seconds))
                    recalls[held] += native.recalls() - before
    idle, n = statistics.median(rates[0]), len(cores)
    goals = {0: None, 1: 0.7 * (n - 0.5) / n, n: 0.35}
    return [
        {
            "threads": threads,
            "cores": n,
            "held": held,
            "rate": statistics.median(rates[held]),
            "samples": rates[held],
            "share": statistics.median(rates[held]) / idle,
            "goal": goals[held],
            "recalls": recalls[held],
        }
        for held in cases
    ]


def open_on_cpu(model: Path, profile: Path | None) -> "Engine":
    """An engine without limits whose units all run on the CPU."""
    file, measured = open_model(model), load_profile(profile)
    on_cpu = replace(measured, accelerators=(replace(measured.accelerators[0], kind="cpu"),))
    variant = plan_variant(file.spec, on_cpu, Workload((1 << 20,), 2 * TOKENS))
    return build_engine(file, variant, open_device("cpu"), kernels="fast")


def decode(engine: "Engine", seconds: float) -> float:
    """Tokens per second, over whole answers."""
    start, tokens = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds:
        engine.reset()
        for i in range(TOKENS):
            engine.forward([(i + 1) * 7919 % engine.vocab])
        tokens += TOKENS
    return tokens / passed


@contextlib.contextmanager
def hold(cores: list[int]) -> Iterator[None]:
    """Keep each of these cores busy with a program of its own."""
    programs = [
        subprocess.Popen([sys.executable, "-S", "-c", HOLD, str(core)], stdout=subprocess.PIPE) for core in cores
    ]
    try:
        for program in programs:
            assert program.stdout is not None
            program.stdout.readline()  # it runs
        yield
    finally:
        for program in programs:
            program.kill()
            program.communicate()


if __name__ == "__main__":
    sys.exit(run_cli(main))
