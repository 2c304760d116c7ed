"""How long steps take: what the plan predicts, corrected by what they really took."""

from collections.abc import Sequence
from dataclasses import dataclass

from pshard.server.scheduling.served_machine import PlanFacts

WEIGHT = 0.2  # of a new observation in the running mean
MOST_AT_ONCE = 4.0  # times what was expected: a tier's first step compiles or captures, which says nothing of others
FORGET = 0.99  # of a correction that keeps a tier from being run, per step: only a run can tell that it was wrong


@dataclass(frozen=True)
class StepLoad:
    """What a step computes: a token each of `decodes` texts with `cells` cached cells in all, and `prompt` tokens of
    prompts that have `past` cells of their own, a mean over these tokens."""

    decodes: int
    cells: int
    prompt: int = 0
    past: int = 0

    @property
    def tokens(self) -> int:
        return self.decodes + self.prompt


class Pace:
    """Predicted seconds of steps, with a running mean of measured over predicted time for each tier: one of steps that
    need it, and one of those that a smaller tier would cover.

    Attributes:
        steps: that needed the tier, by its tokens.
    """

    def __init__(self, facts: PlanFacts) -> None:
        self._times, self._tiers = facts.times, facts.tiers
        self._planned = dict(zip(facts.tiers, facts.seconds))
        self._places = {tokens: i for i, tokens in enumerate(facts.tiers)}
        self._factors: dict[int, float] = {}
        self._idle: dict[int, float] = {}
        self.steps = dict.fromkeys(facts.tiers, 0)

    def covering(self, tokens: int) -> int:
        """The smallest tier that covers so many tokens."""
        return next(tier for tier in self._tiers if tier >= tokens)

    def planned(self, tier: int) -> float:
        """Seconds of the micro-batch that the plan expects of a tier, as it is stored."""
        return self._planned[tier]

    def whole(self, tier: int) -> float:
        """The same, corrected."""
        return self._planned[tier] * self._factor(tier)

    def expect(self, load: StepLoad, tier: int) -> float:
        """Corrected seconds of a step under a tier that covers it."""
        predicted = self._predict(load, tier)
        if tier in self._idle and self.covering(load.tokens) < tier:
            return predicted * self._idle[tier]
        return predicted * self._factor(tier)

    def switch(self, old: int, new: int) -> float:
        """Seconds of going from a tier (0: none) to another."""
        return self._times.switches[self._places[old]][self._places[new]] if old else 0.0

    def observe(self, load: StepLoad, tier: int, seconds: float) -> None:
        """A step, without a switch, took so long."""
        needed = self.covering(load.tokens) == tier
        factors = self._factors if needed else self._idle
        factor = seconds / max(self._predict(load, tier), 1e-9)
        known = factors.get(tier)
        factor = min(factor, MOST_AT_ONCE * (self._factor(tier) if known is None else known))
        factors[tier] = factor if known is None else known + WEIGHT * (factor - known)
        self.steps[tier] += needed

    def largest_within(self, seconds: float, load: StepLoad, in_force: int) -> int:
        """The largest tier that, full with tokens of prompts beside those that decode, keeps to so many seconds, the
        switch to it included; where none does, the smallest that covers the load."""
        fits = self.covering(load.tokens)
        for tier in self._tiers:
            if tier <= fits:
                continue
            full = StepLoad(load.decodes, load.cells, tier - load.decodes, load.past)
            switch = self.switch(in_force, tier)
            if self.expect(full, tier) + switch <= seconds:
                fits = tier
            elif tier in self._factors and self._predict(full, tier) + switch <= seconds:
                self._factors[tier] = 1 + (self._factors[tier] - 1) * FORGET
        return fits

    def _predict(self, load: StepLoad, tier: int) -> float:
        return self._times.tiers[self._places[tier]].seconds(load.decodes, load.cells, load.prompt, load.past)

    def _factor(self, tier: int) -> float:
        """Measured over predicted seconds; of a tier that never ran, that of the nearest one where it is slower."""
        if tier in self._factors:
            return self._factors[tier]
        if not self._factors:
            return 1.0
        return max(1.0, self._factors[min(self._factors, key=lambda other: abs(other - tier))])


def mean_past(prompts: Sequence[tuple[int, int]]) -> int:
    """Cells that tokens of prompts have before them; prompts: of each its tokens in a step, and its cells."""
    return sum(n * past for n, past in prompts) // max(1, sum(n for n, _ in prompts))
