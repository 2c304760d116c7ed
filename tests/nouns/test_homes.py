"""Homes, lanes and sites: declared once, and added for a while."""

import pickle

import pytest

from pshard.homes import (
    BACK,
    COMPUTE,
    DISK,
    HOMES,
    HOST,
    LINK,
    MOVING,
    ON_CPU,
    PINNED,
    READ,
    SITES,
    STREAMED,
    VRAM,
    Home,
    Lane,
    declare_home,
    list_far_homes,
    list_lanes,
)
from pshard.plan import Placement
from pshard.units.ffn import FFN
from pshard.units.output import OUTPUT
from pshard.units.unit import places_of


def test_a_placement_answers_what_code_asks_of_it() -> None:
    """By site: who computes, what lies in the arena, what moves every time, what passes through the stage."""
    asked = ("is_on_acc", "in_arena", "moves_each_step", "stages_state", "is_whole_in_arena")
    found = {
        where: [getattr(Placement("a", where, "host"), name) for name in asked] for where in (PINNED, STREAMED, ON_CPU)
    }
    assert found == {
        PINNED: [True, True, False, True, True],
        STREAMED: [True, False, True, True, False],
        ON_CPU: [False, False, False, False, False],
    }
    kept, shared = Placement("a", STREAMED, None, 0, 64), Placement("a", PINNED, None, 32)
    assert kept.in_arena and not kept.is_whole_in_arena and not shared.is_whole_in_arena
    assert Placement("a", STREAMED, "vram").stages_state is False
    assert [Placement("a", where).weights_home for where in (PINNED, STREAMED, ON_CPU)] == [VRAM, HOST, HOST]


def test_a_home_is_there_while_it_is_declared_and_leaves_no_trace() -> None:
    before = dict(HOMES), dict(SITES), dict(MOVING), list_lanes(), places_of(FFN, False)
    far = Home("far", (Lane("slow", "slow"), LINK))
    with declare_home(far) as site:
        assert site.moves_each_step and site.is_beyond_host and list_far_homes() == (DISK, far)
        assert list_lanes() == (LINK, BACK, READ, far.way_in[0])
        assert places_of(FFN, False) == (*before[4], ("far", None)) and ("far", None) in places_of(OUTPUT, False)
        with pytest.raises(ValueError, match="called 'far' already"), declare_home(far):
            pass
    assert (dict(HOMES), dict(SITES), dict(MOVING), list_lanes(), places_of(FFN, False)) == before
    with pytest.raises(ValueError, match="over the link"), declare_home(Home("far", (BACK,))):
        pass


def test_homes_and_lanes_stay_themselves_in_another_process() -> None:
    """They are compared by identity; a placement remembers its site."""
    place = Placement("a", STREAMED)
    assert place.site is SITES[STREAMED]
    assert pickle.loads(pickle.dumps(place)).site is SITES[STREAMED]
    for thing in (VRAM, HOST, DISK, LINK, BACK, READ, COMPUTE):
        assert pickle.loads(pickle.dumps(thing)) is thing
