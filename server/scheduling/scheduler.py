"""Decides what each step holds, and hands out what comes of it."""

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

from pshard.batch import DECODE, VERIFY, Batch, Span
from pshard.errors import StepFailed, UserError
from pshard.runtime.speculation.accept import MadeUp
from pshard.runtime.texts.text import GivenUp, Piece, Row
from pshard.server.jobs import Ended, Made, Progress
from pshard.server.scheduling.choose_tier import TierChoice
from pshard.server.scheduling.draw_token import Drawn, draw_tokens, limit_piece, make_piece, score_rows, scores
from pshard.server.scheduling.fill_step import fill_prompts, room_for_prompts, wants_more
from pshard.server.scheduling.jobs_at_work import JobsAtWork
from pshard.server.scheduling.pace import Pace
from pshard.server.scheduling.promises import Promises
from pshard.server.scheduling.request import Request
from pshard.server.scheduling.served_machine import Machine
from pshard.server.scheduling.step_drafts import Drafts, StepDrafts
from pshard.server.scheduling.tally import Tally
from pshard.server.scheduling.waiting_line import WaitingLine
from pshard.server.snapshot import StepSeen

NO_ROOM = "the text has no room in the KV cache; ask for less"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Share:
    """So many new tokens of a job's text in a step; the last of them may be drafts."""

    run: Request
    count: int
    decodes: bool
    drafts: tuple[int, ...] = ()

    @property
    def span(self) -> Span:
        """That of a text which decodes."""
        return Span(self.count, count_cells([self.run]), self.count, VERIFY if self.count > 1 else DECODE)


