"""Speculation: how likely drafts are accepted, what a step then brings, and how many drafts pay. No torch.

Words: a step verifies `drafts` drafts in drafts + 1 rows; it brings the accepted ones and one token more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from operator import mul

from pshard.errors import UserError

NONE, LOOKUP, MTP, DRAFT = "none", "lookup", "mtp", "draft"  # drafters
LOOKUP_MTP, LOOKUP_DRAFT = f"{LOOKUP},{MTP}", f"{LOOKUP},{DRAFT}"  # lookup first, and the other where it finds nothing
PROGRAMS = {MTP: MTP, DRAFT: DRAFT, LOOKUP_MTP: MTP, LOOKUP_DRAFT: DRAFT}  # who computes beside the model, by drafter
AUTO = "auto"  # the best of these that there is
DRAFTERS = (NONE, LOOKUP, *PROGRAMS)
GIVEN, RECORDED, ASSUMED = "given", "recorded", "assumed"  # where an acceptance is from
SOURCES = (GIVEN, RECORDED, ASSUMED)
PLANNED_DRAFTS = (1, 2, 3, 5, 7, 11, 15)  # numbers of drafts that a plan is tried with
MOST_DRAFTS = PLANNED_DRAFTS[-1]  # of a step
# of a text's step, with what is computed again: of more a delta net's rows lose the bits of single tokens
MOST_ROWS = 16
USUAL_OPEN = 4  # rows of a text's step that a plan without drafts has room for, where lookup drafts all the same
USUAL_CHANCES = (0.5, 0.65, 0.8)  # of a draft, that tables show beside an assumed one
SHIFT = 0.1  # by which a draft's chance may be lower or higher than in a record or as it was given


@dataclass(frozen=True)
class Drafting:
    """Who drafts (DRAFTERS), and how many drafts a step verifies at most. Raises ValueError where both disagree."""

    kind: str = NONE
    drafts: int = 0

    def __post_init__(self) -> None:
        if self.kind not in DRAFTERS or not 0 <= self.drafts <= MOST_DRAFTS:
            raise ValueError(f"{self.drafts} drafts of {self.kind!r} are no drafting")
        if (self.kind == NONE) != (self.drafts == 0):
            raise ValueError(f"{self.drafts} drafts cannot come from {self.kind!r}")

    @property
    def rows(self) -> int:
        """Of a text's step with all drafts."""
        return self.drafts + 1

    def __str__(self) -> str:
        return f"{self.drafts} draft{'s' * (self.drafts != 1)} of {self.kind}" if self.drafts else "no drafts"


NO_DRAFTS = Drafting()


@dataclass(frozen=True)
class Acceptance:
    """How likely drafts are accepted. `rates`: the chances that the first, the first two, ... of a step's drafts all
    are; a shorter list goes on by its last ratio. source: one of SOURCES. share: of steps that have drafts at all; the
    others are steps of one row. Raises ValueError for chances that rise or lie outside 0 to 1, or for none."""

    rates: tuple[float, ...]
    source: str = GIVEN
    share: float = 1.0

    def __post_init__(self) -> None:
        if not self.rates or self.source not in SOURCES:
            raise ValueError(f"{self.rates} from {self.source!r} is no acceptance")
        if not all(0 <= rate <= 1 for rate in (*self.rates, self.share)):
            raise ValueError("chances lie between 0 and 1")
        if any(later > earlier for earlier, later in zip(self.rates, self.rates[1:])):
            raise ValueError("chances that more drafts are all accepted cannot rise")

    def shift(self, by: float) -> "Acceptance":
        """The same with every draft's chance, after those before it, so much higher."""
        rates, last = list[float](), 1.0
        for before, rate in zip((1.0, *self.rates), self.rates):
            last *= min(1.0, max(0.0, (rate / before if before else 0.0) + by))
            rates.append(last)
        return replace(self, rates=tuple(rates))

    def __str__(self) -> str:
        return ",".join(f"{rate:.3g}".replace("0.", ".", 1) for rate in self.rates)

    def at(self, drafts: int) -> float:
        """The chance that the first so many drafts of a step are all accepted."""
        known = len(self.rates)
        if drafts <= known:
            return self.rates[drafts - 1] if drafts else 1.0
        last, before = self.rates[-1], self.rates[-2] if known > 1 else 1.0
        return last * (last / before if before else 0.0) ** (drafts - known)

    def tokens(self, drafts: int) -> float:
        """What a step with so many drafts brings in the mean."""
        return 1 + sum(self.at(i) for i in range(1, drafts + 1))

    def mean_tokens(self, drafts: int) -> float:
        """The same over all steps, those without drafts too."""
        return 1 + self.share * (self.tokens(drafts) - 1)

    def mean_seconds(self, alone: float, step: float, drafting: float = 0.0) -> float:
        """Seconds of a step over all steps: `alone` those of one row, `step` with drafts, which take `drafting`."""
        return (1 - self.share) * alone + self.share * (step + drafting)

    def rate(self, drafts: int, alone: float, step: float, drafting: float = 0.0) -> float:
        """Tokens a second with so many drafts a step; seconds as in `mean_seconds`."""
        return self.mean_tokens(drafts) / self.mean_seconds(alone, step, drafting)


