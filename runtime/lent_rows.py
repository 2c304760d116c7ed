"""Page-locked memory that whoever is given logits keeps as long as they like: the next ones go elsewhere meanwhile."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

PLACES = 2  # a caller that keeps its last logits while the next ones are computed
LENT_BYTES = 16 << 20  # of a place at most; more logits than that are copied, which takes as long as to bring them


class LentRows:
    """Places for tables of up to so many columns, float32; one is free when no tensor of it is left."""

    def __init__(self, columns: int, rows: int, allocate: Callable[[int], torch.Tensor]) -> None:
        self._columns = columns
        rows = min(rows, LENT_BYTES // (4 * columns))
        memory = (allocate(4 * columns * rows).view(torch.float32) for _ in range(PLACES if rows else 0))
        self._places = [(place.numpy(), _nothing) for place in memory]

    def take(self, rows: int) -> torch.Tensor | None:
        """A table that nobody else has, float32 [rows, columns]; None when there is none so large."""
        wanted = rows * self._columns
        for at, (place, lent) in enumerate(self._places):
            if wanted <= place.size and lent() is None:
                table = place[:wanted].reshape(rows, self._columns)
                self._places[at] = place, weakref.ref(table)  # which every tensor of it keeps alive
                return torch.from_numpy(table)
        return None


def _nothing() -> Any:
    return None
