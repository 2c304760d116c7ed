"""A routing record replayed through slots that follow use, by the code that the runtime runs. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pshard.routing.follow_use import HitCounts, UseFollower
from pshard.routing.record import RoutingRecord


@dataclass(frozen=True, eq=False)
class SlotReplay:
    """What a replay found in the second half of a record. uses, hits: how often each expert was chosen, and how often
    it was then in a slot: int64 [layers, experts]. admitted: experts brought in for each token."""

    uses: np.ndarray
    hits: np.ndarray
    admitted: float

    @property
    def share(self) -> float:
        """Of choices that find their expert in a slot."""
        return float(self.hits.sum()) / max(1, int(self.uses.sum()))

    def by_place(self, orders: Sequence[Sequence[int]]) -> tuple[float, ...]:
        """Hits of each place's choices, over all layers; orders: by layer, numbers of the experts by place."""
        rows, numbers = np.arange(len(orders))[:, None], np.array(orders, np.int64)
        uses, hits = (counted[rows, numbers].sum(0) for counted in (self.uses, self.hits))
        return tuple((hits / np.maximum(1, uses)).tolist())


def replay_tokens(record: RoutingRecord, layers: Sequence[int], follower: UseFollower) -> SlotReplay:
    """Token after token, as they are decoded, whatever micro-batches they were recorded in; the first half warms the
    slots. layers: numbers of those of the follower, in its order. Raises ValueError where one was not recorded."""
    rows = [record.layers.index(layer) for layer in layers]
    uses = np.zeros(follower.slot_of.shape, np.int64)
    hits, lanes, before = np.zeros_like(uses), np.arange(len(rows))[:, None], HitCounts()
    middle = record.tokens // 2
    for token in range(record.tokens):
        ids = record.ids[token, rows].astype(np.int64)
        follower.begin()
        if token == middle:
            before = follower.counts
        if token >= middle:
            uses[lanes, ids] += 1
            hits[lanes, ids] += follower.slot_of[lanes, ids] >= 0
        follower.observe(ids[None])
    admitted = (follower.counts - before).admitted / max(1, record.tokens - middle)
    return SlotReplay(uses, hits, admitted)


def replay_run(record: RoutingRecord, layers: Sequence[int], follower: UseFollower, tokens: int) -> HitCounts:
    """The micro-batches of a run as they were, those of up to `tokens` tokens, which may use slots."""
    rows, ends = [record.layers.index(layer) for layer in layers], np.cumsum(record.batches)
    for n, end in zip(record.batches, ends):
        if n <= tokens:
            follower.begin()
            follower.observe(record.ids[end - n : end][:, rows])
    return follower.counts
