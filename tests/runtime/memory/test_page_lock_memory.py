"""What runs have met of the system's limit of page-locking: remembered, planned with, forgotten."""

import json
import platform
from pathlib import Path

import pytest
import torch
from ceiling_device import CeilingDevice
from cli_world import make_world

import pshard
from pshard.commands import cli_plan
from pshard.paths import cache_dir
from pshard.registries.fingerprint import digest_profile
from pshard.registries.profile_store import load_profile, note_page_locks, recall_lockable
from pshard.runtime.memory import staging


def test_a_limit_is_remembered_until_a_process_gets_beyond_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recall_lockable() is None
    assert not note_page_locks(500, refused=False) and recall_lockable() is None
    assert note_page_locks(700, refused=True) and recall_lockable() == 700
    assert not note_page_locks(700, refused=True)
    assert not note_page_locks(600, refused=False) and recall_lockable() == 700  # no more was asked for
    assert note_page_locks(650, refused=True) and recall_lockable() == 650
    assert note_page_locks(800, refused=False) and recall_lockable() is None
    assert note_page_locks(0, refused=True) and note_page_locks(1, refused=False) and recall_lockable() is None
    assert note_page_locks(0, refused=True) and recall_lockable() == 0
    with monkeypatch.context() as patch:
        patch.setattr("platform.node", lambda: "another machine on the same home folder")
        assert recall_lockable() is None
    place = tmp_path / "cache" / "page-locks.json"
    for damaged in ("", "[]", "{}", '{"machine": 1, "lockable_bytes": "x"}', "\0"):
        place.write_text(damaged)
        assert recall_lockable() is None
    place.write_text(json.dumps({"machine": platform.node(), "lockable_bytes": -1}))
    assert recall_lockable() is None  # planning with less than nothing had no end


@pytest.mark.parametrize("value", ["1e999", "NaN", "-1", "1.5", "true", '"7"', "[" * 100_000, "null"])
def test_a_limit_that_is_no_number_of_bytes_is_not_known(value: str) -> None:
    note_page_locks(700, refused=True)
    place = cache_dir() / "page-locks.json"
    place.write_text(place.read_text().replace("700", value))
    assert recall_lockable() is None
    assert note_page_locks(600, refused=True) and recall_lockable() == 600


def test_a_run_that_meets_the_limit_says_so_once_and_plans_stay_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    world, ceiling = make_world(tmp_path), 3 << 20
    monkeypatch.setattr(staging, "CHUNK", 64 << 10)
    monkeypatch.setattr("pshard.runtime.memory.host.host_arena.LOCK_CHUNK", 1 << 20)
    assert cli_plan.main(["-m", str(world.model), "-c", "128", "--vram", str(world.budget)]) == 0
    before = load_profile()
    assert before.lockable_bytes is None
    monkeypatch.setattr("pshard.runtime.devices.device.open_device", lambda kind, index: CeilingDevice(ceiling))
    said, told = [], list[bool]()
    for _ in range(2):
        with pshard.load(world.model, world.budget) as engine:
            logits, memory = engine.forward([*range(40)]), engine.memory()
            said.append((logits, sum("limit of page-locking is remembered" in note for note in engine.notes)))
        told.append("the plan was made for another limit (page-locked memory: absent -> " in capsys.readouterr().err)
    assert 0 < memory.host_locked <= ceiling and not memory.page_locked
    assert recall_lockable() == memory.host_locked
    assert torch.equal(said[0][0], said[1][0]) and [n for _, n in said] == [1, 0]
    assert told == [False, True]
    now = load_profile()
    assert now.lockable_bytes == memory.host_locked and digest_profile(now) == digest_profile(before)
    assert load_profile(world.profile).lockable_bytes is None  # planning for another machine
    assert cli_plan.main(["-m", str(world.model), "-c", "128", "--vram", str(world.budget)]) == 0
    capsys.readouterr()
    monkeypatch.setattr("pshard.runtime.devices.device.open_device", lambda kind, index: CeilingDevice(1 << 40))
    with pshard.load(world.model, world.budget) as engine:
        assert "another limit" not in capsys.readouterr().err
        torch.testing.assert_close(engine.forward([*range(40)]), said[0][0], rtol=0.05, atol=0.05)
    assert recall_lockable() is None
