"""Soak of a server: mixed requests for a long time, and whether anything is lost, mixed up or left behind.

    scripts/soak-server                  # an hour of the bundled demo model
    scripts/soak-server 10 -o soak.json  # ten minutes

Starts `pshard serve --deterministic` on this machine, so that answers can be compared, and asks it from many threads:
greedy answers whose text is known from before, streams, streams that are left in the middle, readers that are slow,
long prompts, equal prefixes, bodies that are no requests. At the end it waits until nothing runs, and compares blocks
and memory with what they were after warming up. The result is JSON; the exit code is 1 when anything was wrong.
"""

import argparse
import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

DEMO = Path(__file__).parents[1] / "examples" / "demo.gguf"
LINE = "the king of all England said that his brother would come to see him in the morning"
WORDS = LINE.split()
GAP_MS, TEXTS, ASKERS, WAIT = 1000.0, 16, 24, 120.0
LEAK_MIB = 256  # that the process may have more at the end: allocators keep some
BAD = (b"{", b"[]", b'{"prompt": 7}', b'{"prompt": "a", "max_tokens": -2}', b'{"prompt": "a", "n": 99999}')


class Asker:
    """Asks one server, and counts what came of it."""

    def __init__(self, url: str) -> None:
        self.url, self.count, self.wrong = url, Counter[str](), list[str]()
        self.lock = threading.Lock()
        self.known: dict[str, str] = {}

    def post(self, body: bytes) -> Any:
        """The answer to a request, open."""
        return urllib.request.urlopen(urllib.request.Request(self.url + "/v1/completions", body), timeout=WAIT)

    def complete(self, prompt: str, **more: Any) -> str:
        """A greedy answer."""
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, **more}
        with self.post(json.dumps(body).encode()) as answer:
            return json.load(answer)["choices"][0]["text"]

    def stream(self, prompt: str, rng: random.Random, leave: bool, slow: bool) -> str | None:
        """A streamed answer; None when it was left."""
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "stream": True}
        text = ""
        with self.post(json.dumps(body).encode()) as answer:
            for line in answer:
                if leave and rng.random() < 0.2:
                    return None
                if slow:
                    time.sleep(0.05)
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise ValueError(f"a stream ended with {chunk['error']}")
                    text += "".join(choice["text"] for choice in chunk["choices"])
        return text

    def ask_once(self, rng: random.Random) -> str:
        """One request of any kind; returns which."""
        kind = rng.choice(("answer", "answer", "stream", "leave", "slow", "long", "bad"))
        prompt = rng.choice(sorted(self.known))
        if kind == "bad":
            try:
                self.post(rng.choice(BAD)).close()
            except urllib.error.HTTPError as error:
                error.close()
                if 400 <= error.code < 500:
                    return kind
                raise
            raise ValueError("a body that is no request was taken")
        if kind == "long":
            self.complete(" ".join(rng.choices(WORDS, k=200)), max_tokens=2)
            return kind
        if kind == "answer":
            text: str | None = self.complete(prompt)
        else:
            text = self.stream(prompt, rng, kind == "leave", kind == "slow")
        if text is not None and text != self.known[prompt]:
            raise ValueError(f"{prompt!r} was answered with {text!r} instead of {self.known[prompt]!r}")
        return kind

    def run(self, seed: int, until: float) -> None:
        """Ask until then."""
        rng = random.Random(seed)
        while time.monotonic() < until:
            try:
                kind = self.ask_once(rng)
            except urllib.error.HTTPError as error:
                kind = f"status {error.code}"
                if error.code != 429:
                    self._note(f"{kind}: {error.read()[:200]!r}")
                error.close()
                time.sleep(0.5)
            except (OSError, ValueError, KeyError) as error:
                kind = "wrong"
                self._note(str(error))
            with self.lock:
                self.count[kind] += 1

    def _note(self, line: str) -> None:
        with self.lock:
            self.wrong.append(line)

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics by their names with labels."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=WAIT) as answer:
            lines = answer.read().decode().splitlines()
        return {m[1]: float(m[2]) for line in lines if (m := re.fullmatch(r"([^#].*) (\S+)", line))}


