"""How long steps take: what the plan predicts, corrected by what they really took."""

from pshard.batch import Batch
from pshard.server.scheduling.served_machine import PlanFacts

WEIGHT = 0.2  # of a new observation in the running mean
MOST_AT_ONCE = 4.0  # times what was expected: a tier's first step compiles or captures, which says nothing of others
FORGET = 0.99  # of a correction that keeps a tier from being run, per step: only a run can tell that it was wrong


class Pace:
    """Predicted seconds of steps, with a running mean of measured over predicted time for each tier: one of steps that
    need it, and one of those that a smaller tier would cover; and one of sweeps.

    Attributes:
        steps: that needed the tier, by its tokens.
    """

    def __init__(self, facts: PlanFacts) -> None:
        self._times, self._tiers = facts.times, facts.tiers
        self._planned = dict(zip(facts.tiers, facts.seconds))
        self._places = {tokens: i for i, tokens in enumerate(facts.tiers)}
        self._factors: dict[int, float] = {}
        self._idle: dict[int, float] = {}
        self._swept: dict[int, float] = {}  # by the largest tier, under which they run
        self._largest_step = facts.largest_step
        self.steps = dict.fromkeys(facts.tiers, 0)

    def covering(self, tokens: int) -> int:
        """The smallest tier that covers so many tokens; of a sweep the largest."""
        return next((tier for tier in self._tiers if tier >= tokens), self._tiers[-1])

    def planned(self, tier: int) -> float:
        """Seconds of the micro-batch that the plan expects of a tier, as it is stored."""
        return self._planned[tier]

    def whole(self, tier: int) -> float:
        """The same, corrected."""
        return self._planned[tier] * self._factor(tier)

    def expect(self, batch: Batch, tier: int) -> float:
        """Corrected seconds of a step under a tier that covers it."""
        return self._predict(batch, tier) * self._correct(batch.tokens, tier)

    def expect_rows(self, rows: int, cells: int, tier: int) -> float:
        """The same of a step of texts that decode, with so many rows and cached cells in all; never 0."""
        seconds = self._times.tiers[self._places[tier]].seconds(rows, cells, 0, 0)
        return max(1e-9, seconds * self._correct(rows, tier))

    def switch(self, old: int, new: int) -> float:
        """Seconds of going from a tier (0: none) to another."""
        return self._times.switches[self._places[old]][self._places[new]] if old else 0.0

    def observe(self, batch: Batch, tier: int, seconds: float) -> None:
        """A step, without a switch, took so long."""
        swept = batch.tokens > tier
        needed = not swept and self.covering(batch.tokens) == tier
        factors = self._swept if swept else self._factors if needed else self._idle
        factor = seconds / max(self._predict(batch, tier), 1e-9)
        known = factors.get(tier)
        factor = min(factor, MOST_AT_ONCE * (self._factor(tier) if known is None else known))
        weight = max(WEIGHT, 1 / (self.steps[tier] + 1)) if needed else WEIGHT  # the first few count alike
        factors[tier] = factor if known is None else known + weight * (factor - known)
        self.steps[tier] += needed

    def largest_within(self, seconds: float, batch: Batch, in_force: int) -> int:
        """Tokens of the largest step, a full tier or a sweep of full micro-batches, that keeps to so many seconds with
        tokens of prompts beside those that decode, the switch to its tier included; where none does, of the smallest
        tier that covers the batch."""
        fits, largest = self.covering(batch.tokens), self._tiers[-1]
        for tokens in (*self._tiers, *range(2 * largest, self._largest_step + 1, largest)):
            if tokens <= fits or (tokens > largest and fits < largest):
                continue
            tier, factors = (tokens, self._factors) if tokens <= largest else (largest, self._swept)
            full = batch.with_prompt(tokens - batch.decoding.tokens, batch.others.mean_past)
            switch = self.switch(in_force, tier)
            if self.expect(full, tier) + switch <= seconds:
                fits = tokens
                continue
            if tier in factors and self._predict(full, tier) + switch <= seconds:
                factors[tier] = 1 + (factors[tier] - 1) * FORGET
            if tokens > largest:
                break
        return fits

    def _predict(self, batch: Batch, tier: int) -> float:
        decoding, others = batch.decoding, batch.others
        times = self._times if batch.tokens > tier else self._times.tiers[self._places[tier]]
        return times.seconds(decoding.tokens, decoding.cells, others.tokens, others.mean_past)

    def _correct(self, tokens: int, tier: int) -> float:
        """Measured over predicted seconds of a step of so many tokens under a tier."""
        if tokens > tier and tier in self._swept:
            return self._swept[tier]
        if tier in self._idle and self.covering(tokens) < tier:
            return self._idle[tier]
        return self._factor(tier)

    def _factor(self, tier: int) -> float:
        """Measured over predicted seconds; of a tier that never ran, that of the nearest one where it is slower."""
        if tier in self._factors:
            return self._factors[tier]
        if not self._factors:
            return 1.0
        return max(1.0, self._factors[min(self._factors, key=lambda other: abs(other - tier))])
