"""Core time that went to other machines."""

import subprocess
import sys
import time

import pytest

from pshard.stolen_time import CoreTime, describe_stolen, disturbed_share, read_core_time, stolen_share


def test_the_share_is_of_all_cores_time_between_two_readings() -> None:
    assert stolen_share(CoreTime(100.0, 5.0), CoreTime(300.0, 55.0)) == pytest.approx(0.25)


def test_counters_that_stand_still_or_go_back_steal_nothing() -> None:
    assert stolen_share(CoreTime(100.0, 5.0), CoreTime(100.0, 5.0)) == 0.0
    assert stolen_share(CoreTime(100.0, 5.0), CoreTime(101.0, 4.0)) == 0.0


def test_readings_grow() -> None:
    before, after = read_core_time(), read_core_time()
    assert 0 <= before.stolen <= before.total <= after.total


def test_only_measurements_that_suffered_are_named() -> None:
    assert describe_stolen({"ilp pp512": 0.0, "ilp tg64": 0.019}) is None
    said = describe_stolen({"ilp pp512": 0.0, "ilp tg64": 0.253})
    assert said is not None and "ilp tg64 (25%)" in said and "pp512" not in said


def test_what_other_programs_use_counts_beside_what_is_stolen() -> None:
    assert disturbed_share(CoreTime(100.0, 5.0, 70.0), CoreTime(300.0, 15.0, 100.0)) == pytest.approx(0.2)
    assert disturbed_share(CoreTime(100.0, 5.0, 70.0), CoreTime(300.0, 5.0, 69.0)) == 0.0


def test_another_process_shows_and_this_one_does_not() -> None:
    def spin(seconds: float) -> float:
        before, end = read_core_time(), time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        after = read_core_time()
        return after.others - before.others

    program = "import time; end = time.monotonic() + 30\nwhile time.monotonic() < end: pass"
    quiet = min(spin(0.5) for _ in range(3))
    with subprocess.Popen([sys.executable, "-c", program]) as other:
        loud = max(spin(0.5) for _ in range(3))
        other.kill()
    assert loud > quiet + 0.1