def percentile_of_gaps(metrics: dict[str, float], share: float) -> float:
    """Seconds: the upper end of the bucket in which that share of the gaps lies."""
    found = [(m[1], n) for name, n in metrics.items() if (m := re.search(r'gap\w*_bucket\{.*le="([^"]+)"', name))]
    buckets = sorted((float(bound.replace("+Inf", "inf")), n) for bound, n in found)
    return next((bound for bound, n in buckets if n >= share * buckets[-1][1]), 0.0)


def settle(asker: Asker) -> dict[str, float]:
    """Metrics when nothing runs."""
    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        with urllib.request.urlopen(asker.url + "/slots", timeout=WAIT) as answer:
            if not json.load(answer):
                return asker.metrics()
        time.sleep(0.2)
    raise TimeoutError("requests run on when nobody asks any more")


def soak(model: Path, minutes: float, flags: list[str]) -> dict[str, Any]:
    """Run it; what was found."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["-m", str(model), "--port", str(port), "-np", str(TEXTS), "--max-gap", str(GAP_MS), "--deterministic"]
    server = subprocess.Popen([sys.executable, "-m", "pshard.commands.everyday.cli_serve", *words, *flags])
    asker = Asker(f"http://127.0.0.1:{port}")
    try:
        wait_until_ready(asker, server)
        rng = random.Random(1)
        for _ in range(40):
            prompt = " ".join(rng.choices(WORDS, k=rng.randrange(1, 40)))
            asker.known[prompt] = asker.complete(prompt)
        run_all(asker, time.monotonic() + min(60.0, 6 * minutes))  # graphs, pools of threads, arenas of malloc
        settle(asker)
        memory = psutil.Process(server.pid).memory_info().rss
        run_all(asker, time.monotonic() + 60 * minutes)
        after = settle(asker)
        grown = (psutil.Process(server.pid).memory_info().rss - memory) >> 20
    finally:
        server.terminate()
        code = server.wait(WAIT)
    return judge(asker, after, grown, code) | {"minutes": minutes, "model": model.name}


def judge(asker: Asker, after: dict[str, float], grown: int, code: int) -> dict[str, Any]:
    """What was found, and what of it is wrong."""
    wrong = list(asker.wrong[:20])
    used = sum(n for name, n in after.items() if "blocks" in name and "used" in name)
    p99 = percentile_of_gaps(after, 0.99)
    for bad, line in (
        (used > 0, f"{used:.0f} blocks are used by nobody"),
        (grown > LEAK_MIB, f"the server grew by {grown} MiB"),
        (code != 0, f"the server ended with code {code}"),
        (p99 > 1.5e-3 * GAP_MS, f"one gap of a hundred is above {p99} s"),
    ):
        wrong += [line] * bad
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "requests": dict(asker.count),
        "grown_mib": grown,
        "gap_p99_s_at_most": p99,
        "gap_promised_s": 1e-3 * GAP_MS,
        "wrong": wrong,
    }


def wait_until_ready(asker: Asker, server: subprocess.Popen) -> None:
    """Return when the server takes requests; raises RuntimeError when it ends instead."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(asker.url + "/health", timeout=WAIT).close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the server ended with code {server.returncode} before it was ready")


def run_all(asker: Asker, until: float) -> None:
    """All askers, until then."""
    threads = [threading.Thread(target=asker.run, args=(seed, until)) for seed in range(ASKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> int:
    """Soak and print JSON; with -o also write it."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("minutes", type=float, nargs="?", default=60.0)
    parser.add_argument("-m", "--model", type=Path, default=DEMO)
    parser.add_argument("-o", "--output", type=Path)
    args, flags = parser.parse_known_args()
    record = soak(args.model, args.minutes, flags)
    text = json.dumps(record, indent=1)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")
    return int(bool(record["wrong"]))


if __name__ == "__main__":
    raise SystemExit(main())
