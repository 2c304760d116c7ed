"""Experts that follow use: what lies in slots, against the obvious way to say it; and what replays promise."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_samples import make_drifting_record, make_record

from pshard.routing.expert_uses import used_experts
from pshard.routing.follow_use import DECAY, HitCounts, UseFollower
from pshard.routing.followed import make_follower
from pshard.routing.replay_slots import replay_run, replay_tokens
from pshard.units.moe.expert_cache import DEMAND, ExpertCache, check_cache, pack_hits

LAYERS, EXPERTS, USED = 3, 6, 2


class Obvious:
    """The same rules with dictionaries and lists."""

    def __init__(self, eligible, slots, policy, admits) -> None:
        self.inside, self.coming, self.decided = {}, {}, {}  # expert -> slot
        self.eligible, self.slots, self.policy, self.admits = eligible, slots, policy, admits
        self.score = {(layer, e): 0.0 for layer in range(LAYERS) for e in range(EXPERTS)}
        self.turn = 0

    def begin(self) -> None:
        self.inside |= self.coming
        taken = set(self.decided.values())
        self.inside = {e: slot for e, slot in self.inside.items() if slot not in taken}
        self.coming, self.decided = self.decided, {}

    def observe(self, ids) -> None:
        self.turn += 1
        used = [(layer, int(e)) for token in ids for layer, row in enumerate(token) for e in row]
        for key in self.score if self.policy == "frequency" else ():
            self.score[key] *= DECAY
        for key in used:
            self.score[key] = self.turn if self.policy == "lru" else self.score[key] + 1.0
        missed = {key for key in used if self.eligible[key] and key not in self.inside and key not in self.coming}
        wanted = sorted(missed, key=lambda key: (-self.score[key], key))[: self.admits]
        busy = {*self.inside.values(), *self.coming.values()}
        free = [slot for slot in range(self.slots) if slot not in busy]
        leaving = sorted(self.inside, key=lambda key: (self.score[key], key))
        for key in wanted:
            if free:
                self.decided[key] = free.pop(0)
            elif leaving and self.score[leaving[0]] < self.score[key]:
                self.decided[key] = self.inside[leaving.pop(0)]
            else:
                break


def draw_batches(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    """Choices of micro-batches of one to three tokens, some experts far more often than others."""
    weights = rng.random((LAYERS, EXPERTS)) ** 3
    return [
        np.array([
            [rng.choice(EXPERTS, USED, replace=False, p=row / row.sum()) for row in weights]
            for _ in range(rng.integers(1, 4))
        ])
        for _ in range(count)
    ]  # fmt: skip


@settings(max_examples=40)
@given(
    st.integers(0, 1 << 30), st.integers(1, 14), st.integers(0, 5), st.sampled_from(["lru", "frequency"]), st.booleans()
)
def test_slots_follow_use_as_the_rules_say(seed: int, slots: int, admits: int, policy: str, some: bool) -> None:
    """Also: no slot has two experts, none is used while it is written, and only eligible experts come."""
    rng = np.random.default_rng(seed)
    eligible = rng.random((LAYERS, EXPERTS)) < 0.7 if some else np.ones((LAYERS, EXPERTS), bool)
    follower, obvious = UseFollower(eligible, slots, policy, admits), Obvious(eligible, slots, policy, admits)
    for ids in draw_batches(rng, 40):
        turn = follower.begin()
        obvious.begin()
        inside = {tuple(key): int(follower.slot_of[tuple(key)]) for key in np.argwhere(follower.slot_of >= 0).tolist()}
        assert inside == obvious.inside and all(eligible[key] for key in inside)
        assert len(set(inside.values())) == len(inside) and len(turn.started) <= admits
        assert {(m.layer, m.expert): m.slot for m in turn.started} == obvious.coming
        assert not {m.slot for m in turn.started} & set(inside.values())
        assert all(inside[m.layer, m.expert] == m.slot for m in turn.arrived)
        assert not any(victim in inside for victim in turn.victims)
        follower.observe(ids)
        obvious.observe(ids)


@pytest.mark.parametrize("policy", ["lru", "frequency"])
def test_an_expert_that_is_missed_is_found_two_micro_batches_later(policy: str) -> None:
    follower = UseFollower(np.ones((1, 4), bool), 1, policy, 1)
    found = []
    for _ in range(4):
        follower.begin()
        found.append(int(follower.slot_of[0, 3]))
        follower.observe(np.array([[[3]]]))
    assert found == [-1, -1, 0, 0] and follower.counts == HitCounts(4, 2, 1)


def test_slots_that_admit_nothing_keep_what_they_began_with() -> None:
    follower = UseFollower(np.ones((LAYERS, EXPERTS), bool), 3, "frequency", 0, [(0, 1), (2, 5), (1, 0)])
    before = follower.slot_of.copy()
    for ids in draw_batches(np.random.default_rng(0), 50):
        follower.begin()
        follower.observe(ids)
    assert np.array_equal(follower.slot_of, before) and follower.counts.admitted == 0 < follower.counts.hits


def test_expected_uses_keep_their_experts_until_others_are_used_more() -> None:
    expected = np.array([[0.9, 0.5, 0.1, 0.0]])
    follower = UseFollower(np.ones((1, 4), bool), 2, "frequency", 2, [(0, 0), (0, 1)], expected)
    turns = 0
    while follower.slot_of[0, 3] < 0:
        follower.begin()
        follower.observe(np.array([[[3]]]))
        turns += 1
    assert 10 < turns < 60 and follower.slot_of[0, 0] >= 0 > follower.slot_of[0, 1]


def test_a_replay_counts_the_second_half_and_tells_hits_by_place() -> None:
    record = make_record(200, layers=2)
    eligible = np.ones((2, record.experts), bool)
    eligible[:, 0] = False
    all_slots = UseFollower(eligible, eligible.size, "lru", 99)
    replay = replay_tokens(record, record.layers, all_slots)
    assert replay.uses.sum() == 100 * 2 * record.used
    assert np.array_equal(replay.uses, record.count_uses(100))
    assert replay.hits[:, 0].sum() == 0 and np.array_equal(replay.hits[:, 1:], replay.uses[:, 1:])
    orders = [tuple(reversed(range(record.experts)))] * 2
    assert replay.by_place(orders)[-1] == 0.0 and replay.by_place(orders)[0] in (0.0, 1.0)
    assert replay.admitted == 0.0


def test_texts_that_are_decoded_at_once_share_the_slots() -> None:
    """As a run of two sequences whose texts are the halves of the record."""
    record, eligible = make_drifting_record(100, 2), np.ones((2, 16), bool)
    both = replay_tokens(record, record.layers, UseFollower(eligible, 8, "lru", 4), together=2)
    follower, before = UseFollower(eligible, 8, "lru", 4), HitCounts()
    for turn in range(50):
        follower.begin()
        before = follower.counts if turn == 25 else before
        follower.observe(record.ids[[turn, 50 + turn]])
    run = follower.counts - before
    assert (both.hits.sum(), both.uses.sum()) == (run.hits, run.chosen) and both.admitted == run.admitted / 50
    alone = replay_tokens(record, record.layers, UseFollower(eligible, 8, "lru", 4))
    assert 0 < both.share < alone.share


def test_a_replay_of_a_run_leaves_prompts_out() -> None:
    record = replace(make_record(60, layers=2), batches=(20, *[1] * 15, 16, *[3] * 3))
    follower = UseFollower(np.ones((2, record.experts), bool), 5, "frequency", 2)
    assert replay_run(record, record.layers, follower, 8).chosen == 24 * 2 * record.used


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"slots": 0}, "0 slots"),
        ({"policy": "best"}, "'best', not one of lru, frequency"),
        ({"admits": -1}, "admits -1"),
        ({"hits": "?"}, "no base64"),
        ({"found": 1.5}, "found is 1.5"),
        ({"width": 0}, "width is 0, not 1 to 8"),
        ({"width": 10**400}, "not 1 to 8"),
        ({"units": ("a", "a")}, "or one twice"),
        ({"units": ()}, "names no unit"),
    ],
)
def test_what_no_plan_has_is_refused(fields: dict, message: str) -> None:
    good = {"units": ("a",), "slots": 2, "slot_bytes": 256, "policy": "lru", "admits": 3, "hits": pack_hits([0.5, 1])}
    check_cache(ExpertCache(**good), "x")
    with pytest.raises(ValueError, match=message):
        check_cache(ExpertCache(**(good | fields)), "x")


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_what_a_slot_has_is_there_for_all_tokens_that_use_it(tokens: int) -> None:
    hits = ExpertCache(("a",), 1, 256, "lru", 1, pack_hits([0.0, 0.5, 1.0, 1.0])).hits_by_place
    used = [1 - (1 - use) ** tokens for use in (0.9, 0.6, 0.25, 0.25)]
    missed = [used_experts(range(i, i + 1), 2, 4, tokens, (0.9, 0.6, 0.25, 0.25), hits) for i in range(4)]
    assert missed == pytest.approx([used[0], used[1] / 2, 0.0, 0.0], abs=2e-3)
    alike = 1 - 0.5**tokens
    assert used_experts(range(4), 2, 4, tokens, (), hits) == pytest.approx(1.5 * alike, abs=4e-3)


@pytest.mark.parametrize(
    ("tokens", "slots"), [(1, 192), (2, 192), (4, 192), (8, 96), (8, 192), (8, 288), (16, 96), (16, 192)]
)
def test_slots_on_demand_miss_of_experts_that_are_used_alike_what_is_promised(tokens: int, slots: int) -> None:
    """From steps that all fit several times to such of which not even one does."""
    layers, experts, used = 6, 64, 4
    cache = ExpertCache(tuple(map(str, range(layers))), slots, 256, DEMAND, 0, tokens=16)
    rng, every = np.random.default_rng(0), [(i, e) for e in range(experts) for i in range(layers)]
    follower = make_follower(cache, np.ones((layers, experts), bool), every)
    steps, before = 400 // tokens, 0
    for step in range(2 * steps):
        before = follower.counts.admitted if step == steps else before
        follower.observe(rng.random((tokens, layers, experts)).argsort(2)[:, :, :used])
    hits = (cache.find_alike(used, experts, tokens),) * experts
    missed = layers * used_experts(range(experts), used, experts, tokens, (), hits)
    assert missed == pytest.approx((follower.counts.admitted - before) / steps, rel=0.04)
