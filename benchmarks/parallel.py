"""One device, whole layers on each, or slices of every unit: each measured beside its prediction, and whether
`-sm auto` chose the fastest. Each case runs the commands.

    python benchmarks/parallel.py -m qwen3-32b-q4_0.gguf --devices 4 --cases vram 6000 --seconds 220 -o parallel.json

Devices are alike, and a case's budget is that of each. For every number of devices `-sm auto` says which way it would
take and what it holds of the others; then each way is run by one process, with the ratios and limits that are predicted
to be its best. With four devices tensors over two of them are a way too: eight processes of 20 to 28 s for two cases of
a model of 18 GB. The cases of experts have the goals of mixtures. Nothing is validated before it is written:
predictions are compared with predictions, and then with what was measured. Goals are in times what one device reaches
in the same run. pshard-report draws the file's scaling.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

NOISE = 0.02  # rounds that differ by less are as fast
PROCESS = 25.0  # seconds that a process is taken to need before one was seen


@dataclass(frozen=True)
class Case:
    """A budget (MiB of each device), what is planned for, the tests, and goals: (devices, test) -> times one device."""

    vram: int
    prompt: int
    generated: int
    plan: str
    bench: str
    goals: dict[tuple[int, str], float] = field(default_factory=dict)
    modes: tuple[str, ...] = ("tensor", "layer")


EXPERTS_IN_VRAM = {(2, "pp4096"): 1.5}
EXPERTS_OUTSIDE = {(2, "pp4096"): 2.2, (2, "tg64"): 1.5}
IN_VRAM = {(2, "tg64"): 1.4, (2, "pp4096"): 1.6, (4, "tg64"): 1.9, (4, "pp4096"): 2.6}
CASES: dict[str, Case] = {
    "vram": Case(24000, 4096, 256, "-c 4352", "-p 512,4096 -n 64 -r 3", IN_VRAM),
    "6000": Case(6000, 4096, 256, "-c 4352", "-p 4096 -n 32 -r 2", {(2, "tg32"): 1.9, (2, "pp4096"): 1.6}),
    "experts-vram": Case(24000, 4096, 256, "-c 4352", "-p 512,4096 -n 64 -r 3", EXPERTS_IN_VRAM),
    "experts-6000": Case(6000, 4096, 256, "-c 4352", "-p 512,4096 -n 64 -r 2", EXPERTS_OUTSIDE),
    "12000": Case(12000, 4096, 256, "-c 4352", "-p 4096 -n 32 -r 2"),
    "prompts": Case(24000, 8192, 16, "-c 8448", "-p 8192 -n 16 -r 2"),
    "answers": Case(24000, 64, 1024, "-c 4352", "-p 64 -n 64 -r 2"),
    "depth-batch": Case(
        40000, 4096, 64, "-c 36864 -np 8", "-p 512 -n 32 -d 0,4096 -npl 1,8 -r 2", modes=("tensor",)
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """One way to use so many devices: the flags that plan and run it, and where its plan lies."""

    name: str
    devices: int
    flags: tuple[str, ...]
    registry: str


@dataclass(frozen=True)
class Answer:
    """What `-sm auto` said with so many devices at hand: its figures of every way, the one that it takes first."""

    devices: int
    considered: tuple[dict[str, Any], ...]

    @property
    def best(self) -> dict[str, dict[str, Any]]:
        """Name of a way -> what it holds of its fastest ratios and limits."""
        found: dict[str, dict[str, Any]] = {}
        for way in sorted((w for w in self.considered if w["seconds"]), key=lambda w: w["seconds"]):
            found.setdefault(name_way(way), way)
        return found


def name_way(considered: dict[str, Any]) -> str:
    """ "-sm tensor -ts 0.5,0.5 --max-tp head=1" -> "2 devices, tensor"; "-sm none, device 0" -> "one device"."""
    words = considered["way"].split()
    return f"{words[3].count(',') + 1} devices, {words[1]}" if "-ts" in words else "one device"


def main() -> int:
    """Run the cases that were asked for, in their order, while the time lasts."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=CASES, required=True)
    parser.add_argument("--devices", nargs="+", type=int, default=[2], help="how many, beside one (2)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="time for all; what is left then is skipped")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file; earlier cases in it are kept")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    results = json.loads(args.output.read_text()) if args.output.exists() else {}
    for name in args.cases:
        for record in run_case(args.model, name, CASES[name], args.devices, deadline):
            results[f"{args.model.stem} {name}"] = record
            args.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def run_case(model: Path, name: str, case: Case, devices: list[int], deadline: float) -> Iterator[dict[str, Any]]:
    """Plan and measure every way of a case, with a line for each test; yields the record after each process."""
    record: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "case": vars(case).copy()}
    record["case"]["goals"] = {f"{n} devices, {test}": times for (n, test), times in case.goals.items()}
    record |= {"ways": {}, "skipped": [], "choices": {}}
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        answers, ways = plan_ways(model, case, devices, folder)
        record["plan_seconds"] = round(time.monotonic() - started, 1)
        longest = 0.0
        for way in ways:
            left = deadline - time.monotonic()
            if left < (longest or PROCESS):
                record["skipped"].append(way.name)
                print(f"{name}, {way.name}: skipped, the time is up", flush=True)
                continue
            started = time.monotonic()
            found = measure(model, case, way, folder, left)
            longest = max(longest, time.monotonic() - started)
            record["ways"][way.name] = {"seconds": round(time.monotonic() - started, 1), "measurements": found}
            one = record["ways"].get("one device", {}).get("measurements", [])
            for m in found:
                print(f"{name}, {way.name}, {describe(m, one, case.goals)}", flush=True)
            yield record
    for answer in answers:
        record["choices"][f"{answer.devices} devices"] = verdict = judge(answer, case, record["ways"])
        print(f"{name}, {answer.devices} devices: {verdict['said']}", flush=True)
    yield record


