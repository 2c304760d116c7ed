"""Predicted beside measured, and the plan beside every published strategy that runs, over budgets and micro-batches.

    python benchmarks/truth.py -m qwen3-32b-q4_0.gguf --vram 6000,12000,16000 -o truth.json

Each test is a workload: answers for the decode tier, else prompts of the test's length. The plan is the planner's first
choice by prediction, as pshard-plan --no-validate writes it (by default it runs the best few and keeps the fastest).
The published strategies are planned for the same workload and run under the same kernels and budget. The weights are
packed once and shared by all engines, so that a plan is loaded in a second and plans can take turns, in rounds. What is
predicted to take longer than --longest seconds, or to reach less than HOPELESS of the fastest so far, is not run: its
row holds the prediction alone, and needs no measurement to lose.

A shared host gives cores and memory to others for seconds or minutes: then it is not the machine that was profiled.
Around each round the CPU's threads read the large units' weights, and the system counts the core time that was stolen
or that other programs used. A round is quiet when both reads reach QUIET of the profile's rate and it may have lost
less to others than stolen_time.DISTURBED. Plans near the fastest, or predicted there while none of their rounds is
quiet, get up to ROUNDS until two are; others two until one is. A row's figure is the median of its quiet
rounds' samples, of all when none is (`quiet` is 0 then). The file holds every round.
"""

import argparse
import gc
import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from pshard.errors import UserError
from pshard.machine import MachineProfile
from pshard.models import ModelFile, open_model
from pshard.plan import Variant
from pshard.planner.make_plan import plan_baseline, plan_variant
from pshard.planner.price.predict_published import Predictor
from pshard.planner.price.profile_tables import Tables
from pshard.planner.published.strategies import list_published
from pshard.profile.timed.host_threads import READ_BYTES
from pshard.registries.profile_store import load_profile
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.devices.threads import use_threads
from pshard.runtime.kernels.cpu import native
from pshard.runtime.memory.weights import HostWeights
from pshard.session.bench_engine import BenchSetting, BenchTest, predict_seconds, run_test
from pshard.session.this_machine import check_machine, environment_of
from pshard.times.stolen_time import DISTURBED, disturbed_share, read_core_time
from pshard.units.divide_unit import whole_unit
from pshard.workload import Workload

TESTS = (BenchTest(0, 8), BenchTest(16, 0), BenchTest(512, 0), BenchTest(4096, 0))  # tiers 1, 16, 512, 4096
CONTEXT = 4352
ANSWER = 256  # tokens, of the workload that the decode tier is planned for
TIME_LIMIT = 30.0  # seconds of a plan
HOPELESS = 0.6  # of the fastest so far, by prediction
NEAR = 0.9  # of the fastest: worth more rounds
ROUNDS = 6
QUIET = 0.85  # of the profile's rate of reading
SAMPLE_SECONDS = 0.4  # of each round, by prediction; two samples at least
PLAN = "pshard"  # the name of its plan among those of strategies


@dataclass(frozen=True)
class Round:
    """Tokens per second of a few runs; before and after them GB/s read from the weights (nothing for a model without
    units that take long enough); share of its time that others may have cost (pshard.times.stolen_time)."""

    samples: tuple[float, ...]
    read_gbs: tuple[float, ...]
    lost: float
    quiet: bool


def main() -> int:
    """Measure and print; the JSON is written after every test."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--vram", required=True, help="budgets in MiB, as 6000,12000")
    parser.add_argument("--longest", type=float, default=6.0, help="seconds a test may be predicted to take (6)")
    parser.add_argument("--profile", type=Path, help="machine profile (this machine's, in the cache)")
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
    file, profile = open_model(args.model), load_profile(args.profile)
    check_machine(profile)
    if why := native.why_missing():
        raise UserError(f"the host's memory is read with the C++ kernels: {why}")
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"truth.py -m {args.model.name} --vram {args.vram}",
        "environment": dict(environment_of(profile)),
        "profile_read_gbs": round(Tables(profile).host_rate / 1e9, 1),
        "rows": [],
    }
    use_threads(profile.host.threads)
    shared = HostWeights(map(whole_unit, file.spec.units), open_device(profile.accelerators[0].kind))
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
    seconds = {n: predict_seconds(Predictor([file.spec], profile, v), test) for n, v in variants.items()}
    predicted = {name: (test.n_prompt + test.n_gen) / expected for name, expected in seconds.items()}
    rounds: dict[str, list[Round]] = {}
    least_gbs = QUIET * Tables(profile).host_rate / 1e9
    runnable = [name for name in variants if seconds[name] <= longest]
    for _ in range(ROUNDS):
        for name in tuple(runnable):
            fastest = max(map(measured_rate, rounds.values()), default=0.0)
            if predicted[name] < HOPELESS * fastest or is_settled(rounds.get(name, []), predicted[name], fastest):
                continue
            try:
                found = measure(file, profile, variants[name], shared, test, seconds[name], least_gbs)
                rounds.setdefault(name, []).append(found)
            except UserError as error:
                runnable.remove(name)
                print(f"{workload.vram_mib[0]} {test.name} {name} does not run: {error}", flush=True)
    return [
        {
            "vram": workload.vram_mib[0],
            "test": test.name,
            "strategy": name,
            "placed": variant.ranks[0].tiers[0].solve.strategy,
            "predicted": predicted[name],
            "measured": measured_rate(rounds[name]) if name in rounds else None,
            "quiet": sum(r.quiet for r in rounds.get(name, ())),
            "rounds": [asdict(r) for r in rounds.get(name, ())],
        }
        for name, variant in variants.items()
    ]


def measured_rate(rounds: list[Round]) -> float:
    """Tokens per second: the median of the quiet rounds' samples, of all samples when no round is quiet."""
    quiet = [r for r in rounds if r.quiet]
    return median(s for r in quiet or rounds for s in r.samples)


