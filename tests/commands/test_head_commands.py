"""Commands with a model's multi-token head: planned with it, run with it, and measured."""

import json
from pathlib import Path

import pytest
from cli_world import World, write_profile
from head_files import make_headed_world

from pshard.commands import cli_bench, cli_plan, cli_run
from pshard.paths import bundled_model
from pshard.session.open_plan import open_plan
from pshard.session.run_request import RunRequest
from pshard.speculation import AUTO, MTP


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_headed_world(tmp_path)


def test_a_head_is_planned_run_and_benched(world: World, capsys) -> None:
    model = ["-m", str(world.model)]
    assert cli_run.main([*model, "--vram", "64", "-p", "hello", "-n", "20", "-no-cnv", "--seed", "3"]) == 0
    alone, err = capsys.readouterr()
    assert "multi-token" not in err
    head = ["--spec", "mtp", "--spec-rates", ".8,.64,.51", "--spec-n", "3"]
    assert cli_plan.main([*model, "--vram", "64", "-c", "256", *head]) == 0
    capsys.readouterr()
    (plans,) = json.loads(world.registry.read_text())["sets"]
    (plan,) = [variant for variant in plans["variants"] if variant["drafter"]]
    assert plan["workload"]["drafting"] == {"kind": "mtp", "drafts": 3} and plan["workload"]["drafter_mib"] > 0
    run = [*model, "-p", "hello", "-n", "20", "-no-cnv", "--seed", "3"]
    for flags in (["--spec", "mtp"], ["--spec-type", "draft-mtp", "--spec-draft-n-max", "1"], ["--spec", "auto"]):
        assert cli_run.main([*run, *flags]) == 0
        out, err = capsys.readouterr()
        assert out == alone and "drafts of mtp, at most" in err and "a draft took" in err
    for flags in (["--spec", "lookup,mtp"], ["--spec-type", "draft-mtp,ngram-simple", "--spec-draft-p-min", ".01"]):
        assert cli_run.main([*run, *flags]) == 0
        out, err = capsys.readouterr()
        assert out == alone and "drafts of lookup,mtp, at most" in err and "; lookup made " in err
    assert cli_run.main([*run, "--spec", "mtp", "--draft-p-min", "1"]) == 0
    out, err = capsys.readouterr()
    assert out == alone and "0 of the 0 that were compared held" in err
    flags = ["--spec", "mtp", "--spec-n", "3", "--spec-synth-rates", ".8,.64,.51"]
    assert cli_bench.main([*model, "-p", "0", "-n", "30", "-r", "1", "-o", "json", *flags]) == 0
    _, drafted = json.loads(capsys.readouterr().out)
    assert drafted["test"] == "tg30 mtp 3 made up" and drafted["drafts"]["kind"] == "mtp"
    assert drafted["drafts"]["draft_seconds"] > 0 and drafted["drafts"]["steps"] < 25


def test_a_plan_with_a_head_hides_no_other_one_that_serves_where_any_will_do(world: World, capsys) -> None:
    """A server takes the head where its plan has one: a plan of a head for one text is none for two."""
    head = ["--spec", "mtp", "--spec-rates", ".8", "--spec-n", "1"]
    assert cli_plan.main(["-m", str(world.model), "--vram", "64", "-c", "256", *head]) == 0
    request = RunRequest(world.model, (64,), 512, 2, profile=world.profile, drafts=AUTO, plans=True)
    for _ in range(2):  # one is planned, and then found
        opened = open_plan(request)
        assert opened.variant.workload.sequences == 2 and opened.variant.drafter is None
        opened.file.close()
    assert capsys.readouterr().err.count("it was planned anew") == 1


@pytest.mark.parametrize("mib", [3, 4])
def test_a_budget_that_holds_little_keeps_the_output_there_under_every_tier(world: World, mib: int) -> None:
    words = ["-m", str(world.model), "--vram", str(mib), "-c", "256", "--spec", "mtp", "--spec-n", "3"]
    assert cli_plan.main(words) == 0
    ((plan,),) = [plans["variants"] for plans in json.loads(world.registry.read_text())["sets"]]
    for tier in plan["ranks"][0]["tiers"]:
        assert [p["where"] for p in tier["placements"] if p["unit"] == "output"] == ["pinned"]


