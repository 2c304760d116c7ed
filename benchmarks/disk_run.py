"""A model larger than memory, measured beside its prediction: from the machine's disk, and from disks that are made up.

    python benchmarks/disk_run.py -m qwen3-30b-a3b.gguf --seconds 360 -o disk-run.json

Each disk has a plan of its own under --ram and --vram: for a prompt of the longest test and an answer of 256 tokens. A
test is an answer, after tokens that fill slots and do not count, or a few prompts, all unlike, after one that does not
count. Beside each rate stand the plan's prediction, the same had slots been expected to find as much as they did, what
was read, and which share of the profile's rate of reading that was. The real disk is read cold: the file is written out
and dropped from the page cache. A made-up disk takes as long as it says, and reads from the page cache, to which the
file is brought before.

Other programs slow what is measured. So each sample says which share of the cores these had, and quiet samples count
alone where there are some. With --patience a sample waits for a quiet moment first. Beside the rate stands the best one
that the samples allow: each takes at least its own processor time on all cores, and its bytes at the profile's rate.

What is left when the time is up is skipped, and said; the file is written after every test. Without --profile a quick
one is made first, in a minute or so. Without --generator the file is there; with it, it is written and deleted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

from parallel import run

from pshard.commands.command_line import parse_ram
from pshard.errors import UserError
from pshard.machine import MachineProfile
from pshard.plan import Variant
from pshard.planner.price.predict_published import Predictor
from pshard.runtime.engine import Engine
from pshard.runtime.memory.disk.fake_disk import VARIABLE
from pshard.runtime.memory.host.host_memory import measure_process
from pshard.session.bench_engine import BenchTest, count_ids, predict_seconds
from pshard.session.open_plan import Opened, open_plan
from pshard.session.run_request import RunRequest
from pshard.session.start_engine import start_engine
from pshard.session.this_machine import environment_of
from pshard.times.stolen_time import DISTURBED, count_all_cores, disturbed_share, read_core_time
from pshard.units.moe.expert_cache import pack_hits

LATE = "latency=100us"
DISKS = {"real": ""} | {f"{rate} GB/s": f"fake:rate={rate}G,{LATE}" for rate in (7, 2, 1)}
GOALS = {"real": 0.15, "7 GB/s": 0.07, "2 GB/s": 0.07, "1 GB/s": 0.07}  # by which predictions may be off
ANSWER = 256  # tokens of an answer that plans expect
UNCOUNTED = 32  # tokens before those of an answer's test
PIECE = 64 << 20  # bytes that one thread brings to the page cache at once
SAMPLE_SECONDS = 6.0  # of a prompt's test
MOST_SAMPLES = 5
LOOK = 0.5  # seconds in which others must leave the cores alone


@dataclass(frozen=True)
class Files:
    """The model's file, the profile's, where plans are kept, tokens of a micro-batch (0: as pshard chooses), and what
    was recorded of routing."""

    model: Path
    profile: Path
    folder: Path
    ubatch: int
    routing: Path | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Case(Files):
    """What all disks share: budgets in MiB (vram 0: as pshard chooses) and the tests. patience: seconds that a test
    waits in all for others to rest."""

    vram: int
    ram: int
    tests: tuple[BenchTest, ...]
    patience: float

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(test.n_prompt for test in self.tests) or 512


def main() -> int:
    """Run all disks that were asked for while the time lasts."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--generator", nargs="+", help="program and model name: it writes the file first")
    parser.add_argument("--profile", type=Path, help="machine profile; disks are added to it (default: a quick one)")
    parser.add_argument("--vram", type=int, default=6000, help="MiB (6000); 0: as pshard chooses, for the CPU alone")
    parser.add_argument("-ub", type=int, default=0, help="tokens of a micro-batch (as pshard chooses)")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds that a test waits for a quiet machine (0)")
    parser.add_argument("--routing", type=Path, help="plan by what `pshard run --record-routing` has written")
    parser.add_argument("--ram", type=parse_ram, default=parse_ram("6G"), help="MiB, or as 6G (6G)")
    parser.add_argument("-n", type=int, default=64, help="tokens of an answer (64)")
    parser.add_argument("-p", default="4096,16384", help="tokens of prompts (4096,16384)")
    parser.add_argument("--disks", nargs="+", choices=DISKS, default=list(DISKS))
    parser.add_argument("--seconds", type=float, default=3600.0, help="time for all; what is left then is skipped")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    tests = (BenchTest(0, args.n), *(BenchTest(int(n), 0) for n in args.p.split(",")))
    with tempfile.TemporaryDirectory() as folder, written(args.model, args.generator):
        profile = args.profile or Path(folder) / "profile.json"
        case = Case(
            args.model, profile, Path(folder), args.ub, args.vram, args.ram, tests, args.patience, routing=args.routing
        )
        words = ["pshard-profile", "--quick", "-m", str(args.model), "-o", str(case.profile)]
        if not args.profile and run(words).returncode:
            return 2
        try:
            measure_disks(case, args.disks, end, args.output)
        except UserError as error:
            print(f"error: {error}")
            return 2
    return 0


