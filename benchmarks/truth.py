"""Predicted beside measured, and the plan beside every published strategy that runs, over budgets and micro-batches.

    pshard-plan -m qwen3-32b-q4_0.gguf --vram 12000 -c 4352 --prompt 4096    (likewise for the other budgets)
    python benchmarks/truth.py -m qwen3-32b-q4_0.gguf --vram 6000,12000,16000 -o truth.json

A budget without a plan is planned first, which a line says: such a plan is predicted only, where pshard-plan runs the
best few and keeps the fastest. The weights are packed once and shared by all engines, so that a plan is loaded in a
second and plans can take turns: those near the fastest are measured in two rounds, and a row's figure is the median of
both. Tests that are predicted to take longer than --longest seconds, or to reach less than HOPELESS of what the plan
was measured at, are not run: their rows hold the prediction alone, and need no measurement to lose.
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

from pshard.benching import BenchSetting, BenchTest, predict_seconds, run_test
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

TESTS = (BenchTest(0, 8), BenchTest(16, 0), BenchTest(512, 0), BenchTest(4096, 0))  # tiers 1, 16, 512, 4096
CONTEXT = 4352
HOPELESS = 0.6  # of the planner's plan as measured, by prediction
NEAR = 0.85  # of the planner's plan in any test: worth a second round


def main() -> int:
    """Measure and print; the JSON is written after every budget."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--vram", required=True, help="budgets in MiB, as 6000,12000")
    parser.add_argument("--longest", type=float, default=6.0, help="seconds a test may be predicted to take (6)")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"truth.py -m {args.model.name} --vram {args.vram}",
        "rows": [],
    }
    try:
        measure_budgets(args, record)
    except UserError as error:
        print(f"error: {error}")
        return 2
    return 0


def measure_budgets(args: Any, record: dict[str, Any]) -> None:
    """Fill the record, budget by budget, and write it after each."""
    shared: HostWeights | None = None
    for vram in (int(v) for v in args.vram.split(",")):
        opened = open_or_plan(Request(args.model, (vram,), CONTEXT))
        if shared is None:
            record["environment"] = dict(environment_of(opened.profile))
            use_threads(opened.profile.host.threads)
            shared = HostWeights(opened.file.spec.units, open_device(opened.profile.accelerators[0].kind))
            shared.load(opened.file, None, lambda _: None)
        rows = compare(opened, vram, shared, args.longest)
        record["rows"] += rows
        print_rows(rows)
        args.output.write_text(json.dumps(record, indent=1) + "\n")


def open_or_plan(request: Request) -> Opened:
    """The plan for a request; one is made, and said so, when there is none that serves."""
    try:
        return open_plan(request)
    except UserError as error:
        opened = open_plan(replace(request, replan=True))
        print(f"{request.vram_mib}: planned now, as {error}", flush=True)
        return opened


def compare(opened: Opened, vram: int, shared: HostWeights, longest: float) -> list[dict[str, Any]]:
    """A row for each strategy and test: tokens per second measured (median; None: not run) and predicted."""
    variants = {"ilp": opened.variant} | plan_strategies(opened)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    for again in (False, True):
        for name, variant in list(variants.items()):
            if again and not _is_near(samples, name):
                continue
            predictor = Predictor([opened.file.spec], opened.profile, variant)
            seconds = {test: predict_seconds(predictor, test) for test in TESTS}
            for test, s in seconds.items():
                predicted = (test.n_prompt + test.n_gen) / s
                rows[name, test.name] = {"vram": vram, "strategy": name, "test": test.name, "predicted": predicted}
            fair = {t.name: HOPELESS * median(samples["ilp", t.name]) for t in TESTS if ("ilp", t.name) in samples}
            worth = [
                t
                for t, s in seconds.items()
                if s <= longest and rows[name, t.name]["predicted"] >= fair.get(t.name, 0.0)
            ]
            if not worth:
                continue
            try:
                measured = measure(opened, variant, shared, worth)
            except UserError as error:
                print(f"{vram} {name} does not run: {error}", flush=True)
                del variants[name]
                continue
            for m in measured:
                samples[name, m.test] += m.samples_ts
    for key, row in rows.items():
        row |= {"measured": median(samples[key]) if key in samples else None, "samples": samples.get(key, [])}
    return list(rows.values())


def _is_near(samples: dict[tuple[str, str], list[float]], name: str) -> bool:
    own = {test: median(v) for (strategy, test), v in samples.items() if strategy == name}
    return any(v >= NEAR * median(samples["ilp", test]) for test, v in own.items() if ("ilp", test) in samples)


def plan_strategies(opened: Opened) -> dict[str, Variant]:
    """The published strategies' plans for the same workload, where the budget allows one."""
    v, found = opened.variant, {}
    for name in STRATEGIES:
        try:
            found[name] = plan_baseline(name, opened.file.spec, opened.profile, v.workload, v.correction)
        except UserError as error:
            print(f"{v.vram_mib} {name} has no plan: {error}", flush=True)
    return found


def measure(opened: Opened, variant: Variant, shared: HostWeights, tests: list[BenchTest]) -> list[Any]:
    """Run the tests under a plan; all memory but the shared weights is given back."""
    spec, device = opened.file.spec, open_device(opened.profile.accelerators[0].kind)
    setting = BenchSetting(spec.name, spec.packed_nbytes, variant.ranks[0].tiers[0].solve.strategy, (), "")
    predictor = Predictor([spec], opened.profile, variant)
    tiles = opened.profile.tiles_of(0)
    with build_engine(opened.file, variant, device, lender=shared, tiles=tiles) as engine:
        found = [run_test(engine, predictor, test, 2, setting) for test in tests]
    gc.collect()
    return found


def print_rows(rows: list[dict[str, Any]]) -> None:
    """A line per strategy: measured (and predicted over measured) of each test; predicted alone where not run."""
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        own = [row for row in rows if row["strategy"] == strategy]
        print(f"{own[0]['vram']} {strategy}: " + ", ".join(map(_describe, own)), flush=True)


def _describe(row: dict[str, Any]) -> str:
    if row["measured"] is None:
        return f"{row['test']} not run (predicted {row['predicted']:.4g})"
    return f"{row['test']} {row['measured']:.4g} (x{row['predicted'] / row['measured']:.2f})"


if __name__ == "__main__":
    raise SystemExit(main())
