"""Jobs that wait and jobs that run: how they come in, give their place away, and end."""

from collections.abc import Collection, Sequence
from math import inf, isnan

from pshard.errors import StepFailed, UserError
from pshard.runtime.texts.text import Text
from pshard.server.jobs import Ended
from pshard.server.scheduling.draw_token import make_sampler, scores
from pshard.server.scheduling.promises import Promises
from pshard.server.scheduling.request import Request
from pshard.server.scheduling.served_machine import Machine
from pshard.server.scheduling.tally import Tally
from pshard.server.scheduling.waiting_line import WaitingLine
from pshard.units.kv_cells import KV_BLOCK

CACHED_SHARE = 0.8  # of a prompt that is there already: it may go before one that has no room, once
READ_SHARE = 0.25  # of the promised gap, that a prefix is read from files while others wait for a token
LOOK_BEHIND = 8  # jobs that are asked whether they may


class JobsAtWork:
    """The jobs of one machine.

    Attributes:
        running: jobs with a text, in the order in which they were admitted. line: those that wait.
    """

    def __init__(self, machine: Machine, tally: Tally, line: WaitingLine, gap: float = inf) -> None:
        """gap: seconds that texts which decode may wait for their next token."""
        self.running: list[Request] = []
        self.line = line
        self._machine, self._tally, self._gap = machine, tally, gap
        self._closed = 0  # texts so far
        self._slots = set(range(machine.facts.sequences))

    def admit(self, prompts: Sequence[Request]) -> Request | None:
        """Open the text of the next job that has room; None: none has. prompts: jobs whose prompts are computed now."""
        first: Request | None = None
        for i, run in enumerate(self.line):
            if i > LOOK_BEHIND or (first is not None and first.overtaken):
                return None
            if any(_awaits(run, other) for other in prompts):
                continue
            behind = first is not None
            if run.refused_at != self._closed and (not behind or run.probed_at != self._closed):
                if self._enter(run, behind):
                    if first is not None:
                        first.overtaken = True
                    return run
                if run.done:  # it was taken out of what is walked here
                    return self.admit(prompts)
            first = first or run
        return None

    def _enter(self, run: Request, behind: bool) -> bool:
        """Open a job's text where the blocks suffice for it, and for one more of each text that runs. behind: it goes
        before another one, so most of it must be there already."""
        job = run.job
        if run.sampler is None and not self._begin(run):
            return False
        salt = f"{job.salt}\0{job.id}" if job.scored else job.salt  # what is scored has to be computed
        waited_for = any(other.decodes for other in self.running)
        seconds = READ_SHARE * self._gap if waited_for else inf
        run.text = text = self._machine.pool.open(run.tokens, salt, seconds)
        wanted = {r.text: self._with_reserve(r) for r in (*self.running, run) if r.text is not None}
        too_little = behind and text.cached < CACHED_SHARE * len(run.tokens)
        if too_little or self._machine.pool.missing(wanted):
            self._machine.pool.close(text)
            run.text = None
            if too_little:
                run.probed_at = self._closed
            else:
                run.refused_at = self._closed
            return False
        self.line.take(run)
        self.running.append(run)
        run.slot = min(self._slots)
        self._slots.remove(run.slot)
        if run.begun != run.begun:  # not again when it comes back
            self._tally.count["cached_tokens"] += text.cached
        return True

    def _begin(self, run: Request) -> bool:
        """Make what draws a job's tokens; a job of which that fails ends."""
        try:
            run.sampler = make_sampler(run, self._machine.facts.vocab)
        except Exception as error:
            self.line.take(run)
            self.fail(run, error)
            return False
        return True

    def _with_reserve(self, run: Request) -> int:
        return min(run.goal + KV_BLOCK, self._machine.facts.longest)

    def preempt(self, run: Request) -> None:
        """Let a job give its blocks away and wait, before all others; its tokens stay."""
        self._put_back(run)
        run.preempted += 1
        self._tally.count["preemptions"] += 1

    def _put_back(self, run: Request) -> None:
        if scores(run):
            run.scored.clear()
        self._close(run, keep=not run.job.scored)
        run.refused_at = -1
        self.line.give_back(run)

    def end(self, job_ids: Collection[str], ended: Ended, now: float) -> None:
        """End jobs, wherever they are; those that are not here have ended."""
        for run in [run for run in self.running if run.job.id in job_ids]:
            self.end_run(run, ended, now)
        for run in self.line.pull(lambda run: run.job.id in job_ids):
            self.end_run(run, ended, now)

    def end_all(self, ended: Ended, now: float, broken: bool = False) -> None:
        """End every job. broken: the machine is not to be asked for anything any more."""
        for run in list(self.running):
            if broken:
                run.text = None
            self.end_run(run, ended, now)
        for run in self.line.pull(lambda run: True):
            self.end_run(run, ended, now)

    def suspend(self) -> WaitingLine:
        """Close all texts; their jobs wait, the oldest first, to go on where they were."""
        for run in reversed(list(self.running)):
            self._put_back(run)
        for run in self.line:
            run.refused_at = run.probed_at = -1
        return self.line

    def give_up(self, promises: Promises, now: float) -> None:
        """End jobs that have waited for their first turn, or taken, too long."""
        if not self.line and promises.whole is None:
            return
        for run in self.line.pull(lambda run: isnan(run.begun) and now - run.taken > promises.patience):
            self.end_run(run, Ended("error", "the request waited too long for its turn; try again later", True), now)
        if promises.whole is not None:
            late = {run.job.id for run in (*self.running, *self.line) if now - run.taken > promises.whole}
            self.end(late, Ended("error", "the request took longer than this server allows", asked=True), now)

    def fail(self, run: Request, error: Exception, now: float = 0.0) -> None:
        """End a job by an error that is its own; what is not meant for people stays here."""
        known = isinstance(error, StepFailed | UserError)
        told = str(error) if known else "the request failed on the server"
        self.end_run(run, Ended("error", told, asked=isinstance(error, UserError)), now or run.taken)

    def end_run(self, run: Request, ended: Ended, now: float) -> None:
        """End a job, if it has not ended."""
        if run.done:
            return
        run.done = True
        keep = not run.job.scored and ended.reason != "error"
        self._close(run, keep)
        self._tally.end(ended.reason, now - run.taken)
        run.tell(ended)

    def _close(self, run: Request, keep: bool) -> None:
        text: Text | None = run.text
        if run in self.running:
            self.running.remove(run)
            self._slots.add(run.slot)
        if text is not None:
            run.text = None
            self._closed += 1
            self._machine.pool.close(text, keep)


def _awaits(run: Request, other: Request) -> bool:
    """Whether another prompt that is being computed begins with a block of this job's: it will be there to share."""
    if run.job.scored or other.text is None or run.job.salt != other.job.salt or other.remaining < KV_BLOCK:
        return False
    there = len(other.text.ids) // KV_BLOCK * KV_BLOCK
    following = other.tokens[there : there + KV_BLOCK]
    end = there + KV_BLOCK
    return len(run.tokens) > end and run.tokens[there:end] == following and run.tokens[:there] == other.tokens[:there]
