"""Predicted beside measured, and the plan beside every published strategy that runs, over budgets and micro-batches.

    python benchmarks/truth.py -m qwen3-32b-q4_0.gguf --vram 6000,12000,16000 -o truth.json

Each test is a workload: answers for the decode tier, else prompts of the test's length. The plan is the planner's first
choice by prediction, as pshard-plan --no-validate writes it (by default it runs the best few and keeps the fastest).
The published strategies are planned for the same workload and run under the same kernels and budget. The weights are
packed once and shared by all engines, so that a plan is loaded in a second and plans can take turns: those near the
fastest are measured in two rounds, and a row's figure is the median of both. What is predicted to take longer than
--longest seconds, or to reach less than HOPELESS of the fastest so far, is not run: its row holds the prediction alone,
and needs no measurement to lose. After each run the CPU's threads read some of the weights: a rate (GB/s) below the
profile's says that the machine was not the one that was profiled, which on a shared host happens for minutes.
"""

import argparse
import gc
import json
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from pshard.benching import BenchSetting, BenchTest, predict_seconds, run_test
from pshard.errors import UserError
from pshard.machine import MachineProfile
from pshard.machine_store import load_profile
from pshard.models import ModelFile, open_model
from pshard.opening import check_machine, environment_of
from pshard.plan import Variant
from pshard.planner.baselines import STRATEGIES
from pshard.planner.costs import Tables
from pshard.planner.plan import plan_baseline, plan_variant
from pshard.planner.predict import Predictor
from pshard.runtime.device import open_device
from pshard.runtime.kernels import native
from pshard.runtime.session import build_engine
from pshard.runtime.threads import use_threads
from pshard.runtime.weights import HostWeights
from pshard.workload import Workload

TESTS = (BenchTest(0, 8), BenchTest(16, 0), BenchTest(512, 0), BenchTest(4096, 0))  # tiers 1, 16, 512, 4096
CONTEXT = 4352
ANSWER = 256  # tokens, of the workload that the decode tier is planned for
TIME_LIMIT = 30.0  # seconds of a plan
HOPELESS = 0.6  # of the fastest so far, by prediction
NEAR = 0.9  # of the fastest: worth a second round
PLAN = "pshard"  # the name of its plan among those of strategies
READ_BYTES = 4 << 30  # of the weights, to see how fast the host's memory is just then


def main() -> int:
    """Measure and print; the JSON is written after every test."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--vram", required=True, help="budgets in MiB, as 6000,12000")
    parser.add_argument("--longest", type=float, default=6.0, help="seconds a test may be predicted to take (6)")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    try:
        measure_budgets(args)
    except UserError as error:
        print(f"error: {error}")
        return 2
    return 0


def measure_budgets(args: Any) -> None:
    """Compare under every budget and for every test; the file is written after each."""
    file, profile = open_model(args.model), load_profile()
    check_machine(profile)
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"truth.py -m {args.model.name} --vram {args.vram}",
        "environment": dict(environment_of(profile)),
        "profile_read_gbs": Tables(profile).host_rate / 1e9,
        "rows": [],
    }
    use_threads(profile.host.threads)
    shared = HostWeights(file.spec.units, open_device(profile.accelerators[0].kind))
    shared.load(file, None, lambda _: None)
    for vram in (int(v) for v in args.vram.split(",")):
        for test in TESTS:
            workload = Workload((vram,), CONTEXT, prompt=test.n_prompt or 1, generated=ANSWER if test.n_gen else 0)
            rows = compare(file, profile, workload, test, shared, args.longest)
            record["rows"] += rows
            print_rows(rows)
            args.output.write_text(json.dumps(record, indent=1) + "\n")


def compare(
    file: ModelFile, profile: MachineProfile, workload: Workload, test: BenchTest, shared: HostWeights, longest: float
) -> list[dict[str, Any]]:
    """A row for each plan: tokens per second measured (median; None: not run) and predicted. The first is pshard's."""
    variants = {PLAN: plan_variant(file.spec, profile, workload, TIME_LIMIT)}
    variants |= plan_strategies(file, profile, workload)
    predicted = {}
    for name, variant in variants.items():
        seconds = predict_seconds(Predictor([file.spec], profile, variant), test)
        predicted[name] = (test.n_prompt + test.n_gen) / seconds
    samples: dict[str, list[float]] = defaultdict(list)
    reads: dict[str, list[float]] = defaultdict(list)
    for again in (False, True):
        for name, variant in variants.items():
            fastest = max((median(s) for s in samples.values()), default=0.0)
            if (test.n_prompt + test.n_gen) / predicted[name] > longest or predicted[name] < HOPELESS * fastest:
                continue
            if again and (name not in samples or median(samples[name]) < NEAR * fastest):
                continue
            try:
                found = measure(file, profile, variant, shared, test)
                samples[name] += found
                reads[name].append(round(read_weights(file, shared), 1))
            except UserError as error:
                print(f"{workload.vram_mib[0]} {test.name} {name} does not run: {error}", flush=True)
    return [
        {
            "vram": workload.vram_mib[0],
            "test": test.name,
            "strategy": name,
            "placed": variant.ranks[0].tiers[0].solve.strategy,
            "predicted": predicted[name],
            "measured": median(samples[name]) if name in samples else None,
            "samples": samples.get(name, []),
            "read_gbs": reads.get(name, []),
        }
        for name, variant in variants.items()
    ]


