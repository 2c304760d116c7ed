"""A budget above the device's memory is refused by the name of its flag, before anything is planned or run."""

import pytest
from cli_world import World, edit_json, make_world
from planner_cases import DESKTOP, make_model

import pshard
from pshard.commands import cli_bench, cli_plan, cli_run
from pshard.commands.plan_flags import complete_plan_flags, make_parser, make_workloads
from pshard.errors import UserError
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.workload import usual_ubatch


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


def test_a_budget_of_all_of_the_devices_memory_is_taken(world, capsys) -> None:
    assert cli_plan.main(["-m", str(world.model), "--vram", "100", "-c", "128"]) == 0
    with pytest.raises(UserError, match="a budget of 101 MiB is more than the 100 MiB"):
        pshard.load(world.model, vram=101)


@pytest.mark.parametrize(("prompt", "ubatch"), [(1, 4096), (4096, 4096), (4097, 8192), (9000, 16384), (1 << 20, 16384)])
def test_micro_batches_grow_with_the_expected_prompt(prompt: int, ubatch: int) -> None:
    assert usual_ubatch(prompt) == ubatch


@pytest.mark.parametrize(
    ("flags", "largest"),
    [(["--prompt", "6000"], 8192), (["--prompt", "6000", "-ub", "512"], 512), (["--prompt", "4000"], 4096), ([], 4096)],
)
def test_long_prompts_get_larger_tiers_unless_told(flags: list[str], largest: int) -> None:
    args = complete_plan_flags(make_parser().parse_args(["-m", "any", "--vram", "4000", "-c", "16384", *flags]))
    (workload,) = make_workloads(args, make_model(2, 256, 4, 2, 512, 1024), profile_from_datasheet(DESKTOP))
    assert workload.max_ubatch == largest
