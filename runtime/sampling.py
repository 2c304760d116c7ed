"""Choosing the next token: greedy, temperature, top-k, top-p, min-p, by seed."""

from dataclasses import dataclass

import numpy as np
import torch

from pshard.errors import StepFailed, UserError

NO_NUMBERS = "the logits are not numbers; load the model again"
BLOCK = 256  # logits whose largest is found at once


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep everything.

    Filters apply in this order: top-k, top-p, min-p, then temperature, as in llama.cpp.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None

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


class Sampler:
    """Draws tokens from logits; two samplers with the same seed draw the same."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._random = np.random.default_rng(sampling.seed)

    @property
    def greedy(self) -> bool:
        """Whether the next token is the one with the largest logit."""
        return self._sampling.temperature == 0

    def take_best(self, logit: float, token: float) -> int:
        """The next token id when the largest logit and its id are known. Raises StepFailed when it is NaN."""
        if logit != logit:
            raise StepFailed(NO_NUMBERS)
        return int(token)

    def choose(self, logits: torch.Tensor) -> int:
        """The next token id from float32 logits [vocabulary] on the host. Raises StepFailed when some are NaN."""
        s, values = self._sampling, logits.numpy()  # torch would wake its threads for every operator
        if np.isnan(values.max()):
            raise StepFailed(NO_NUMBERS)
        if self.greedy:
            return int(values.argmax())
        ids = find_largest(values, min(s.top_k or len(values), len(values)))
        chance = _softmax(values[ids])
        keep = (chance.cumsum() - chance < s.top_p) & (chance >= s.min_p * chance[0])
        keep[0] = True
        ids = ids[keep]
        reached = _softmax(values[ids].astype(np.float64) / s.temperature).cumsum()
        return int(ids[min(reached.searchsorted(self._random.random(), "right"), len(ids) - 1)])


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


def _softmax(values: np.ndarray) -> np.ndarray:
    """float64, so that they add up to 1."""
    powers = np.exp(values.astype(np.float64) - float(values[0]))  # the first is the largest
    return powers / powers.sum()
