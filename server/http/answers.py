"""From prompts to answers: jobs of a request, and what their events say, whole or bit by bit."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pshard.server.api.asks import Generation
from pshard.server.api.faults import Fault
from pshard.server.api.tables.sampling_fields import seed_choice
from pshard.server.http.desk import Desk
from pshard.server.http.running import Running
from pshard.server.jobs import Ended, Event, Job, Likely, Made, Progress
from pshard.server.shapes.usage import Usage
from pshard.server.text.answer_reader import AnswerReader, Delta, join_deltas
from pshard.server.text.prompts import Prompt

if TYPE_CHECKING:
    from pshard.runtime.sampling import Constraint


@dataclass(frozen=True)
class Asked:
    """What is to be made: answers to prompts. constrain: what each is to follow. scored: the prompts' tokens too."""

    id: str
    key: str
    prompts: Sequence[Prompt]
    generation: Generation
    constrain: "Callable[[], Constraint] | None" = None
    scored: bool = False


@dataclass
class Answer:
    """One answer while it is made. reason: why it ended, "" before. first: when its first token came, by
    `time.monotonic`; 0: not yet."""

    prompt: Prompt
    reader: AnswerReader
    reason: str = ""
    cached: int = 0
    first: float = 0.0
    scored: tuple[Likely, ...] = ()
    whole: Delta = field(default_factory=Delta)


class Answers:
    """All answers of a request, made at once; `all` has them in order, choices of the same prompt together."""

    def __init__(self, desk: Desk, asked: Asked) -> None:
        self._choices, self._ping = asked.generation.choices, desk.limits.ping_seconds
        self._prompts = asked.prompts
        tokenizer, stops = desk.model.tokenizer, asked.generation.stops
        pairs = [(prompt, choice) for prompt in asked.prompts for choice in range(self._choices)]
        self.all = [Answer(prompt, AnswerReader(tokenizer, stops, prompt.format)) for prompt, _ in pairs]
        context = desk.model.context
        jobs = [make_job(asked, prompt, choice, i, context) for i, (prompt, choice) in enumerate(pairs)]
        if desk.apart:
            jobs = [replace(job, salt=asked.key) for job in jobs]
        self._ends = [
            frozenset[int]() if job.stops or asked.generation.ignore_end else a.prompt.ends
            for job, a in zip(jobs, self.all)
        ]
        self._running = Running(desk.service, jobs, desk.board)

    def start(self) -> None:
        """Submit the jobs. Raises Fault when they are refused."""
        self._running.start()

    async def tell(
        self, show: Callable[[int, Delta], Iterator[bytes]], ping: Callable[[], bytes]
    ) -> AsyncIterator[bytes]:
        """What `show` writes of what is new of which answer, as it comes; an answer's last change has its `reason`. And
        pings when nothing was written for a while: steps of a long prompt say nothing, nor does a call that is told
        when it is whole. Raises Fault when an answer fails."""
        now = asyncio.get_running_loop().time
        said = now()
        async with aclosing(self._running.events(self._ping)) as events:
            async for batch in events:
                silent = True
                for index, delta in self._read(batch):
                    for piece in show(index, delta):
                        silent = False
                        yield piece
                if not silent:
                    said = now()
                elif not batch or now() - said >= self._ping:
                    said = now()
                    yield ping()

    async def gather(self) -> None:
        """Wait until all have ended; each then has its `whole`. Raises Fault when one fails."""
        async with aclosing(self._running.events(self._ping)) as events:
            async for batch in events:
                for index, delta in self._read(batch):
                    self.all[index].whole = add_deltas(self.all[index].whole, delta)

    def usage(self) -> Usage:
        """Counts so far. A prompt counts once, however many answers it has."""
        first = self.all[:: self._choices]
        prompt = sum(len(p.ids) for p in self._prompts)
        return Usage(prompt, sum(a.cached for a in first), sum(a.reader.count for a in self.all))

    def cancel(self) -> None:
        """End all of it."""
        self._running.cancel()

    def _read(self, batch: list[tuple[int, Event]]) -> Iterator[tuple[int, Delta]]:
        """What a batch of events says of which answer, in order."""
        for index, event in batch:
            for delta in self._take(index, event):
                yield index, delta

    def _take(self, index: int, event: Event) -> Iterator[Delta]:
        answer = self.all[index]
        match event:
            case Progress():
                answer.cached = event.cached
                answer.scored += event.scored
                yield Delta()
            case Made() if not answer.reason:
                answer.first = answer.first or time.monotonic()
                parts = answer.reader.push(event)
                if not answer.reader.ended:
                    yield from parts
                    return
                self._running.stop(index)
                yield from _end(answer, [*parts, *answer.reader.finish()], "stop")
            case Ended() if not answer.reason:
                if event.reason not in ("stop", "length"):
                    raise _fault_of(event)
                rest = answer.reader.finish()
                ended = answer.reader.ended or (answer.reader.ids[-1:] and answer.reader.ids[-1] in self._ends[index])
                yield from _end(answer, rest, "stop" if ended else event.reason)


def _end(answer: Answer, parts: list[Delta], reason: str) -> Iterator[Delta]:
    *before, last = join_deltas(parts)
    yield from before
    answer.reason = reason
    yield last


def make_job(asked: Asked, prompt: Prompt, choice: int, index: int, context: int) -> Job:
    """One answer as the scheduler takes it."""
    d = asked.generation
    room = context - len(prompt.ids) + 1
    most = room if d.most is None else min(d.most, room)
    single = most == 1 and d.likely is not None  # an end is a token too, where harnesses leave out the last one
    return Job(
        id=f"{asked.id}/{index}",
        prompt=prompt.ids,
        most=most,
        sampling=seed_choice(d.sampling, choice),
        stops=frozenset() if d.ignore_end or single else prompt.ends,
        likely=d.likely,
        scored=asked.scored,
        constrain=asked.constrain,
        key=asked.key,
        drafts=d.drafts,
    )


def add_deltas(first: Delta, second: Delta) -> Delta:
    """Both as one."""
    return Delta(
        first.text + second.text,
        first.thought + second.thought,
        first.calls + second.calls,
        first.entries + second.entries,
    )


def _fault_of(ended: Ended) -> Fault:
    if ended.reason == "cancelled":
        return Fault(503, ended.message or "the server ended the request", code="cancelled", retry_after=1)
    if ended.asked:
        return Fault(400, ended.message, code="cannot_be_done")
    status = 503 if ended.retry else 500
    return Fault(status, ended.message or "the server failed", code="unavailable" if ended.retry else "server_error")
