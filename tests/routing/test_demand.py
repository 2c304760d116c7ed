"""Slots whose layers bring what they miss: what was used longest ago leaves, what is in use never does."""

from collections import OrderedDict

import numpy as np
import pytest
from routing_samples import make_drifting_record, make_record

from pshard.routing.follow_use import DemandFollower, HitCounts
from pshard.routing.record import RoutingRecord
from pshard.routing.replay_slots import replay_run, replay_tokens


def count_plainly(record: RoutingRecord, slots: int) -> HitCounts:
    """The same by an ordered dictionary, token by token."""
    held, chosen, hits = OrderedDict[tuple[int, int], None](), 0, 0
    for token in record.ids.astype(int):
        for layer, experts in enumerate(token):
            for expert in sorted(experts):
                chosen += 1
                if (layer, expert) in held:
                    hits += 1
                    held.move_to_end((layer, expert))
            for expert in sorted(experts):
                held[layer, expert] = None
                held.move_to_end((layer, expert))
            while len(held) > slots:
                held.popitem(last=False)
    return HitCounts(chosen, hits, chosen - hits)


@pytest.mark.parametrize("slots", [6, 11, 30, 48])
def test_hits_are_those_of_a_plain_cache_of_what_was_used_last(slots: int) -> None:
    record = make_drifting_record(200)
    follower = DemandFollower(np.ones((3, 16), bool), slots)
    found = replay_run(RoutingRecord("", record.layers, 16, record.ids, (1,) * 200), record.layers, follower, 1)
    expected = count_plainly(record, slots)
    # of experts of one look-up the order is free: it may change which of them leaves first
    assert found.chosen == expected.chosen and abs(found.hits - expected.hits) <= 0.02 * found.chosen
    assert found.admitted == found.chosen - found.hits


def test_what_a_layer_uses_stays_until_it_is_computed_and_nothing_lies_in_two_slots() -> None:
    record, rng = make_record(300, layers=3), np.random.default_rng(0)
    follower, done = DemandFollower(np.ones((3, 16), bool), 9), 0
    while done < 300:
        n = int(rng.integers(1, 4))
        for layer in range(3):
            ids = record.ids[done : done + n, layer]
            turn = follower.look_up(layer, ids)
            held = follower.slot_of.ravel()
            assert len(set(held[held >= 0])) == (held >= 0).sum()
            taken = {move.slot for move in turn.started}
            assert len(taken) == len(turn.started) and not taken & set(held[held >= 0].tolist())
            for victim in turn.victims:
                assert victim[0] != layer or victim[1] not in ids
                assert follower.slot_of[victim] < 0
            follower.arrive(turn.started)
            assert (follower.slot_of[layer, ids.astype(int)] >= 0).all()
        done += n


def test_a_micro_batch_that_uses_more_than_all_slots_leaves_them_to_decoding() -> None:
    """It finds what lies there, and of each layer takes as many slots as it misses, the same ones."""
    decoded = np.array([[[0, 1], [2, 3], [4, 5]], [[0, 2], [2, 4], [4, 6]]])
    follower = DemandFollower(np.ones((3, 16), bool), 18, [(layer, 15) for layer in range(3)])
    for token in decoded:
        follower.observe(token[None])
    before = follower.slot_of.copy()
    wide = np.stack([np.arange(10).reshape(5, 2)] * 3, axis=1)  # 10 experts of each layer, of 18 slots in all
    found = follower.observe(wide)
    assert (found == (before[np.arange(3)[:, None], wide] >= 0)).all()
    assert follower.observe(decoded[1:]).all()  # which was decoded last
    few = np.stack([np.arange(10, 14).reshape(2, 2)] * 3, axis=1)  # 4 of each: there is room
    follower.observe(few)
    assert follower.observe(few).all()


def test_fewer_slots_than_one_layer_uses_are_an_error() -> None:
    follower = DemandFollower(np.ones((1, 16), bool), 3)
    with pytest.raises(ValueError, match="3 slots are too few for the 4 experts that one layer uses"):
        follower.look_up(0, np.array([[0, 1], [2, 3]]))


def test_a_replay_counts_the_second_half_and_what_it_brings_for_each_token() -> None:
    record = make_record(400, skew=2.0)
    replay = replay_tokens(record, record.layers, DemandFollower(np.ones((3, 16), bool), 24))
    assert 0.5 < replay.share < 1  # half of the experts, of which some are chosen more often
    assert replay.admitted == pytest.approx((1 - replay.share) * 3 * 2)