# what is taken where nothing is known, by who drafts (docs/speculation.md says where the figures are from)
ASSUMED_ACCEPTANCE = {
    LOOKUP: Acceptance((0.27,), ASSUMED),
    MTP: Acceptance((0.88, 0.7, 0.55), ASSUMED),
    DRAFT: Acceptance((0.5,), ASSUMED),
}
ASSUMED_ACCEPTANCE |= {kind: ASSUMED_ACCEPTANCE[program] for kind, program in PROGRAMS.items()}


def looks_first(kind: str) -> bool:
    """Whether lookup drafts before the program of a drafter does."""
    return kind in (LOOKUP_MTP, LOOKUP_DRAFT)


def best_drafts(acceptance: Acceptance, seconds: Mapping[int, float], draft_seconds: float = 0.0) -> int:
    """The number of drafts with the highest rate; of equal ones the smaller. seconds: of a step by its drafts, that of
    0 among them; draft_seconds: of a draft."""
    alone = seconds[0]

    def rate(drafts: int) -> float:
        return acceptance.rate(drafts, alone, seconds[drafts], drafts * draft_seconds)

    return max(sorted(seconds), key=lambda drafts: rate(drafts) if drafts else 1 / alone)


def break_even(drafts: int, alone: float, step: float, beside: float) -> float | None:
    """The chance, the same for every draft, from which on so many drafts a step are no slower than none; None where
    even drafts that are all accepted are slower. Seconds as in `Acceptance.mean_seconds`."""

    def pays(chance: float) -> bool:
        return Acceptance((chance,)).tokens(drafts) * alone >= step + beside

    if not pays(1.0):
        return None
    low, high = 0.0, 0.0 if pays(0.0) else 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def parse_acceptance(text: str, flag: str, source: str = GIVEN) -> Acceptance:
    """ ".8,.64,.51" -> chances that the first, the first two, the first three drafts are accepted. Raises UserError
    that names the flag."""
    try:
        return Acceptance(tuple(float(part) for part in text.split(",")), source)
    except ValueError:
        raise UserError(
            f"{flag} {text}: give the chances that the first, the first two, ... drafts are all accepted, from 0 to 1 "
            "and none above the one before it (.8,.64,.51)"
        ) from None


