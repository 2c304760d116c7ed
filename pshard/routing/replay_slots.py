"""A routing record replayed through slots that follow use, by the code that the runtime runs. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pshard.routing.follow_use import Follower, HitCounts
from pshard.routing.record import RoutingRecord


@dataclass(frozen=True, eq=False)
class SlotReplay:
    """What a replay found in the second half of a record. uses, hits: how often each expert was chosen, and how often
    it was then in a slot: int64 [layers, experts]; eligible: which of them may be. admitted: experts brought in for
    each token."""

    uses: np.ndarray
    hits: np.ndarray
    eligible: np.ndarray
    admitted: float

    @property
    def share(self) -> float:
        """Of choices that find their expert in a slot."""
        return float(self.hits.sum()) / max(1, int(self.uses.sum()))

    def by_place(self, orders: Sequence[Sequence[int]]) -> tuple[float, ...]:
        """Hits of each place's choices, over the layers in which a slot may have them; orders: by layer, numbers of the
        experts by place."""
        rows, numbers = np.arange(len(orders))[:, None], np.array(orders, np.int64)
        uses, hits = (counted[rows, numbers].sum(0) for counted in (self.uses * self.eligible, self.hits))
        return tuple((hits / np.maximum(1, uses)).tolist())


def replay_tokens(record: RoutingRecord, layers: Sequence[int], follower: Follower, together: int = 1) -> SlotReplay:
    """Token after token, as they are decoded, whatever micro-batches they were recorded in; the first half warms the
    slots. layers: numbers of those of the follower, in its order. together: the record is cut into so many texts, which
    are decoded at once. Raises ValueError where a layer was not recorded."""
    rows = [record.layers.index(layer) for layer in layers]
    uses = np.zeros(follower.slot_of.shape, np.int64)
    hits, lanes, before = np.zeros_like(uses), np.arange(len(rows))[:, None], HitCounts()
    turns = record.tokens // together
    at_once = record.ids[: turns * together, rows].reshape(together, turns, len(rows), -1).swapaxes(0, 1)
    for turn, batch in enumerate(at_once.astype(np.int64)):
        follower.begin()
        if turn == turns // 2:
            before = follower.counts
        found = follower.observe(batch)
        for ids, own in zip(batch, found) if turn >= turns // 2 else ():
            uses[lanes, ids] += 1
            hits[lanes, ids] += own
    counted = together * (turns - turns // 2)
    return SlotReplay(uses, hits, follower.eligible, (follower.counts - before).admitted / max(1, counted))


def replay_run(record: RoutingRecord, layers: Sequence[int], follower: Follower, tokens: int) -> HitCounts:
    """The micro-batches of a run as they were, those of up to `tokens` tokens, which may use slots."""
    rows, ends = [record.layers.index(layer) for layer in layers], np.cumsum(record.batches)
    for n, end in zip(record.batches, ends):
        if n <= tokens:
            follower.begin()
            follower.observe(record.ids[end - n : end][:, rows])
    return follower.counts
