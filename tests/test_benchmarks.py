"""The benchmark scripts that need a model run from nothing but a profile, and give their result."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from cli_world import World, make_world

from pshard.benching import BenchTest
from pshard.opening import Request

SCRIPTS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path, context=8192, n_layers=1)


def run_script(world: World, name: str, *flags: str) -> subprocess.CompletedProcess:
    env = os.environ | {"PSHARD_CACHE": str(world.profile.parent)}
    command = [sys.executable, str(SCRIPTS / name), "-m", str(world.model), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def test_a_soak_ends_in_time_tells_what_it_does_and_checks_logits(world: World, tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    done = run_script(world, "soak.py", "--vram", str(world.budget), "-c", "128", "--seconds", "2", "-o", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    assert record["passed"] and record["counts"]["checks"] and record["counts"]["interrupts"]
    assert sum(record["seconds"][what] for what in ("warm-up", "longest prompt", "talk", "interrupt")) < 10
    assert "loaded" in done.stderr and "longest prompt" in done.stderr


def test_truth_plans_budgets_that_have_no_plan(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "truth.json"
    monkeypatch.setenv("PSHARD_CACHE", str(world.profile.parent))
    monkeypatch.setattr(sys, "argv", ["truth.py", "-m", str(world.model), "--vram", "64", "-o", str(out)])
    truth = runpy.run_path(str(SCRIPTS / "truth.py"))
    named = truth["main"].__globals__
    monkeypatch.setitem(named, "TESTS", (BenchTest(16, 0),))
    monkeypatch.setitem(named, "STRATEGIES", ("layer-stream",))
    assert truth["main"]() == 0
    assert "planned now, as no plan" in capsys.readouterr().out
    assert [row["strategy"] for row in json.loads(out.read_text())["rows"] if row["measured"]] == [
        "ilp",
        "layer-stream",
    ]
    truth["open_or_plan"](Request(world.model, (64,), truth["CONTEXT"]))
    assert not capsys.readouterr().out


def test_a_budget_that_is_too_small_is_told_in_one_line(world: World, tmp_path: Path) -> None:
    done = run_script(world, "truth.py", "--vram", "1", "-o", str(tmp_path / "truth.json"))
    assert done.returncode == 2 and done.stdout.count("\n") == 1 and "Traceback" not in done.stderr
