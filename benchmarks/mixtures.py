"""Models of every family: our plan and other programs at their best settings, on the same files and boot.

    python benchmarks/mixtures.py --rows 30b-6000 next-12000 --generator random_gguf.py --folder /dev/shm \\
        --llama-bench llama.cpp/llama-bench --ik-bench ik_llama.cpp/llama-bench --seconds 500 -o mixtures.json

Rows of one model follow each other; its file of random weights is written for them by the generator (MODEL FILE, and
the row's flags) and deleted after them, its machine profile is made before them, unless there is one for all models
(--profiled). Without a generator the files are there.
Other programs run with the settings that were found to be the best for a row, and the most memory that their process
took is kept beside each rate: ik_llama.cpp is told how many layers' experts it leaves to the CPU, llama.cpp how much it
leaves of the GPU. What is left when the time is up is skipped, and said.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from beside_llama_cpp import free_mib
from budgets import Case, run_case
from parallel import run

SHALLOW = ("-c 4352 --prompt 4096 --generated 256 --no-validate", "-p 512,4096 -n 64 -r 3")
DEEP = ("-c 16960 --prompt 16384 --generated 128 --no-validate", "-p 0 -n 32 -d 16384 -r 2")
LONG = ("-c 16960 --prompt 16384 --generated 128 --no-validate", "-p 16384 -n 0 -r 2")
CROWD = ("-c 17408 -np 16 --prompt 1024 --generated 64 --no-validate", "-p 0 -n 16 -d 1024 -npl 16 -r 2")
EVERY = 0.05  # seconds between two looks at the GPU's memory


@dataclass(frozen=True)
class Peer:
    """Tests of another program: "llama.cpp" or "ik_llama.cpp", and its flags beside model, threads and budget."""

    program: str
    flags: str


@dataclass(frozen=True)
class Row:
    """A case of a model, made with these flags of the generator, and what runs beside it."""

    model: str
    case: Case
    peers: tuple[Peer, ...] = ()
    made: str = ""

    @property
    def file(self) -> str:
        """The model file's name."""
        return f"{'-'.join([self.model, *self.made.replace('--', '').split()])}.gguf"


def fitted(tests: str, large: bool = True) -> Peer:
    """llama.cpp that fits itself into the budget, with micro-batches of 4096 or of 512."""
    return Peer("llama.cpp", f"-fa on -lm none {'-b 4096 -ub 4096' if large else '-b 2048 -ub 512'} {tests}")


def left_to_cpu(layers: int, tests: str) -> Peer:
    """ik_llama.cpp with so many layers' experts on the CPU."""
    return Peer("ik_llama.cpp", f"-ngl 999 --n-cpu-moe {layers} -fa 1 -mmp 0 {tests}")


def in_vram(tests: str) -> Peer:
    """llama.cpp with all layers on the GPU."""
    return Peer("llama.cpp", f"-ngl 99 -fa on -lm none -b 4096 -ub 4096 {tests}")


