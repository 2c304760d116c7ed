"""The README's figure: our plan beside llama.cpp's own fit, measured one after the other on the machine at hand.

    python benchmarks/beside_llama_cpp.py -m qwen3-32b-q4_0.gguf --vram 12000,6000 --llama-bench llama-bench -o new.json
    python benchmarks/beside_llama_cpp.py --draw benchmarks/results/h100-beside-llama-cpp.json

llama.cpp gets the budget as a margin below what is free (`-fitt`), flash attention, no mmap, and its better micro-batch
of 512 and 4096. Its command is kept with each of its measurements.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallel import run

from pshard.jsonio import to_json, write_text_atomically
from pshard.reports.compare_runs import compare_strategies
from pshard.reports.figures.speedup import draw_speedup
from pshard.reports.inputs import read_inputs
from pshard.session.this_machine import free_by_driver
from pshard.times.measurement import Measurement, summarise_samples

PEER = "llama.cpp fit"
PROMPT, ANSWER, CONTEXT = 4096, 64, 4352  # tokens
MICRO_BATCHES = (512, 4096)


def main() -> int:
    """Measure or draw."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("--vram", type=lambda text: [int(n) for n in text.split(",")], help="MiB, one run for each")
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's program")
    parser.add_argument("-r", "--repeats", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, help="JSON of the measurements")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw measurements instead, without the machine")
    parser.add_argument("--figures", type=Path, default=Path(__file__).parents[1] / "docs" / "figures")
    args = parser.parse_args()
    if args.draw is None:
        if not (args.model and args.vram and args.llama_bench and args.output):
            parser.error("give -m, --vram, --llama-bench and -o, or --draw FILE")
        found = [m for mib in args.vram for m in measure_both(args.model, mib, args.llama_bench, args.repeats)]
        write_text_atomically(args.output, json.dumps(to_json(found), indent=1) + "\n")
    comparisons = compare_strategies(read_inputs([args.draw or args.output]).measurements)
    wanted = [c for c in comparisons if c.quantity != "end to end"]
    args.figures.mkdir(parents=True, exist_ok=True)
    draw_speedup(wanted).savefig(args.figures / "speedup.png", dpi=110)
    print(args.figures / "speedup.png")
    return 0


def measure_both(model: Path, mib: int, program: Path, repeats: int) -> list[Measurement]:
    """Our measurements of one budget, and llama.cpp's. Raises SystemExit when a program fails."""
    own = measure_own(model, mib, repeats)
    return [*own, *measure_peer(model, mib, program, repeats, own[0])]


def measure_own(model: Path, mib: int, repeats: int) -> list[Measurement]:
    """Plan the workload of the figure, and bench it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bench.json"
        where = ["-m", str(model), "--vram", str(mib), "--registry", f"{folder}/plan.json"]
        plan = ["-c", str(CONTEXT), "--prompt", str(PROMPT), "--generated", "256"]
        tests = ["-p", str(PROMPT), "-n", str(ANSWER), "-r", str(repeats), "-of", str(out)]
        if run(["pshard-plan", *where, *plan]).returncode or run(["pshard-bench", *where, *tests]).returncode:
            raise SystemExit(2)
        return [m for m in read_inputs([out]).measurements if m.strategy == "ilp"]


def measure_peer(model: Path, mib: int, program: Path, repeats: int, own: Measurement) -> list[Measurement]:
    """llama.cpp's better micro-batch of each test, in the form of our own measurements."""
    best: dict[str, Measurement] = {}
    for tokens in MICRO_BATCHES:
        words = [str(program), "-m", str(model), "-p", str(PROMPT), "-n", str(ANSWER), "-r", str(repeats), "-fa", "on"]
        words += ["-ub", str(tokens), "-b", str(tokens), "-fitt", str(free_mib() - mib), "-lm", "none", "-o", "json"]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            print(f"{' '.join(words)} failed: {done.stderr[-1500:]}", file=sys.stderr)
            raise SystemExit(2)
        command = " ".join(words).replace(str(model), model.name).replace(str(program), program.name)
        for row in json.loads(done.stdout):
            m = convert_row(row, own, command)
            if m.test not in best or m.avg_ns < best[m.test].avg_ns:
                best[m.test] = m
    return list(best.values())


def convert_row(row: dict[str, Any], own: Measurement, command: str) -> Measurement:
    """A row of llama-bench's JSON beside one of ours: same model, budget and machine."""
    n_prompt, n_gen = row["n_prompt"], row["n_gen"]
    samples = summarise_samples(tuple(row["samples_ns"]), n_prompt + n_gen)
    return replace(
        own, test=f"pp{n_prompt}" if n_prompt else f"tg{n_gen}", n_prompt=n_prompt, n_gen=n_gen, strategy=PEER, tier=0,
        predicted_ts=None, peak_vram_mib=None, link_bytes=None, n_ubatch=row["n_ubatch"], kernels="llama.cpp",
        test_time=row["test_time"], command=command, timeline=(), stolen=0.0, **samples,
    )  # fmt: skip


def free_mib() -> int:
    """Free memory of the first GPU: llama.cpp is told what to leave of it."""
    free = free_by_driver()
    if 0 not in free:
        raise SystemExit("there is no NVIDIA GPU here; --draw FILE draws what was measured elsewhere")
    return free[0] >> 20


if __name__ == "__main__":
    raise SystemExit(main())
