"""Time that the scheduler itself takes of a step, at so many texts, over a machine that computes nothing.

    python benchmarks/scheduler_overhead.py --texts 16 -o overhead.json

Every step has a token of each text. Greedy texts ask for the best logit of each row, drawn ones (temperature 0.8, top-k
40) for the 40 best. What the listeners do, and HTTP, is not in it.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from pshard.planner.serving.step_times import StepTimes, TierSteps
from pshard.runtime.sampling import Sampling
from pshard.runtime.texts.text import BlockCounts, Piece, Row, Text
from pshard.server.jobs import Event, Job
from pshard.server.scheduling.promises import Promises
from pshard.server.scheduling.request import Request
from pshard.server.scheduling.scheduler import Scheduler, run_step
from pshard.server.scheduling.served_machine import PlanFacts
from pshard.server.scheduling.tally import Tally
from pshard.server.snapshot import PlanInForce

VOCAB, LONGEST, WARM = 1000, 100_000, 50
WAYS = {"greedy": Sampling(temperature=0.0), "drawn": Sampling(seed=1)}


STEADY = tuple(TierSteps(n, ((1.0, 1e-3),), ((0.0, 0.0),), ()) for n in (1, 2, 512))
TIMES = StepTimes(STEADY, ((0.0,) * 3,) * 3)


class IdlePool:
    """The same rows every time: at once, or after so many seconds in which its thread is outside Python."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._nothing = np.empty(0, np.float32)
        logits = np.sort(np.random.default_rng(1).normal(0, 3, 40).astype(np.float32))[::-1].copy()
        self._rows = {n: Row(np.arange(100, 100 + n), logits[:n], 0.0, None, self._nothing, False) for n in (1, 40)}

    def open(self, ids: Sequence[int], salt: str = "", seconds: float = 0.0) -> Text:
        """An empty text."""
        return Text([], 0, salt)

    def missing(self, wanted: Any) -> int:
        """There is room for all."""
        return 0

    def step(
        self,
        pieces: Sequence[Piece],
        meanwhile: Callable[[], None] = lambda: None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> list[list[Row]]:
        """Appends tokens."""
        meanwhile()
        if self._seconds:
            time.sleep(self._seconds)
        for piece in pieces:
            piece.text.ids += piece.ids
        return [[self._rows[piece.best]] if piece.best else [] for piece in pieces]

    def close(self, text: Text, keep: bool = True) -> None:
        """Nothing to do."""

    def counts(self) -> BlockCounts:
        """None are used."""
        return BlockCounts(1, 0, 0, 1)

    def keep_some(self, seconds: float) -> bool:
        """There is nothing to keep."""
        return False


class IdleMachine:
    """A machine that computes nothing."""

    link_bytes, drafter = 0, None

    def __init__(self, texts: int, vocab: int = VOCAB, seconds: float = 0.0) -> None:
        shown = PlanInForce((1,), LONGEST, LONGEST, texts, "bf16", "bf16", "none", "idle", ())
        self.facts = PlanFacts((1, texts, 512), (1e-3, 1e-3, 1e-3), texts, LONGEST, vocab, shown, TIMES)
        self.pool = IdlePool(seconds)

    def keep_tier(self, tokens: int) -> None:
        """All tiers are alike."""

    def close(self) -> None:
        """Nothing to do."""


class Deaf:
    """A listener that does nothing."""

    def put(self, event: Event) -> None:
        """Nothing to do."""

    def wake(self) -> None:
        """Nothing to do."""


def time_steps(texts: int, steps: int, sampling: Sampling) -> float:
    """Median milliseconds of a step."""
    scheduler = Scheduler(IdleMachine(texts), Promises(), Tally(time.monotonic()))
    for i in range(texts):
        job = Job(f"job{i}", (i % VOCAB,), steps + 2 * WARM, sampling)
        scheduler.jobs.line.add(Request(job, Deaf(), time.monotonic()))
    taken = []
    for _ in range(WARM + steps):
        start = time.perf_counter()
        run_step(scheduler, time.monotonic, nullcontext(), lambda: None)
        taken.append(time.perf_counter() - start)
    return 1e3 * median(taken[WARM:])


def main() -> int:
    """Measure and print; with -o also write JSON."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    found = {name: time_steps(args.texts, args.steps, sampling) for name, sampling in WAYS.items()}
    for name, milliseconds in found.items():
        print(f"{args.texts} {name} texts: {milliseconds:.3f} ms a step")
    if args.output:
        record = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "texts": args.texts, "step_ms": found}
        args.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
