"""Host memory that is filled before torch is imported: as much as the plan's weights take, for one rank of large
models."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli_world import World, edit_json, make_world, world_in

from pshard.commands.cli_plan import main as plan
from pshard.session.open_plan import open_plan
from pshard.session.readiness import fill_ahead
from pshard.session.run_request import RunRequest
from pshard.session.start_engine import start_engine


@pytest.fixture(scope="module")
def planned_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world with a plan, made once and copied by every test."""
    folder = tmp_path_factory.mktemp("planned")
    world = make_world(folder, context=512)
    with pytest.MonkeyPatch.context() as patch:  # conftest's own is for one test
        patch.setenv("PSHARD_CACHE", str(world.profile.parent))
        patch.setenv("PSHARD_VALIDATE", "0")
        assert plan(["-m", str(world.model), "--vram", str(world.budget), "-c", "256"]) == 0
    return folder


@pytest.fixture
def world(planned_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(fill_ahead, "WORTH_IT", 1)
    shutil.copytree(planned_once, tmp_path, dirs_exist_ok=True)
    return world_in(tmp_path)


@pytest.fixture
def request_(world: World) -> RunRequest:
    return RunRequest(world.model, (world.budget,))


def test_it_is_what_the_engine_takes(request_: RunRequest) -> None:
    filled = fill_ahead.fill_ahead(request_)
    opened = open_plan(request_)
    assert filled is not None
    with start_engine(opened, opened.variant, filled=filled) as engine:
        assert engine.memory().host_weights == filled.nbytes and not filled.memory.closed
        engine.forward([1, 2, 3])
    opened.file.close()


def test_without_a_budget_it_is_that_of_the_largest_plan_that_fits(request_: RunRequest) -> None:
    assert fill_ahead._plan_bytes(replace(request_, vram_mib=None)) == fill_ahead._plan_bytes(request_) > 0


def test_no_torch_is_imported_for_it(world: World) -> None:
    code = f"""
import sys
sys.modules["torch"] = None
from pathlib import Path
from pshard.session.readiness import fill_ahead
from pshard.session.run_request import RunRequest
fill_ahead.WORTH_IT = 1
print(fill_ahead.fill_ahead(RunRequest(Path({str(world.model)!r}), ({world.budget},))).nbytes)
"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=120)
    assert int(done.stdout) > 0, done.stderr


@pytest.mark.parametrize(
    "changes", [{"replan": True}, {"split_mode": "tensor", "devices": 2}, {"vram_mib": (1,)}, {"context": 1 << 20}]
)
def test_nothing_is_filled_for_ranks_and_for_plans_that_are_not_there(request_: RunRequest, changes: dict) -> None:
    assert fill_ahead.fill_ahead(replace(request_, **changes)) is None


def test_nothing_is_filled_for_small_models_several_nodes_or_damaged_files(
    world: World, request_: RunRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fill_ahead, "WORTH_IT", 1 << 30)
        assert fill_ahead.fill_ahead(request_) is None
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "2")
        assert fill_ahead.fill_ahead(request_) is None
    edit_json(world.profile, "host", "numa_nodes", value=2)
    assert fill_ahead.fill_ahead(request_) is None
    world.registry.write_text("{")
    assert fill_ahead.fill_ahead(request_) is None
    world.profile.unlink()
    assert fill_ahead.fill_ahead(request_) is None


@pytest.mark.parametrize(("free", "fills"), [({0: 500 << 20}, True), ({0: 300 << 20}, False), ({}, False)])
def test_without_a_budget_the_driver_says_what_is_free_on_a_gpu(
    world: World, monkeypatch: pytest.MonkeyPatch, free: dict, fills: bool
) -> None:
    edit_json(world.profile, "accelerators", 0, "kind", value="cuda")
    edit_json(world.profile, "accelerators", 0, "memory_bytes", value=1 << 34)
    assert plan(["-m", str(world.model), "--vram", "322", "-c", "256"]) == 0  # not all fits
    monkeypatch.setattr(fill_ahead, "free_by_driver", lambda: free)
    filled = fill_ahead.fill_ahead(RunRequest(world.model))
    assert (filled is not None) == fills
