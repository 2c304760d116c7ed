"""llama.cpp's server with a model's multi-token head under a budget, by number of drafts; beside it stands
`pshard bench --spec mtp`.

    python benchmarks/drafts_beside_llama_cpp.py -m qwen3.5-27b.gguf --vram 8000 --llama-server llama-server -o out.json

The server fits itself into the budget. Acceptance is made up by its own flag, with the same chances as ours: the drafts
and the steps are real, the text is not. Answers of 128 tokens behind 32; the median of three, the first not counted.
"""

import argparse
import json
import os
import shlex
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from beside_llama_cpp import free_mib
from mixtures import peak_memory
from serve_load import free_port, running

from pshard.errors import UserError

PROMPT, ANSWER, ROUNDS = 32, 128, 3
LOADS = 150.0  # seconds that a server may take to load


def main() -> int:
    """Start a server for each number of drafts, and keep what each reaches."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--vram", type=int, required=True, help="MiB")
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--drafts", default="0,3,2,5,1", help="numbers of drafts, the important first")
    parser.add_argument("--rates", default=".8,.64,.512,.41,.328", help="chances of the first, first two, ... drafts")
    parser.add_argument("--seconds", type=float, default=600.0, help="time for all; what is left then is skipped")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file; earlier budgets in it are kept")
    args = parser.parse_args()
    end, rates = time.monotonic() + args.seconds, args.rates.split(",")
    found = json.loads(args.output.read_text()) if args.output.exists() else []
    for drafts in map(int, args.drafts.split(",")):
        words = [str(args.llama_server), "-m", str(args.model), "-c", "4608", "-np", "1", "-fa", "on", "-lm", "none"]
        words += ["-fitt", str(free_mib() - args.vram), "-t", str(len(os.sched_getaffinity(0)))]
        if drafts:
            words += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(drafts)]
            words += ["--spec-synth-rates", ",".join(rates[:drafts])]
        if end - time.monotonic() < 20:
            print(f"{drafts} drafts: skipped, the time is up", flush=True)
            continue
        made = run_server(words, end) | {"vram": args.vram, "drafts": drafts, "model": args.model.name}
        found.append(made | {"date": datetime.now(UTC).isoformat(timespec="seconds")})
        args.output.write_text(json.dumps(found, indent=1) + "\n")
        reached = f"{made['tok_s']} tok/s" if "tok_s" in made else made["error"]
        print(f"{drafts} drafts: {reached}, {made['peak_mib']} MiB", flush=True)
    return 0


def run_server(words: list[str], end: float) -> dict[str, Any]:
    """Answers of one server: their rates by its own clock, or why there are none. Its lines go to stderr."""
    port = free_port()
    words = [*words, "--port", str(port)]
    with peak_memory() as peak:
        try:
            with running(words, f"http://127.0.0.1:{port}", min(end - time.monotonic(), LOADS)) as address:
                rates = [ask(address) for _ in range(ROUNDS + 1)][1:]
            made: dict[str, Any] = {"tok_s": round(median(rates), 2), "samples": rates}
        except (UserError, OSError, ValueError, KeyError) as error:
            made = {"error": str(error)}
    return made | {"command": shlex.join(words), "peak_mib": peak[0]}


def ask(address: str) -> float:
    """Tokens a second of one answer."""
    asked = {"prompt": list(range(100, 100 + PROMPT)), "n_predict": ANSWER, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{address}/completion",
        json.dumps(asked | {"cache_prompt": False}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return float(json.loads(answer.read())["timings"]["predicted_per_second"])


if __name__ == "__main__":
    raise SystemExit(main())
