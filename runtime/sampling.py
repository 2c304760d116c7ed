"""Choosing the next token: greedy, temperature, top-k, top-p, min-p, by seed."""

from dataclasses import dataclass

import torch

from pshard.errors import UserError


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
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    def choose(self, logits: torch.Tensor) -> int:
        """The next token id from float32 logits [vocabulary]."""
        s = self._sampling
        if s.temperature == 0:
            return int(logits.argmax())
        k = min(s.top_k or logits.numel(), logits.numel())
        values, ids = torch.topk(logits, k)  # sorted, largest first
        chance = torch.softmax(values, 0)
        keep = (chance.cumsum(0) - chance < s.top_p) & (chance >= s.min_p * chance[0])
        keep[0] = True
        chance = torch.softmax(values[keep] / s.temperature, 0)
        return int(ids[keep][torch.multinomial(chance, 1, generator=self._random)])
