"""Hit rates: a routing record replayed through ways to choose which experts lie in VRAM. No torch.

All of a token's experts of a layer are one event: they are looked up together, then admitted. Each layer has as many
places as the others. The record's first half only settles what lies there, hits are counted in its second one: so a
cache has no first touches among its misses, and pinned experts are chosen by another text than they are measured by.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pshard.routing.measure_popularity import rank_experts
from pshard.routing.record import RoutingRecord

DECAY = 0.98  # of a use's weight by each token: half is left after 34


@dataclass(frozen=True)
class HitRates:
    """One policy: the share of chosen experts that lie in VRAM, by places of each layer."""

    policy: str
    shares: tuple[float, ...]


@dataclass(frozen=True)
class Replay:
    """Hit rates of all policies at some sizes. tokens: of which hits were counted."""

    tokens: int
    experts: int
    places: tuple[int, ...]
    policies: tuple[HitRates, ...]


def replay_record(record: RoutingRecord, places: Sequence[int] = ()) -> Replay:
    """Every policy at so many places of each layer; without a choice, an eighth, a quarter, half and three quarters of
    the experts, but no fewer than a token takes."""
    n, least = record.experts, record.used
    sizes = tuple(places) or tuple(sorted({max(least, n * eighths // 8) for eighths in (1, 2, 4, 6)}))
    found = []
    for name, rank in POLICIES.items():
        hits = np.cumsum(np.bincount(rank(record).ravel(), minlength=n + 1)[:n])
        total = (record.tokens - record.tokens // 2) * len(record.layers) * record.used
        found.append(HitRates(name, tuple(float(hits[size - 1]) / max(1, total) for size in sizes)))
    return Replay(record.tokens - record.tokens // 2, n, sizes, tuple(found))


def _rank_pinned(record: RoutingRecord) -> np.ndarray:
    """By chosen expert of the second half, its place in the order of the first half's uses."""
    middle = record.tokens // 2
    order = rank_experts(record.count_uses(0, middle))
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(record.experts)[None], 1)
    return place[np.arange(len(record.layers))[:, None], record.ids[middle:].astype(np.int64)]


def _rank_recent(record: RoutingRecord) -> np.ndarray:
    """How many other experts were used after its last use: a cache of more places than that still has it."""
    return _rank_by_score(record, decay=0.0)


def _rank_frequent(record: RoutingRecord) -> np.ndarray:
    """How many other experts have more recent uses, each counted less the longer it is past. An expert is admitted only
    in the place of one with fewer, so the cache holds the first of this order."""
    return _rank_by_score(record, DECAY)


def _rank_by_score(record: RoutingRecord, decay: float) -> np.ndarray:
    """By chosen expert of the second half, how many of its layer score higher before the token; the number of experts
    for one that was not used yet. Of equal scores the later of a token's choices, then the lower number, is ahead.

    Scores are the sums of decay^age of all uses; without decay only the last use counts.
    """
    layers, experts = len(record.layers), record.experts
    rows, later = np.arange(layers)[:, None], np.arange(record.used)
    score, last = np.zeros((layers, experts)), np.full((layers, experts), -1, np.int64)
    ranks = []
    for token, ids in enumerate(record.ids.astype(np.int64)):
        if token >= record.tokens // 2:
            own, own_last = score[rows, ids][:, :, None], last[rows, ids][:, :, None]
            ahead = (score[:, None] > own) | ((score[:, None] == own) & (last[:, None] > own_last))
            ranks.append(np.where(own_last[:, :, 0] < 0, experts, ahead.sum(2)))
        last[rows, ids] = token * record.used + later
        if decay:
            score *= decay
            score[rows, ids] += 1.0
    return np.array(ranks, np.int64)


POLICIES: dict[str, Callable[[RoutingRecord], np.ndarray]] = {
    "most popular, pinned": _rank_pinned,
    "LRU": _rank_recent,
    "decayed frequency": _rank_frequent,
}
