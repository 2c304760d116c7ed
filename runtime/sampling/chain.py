"""The samplers that a token passes on its way: each leaves fewer candidates, or other logits of them.

They mean what llama.cpp's samplers of these names mean, and may stand in any order.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SAMPLERS = ("penalties", "top_k", "top_p", "min_p", "temperature")
BLOCK = 256  # logits whose largest is found at once
COLD = 1e-100  # below this temperature all but the largest logits have a chance of 0, and quotients are beyond float64
LARGEST = 1e150  # of a logit after penalties: over any temperature above COLD it is a number


@dataclass(frozen=True)
class Candidates:
    """Tokens that may still be drawn: ids [n], and their logits, float64 [n]. `ordered`: the largest first."""

    ids: np.ndarray
    logits: np.ndarray
    ordered: bool = False

    def keep(self, which: np.ndarray) -> "Candidates":
        """Those that a mask [n] or a list of places names."""
        return Candidates(self.ids[which], self.logits[which], self.ordered)

    def in_order(self) -> "Candidates":
        """The same, the largest logit first; equal ones in the order of their ids."""
        if self.ordered:
            return self
        order = np.argsort(-self.logits, kind="stable")
        return Candidates(self.ids[order], self.logits[order], True)

    def chances(self) -> np.ndarray:
        """Chances of the candidates, float64, which add up to 1."""
        best = self.logits[0] if self.ordered else self.logits.max()
        powers = np.exp(self.logits - best)
        return powers / np.add.reduce(powers)


def all_candidates(values: np.ndarray) -> Candidates:
    """Every token of a vocabulary: logits [n]."""
    return Candidates(np.arange(len(values)), values.astype(np.float64))


def keep_largest(found: Candidates, k: int) -> Candidates:
    """The k likeliest; 0: all."""
    if not 0 < k < len(found.ids):
        return found.in_order()
    kept = find_largest(found.logits, k)
    return Candidates(found.ids[kept], found.logits[kept], True)


def keep_mass(found: Candidates, mass: float) -> Candidates:
    """The likeliest that together reach this share of all chances, at least one."""
    if mass >= 1:
        return found
    found = found.in_order()
    chances = found.chances()
    kept = chances.cumsum() - chances < mass
    kept[0] = True
    return found.keep(kept)


def keep_near_best(found: Candidates, share: float) -> Candidates:
    """Those whose chance reaches this share of the best one's."""
    return found if share <= 0 else found.keep(found.logits >= found.logits.max() + np.log(share))


def scale(found: Candidates, temperature: float) -> Candidates:
    """Logits over the temperature; with 0 the best one alone is left, with next to nothing those that equal it."""
    if 0 < temperature <= COLD:
        return found.keep(found.logits == found.logits.max())
    if temperature > 0:
        return Candidates(found.ids, found.logits / temperature, found.ordered)
    return found.keep(np.array([found.logits.argmax()]))


def keep_usual(found: Candidates, mass: float, share: float) -> Candidates:
    """What `keep_mass` and then `keep_near_best` leave of candidates in order, with half the work."""
    best = found.logits >= found.logits[0] + np.log(share) if share > 0 else None
    if mass >= 1:
        return found if best is None else found.keep(best)
    chances = found.chances()
    kept = chances.cumsum() - chances < mass
    kept[0] = True
    if best is not None:
        kept &= best
    return found.keep(kept)


@dataclass(frozen=True)
class Penalties:
    """What tokens lose that came before: `repeat` divides positive logits and multiplies others, once; `frequency` is
    taken off for each time, `presence` once. `last`: so many tokens count, -1 for all."""

    repeat: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    last: int = 64

    @property
    def none(self) -> bool:
        return self.last == 0 or (self.repeat, self.frequency, self.presence) == (1.0, 0.0, 0.0)

    def apply(self, found: Candidates, before: Sequence[int]) -> Candidates:
        """The candidates with penalties for the tokens `before`."""
        recent = before[-self.last :] if self.last > 0 else before
        counts = Counter(recent)
        if self.none or not counts:
            return found
        seen = np.fromiter(counts, np.int64, len(counts))
        times = np.zeros(max(int(found.ids.max()), int(seen.max())) + 1)
        times[seen] = [counts[token] for token in seen.tolist()]
        n, logits = times[found.ids], found.logits.copy()
        hit = n > 0
        with np.errstate(over="ignore"):
            logits[hit] = np.where(logits[hit] > 0, logits[hit] / self.repeat, logits[hit] * self.repeat)
        logits[hit] -= n[hit] * self.frequency + self.presence
        return Candidates(found.ids, logits.clip(-LARGEST, LARGEST))


NO_PENALTIES = Penalties()


def find_largest(values: np.ndarray, k: int) -> np.ndarray:
    """Indices of k largest of values [n], the largest first; of equal ones that are found the first one first.

    They lie in the k blocks whose largest values are largest: only these are sorted.
    """
    n, whole = len(values), len(values) // BLOCK * BLOCK
    among = np.arange(n)
    if k * BLOCK < whole:
        peaks = values[:whole].reshape(-1, BLOCK).max(1)
        blocks = np.sort(np.argpartition(-peaks, k - 1)[:k])
        among = np.concatenate([(blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel(), among[whole:]])
    if k < len(among):
        among = np.sort(among[np.argpartition(-values[among], k - 1)[:k]])
    return among[np.argsort(-values[among], kind="stable")]
