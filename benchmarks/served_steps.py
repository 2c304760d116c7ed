"""What a server adds to its engine's steps: the time from one step to the next with N streams of text served over HTTP,
beside that of the same batch on the same engine without a server.

    python benchmarks/served_steps.py -m examples/demo.gguf -c 8192 --streams 16 -o served.json

With --idle MS the engine is made up: a step is so long outside Python, as on a GPU, and leaves the cores to the server.
Both take turns, so that what else the machine does falls on both. The client is another process, which shares the
cores. `loop_ms` is what the event loop computes a step (processor time, the kernel's sending included).
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

from scheduler_overhead import IdleMachine

from pshard.commands.everyday.cli_serve import make_parser, read_request
from pshard.runtime.texts.text import Piece
from pshard.server.life.load_model import ModelLoader
from pshard.server.life.serve_model import describe_model
from pshard.server.life.web_server import WebServer, open_port
from pshard.server.routes.make_app import make_app
from pshard.server.scheduling.promises import Promises
from pshard.server.scheduling.served_machine import Machine
from pshard.server.thread.engine_thread import EngineThread
from pshard.server.thread.keep_machine import Loader
from pshard.session.open_plan import open_plan, settle_plan

PROMPT, WARM = 32, 50  # tokens of a prompt; steps that are not counted

CLIENT = """
import json, selectors, socket, sys
port, streams, prompt, answer = map(int, sys.argv[1:5])
chooser, chat = selectors.DefaultSelector(), sys.argv[5] == "chat"
for i in range(streams):
    body = {"max_tokens": answer, "temperature": 0, "stream": True, "ignore_eos": True}
    words = " ".join(str(i * 7919 + n) for n in range(prompt // 4))
    body |= {"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words}
    data, path = json.dumps(body), "/v1/chat/completions" if chat else "/v1/completions"
    head = f"POST {path} HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\nContent-Length: {len(data)}"
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall((head + "\\r\\n\\r\\n" + data).encode())
    chooser.register(connection, selectors.EVENT_READ)
while chooser.get_map():
    for key, _ in chooser.select():
        if not key.fileobj.recv(1 << 16):
            chooser.unregister(key.fileobj)
"""


def time_direct(machine: Machine, streams: int, steps: int) -> list[float]:
    """Milliseconds from step to step, without a server."""
    pool = machine.pool
    machine.keep_tier(next(tier for tier in machine.facts.tiers if tier >= streams))
    texts = [pool.open([1 + i] * PROMPT, f"direct{time.monotonic()}") for i in range(streams)]
    for i, text in enumerate(texts):
        pool.step([Piece(text, (1 + i,) * PROMPT, "none")])
    tokens, starts = [1] * streams, []
    for _ in range(WARM + steps):
        starts.append(time.perf_counter())
        rows = pool.step([Piece(text, (token,), best=1) for text, token in zip(texts, tokens)])
        tokens = [int(row[0].ids[0]) for row in rows]
    for text in texts:
        pool.close(text, keep=False)
    return [1e3 * (b - a) for a, b in pairwise(starts[WARM:])]


@dataclass(frozen=True)
class IdleLoader:
    """Loads made-up machines, whose steps wait so many seconds."""

    streams: int
    vocab: int
    seconds: float
    budgets: tuple[int, ...] = ()

    def look_again(self, budget: int, plan: bool, stopped: Callable[[], bool]) -> None:
        """There is nothing to plan."""

    def load(self, budget: int | None) -> IdleMachine:
        """A machine."""
        return IdleMachine(self.streams, self.vocab, self.seconds)


class Served:
    """A server in this process; its loop is on the main thread's side."""

    def __init__(self, loader: Loader, model: object) -> None:
        self.thread = EngineThread(loader, Promises(gap=10.0))
        self.app, self.port = make_app(self.thread, model), 0  # type: ignore[arg-type]
        self._web: WebServer | None = None
        self._runner = threading.Thread(target=self._run)
        self._ready = threading.Event()

    def _run(self) -> None:
        with open_port("127.0.0.1", 0) as listener:
            self.port = listener.getsockname()[1]
            self._web = WebServer(self.app, 1.0, lambda: None)
            self._web.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
            self._ready.set()
            self._web.run(sockets=[listener])

    @contextmanager
    def running(self) -> Iterator["Served"]:
        """While the block runs."""
        self.thread.start()
        self._runner.start()
        self._ready.wait()
        while self.thread.snapshot().state != "ready":
            time.sleep(0.05)
        try:
            yield self
        finally:
            assert self._web is not None
            self._web.stop()
            self._runner.join()
            self.thread.drain(0.0)
            self.thread.join()

    def time_streams(self, streams: int, steps: int, api: str) -> tuple[list[float], list[float], float]:
        """Milliseconds from step to step, and of the machine's part of each; of the loop's processor time a step."""
        before, clock = self.thread.snapshot().counters.steps, time.pthread_getcpuclockid(self._runner.ident or 0)
        used = time.clock_gettime(clock)
        words = [str(n) for n in (self.port, streams, PROMPT, steps + 2 * WARM)]
        subprocess.run([sys.executable, "-c", CLIENT, *words, api], check=True)
        now = self.thread.snapshot()
        full = [step for step in now.steps if step.decodes == streams and not step.prompts][-steps:]
        gaps = [1e3 * (b.start - a.start) for a, b in pairwise(full) if b.number == a.number + 1]
        loop = 1e3 * (time.clock_gettime(clock) - used) / (now.counters.steps - before)
        return gaps, [1e3 * step.seconds for step in full], loop


def main() -> int:
    """Measure and print; with -o also write JSON."""
    parser = make_parser()
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400, help="of a turn, at most 500 (400)")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--api", choices=("completions", "chat"), default="completions")
    parser.add_argument("--idle", type=float, metavar="MS", help="steps of a made-up machine, which only wait")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    args.parallel = args.streams
    request = read_request(args)
    run, _ = settle_plan(request.run)
    opened = open_plan(run)
    direct, served, inside, loops = [], [], [], []
    loader: Loader = ModelLoader(opened, run, request.how, 10.0)
    if args.idle:
        loader = IdleLoader(args.streams, opened.file.spec.config.vocab, args.idle / 1e3)
    machine = loader.load(None)
    with Served(loader, describe_model(opened, run.model, None)).running() as server:
        for _ in range(args.turns):
            direct += time_direct(machine, args.streams, args.steps)
            gaps, steps, loop = server.time_streams(args.streams, args.steps, args.api)
            served += gaps
            inside += steps
            loops.append(loop)
    machine.close()
    found = {"direct_ms": _spread(direct), "served_ms": _spread(served), "in_machine_ms": _spread(inside)}
    found["loop_ms"] = {"p50": round(median(loops), 3)}
    found["added_ms"] = {key: round(found["served_ms"][key] - found["direct_ms"][key], 3) for key in ("p10", "p50")}
    for name, spread in found.items():
        print(f"{name:14} " + "  ".join(f"{key} {value:.3f}" for key, value in spread.items()))
    if args.output:
        named = ("streams", "steps", "turns", "api", "idle")
        asked = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "cores": os.cpu_count()}
        asked |= {"model": Path(args.model).name, **{name: getattr(args, name) for name in named}}
        args.output.write_text(json.dumps(asked | found, indent=1) + "\n")
    return 0


def _spread(values: list[float]) -> dict[str, float]:
    tens = quantiles(values, n=10)
    return {"p10": round(tens[0], 3), "p50": round(tens[4], 3), "p90": round(tens[8], 3)}


if __name__ == "__main__":
    raise SystemExit(main())
