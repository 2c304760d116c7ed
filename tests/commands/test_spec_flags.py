"""What commands say of drafts: the same text with them, counts of what held, and one line for what cannot be."""

import json
from pathlib import Path

import pytest
from cli_world import World, make_world

from pshard.commands import cli_bench, cli_plan, cli_run
from pshard.commands.everyday import cli_chat
from pshard.session import bench_drafts, bench_engine
from pshard.session.choose_drafts import DraftAsk, choose_drafts
from pshard.speculation import Acceptance
from pshard.times.stolen_time import Lost


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path)


@pytest.fixture
def planned(world: World) -> World:
    assert cli_plan.main(["-m", str(world.model), "--vram", "64", "-c", "256"]) == 0
    return world


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--spec", "mtp"], "there is no multi-token head to draft with: the file has none"),
        (["--spec", "draft"], "--spec draft needs a draft model; add -md MODEL"),
        (["--spec-type", "draft-mtp"], "there is no multi-token head to draft with"),
        (["--spec-type", "ngram-mod"], "--spec-type ngram-mod: not here"),
        (["--spec-type", "draft-mtp,draft-simple"], "these do not draft together"),
        (["--spec-type", "ngram-simple,draft-simple"], "--spec lookup,draft needs a draft model; add -md MODEL"),
        (["--spec", "lookup,mtp"], "there is no multi-token head to draft with: the file has none"),
        (["--spec-draft-p-min", ".5"], "--spec-draft-p-min is about drafts, and there are none"),
        (["--spec", "mtp", "--spec-draft-p-min", ".5", "--spec-synth-rates", ".8"], "leave out one"),
        (["--spec", "auto", "--spec-type", "none"], "exclude each other"),
        (["--spec-n", "3"], "--spec-draft-n-max is about drafts, and there are none"),
        (["--spec-synth-rates", ".8"], "--spec-synth-rates is about drafts, and there are none"),
        (["--spec", "lookup", "--spec-n", "16"], "a step has up to 15 drafts"),
        (["--spec", "lookup", "--spec-synth-rates", ".5,.6"], "--spec-synth-rates .5,.6: give the chances"),
        (["--spec", "lookup", "--spec-synth-rates", "1.2"], "--spec-synth-rates 1.2: give the chances"),
    ],
)
@pytest.mark.parametrize("command", [cli_run.main, cli_chat.main, cli_bench.main])
def test_flags_that_cannot_be_are_one_line(world: World, capsys, command, flags: list[str], said: str) -> None:
    prompt = ["-p", "0"] if command is cli_bench.main else ["-p", "hello"]
    assert command(["-m", str(world.model), *prompt, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and said in err and len(err.splitlines()) == 1


def test_a_run_with_drafts_tells_the_same_text_and_what_held(planned: World, capsys) -> None:
    texts = []
    for flags in ([], ["--spec", "lookup"], ["--spec-type", "ngram-simple", "--spec-draft-n-max", "3"]):
        words = ["-m", str(planned.model), "-p", "hello hello hello", "-n", "40", "--seed", "3", "-no-cnv", *flags]
        assert cli_run.main(words) == 0
        out, err = capsys.readouterr()
        texts.append(out)
        assert ("drafts of lookup, at most" in err) == bool(flags)
    assert len(set(texts)) == 1


def test_how_likely_lookup_finds_its_drafts_is_no_question(planned: World, capsys) -> None:
    words = ["-m", str(planned.model), "-p", "hello", "-no-cnv", "--spec", "lookup"]
    assert cli_run.main([*words, "--spec-draft-p-min", ".5"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "lookup does not know that" in err
    assert cli_run.main([*words, "--spec-draft-p-min", "1.5"]) == 2
    assert "'1.5' is no number from 0 to 1" in capsys.readouterr().err


def test_a_run_records_acceptance_beside_the_registry(planned: World, capsys) -> None:
    words = ["-m", str(planned.model), "-p", "hello", "-n", "20", "-no-cnv", "--record-acceptance"]
    assert cli_run.main(words) == 2
    assert "add --spec lookup" in capsys.readouterr().err
    assert cli_run.main([*words, "--spec", "lookup"]) == 0
    assert "acceptance record: " in capsys.readouterr().err
    stored = json.loads(planned.registry.with_name(f"{planned.registry.name}.acceptance").read_text())
    assert stored["records"][0]["kind"] == "lookup" and stored["records"][0]["steps"] > 0


def test_what_others_cost_a_test_with_drafts_is_measured_apart(planned: World, monkeypatch, capsys) -> None:
    """It had what the test without them had lost."""
    monkeypatch.setattr(bench_engine, "lost_since", lambda began, ranks: Lost(0.1, 0.3))
    monkeypatch.setattr(bench_drafts, "lost_since", lambda began, ranks: Lost(0.2, 0.4))
    flags = ["-m", str(planned.model), "--spec", "lookup", "--spec-n", "3", "-p", "0", "-n", "4", "-r", "1"]
    assert cli_bench.main([*flags, "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["stolen"], row["disturbed"]) for row in rows] == [(0.1, 0.3), (0.2, 0.4)]


def test_made_up_acceptance_is_said_in_every_output(planned: World, capsys) -> None:
    flags = ["-m", str(planned.model), "--spec", "lookup", "--spec-n", "3", "--spec-synth-rates", ".8,.64,.51"]
    assert cli_run.main([*flags, "-p", "hello", "-n", "60", "-no-cnv"]) == 0
    err = capsys.readouterr().err
    assert err.count("the text means nothing") == 2
    assert cli_bench.main([*flags, "-p", "0", "-n", "40", "-d", "0,100", "-r", "2", "-o", "json"]) == 0
    out, err = capsys.readouterr()
    alone, drafted, _, deep = json.loads(out)
    assert "the text means nothing" in err and drafted["test"] == "tg40 lookup 3 made up"
    assert alone["drafts"] is None and drafted["drafts"]["made_up"] == [0.8, 0.64, 0.51]
    assert drafted["drafts"]["steps"] < 2 * 40 * 0.6 and len(drafted["drafts"]["held"]) == 3
    assert drafted["drafts"]["without_ts"] > 0 and drafted["predicted_ts"] > deep["predicted_ts"] > 0


def test_auto_drafts_where_the_plans_tiers_say_that_it_can_pay(planned: World) -> None:
    from dataclasses import replace

    from pshard.session.open_plan import open_plan
    from pshard.session.run_request import RunRequest

    variant = open_plan(RunRequest(planned.model)).variant
    rank = variant.ranks[0]

    def cost(ratio: float):
        tiers = tuple(
            replace(t, prediction=replace(t.prediction, seconds=1.0 if t.tokens == 1 else ratio)) for t in rank.tiers
        )
        return replace(variant, ranks=(replace(rank, tiers=tiers),))

    assert choose_drafts(DraftAsk("auto"), cost(1.1))[0] is not None
    settings, why = choose_drafts(DraftAsk("auto"), cost(1.6))
    assert settings is None and "cost more than lookup brings" in why
    often = DraftAsk("auto", made_up=Acceptance((0.8,)))
    assert choose_drafts(often, cost(1.6))[0] is not None
    settings, why = choose_drafts(often, cost(6.0))
    assert settings is None and "cost more than drafts of these chances bring" in why
