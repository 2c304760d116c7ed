"""Models larger than the budget: plan, measure and compare with what a case should reach. Each case runs the commands.

    python benchmarks/budgets.py -m qwen3-32b-q4_0.gguf --cases 12000 6000 -o results.json

Prints measured over predicted, and writes all measurements with hardware, date and command. A case's `goal` is in
tokens per second; the ceiling beside it is what the link and the kernels of the machine profile allow (the plan's
bound).
"""

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from parallel import run


@dataclass(frozen=True)
class Case:
    """One plan and the tests run under it; goals by test name, in tokens per second."""

    vram: int
    plan: str
    bench: str
    goals: dict[str, float]


CASES: dict[str, Case] = {
    "12000": Case(
        12000, "-c 4352 --prompt 4096 --generated 256", "-p 512,4096 -n 64", {"pp512": 3300, "pp4096": 8000, "tg64": 13}
    ),
    "12000-baselines": Case(12000, "-c 4352 --prompt 4096 --generated 256", "-p 4096 -n 16 -r 1 --baseline fit", {}),
    "12000-deep": Case(
        12000,
        "-c 16512 --prompt 16384 --generated 128",
        "-p 16384 -n 0 -r 2",
        {"pp16384": 6500},
    ),
    "12000-deep-decode": Case(
        12000, "-c 16512 --prompt 16384 --generated 128", "-p 0 -n 64 -d 16384 -r 2", {"tg64 @ d16384": 8.5}
    ),
    "6000": Case(6000, "-c 4352 --prompt 4096 --generated 256", "-p 4096 -n 64", {"pp4096": 7000, "tg64": 7}),
    "20000": Case(20000, "-c 4352 --prompt 4096 --generated 256", "-p 4096 -n 64", {"pp4096": 9000, "tg64": 115}),
    "12000-16-users": Case(
        12000,
        "-c 17408 -np 16 --prompt 1024 --generated 64",
        "-p 0 -n 16 -d 1024 -npl 16 -r 2",
        {"tg16 @ d1024 x16": 90},
    ),
    "12000-64-users": Case(
        12000,
        "-c 69632 -np 64 --prompt 1024 --generated 64",
        "-p 0 -n 8 -d 1024 -npl 64 -r 1",
        {"tg8 @ d1024 x64": 150},
    ),
    "16000": Case(16000, "-c 4352 --prompt 4096 --generated 256", "-p 4096 -n 32 -r 3", {"pp4096": 3500, "tg32": 3.8}),
}


def main() -> int:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=CASES, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file; earlier cases in it are kept")
    parser.add_argument("--first-token", action="store_true", help="also time a cold process up to its first token")
    args = parser.parse_args()
    results = json.loads(args.output.read_text()) if args.output.exists() else {}
    for name in args.cases:
        results[f"{args.model.stem} {name}"] = run_case(args.model, name, CASES[name], args.first_token)
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def run_case(
    model: Path, name: str, case: Case, first_token: bool = False, seconds: float | None = None
) -> dict[str, Any]:
    """Plan, bench, print a line per test; returns what is written to the result file. seconds: time for the bench."""
    with tempfile.TemporaryDirectory() as folder:
        registry, out = f"{folder}/plan.json", Path(folder) / "bench.json"
        where = ["-m", str(model), "--vram", str(case.vram), "--registry", registry]
        start = time.perf_counter()
        plan = run(["pshard-plan", *where, *case.plan.split(), "--json"])
        planned = time.perf_counter() - start
        start = time.perf_counter()
        bench = run(["pshard-bench", *where, *case.bench.split(), "-of", str(out)], seconds)
        record: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "plan_command": f"pshard-plan -m {model.name} --vram {case.vram} {case.plan}",
            "bench_command": f"pshard-bench -m {model.name} --vram {case.vram} {case.bench}",
            "plan_seconds": round(planned, 2),
            "bench_seconds": round(time.perf_counter() - start, 1),
        }
        if not out.exists():
            return record | {"error": (plan.stderr + bench.stderr)[-2000:]}
        record["measurements"] = json.loads(out.read_text())
        for m in record["measurements"]:
            m["command"] = m["command"].replace(str(model), model.name)
            m["command"] = m["command"].replace(f" --registry {registry}", "").replace(f" -of {out}", "")
            print(describe(name, m, case.goals), flush=True)
        if first_token:
            start = time.perf_counter()
            run(["pshard-run", *where, "--tokens", "-p", "1,2,3", "-n", "1", "--temp", "0"])
            record["seconds_to_first_token"] = round(time.perf_counter() - start, 1)
            print(f"{name}: first token of a cold process after {record['seconds_to_first_token']} s")
    return record


def describe(case: str, m: dict[str, Any], goals: dict[str, float]) -> str:
    """One line: measured, predicted, goal, peak memory."""
    goal = f", goal {goals[m['test']]:g}" if m["strategy"] == "ilp" and m["test"] in goals else ""
    predicted = f", predicted {m['predicted_ts']:.4g}" if m["predicted_ts"] else ""
    return (
        f"{case} {m['strategy']} {m['test']}: median {median(m['samples_ts']):.4g} tok/s{predicted}{goal}; "
        f"peak {m['peak_vram_mib']:.0f} MiB, link {(m['link_bytes'] or 0) / 1e9:.2f} GB"
    )


if __name__ == "__main__":
    raise SystemExit(main())