def plan_strategies(file: ModelFile, profile: MachineProfile, workload: Workload) -> dict[str, Variant]:
    """The published strategies' plans for the same workload, where the budget allows one."""
    found = {}
    for name in STRATEGIES:
        try:
            found[name] = plan_baseline(name, file.spec, profile, workload)
        except UserError as error:
            print(f"{workload.vram_mib[0]} {name} has no plan: {error}", flush=True)
    return found


def measure(
    file: ModelFile, profile: MachineProfile, variant: Variant, shared: HostWeights, test: BenchTest
) -> tuple[float, ...]:
    """Tokens per second of a few runs under a plan; all memory but the shared weights is given back."""
    spec, device = file.spec, open_device(profile.accelerators[0].kind)
    setting = BenchSetting(spec.name, spec.packed_nbytes, variant.ranks[0].tiers[0].solve.strategy, (), "")
    with build_engine(file, variant, device, lender=shared, tiles=profile.tiles_of(0)) as engine:
        found = run_test(engine, None, test, 2, setting)
    gc.collect()
    return found.samples_ts


def read_weights(file: ModelFile, shared: HostWeights) -> float:
    """GB/s at which the CPU's threads read whole units now, the median; 0 without the C++ kernels."""
    if not native.is_available():
        return 0.0
    rates, left = [], READ_BYTES
    for unit in file.spec.units:
        if unit.tensors and left > 0:
            rates.append(native.read_bandwidth(shared.blob(unit.name), unit.packed_nbytes))
            left -= unit.packed_nbytes
    return median(rates)


def print_rows(rows: list[dict[str, Any]]) -> None:
    """A line: the plan and every other one, measured (predicted over measured), and whether the plan is as fast."""
    own, fastest = rows[0]["measured"], max(row["measured"] or 0.0 for row in rows)
    verdict = "the plan was not run" if own is None else f"the plan reaches {own / fastest:.0%} of the fastest"
    memory = f"; memory read at {median(rows[0]['read_gbs']):.3g} GB/s" if own else ""
    print(f"{rows[0]['vram']} {rows[0]['test']}: {verdict}; {', '.join(map(_describe, rows))}{memory}", flush=True)


def _describe(row: dict[str, Any]) -> str:
    if row["measured"] is None:
        return f"{row['strategy']} not run (predicted {row['predicted']:.4g})"
    return f"{row['strategy']} {row['measured']:.4g} (x{row['predicted'] / row['measured']:.2f})"


if __name__ == "__main__":
    raise SystemExit(main())
