"""Core time that went to other machines."""

import subprocess
import sys
from collections import namedtuple

import psutil
import pytest

from pshard.times import stolen_time
from pshard.times.stolen_time import (
    CoreTime,
    describe_disturbed,
    disturbed_share,
    lost_since,
    read_core_time,
    stolen_share,
)


def test_the_share_is_of_all_cores_time_between_two_readings() -> None:
    assert stolen_share(CoreTime(100.0, 5.0), CoreTime(300.0, 55.0)) == pytest.approx(0.25)


def test_counters_that_stand_still_or_go_back_steal_nothing() -> None:
    assert stolen_share(CoreTime(100.0, 5.0), CoreTime(100.0, 5.0)) == 0.0
    assert stolen_share(CoreTime(100.0, 5.0), CoreTime(101.0, 4.0)) == 0.0


def test_readings_grow() -> None:
    before, after = read_core_time(), read_core_time()
    assert 0 <= before.stolen <= before.total <= after.total


def test_only_measurements_that_suffered_are_named_by_the_share_that_others_may_have_cost() -> None:
    assert describe_disturbed({"ilp pp512": 0.0, "ilp tg64": 0.04}) is None
    said = describe_disturbed({"ilp pp512": 0.0, "ilp tg64": 0.516})
    assert said is not None and "during ilp tg64 (52%): rates may be too low" in said and "pp512" not in said
    said = describe_disturbed({f"ilp tg{n}": 0.1 * n for n in range(1, 6)})
    assert said is not None and "during all 5 tests (10% to 50%): " in said


@pytest.mark.parametrize(("processes", "seconds", "disturbed"), [(1, 10.0, 0.35), (2, 10.0, 0.2), (1, 0.1, 0.2)])
def test_other_programs_count_where_they_can_be_told(
    monkeypatch: pytest.MonkeyPatch, processes: int, seconds: float, disturbed: float
) -> None:
    """Ranks are other programs to each other, and counters have steps of 10 ms."""
    cores_time = 4 * seconds
    after = CoreTime(cores_time, 0.05 * cores_time, 0.15 * cores_time, cores=4)
    monkeypatch.setattr(stolen_time, "read_core_time", lambda: after)
    lost = lost_since(CoreTime(0.0, 0.0, 0.0, cores=4), processes)
    assert (lost.stolen, lost.disturbed) == (0.05, pytest.approx(disturbed))


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
