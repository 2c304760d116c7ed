"""Commands with what drafts over ranks: a head, cut or whole, and a draft model are planned, run and measured."""

import json
from pathlib import Path

import pytest
from cli_world import World
from head_files import make_headed_world

from pshard.commands import cli_bench, cli_plan, cli_run

RUN = ["-p", "hello", "-n", "20", "-no-cnv", "--seed", "3"]
RATES = ["--spec-rates", ".8,.64,.51", "--spec-n", "3"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_headed_world(tmp_path)


def plan_drafter(world: World, mode: str, *flags: str) -> dict:
    """The plan with what drafts that the command makes."""
    split = ["-m", str(world.model), "--vram", "64,64", "-sm", mode, "-c", "256"]
    assert cli_plan.main([*split, *flags]) == 0
    sets = json.loads(world.registry.read_text())["sets"]
    (plan,) = [variant for plans in sets for variant in plans["variants"] if variant["drafter"]]
    return plan


@pytest.mark.parametrize(("mode", "ranks"), [("layer", [1]), ("tensor", [0, 1])])
def test_a_head_is_planned_on_the_ranks_that_have_it(world: World, mode: str, ranks: list[int], capsys) -> None:
    plan = plan_drafter(world, mode, "--spec", "mtp", *RATES)
    assert [plan["drafter"]["rank"], *(part["rank"] for part in plan["drafter_parts"])] == ranks
    said = plan["speculation"]["planned"][-1]
    assert plan["workload"]["drafting"] == {"kind": "mtp", "drafts": 3} and said["drafting"] > 0
    assert plan["workload"]["drafter_mib"] >= plan["drafter"]["budget_mib"] > 0


@pytest.mark.parametrize("ratios", ["auto", "1,3"])
def test_auto_plans_a_head_for_the_way_that_is_the_fastest(world: World, ratios: str, capsys) -> None:
    plan = plan_drafter(world, "auto", "-ts", ratios, "--spec", "lookup,mtp", *RATES)
    parts = [plan["drafter"], *plan["drafter_parts"]]
    mode = plan["workload"]["split_mode"]
    assert len(parts) == (len(plan["ranks"]) if mode == "tensor" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_two_ranks_with_a_head_run_and_bench(world: World, mode: str, capfd) -> None:
    split, told = ["-m", str(world.model), "--vram", "64,64", "-sm", mode], list[str]()
    plan_drafter(world, mode, "--spec", "mtp", *RATES)
    asked = (["none"], ["lookup,mtp"], ["auto"], ["mtp", "--spec-draft-p-min", ".01"])
    for spec in asked if mode == "layer" else asked[:2]:
        capfd.readouterr()
        assert cli_run.main([*split, *RUN, "--spec", *spec]) == 0
        out, err = capfd.readouterr()
        told.append(out)
        assert ("mtp, at most" in err) == (spec != ["none"])
    assert len(set(told)) == 1
    made_up = ["--spec", "mtp", "--spec-n", "3", "--spec-synth-rates", ".8,.64"]
    assert cli_bench.main([*split, "-p", "0", "-n", "30", "-r", "2", "-o", "json", *made_up]) == 0
    _, drafted = json.loads(capfd.readouterr().out)
    assert drafted["drafts"]["steps"] < 50 and drafted["ranks"] == 2 and drafted["drafts"]["draft_seconds"] > 0
    assert cli_run.main([*split, *RUN, "-r", "of", "--spec", "mtp"]) == 2
    assert "error: several ranks have no drafts in a chat, or with -r; leave out --spec" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_two_ranks_with_a_draft_model_tell_what_they_tell_without(world: World, mode: str, capfd) -> None:
    """The model itself, which drafts what it tells."""
    split, draft, told = ["-m", str(world.model), "--vram", "64,64", "-sm", mode], ["-md", str(world.model)], []
    assert cli_plan.main([*split, "-c", "256"]) == 0
    plan = plan_drafter(world, mode, *draft, *RATES)
    assert plan["drafter"]["rank"] == 0 and not plan["drafter_parts"]
    for flags in ([], draft):
        capfd.readouterr()
        assert cli_run.main([*split, *RUN, *flags]) == 0
        out, err = capfd.readouterr()
        told.append(out)
        assert ("drafts of draft, at most 3 a step" in err) == bool(flags)
    assert told[0] == told[1]
