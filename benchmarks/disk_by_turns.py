"""Prompts of a model on disk and of the same model in memory, by turns: how much longer they take, and predictions.

    python benchmarks/disk_by_turns.py -m llama.gguf --profile profile.json --ram 1600 -p 512 -o disk-by-turns.json

Without a GPU, reading and computing share the cores. Other programs slow both engines alike. So the ratio of their
times, as far as the cores were their own, can be compared with the predicted one on a busy machine, where seconds
cannot (`disk_run.py` measures these). Beside it stands the ratio that is predicted when packing takes no core. Both
plans have the same micro-batches.
"""

import argparse
import json
import os
import tempfile
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from disk_run import DISKS, Files, Sample, cache_file, plan_prompts, take_sample

from pshard.commands.command_line import parse_ram
from pshard.errors import UserError
from pshard.machine import MachineProfile
from pshard.planner.price.predict_published import Predictor
from pshard.runtime.engine import Engine
from pshard.runtime.memory.disk.fake_disk import VARIABLE
from pshard.session.bench_engine import BenchTest, count_ids, predict_seconds
from pshard.session.open_plan import Opened
from pshard.session.start_engine import start_engine
from pshard.session.this_machine import environment_of


def main() -> int:
    """Measure all disks that were asked for."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--profile", type=Path, required=True, help="machine profile of the CPU; disks are added to it")
    parser.add_argument(
        "--ram", type=parse_ram, required=True, help="MiB, or as 6G, of the engine that reads from disk"
    )
    parser.add_argument("-p", type=int, default=512, help="tokens of a prompt (512)")
    parser.add_argument("-ub", type=int, default=128, help="tokens of a micro-batch (128)")
    parser.add_argument("-r", type=int, default=4, help="samples of each (4)")
    parser.add_argument("--disks", nargs="+", choices=DISKS, default=[name for name in DISKS if name != "real"])
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"disk_by_turns.py -m {args.model.name} --ram {args.ram} -p {args.p} -ub {args.ub} -r {args.r}",
        "disks": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        case = Files(args.model, args.profile, Path(folder), args.ub)
        for name in args.disks:
            os.environ[VARIABLE] = DISKS[name]
            try:
                record["disks"][name] = found = measure(case, name, args.p, args.ram, args.r)
            except UserError as error:
                print(f"error: {error}")
                return 2
            print(describe(name, found), flush=True)
            args.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def measure(case: Files, name: str, prompt: int, ram: int, repetitions: int) -> dict[str, Any]:
    """Both engines' samples, and what is predicted of them."""
    cache_file(case.model)
    far = plan_prompts(case, f"{name}, from disk", prompt, ram, 0)
    near = plan_prompts(case, f"{name}, from memory", prompt, 0, 2 * _mib(case.model))
    test = BenchTest(prompt, 0)
    expected = [predict(far, far.profile, test), predict(near, near.profile, test)]
    with start_plan(far) as one, start_plan(near) as other:
        cache_file(case.model)  # loading has dropped it
        ids, samples = count_ids(one, prompt, 0), (list[Sample](), list[Sample]())
        for engine in (one, other):
            engine.forward(ids)
        for _ in range(repetitions):
            for engine, own in zip((one, other), samples):
                engine.reset()
                own.append(take_sample(engine, ids))
    return {
        "environment": dict(environment_of(far.profile)),
        "timings": [asdict(row) for row in far.profile.unit_reads],
        "swept": far.variant.ranks[0].tiers[-1].most_swept,
        "ratio": find_ratio(*samples),
        "predicted": expected[0] / expected[1],
        "predicted_without_packing": predict(far, _without_packing(far.profile), test) / expected[1],
        "seconds_predicted": expected,
        "from_disk": [asdict(one) for one in samples[0]],
        "from_memory": [asdict(one) for one in samples[1]],
    }


def find_ratio(far: list[Sample], near: list[Sample]) -> float | None:
    """How many times as long the one engine's samples took as far as the cores were their own; None: they never were
    for one of both."""
    own = [sum(one.own_seconds for one in samples) for samples in (far, near)]
    return own[0] / own[1] if all(own) else None


def start_plan(opened: Opened) -> Engine:
    """An engine of a plan."""
    return start_engine(opened, opened.variant, checkpoints=False)


def predict(opened: Opened, profile: MachineProfile, test: BenchTest) -> float:
    """Seconds of a prompt by a plan, on a machine."""
    return predict_seconds(Predictor([opened.file.spec], profile, opened.variant), test)


def _without_packing(profile: MachineProfile) -> MachineProfile:
    return replace(profile, disks=tuple(replace(row, cpu_seconds=0.0) for row in profile.disks))


def _mib(model: Path) -> int:
    return model.stat().st_size >> 20


def describe(disk: str, found: dict[str, Any]) -> str:
    """A line: the ratios, seconds in the mean, and what other programs took."""
    both = found["from_disk"] + found["from_memory"]
    means = [sum(one["seconds"] for one in found[name]) / len(found[name]) for name in ("from_disk", "from_memory")]
    others = sum(one["disturbed"] for one in both) / len(both)
    ratio, off = "no ratio, as others had all cores", ""
    if found["ratio"] is not None:
        ratio = f"{found['ratio']:.3f} times as long"
        off = f"{found['predicted'] / found['ratio'] - 1:+.1%}; "
    return (
        f"{disk}: {means[0]:.2f} s from disk, {means[1]:.2f} from memory: {ratio}, "
        f"predicted {found['predicted']:.3f} ({off}without packing {found['predicted_without_packing']:.3f}); "
        f"others had {others:.0%} of the cores"
    )


if __name__ == "__main__":
    raise SystemExit(main())