def measure_disks(case: Case, disks: list[str], end: float, output: Path) -> None:
    """Run all tests with each disk; the file is written after every test."""
    by_record = " --routing RECORD" if case.routing else ""
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"disk_run.py -m {case.model.name} --vram {case.vram} --ram {case.ram}" + by_record,
        "model_bytes": case.model.stat().st_size,
        "disks": {},
    }
    for name in disks:
        if time.monotonic() > end:
            print(f"{name}: skipped, the time is up", flush=True)
            continue
        os.environ[VARIABLE] = DISKS[name]
        for found in measure_disk(case, name, end):
            record["disks"][name] = found
            output.write_text(json.dumps(record, indent=1) + "\n")


@contextmanager
def written(model: Path, generator: list[str] | None) -> Iterator[None]:
    """The model's file is there: written if a program for that was given, and then deleted at the end."""
    if generator is None or model.exists():
        yield
        return
    try:
        program, name = generator
        subprocess.run([sys.executable, program, name, str(model)], stdout=subprocess.DEVNULL, check=True)
        yield
    finally:
        model.unlink(missing_ok=True)


def measure_disk(case: Case, name: str, end: float) -> Iterator[dict[str, Any]]:
    """Plan and run all tests with one disk; yields what was found after each."""
    began = time.monotonic()
    opened = plan(case, name)
    planned, rate = time.monotonic(), rate_of(opened.profile)
    predictor = Predictor([opened.file.spec], opened.profile, opened.variant)
    with start_engine(opened, opened.variant, checkpoints=False) as engine:
        found = describe_plan(opened) | {
            "plan_seconds": round(planned - began, 1),
            "load_seconds": round(time.monotonic() - planned, 1),
            "notes": engine.notes,
            "tests": {},
        }
        if DISKS[name]:
            cache_file(case.model)  # loading has dropped it
        for test in case.tests:
            if time.monotonic() > end:
                print(f"{name}, {test.name}: skipped, the time is up", flush=True)
                continue
            expected = predict_seconds(predictor, test)
            found["tests"][test.name] = row = measure_test(engine, test, rate, expected, case.patience)
            if row["slot_hits"] is not None and row["slot_hits_expected"]:
                variant = expect_as_found(opened.variant, row["slot_hits"] / row["slot_hits_expected"])
                again = predict_seconds(Predictor([opened.file.spec], opened.profile, variant), test)
                row["predicted_as_found"] = row["predicted"] * expected / again
            found["memory"] = asdict(engine.memory()) | {"process_now": measure_process(), "ram": case.ram << 20}
            print(describe(name, test, row), flush=True)
            yield found


def expect_as_found(variant: Variant, times: float) -> Variant:
    """The variant whose slots are expected to find so many times as many choices."""
    (rank,) = variant.ranks
    caches = [replace(c, hits=pack_hits([times * share for share in c.hits_by_place])) for c in rank.caches]
    return replace(variant, ranks=(replace(rank, caches=tuple(caches)),))


def plan(case: Case, name: str) -> Opened:
    """A plan for the tests, by the disk that is measured, or made up, now. Raises UserError where there is none."""
    drop_file(case.model)
    if DISKS[name]:
        cache_file(case.model)
    return plan_prompts(case, name, case.longest, case.ram, case.vram)


def plan_prompts(case: Files, name: str, prompt: int, ram: int, vram: int) -> Opened:
    """A plan for prompts of so many tokens and an answer, with so many MiB in all and in VRAM; 0: as pshard chooses.
    Raises UserError where there is none."""
    registry = case.folder / f"{name.replace('/', ' ')}.json"
    places = ["--profile", str(case.profile), "--registry", str(registry)]
    lengths = ["--prompt", str(prompt), "--generated", str(ANSWER), "-c", str(prompt + ANSWER), "--no-validate"]
    given = ("--ram", ram), ("--vram", vram), ("-ub", case.ubatch)
    sizes = [word for flag, number in given if number for word in (flag, str(number))]
    routing = ["--routing", str(case.routing)] if case.routing else []
    if run(["pshard-plan", "-m", str(case.model), *sizes, *routing, *lengths, *places]).returncode:
        raise UserError(f"{name}: nothing was planned")
    asked = RunRequest(case.model, (vram,) if vram else None, prompt + ANSWER, registry=registry, profile=case.profile)
    return open_plan(replace(asked, ram_mib=ram))


def describe_plan(opened: Opened) -> dict[str, Any]:
    """What is kept of a plan, and of the profile that it is by."""
    (rank,), profile = opened.variant.ranks, opened.profile
    return {
        "environment": dict(environment_of(profile)),
        "timings": [asdict(row) for row in profile.disks],
        "rate": rate_of(profile),
        "disk_bytes": sum(opened.file.spec.unit(unit).packed_nbytes for unit in rank.beyond_host),
        "slots": sum(cache.slots for cache in rank.caches),
        "tiers": [
            {"tokens": t.tokens, "swept": t.most_swept, "busy": dict(t.prediction.busy), "binds": t.prediction.binds}
            for t in rank.tiers
        ],
    }


