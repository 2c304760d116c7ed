"""Hit rates by replay equal those of caches written down plainly."""

from dataclasses import replace

import numpy as np
import pytest
from routing_samples import make_record

from pshard.routing.record import RoutingRecord
from pshard.routing.replay import DECAY, replay_record


def hits_of_lru(record: RoutingRecord, places: int) -> float:
    """A list for each layer, the most recently used first; all of a token's experts are looked up before any goes."""
    hits, chosen = 0, 0
    for layer in range(len(record.layers)):
        cache: list[int] = []
        for token in range(record.tokens):
            ids = record.ids[token, layer].tolist()
            if token >= record.tokens // 2:
                hits += sum(i in cache for i in ids)
                chosen += len(ids)
            for i in ids:
                cache = [i, *(other for other in cache if other != i)]
            del cache[places:]
    return hits / chosen


def hits_of_frequency(record: RoutingRecord, places: int) -> float:
    """What is used is scored; it takes the place of the cached one that scores least, if that scores less."""
    hits, chosen = 0, 0
    for layer in range(len(record.layers)):
        cache, score, last = set[int](), [0.0] * record.experts, [-1] * record.experts
        for token in range(record.tokens):
            ids = record.ids[token, layer].tolist()
            if token >= record.tokens // 2:
                hits += sum(i in cache for i in ids)
                chosen += len(ids)
            score = [DECAY * s for s in score]
            for nth, i in enumerate(ids):
                score[i] += 1
                last[i] = token * record.used + nth
            cache = set(sorted(cache | set(ids), key=lambda i: (-score[i], -last[i]))[:places])
    return hits / chosen


def hits_of_pins(record: RoutingRecord, places: int) -> float:
    middle, hits = record.tokens // 2, 0
    for layer in range(len(record.layers)):
        counts = np.bincount(record.ids[:middle, layer].ravel(), minlength=record.experts).tolist()
        pinned = sorted(range(record.experts), key=lambda i: -counts[i])[:places]
        hits += int(np.isin(record.ids[middle:, layer], pinned).sum())
    return hits / record.ids[middle:].size


ORACLES = {"most popular, pinned": hits_of_pins, "LRU": hits_of_lru, "decayed frequency": hits_of_frequency}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", ORACLES)
def test_replay_gives_the_hits_of_a_plain_cache(policy: str, seed: int) -> None:
    record = make_record(tokens=101 + seed, experts=12, used=3, skew=seed, seed=seed)
    sizes = (3, 4, 6, 9, 12)
    replayed = replay_record(record, sizes)
    (found,) = (p for p in replayed.policies if p.policy == policy)
    assert found.shares == pytest.approx([ORACLES[policy](record, n) for n in sizes])


def test_more_places_and_more_skew_give_more_hits() -> None:
    even, skewed = (replay_record(make_record(400, skew=skew)) for skew in (0.0, 2.0))
    for flat, steep in zip(even.policies, skewed.policies):
        assert list(flat.shares) == sorted(flat.shares) and list(steep.shares) == sorted(steep.shares)
        assert steep.shares[0] > flat.shares[0] + 0.2


def test_sizes_hold_at_least_what_a_token_takes_and_one_token_is_enough() -> None:
    record = make_record(30, experts=8, used=4)
    assert replay_record(record).places == (4, 6)
    one = replay_record(replace(record, ids=record.ids[:1], batches=(1,)))
    assert all(0 <= share <= 1 for policy in one.policies for share in policy.shares)
