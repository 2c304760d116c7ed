"""How long steps take: what the plan predicts, corrected by what they really took."""

from pshard.server.scheduling.served_machine import PlanFacts

WEIGHT = 0.2  # of a new observation in the running mean
MOST_AT_ONCE = 4.0  # times the mean: what compiles or captures takes longer once, and says nothing of later steps
FORGET = 0.99  # of a correction that keeps a tier from being run, per step: only a run can tell that it was wrong


class Pace:
    """Predicted seconds of steps by tier, each with a running mean of measured over predicted time."""

    def __init__(self, facts: PlanFacts) -> None:
        self._facts = facts
        self._planned = dict(zip(facts.tiers, facts.seconds))
        self._factors: dict[int, float] = {}
        self._idle: dict[int, float] = {}  # seconds of steps that a smaller tier would cover
        self.steps = dict.fromkeys(facts.tiers, 0)

    def covering(self, tokens: int) -> int:
        """The smallest tier that covers so many tokens."""
        return next(tier for tier in self._facts.tiers if tier >= tokens)

    def planned(self, tier: int) -> float:
        """Seconds of a full micro-batch, as the plan predicts them."""
        return self._planned[tier]

    def whole(self, tier: int) -> float:
        """The same, corrected."""
        return self._planned[tier] * self._factor(tier)

    def expect(self, tokens: int, tier: int) -> float:
        """Corrected seconds of a step of so many tokens under a tier that covers them."""
        if self.covering(tokens) < tier:
            return self._idle.get(tier, self.whole(tier))
        return self._between(tokens, tier) * self._factor(tier)

    def switch(self, old: int, new: int) -> float:
        """Seconds of going from a tier (0: none) to another."""
        return self._facts.switch.get((old, new), 0.0)

    def observe(self, tokens: int, tier: int, seconds: float) -> None:
        """A step of so many tokens, without a switch, took so long."""
        if self.covering(tokens) < tier:
            known = self._idle.get(tier, seconds)
            self._idle[tier] = known + WEIGHT * (min(seconds, MOST_AT_ONCE * known) - known)
            return
        factor = seconds / max(self._between(tokens, tier), 1e-9)
        if self.steps[tier]:
            known = self._factors[tier]
            factor = known + WEIGHT * (min(factor, MOST_AT_ONCE * known) - known)
        self._factors[tier] = factor
        self.steps[tier] += 1

    def largest_within(self, seconds: float, in_force: int, least: int) -> int:
        """The largest tier of which a full micro-batch, with the switch to it, keeps to so many seconds; where none
        does, the smallest that covers `least` tokens."""
        fits = self.covering(least)
        for tier in self._facts.tiers:
            if tier <= fits:
                continue
            switch = self.switch(in_force, tier) if tier != in_force else 0.0
            if self.whole(tier) + switch <= seconds:
                fits = tier
            elif self._planned[tier] + switch <= seconds and tier in self._factors:
                self._factors[tier] = 1 + (self._factors[tier] - 1) * FORGET
        return fits

    def _between(self, tokens: int, tier: int) -> float:
        """Predicted seconds of a tier that is not full: on the line from the tier below it, where that takes less."""
        at = self._facts.tiers.index(tier)
        if at == 0 or tokens >= tier:
            return self._planned[tier]
        below = self._facts.tiers[at - 1]
        low, high = min(self._planned[below], self._planned[tier]), self._planned[tier]
        return low + (high - low) * max(0, tokens - below) / (tier - below)

    def _factor(self, tier: int) -> float:
        """Measured over predicted seconds; of a tier that never ran, that of the nearest one where it is slower."""
        if tier in self._factors:
            return self._factors[tier]
        if not self._factors:
            return 1.0
        return max(1.0, self._factors[min(self._factors, key=lambda other: abs(other - tier))])