def plan_ways(model: Path, case: Case, devices: list[int], folder: str) -> tuple[list[Answer], list[Way]]:
    """Ask `-sm auto` for every number of devices, then plan its best of each mode; several plans at once."""
    common = ["-m", str(model), *case.plan.split(), "--no-validate", "--json"]
    common += ["--prompt", str(case.prompt), "--generated", str(case.generated)]

    def ask(n: int) -> Answer | None:
        done = run(["pshard-plan", *common, *budgets(case, n), "-sm", "auto", "--registry", f"{folder}/auto{n}.json"])
        if done.returncode:
            return None
        (variant,) = json.loads(done.stdout)["registry"]["sets"][0]["variants"]
        return Answer(n, tuple(variant["considered"]))

    def make(way: Way) -> Way | None:
        done = run(["pshard-plan", *common, *budgets(case, way.devices), *way.flags, "--registry", way.registry])
        return None if done.returncode else way

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        answers = [a for a in pool.map(ask, devices) if a]
        wanted = {"one device": Way("one device", 1, (), f"{folder}/one.json")}
        for mode in case.modes:
            for name, best in ((name, best) for a in answers for name, best in a.best.items() if name.endswith(mode)):
                flags = tuple(best["way"].split())
                wanted.setdefault(name, Way(name, flags[3].count(",") + 1, flags, f"{folder}/{name}.json"))
        return answers, [way for way in pool.map(make, wanted.values()) if way]


def budgets(case: Case, devices: int) -> list[str]:
    """The flag with as many budgets."""
    return ["--vram", ",".join([str(case.vram)] * devices)]


def measure(model: Path, case: Case, way: Way, folder: str, left: float) -> list[dict[str, Any]]:
    """All tests of a way in one process, which is ended after `left` seconds; none when it fails."""
    out = Path(folder) / "bench.json"
    out.unlink(missing_ok=True)
    where = ["-m", str(model), *budgets(case, way.devices), *way.flags, "--registry", way.registry]
    run(["pshard-bench", *where, *case.bench.split(), "-of", str(out)], left)
    found: list[dict[str, Any]] = json.loads(out.read_text()) if out.exists() else []
    for m in found:
        m["command"] = m["command"].replace(str(model), model.name)
        registry, written = f" --registry {shlex.quote(way.registry)}", f" -of {shlex.quote(str(out))}"
        m["command"] = m["command"].replace(registry, "").replace(written, "")
    return found


