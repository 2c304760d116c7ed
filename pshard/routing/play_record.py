"""A routing record played back: so many tokens after each other choose what the record says, whatever they are. No
torch."""

from dataclasses import replace

import numpy as np

from pshard.routing.follow_use import Follower
from pshard.routing.record import RoutingRecord

MOST_REPLAYED = 1500  # tokens: the last ones of a record; twice as many move hit rates by less than a point


def keep_last(record: RoutingRecord) -> RoutingRecord:
    """As much of a record's end as replays look at; its micro-batches are those tokens, one by one."""
    ids = record.ids[-MOST_REPLAYED:]
    return replace(record, ids=ids, batches=(1,) * len(ids))


class RoutingPlay:
    """A record cut into as many texts as run at once, whose second halves are dealt out in turn, over and over; by
    their first halves slots are warmed.

    Attributes:
        layers: numbers of the record's layers.
    """

    def __init__(self, record: RoutingRecord, texts: int) -> None:
        texts = min(texts, record.tokens)
        self._turns = record.tokens // texts
        self._texts = record.ids[: self._turns * texts].reshape(texts, self._turns, *record.ids.shape[1:])
        self._at = self._turns // 2
        self.layers = record.layers

    def deal(self, n: int) -> np.ndarray:
        """What the next n tokens choose, as many of each text as can be: ints [n, layers, used]."""
        each, more = divmod(n, len(self._texts))
        found = []
        for number, text in enumerate(self._texts):
            found.append(text[(self._at + np.arange(each + (number < more))) % self._turns])
        self._at += each + (more > 0)
        return np.concatenate(found)

    def warm(self, follower: Follower, layers: tuple[int, ...]) -> None:
        """Bring slots to where the first halves leave them, with nothing on its way. layers: the follower's."""
        rows = [self.layers.index(layer) for layer in layers]
        for turn in range(self._turns // 2):
            follower.begin()
            follower.observe(self._texts[:, turn, rows])
        follower.settle()
