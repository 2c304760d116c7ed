"""RoutingRecord: which experts the routers of a model chose, token by token. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pshard.units.moe.popularity import number_format


@dataclass(frozen=True, eq=False)
class RoutingRecord:
    """What was chosen in one run.

    Attributes:
        fingerprint: of the model's routers.
        layers: numbers of the layers that have experts, ascending.
        experts: how many each of them has.
        ids: the chosen ones, `id_type` [tokens, layers, used], tokens in the order in which they were computed.
        batches: tokens of each micro-batch, in order; they sum up to the tokens.
    """

    fingerprint: str
    layers: tuple[int, ...]
    experts: int
    ids: np.ndarray
    batches: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def used(self) -> int:
        """How many experts of a layer each token takes."""
        return self.ids.shape[2]

    def of_layers(self, layers: Sequence[int]) -> "RoutingRecord":
        """The same of these layers alone, which ascend. Raises ValueError for one that was not recorded."""
        rows = [self.layers.index(layer) for layer in layers]
        return replace(self, layers=tuple(layers), ids=self.ids[:, rows])

    def count_uses(self, first: int = 0, end: int | None = None) -> np.ndarray:
        """How often each expert was chosen by tokens `first` to before `end`: int64 [layers, experts]."""
        own = self.ids[first:end].astype(np.int64)
        numbered = own + self.experts * np.arange(len(self.layers))[:, None]
        return np.bincount(numbered.ravel(), minlength=len(self.layers) * self.experts).reshape(-1, self.experts)


def join_layers(parts: Sequence[RoutingRecord]) -> RoutingRecord:
    """Records of one run, each of other layers, as one. Raises ValueError where they are of other micro-batches."""
    first = parts[0]
    if any(part.batches != first.batches for part in parts):
        raise ValueError("the layers' records are of different micro-batches")
    numbers = [layer for part in parts for layer in part.layers]
    ids = np.concatenate([part.ids for part in parts], axis=1)[:, np.argsort(numbers)]
    return RoutingRecord(first.fingerprint, tuple(sorted(numbers)), first.experts, ids, first.batches)


def id_type(experts: int) -> np.dtype:
    """How numbers of so many experts are stored: in a byte where that does, else in two, little-endian."""
    return np.dtype("<" + number_format(experts))