def test_a_run_that_plans_with_a_head_knows_what_steps_of_its_rows_take(world: World) -> None:
    opened = open_plan(RunRequest(world.model, (64,), 256, 1, profile=world.profile, drafts=MTP, plans=True))
    opened.file.close()
    said, drafting = opened.variant.speculation, opened.variant.workload.drafting
    assert said is not None and drafting.drafts and len(said.rows) == drafting.rows


@pytest.mark.slow  # the least is searched; test_ram.py has it without a head
def test_too_little_ram_names_the_least_with_a_head_too(world: World, capsys) -> None:
    words = ["-m", str(world.model), "-p", "hello", "-no-cnv", "--ram", "1", "--spec", "mtp"]
    assert cli_run.main(words) == 2
    assert "error: --ram 1 MiB is too little for tiny; give " in capsys.readouterr().err


def test_a_heads_plan_that_does_not_fit_the_head_is_refused_before_anything_is_loaded(world: World, capsys) -> None:
    head = ["--spec", "mtp", "--spec-rates", ".8", "--spec-n", "1"]
    assert cli_plan.main(["-m", str(world.model), "--vram", "64", "-c", "256", *head]) == 0
    right = world.registry.read_text()
    for damage, said in (("scratch", "bytes of scratch"), ("unit", "placements are not the model's units")):
        registry = json.loads(right)
        (tier,) = registry["sets"][0]["variants"][0]["drafter"]["tiers"]
        if damage == "scratch":
            tier["buffers"]["scratch"] = 0
        else:
            tier["placements"][0]["unit"] = "other"
        world.registry.write_text(json.dumps(registry))
        capsys.readouterr()
        assert cli_run.main(["-m", str(world.model), "-p", "hello", "-n", "4", "-no-cnv", "--spec", "mtp"]) == 2
        assert said in capsys.readouterr().err


def test_what_is_recorded_of_the_bundled_head_decides_how_many_drafts_the_next_plan_has(tmp_path: Path, capsys) -> None:
    """Real acceptance: what published heads of large models reach would ask for more drafts than this one pays for."""
    write_profile(tmp_path / "cache" / "profile.json")
    words = ["-m", str(bundled_model()), "--registry", str(tmp_path / "plans.json")]
    plan = [*words, "--vram", "64", "-c", "256", "--no-validate", "--json"]
    run = [*words, "-p", "ROMEO:\nGood morrow, cousins.\n", "-n", "60", "-no-cnv", "--temp", "0", "--json"]
    assert cli_run.main([*run, "--vram", "64", "-c", "256"]) == 0
    alone = json.loads(capsys.readouterr().out)["text"]
    assert cli_plan.main([*plan, "--spec", "mtp", "--spec-n", "3"]) == 0
    capsys.readouterr()
    assert cli_run.main([*run, "--spec", "mtp", "--record-acceptance"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == alone
    assert cli_plan.main([*plan, "--spec", "auto", "--spec-n", "3"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["drafts"]
    own = table["acceptances"][table["own"]]
    assert own["source"] == "recorded" and 0.4 < own["rates"][0] < 0.88
    best = max(table["rows"], key=lambda row: row["rates"][table["own"]])
    assert table["chosen"] == best["drafts"] > 0


@pytest.mark.slow
def test_two_ranks_that_draft_run_and_bench(world: World, capfd) -> None:
    split, told = ["-m", str(world.model), "--vram", "64,64", "-sm", "tensor", "-c", "256"], list[str]()
    assert cli_plan.main([*split, "--spec", "lookup", "--spec-rates", ".9"]) == 0
    for spec in ("none", "lookup"):
        capfd.readouterr()
        run = ["-p", "hello hello hello", "-n", "30", "-no-cnv", "--seed", "3"]
        assert cli_run.main([*split, *run, "--spec", spec]) == 0
        out, err = capfd.readouterr()
        told.append(out)
        assert ("drafts of lookup, at most" in err) == (spec == "lookup")
    assert told[0] == told[1]
    made_up = ["--spec", "lookup", "--spec-synth-rates", ".8,.64"]
    assert cli_bench.main([*split, "-p", "0", "-n", "30", "-r", "2", "-o", "json", *made_up]) == 0
    _, drafted = json.loads(capfd.readouterr().out)
    assert drafted["drafts"]["steps"] < 50 and drafted["ranks"] == 2
    assert cli_run.main([*split, "-p", "hello", "-n", "9", "-no-cnv", "-r", "of", "--spec", "lookup"]) == 2
    assert "error: several ranks have no drafts in a chat, or with -r; leave out --spec" in capfd.readouterr().err
