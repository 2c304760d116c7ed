"""What a profile says that torch and the kernels take of a GPU, by the driver's figures."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pshard.machine import Reserve
from pshard.profile.effort import full_effort, quick_effort, short_effort
from pshard.profile.measure import ProfileRequest, find_reserve
from pshard.profile.timed import measure_reserve as measuring
from pshard.profile.timed.measure_reserve import measure_reserve

MIB = 1 << 20
GPU: Any = SimpleNamespace(kind="cuda", torch_device="cuda:0", synchronize=lambda: None)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU of which a process has taken so many MiB, and torch has so many of them; Windows may schedule it."""

    def find(taken: int, torch_has: int, windows: bool = False) -> tuple[tuple[Reserve, ...], list[str]]:
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: torch_has * MIB)
        monkeypatch.setattr(measuring, "is_scheduled_by_windows", lambda: windows)
        monkeypatch.setattr(GPU, "process_bytes", lambda: taken * MIB, raising=False)
        notes: list[str] = []
        return measure_reserve("acc1", GPU, notes), notes

    return find


def test_what_torch_has_allocated_is_no_part_of_it(found: Any) -> None:
    assert found(1100, 1000) == ((Reserve("acc1", 100 * MIB),), [])


def test_figures_that_say_nothing_are_told_and_the_reserve_is_assumed(found: Any) -> None:
    for case, why in (((990, 1000), "other programs gave VRAM back"), ((1100, 1000, True), "Windows lends VRAM")):
        rows, (note,) = found(*case)
        assert rows == () and why in note and "320 MiB are kept" in note


def test_more_than_is_kept_is_told(found: Any) -> None:
    rows, (note,) = found(1400, 1000)
    assert rows == (Reserve("acc1", 400 * MIB),) and "400 MiB of VRAM were taken" in note and "320 MiB" in note


def test_the_cpu_and_a_profile_in_seconds_have_none(found: Any) -> None:
    found(1100, 1000)
    requests = [
        ProfileRequest("cuda", effort(MIB, 1 << 34), None, None, "pshard-profile")
        for effort in (full_effort, quick_effort, short_effort)
    ]
    assert [len(find_reserve(request, "acc", GPU, [])) for request in requests] == [1, 1, 0]
    assert measure_reserve("acc", SimpleNamespace(kind="cpu"), []) == ()  # type: ignore[arg-type]