PROMPTS, REPACKED = "-p 512,4096 -n 0 -r 1", "-rtr 1 -p 0 -n 64 -r 2"
ANSWER, ONCE = "-p 0 -n 64 -r 2", "-p 0 -n 64 -r 1"
KINDS = ("q4_k", "iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_s", "iq1_m", "nvfp4")
IN_VRAM = Case(12000, *SHALLOW, {})
CELLS = ("-c 132096 -np 8 --prompt 16384 --generated 128 --no-validate", "-p 0 -n 16 -d 16384 -npl 8 -r 2")
ANSWER_DEEP, REPACKED_DEEP = "-p 0 -n 32 -d 16384 -r 1", "-rtr 1 -p 0 -n 0 -gp 16384,32 -r 1"
ROWS: dict[str, Row] = {
    "30b-6000": Row(
        "qwen3-30b-a3b", Case(6000, *SHALLOW, {"pp512": 2600, "pp4096": 14000, "tg64": 90}),
        (left_to_cpu(42, f"-b 4096 -ub 4096 {PROMPTS}"), left_to_cpu(34, REPACKED), fitted(PROMPTS)),
    ),
    "30b-6000-deep": Row("qwen3-30b-a3b", Case(6000, *DEEP, {}), (left_to_cpu(34, REPACKED_DEEP),)),
    "30b-6000-16-users": Row("qwen3-30b-a3b", Case(6000, *CROWD, {"tg16 @ d1024 x16": 180})),
    "30b-vram": Row(
        "qwen3-30b-a3b", Case(26000, *SHALLOW, {"pp512": 12000, "pp4096": 25000, "tg64": 450}),
        (in_vram("-p 512,4096 -n 64 -r 2"),),
    ),
    "30b-vram-deep": Row("qwen3-30b-a3b", Case(26000, *DEEP, {}), (in_vram(ANSWER_DEEP),)),
    "oss20-4000": Row(
        "gpt-oss-20b", Case(4000, *SHALLOW, {"pp512": 3400, "pp4096": 16000, "tg64": 75}),
        (left_to_cpu(19, f"-b 4096 -ub 4096 {PROMPTS}"), left_to_cpu(19, REPACKED)),
    ),
    "oss20-4000-deep": Row("gpt-oss-20b", Case(4000, *DEEP, {}), (left_to_cpu(19, REPACKED_DEEP),)),
    "oss20-vram": Row(
        "gpt-oss-20b", Case(26000, *SHALLOW, {"pp512": 12000, "pp4096": 25000, "tg64": 450}),
        (in_vram("-p 512,4096 -n 64 -r 2"),),
    ),
    "oss20-vram-deep": Row("gpt-oss-20b", Case(26000, *DEEP, {}), (in_vram(ANSWER_DEEP),)),
    "oss120-8000": Row(
        "gpt-oss-120b", Case(8000, *SHALLOW, {"pp512": 900, "pp4096": 5200, "tg64": 65}),
        (fitted(PROMPTS), left_to_cpu(21, f"-b 4096 -ub 4096 {PROMPTS}"), left_to_cpu(21, REPACKED)), "--layers 24",
    ),
    "oss120-8000-deep": Row("gpt-oss-120b", Case(8000, *DEEP, {}), (left_to_cpu(21, REPACKED_DEEP),), "--layers 24"),
    "next-12000": Row(
        "qwen3-next-80b-a3b", Case(12000, *SHALLOW, {"pp512": 1000, "pp4096": 5000, "tg64": 88}),
        (fitted(PROMPTS), left_to_cpu(37, REPACKED)),
    ),
    "next-12000-deep": Row(
        "qwen3-next-80b-a3b", Case(12000, *DEEP, {"tg32 @ d16384": 80}), (left_to_cpu(37, REPACKED_DEEP),)
    ),
    "next-12000-long": Row("qwen3-next-80b-a3b", Case(12000, *LONG, {"pp16384": 9000})),
    "35b-6000": Row(
        "qwen3.5-35b-a3b", Case(6000, *SHALLOW, {"pp512": 2200, "pp4096": 11000, "tg64": 120}),
        (fitted(PROMPTS), left_to_cpu(31, f"-b 4096 -ub 4096 {PROMPTS}"), left_to_cpu(31, REPACKED)),
    ),
    "35b-6000-deep": Row(
        "qwen3.5-35b-a3b", Case(6000, *DEEP, {"tg32 @ d16384": 105}), (left_to_cpu(31, REPACKED_DEEP),)
    ),
    "35b-6000-16-users": Row("qwen3.5-35b-a3b", Case(6000, *CROWD, {"tg16 @ d1024 x16": 230})),
    "35b-vram": Row(
        "qwen3.5-35b-a3b", Case(26000, *SHALLOW, {"pp512": 9000, "pp4096": 20000, "tg64": 350}),
        (in_vram("-p 512,4096 -n 64 -r 2"),),
    ),
    "35b-vram-deep": Row(
        "qwen3.5-35b-a3b", Case(26000, *DEEP, {"tg32 @ d16384": 320}), (in_vram(ANSWER_DEEP),)
    ),
    "27b-8000": Row(
        "qwen3.5-27b", Case(8000, *SHALLOW, {"pp512": 3300, "pp4096": 9000, "tg64": 13.5}),
        (fitted("-p 4096 -n 0 -r 1"), fitted("-p 512 -n 64 -r 2", large=False)),
    ),
    "27b-8000-deep": Row(
        "qwen3.5-27b", Case(8000, *DEEP, {"tg32 @ d16384": 12}), (fitted(ANSWER_DEEP, large=False),)
    ),
    "122b-8000": Row(
        "qwen3.5-122b-a10b", Case(8000, *SHALLOW, {"pp512": 850, "pp4096": 5600, "tg64": 70}),
        (fitted(PROMPTS), left_to_cpu(20, REPACKED)), "--layers 24",
    ),
    "122b-8000-deep": Row(
        "qwen3.5-122b-a10b", Case(8000, *DEEP, {"tg32 @ d16384": 62}), (left_to_cpu(20, REPACKED_DEEP),),
        "--layers 24",
    ),
    "gemma4-26b-6000": Row(
        "gemma4-26b-a4b", Case(6000, *SHALLOW, {}), (fitted(PROMPTS), fitted(f"{ANSWER} --no-host 1", large=False))
    ),
    "gemma4-26b-6000-deep": Row(
        "gemma4-26b-a4b", Case(6000, *DEEP, {}), (fitted(f"{ANSWER_DEEP} --no-host 1", large=False),)
    ),
    "gemma4-26b-vram": Row("gemma4-26b-a4b", Case(26000, *SHALLOW, {}), (in_vram("-p 4096 -n 64 -r 2"),)),
    "gemma4-31b-8000": Row(
        "gemma4-31b", Case(8000, *SHALLOW, {}), (fitted(PROMPTS), fitted(f"{ANSWER} --no-host 1", large=False))
    ),
    "minimax-m2-12000": Row(
        "minimax-m2", Case(12000, *SHALLOW, {}), (fitted(PROMPTS), fitted(f"{ANSWER} --no-host 1", large=False)),
        "--layers 16",
    ),
    "flash-next-8000": Row(
        "qwen3.8-flash-next", Case(8000, *SHALLOW, {}),
        (fitted(PROMPTS), fitted(f"{ANSWER} --no-host 1", large=False)), "--layers 12 --ngram-base 2000000",
    ),
    "flash-next-whole-8000": Row(
        "qwen3.8-flash-next", Case(8000, *SHALLOW, {}),
        (fitted(PROMPTS), fitted(f"{ONCE} --no-host 1", large=False)), "--layers 12",
    ),
    "command-r-8000": Row(
        "command-r-35b", Case(8000, *SHALLOW, {}), (fitted(PROMPTS), fitted(f"{ONCE} --no-host 1", large=False))
    ),
    "command-r-8000-answers": Row(
        "command-r-35b", Case(8000, "-c 512 --prompt 64 --generated 256 --no-validate", "-p 0 -n 64 -r 3", {}),
        (fitted(f"{ONCE} --no-host 1", large=False),),
    ),
    **{
        f"8b-{kind}-vram": Row("llama3-8b", IN_VRAM, (in_vram("-p 4096 -n 64 -r 2"),), f"--quant {kind}")
        for kind in KINDS
    },
    **{
        f"32b-{kind}-8000": Row(
            "qwen3-32b", Case(8000, *SHALLOW, {}), (fitted(PROMPTS), fitted(f"{ONCE} --no-host 1", large=False)),
            f"--quant {kind}",
        )
        for kind in ("iq3_s", "ud-q2_k_xl")
    },
    "122b-ud-8000": Row(
        "qwen3.5-122b-a10b", Case(8000, *SHALLOW, {}),
        (fitted(PROMPTS), fitted(f"{ANSWER} --no-host 1", large=False)), "--layers 24 --quant ud-q2_k_xl",
    ),
    **{
        f"8b-cells-{kind}": Row("llama3-8b", Case(6000, *(f"{words} -ctk q8_0 -ctv {kind}" for words in CELLS), {}))
        for kind in ("q8_0", "q4_0")
    },
}  # fmt: skip