class Scheduler:
    """Jobs over one machine. Not thread-safe; between `plan` and `settle` the machine computes.

    Attributes:
        jobs: those that wait and those that run. pace: how long steps take. choice: the tier in force.
    """

    def __init__(self, machine: Machine, promises: Promises, tally: Tally, line: WaitingLine | None = None) -> None:
        """line: jobs that wait already."""
        self.machine, self.promises, self.tally = machine, promises, tally
        self.pace = Pace(machine.facts)
        self.choice = TierChoice(self.pace)
        self.drafts = StepDrafts(machine, self.pace)
        made_up = machine.facts.drafts.made_up
        self._made_up = MadeUp(made_up) if made_up else None
        self.jobs = JobsAtWork(machine, tally, line if line is not None else WaitingLine(), promises.gap)
        self._link_bytes = machine.link_bytes
        self._kept, self._settling = 0, 0.0  # seconds of taking the present step's rows that hold into states

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.jobs.running) or len(self.jobs.line) > 0

    def plan(self, now: float) -> list[Share]:
        """What the next step holds; empty where nothing can run."""
        jobs = self.jobs
        jobs.give_up(self.promises, now)
        drafts = self.drafts.choose(jobs.running, self.promises.gap)
        while True:
            shares = self._share(drafts)
            if shares and self._lacks_blocks(shares):
                if drafts:
                    drafts = {}
                else:
                    self._make_room(now)
            elif drafts and sum(share.count for share in shares) > self.machine.facts.tiers[-1]:
                drafts = {}  # a sweep has none
            elif not shares and not jobs.running and len(jobs.line):  # it would wait for ever
                jobs.end({next(iter(jobs.line)).job.id}, Ended("error", NO_ROOM, asked=True), now)
            else:
                return shares

    def _share(self, drafts: Drafts) -> list[Share]:
        shares, prompts = list[Share](), list[Request]()
        for run in self.jobs.running:
            if run.decodes:
                own = drafts.get(run, ())
                shares.append(Share(run, run.remaining + len(own), True, own))
            else:
                prompts.append(run)
        slots = self.machine.facts.sequences
        if not prompts and (len(shares) == slots or not len(self.jobs.line)):
            return shares  # no need to know what would have room
        batch = Batch(tuple(share.span for share in shares))
        remaining = [run.remaining for run in prompts]
        room = self._room(batch, prompts)
        while len(self.jobs.running) < slots and len(self.jobs.line) and wants_more(remaining, room):
            if (admitted := self.jobs.admit(prompts)) is None:
                break
            prompts.append(admitted)
            remaining.append(admitted.remaining)
            room = self._room(batch, prompts)
        counts = fill_prompts(remaining, room)
        return shares + [Share(run, limit_piece(run, n), False) for run, n in zip(prompts, counts) if n]

    def _room(self, decoding: Batch, prompts: Sequence[Request]) -> int:
        past = max((count_cells([run]) for run in prompts), default=0)
        largest = self.machine.facts.largest_step
        return room_for_prompts(self.pace, largest, decoding, past, self.promises.gap, self.choice.in_force)

    def _lacks_blocks(self, shares: Sequence[Share]) -> bool:
        wanted = {s.run.text: len(s.run.text.ids) + s.count for s in shares if s.run.text is not None}
        return self.machine.pool.missing(wanted) > 0

    def _make_room(self, now: float) -> None:
        """Take the blocks of the text that was admitted last."""
        run = self.jobs.running[-1]
        if len(self.jobs.running) == 1:
            self.jobs.end_run(run, Ended("error", NO_ROOM, asked=True), now)
        else:
            self.jobs.preempt(run)

    def choose_tier(self, batch: Batch) -> int:
        """Under which tier a step runs."""
        tier = self.choice.choose(batch, self.promises.gap if batch.decoding.texts else None)
        if tier != self._kept:
            self.machine.keep_tier(tier)
            self._kept = tier
        return tier

    def pieces(self, shares: Sequence[Share], now: float) -> tuple[list[Share], list[Piece]]:
        """What the pool is to compute. A job of which that cannot be said, as its grammar gives up, ends."""
        kept, found = list[Share](), list[Piece]()
        for share in shares:
            run = share.run
            if run.begun != run.begun:
                run.begun = now
                self.tally.queue.add(now - run.taken)
            try:
                piece = make_piece(run, share.count, share.drafts)
                found.append(piece)
                if left_out := share.count - len(piece.ids):  # drafts that the grammar does not allow
                    share = replace(share, count=len(piece.ids), drafts=share.drafts[:-left_out])
                kept.append(share)
            except (StepFailed, UserError) as error:
                self.jobs.fail(run, error, now)
        return kept, found

    def settle(self, step: "StepDone", rows: Sequence[Sequence[Row] | UserError]) -> None:
        """Hand out what a step made; an error stands for rows of a job that the machine refused."""
        made, held, self._settling = 0, dict[Request, tuple[int, int]](), 0.0
        for share, own in zip(step.shares, rows):
            try:
                if isinstance(own, UserError):
                    raise own
                told = self._take_rows(share, own, step.end)
                made += told.tokens
                if share.drafts:
                    held[share.run] = len(share.drafts), told.held
            except (StepFailed, UserError) as error:
                self.jobs.fail(share.run, error, step.end)
            except Exception as error:
                log.exception("a job failed")
                self.jobs.fail(share.run, error, step.end)
        self._note_step(step, made, held)

    def _take_rows(self, share: Share, rows: Sequence[Row], now: float) -> "Told":
        """What a step made of one text."""
        run = share.run
        if share.decodes:
            return self._take_tokens(run, rows, share.drafts, now)
        assert run.text is not None
        done, prompt = len(run.text.ids), len(run.job.prompt)
        if scores(run):
            score_rows(run, done - share.count, rows)
            if not run.remaining and len(run.scored) < prompt:
                raise StepFailed("not all of the prompt was scored")
        if not run.made:
            told = tuple(run.scored) if run.job.scored and not run.remaining else ()
            if not run.tell(Progress(done if run.remaining else prompt, prompt, run.text.cached, told)):
                self.jobs.end_run(run, Ended("cancelled"), now)
                return NOTHING_TOLD
        if run.remaining:
            return NOTHING_TOLD
        if not run.job.most:
            self.jobs.end_run(run, Ended("length"), now)
            return NOTHING_TOLD
        return self._take_tokens(run, rows[-1:], (), now)

    def _take_tokens(self, run: Request, rows: Sequence[Row], drafts: tuple[int, ...], now: float) -> "Told":
        """Draw the tokens after a text's last one, as many as its drafts let hold, and tell them at once."""
        assert run.text is not None
        drawn = draw_tokens(run, rows, drafts, self._made_up)
        if drafts:
            begin = perf_counter()
            held = len(run.text.ids) - len(drafts) + drawn.held
            # states take it in while the machine's own drafter computes the next drafts
            self.machine.pool.commit(run.text, held, self.machine.drafter is not None)
            self._settling += perf_counter() - begin
        told = Told(len(drawn.tokens), drawn.held)
        if drawn.tokens and not self._tell(run, drawn, now):
            self.jobs.end_run(run, Ended("cancelled"), now)
        elif drawn.error:
            raise drawn.error
        elif drawn.stopped:
            self.jobs.end_run(run, Ended("stop"), now)
        elif run.made >= run.job.most or len(run.tokens) >= self.machine.facts.longest:
            self.jobs.end_run(run, Ended("length"), now)
        return told

    def _tell(self, run: Request, drawn: Drawn, now: float) -> bool:
        """Hand tokens to whoever asked; whether they were taken. Those of one step come at once."""
        if not run.made:
            run.first = now
            self.tally.first_token.add(now - run.taken)
        else:
            self.tally.gap.add(now - run.last)
        for _ in drawn.tokens[1:]:
            self.tally.gap.add(0.0)
        run.last = now
        run.tokens += drawn.tokens
        return run.tell(Made(tuple(drawn.tokens), tuple(drawn.likely)))

    def _note_step(self, step: "StepDone", made: int, held: dict[Request, tuple[int, int]]) -> None:
        seconds = step.end - step.start
        if not step.switched:
            self.pace.observe(step.batch, step.tier, seconds + self._settling)
        self.drafts.note(held, None if step.batch.others.texts else seconds + self._settling)
        self.tally.add_drafts(held.values())
        moved, self._link_bytes = self._link_bytes, self.machine.link_bytes
        busy = self.machine.facts.busy.get(step.tier, ())
        scale = seconds / self.pace.planned(step.tier) if self.pace.planned(step.tier) else 0.0
        seen = StepSeen(
            number=self.tally.count["steps"],
            start=step.start - self.tally.start,
            seconds=seconds,
            tier=step.tier,
            decodes=step.batch.decoding.tokens,
            prompts=step.batch.others.tokens,
            link_bytes=self._link_bytes - moved,
            busy=tuple((name, min(seconds, value * scale)) for name, value in busy),
            switched=step.switched,
        )
        self.tally.add_step(seen, made)


