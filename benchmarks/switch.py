"""Time of a switch from prefill to decode: the first decode step after a prompt, less the steps that follow it.

    python benchmarks/switch.py -m MODEL --vram 12000 --prompt 8192 -o switch.json

Plans for that prompt, runs it several times, and prints the median switch, the median step and what moved.
"""

import argparse
import json
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pshard.session.open_plan import open_plan
from pshard.session.run_request import RunRequest
from pshard.session.start_engine import start_engine
from pshard.session.this_machine import environment_of


def main() -> int:
    """Measure and print; with -o also write JSON."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--vram", type=int, required=True, help="MiB")
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    opened = open_plan(RunRequest(args.model, (args.vram,), args.prompt + 128, replan=True))
    rounds = []
    with start_engine(opened, opened.variant) as engine:
        for _ in range(args.repetitions + 1):
            rounds.append(time_round(engine, args.prompt))
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"switch.py -m {args.model.name} --vram {args.vram} --prompt {args.prompt}",
        "environment": dict(environment_of(opened.profile)),
        "switch_ms": statistics.median(r["first_ms"] - r["step_ms"] for r in rounds[1:]),
        "step_ms": statistics.median(r["step_ms"] for r in rounds[1:]),
        "rounds": rounds[1:],
    }
    print(f"switch {record['switch_ms']:.1f} ms beside a decode step of {record['step_ms']:.1f} ms")
    if args.output:
        args.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def time_round(engine: Any, prompt: int) -> dict[str, float]:
    """One prompt and nine decode steps: ms of the first, median ms of the others, bytes the first moved."""
    engine.reset()
    engine.forward([i % engine.vocab for i in range(prompt)])
    moved, times = engine.link_bytes, []
    for i in range(9):
        start = time.perf_counter()
        engine.forward([i])
        times.append(1e3 * (time.perf_counter() - start))
        if i == 0:
            moved = engine.link_bytes - moved
    return {"first_ms": times[0], "step_ms": statistics.median(times[2:]), "first_moved_mib": moved / (1 << 20)}


if __name__ == "__main__":
    raise SystemExit(main())
