"""The program as a user starts it, with a Hub on this machine given by the environment: planned, fetched and run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_world import World, make_world
from hub_server import hub_server
from warm_python import run_warm

REPO = "someone/tiny-GGUF"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path, context=512, n_layers=1)


@pytest.mark.slow
def test_a_model_of_the_hub_is_planned_then_fetched_and_run_and_runs_again_offline(
    world: World, tmp_path: Path
) -> None:
    data = world.model.read_bytes()

    def call(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf")} | more
        env |= {"PSHARD_CACHE": str(world.profile.parent)}
        command = [sys.executable, "-P", "-m", "pshard.commands.program.one_program", *words]
        return run_warm(command, env, timeout=200)

    with hub_server() as hub:
        hub.repositories[REPO] = {"tiny-Q8_0.gguf": data}
        planned = call("plan", REPO, "--vram", "64", "-c", "256")
        assert planned.returncode == 0, planned.stderr
        assert "We would take Q8_0" in planned.stdout and hub.sent < len(data) and not (tmp_path / "hf/hub").exists()
        first = call("run", f"{REPO}:Q8_0", "--vram", "64", "-c", "256", "-p", "To be", "-n", "4", "-s", "1")
        assert first.returncode == 0, first.stderr
        assert f"fetching {REPO}:Q8_0" in first.stderr
    words = ("run", f"{REPO}:Q8_0", "--vram", "64", "-c", "256", "-p", "To be", "-n", "4", "-s", "1")
    again = call(*words, HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout and "fetching" not in again.stderr
    absent = call("run", "someone/else-GGUF", "-p", "To be", HF_HUB_OFFLINE="1")
    assert absent.returncode == 2 and "offline mode is on; unset HF_HUB_OFFLINE" in absent.stderr
    assert absent.stderr.count("\n") == 1
