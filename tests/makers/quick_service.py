"""A Service that answers at once, without a model: for tests of many requests."""

import random
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from small_service import AtOnce, SmallService

from pshard.server.jobs import Ended, Job, Likely, Listener, Made, Progress, Refused
from pshard.server.snapshot import Snapshot


@dataclass
class QuickService:
    """Up to 12 tokens by chance, those that a grammar allows, at once and in the caller's thread."""

    vocab: int = 1024
    end: int = 0
    jobs: list[Job] = field(default_factory=list)
    running: str = ""
    state: str = "ready"

    def submit(self, job: Job, listener: Listener) -> None:
        assert job.prompt and all(0 <= token < self.vocab for token in job.prompt) and job.most >= 0
        self.jobs.append(job)
        listener = AtOnce(listener)
        rng = random.Random(len(self.jobs))
        told = tuple(Likely(token, -1.0) for token in job.prompt) if job.scored else ()
        listener.put(Progress(len(job.prompt), len(job.prompt), 0, told))
        guide = job.constrain() if job.constrain else None
        for _ in range(min(job.most, 12)):
            token = rng.randrange(1, self.vocab)
            if guide:
                allowed = np.flatnonzero(np.isfinite(guide.mask(np.zeros(self.vocab, np.float32))))
                token = int(rng.choice(allowed))
                guide.accept(token)
            if token in job.stops:
                listener.put(Ended("stop"))
                return
            best = ((token, -1.0),) * min(job.likely or 0, 1)
            listener.put(Made((token,), () if job.likely is None else (Likely(token, -1.0, best),)))
        listener.put(Ended("length"))

    def cancel(self, job_id: str) -> None:
        pass

    def snapshot(self) -> Snapshot:
        self._queue = type("Nothing", (), {"queue": ()})
        self.ended: list[str] = []
        return SmallService.snapshot(self)  # type: ignore[arg-type]

    def find_budget(self, mib: int, plan: bool) -> None: ...

    def move_budget(self, mib: int) -> "Future[str]":
        raise Refused(400, f"no plan has a budget of {mib} MiB", "no_such_budget")
