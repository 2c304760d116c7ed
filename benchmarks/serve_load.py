"""A server under load, beside what its engine reaches alone under the same plan, and beside llama.cpp's server.

    python benchmarks/serve_load.py -m qwen3-32b-q4_0.gguf --vram 12000 --seconds 1500 -o serve.json
    python benchmarks/serve_load.py -m ... --llama-server llama-server --llama-clients 16 -o serve.json

Parts, each begun only while there is time, each written as soon as it is known: `pshard serve` with closed loops of
clients; a long prompt that comes among 8 who decode; a prefix that two prompts share; `pshard-bench -npl` at the
same widths under the same plan; llama-server with the same loops, in two ways. The result has ratios: ours over -npl
(goal 0.95), ours over llama-server (2 at 16 clients), longest gap over the promise (1.2), the long prompt's first token
over the same alone (1.5), the first token behind a shared prefix over that of a short prompt, a step (2).
"""

import argparse
import asyncio
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from pshard.errors import UserError
from pshard.jsonio import from_json, to_json, write_json_atomically
from pshard.registries.profile_store import load_profile
from pshard.session.serve_bench.arrivals import Pattern
from pshard.session.serve_bench.drive import Bounds
from pshard.session.serve_bench.lengths import Lengths, Wanted
from pshard.session.serve_bench.read_reply import Answer, read_reply
from pshard.session.serve_bench.run_loads import LoadSetting, run_loads
from pshard.session.serve_bench.sum_up import gaps_ms
from pshard.session.serve_bench.target import Target, find_target, parse_address
from pshard.session.serve_bench.timed_exchange import exchange, write_request
from pshard.session.serve_bench.write_prompts import Misbehaviour, SharedPrefix, write_requests
from pshard.session.this_machine import environment_of
from pshard.times.server_load import LoadPoint, ServerLoad, spread_of

PROGRAM = [sys.executable, "-m", "pshard.commands.program.one_program"]
DECODERS = 8  # who decode while a long prompt comes
LOAD = 16  # requests that run at once on average, which the plan is made for
ENOUGH = 64  # requests of a loop
WARM_TOKENS, WARM_SEED = 8, 1000  # of a loop that does not count
PART = 4  # the engine alone decodes one of so many tokens of an answer, the first: the shallowest, so the fastest
GOALS = {
    "npl": 0.95,
    "llama_server_16": 2.0,
    "llama_server_copies_16": 2.0,
    "long_gap": 1.2,
    "long_first_token": 1.5,
    "prefix_steps": 2.0,
}
LLAMA_WAYS = {  # as it comes, and with what is outside VRAM copied to the GPU for batches below its usual 32 too
    "llama_server": {},
    "llama_server_copies": {"GGML_OP_OFFLOAD_MIN_BATCH": "8"},
}
SHOWN = {"serve": "pshard", "llama_server": "llama-server", "llama_server_copies": "llama-server, best setting"}
KEY = os.environ.get("PSHARD_API_KEY", "")  # which pshard-serve reads too
NONE = SharedPrefix()
POLITE = Misbehaviour()


class Record:
    """What was found so far, written after every part; and the time that is left."""

    def __init__(self, path: Path, seconds: float, header: dict[str, Any]) -> None:
        self.path, self.end = path, time.monotonic() + seconds
        self.data: dict[str, Any] = {**header, "goals": GOALS, "ratios": {}, "left_out": []}

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def note(self, name: str, value: Any) -> None:
        """Add a part, and the ratios that follow from it."""
        self.data[name] = to_json(value)
        self.data["ratios"] = find_ratios(self.data)
        write_json_atomically(self.path, self.data)
        print(f"{self.left:6.0f} s left  {name}", file=sys.stderr, flush=True)

    def run(self, name: str, needed: float, measure: Callable[[float], Any]) -> None:
        """Measure a part in the seconds that are left, unless they are fewer than it needs; one that fails is noted,
        and others go on."""
        if self.left < needed:
            self.data["left_out"].append(f"{name}: {self.left:.0f} s were left, it needs {needed:.0f}")
            return
        try:
            self.note(name, measure(self.left))
        except (UserError, OSError, subprocess.SubprocessError, RuntimeError) as error:
            self.data["left_out"].append(f"{name}: {error}")
            print(f"{name} failed: {error}", file=sys.stderr, flush=True)


