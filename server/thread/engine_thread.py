"""The thread that owns the engine: all that others do is post, and read what it publishes."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

from pshard.errors import UserError
from pshard.server.jobs import Ended, Job, Listener, Refused
from pshard.server.scheduling.promises import Promises, check_job, estimate_wait
from pshard.server.scheduling.request import Request
from pshard.server.scheduling.scheduler import run_step
from pshard.server.scheduling.tally import Tally
from pshard.server.snapshot import TAKING, Snapshot
from pshard.server.thread.handover import Handover
from pshard.server.thread.keep_machine import Loader, MachineKeeper, one_line
from pshard.server.thread.posts import Move, Posts
from pshard.server.thread.show import show_plan, show_running, show_waiting

TRY_AGAIN = 5.0  # seconds, that a client is told while a model is loaded
FAILED = "the engine failed and is loaded again; try again"
STOPPING = "the server is stopping; try again later"
LOADING = "the model is being loaded; try again"
SLEEPING = "the model sleeps; a request wakes it"

log = logging.getLogger(__name__)


class EngineThread:
    """Runs jobs on one thread: a `Service`.

    Attributes:
        error: why it ended, where that was no stop.
    """

    def __init__(
        self,
        loader: Loader,
        promises: Promises,
        sleep_idle: float | None = None,
        tell: Callable[[Snapshot], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """sleep_idle: seconds without a job after which the machine is given back; None: never. tell: called when the
        state changes, mostly on this thread."""
        self._loader, self._promises, self._sleep_idle = loader, promises, sleep_idle
        self._tell, self._clock = tell, clock
        self.error: BaseException | None = None
        self._tally = Tally(clock())
        self._keeper = MachineKeeper(loader, promises, self._tally)
        self._posts, self._handover = Posts(), Handover()
        self._drain_until: float | None = None
        self._state, self._reason = "loading", LOADING
        self._idle_since = clock()
        self._prepared: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, prepared: Callable[[], None] = lambda: None) -> None:
        """Load the model and run. prepared: waits for what else is to be there before this is ready."""
        self._prepared = prepared
        self._thread.start()

    def submit(self, job: Job, listener: Listener) -> None:
        """As `Service.submit`."""
        facts = self._keeper.facts
        if facts is not None:
            check_job(job, facts)
        with self._posts.changed:
            try:
                self._check_open()
                assert facts is not None
                inside = self._tally.count["submitted"] - self._tally.ended.total()
                if inside >= facts.sequences + self._promises.queue:
                    text = f"{self._promises.queue} requests wait already; try again later"
                    raise Refused(429, text, "rate_limit_exceeded", self._estimate_wait())
            except Refused as refused:
                self._tally.refused[refused.status] += 1
                raise
            self._tally.count["submitted"] += 1
            self._posts.add_job(Request(job, self._handover.listen(listener), self._clock()))

    def cancel(self, job_id: str) -> None:
        """As `Service.cancel`."""
        self._posts.cancel(job_id)

    def move_budget(self, mib: int) -> "Future[str]":
        """As `Service.move_budget`."""
        if mib not in self._loader.budgets:
            raise Refused(400, f"no plan has a budget of {mib} MiB", "no_such_budget")
        future: Future[str] = Future()
        with self._posts.changed:
            self._check_open()
            self._posts.add_move(Move(mib, future))
        return future

    def find_budget(self, mib: int, plan: bool) -> None:
        """As `Service.find_budget`."""
        try:
            self._loader.look_again(mib, plan, lambda: self._drain_until is not None)
        except UserError as error:
            raise Refused(400, one_line(error), "no_such_budget") from None

    def drain(self, seconds: float) -> None:
        """Take no more jobs; end when those that are here have ended, at the latest after so many seconds."""
        with self._posts.changed:
            until = self._clock() + seconds
            self._drain_until = until if self._drain_until is None else min(until, self._drain_until)
            self._posts.changed.notify()
        self._set_state("draining", STOPPING)

    def join(self, seconds: float | None = None) -> bool:
        """Wait for the end; whether it came within so many seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def snapshot(self) -> Snapshot:
        """As `Service.snapshot`."""
        keeper = self._keeper
        with keeper.lock:
            now = self._clock()
            since = now - self._tally.start
            return Snapshot(
                state=self._state,
                reason=self._reason,
                now=since,
                gap_ms=1e3 * self._promises.gap,
                queue=self._promises.queue,
                plan=show_plan(keeper.facts, keeper.pace, self._loader.budgets) if keeper.facts else None,
                running=tuple(show_running(run, now) for run in keeper.running),
                waiting=tuple(show_waiting(run, now) for run in (*keeper.line, *self._posts.jobs)),
                blocks=keeper.blocks,
                counters=self._tally.counters(),
                distributions=self._tally.distributions(),
                steps=self._tally.steps,
                rate=self._tally.rate(since),
            )

    def _check_open(self) -> None:
        """Raise Refused (503) when no jobs are taken."""
        if self._drain_until is not None or self._state not in TAKING:
            raise Refused(503, self._reason, "unavailable", TRY_AGAIN)

    def _estimate_wait(self) -> float:
        waiting = sum(len(run.tokens) for run in self._posts.jobs) + self._keeper.line.tokens
        assert self._keeper.facts is not None
        return estimate_wait(waiting, self._promises.queue, self._keeper.facts, self._tally.whole.mean)

    def _run(self) -> None:
        try:
            self._keeper.load(None)
            self._prepared()
            self._set_state("ready", "")
            while not self._is_over():
                self._take_posts()
                try:
                    self._go_on()
                except Exception as error:
                    log.error("the engine failed: %s", one_line(error))
                    self._restart(error)
        except BaseException as error:
            self.error = error
            self._set_state("failed", one_line(error))
            self._end_everything(Ended("error", "the server failed", True), broken=True)
        finally:
            self._keeper.drop()

    def _go_on(self) -> None:
        """Compute a step; where there is nothing to compute, rest. Raises what the machine raises."""
        if not self._keeper.busy:
            self._handover.release()
            if not self._keeper.keep_some():
                self._rest()
                self._keeper.count_blocks()  # what a thread could not write shows later
        elif self._keeper.scheduler is None:
            self._wake()
        else:
            lock, release = self._keeper.lock, self._handover.release
            run_step(self._keeper.scheduler, self._clock, lock, release, self._are_given_up)
            self._keeper.count_blocks()
            self._idle_since = self._clock()

    def _are_given_up(self, job_ids: Collection[str]) -> bool:
        """Whether jobs are all to be ended as soon as the step is over."""
        late = self._drain_until is not None and self._clock() >= self._drain_until
        return late or self._posts.cancels.issuperset(job_ids)

    def _take_posts(self) -> None:
        taken = self._posts.take()
        with self._keeper.lock:
            for run in taken.jobs:
                self._keeper.line.add(run)
            if taken.cancels:
                self._keeper.end(taken.cancels, Ended("cancelled"), self._clock())
        if taken.moves:
            self._handover.release()
        left = list(taken.moves)
        try:
            while left:
                self._move(left.pop(0))
        except BaseException:
            _refuse(left, "the server failed")
            raise

    def _rest(self) -> None:
        """Wait for a post; sleep where there was none for long."""
        seconds = TRY_AGAIN
        if self._sleep_idle is not None and self._keeper.scheduler is not None:
            left = self._idle_since + self._sleep_idle - self._clock()
            if left <= 0:
                self._keeper.let_go()
                return self._set_state("sleeping", SLEEPING)
            seconds = min(left, seconds)
        self._posts.wait(seconds, lambda: self._drain_until is not None)

    def _is_over(self) -> bool:
        """Whether a drain is at its end; jobs that are late then are ended."""
        if self._drain_until is None:
            return False
        if self._clock() < self._drain_until and (self._posts.jobs or self._keeper.busy):
            return False
        self._end_everything(Ended("error", STOPPING, True))
        return True

    def _end_everything(self, ended: Ended, broken: bool = False) -> None:
        taken = self._posts.take()
        _refuse(taken.moves, ended.message)
        with self._keeper.lock:
            for run in taken.jobs:
                self._keeper.line.add(run)
        self._keeper.end_all(ended, self._clock(), broken)
        self._handover.release()

    def _wake(self) -> None:
        self._set_state("sleeping", "the model wakes")
        try:
            self._keeper.load(self._keeper.budget)
        except UserError as error:  # others have taken what it gave back: that is no failure of the engine
            log.error("the model cannot wake: %s", one_line(error))
            self._end_everything(Ended("error", f"the model sleeps and cannot be loaded now: {one_line(error)}", True))
            return self._set_state("sleeping", SLEEPING)
        self._set_state("ready", "")

    def _move(self, move: Move) -> None:
        """Go to the plan of another budget; where that fails, back."""
        before, future = self._keeper.budget, move.future
        self._set_state("moving", f"the server moves to a budget of {move.mib} MiB")
        self._keeper.let_go()
        try:
            self._keeper.load(move.mib)
        except Exception as error:
            log.error("the budget of %d MiB cannot be taken: %s", move.mib, one_line(error))
            future.set_exception(UserError(f"{one_line(error)}; the server goes back to the plan before"))
            try:
                self._keeper.load(before)
            except Exception as worse:
                return self._restart(worse)
        else:
            self._tally.count["budget_moves"] += 1
            assert self._keeper.facts is not None
            future.set_result(self._keeper.facts.shown.way)
        self._set_state("ready", "")

    def _restart(self, error: BaseException) -> None:
        """End all jobs and load again; raises the error when that was often."""
        self._set_state("restarting", FAILED)
        self._end_everything(Ended("error", FAILED, True), broken=True)
        self._keeper.reload(error, self._clock())
        self._set_state("ready", "")

    def _set_state(self, state: str, reason: str) -> None:
        with self._posts.changed:
            if self._drain_until is not None and state != "failed":
                state, reason = "draining", STOPPING
            changed, self._state, self._reason = self._state != state, state, reason
        if state == "ready":
            self._idle_since = self._clock()  # what loading took is no time without a request
        if changed:
            self._tell(self.snapshot())


def _refuse(moves: Sequence[Move], why: str) -> None:
    """Tell those who wait for moves that there will be none."""
    for move in moves:
        move.future.set_exception(UserError(why))
