"""Which drafts a step verifies: as many as bring most tokens a second over all texts that decode."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from weakref import WeakKeyDictionary

from pshard.runtime.speculation.draft_length import DraftChances
from pshard.runtime.speculation.prompt_lookup import PromptLookup
from pshard.runtime.texts.text import Text
from pshard.server.scheduling.pace import Pace
from pshard.server.scheduling.request import Request
from pshard.server.scheduling.served_machine import PlanFacts
from pshard.speculation import MOST_DRAFTS, MOST_ROWS

READ = 4096  # tokens of a text that lookup reads before a step: more would hold up all others

Drafts = dict[Request, tuple[int, ...]]


class LookupDrafter:
    """Prompt lookup for every text that is open."""

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[Text, tuple[PromptLookup, int]] = WeakKeyDictionary()

    def draft(self, text: Text, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """At most so many tokens that may follow those of a text; none while it is read."""
        lookup, seen = self._seen.get(text) or (PromptLookup(), 0)
        new = tokens[seen : seen + READ]
        lookup.see(new)
        self._seen[text] = lookup, seen + len(new)
        return lookup.draft(most) if seen + len(new) == len(tokens) else ()


@dataclass(frozen=True)
class Offer:
    """A text's drafts. rates: the chances that the first, the first two, ... hold; least: so many are verified whatever
    that takes."""

    run: Request
    drafts: tuple[int, ...]
    rates: tuple[float, ...]
    least: int


@dataclass(frozen=True)
class Base:
    """A step without drafts: rows and cells of its texts, and its seconds. found: the share of steps that have drafts,
    where there are to be some."""

    texts: int
    rows: int
    cells: int
    seconds: float
    found: float


class StepDrafts:
    """Drafts for the steps of one machine."""

    def __init__(self, facts: PlanFacts, pace: Pace) -> None:
        self._facts, self._pace, self._settings = facts, pace, facts.drafts
        self._drafter = LookupDrafter()
        self._asked: list[Request] = []  # texts that the present step was asked for drafts of
        self._base = Base(1, 1, 0, 1.0, 0.0)

    def choose(self, decoding: Sequence[Request], gap: float) -> Drafts:
        """Drafts of texts that decode; a text without any is left out. gap: seconds that a step keeps to, if it can."""
        self._asked.clear()
        rows = sum(run.remaining for run in decoding)
        if not self._settings.most or not 0 < rows < self._facts.tiers[-1]:
            return {}
        offers = [offer for run in self._order(decoding) if (offer := self._offer(run))]
        cells = sum(len(run.text.ids) for run in decoding if run.text)
        alone = self._pace.expect_rows(rows, cells, self._pace.covering(rows))
        found = 1 - prod(1 - run.chances.share for run in self._asked if run.chances)
        self._base = Base(len(decoding), rows, cells, alone, found)
        drafts: Drafts = {}
        for offer, count in zip(offers, self._count(offers, gap)):
            if count:
                drafts[offer.run] = offer.drafts[:count]
            elif offer.run.chances:
                offer.run.chances.rest(alone / len(decoding))
                self._asked.remove(offer.run)
        return drafts

    def _order(self, decoding: Sequence[Request]) -> Iterable[Request]:
        """Texts that may have drafts: those first whose states were copied for drafts before."""
        return islice(sorted(decoding, key=lambda run: not run.owed), self._facts.drafting)

    def _offer(self, run: Request) -> Offer | None:
        """What a text may have, if anything."""
        most = self._count_room(run)
        if most < 1 or run.text is None:
            return None
        if run.chances is None:
            run.chances = DraftChances(MOST_DRAFTS)
        wanted = most if self._settings.fixed else min(most, run.chances.begin())
        if not wanted:
            return None
        drafts = cut_at_stop(self._drafter.draft(run.text, run.tokens, wanted), run.job.stops)
        if self._settings.made_up:
            drafts += (run.tokens[-1],) * (wanted - len(drafts))
        self._asked.append(run)
        return Offer(run, drafts, run.chances.rates[: len(drafts)], run.chances.least) if drafts else None

    def _count_room(self, run: Request) -> int:
        """Drafts that a text may have at most."""
        job, most = run.job, self._settings.most
        if self._settings.made_up and (job.constrain or job.likely is not None):
            return 0  # of what is made up a grammar and log-probabilities know nothing
        left = min(job.most - run.made, self._facts.longest - len(run.tokens)) - 1  # one token comes without
        return min(most, most if job.drafts is None else job.drafts, left, MOST_ROWS - run.remaining)

    def _count(self, offers: Sequence[Offer], gap: float) -> list[int]:
        """How many drafts of each offer are verified: of all texts those go first that hold most likely."""
        base, fixed = self._base, self._settings.fixed
        every = [
            (place >= offer.least, -rate, i) for i, offer in enumerate(offers) for place, rate in enumerate(offer.rates)
        ]
        every = sorted(every)[: self._facts.tiers[-1] - base.rows]
        best, best_rate, brought = 0, base.texts / base.seconds, float(base.texts)
        for count, (step, alone) in enumerate(self._time(len(every)), 1):
            if step > gap:
                break
            chosen, less, _ = every[count - 1]
            brought -= less
            tokens = base.found * brought + (1 - base.found) * base.texts
            rate = tokens / (base.found * step + (1 - base.found) * alone)
            if fixed or not chosen or rate > best_rate:
                best, best_rate = count, rate
        counts = [0] * len(offers)
        for _, _, i in every[:best]:
            counts[i] += 1
        return counts

    def _time(self, most: int) -> Iterator[tuple[float, float]]:
        """Seconds of the step with one draft, two, ..., each under the tier that covers it, and without any under the
        same tier."""
        base, first = self._base, 1
        while first <= most:
            tier = self._pace.covering(base.rows + first)
            last = min(most, tier - base.rows)
            alone, begin, end = (
                self._pace.expect_rows(base.rows + drafts, base.cells, tier) for drafts in (0, first, last)
            )
            for i in range(last - first + 1):
                yield begin + (end - begin) * i / max(1, last - first), alone
            first = last + 1

    def note(self, held: Mapping[Request, tuple[int, int]], seconds: float | None) -> None:
        """What became of the present step's drafts: (how many there were, how many of them held). seconds: of the step;
        None where they say nothing of drafts."""
        all_drafts, base = sum(drafted for drafted, _ in held.values()), self._base
        more = 0.0 if seconds is None or not all_drafts else (seconds - base.seconds) / all_drafts
        for run in self._asked:
            drafted, accepted = held.get(run, (0, 0))
            if run.chances:
                run.chances.note(drafted, accepted, more * drafted - accepted * base.seconds / base.texts)
        self._asked.clear()


def cut_at_stop(drafts: tuple[int, ...], stops: Collection[int]) -> tuple[int, ...]:
    """Those before the first that ends a text: its own row is not needed, and nothing comes behind it."""
    return drafts[: next((i for i, token in enumerate(drafts) if token in stops), len(drafts))]