def main() -> int:
    """Measure and write; exit code 1 when a part failed or was left out."""
    args = make_parser().parse_args()
    if args.draw:
        draw_loads_of(json.loads(args.output.read_text()), args.draw)
        return 0
    command = tell_command(["serve_load.py", *sys.argv[1:]], args)
    header = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "command": command}
    header |= {"promise_ms": args.max_gap, "prompt": args.prompt, "answer": args.answer}
    record = Record(args.output, args.seconds, header)
    with tempfile.TemporaryDirectory() as folder:
        registry = args.registry or Path(folder) / "plan.json"
        where = ["-m", str(args.model), "--vram", str(args.vram), "--registry", str(registry)]
        slots = max(*args.clients, DECODERS + 1)
        shape = ["-c", str(context_of(args)), "-np", str(slots)]
        if not registry.exists():
            # with a tier for each width: else 4 clients would run under the tier of all slots
            load = ["--serve", "--concurrency", str(min(LOAD, slots))]
            load += ["--prompt", str(args.prompt), "--generated", str(args.answer)]
            words = [*PROGRAM, "plan", *where, *shape, *load, *shlex.split(args.plan_flags)]
            record.run(
                "plan", 0.0, lambda left: {"command": tell_command(words, args), "seconds": run_program(words, left)}
            )
        record.run("environment", 0.0, lambda left: dict(environment_of(load_profile())))
        measure_ours(record, args, [*where, *shape])
        record.run("npl", 20.0, partial(measure_npl, where, args))
        if args.llama_server:
            for n in args.llama_clients:
                for name, more in LLAMA_WAYS.items():
                    record.run(f"{name}_{n}", 40.0, partial(measure_llama, n, args, more))
    record.note("seconds", args.seconds - record.left)
    print(json.dumps({"ratios": record.data["ratios"], "left_out": record.data["left_out"]}, indent=1))
    return 1 if record.data["left_out"] else 0


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--vram", type=int, required=True, help="MiB")
    parser.add_argument("--registry", type=Path, help="plans that are there; without one it plans")
    parser.add_argument("--plan-flags", default="", help="more words for pshard-plan, in one string")
    parser.add_argument("--serve-flags", default="", help="more words for pshard-serve, in one string")
    parser.add_argument(
        "--clients", type=parse_numbers, default=(1, 16, 4, 64), help="closed loops, the important first"
    )
    parser.add_argument("--rounds", type=int, default=2, help=f"requests of each client (2); {ENOUGH} are enough")
    parser.add_argument("-p", "--prompt", type=int, default=512)
    parser.add_argument("-n", "--answer", type=int, default=128)
    parser.add_argument("--long", type=int, default=16384, help="the prompt that comes among decoders; 0: none")
    parser.add_argument("--prefix", type=int, default=4096, help="the prefix that is shared; 0: none")
    parser.add_argument("--max-gap", type=float, default=1000.0, help="the promise, ms")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's program")
    parser.add_argument("--llama-clients", type=parse_numbers, default=(16,))
    parser.add_argument("--llama-flags", default="-fa on", help="words for llama-server, in one string")
    parser.add_argument("--seconds", type=float, default=1500.0, help="for all of it (1500)")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--draw", type=Path, help="measure nothing, draw what --output has: a PNG")
    return parser


def tell_command(words: list[str], args: argparse.Namespace) -> str:
    """A command as others would write it."""
    return shlex.join(words).replace(shlex.join(PROGRAM), "pshard").replace(str(args.model), args.model.name)


def parse_numbers(text: str) -> tuple[int, ...]:
    """ "1,16" -> (1, 16)."""
    return tuple(int(n) for n in text.split(","))