def is_settled(rounds: list[Round], predicted: float, fastest: float) -> bool:
    """Whether a plan was measured often enough: two quiet rounds where it may be near the fastest, else one, or two of
    any kind."""
    if not rounds:
        return False
    quiet = sum(r.quiet for r in rounds)
    if quiet >= 2:
        return True
    near = measured_rate(rounds) >= NEAR * fastest or (not quiet and predicted >= NEAR * fastest)
    return not near and (quiet == 1 or len(rounds) >= 2)


def plan_strategies(file: ModelFile, profile: MachineProfile, workload: Workload) -> dict[str, Variant]:
    """The published strategies' plans for the same workload, where the budget allows one."""
    found = {}
    for name in list_published(file.spec):
        try:
            found[name] = plan_baseline(name, file.spec, profile, workload)
        except UserError as error:
            print(f"{workload.vram_mib[0]} {name} has no plan: {error}", flush=True)
    return found


def measure(
    file: ModelFile,
    profile: MachineProfile,
    variant: Variant,
    shared: HostWeights,
    test: BenchTest,
    expected: float,
    least_gbs: float,
) -> Round:
    """A few runs under a plan, each expected to take so many seconds; all memory but the shared weights is given back.

    least_gbs: what reading weights reaches before and after a quiet round.
    """
    spec, device = file.spec, open_device(profile.accelerators[0].kind)
    setting = BenchSetting(spec.name, spec.packed_nbytes, variant.ranks[0].tiers[0].solve.strategy, (), "")
    with build_engine(file, variant, device, lender=shared, tiles=profile.tiles_of(0)) as engine:
        reads, began = read_weights(file, shared), read_core_time()
        found = run_test(engine, None, test, max(2, round(SAMPLE_SECONDS / expected)), setting)
        lost = round(disturbed_share(began, read_core_time()), 4)
        reads += read_weights(file, shared)
    gc.collect()
    quiet = lost < DISTURBED and min(reads, default=inf) >= least_gbs
    return Round(found.samples_ts, reads, lost, quiet)


def read_weights(file: ModelFile, shared: HostWeights) -> tuple[float, ...]:
    """GB/s at which the CPU's threads read all units of at least READ_BYTES now; nothing where there are none."""
    units = [unit for unit in file.spec.units if unit.packed_nbytes >= READ_BYTES]
    seconds = sum(u.packed_nbytes / native.read_bandwidth(shared.blob(u.name), u.packed_nbytes) for u in units)
    return (round(sum(u.packed_nbytes for u in units) / seconds, 1),) if units else ()


def print_rows(rows: list[dict[str, Any]]) -> None:
    """A line: the plan and every other one, measured (predicted over measured; "?": in no quiet round), and whether the
    plan is as fast."""
    own, fastest = rows[0]["measured"], max(row["measured"] or 0.0 for row in rows)
    verdict = "the plan was not run" if own is None else f"the plan reaches {own / fastest:.0%} of the fastest"
    print(f"{rows[0]['vram']} {rows[0]['test']}: {verdict}; {', '.join(map(_describe, rows))}", flush=True)


def _describe(row: dict[str, Any]) -> str:
    if row["measured"] is None:
        return f"{row['strategy']} not run (predicted {row['predicted']:.4g})"
    doubt = "" if row["quiet"] else "?"
    return f"{row['strategy']} {row['measured']:.4g}{doubt} (x{row['predicted'] / row['measured']:.2f})"


if __name__ == "__main__":
    raise SystemExit(main())