class Clock:
    """What is left of the time for all."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()


def main() -> int:
    """Run the rows that were asked for, in the order of their models, while the time lasts."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rows", nargs="+", choices=ROWS, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where model files are, or are written")
    parser.add_argument("--generator", type=Path, help="program that writes them")
    parser.add_argument("--profiled", action="store_true", help="the machine's profile is of these models already")
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's program")
    parser.add_argument("--ik-bench", type=Path, help="ik_llama.cpp's")
    parser.add_argument("--seconds", type=float, default=3600.0, help="time for all; what is left then is skipped")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file; earlier rows in it are kept")
    args = parser.parse_args()
    programs = {"llama.cpp": args.llama_bench, "ik_llama.cpp": args.ik_bench}
    results = json.loads(args.output.read_text()) if args.output.exists() else {}
    clock = Clock(args.seconds)
    for _, names in groupby(args.rows, key=lambda name: ROWS[name].file):
        if clock.left <= 0:
            print(f"skipped, the time is up: {', '.join(names)}", flush=True)
            continue
        names = list(names)
        with written(ROWS[names[0]], args.folder, args.generator) as file:
            words = ["pshard-profile", "--quick", "-m", str(file)]
            if not args.profiled and run(words, clock.left).returncode:
                return 2
            for name in names:
                for record in run_row(file, name, programs, clock):
                    results[name] = record
                    args.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


