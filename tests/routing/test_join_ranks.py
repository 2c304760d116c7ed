"""What several ranks recorded and found, put together."""

from dataclasses import replace

import pytest
from routing_samples import make_record

from pshard.routing.follow_use import HitCounts, RankHits, join_hits
from pshard.routing.record import join_layers


def test_records_of_layers_are_joined_in_the_order_of_layers() -> None:
    record = make_record(50, layers=4)
    first, last = record.of_layers((1, 2)), record.of_layers((3, 4))
    assert (first.ids == record.ids[:, :2]).all() and first.layers == (1, 2) and first.tokens == 50
    for parts in ([first, last], [last, first], [record.of_layers((1, 3)), record.of_layers((2, 4))]):
        joined = join_layers(parts)
        assert (joined.ids == record.ids).all() and joined.ids.dtype == record.ids.dtype
        assert (joined.layers, joined.batches, joined.fingerprint) == (record.layers, record.batches, "ab" * 32)
    with pytest.raises(ValueError, match="different micro-batches"):
        join_layers([first, replace(last, batches=(50,))])
    with pytest.raises(ValueError):
        record.of_layers((1, 9))


def test_hits_of_ranks_are_added_and_what_is_expected_is_their_mean_by_choices() -> None:
    large, small = RankHits(HitCounts(300, 150, 9), 0.6), RankHits(HitCounts(100, 90, 1), 0.8)
    none = RankHits(HitCounts(), None)
    assert join_hits([large]) == large and join_hits([none]) == none
    both = join_hits([large, none, small])
    assert both.found == HitCounts(400, 240, 10) and both.expected == pytest.approx((3 * 0.6 + 0.8) / 4)
    assert join_hits([large, replace(small, expected=0.6)]).expected == 0.6
    assert small.since(RankHits(HitCounts(10, 5, 1), 0.8)) == RankHits(HitCounts(90, 85, 0), 0.8)
