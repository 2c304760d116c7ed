"""Which drafts a step verifies: as many as bring most tokens a second over all texts that decode."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from time import perf_counter
from weakref import WeakKeyDictionary

from pshard.runtime.speculation.draft_length import WEIGHT, DraftChances
from pshard.runtime.speculation.prompt_lookup import LONG, SHORTEST, PromptLookup
from pshard.runtime.texts.text import Text
from pshard.server.scheduling.pace import Pace
from pshard.server.scheduling.request import Request
from pshard.server.scheduling.served_machine import Asked, Machine, TextDrafter
from pshard.speculation import DRAFT, MOST_DRAFTS, MOST_ROWS, MTP, looks_first

READ = 4096  # tokens of a text that lookup reads before a step: more would hold up all others

Drafts = dict[Request, tuple[int, ...]]


class LookupDrafter:
    """Prompt lookup for every text that is open."""

    def __init__(self, least: int = SHORTEST) -> None:
        """least: see PromptLookup."""
        self._least = least
        self._seen: WeakKeyDictionary[Text, tuple[PromptLookup, int]] = WeakKeyDictionary()

    def draft(self, asked: Sequence[Asked]) -> list[tuple[int, ...]]:
        """As `TextDrafter.draft`; none for a text while it is read."""
        return [self._look_up(*one) for one in asked]

    def _look_up(self, text: Text, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        lookup, seen = self._seen.get(text) or (PromptLookup(self._least), 0)
        new = tokens[seen : seen + READ]
        lookup.see(new)
        self._seen[text] = lookup, seen + len(new)
        return lookup.draft(most) if seen + len(new) == len(tokens) else ()


@dataclass(frozen=True)
class Offer:
    """Drafts that a text may have. chances: of whom they are from; rates: those that the first, the first two, ...
    hold; least: so many are verified whatever that takes. found: those that are known already."""

    run: Request
    chances: DraftChances
    rates: tuple[float, ...]
    least: int
    found: tuple[int, ...] = ()


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

    def __init__(self, machine: Machine, pace: Pace) -> None:
        self._facts, self._pace, self._pool = machine.facts, pace, machine.pool
        self._settings = machine.facts.drafts
        lookup = LookupDrafter(LONG) if looks_first(self._settings.kind) else LookupDrafter()
        self._lookup: TextDrafter | None = None if self._settings.kind in (MTP, DRAFT) else lookup
        self._program = machine.drafter  # asked where lookup finds nothing
        self._asked: dict[Request, list[DraftChances]] = {}  # of texts that the present step was asked for drafts of
        self._drafted: dict[Request, DraftChances] = {}  # whose drafts the present step has
        self._base = Base(1, 1, 0, 1.0, 0.0)
        self._each, self._spent = 0.0, 0.0  # seconds of a draft in the mean; of drafting for the present step

    def choose(self, running: Sequence[Request], gap: float) -> Drafts:
        """Drafts of those texts that decode; one without any is left out. gap: seconds that a step keeps to, if it can.
        Where nobody drafts, no text is looked at."""
        if not self._settings.most:
            return {}
        self._asked, self._drafted = {}, {}
        self._spent = 0.0
        decoding = [run for run in running if run.decodes]
        rows = sum(run.remaining for run in decoding)
        if not 0 < rows < self._facts.tiers[-1]:
            return {}
        offers = list(self._list_offers(decoding))
        cells = sum(len(run.text.ids) for run in decoding if run.text)
        alone = self._pace.expect_rows(rows, cells, self._pace.covering(rows))
        shares = [chances.share for asked in self._asked.values() for chances in asked]
        self._base = Base(len(decoding), rows, cells, alone, 1 - prod(1 - share for share in shares))
        kept = self._keep(offers, gap)
        drafts = {one.run: one.found[: len(one.rates)] for one in kept if one.found}
        if self._program:
            drafts |= self._draft([one for one in kept if not one.found])
        self._drafted = {one.run: one.chances for one in kept if one.run in drafts}
        return drafts

    def _list_offers(self, runs: Sequence[Request]) -> Iterator[Offer]:
        """What texts may have: what lookup finds, or what the program drafts where it finds nothing."""
        for run in runs:
            most = self._count_room(run)
            if most < 1:
                continue
            run.chances = run.chances or DraftChances(MOST_DRAFTS)
            if self._lookup:
                run.looked_up = (run.looked_up or DraftChances(MOST_DRAFTS)) if self._program else run.chances
                if (offer := self._offer(run, run.looked_up, most)) and (found := self._look_up(offer)):
                    yield replace(offer, rates=offer.rates[: len(found)], found=found)
                    continue
            if self._program and (offer := self._offer(run, run.chances, most)):
                yield offer

    def _offer(self, run: Request, chances: DraftChances, most: int) -> Offer | None:
        """What a text may have of one who drafts, if anything."""
        wanted = most if self._settings.fixed else min(most, chances.begin())
        if not wanted:
            return None
        self._asked.setdefault(run, []).append(chances)
        return Offer(run, chances, chances.rates[:wanted], chances.least)

    def _look_up(self, offer: Offer) -> tuple[int, ...]:
        """What lookup drafts for a text."""
        assert self._lookup and offer.run.text
        (found,) = self._lookup.draft([(offer.run.text, offer.run.tokens, len(offer.rates))])
        return self._fit(offer, found) if found or not self._program else ()

    def _draft(self, offers: Sequence[Offer]) -> Drafts:
        """What the program drafts, at most so many of each; a text without any is left out."""
        asked = [(one.run.text, one.run.tokens, len(one.rates)) for one in offers if one.run.text is not None]
        if not asked or self._pool.missing({text: len(ids) + n for text, ids, n in asked}):
            return {}
        assert self._program
        begin = perf_counter()
        found = self._program.draft(asked)
        self._spent = perf_counter() - begin
        each = self._spent / max(n for _, _, n in asked)
        self._each += (WEIGHT if self._each else 1.0) * (each - self._each)
        return {one.run: own for one, drafts in zip(offers, found) if (own := self._fit(one, drafts))}

    def _fit(self, offer: Offer, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """A text's drafts up to where it ends; with chances that are made up as many as it may have."""
        drafts = cut_at_stop(drafts, offer.run.job.stops)
        if self._settings.made_up:
            drafts += (offer.run.tokens[-1],) * (len(offer.rates) - len(drafts))
        return drafts

    def _keep(self, offers: Sequence[Offer], gap: float) -> list[Offer]:
        """The offers with as many drafts as are worth it; a text of which none are rests."""
        kept = list[Offer]()
        for offer, count in zip(offers, self._count(offers, gap)):
            if count:
                kept.append(replace(offer, rates=offer.rates[:count]))
            else:
                offer.chances.rest(self._base.seconds / self._base.texts)
                self._asked[offer.run].remove(offer.chances)
        return kept

    def _count_room(self, run: Request) -> int:
        """Drafts that a text may have at most."""
        job, most = run.job, self._settings.most
        if self._settings.made_up and (job.constrain or job.likely is not None):
            return 0  # of what is made up a grammar and log-probabilities know nothing
        left = min(job.most - run.made, self._facts.longest - len(run.tokens)) - 1  # one token comes without
        return min(most, most if job.drafts is None else job.drafts, left, min(MOST_ROWS, self._facts.open_rows) - 1)

    def _count(self, offers: Sequence[Offer], gap: float) -> list[int]:
        """How many drafts of each offer are verified: of all texts those go first that hold most likely."""
        base, fixed = self._base, self._settings.fixed
        every = [(at >= one.least, -rate, i, at) for i, one in enumerate(offers) for at, rate in enumerate(one.rates)]
        every = sorted(every)[: self._facts.tiers[-1] - base.rows]
        best, best_rate, brought, depth = 0, base.texts / base.seconds, float(base.texts), 0
        opened = set[int]()
        for count, (step, alone) in enumerate(self._time(len(every)), 1):
            chosen, less, chosen_of, at = every[count - 1]
            opened.add(chosen_of)
            if count + len(opened) > self._facts.open_rows:
                break
            depth = depth if offers[chosen_of].found else max(depth, at + 1)
            step += depth * self._each
            if step > gap:
                break
            brought -= less
            tokens = base.found * brought + (1 - base.found) * base.texts
            rate = tokens / (base.found * step + (1 - base.found) * alone)
            if fixed or not chosen or rate > best_rate:
                best, best_rate = count, rate
        counts = [0] * len(offers)
        for _, _, i, _ in every[:best]:
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
        more = 0.0 if seconds is None or not all_drafts else (seconds + self._spent - base.seconds) / all_drafts
        for run, asked in self._asked.items():
            for chances in asked:
                drafted, accepted = held.get(run, (0, 0)) if self._drafted.get(run) is chances else (0, 0)
                chances.note(drafted, accepted, more * drafted - accepted * base.seconds / base.texts)
        self._asked = {}


def cut_at_stop(drafts: tuple[int, ...], stops: Collection[int]) -> tuple[int, ...]:
    """Those before the first that ends a text: its own row is not needed, and nothing comes behind it."""
    return drafts[: next((i for i, token in enumerate(drafts) if token in stops), len(drafts))]