@dataclass(frozen=True)
class Told:
    """What a step told of a text: how many tokens, and how many of its drafts held."""

    tokens: int
    held: int


NOTHING_TOLD = Told(0, 0)


@dataclass(frozen=True)
class StepDone:
    """A step that was computed: seconds on the scheduler's clock."""

    shares: Sequence[Share]
    batch: Batch
    tier: int
    switched: bool
    start: float
    end: float


def count_cells(runs: Sequence[Request]) -> int:
    """Cells that texts have."""
    return sum(len(run.text.ids) for run in runs if run.text is not None)


def run_step(
    scheduler: Scheduler,
    clock: Callable[[], float],
    lock: AbstractContextManager,
    meanwhile: Callable[[], None],
    given_up: Callable[[Collection[str]], bool] = lambda _: False,
) -> bool:
    """Compute one step; whether there was any. What the machine raises comes through.

    lock: held while jobs change hands, not while the machine computes. meanwhile: called when it does, or does not.
    given_up: whether jobs with these ids are all about to be ended. A sweep that only has such ends early, and their
    texts are closed.
    """
    start = clock()
    with lock:
        shares = scheduler.plan(start)
        if not shares:
            meanwhile()
            return False
        before = scheduler.choice.in_force
        kept, pieces = scheduler.pieces(shares, start)
        if not kept:
            meanwhile()
            return True
        batch = Batch(tuple(piece.span for piece in pieces))
        tier = scheduler.choose_tier(batch)
    begun = clock()
    try:
        ids = frozenset(share.run.job.id for share in kept)
        rows: Sequence[Sequence[Row] | UserError] = scheduler.machine.pool.step(
            pieces, meanwhile, partial(given_up, ids)
        )
    except GivenUp:
        return True
    except UserError:
        meanwhile()
        rows = _step_alone(scheduler, pieces)
    end = clock()
    with lock:
        switched = before != tier
        scheduler.settle(StepDone(kept, batch, tier, switched, begun, end), rows)
    return True


def _step_alone(scheduler: Scheduler, pieces: Sequence[Piece]) -> list[Sequence[Row] | UserError]:
    """One of the pieces is refused, and nothing has changed: compute each by itself, so that it alone fails."""
    found: list[Sequence[Row] | UserError] = []
    for piece in pieces:
        try:
            found += scheduler.machine.pool.step([piece])
        except UserError as error:
            found.append(error)
    return found
