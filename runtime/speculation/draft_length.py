"""How many drafts a text's next step verifies: as many as bring most tokens a second by what was seen. No torch."""

from collections.abc import Mapping
from itertools import accumulate
from operator import mul

from pshard.speculation import RECORDED, Acceptance

WEIGHT = 0.1  # of a new observation in a running mean
HOPE = 0.7  # that a draft holds of which nothing is known
MOST_AT_ONCE = 2.0  # times what was expected, of one step's seconds
PAUSE, LONGEST_PAUSE = 64, 1024  # steps without drafts before they are tried again: twice as many each time they lose
TRIAL = 4  # steps with one draft then


class StepSeconds:
    """Seconds of steps by their rows and tier: what was measured, and what the plan expects of those that never ran."""

    def __init__(self, planned: Mapping[int, float]) -> None:
        """planned: seconds of a full micro-batch by tier; their ratios scale what was measured."""
        self._planned = {tier: max(1e-9, seconds) for tier, seconds in sorted(planned.items())}
        self._means: dict[tuple[int, int], float | None] = {}  # None: it ran once, which may have compiled something

    def tier(self, rows: int) -> int:
        """The tier that covers so many rows."""
        return next(tokens for tokens in self._planned if tokens >= rows)

    def observe(self, rows: int, tier: int, seconds: float) -> None:
        """A step took so long."""
        key = rows, tier
        mean = self._means.get(key)
        if key not in self._means:
            self._means[key] = None
        elif mean is None:
            self._means[key] = seconds
        else:
            self._means[key] = mean + WEIGHT * (min(seconds, MOST_AT_ONCE * mean) - mean)

    def of(self, rows: int, tier: int) -> float:
        """Of a step of so many rows under a tier."""
        known = {key: mean for key, mean in self._means.items() if mean is not None}
        if not known:
            return self._planned[tier]
        near = min(known, key=lambda key: (key[1] != tier, abs(key[0] - rows), abs(key[1] - tier)))
        return known[near] * self._planned[tier] / self._planned[near[1]]


class DraftLength:
    """That of one text. It depends on what came before and on the clock, never on the drafts or on what is drawn."""

    def __init__(self, most: int, seconds: StepSeconds, fixed: bool = False) -> None:
        """fixed: always as many as there may be."""
        self.most, self._seconds, self._fixed = most, seconds, fixed
        self._holds = [HOPE] * most  # the chance of each draft whose predecessors held
        self._share = 1.0  # of steps for which drafts were found
        self._pause, self._wait, self._trial = PAUSE, 0, 0

    def choose(self) -> int:
        """Drafts of the next step."""
        if self._fixed or not self.most:
            return self.most
        if self._wait:
            self._wait -= 1
            self._trial = TRIAL * (not self._wait)
            return 0
        if self._trial:
            return 1
        if best := max(range(self.most + 1), key=self._rate):
            return best
        self._wait, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return 0

    def note(self, drafted: int, accepted: int) -> None:
        """What became of a step's drafts, for which there was a choice."""
        self._share += WEIGHT * ((drafted > 0) - self._share)
        for i in range(min(drafted, accepted + 1)):
            self._holds[i] += WEIGHT * ((i < accepted) - self._holds[i])
        self._trial -= self._trial > 0 and drafted > 0
        if accepted and not self._trial:
            self._pause = max(PAUSE, self._pause // 2)

    def _rate(self, drafts: int) -> float:
        """Tokens a second with at most so many drafts a step: steps without any run under the same tier."""
        tier = self._seconds.tier(drafts + 1)
        alone = self._seconds.of(1, tier)
        if not drafts:
            return 1 / alone
        accepted = Acceptance(tuple(accumulate(self._holds, mul)), RECORDED, self._share)
        return accepted.rate(drafts, alone, self._seconds.of(drafts + 1, tier))