def rate_of(profile: MachineProfile) -> float:
    """Bytes a second that the only disk of a profile brings of units, at best."""
    return max(row.nbytes / row.seconds for row in profile.unit_reads)


def drop_file(path: Path) -> None:
    """Let nothing of a file be in the page cache."""
    os.sync()
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cache_file(path: Path) -> None:
    """Bring a file to the page cache."""

    def touch(at: int) -> None:
        with path.open("rb") as file:
            file.seek(at)
            file.read(PIECE)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(touch, range(0, path.stat().st_size, PIECE)))


@dataclass(frozen=True)
class Sample:
    """A run of some tokens: seconds, those of this process on all cores together, and the share of all cores that
    others had, or that were stolen."""

    seconds: float
    cpu: float
    disturbed: float

    @property
    def own_seconds(self) -> float:
        """The same as far as the cores were its own."""
        return self.seconds * (1 - self.disturbed)

    @property
    def is_quiet(self) -> bool:
        """Whether nearly all cores were its own."""
        return self.disturbed <= DISTURBED


def measure_test(engine: Engine, test: BenchTest, rate: float, expected: float, patience: float) -> dict[str, Any]:
    """Seconds of each sample, of each token of an answer; what was read, and choices that found their expert."""
    engine.reset()
    if test.n_gen:
        for token in count_ids(engine, UNCOUNTED, 0):
            engine.forward([token])
        runs = [[token] for token in count_ids(engine, test.n_gen, UNCOUNTED)]
    else:
        prompts = 1 + max(1, min(MOST_SAMPLES, round(SAMPLE_SECONDS / expected)))
        uncounted, *runs = (count_ids(engine, test.n_prompt, i * test.n_prompt) for i in range(prompts))
        engine.forward(uncounted)
    hits, at_first = engine.hits_by_rank(), engine.memory()
    end, samples = time.monotonic() + patience, list[Sample]()
    for ids in runs:
        if test.n_prompt:
            engine.reset()
        wait_for_others(end)
        samples.append(take_sample(engine, ids))
    (found,) = (after.since(before) for after, before in zip(engine.hits_by_rank(), hits))
    memory = engine.memory()
    nbytes = (memory.read - at_first.read) / len(samples)
    waited, seconds = (now - before for now, before in zip(memory.waited, at_first.waited))
    quiet = [one for one in samples if one.is_quiet] or samples
    tokens = 1 if test.n_gen else test.n_prompt
    each = mean(one.seconds for one in quiet) if test.n_gen else median(one.seconds for one in quiet)
    return {
        "rate": tokens / each,
        "predicted": tokens * len(runs if test.n_gen else [0]) / expected,
        "at_best": tokens / max(mean(one.cpu for one in quiet) / count_all_cores(), nbytes / rate),
        "quiet": sum(one.is_quiet for one in samples),
        "samples": [asdict(one) for one in samples],
        "read_bytes": nbytes,
        "share_of_rate": nbytes / rate / each,
        "share_while_waited": waited / seconds / rate if seconds else None,
        "share_waited": seconds / sum(one.seconds for one in samples),
        "slot_hits": found.found.share if found.found.chosen else None,
        "slot_hits_expected": found.expected,
    }


def wait_for_others(end: float) -> None:
    """Until other programs leave the cores alone, at most to a time of the monotonic clock."""
    while time.monotonic() < end:
        before = read_core_time()
        time.sleep(LOOK)
        if disturbed_share(before, read_core_time()) <= DISTURBED:
            return


def take_sample(engine: Engine, ids: list[int]) -> Sample:
    """One run of these tokens."""
    before, cpu, started = read_core_time(), time.process_time(), time.perf_counter()
    engine.forward(ids)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return Sample(seconds, cpu, disturbed_share(before, read_core_time()))


def describe(disk: str, test: BenchTest, row: dict[str, Any]) -> str:
    """A line: measured, predicted, the goal of that, what was read and how fast."""
    off, goal = row["predicted"] / row["rate"] - 1, GOALS[disk]
    verdict = "" if abs(off) <= goal else ", MISSED"
    hits = ""
    if "predicted_as_found" in row:
        hits = f"; slots found {row['slot_hits']:.0%} (with that predicted {row['predicted_as_found']:.4g})"
    waited = ""
    if row["share_while_waited"]:
        waited = f" ({row['share_while_waited']:.0%} while something waited, {row['share_waited']:.0%} of the time)"
    others = mean(one["disturbed"] for one in row["samples"])
    return (
        f"{disk}, {test.name}: {row['rate']:.4g} tok/s (at best {row['at_best']:.4g}), predicted "
        f"{row['predicted']:.4g} ({off:+.1%}, goal {goal:.0%}{verdict}); read {row['read_bytes'] / 1e9:.2f} GB each at "
        f"{row['share_of_rate']:.0%} of the profile's rate{waited}{hits}; {row['quiet']} of {len(row['samples'])} "
        f"samples were quiet, others had {others:.0%} of the cores"
    )


if __name__ == "__main__":
    raise SystemExit(main())
