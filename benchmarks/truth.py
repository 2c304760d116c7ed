"""Predicted beside measured, and the plan beside every published strategy that runs, over budgets and micro-batches.

    python benchmarks/truth.py -m qwen3-32b-q4_0.gguf --vram 6000,12000,16000 -o truth.json

The weights are packed once and shared by all engines, so that a plan is loaded in a second and plans can take turns:
each is measured in two rounds, and a row's figure is the median of both.
"""

import argparse
import gc
import json
from collections import defaultdict
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from pshard.benching import BenchSetting, BenchTest, run_test
from pshard.errors import UserError
from pshard.opening import Opened, Request, environment_of, open_plan
from pshard.plan import Variant
from pshard.planner.baselines import STRATEGIES
from pshard.planner.plan import plan_baseline
from pshard.planner.predict import Predictor
from pshard.runtime.device import open_device
from pshard.runtime.session import build_engine
from pshard.runtime.threads import use_threads
from pshard.runtime.weights import HostWeights
from pshard.workload import Workload

TESTS = (BenchTest(0, 8), BenchTest(16, 0), BenchTest(512, 0), BenchTest(4096, 0))  # tiers 1, 16, 512, 4096
CONTEXT, ROUNDS = 4352, 2


def main() -> int:
    """Measure and print; the JSON is written after every budget."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--vram", required=True, help="budgets in MiB, as 6000,12000")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"truth.py -m {args.model.name} --vram {args.vram}",
        "rows": [],
    }
    shared: HostWeights | None = None
    for vram in (int(v) for v in args.vram.split(",")):
        opened = open_plan(Request(args.model, (vram,), CONTEXT, replan=True))
        if shared is None:
            record["environment"] = dict(environment_of(opened.profile))
            use_threads(opened.profile.host.threads)
            shared = HostWeights(opened.file.spec.units, open_device(opened.profile.accelerators[0].kind))
            shared.load(opened.file, None, lambda _: None)
        rows = compare(opened, vram, shared)
        record["rows"] += rows
        print_rows(rows)
        args.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def compare(opened: Opened, vram: int, shared: HostWeights) -> list[dict[str, Any]]:
    """A row for each strategy and test: tokens per second measured (median) and predicted."""
    variants = {"ilp": opened.variant} | plan_strategies(opened)
    predicted: dict[tuple[str, str], float] = {}
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for name, variant in list(variants.items()):
            try:
                measured = measure(opened, name, variant, shared)
            except UserError as error:
                print(f"{vram} {name} does not run: {error}", flush=True)
                del variants[name]
                continue
            for m in measured:
                samples[name, m.test] += m.samples_ts
                predicted[name, m.test] = m.predicted_ts or 0.0
    return [
        {"vram": vram, "strategy": s, "test": t, "measured": median(v), "predicted": predicted[s, t], "samples": v}
        for (s, t), v in samples.items()
    ]


def plan_strategies(opened: Opened) -> dict[str, Variant]:
    """The published strategies' plans for the same workload, where the budget allows one."""
    v, found = opened.variant, {}
    workload = Workload(
        v.vram_mib, v.context, v.sequences, v.type_k, v.type_v, v.max_ubatch, v.prompt, v.generated, v.split_mode,
        v.tensor_split,
    )  # fmt: skip
    for name in STRATEGIES:
        try:
            found[name] = plan_baseline(name, opened.file.spec, opened.profile, workload, v.correction)
        except UserError as error:
            print(f"{v.vram_mib} {name} has no plan: {error}", flush=True)
    return found


def measure(opened: Opened, name: str, variant: Variant, shared: HostWeights) -> list[Any]:
    """Run the tests under a plan; all memory but the shared weights is given back."""
    spec, device = opened.file.spec, open_device(opened.profile.accelerators[0].kind)
    setting = BenchSetting(spec.name, spec.packed_nbytes, name, (), "")
    predictor = Predictor([spec], opened.profile, variant)
    with build_engine(opened.file, variant, device, lender=shared) as engine:
        found = [run_test(engine, predictor, test, 2, setting) for test in TESTS]
    gc.collect()
    return [replace(m, strategy=name) for m in found]


def print_rows(rows: list[dict[str, Any]]) -> None:
    """A line per strategy: measured (and predicted over measured) of each test."""
    tests = list(dict.fromkeys(row["test"] for row in rows))
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        own = {row["test"]: row for row in rows if row["strategy"] == strategy}
        parts = (f"{t} {own[t]['measured']:.4g} (x{own[t]['predicted'] / own[t]['measured']:.2f})" for t in tests)
        print(f"{rows[0]['vram']} {strategy}: " + ", ".join(parts), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
