"""A budget above the device's memory is refused by the name of its flag, before anything is planned or run."""

import pytest
from cli_world import World, edit_json, make_world

import pshard
from pshard.commands import cli_bench, cli_plan, cli_run
from pshard.errors import UserError


@pytest.fixture
def world(tmp_path) -> World:
    made = make_world(tmp_path)
    edit_json(made.profile, "accelerators", 0, "memory_bytes", value=100 << 20)
    return made


@pytest.mark.parametrize(
    ("command", "flags", "flag", "budget"),
    [
        (cli_plan.main, ["--vram", "101"], "--vram", 101),
        (cli_plan.main, ["--vram", "8,200", "-sm", "tensor"], "--vram", 200),
        (cli_plan.main, ["--sweep", "60:160:50"], "--sweep", 160),
        (cli_run.main, ["--vram", "101", "-p", "hi"], "--vram", 101),
        (cli_bench.main, ["--vram", "1G"], "--vram", 1024),
    ],
)
def test_a_budget_above_the_devices_memory_is_refused(world, capsys, command, flags, flag, budget) -> None:
    assert command(["-m", str(world.model), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(
        f"error: {flag}: a budget of {budget} MiB is more than the 100 MiB of accelerator"
    )
    assert err.endswith("give 100 or less\n") and len(err.splitlines()) == 1
    assert not world.registry.exists()


def test_a_budget_of_all_of_the_devices_memory_is_taken(world, quick_search, capsys) -> None:
    assert cli_plan.main(["-m", str(world.model), "--vram", "100", "-c", "128"]) == 0
    with pytest.raises(UserError, match="a budget of 101 MiB is more than the 100 MiB"):
        pshard.load(world.model, vram=101)