def describe(m: dict[str, Any], one: list[dict[str, Any]], goals: dict[tuple[int, str], float]) -> str:
    """One line: measured, over predicted, times one device, goal, peak memory of the fullest rank."""
    rate = median(m["samples_ts"])
    text = f"{m['test']}: {rate:.4g} tok/s"
    if m["predicted_ts"]:
        text += f", x{rate / m['predicted_ts']:.2f} of predicted"
    alone = next((median(o["samples_ts"]) for o in one if o["test"] == m["test"]), None)
    if alone and m["ranks"] > 1:
        text += f", x{rate / alone:.2f} of one device"
        if goal := goals.get((m["ranks"], m["test"])) if m["split_mode"] == "tensor" else None:
            text += f" (goal x{goal:g})"
    return text + f"; peak {max(m['rank_peaks_mib']):.0f} MiB"


def judge(answer: Answer, case: Case, ways: dict[str, Any]) -> dict[str, Any]:
    """Whether the way that `-sm auto` takes is the fastest that was measured, by rounds of the case's prompt and answer
    (from the rates of its longest prompt test and of decoding, one sequence, nothing cached before)."""
    chosen, predicted = name_way(answer.considered[0]), {name: w["seconds"] for name, w in answer.best.items()}
    rounds = {name: seconds for name in predicted if (seconds := measured_round(case, ways.get(name)))}
    listed = [
        f"{name}: {rounds[name]:.3g} s measured, {s:.3g} predicted" if name in rounds else f"{name}: {s:.3g} predicted"
        for name, s in sorted(predicted.items(), key=lambda way: rounds.get(way[0], way[1]))
    ]
    fastest = min(rounds, key=rounds.__getitem__, default=chosen)
    if chosen not in rounds or len(rounds) < 2:
        verdict = "not enough was measured to judge it"
    elif rounds[chosen] <= rounds[fastest] * (1 + NOISE):
        verdict = "the fastest measured" + ("" if len(rounds) == len(predicted) else " (not all were)")
    else:
        verdict = f"NOT the fastest: {fastest} is {rounds[chosen] / rounds[fastest]:.2f}x as fast"
    said = f"the planner chose {chosen}, {verdict} (rounds: {'; '.join(listed)})"
    return {"chosen": chosen, "measured": rounds, "considered": answer.considered, "said": said}


def measured_round(case: Case, way: dict[str, Any] | None) -> float | None:
    """Seconds of a prompt and its answer by the measured rates; None where either was not measured."""
    found = [m for m in way["measurements"] if m["n_sequences"] == 1 and not m["n_depth"]] if way else []
    prompts = [m for m in found if m["n_prompt"]]
    answers = [m for m in found if m["n_gen"]]
    if not prompts or not answers:
        return None
    longest = max(prompts, key=lambda m: m["n_prompt"])
    prefill, decode = float(median(longest["samples_ts"])), float(median(answers[0]["samples_ts"]))
    return case.prompt / prefill + case.generated / decode


def run(command: list[str], seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of the package with this interpreter; what it says on stderr is shown when it fails, and a
    benchmark's notes always."""
    module = command[0].replace("pshard-", "pshard.commands.cli_")
    words = [sys.executable, "-P", "-m", module, *command[1:]]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess(words, 124, "", "the time is up")
    if done.returncode:
        print(f"{' '.join(command[:5])} failed: {done.stderr[-1500:]}", file=sys.stderr, flush=True)
    elif command[0] == "pshard-bench":  # of fallbacks, and of cores that were stolen
        print("".join(line for line in done.stderr.splitlines(True) if line.startswith("note: ")), end="", flush=True)
    return done


if __name__ == "__main__":
    raise SystemExit(main())