def context_of(args: argparse.Namespace) -> int:
    """Cells of all texts together: every client's, and the long prompt beside its decoders."""
    blocks = -(-(args.prompt + args.answer) // 64) * 64
    decoders = DECODERS * (blocks + 3 * args.answer)
    return max(blocks * max(args.clients), args.long + 1024 + decoders, 2 * args.prefix + 1024)


def measure_ours(record: Record, args: argparse.Namespace, where: list[str]) -> None:
    """Start our server, and put it through its parts."""
    port = free_port()
    words = [*PROGRAM, "serve", *where, "--port", str(port), "--max-gap", f"{args.max_gap:g}"]
    words += shlex.split(args.serve_flags)
    try:
        with running(words, f"http://127.0.0.1:{port}", record.left) as url:
            record.note("serve", {"command": tell_command(words, args)})
            for n in args.clients:
                record.run(f"serve_{n}", 30.0, partial(measure_loop, url, n, args))
            if args.long:
                record.run("long", 60.0, lambda left: asyncio.run(measure_long(url, args, left)))
            if args.prefix:
                record.run("prefix", 20.0, lambda left: asyncio.run(measure_prefix(url, args, left)))
    except (UserError, OSError) as error:
        record.data["left_out"].append(f"serve: {error}")
        print(f"serve failed: {error}", file=sys.stderr, flush=True)


def measure_loop(url: str, clients: int, args: argparse.Namespace, left: float) -> LoadPoint:
    """A closed loop of so many clients, after one of short answers: kernels are compiled and graphs captured for its
    width. Raises UserError when a request fails."""
    loop = LoadSetting(
        parse_address(url), name="", key=KEY, model=None, api="completions",
        prompts=Lengths("fixed", args.prompt), answers=Lengths("fixed", args.answer), lines=[], prefix=NONE, odd=POLITE,
        requests=max(3, clients, min(ENOUGH, args.rounds * clients)), warm_up=0, bounds=Bounds(left, left),
        promise={"gap": args.max_gap}, seed=clients, command="",
    )  # fmt: skip
    short = Lengths("fixed", min(args.answer, WARM_TOKENS))
    for setting in (replace(loop, answers=short, requests=clients, seed=WARM_SEED + clients), loop):
        point = run_loads(setting, [Pattern(clients=clients)], print_note, lambda point: None).points[0]
        if point.errors:
            raise UserError(f"requests failed: {point.errors}")
    return point


async def measure_long(url: str, args: argparse.Namespace, left: float) -> dict[str, Any]:
    """Long prompts alone, of which the second counts, then one like them among decoders: first tokens, and all gaps of
    those who decode while it is computed. Raises UserError when a request fails."""
    target = await find_target(parse_address(url), KEY, None, "completions")
    long = Wanted(args.long, 8)
    await ask(target, long, "first", left)  # what is compiled for its tiers
    alone = await ask(target, long, "alone", left)
    decoding = [
        asyncio.create_task(ask(target, Wanted(64, 3 * args.answer), f"decoder {i}", left)) for i in range(DECODERS)
    ]
    await asyncio.sleep(min(10.0, first_ms(alone) / 1e3))  # their short prompts take less than the long one
    among = await ask(target, long, "among", left)
    decoders = await asyncio.gather(*decoding)
    gaps = [(gap, *ends) for answer in decoders for gap, ends in zip(gaps_ms(answer), pairwise(answer.texts))]
    meanwhile = [gap for gap, start, end in gaps if end > among.began and start < among.texts[0]]
    if not meanwhile:
        raise UserError("no token of the decoders fell into the long prompt's time: give longer answers (-n)")
    return {
        "tokens": args.long,
        "first_token_alone_ms": first_ms(alone),
        "first_token_among_ms": first_ms(among),
        "gap_meanwhile_ms": spread_of(meanwhile),
        "gap_before_ms": spread_of([gap for gap, _, end in gaps if end < among.began]),
    }


async def measure_prefix(url: str, args: argparse.Namespace, left: float) -> dict[str, Any]:
    """First tokens of a prompt, of another one that begins alike, and of a short one, which takes a step. Each of the
    latter two thrice, the middle counts."""
    target = await find_target(parse_address(url), KEY, None, "completions")
    shared = SharedPrefix(args.prefix)
    wanted = Wanted(args.prefix + 32, 4)
    cold = await ask(target, wanted, "cold", left, shared)
    warm = [await ask(target, wanted, f"warm {i}", left, shared) for i in range(3)]
    short = [await ask(target, Wanted(32, 4), f"short {i}", left) for i in range(3)]
    return {
        "tokens": args.prefix,
        "cached": [answer.cached for answer in warm],
        "first_token_cold_ms": first_ms(cold),
        "first_token_warm_ms": sorted(map(first_ms, warm))[1],
        "first_token_short_ms": sorted(map(first_ms, short))[1],
    }


async def ask(target: Target, wanted: Wanted, part: str, timeout: float, prefix: SharedPrefix = NONE) -> Answer:
    """One request of its own. Raises UserError when it fails."""
    planned = write_requests(target, [wanted], prefix, POLITE, 7, part)[0]
    answer = read_reply(await exchange(target.address, planned.message, timeout))
    if answer.failure or not answer.texts:
        raise UserError(f"the request {part} failed: {answer.failure} {answer.said}")
    return answer


def first_ms(answer: Answer) -> float:
    """Milliseconds to the first text."""
    return (answer.texts[0] - answer.began) / 1e6


def measure_npl(where: list[str], args: argparse.Namespace, left: float) -> dict[str, dict[str, float]]:
    """The same prompts by the engine alone, and a part of the answers, all widths in one run: of each the seconds of
    prompts and whole answers, and tokens of answers per second over both.

    Raises RuntimeError when the program fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bench.json"
        tests = ["-p", str(args.prompt), "-n", str(args.answer // PART)]
        tests += ["-npl", ",".join(map(str, args.clients)), "-r", "1"]
        run_program([*PROGRAM, "bench", *where, *tests, "-o", "batched", "-of", str(out)], left)
        rows = json.loads(out.read_text())
    return {str(n): read_npl(rows, n, args.answer) for n in args.clients}


def read_npl(rows: list[dict[str, Any]], n: int, answer: int) -> dict[str, float]:
    """The two tests of a width in the batched table: seconds of its prompts and of its whole answers, and the rate."""
    mine = [row for row in rows if row["n_sequences"] == n]
    prompt = next(row["avg_ns"] for row in mine if row["n_prompt"] and not row["n_gen"]) / 1e9
    decode = next(row["avg_ns"] / row["n_gen"] for row in mine if row["n_gen"] and not row["n_prompt"]) * answer / 1e9
    return {"prompt_seconds": prompt, "decode_seconds": decode, "answer_rate": n * answer / (prompt + decode)}


def measure_llama(n: int, args: argparse.Namespace, environment: dict[str, str], left: float) -> LoadPoint:
    """The same loop on llama.cpp's server, which gets the budget as a margin below what is free."""
    from beside_llama_cpp import free_mib

    port = free_port()
    words = [str(args.llama_server), "-m", str(args.model), "--port", str(port), "-np", str(n)]
    words += ["-c", str(n * -(-(args.prompt + args.answer + 8) // 256) * 256), "-fitt", str(free_mib() - args.vram)]
    words += shlex.split(args.llama_flags)
    with running(words, f"http://127.0.0.1:{port}", left, environment) as url:
        return measure_loop(url, n, args, left)


def draw_loads_of(data: dict[str, Any], path: Path) -> None:
    """A figure of the closed loops: times that clients waited, and rates, over how many they were."""
    from pshard.reports.figures.server_loads import draw_loads, group_loads

    draw_loads("clients", group_loads(read_loads(data))["clients"]).savefig(path, dpi=110)


def read_loads(data: dict[str, Any]) -> list[ServerLoad]:
    """The closed loops of each server, as they were measured."""
    lengths = {"prompts": str(data["prompt"]), "answers": str(data["answer"]), "shared_prefix": "", "seed": 0}
    about = {"date": data["date"], "command": data["command"], "environment": ()}
    promise, loads = (("gap", data["promise_ms"]),), []
    for kind, server in SHOWN.items():
        found = [value for name, value in data.items() if re.fullmatch(rf"{kind}_\d+", name)]
        points = tuple(from_json(LoadPoint, value) for value in found)
        if points:
            loads.append(ServerLoad(server, "", "completions", promise=promise, points=points, **lengths, **about))
    return loads


def find_ratios(data: dict[str, Any]) -> dict[str, float]:
    """What is compared, of what is known so far."""
    ratios = {}
    for n, point in data.get("npl", {}).items():
        if f"serve_{n}" in data:
            ratios[f"npl_{n}"] = data[f"serve_{n}"]["answer_rate"] / point["answer_rate"]
    for name, point in data.items():
        kind, _, n = name.rpartition("_")
        if kind in LLAMA_WAYS and f"serve_{n}" in data:
            ratios[name] = data[f"serve_{n}"]["answer_rate"] / point["answer_rate"]
        if kind == "serve" and point["gap"]:
            ratios[f"gap_{n}"] = point["gap"]["p99"] / data["promise_ms"]
    if long := data.get("long"):
        ratios["long_gap"] = long["gap_meanwhile_ms"]["most"] / data["promise_ms"]
        ratios["long_first_token"] = long["first_token_among_ms"] / long["first_token_alone_ms"]
    if prefix := data.get("prefix"):
        ratios["prefix_steps"] = prefix["first_token_warm_ms"] / prefix["first_token_short_ms"]
    return {name: round(value, 4) for name, value in ratios.items()}


@contextmanager
def running(words: list[str], url: str, left: float, environment: dict[str, str] | None = None) -> Iterator[str]:
    """A server until the block ends; its lines go to stderr. Raises UserError when it is not ready in time.
    environment: what it has beside ours."""
    process = subprocess.Popen(words, stdout=sys.stderr, env=os.environ | (environment or {}))
    try:
        until = time.monotonic() + left
        while asyncio.run(health_of(url)) != 200:
            if process.poll() is not None:
                raise UserError(f"{words[0]} ended with {process.returncode}")
            if time.monotonic() > until:
                raise UserError(f"{words[0]} was not ready in {left:.0f} s")
            time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def health_of(url: str) -> int:
    """The status of /health; 0 while nobody listens."""
    address = parse_address(url)
    return (await exchange(address, write_request(address, "GET", "/health", {}, b""), 5.0)).status


def run_program(words: list[str], left: float) -> float:
    """Run to the end; seconds that it took. Raises RuntimeError with its last lines when it fails or takes too long."""
    began = time.monotonic()
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=max(1.0, left))
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{words[0]} took more than the {left:.0f} s that were left") from None
    if done.returncode:
        raise RuntimeError(f"{words[0]} ended with {done.returncode}: {done.stderr[-600:].strip()}")
    return time.monotonic() - began


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def print_note(line: str) -> None:
    """On stderr."""
    print(f"note: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
