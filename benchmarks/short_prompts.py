"""Short prompts of a mixture on disk, measured beside their predictions.

    python benchmarks/short_prompts.py -m qwen3-30b-a3b.gguf --ram 6G --vram 6000 -o short-prompts.json

The plan is for a prompt of 512 tokens and an answer, from a disk of disk_run.py. Each prompt has other tokens than the
one before. It follows eight that are decoded one by one, so slots have what answers leave there. Eight more show what
the prompt has left of that. All lengths have --turns turns, each with an engine of its own.

Other programs slow what is measured. So each sample says which share of the cores these had, and quiet ones count alone
where there are some. With --patience each length waits for quiet moments, so many seconds in all.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

from disk_run import DISKS, Files, cache_file, describe_plan, drop_file, plan_prompts, take_sample, wait_for_others
from parallel import run

from pshard.commands.command_line import parse_ram
from pshard.errors import UserError
from pshard.planner.price.predict_published import Predictor
from pshard.runtime.engine import Engine
from pshard.runtime.memory.disk.fake_disk import VARIABLE
from pshard.session.bench_engine import count_ids
from pshard.session.open_plan import Opened
from pshard.session.start_engine import start_engine

PROMPT = 512  # that plans expect
LENGTHS = (2, 4, 8, 16)
DECODED = 8  # tokens before and after each prompt
SAMPLES = 5


def main() -> int:
    """Plan, run all lengths in turns, and write what was found."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--profile", type=Path, help="machine profile; disks are added to it (default: a quick one)")
    parser.add_argument("--vram", type=int, default=6000, help="MiB (6000); 0: as pshard chooses, for the CPU alone")
    parser.add_argument("--ram", type=parse_ram, default=parse_ram("6G"), help="MiB, or as 6G (6G)")
    parser.add_argument("--disk", choices=DISKS, default="2 GB/s")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument(
        "--patience", type=float, default=0.0, help="seconds that a length waits for a quiet machine (0)"
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    os.environ[VARIABLE] = DISKS[args.disk]
    with tempfile.TemporaryDirectory() as folder:
        profile = args.profile or Path(folder) / "profile.json"
        if (
            not args.profile
            and run(["pshard-profile", "--quick", "-m", str(args.model), "-o", str(profile)]).returncode
        ):
            return 2
        drop_file(args.model)
        try:
            opened = plan_prompts(Files(args.model, profile, Path(folder), 0), args.disk, PROMPT, args.ram, args.vram)
        except UserError as error:
            print(f"error: {error}")
            return 2
        record = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": f"short_prompts.py -m {args.model.name} --vram {args.vram} --ram {args.ram} --disk {args.disk}",
            "model_bytes": args.model.stat().st_size,
            "followed": [cache.tokens for cache in opened.variant.ranks[0].caches],
            **describe_plan(opened),
            "turns": [[*measure(opened, args.model, args.patience)] for _ in range(args.turns)],
        }
    args.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def measure(opened: Opened, model: Path, patience: float) -> Iterator[dict[str, Any]]:
    """All lengths once, on an engine of their own."""
    predictor = Predictor([opened.file.spec], opened.profile, opened.variant)
    with start_engine(opened, opened.variant, checkpoints=False) as engine:
        if os.environ[VARIABLE]:
            cache_file(model)  # loading has dropped it
        for length in LENGTHS:
            row = measure_length(engine, length, patience) | {"predicted": predictor.prefill(length)}
            print(
                f"{length} tokens: {row['seconds']:.3f} s, predicted {row['predicted']:.3f}; read "
                f"{row['read_bytes'] / 1e9:.2f} GB; then {row['next_seconds']:.3f} s a token; "
                f"{row['quiet']} of {SAMPLES} samples were quiet",
                flush=True,
            )
            yield row


def measure_length(engine: Engine, length: int, patience: float) -> dict[str, Any]:
    """Medians of samples: a prompt's seconds and what it reads, and seconds of each token after it."""
    samples, read, later, each = [], list[int](), list[float](), 2 * DECODED + length
    end = time.monotonic() + patience
    for sample in range(SAMPLES):
        ids = count_ids(engine, each, (length + sample) * each)
        before, prompt, after = ids[:DECODED], ids[DECODED:-DECODED], ids[-DECODED:]
        engine.reset()
        for token in before:
            engine.forward([token])
        begun = engine.memory().read
        wait_for_others(end)
        samples.append(take_sample(engine, prompt))
        read.append(engine.memory().read - begun)
        later.append(mean(take_sample(engine, [token]).seconds for token in after))
    quiet = [one for one in samples if one.is_quiet]
    return {
        "tokens": length,
        "seconds": median(one.seconds for one in quiet or samples),
        "quiet": len(quiet),
        "read_bytes": median(read),
        "next_seconds": median(later),
        "samples": [asdict(one) for one in samples],
    }


if __name__ == "__main__":
    raise SystemExit(main())
