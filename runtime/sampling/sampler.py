"""Choosing the next token: how tokens are drawn, and what draws them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pshard.errors import StepFailed, UserError
from pshard.runtime.sampling.chain import (
    NO_PENALTIES,
    SAMPLERS,
    Candidates,
    Penalties,
    all_candidates,
    find_largest,
    keep_largest,
    keep_mass,
    keep_near_best,
    keep_usual,
    scale,
)

if TYPE_CHECKING:
    import torch

NO_NUMBERS = (
    "the logits are not numbers: keys or values may be larger than 65504, the most that f16 cells hold: plan with "
    "-ctk bf16 -ctv bf16; where cells are of another type, load the model again"
)


class Constraint(Protocol):
    """What tokens may come next, as a grammar says it."""

    def mask(self, logits: np.ndarray) -> np.ndarray:
        """The logits, float32 [vocabulary], with -inf for tokens that may not come."""

    def words(self) -> np.ndarray:
        """The same as bits: uint32 [ceil(vocabulary / 32)]; bit i % 32 of word i // 32: whether token i may come."""

    def accept(self, token: int) -> None:
        """That token came."""

    def copy(self) -> "Constraint":
        """One of its own, that has seen the same."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep everything.

    `samplers` is the order in which they apply, llama.cpp's when none is given; those left out do nothing. `logit_bias`
    is added first: (token, what is added), where -inf forbids a token.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None
    penalties: Penalties = NO_PENALTIES
    logit_bias: tuple[tuple[int, float], ...] = ()
    samplers: tuple[str, ...] = SAMPLERS

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"--temp is {self.temperature}; it is 0 (greedy) or more")
        if self.top_k < 0:
            raise UserError(f"--top-k is {self.top_k}; it is 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p is {self.top_p}; it is above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"--min-p is {self.min_p}; it is between 0 and 1")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise UserError(f"--seed is {self.seed}; it is 0 or more, below 2^63")
        p = self.penalties
        if not 0 < p.repeat < float("inf"):
            raise UserError(f"--repeat-penalty is {p.repeat}; it is above 0, and 1 is off")
        for flag, value in (("--presence-penalty", p.presence), ("--frequency-penalty", p.frequency)):
            if not isfinite(value):
                raise UserError(f"{flag} is {value}; it is a number, and 0 is off")
        if p.last < -1:
            raise UserError(f"--repeat-last-n is {p.last}; it is a number of tokens, 0 (off) or -1 (all)")
        for name in self.samplers:
            if name not in SAMPLERS:
                raise UserError(f"--samplers: there is no {name!r}; there are {';'.join(SAMPLERS)}")

    @property
    def greedy(self) -> bool:
        """Whether the next token is the one with the largest logit as it comes from the model."""
        weighs = self.logit_bias or ("penalties" in self.samplers and not self.penalties.none)
        return self.temperature == 0 and "temperature" in self.samplers and not weighs


class Sampler:
    """Draws tokens from logits; two samplers with the same seed draw the same. Raises UserError for a bias on a token
    that is not in the `vocab`.

    Attributes:
        greedy: whether the next token is the one with the largest logit. enough: so many of the largest logits are all
            that the next token depends on; 0: it may depend on any. enough_allowed: so many of the largest among those
            that the constraint allows; the same without one.
    """

    def __init__(self, sampling: Sampling, constraint: Constraint | None = None, vocab: int | None = None) -> None:
        self._sampling, self._constraint = sampling, constraint
        self.enough_allowed = _count_enough(sampling)  # once: a server asks several times a token
        self.enough = 0 if constraint else self.enough_allowed
        self.greedy = sampling.greedy and constraint is None
        self._usual = sampling.samplers == SAMPLERS and sampling.penalties.none and sampling.temperature > 0
        self._random = np.random.default_rng(sampling.seed)
        self._before: list[int] = []
        for token, _ in sampling.logit_bias:
            if vocab is not None and not 0 <= token < vocab:
                raise UserError(f"--logit-bias: there is no token {token}; give 0 to {vocab - 1}")

    def allowed(self) -> np.ndarray | None:
        """Words of the tokens that the constraint allows next; None without one. Raises UserError as it does."""
        return self._constraint.words() if self._constraint else None

    def walk(self, drafts: Sequence[int]) -> tuple[int, list[np.ndarray]]:
        """How many drafts the constraint allows one after the other, and its words before each of these and behind
        them. Raises UserError as it does of the first words; drafts end before later ones that it cannot say."""
        assert self._constraint is not None
        walked = self._constraint.copy()
        words = [walked.words()]
        for at, token in enumerate(drafts):
            if not words[-1][token >> 5] >> (token & 31) & 1:
                return at, words
            walked.accept(token)
            try:
                words.append(walked.words())
            except UserError:  # told tokens will meet it
                return at, words
        return len(drafts), words

    def see(self, tokens: Iterable[int]) -> None:
        """What came before: penalties look at it."""
        self._before += tokens

    def take_best(self, logit: float, token: float) -> int:
        """The next token id when the largest logit and its id are known. Raises StepFailed when it is NaN."""
        if logit != logit:
            raise StepFailed(NO_NUMBERS)
        return int(token)

    def choose(self, logits: "torch.Tensor") -> int:
        """The next token id from float32 logits [vocabulary] on the host. Raises StepFailed when some are NaN."""
        values = logits.numpy()  # torch would wake its threads for every operator
        if np.isnan(values.max()):
            raise StepFailed(NO_NUMBERS)
        if self.greedy:
            return int(values.argmax())
        return self._draw(self.filter(values))

    def choose_among(self, ids: np.ndarray, logits: np.ndarray) -> int:
        """The next token id from the `enough` largest logits, float32 and the largest first, and their ids: the one
        that `choose` finds. With a constraint from the `enough_allowed` largest of those it allows, others being -inf.
        Raises StepFailed when some are NaN."""
        if logits[0] != logits[0]:
            raise StepFailed(NO_NUMBERS)
        if self.greedy:
            return int(ids[0])
        return self._draw(self._pass_on(Candidates(ids, logits.astype(np.float64), True)))

    def _draw(self, left: Candidates) -> int:
        place, last = self._random.random(), len(left.ids) - 1
        token = int(left.ids[min(int(left.chances().cumsum().searchsorted(place, "right")), last) if last else 0])
        self._before.append(token)
        if self._constraint:
            self._constraint.accept(token)
        return token

    def filter(self, values: np.ndarray) -> Candidates:
        """What the chain leaves of float32 logits [vocabulary], the likeliest first. Raises StepFailed when it is
        nothing."""
        s = self._sampling
        if s.logit_bias:
            values = values.copy()
            for token, more in s.logit_bias:
                values[token] += more
        if self._constraint:
            values = self._constraint.mask(values)
        if s.samplers[:2] == SAMPLERS[:2] and s.penalties.none and s.temperature != 0:
            found = _shortest_way(values, s.top_k)  # the usual case: no copy of the whole vocabulary
        else:
            found = all_candidates(values)
        return self._pass_on(found)

    def _pass_on(self, found: Candidates) -> Candidates:
        """What the chain leaves of candidates. Raises StepFailed when it is nothing."""
        if not (found.ordered and len(found.ids) and found.logits[-1] > -np.inf):
            found = found.keep(found.logits > -np.inf)
        if not len(found.ids):
            raise StepFailed("no token is left to draw: --logit-bias and the grammar forbid all of them")
        if self._usual and found.ordered and len(found.ids) <= (self._sampling.top_k or len(found.ids)):
            return scale(keep_usual(found, self._sampling.top_p, self._sampling.min_p), self._sampling.temperature)
        for name in self._sampling.samplers:
            found = self._apply(name, found)
        return found.in_order()

    def _apply(self, name: str, found: Candidates) -> Candidates:
        s = self._sampling
        match name:
            case "penalties":
                return s.penalties.apply(found, self._before)
            case "top_k":
                return keep_largest(found, s.top_k)
            case "top_p":
                return keep_mass(found, s.top_p)
            case "min_p":
                return keep_near_best(found, s.min_p)
            case _:
                return scale(found, s.temperature)


def _count_enough(s: Sampling) -> int:
    """How many of the largest logits decide; 0: any may."""
    if s.greedy:
        return 1
    first = s.samplers[:2] == SAMPLERS[:2] and s.penalties.none and s.temperature != 0
    return s.top_k if first and not s.logit_bias else 0


def _shortest_way(values: np.ndarray, k: int) -> Candidates:
    """The k largest, in float64, where top-k is the first that does anything."""
    ids = find_largest(values, min(k or len(values), len(values)))
    return Candidates(ids, values[ids].astype(np.float64), True)
