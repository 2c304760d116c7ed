"""A Service for tests of the interface: one job after the other through `Engine.forward`, on a thread of its own."""

import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from engines import open_engine

from pshard.models import open_model
from pshard.runtime.engine import Engine
from pshard.runtime.sampling import Sampler
from pshard.server.jobs import Ended, Job, Likely, Listener, Made, Progress, Refused
from pshard.server.snapshot import (
    Blocks,
    Counters,
    Distributions,
    Histogram,
    PlanInForce,
    ServedModel,
    Snapshot,
    TextNow,
    TierNow,
    WaitingJob,
)

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.gguf"
CHUNK = 64  # tokens of a prompt in one step


@dataclass
class AtOnce:
    """A listener that is woken for every event."""

    inner: Listener

    def put(self, event) -> None:
        self.inner.put(event)
        self.inner.wake()

    def wake(self) -> None: ...


@dataclass
class SmallService:
    """Real answers of the demo model.

    most: jobs that may wait; state: what it says of itself; delay: seconds a token. `hold` keeps jobs waiting while it
    is set; `jobs` has all that came, `cancelled` the ids of those that were ended.
    """

    engine: Engine
    most: int = 1000
    state: str = "ready"
    delay: float = 0.0
    hold: threading.Event = field(default_factory=threading.Event)
    jobs: list[Job] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    ended: list[str] = field(default_factory=list)
    running: str = ""

    def __post_init__(self) -> None:
        self._queue: queue.Queue[tuple[Job, Listener] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, job: Job, listener: Listener) -> None:
        if self.state != "ready":
            raise Refused(503, f"the server is {self.state}", retry_after=7)
        if self._queue.qsize() >= self.most:
            raise Refused(429, "too many requests wait", "rate_limit", retry_after=3)
        self.jobs.append(job)
        self._queue.put((job, AtOnce(listener)))

    def cancel(self, job_id: str) -> None:
        self.cancelled.add(job_id)

    def close(self) -> None:
        self.hold.clear()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            job, listener = item
            while self.hold.is_set() and job.id not in self.cancelled:
                time.sleep(0.002)
            self.running = job.id
            try:
                reason = self._answer(job, listener)
                listener.put(Ended(reason))
            except Exception as error:
                listener.put(Ended("error", f"a step failed: {type(error).__name__}"))
            self.ended.append(job.id)
            self.running = ""

    def _answer(self, job: Job, listener: Listener) -> str:
        self.engine.reset()
        sampler = Sampler(job.sampling, job.constrain() if job.constrain else None)
        sampler.see(job.prompt)
        rows: list[torch.Tensor] = []
        for at in range(0, len(job.prompt), CHUNK):
            if job.id in self.cancelled:
                return "cancelled"
            rows += self.engine.forward(job.prompt[at : at + CHUNK], all_logits=True)
            listener.put(Progress(min(at + CHUNK, len(job.prompt)), len(job.prompt), 0))
        if job.scored:
            first = Likely(job.prompt[0], float("nan"))
            told = [likely(row, token, job.likely or 0) for row, token in zip(rows, job.prompt[1:])]
            listener.put(Progress(len(job.prompt), len(job.prompt), 0, (first, *told)))
        logits = rows[-1]
        for made in range(job.most):
            if job.id in self.cancelled:
                return "cancelled"
            token = sampler.choose(logits.clone())
            if token in job.stops:
                return "stop"
            extra = () if job.likely is None else (likely(logits, token, job.likely),)
            listener.put(Made((token,), extra))
            time.sleep(self.delay)
            if made + 1 < job.most:
                logits = self.engine.forward([token])  # type: ignore[assignment]
        return "length"

    def snapshot(self) -> Snapshot:
        none = Histogram((1.0,), (0, 0), 0.0)
        tier = TierNow(64, 5.0, 5.0, 0, "link")
        plan = PlanInForce((64,), 512, 512, 4, "f32", "f32", "none", "all pinned", (tier,), (64,))
        running = (TextNow(0, self.running, "decode", 4, 4, 0, 1, 8, 10.0, 0.5),) if self.running else ()
        waiting = tuple(WaitingJob(item[0].id, len(item[0].prompt), 0.1) for item in list(self._queue.queue) if item)
        counters = Counters(submitted=len(self.jobs), ended=(("stop", len(self.ended)),), step_seconds=((64, 0.5),))
        reason = "" if self.state == "ready" else "the weights are read"
        seen = Distributions(none, none, none, none, none)
        return Snapshot(
            self.state, reason, 1.0, 1000.0, 64, plan, running, waiting, Blocks(8, 1, 2, 5), counters, seen, ()
        )  # fmt: skip

    def find_budget(self, mib: int, plan: bool) -> None: ...

    def move_budget(self, mib: int) -> "Future[str]":
        if mib not in (32, 64):
            raise Refused(400, f"no plan has a budget of {mib} MiB", "no_such_budget")
        moved: Future[str] = Future()
        moved.set_result(f"{mib} MiB: all pinned")
        return moved


def likely(logits: torch.Tensor, token: int, most: int) -> Likely:
    """A token's log-probability and the likeliest ones, from its row of logits."""
    values = torch.log_softmax(logits.double(), 0).numpy()
    best = np.argsort(-values, kind="stable")[:most]
    return Likely(token, float(values[token]), tuple((int(i), float(values[i])) for i in best))


def open_service(**settings: object) -> SmallService:
    """The demo model behind a small service."""
    return SmallService(open_engine(DEMO, context=512, tokens=(1, 64), kernels="fast"), **settings)  # type: ignore[arg-type]


@cache
def _read_demo() -> ServedModel:
    with open_model(DEMO) as file:
        return ServedModel("demo", 1700000000, 512, 512, 1024, file.tokenizer(), None, "demo.gguf")


def demo_model(template: str | None = None) -> ServedModel:
    """The demo model as a server knows it; its file is read once."""
    return replace(_read_demo(), template=template)
