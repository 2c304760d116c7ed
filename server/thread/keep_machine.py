"""The machine that a server has, or has not while it sleeps, moves or failed; jobs wait meanwhile."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

from pshard.errors import KernelRefused
from pshard.server.jobs import Ended
from pshard.server.scheduling.pace import Pace
from pshard.server.scheduling.promises import Promises
from pshard.server.scheduling.request import Request
from pshard.server.scheduling.scheduler import Scheduler
from pshard.server.scheduling.served_machine import Machine, PlanFacts
from pshard.server.scheduling.tally import Tally
from pshard.server.scheduling.waiting_line import WaitingLine
from pshard.server.snapshot import Blocks
from pshard.server.thread.show import show_blocks

KEEP_SECONDS = 0.02  # that a job which comes meanwhile waits
MOST_RESTARTS, RESTART_SECONDS = 3, 600.0

log = logging.getLogger(__name__)


class Loader(Protocol):
    """Loads the model. budgets: MiB of the plans that there are, each a sum over ranks, the smallest first."""

    @property
    def budgets(self) -> tuple[int, ...]: ...

    def look_again(self, budget: int, plan: bool, stopped: Callable[[], bool]) -> None:
        """Know the plans that there are by now; `plan`: make one of that budget where there is none, unless `stopped`.
        Takes seconds or minutes, in the caller's thread. Raises UserError when there is none then."""

    def load(self, budget: int | None) -> Machine:
        """Under the plan of a budget; None: the one that was asked for. Raises UserError and StepFailed."""


class MachineKeeper:
    """Loads machines and closes them; what waits stays.

    Attributes:
        scheduler: over the machine; None without one. facts and pace: of it, or the last one. budget: as it was asked
            for. blocks: as they were last counted. lock: of all this, which a snapshot reads; never held while a
            machine computes.
    """

    def __init__(self, loader: Loader, promises: Promises, tally: Tally) -> None:
        self._loader, self._promises, self._tally = loader, promises, tally
        self.lock = threading.RLock()
        self.scheduler: Scheduler | None = None
        self.facts: PlanFacts | None = None
        self.pace: Pace | None = None
        self.budget: int | None = None
        self.blocks = Blocks()
        self._line = WaitingLine()
        self._restarts: deque[float] = deque()

    @property
    def line(self) -> WaitingLine:
        """Jobs that wait."""
        return self.scheduler.jobs.line if self.scheduler else self._line

    @property
    def running(self) -> list[Request]:
        """Jobs that run."""
        return self.scheduler.jobs.running if self.scheduler else []

    @property
    def busy(self) -> bool:
        """Whether any job is here."""
        return bool(self.running) or len(self.line) > 0

    def load(self, budget: int | None) -> None:
        """Load the model under the plan of a budget. Raises what the loader raises."""
        machine = self._loader.load(budget)
        with self.lock:
            self.scheduler = Scheduler(machine, self._promises, self._tally, self._line)
            self.facts, self.pace = machine.facts, self.scheduler.pace
        self.budget = budget
        self.count_blocks()

    def count_blocks(self) -> None:
        """Note what the pool's blocks are used for."""
        if self.scheduler:
            before, self.blocks = self.blocks.files_problem, show_blocks(self.scheduler.machine.pool.counts())
            if self.blocks.files_problem not in ("", before):
                log.warning("prefixes of texts are not kept in files: %s", self.blocks.files_problem)

    def keep_some(self) -> bool:
        """Keep prefixes in files while there is nothing to compute; whether there are more to be kept."""
        return self.scheduler is not None and self.scheduler.machine.pool.keep_some(KEEP_SECONDS)

    def let_go(self) -> None:
        """Give the machine back; its jobs wait."""
        if self.scheduler:
            with self.lock:
                self._line = self.scheduler.jobs.suspend()
            self.drop()

    def drop(self) -> None:
        """Close a machine in which no job has a text, whether it works or not."""
        with self.lock:
            self._line = self.line
            scheduler, self.scheduler = self.scheduler, None
            self.blocks = Blocks()
        if scheduler is not None:
            try:
                scheduler.machine.close()
            except Exception as error:
                log.error("the engine did not close: %s", one_line(error))

    def end(self, job_ids: Collection[str], ended: Ended, now: float) -> None:
        """End jobs, wherever they are."""
        with self.lock:
            if self.scheduler:
                self.scheduler.jobs.end(job_ids, ended, now)
                self.count_blocks()
            else:
                self._end_waiting(lambda run: run.job.id in job_ids, ended, now)

    def end_all(self, ended: Ended, now: float, broken: bool = False) -> None:
        """End every job. broken: the machine is not to be asked for anything any more."""
        with self.lock:
            if self.scheduler:
                self.scheduler.jobs.end_all(ended, now, broken)
            else:
                self._end_waiting(lambda run: True, ended, now)

    def _end_waiting(self, which: Callable[[Request], bool], ended: Ended, now: float) -> None:
        for run in self._line.pull(which):
            run.done = True
            self._tally.end(ended.reason, now - run.taken)
            run.tell(ended)

    def reload(self, error: BaseException, now: float) -> None:
        """Load again after a failure; raises the last error when that was often, and at once what loading does not
        help."""
        while True:
            if isinstance(error, KernelRefused):
                self.drop()
                raise error
            self._restarts.append(now)
            while self._restarts[0] < now - RESTART_SECONDS:
                self._restarts.popleft()
            self.drop()
            if len(self._restarts) > MOST_RESTARTS:
                raise error
            self._tally.count["restarts"] += 1
            try:
                return self.load(self.budget)
            except Exception as again:
                log.error("the model cannot be loaded: %s", one_line(again))
                error = again


def one_line(error: BaseException) -> str:
    """An error's first line."""
    return (str(error).splitlines() or [""])[0] or type(error).__name__
