"""The commands on a tiny gpt-oss, whose contexts are longer than its windows."""

import json
from pathlib import Path

import pytest
from cli_world import World, make_world

from pshard.commands import cli_bench, cli_plan, cli_run

STACKS = [f"ffn_{role}_exps.weight" for role in ("gate", "up", "down")]


@pytest.fixture
def world(tmp_path: Path) -> World:
    types = dict.fromkeys(STACKS, "MXFP4")
    return make_world(tmp_path, arch="gpt-oss", qtype="Q8_0", qtypes=types, n_layers=4)


def ids(n: int, *more: int) -> str:
    return ",".join(map(str, [*(i % 250 + 1 for i in range(n)), *more]))


def test_plans_run_and_texts_go_on_from_a_cache(world: World, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    flags = ["-m", str(world.model), "--vram", "6"]
    assert cli_plan.main([*flags, "-c", "512", "-ub", "32"]) == 0
    capsys.readouterr()

    def text(prompt: str, *more: str) -> str:
        assert cli_run.main([*flags, "-p", prompt, "--tokens", "-n", "3", "--temp", "0", *more]) == 0
        return capsys.readouterr().out

    cache = ["--prompt-cache", str(tmp_path / "text.kv")]
    assert text(ids(300), *cache) == text(ids(300))
    for prompt in (ids(290, 7), ids(20, 3)):  # of the last one the windows are not in the file
        assert text(prompt, *cache, "--prompt-cache-ro") == text(prompt)

    assert cli_bench.main([*flags, "-p", "32", "-n", "2", "-d", "200", "-r", "2", "-o", "json"]) == 0
    assert [row["test"] for row in json.loads(capsys.readouterr().out)] == ["pp32 @ d200", "tg2 @ d200"]
