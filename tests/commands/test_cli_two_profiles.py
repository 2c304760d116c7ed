"""One registry, several profiles of a machine: every run takes the plans of its own, and a report tells them apart."""

import shutil
from pathlib import Path

import pytest
from cli_world import World, edit_json, make_world
from report_samples import leave_undrawn

from pshard.commands import cli_bench, cli_plan, cli_run
from pshard.commands.cli_report import make_report
from pshard.registries.store import load_registry


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path)


def other_profile(world: World, day: str) -> Path:
    """The same machine, profiled another day."""
    path = world.profile.with_name(f"{day}.json")
    shutil.copy(world.profile, path)
    edit_json(path, "provenance", "date", value=f"{day}T00:00:00+00:00")
    return path


def plan(world: World, profile: Path) -> None:
    argv = ["-m", str(world.model), "--vram", "6", "-c", "128", "--profile", str(profile)]
    assert cli_plan.main(argv) == 0


def test_plans_of_two_profiles_do_not_replace_each_other(world: World, capsys: pytest.CaptureFixture) -> None:
    profiles = world.profile, other_profile(world, "2026-05-05")
    for profile in profiles:
        plan(world, profile)
    assert "dropped" not in capsys.readouterr().err
    assert [len(plans.variants) for plans in load_registry(world.registry).sets] == [1, 1]
    for profile in profiles:
        common = ["-m", str(world.model), "--vram", "6", "--profile", str(profile)]
        assert cli_run.main([*common, "-p", "a", "-n", "2"]) == 0
        assert cli_bench.main([*common, "-p", "4", "-n", "0", "-r", "1"]) == 0
    capsys.readouterr()
    third = other_profile(world, "2026-06-06")
    call = ["-m", str(world.model), "--vram", "6", "--profile", str(third), "-p", "4", "-n", "0", "-r", "1"]
    assert cli_bench.main(call) == 2  # a run would plan
    line = capsys.readouterr().err
    assert "no plan was made for these inputs; the nearest of 2 sets of plans differs (profile: " in line
    assert "2026-06-06" in line and f"run: pshard-plan -m {world.model} --vram 6" in line


def test_a_report_names_the_machine_of_each_plan_and_simulates_its_profiles_own(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_undrawn(monkeypatch)
    other = other_profile(world, "2026-05-05")
    for profile in (world.profile, other):
        plan(world, profile)
    capsys.readouterr()
    out = tmp_path / "report"
    files = [str(world.registry), "-m", str(world.model), "--profile", str(other)]
    assert make_report([*files, "-o", str(out)]) == 0
    page = (out / "report.html").read_text()
    for date in ("2026-01-02", "2026-05-05"):
        assert f"profile measured {date}" in page or f"profile datasheet {date}" in page
    assert len(list(out.glob("timeline-*.svg"))) == 2  # decode and the largest tier, of one plan of two
