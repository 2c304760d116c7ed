"""The thread that makes the CPU's calls as they are asked for."""

import threading
import time

import numpy as np
import pytest

from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.recording import record

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs the C++ library")


def norm(x: np.ndarray, out: np.ndarray):
    """The call out = x / rms(x), as a list."""
    weight = np.ones(x.shape[1], np.float32)
    calls = record(lambda: native.rms_norm(x, weight, 0.0, 1, 64, out, strides=(64, 64)))
    assert calls is not None
    return calls, weight


def make_parts(n: int):
    """Each computes from what the one before has written."""
    rows = [np.random.default_rng(i).standard_normal((1, 64), np.float32) for i in range(n + 1)]
    flags = np.zeros((2, n, 16), np.int32)
    lists = [norm(rows[i], rows[i + 1]) for i in range(n)]
    parts = [(flags[0, i].ctypes.data, flags[1, i].ctypes.data, lists[i][0].words) for i in range(n)]
    return rows, flags, parts, lists


def wait_for(flag: np.ndarray) -> None:
    end = time.monotonic() + 60
    while not flag[0]:
        assert time.monotonic() < end, "the part was not done"
        time.sleep(0)


def test_parts_are_done_when_asked_for_and_in_their_order():
    rows, flags, parts, _lists = make_parts(3)
    relay = native.Relay()
    try:
        for turn in range(20):
            rows[0][:] = np.arange(64) + turn
            for row in rows[1:]:
                row[:] = np.nan
            relay.start(native.arrange_turn(parts))
            for i in range(3):
                assert np.isnan(rows[i + 1]).all() and not flags[1, i, 0], "not before it is asked for"
                flags[0, i, 0] = 1
                wait_for(flags[1, i])
                assert np.isfinite(rows[i + 1]).all()
                flags[1, i, 0] = 0
            relay.finish()
            assert not flags.any(), "who has seen a number takes it back"
    finally:
        relay.close()


def test_a_turn_that_is_given_up_does_not_wait_for_what_nobody_asks_for():
    rows, flags, parts, _lists = make_parts(2)
    relay = native.Relay()
    relay.start(native.arrange_turn(parts))
    flags[0, 0, 0] = 1
    wait_for(flags[1, 0])
    waits = threading.Timer(10, lambda: flags[0, 1].fill(1))
    waits.start()
    relay.give_up()
    assert waits.is_alive() and not flags[1, 1, 0]
    waits.cancel()
    flags[:] = 0
    relay.start(native.arrange_turn(parts))  # and the next one begins anew
    flags[0, :, 0] = 1
    relay.finish()
    assert flags[1, :, 0].all()
    relay.close()
