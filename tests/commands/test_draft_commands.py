"""Commands with a draft model: planned with it, run with it, and one line for what cannot draft."""

import json
from pathlib import Path

import pytest
from cli_world import World, make_world, tokenizer_metadata
from model_files import write_gguf

from pshard.commands import cli_plan, cli_run


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path)


def test_a_draft_model_is_planned_and_run_and_plans_without_it_stay(world: World, tmp_path: Path, capsys) -> None:
    model = ["-m", str(world.model)]
    run = [*model, "-p", "hello", "-n", "20", "-no-cnv", "--temp", "0"]
    assert cli_run.main([*run, "--vram", "64"]) == 0
    alone = capsys.readouterr().out
    draft = ["-md", str(world.model)]  # the model itself: all drafts hold
    assert cli_run.main([*run, *draft]) == 0  # which plans it
    out, err = capsys.readouterr()
    assert out == alone and "drafts of draft, at most" in err and "a draft took" in err
    sets = json.loads(world.registry.read_text())["sets"]
    (plan,) = [v for plans in sets for v in plans["variants"] if v["drafter"]]
    assert len(sets) == 2 and plan["workload"]["drafting"]["kind"] == "draft"
    assert cli_plan.main([*model, "--vram", "64", "-c", "256", *draft, "--spec-n", "3", "--spec-rates", ".9"]) == 0
    capsys.readouterr()
    assert cli_run.main([*run, "-hfd", str(world.model), "--spec-n", "3", "-c", "256"]) == 0
    out, err = capsys.readouterr()
    assert out == alone and "by position 1.00 1.00 1.00" in err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--spec", "draft"], "--spec draft needs a draft model; add -md MODEL"),
        (["-md", "DRAFT", "--spec", "lookup"], "--spec lookup has none"),
        (["-md", "gone.gguf"], "gone.gguf"),
        (["-md", "DRAFT"], "its vocabulary is not the model's: token "),
    ],
)
def test_what_cannot_draft_is_one_line(world: World, tmp_path: Path, capsys, flags: list[str], said: str) -> None:
    words = tokenizer_metadata()
    tokens = [*words["tokenizer.ggml.tokens"]]
    tokens[9], tokens[10] = tokens[10], tokens[9]
    draft = write_gguf(tmp_path / "d.gguf", n_layers=1, vocab=258, metadata=words | {"tokenizer.ggml.tokens": tokens})
    flags = [str(draft) if flag == "DRAFT" else flag for flag in flags]
    for main, more in ((cli_run.main, ["-p", "hello", "-no-cnv"]), (cli_plan.main, ["--vram", "64", "-c", "256"])):
        assert main(["-m", str(world.model), *more, *flags]) == 2
        out, err = capsys.readouterr()
        assert out == "" and said in err and err.splitlines()[-1].startswith("error: ")
    assert not world.registry.exists()
