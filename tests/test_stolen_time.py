"""Core time that went to other machines."""

import subprocess
import sys
from collections import namedtuple

import psutil
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


def test_this_process_and_guests_are_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = namedtuple("machine", "user nice system idle steal guest guest_nice")
    process = namedtuple("process", "user system")
    monkeypatch.setattr(psutil, "cpu_times", lambda: machine(50.0, 3.0, 7.0, 100.0, 2.0, 4.0, 1.0))
    monkeypatch.setattr(psutil.Process, "cpu_times", lambda self: process(10.0, 5.0))
    assert read_core_time() == CoreTime(total=162.0, stolen=2.0, others=45.0)


def test_the_core_time_of_another_process_is_among_the_others() -> None:
    program = "import time; print(flush=True); end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        before = read_core_time()
        assert other.wait() == 0
        after = read_core_time()
    stolen = after.stolen - before.stolen  # some systems count it as the process's own time
    assert after.others - before.others + stolen > 0.2  # 0.3 s less what the clock ticks leave out
