"""Core time that went to other machines."""

import subprocess
import sys
from collections import namedtuple

import psutil
import pytest

from pshard.times.stolen_time import CoreTime, describe_stolen, disturbed_share, read_core_time, stolen_share


def test_the_share_is_of_all_cores_time_between_two_readings() -> None:
    assert stolen_share(CoreTime(100.0, 5.0), CoreTime(300.0, 55.0)) == pytest.approx(0.25)


def test_counters_that_stand_still_or_go_back_steal_nothing() -> None:
    assert stolen_share(CoreTime(100.0, 5.0), CoreTime(100.0, 5.0)) == 0.0
    assert stolen_share(CoreTime(100.0, 5.0), CoreTime(101.0, 4.0)) == 0.0


def test_readings_grow() -> None:
    before, after = read_core_time(), read_core_time()
    assert 0 <= before.stolen <= before.total <= after.total


def test_only_measurements_that_suffered_are_named_by_cores_that_were_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: 64)
    assert describe_stolen({"ilp pp512": 0.0, "ilp tg64": 0.0007}) is None
    said = describe_stolen({"ilp pp512": 0.0, "ilp tg64": 0.016})  # of 64 cores, one whole core
    assert said is not None and "ilp tg64 (1 of 64 cores)" in said and "pp512" not in said


def test_other_programs_count_by_their_share_and_stolen_seconds_whole() -> None:
    before = CoreTime(100.0, 5.0, 70.0, cores=4)
    assert disturbed_share(before, CoreTime(300.0, 5.0, 100.0, cores=4)) == pytest.approx(0.15)
    assert disturbed_share(before, CoreTime(300.0, 15.0, 70.0, cores=4)) == pytest.approx(0.2)  # 10 s of 50
    assert disturbed_share(before, CoreTime(300.0, 15.0, 100.0, cores=4)) == pytest.approx(0.35)
    assert disturbed_share(before, CoreTime(300.0, 5.0, 69.0, cores=4)) == 0.0
    assert disturbed_share(before, CoreTime(300.0, 105.0, 100.0, cores=4)) == 1.0


def test_this_process_and_guests_are_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = namedtuple("machine", "user nice system idle steal guest guest_nice")
    process = namedtuple("process", "user system")
    monkeypatch.setattr(psutil, "cpu_times", lambda: machine(50.0, 3.0, 7.0, 100.0, 2.0, 4.0, 1.0))
    monkeypatch.setattr(psutil.Process, "cpu_times", lambda self: process(10.0, 5.0))
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    assert read_core_time() == CoreTime(total=162.0, stolen=2.0, others=45.0, cores=2)


def test_the_core_time_of_another_process_is_among_the_others() -> None:
    program = "import time; input(); end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as other:
        before = read_core_time()
        other.communicate(b"go\n")
        assert other.returncode == 0
        after = read_core_time()
    stolen = after.stolen - before.stolen  # some systems count it as the process's own time
    assert after.others - before.others + stolen > 0.2  # 0.3 s less what the clock ticks leave out
