"""A hybrid through the commands: planned, run, benched, its prompt kept; what its states take is said."""

from dataclasses import replace
from pathlib import Path

import pytest
from cli_world import World, tokenizer_metadata, world_in, write_profile
from family_files import RECIPES, write_family
from hybrid_files import random_hybrid, write_hybrid_gguf

from pshard.commands import cli_bench, cli_plan, cli_run


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = world_in(tmp_path)
    made.model.parent.mkdir()
    tensors = random_hybrid("moe")
    for name in ("token_embd.weight", "output.weight"):
        tensors[name] = tensors[name][:258]
    metadata = tokenizer_metadata() | {"qwen35moe.vocab_size": 258}
    write_hybrid_gguf(made.model, "moe", tensors, qtype="Q8_0", metadata=metadata)
    write_profile(made.profile)
    return made


def test_a_hybrid_is_planned_and_runs(world: World, capsys: pytest.CaptureFixture) -> None:
    given = ["-m", str(world.model), "--vram", "3"]
    assert cli_plan.main([*given, "-c", "512", "-ub", "16", "-np", "2"]) == 0
    said = capsys.readouterr().out
    assert "3 MiB, context 512" in said
    assert cli_run.main([*given, "-p", "To be", "-n", "4", "-s", "1"]) == 0
    told = capsys.readouterr().err
    assert "4 tokens" in told and "checkpoints of them are kept in host memory (" in told
    assert cli_bench.main([*given, "-p", "32", "-n", "2", "-r", "1"]) == 0


def test_short_convolutions_are_planned_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    made = world_in(tmp_path)
    made.model.parent.mkdir()
    monkeypatch.setitem(RECIPES, "lfm2", replace(RECIPES["lfm2"], vocab=258))
    write_family(made.model, "lfm2", "Q8_0", **tokenizer_metadata())
    write_profile(made.profile)
    given = ["-m", str(made.model), "--vram", "1"]
    assert cli_plan.main([*given, "-c", "512", "-ub", "16", "-np", "2"]) == 0
    told = []
    for _ in range(2):
        capsys.readouterr()
        asked = ["-p", "To be or not to be", "-n", "4", "--temp", "0", "--prompt-cache", str(tmp_path / "kept")]
        assert cli_run.main([*given, *asked]) == 0
        told.append(capsys.readouterr())
    assert told[0].out == told[1].out
    assert "tokens are taken from it" in told[1].err
    assert cli_bench.main([*given, "-p", "32", "-n", "2", "-r", "1"]) == 0


def test_a_prompt_s_states_are_kept_in_a_file(world: World, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    given = ["-m", str(world.model), "--vram", "3"]
    assert cli_plan.main([*given, "-c", "256", "-ub", "16"]) == 0
    told = []
    for _ in range(3):
        capsys.readouterr()
        asked = [
            "-p",
            "To be or not to be, that is",
            "-n",
            "4",
            "--temp",
            "0",
            "--prompt-cache",
            str(tmp_path / "kept"),
        ]
        assert cli_run.main([*given, *asked]) == 0
        told.append(capsys.readouterr())
    assert told[0].out == told[1].out == told[2].out
    assert "tokens are taken from it" in told[1].err


def test_a_prompt_that_ends_before_a_kept_one_is_computed_again_and_answered_as_without(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    given, kept = ["-m", str(world.model), "--vram", "3"], ["--prompt-cache", str(tmp_path / "kept")]
    assert cli_plan.main([*given, "-c", "256", "-ub", "16"]) == 0

    def answer(prompt: str, *more: str) -> tuple[str, str]:
        capsys.readouterr()
        assert cli_run.main([*given, "-p", prompt, "-n", "4", "--temp", "0", *more]) == 0
        return capsys.readouterr()

    answer("To be or not to be, that is", *kept)
    shorter = answer("To be or", *kept)
    assert shorter[0] == answer("To be or")[0]
    assert "0 of 8 tokens are taken from it; 7 are computed again: it lacks what layers with" in shorter[1]
    longer = answer("To be or nothing", *kept)
    assert longer[0] == answer("To be or nothing")[0]
    assert "8 of 16 tokens are taken from it\n" in longer[1]