@dataclass
class AcceptanceRecord:
    """What became of a drafter's drafts, by position: `tried[i]` steps in which draft i + 1 followed accepted ones
    only, `held[i]` of them in which it was accepted too. steps: all, those without drafts too. Raises ValueError for
    counts that no steps have."""

    kind: str
    steps: int = 0
    tried: tuple[int, ...] = ()
    held: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        follows = (self.steps, *self.held)
        if self.kind not in DRAFTERS[1:] or len(self.tried) != len(self.held) or min(follows) < 0:
            raise ValueError(f"{self.kind!r} with {self.tried} tried and {self.held} held is no record of drafts")
        if any(tried > before for tried, before in zip(self.tried, follows)) or any(
            held > tried for held, tried in zip(self.held, self.tried)
        ):
            raise ValueError("more drafts are tried or held than there were before them")

    def add(self, drafted: int, accepted: int) -> None:
        """Count a step with so many drafts, of which the first `accepted` held."""
        if not 0 <= accepted <= drafted <= MOST_DRAFTS:
            raise ValueError(f"{accepted} of {drafted} drafts cannot be accepted")
        tried = (1,) * min(drafted, accepted + 1)
        self.join(AcceptanceRecord(self.kind, 1, tried, ((1,) * accepted + (0,))[: len(tried)]))

    def join(self, other: "AcceptanceRecord") -> None:
        """Count the other's steps too."""
        self.steps += other.steps
        self.tried = tuple(a + b for a, b in zip_longest(self.tried, other.tried, fillvalue=0))
        self.held = tuple(a + b for a, b in zip_longest(self.held, other.held, fillvalue=0))

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the drafts that were tried, by position, those that held."""
        return tuple(held / tried for held, tried in zip(self.held, self.tried) if tried)

    @property
    def acceptance(self) -> Acceptance | None:
        """The chances that it shows; None before the first draft. Each draft's chance is of those that were tried, so
        that steps of several lengths go together."""
        shares = self.shares
        return Acceptance(tuple(accumulate(shares, mul)), RECORDED, self.tried[0] / self.steps) if shares else None


@dataclass(frozen=True)
class DraftQuestion:
    """Which numbers of drafts of a drafter a plan may choose from, 0 among them where it may have none, and how likely
    they hold."""

    kind: str
    acceptance: Acceptance
    allowed: tuple[int, ...] = (0, *PLANNED_DRAFTS)


@dataclass(frozen=True)
class PlannedDrafts:
    """A number of drafts that was planned for, with places of its own. Seconds of a step of all texts that run, in the
    mean: `alone` with a row each, `step` with all drafts, which no plan can have below `bound`, and `drafting` to make
    these; `settling`, for the host to verify them, and to take the rows that hold into states that cannot be cut
    back. round_seconds: of a round of prompts and answers, which decides; 0 in plans of before it was kept."""

    drafts: int
    alone: float
    step: float
    bound: float
    drafting: float = 0.0
    settling: float = 0.0
    round_seconds: float = 0.0

    @property
    def beside(self) -> float:
        """Seconds beside those of a step with drafts."""
        return self.drafting + self.settling

    def rate(self, acceptance: Acceptance) -> float:
        """Tokens a second of each text."""
        if not self.drafts:
            return 1 / self.alone
        return acceptance.rate(self.drafts, self.alone, self.step, self.beside)


@dataclass(frozen=True)
class Speculation:
    """What a plan says of drafts: whose, how likely they hold, how many texts run in the mean, the numbers of drafts
    that were planned for, ascending from none. rows: under the plan that was chosen, seconds of a step of 1, 2, ...
    rows of one text; () where it has no drafts."""

    kind: str
    acceptance: Acceptance
    texts: float
    planned: tuple[PlannedDrafts, ...]
    rows: tuple[float, ...] = ()

    def beside(self, drafts: int) -> float:
        """Seconds beside those of a step with so many drafts; 0 where these were not planned for."""
        return next((p.beside for p in self.planned if p.drafts == drafts), 0.0)

    def rate(self, planned: PlannedDrafts, acceptance: Acceptance) -> float:
        """Tokens a second of all texts."""
        return self.texts * planned.rate(acceptance)

    def break_even(self, planned: PlannedDrafts) -> float | None:
        """From which chance of every draft on so many are no slower than the plan without; see `break_even`."""
        return break_even(planned.drafts, self.planned[0].alone, planned.step, planned.beside)

    def compared(self) -> tuple[Acceptance, ...]:
        """Acceptances to show rates at, each once: the own one, and beside it lower and higher ones, or usual ones
        where it is only assumed."""
        own = self.acceptance
        if own.source == ASSUMED:
            found = own, *(Acceptance((chance,), ASSUMED) for chance in USUAL_CHANCES)
        else:
            found = own.shift(-SHIFT), own, own.shift(SHIFT)  # where all drafts hold, none is higher
        return tuple(dict.fromkeys(found))
