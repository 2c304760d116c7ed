"""A routing record replayed through slots that follow use, by the code that the runtime runs. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pshard.routing.follow_use import Follower, HitCounts
from pshard.routing.record import RoutingRecord


@dataclass(frozen=True, eq=False)
class SlotReplay:
    """What a replay found in the second half of a record. uses, hits: in how many steps of a text each expert was
    chosen, and in how many it was then in a slot: int64 [layers, experts]; eligible: which of them may be. share: of
    choices that found their expert in a slot; admitted: experts brought in for each token."""

    uses: np.ndarray
    hits: np.ndarray
    eligible: np.ndarray
    share: float
    admitted: float

    def by_place(self, orders: Sequence[Sequence[int]]) -> tuple[float, ...]:
        """Hits of each place's steps, over the layers in which a slot may have them; orders: by layer, numbers of the
        experts by place."""
        rows, numbers = np.arange(len(orders))[:, None], np.array(orders, np.int64)
        uses, hits = (counted[rows, numbers].sum(0) for counted in (self.uses * self.eligible, self.hits))
        return tuple((hits / np.maximum(1, uses)).tolist())


def replay_tokens(
    record: RoutingRecord, layers: Sequence[int], follower: Follower, together: int = 1, rows: int = 1
) -> SlotReplay:
    """Step after step, as tokens are decoded, whatever micro-batches they were recorded in; the first half warms the
    slots. layers: numbers of those of the follower, in its order. together: the record is cut into so many texts, which
    are decoded at once, each with so many `rows` in a step: what one of these misses, all of them do. Raises ValueError
    where a layer was not recorded."""
    own = [record.layers.index(layer) for layer in layers]
    uses = np.zeros(follower.slot_of.shape, np.int64)
    hits, before = np.zeros_like(uses), HitCounts()
    turns = record.tokens // (together * rows)
    steps = record.ids[: turns * together * rows, own].astype(np.int64).reshape(together, turns, rows, len(own), -1)
    for turn in range(turns):
        follower.begin()
        if turn == turns // 2:
            before = follower.counts
        texts = steps[:, turn]
        found = follower.observe(texts.reshape(together * rows, *texts.shape[2:])).reshape(texts.shape)
        for ids, there in zip(texts, found) if turn >= turns // 2 else ():
            uses += _mark(uses.shape, ids, np.ones_like(there))
            hits += _mark(uses.shape, ids, there)
    counted, told = together * rows * (turns - turns // 2), follower.counts - before
    return SlotReplay(uses, hits, follower.eligible, told.share, told.admitted / max(1, counted))


def _mark(shape: tuple[int, ...], ids: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """bool [layers, experts]: which experts rows chose, of those choices that are wanted; both [rows, layers, used]."""
    marked = np.zeros(shape, bool)
    lanes = np.broadcast_to(np.arange(shape[0])[:, None], ids.shape)
    marked[lanes[wanted], ids[wanted]] = True
    return marked


def replay_run(record: RoutingRecord, layers: Sequence[int], follower: Follower, tokens: int) -> HitCounts:
    """The micro-batches of a run as they were, those of up to `tokens` tokens, which may use slots."""
    rows, ends = [record.layers.index(layer) for layer in layers], np.cumsum(record.batches)
    for n, end in zip(record.batches, ends):
        if n <= tokens:
            follower.begin()
            follower.observe(record.ids[end - n : end][:, rows])
    return follower.counts
