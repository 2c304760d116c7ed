"""The example programs run as their first lines say."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from cli_world import World, make_world
from warm_python import run_warm

from pshard.commands.cli_plan import main as plan

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path, context=512, n_layers=1)


def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    return run_warm(command)


@pytest.mark.slow
def test_an_answer_is_streamed(world: World) -> None:
    assert plan(["-m", str(world.model), "--vram", str(world.roomy), "-c", "256"]) == 0
    done = run("stream_answer.py", world.model, world.roomy, "To be")
    assert done.returncode == 0, done.stderr
    assert done.stdout and f"of {world.roomy} MiB used" in done.stderr


def test_the_likeliest_tokens_are_named(world: World) -> None:
    assert plan(["-m", str(world.model), "--vram", str(world.roomy), "-c", "256"]) == 0
    done = run("next_token.py", world.model, world.roomy, "To be")
    assert done.returncode == 0, done.stderr
    chances = [float(line.split("%")[0]) for line in done.stdout.splitlines()]
    assert len(chances) == 5 and chances == sorted(chances, reverse=True)


def test_budgets_are_compared_without_running(world: World) -> None:
    done = run("what_if.py", world.model, world.profile, 0, world.budget, world.roomy)
    assert done.returncode == 0, done.stderr
    too_small, tight, roomy = done.stdout.splitlines()
    assert "too small" in too_small and "first token after" in tight
    assert all(float(line.split("then ")[1].split()[0]) > 0 for line in (tight, roomy))


@pytest.mark.parametrize("name", ["what_if", "next_token", "stream_answer"])
def test_without_arguments_an_example_says_how_it_is_called(name: str) -> None:
    program = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    monkey = pytest.MonkeyPatch()
    for words in ([], ["model.gguf", "much", "To be"]):
        with monkey.context() as patched, pytest.raises(SystemExit) as ended:
            patched.setattr(sys, "argv", [f"{name}.py", *words])
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        assert ended.value.code == program["__doc__"]


def test_the_cells_of_the_notebook_run_in_their_order(world: World, tmp_path: Path, monkeypatch) -> None:
    cells = json.loads((EXAMPLES / "a_model_in_python.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(sources) >= 4 and not any(cell.get("outputs") for cell in cells)
    monkeypatch.setenv("PSHARD_MODEL", str(world.model))
    (tmp_path / "cells.py").write_text("\n\n".join(sources).replace("\nengine\n", "\nprint(repr(engine))\n"))
    done = run_warm([sys.executable, str(tmp_path / "cells.py")])
    assert done.returncode == 0, done.stderr
    assert "<Engine tiny: " in done.stdout and "256 tokens of context" in done.stdout and "MiB" in done.stdout


@pytest.mark.slow
def test_a_missing_plan_is_one_line(world: World) -> None:
    done = run("next_token.py", world.model, world.roomy, "To be")
    assert done.returncode == 1 and done.stderr.startswith("error: no plan for this model")
    assert done.stderr.count("\n") == 1


def test_the_python_of_the_reference_page_runs(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Its last line named a field that plans had once."""
    page = (EXAMPLES.parent / "docs" / "reference.md").read_text(encoding="utf-8")
    program = page.split("```python\n", 1)[1].split("```", 1)[0]
    monkeypatch.setenv("PSHARD_CACHE", str(world.profile.parent))
    monkeypatch.chdir(world.model.parent)
    for there, here in (("model.gguf", world.model.name), ("12000", str(world.roomy)), ("8192", "256")):
        assert there in program
        program = program.replace(there, here)
    exec(program, {})
    assert f"({world.roomy},) (" in capsys.readouterr().out
