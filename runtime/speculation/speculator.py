"""Goes on with one text, several tokens a step where drafts hold: the tokens are those of steps of one token."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from pshard.batch import VERIFY
from pshard.errors import StepFailed
from pshard.runtime.sampling import Sampler
from pshard.runtime.sampling.sampler import NO_NUMBERS
from pshard.runtime.speculation.accept import MadeUp, match_drafts
from pshard.runtime.speculation.draft_length import DraftLength, StepSeconds
from pshard.runtime.speculation.prompt_lookup import LONG, PromptLookup
from pshard.runtime.speculation.rank_drafts import Program
from pshard.runtime.speculation.second_program import Ask
from pshard.runtime.texts.follower import Follower
from pshard.runtime.texts.text import Piece, Row, Text
from pshard.runtime.texts.text_pool import TextPool
from pshard.speculation import LOOKUP, NONE, PROGRAMS, Acceptance, AcceptanceRecord, looks_first

IDLE = 8  # steps without drafts before they run under their own tier again


class Drafter(Protocol):
    """Who drafts what follows one text."""

    def see(self, tokens: Iterable[int]) -> None:
        """What came: of the prompt, and what was told. Never drafts."""
        ...

    def draft(self, most: int) -> tuple[int, ...]:
        """At most so many tokens that may follow the last one."""
        ...


class HeadDrafter:
    """A head, or a draft model, that drafts for one text. It has seen what was computed of it."""

    def __init__(self, head: Program, text: Text, p_min: float, aside: Callable[[int], None]) -> None:
        """p_min: see Ask. aside: called while so many drafts are computed."""
        self._head, self._text, self._p_min, self._aside, self._last = head, text, p_min, aside, -1

    def see(self, tokens: Iterable[int]) -> None:
        """See Drafter."""
        for token in tokens:
            self._last = token

    def draft(self, most: int) -> tuple[int, ...]:
        """See Drafter."""
        if most < 1:
            return ()
        asked = Ask(self._text, (self._last,), most, self._p_min)
        return self._head.draft([asked], partial(self._aside, most))[0]


@dataclass
class DraftSeconds:
    """Seconds that drafting took, for how many drafts; looked_up: how many more lookup found before it. rested: steps
    that were to have none, which say nothing of how likely drafts are found, or hold."""

    seconds: float = 0.0
    drafts: int = 0
    looked_up: int = 0
    rested: int = 0


@dataclass
class Source:
    """Somebody who drafts for a text, and how much. rows: of the last step with drafts of it; idle: steps since."""

    drafter: Drafter
    length: DraftLength
    rows: int = 0
    idle: int = 0


@dataclass(frozen=True)
class DraftSettings:
    """What is asked of it. kind: who drafts; most: drafts of a step; fixed: never fewer, where there are some.
    made_up: chances at which drafts are said to hold, whatever the model says: the text means nothing then. record:
    what became of drafts is counted here, of steps that were to have some, and in `spent` how long they took. p_min: a
    head's or a model's draft ends before a token that it finds less likely."""

    kind: str = NONE
    most: int = 0
    fixed: bool = False
    made_up: Acceptance | None = None
    record: AcceptanceRecord = field(default_factory=lambda: AcceptanceRecord(LOOKUP))
    spent: DraftSeconds = field(default_factory=DraftSeconds)
    p_min: float = 0.0

    @property
    def steps(self) -> int:
        """All that were counted, those that were to have no drafts too."""
        return self.record.steps + self.spent.rested


class Speculator:
    """That of one text of a pool."""

    def __init__(
        self,
        pool: TextPool,
        text: Text,
        sampler: Sampler,
        wanted: DraftSettings,
        seconds: StepSeconds,
        stops: Collection[int] = (),
        head: Follower | None = None,
        agree: Callable[[int], int] = lambda number: number,
    ) -> None:
        """sampler: has seen what the text has. seconds: of steps of the pool. head: drafts, where one is to. agree:
        rank 0's number on every rank, as what pays is found by each one's clock."""
        self._pool, self._text, self._sampler, self._record = pool, text, sampler, wanted.record
        self._spent = wanted.spent
        self._made_up = MadeUp(wanted.made_up) if wanted.made_up else None
        self._stops = () if self._made_up else stops
        self._held: int | None = None  # how much of the text holds, where drafts behind it are still there
        self._note: Callable[[float], None] | None = None  # the last step, once it is known what holds of it
        # whether states are yet to take in what holds; seconds that this took the last time, and in all
        self._unsettled, self._settling, self._settled = False, 0.0, 0.0
        self._seconds, self._tier, self._agree = seconds, 0, agree
        self._sources = tuple(self._list_sources(wanted, head))

    def _list_sources(self, wanted: DraftSettings, head: Follower | None) -> Iterator[Source]:
        """Who drafts, in the order in which they are asked."""
        most = wanted.most
        if wanted.kind == LOOKUP or looks_first(wanted.kind):
            lookup = PromptLookup() if wanted.kind == LOOKUP else PromptLookup(LONG)
            yield Source(lookup, DraftLength(most, self._seconds, wanted.fixed))
        if wanted.kind in PROGRAMS:
            assert isinstance(head, Program), "whoever asks for its drafts has a plan with it"
            drafter = HeadDrafter(head, self._text, wanted.p_min, self._go_ahead)
            yield Source(drafter, DraftLength(most, self._seconds, wanted.fixed))

    def _see(self, tokens: Sequence[int]) -> None:
        for source in self._sources:
            source.drafter.see(tokens)

    def go_on(self, before: Sequence[int], first: int, most: int) -> Iterator[int]:
        """Tokens of the text, at most so many. before: those that came before the first one, which was drawn and is not
        computed. They end before a stop, and where the context does. Whoever leaves early finds the text as if its
        tokens had come one by one."""
        self._see(before)
        token, told = first, 1
        if first in self._stops or most < 1:
            return
        yield first
        try:
            while told < most and self._has_room(1):
                start = self._count_tokens()
                tokens = self._step(token, most - told - 1)
                for at, token in enumerate(tokens, start + 1):
                    if token in self._stops:
                        self._commit()
                        return
                    told += 1
                    try:
                        yield token
                    except GeneratorExit:
                        self._cut(at)
                        raise
            self._commit()
        finally:
            if self._text.is_open:
                self._pool.keep_tier(1)

    def _step(self, token: int, most: int) -> list[int]:
        """Compute a token and drafts of at most so many more; the tokens that follow."""
        self._commit(later=True)
        self._see((token,))
        source, wanted, drafts, drafting = self._draft(token, most)
        self._settle()
        self._keep_tier(source, len(drafts) and wanted + 1)
        begin = time.perf_counter()
        told = self._verify(token, drafts) if drafts else [self._compute(token)]
        seconds = time.perf_counter() - begin
        self._see(told[:-1])
        length = source.length if wanted else None
        if length:
            self._record.add(len(drafts), len(told) - 1)
        else:
            self._spent.rested += 1
        self._note = partial(self._note_step, length, len(drafts), len(told) - 1, seconds, drafting)
        return told

    def _note_step(
        self, length: DraftLength | None, drafted: int, accepted: int, seconds: float, drafting: float, settling: float
    ) -> None:
        """What a step took, and taking the rows that hold into states. length: of whose drafts, where there was a
        choice of some."""
        self._seconds.observe(drafted + 1, self._tier, seconds + settling)
        if length:
            length.note(drafted, accepted, seconds + settling, drafting)

    def _draft(self, token: int, most: int) -> tuple[Source, int, tuple[int, ...], float]:
        """Drafts of the first who has some, at most so many; whose they are, how many were wanted, 0 where there is no
        room for any, and the seconds that they took."""
        for source in self._sources:
            begin = time.perf_counter()
            wanted = self._agree(source.length.choose())
            room = self._count_room(min(wanted, most))
            settled = self._settled
            drafts = source.drafter.draft(room)
            drafting = time.perf_counter() - begin - (self._settled - settled)
            if source is self._sources[-1]:
                self._spent.seconds += drafting
                self._spent.drafts += len(drafts)
            elif drafts:
                self._spent.looked_up += len(drafts)
            else:
                if wanted:
                    source.length.miss()
                continue
            if self._made_up:
                drafts += (token,) * (room - len(drafts))
            return source, wanted if room else 0, drafts, drafting
        raise AssertionError("somebody drafts")

    def _compute(self, token: int) -> int:
        """The token after one, by a step without drafts."""
        greedy = self._sampler.greedy
        ((row,),) = self._pool.extend([(self._text, [token])], best_only=greedy)
        return self._sampler.take_best(*row.tolist()) if greedy else self._sampler.choose(row)

    def _verify(self, token: int, drafts: tuple[int, ...]) -> list[int]:
        """The tokens after one, by a step that verifies drafts."""
        text, greedy = self._text, self._sampler.greedy
        start = len(text.ids)
        piece = Piece(text, (token, *drafts), "all", best=int(greedy), full=not greedy, kind=VERIFY)
        rows = self._pool.step([piece])[0]
        try:
            told = self._tell(rows, drafts)
        except BaseException:
            self._pool.commit(text, start)  # else its drafts would hold up all texts
            raise
        self._held = start + len(told)
        return told

    def _commit(self, length: int | None = None, later: bool = False) -> None:
        """Let the text have what holds of it, or less. Not before the next step: whoever leaves keeps what was told.
        later: its states have it once they are settled, which takes as long as the last time."""
        held, self._held = self._held, None
        begin, settling = time.perf_counter(), 0.0
        if held is not None:
            self._pool.commit(self._text, held if length is None else min(length, held), later)
            self._unsettled = later
            settling = time.perf_counter() - begin + (self._settling if later else 0.0)
        note, self._note = self._note, None
        if note:
            note(settling)

    def _settle(self) -> None:
        """Let the text's states have what holds of it."""
        unsettled, self._unsettled = self._unsettled, False
        if unsettled:
            begin = time.perf_counter()
            self._pool.settle()
            self._settling = time.perf_counter() - begin
            self._settled += self._settling

    def _go_ahead(self, drafts: int) -> None:
        """What needs no drafts, while so many are computed."""
        self._settle()
        self._pool.runner.make_ready(self._text, 1 + drafts)

    def _tell(self, rows: Sequence[Row], drafts: Sequence[int]) -> list[int]:
        if self._made_up:
            held = self._made_up.count(len(drafts))
            self._sampler.see(drafts[:held])
            return [*drafts[:held], self._draw(rows[held])]
        return match_drafts(lambda at: self._draw(rows[at]), drafts, self._stops)

    def _draw(self, row: Row) -> int:
        """The next token from a row of logits. Raises StepFailed where these are no numbers."""
        if row.bad:
            raise StepFailed(NO_NUMBERS)
        if row.full is None:
            return self._sampler.take_best(float(row.logits[0]), int(row.ids[0]))
        return self._sampler.choose(torch.from_numpy(row.full))

    def _count_tokens(self) -> int:
        """Tokens of the text that hold."""
        return len(self._text.ids) if self._held is None else self._held

    def _has_room(self, tokens: int) -> bool:
        cells = self._count_tokens() + tokens
        return cells <= self._pool.longest and not self._pool.missing({self._text: cells})

    def _count_room(self, most: int) -> int:
        """So many drafts, or as many as the context and the KV blocks have room for."""
        return next((drafts for drafts in range(most, 0, -1) if self._has_room(1 + drafts)), 0)

    def _keep_tier(self, source: Source, rows: int) -> None:
        """Steps without drafts (rows 0), or with fewer, between those that have some run under their tier: going to and
        fro would move weights. source: whose the drafts are."""
        for each in self._sources:
            each.idle += 1
        if rows:
            source.rows, source.idle = rows, 0
        tier = self._seconds.tier(max([1, *(each.rows for each in self._sources if each.idle < IDLE)]))
        if tier != self._tier:
            self._pool.keep_tier(tier)
            self._tier = tier

    def _cut(self, length: int) -> None:
        """Let the text have its first tokens only."""
        self._commit(length)
        if length < len(self._text.ids) and (again := self._pool.cut(self._text, length)):
            self._pool.extend([(self._text, again)], best_only=True)