@contextmanager
def written(row: Row, folder: Path, generator: Path | None) -> Iterator[Path]:
    """The model's file; one that is written here is deleted at the end. Raises SystemExit when that fails."""
    file = folder / row.file
    if generator is None or file.exists():
        yield file
        return
    try:
        words = [sys.executable, str(generator), row.model, str(file), *row.made.split()]
        if subprocess.run(words, stdout=subprocess.DEVNULL).returncode:
            raise SystemExit(f"{shlex.join(words)} failed")
        yield file
    finally:
        file.unlink(missing_ok=True)


def run_row(file: Path, name: str, programs: dict[str, Path | None], clock: Clock) -> Iterator[dict[str, Any]]:
    """Ours, then the other programs; yields the record after each."""
    row = ROWS[name]
    record: dict[str, Any] = {"model": row.model, "made": row.made, "peers": {}, "skipped": []}
    if clock.left > 0:
        record |= run_case(file, name, row.case, seconds=clock.left)
    else:
        record["skipped"].append("pshard")
    yield record
    for peer in row.peers:
        program = programs[peer.program]
        if program is None:
            continue
        if clock.left > 0:
            record["peers"] |= run_peer(file, row.case.vram, peer, program, clock.left)
        else:
            record["skipped"].append(f"{peer.program} {peer.flags}")
        yield record
    if record["skipped"]:
        print(f"{name}: skipped, the time is up: {'; '.join(record['skipped'])}", flush=True)


def run_peer(file: Path, vram: int, peer: Peer, program: Path, seconds: float) -> dict[str, Any]:
    """Another program's tests, by their names; none when it fails."""
    words = [str(program), "-m", str(file), *peer.flags.split(), "-t", str(len(os.sched_getaffinity(0)))]
    if "-ngl" not in words:  # it fits itself into what this leaves
        words += ["-fitt", str(free_mib() - vram)]
    with peak_memory() as peak:
        try:
            done = subprocess.run([*words, "-o", "json"], capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess(words, 124, "[]", "the time is up")
    if done.returncode:
        print(f"{shlex.join(words)} failed: {done.stderr[-1500:]}", file=sys.stderr, flush=True)
        return {}
    found, flags = {}, " ".join(words[1:]).replace(str(file), file.name)
    for made in json.loads(done.stdout):
        test = f"{peer.program} {name_test(made)}{', repacked' if '-rtr' in words else ''}"
        found[test] = {"avg_ts": made["avg_ts"], "stddev_ts": made["stddev_ts"], "peak_mib": peak[0], "flags": flags}
        print(f"{test}: {made['avg_ts']:.4g} tok/s; peak {peak[0]} MiB of {vram}", flush=True)
    return found


def name_test(made: dict[str, Any]) -> str:
    """A row of a llama-bench's JSON as our tests are named. ik_llama.cpp times an answer after a prompt as both, with
    the answer's rate; llama.cpp has a depth."""
    prompt, answer = made["n_prompt"], made["n_gen"]
    depth = prompt if prompt and answer else made.get("n_depth", 0)
    return (f"tg{answer}" if answer else f"pp{prompt}") + (f" @ d{depth}" if depth else "")


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """MiB that are taken of the first GPU's memory meanwhile, at most: one number, settled at the end."""
    before, peak, over = free_mib(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(EVERY):
            peak[0] = max(peak[0], before - free_mib())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    raise SystemExit(main())
