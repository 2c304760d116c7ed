"""A routing record played back: what tokens are made to choose, and the slots that it warms."""

import numpy as np
from routing_samples import make_drifting_record

from pshard.routing.follow_use import HitCounts, UseFollower
from pshard.routing.play_record import RoutingPlay

RECORD = make_drifting_record(60)


def test_second_halves_of_the_texts_are_dealt_out_over_and_over() -> None:
    one = RoutingPlay(RECORD, 1)
    assert np.array_equal(one.deal(20), RECORD.ids[30:50])
    assert np.array_equal(one.deal(15), np.concatenate([RECORD.ids[50:], RECORD.ids[:5]]))
    three = RoutingPlay(RECORD, 3)  # texts of 20 tokens
    assert np.array_equal(three.deal(3), RECORD.ids[[10, 30, 50]])
    assert np.array_equal(three.deal(5), RECORD.ids[[11, 12, 31, 32, 51]])
    assert np.array_equal(three.deal(3), RECORD.ids[[13, 33, 53]])


def test_slots_are_warm_by_the_first_half_and_nothing_is_on_its_way() -> None:
    eligible = np.ones((3, 16), bool)
    warmed = UseFollower(eligible, 10, "frequency", 3)
    RoutingPlay(RECORD, 1).warm(warmed, RECORD.layers)
    by_hand = UseFollower(eligible, 10, "frequency", 3)
    for ids in RECORD.ids[:30]:
        by_hand.begin()
        by_hand.observe(ids[None])
    for _ in range(2):
        by_hand.begin()
    assert np.array_equal(warmed.slot_of, by_hand.slot_of) and (warmed.slot_of >= 0).sum() == 10
    turn = warmed.begin()
    assert not turn.arrived and not turn.started and warmed.counts == HitCounts()
