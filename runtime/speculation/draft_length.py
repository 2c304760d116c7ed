"""How many drafts a text's next step verifies: as many as bring most tokens a second by what was seen. No torch."""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from statistics import median_low

from pshard.speculation import RECORDED, Acceptance

WEIGHT = 0.1  # of a new observation in a running mean
HOPE, AGAIN = 0.7, 0.5  # that a draft holds of which nothing is known, and when drafts are tried again
KEPT, ENOUGH = 9, 3  # of the last steps whose median counts; with fewer than enough the plan is asked
PAUSE, LONGEST_PAUSE = 32, 1024  # steps without drafts before they are tried again: twice as many each time they lose
LOSS = 0.02  # of the time until they are tried again, that a trial may have cost
TRIAL, FIRST = 2, 2  # steps with a draft then; drafts of a text's first step: more once all of them held


class StepSeconds:
    """Seconds of steps by their rows and tier: what was measured, and what the plan expects of those that never ran."""

    def __init__(self, planned: Mapping[int, float], rows: Sequence[float] = ()) -> None:
        """planned: seconds of a full micro-batch by tier; their ratios scale what was measured. rows: of a step of 1,
        2, ... rows, where the plan says them."""
        self._planned = {tier: max(1e-9, seconds) for tier, seconds in sorted(planned.items())}
        self._rows = tuple(max(1e-9, seconds) for seconds in rows)
        self._last: dict[tuple[int, int], deque[float]] = {}  # of each kind, but for the first, which may compile
        self._medians: dict[tuple[int, int], float] = {}

    def tier(self, rows: int) -> int:
        """The tier that covers so many rows."""
        return next(tokens for tokens in self._planned if tokens >= rows)

    def observe(self, rows: int, tier: int, seconds: float) -> None:
        """A step took so long."""
        if (last := self._last.get((rows, tier))) is None:
            self._last[rows, tier] = deque(maxlen=KEPT)
            return
        last.append(seconds)
        if len(last) >= ENOUGH:
            self._medians[rows, tier] = sorted(last)[len(last) // 2]

    def of(self, rows: int, tier: int) -> float:
        """Of a step of so many rows under a tier: of more than ever ran as of the most that did, so that they run."""
        points = {n: median for (n, under), median in self._medians.items() if under == tier}
        alone = next((median for (n, _), median in self._medians.items() if n == 1), None)
        if alone is None or rows in points:
            return points.get(rows, self._expect(rows, tier))
        if rows == 1:
            return alone
        if not points:
            return alone * self._expect(rows, tier) / self._expect(1, self.tier(1))
        points.setdefault(1, alone)
        below, above = max(n for n in points if n < rows), min((n for n in points if n > rows), default=0)
        if not above:
            return points[below]
        return points[below] + (points[above] - points[below]) * (rows - below) / (above - below)

    def _expect(self, rows: int, tier: int) -> float:
        """As the plan says it."""
        return self._rows[rows - 1] if rows <= len(self._rows) and tier == self.tier(rows) else self._planned[tier]


class DraftChances:
    """How likely one text's drafts hold, by what was seen, and whether it is to have some at all.

    Attributes:
        share: of its steps for which drafts were found.
    """

    def __init__(self, most: int) -> None:
        """most: drafts of a step."""
        self._limit = most
        self._holds = [HOPE] * most  # the chance of each draft whose predecessors held
        self.share = HOPE
        self._pause, self._wait, self._trial = PAUSE, 0, 0
        self._cap, self._lost = min(FIRST, most), 0.0  # seconds that drafts have cost since they rested, switches too

    def begin(self) -> int:
        """A step begins: how many drafts it may have; 0 while they rest."""
        if self._wait:
            self._wait -= 1
            if not self._wait:
                self._trial, self._cap = TRIAL, 1
                self._holds = [max(AGAIN, held) for held in self._holds]
            return 0
        return self._cap

    @property
    def least(self) -> int:
        """Drafts of a step that has any: one while they are tried again, whatever it costs."""
        return int(self._trial > 0)

    @property
    def rates(self) -> tuple[float, ...]:
        """The chances that the first, the first two, ... drafts all hold."""
        return tuple(accumulate(self._holds, mul))

    def rest(self, alone: float) -> None:
        """They do not pay: let there be none until what they lost is little of the time; alone: seconds of a step
        without."""
        paid = int(self._lost / (LOSS * alone))
        self._wait, self._pause = min(max(self._pause, paid), LONGEST_PAUSE), min(2 * self._pause, LONGEST_PAUSE)
        self._lost = 0.0

    def note(self, drafted: int, accepted: int, lost: float) -> None:
        """What became of a step's drafts, for which there was a choice; lost: seconds that it took more than its tokens
        would have without."""
        self._lost = max(0.0, self._lost + lost)
        self.share += WEIGHT * ((drafted > 0) - self.share)
        for i in range(min(drafted, accepted + 1)):
            self._holds[i] += WEIGHT * ((i < accepted) - self._holds[i])
        self._trial -= self._trial > 0 and drafted > 0
        if accepted >= self._cap:
            self._cap = min(self._limit, 2 * self._cap + 1)
        if accepted and not self._trial:
            self._pause = max(PAUSE, self._pause // 2)


class DraftLength:
    """That of one text. It depends on what came before and on the clock, never on the drafts or on what is drawn."""

    def __init__(self, most: int, seconds: StepSeconds, fixed: bool = False) -> None:
        """fixed: always as many as there may be."""
        self.most, self._seconds, self._fixed = most, seconds, fixed
        self._chances = DraftChances(most)
        self._each: deque[float] | None = None  # seconds of a draft, but for those of the first step

    def choose(self) -> int:
        """Drafts of the next step."""
        if self._fixed or not self.most:
            return self.most
        if not (cap := self._chances.begin()):
            return 0
        if not (best := max(range(self._chances.least, cap + 1), key=self._rate)):
            self._chances.rest(self._alone)
        return best

    def note(self, drafted: int, accepted: int, seconds: float, drafting: float = 0.0) -> None:
        """What became of a step's drafts, for which there was a choice, and how long it took, and to draft them."""
        if drafted and self._each is None:
            self._each = deque(maxlen=KEPT)
        elif drafted and self._each is not None:
            self._each.append(drafting / drafted)
        self._chances.note(drafted, accepted, drafting + seconds - (accepted + 1) * self._alone)

    def miss(self) -> None:
        """There was a choice of drafts, and none were found; others may have been, of somebody else."""
        self._chances.note(0, 0, 0.0)

    @property
    def _alone(self) -> float:
        return self._seconds.of(1, self._seconds.tier(1))

    @property
    def _draft_seconds(self) -> float:
        """Of one; 0 where too few were timed."""
        return median_low(self._each) if self._each and len(self._each) >= ENOUGH else 0.0

    def _rate(self, drafts: int) -> float:
        """Tokens a second with at most so many drafts a step: steps without any run under the same tier."""
        tier = self._seconds.tier(drafts + 1)
        alone = self._seconds.of(1, tier)
        if not drafts:
            return 1 / alone
        accepted = Acceptance(self._chances.rates, RECORDED, self._chances.share)
        return accepted.rate(drafts, alone, self._seconds.of(drafts + 1, tier), drafts * self._draft_seconds)
