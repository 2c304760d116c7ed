"""A model with latent attention through the commands: planned, run, benched; what it cannot do is one line."""

from pathlib import Path

import pytest
from cli_world import World, tokenizer_metadata, world_in, write_profile
from latent_files import random_tensors, write_latent_gguf

from pshard.commands import cli_bench, cli_plan, cli_run


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = world_in(tmp_path)
    made.model.parent.mkdir()
    tensors = random_tensors("v3")
    for name in ("token_embd.weight", "output.weight"):
        tensors[name] = tensors[name][:258]
    metadata = tokenizer_metadata() | {"deepseek2.vocab_size": 258}
    write_latent_gguf(made.model, "v3", tensors, qtype="Q8_0", metadata=metadata)
    write_profile(made.profile)
    return made


def test_a_model_with_latents_is_planned_and_runs(world: World, capsys: pytest.CaptureFixture) -> None:
    given = ["-m", str(world.model)]
    for kind in ("bf16", "q8_0"):
        assert cli_plan.main([*given, "--vram", "3", "-c", "256", "-ub", "64", "-ctk", kind, "-ctv", kind]) == 0
    said = capsys.readouterr().out
    assert "3 MiB, context 256" in said
    assert cli_run.main([*given, "--vram", "3", "-ctk", "bf16", "-p", "To be", "-n", "4", "-s", "1"]) == 0
    assert "4 tokens" in capsys.readouterr().err
    assert cli_bench.main([*given, "--vram", "3", "-ctk", "bf16", "-p", "32", "-n", "2", "-r", "1"]) == 0


def test_one_latent_for_keys_and_values_has_one_type(world: World, capsys: pytest.CaptureFixture) -> None:
    assert cli_plan.main(["-m", str(world.model), "--vram", "3", "-c", "256", "-ctk", "f16"]) == 2
    assert "give both the same type" in capsys.readouterr().err


def test_latents_of_a_prompt_are_kept_in_a_file(world: World, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    given = ["-m", str(world.model), "--vram", "3"]
    assert cli_plan.main([*given, "-c", "256", "-ub", "64"]) == 0
    told = []
    for _ in range(2):
        capsys.readouterr()
        asked = ["-p", "To be or not", "-n", "4", "--temp", "0", "--prompt-cache", str(tmp_path / "kept")]
        assert cli_run.main([*given, *asked]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] and (tmp_path / "kept").stat().st_size > 4 * 3 * 96
