"""The benchmark of mixtures runs ours and other programs on files that it writes and deletes."""

import json
import runpy
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_world import World, make_world

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"
GENERATOR = """
import shutil, sys
assert sys.argv[1] == "qwen3-next-80b-a3b", sys.argv
shutil.copy({model!r}, sys.argv[2])
"""
PEER = """#!{python}
import json, sys, time
flags = sys.argv[1:]
assert flags[0] == "-m" and flags[flags.index("-o") + 1] == "json" and flags.count("-t") == 1
if "-fitt" in flags:
    assert flags[flags.index("-fitt") + 1] == str(80000 - 64)
    rows = [dict(n_prompt=512, n_gen=0, n_depth=0), dict(n_prompt=0, n_gen=32, n_depth=16384)]
else:
    rows = [dict(n_prompt=0, n_gen=64), dict(n_prompt=16384, n_gen=32)]
time.sleep(0.3)
print(json.dumps([row | dict(avg_ts=10.0 + i, stddev_ts=0.5) for i, row in enumerate(rows)]))
"""


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path, context=8192, n_layers=1)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(SCRIPTS)
    return runpy.run_path(str(SCRIPTS / "mixtures.py"))


def run_rows(script: dict, world: World, folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> dict:
    """The file's record of one row, with short tests, on the world's model and its profile."""
    named, out = script["main"].__globals__, folder / "mixtures.json"
    row = script["ROWS"]["next-12000"]
    case = replace(row.case, vram=64, plan="-c 256 --prompt 64 --generated 16 --no-validate", bench="-p 32 -n 4 -r 1")
    monkeypatch.setitem(named["ROWS"], "next-12000", replace(row, case=case))
    real = named["run"]
    done = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setitem(named, "run", lambda words, *rest: done if "profile" in words[0] else real(words, *rest))
    free = iter([80000])
    monkeypatch.setitem(named, "free_mib", lambda: next(free, 73000))
    generator, peer = folder / "generator.py", folder / "llama-bench"
    generator.write_text(GENERATOR.format(model=str(world.model)))
    peer.write_text(PEER.format(python=sys.executable))
    peer.chmod(0o755)
    words = ["mixtures.py", "--rows", "next-12000", "--folder", str(folder), "-o", str(out), *flags]
    words += ["--generator", str(generator), "--llama-bench", str(peer), "--ik-bench", str(peer)]
    monkeypatch.setattr(sys, "argv", words)
    assert script["main"]() == 0
    return json.loads(out.read_text())["next-12000"]


@pytest.mark.slow
def test_ours_and_other_programs_are_measured_on_a_file_that_is_written_and_deleted(
    script: dict, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    record = run_rows(script, world, tmp_path, monkeypatch)
    assert [m["test"] for m in record["measurements"]] == ["pp32", "tg4"] and not record["skipped"]
    assert {test: made["avg_ts"] for test, made in record["peers"].items()} == {
        "llama.cpp pp512": 10, "llama.cpp tg32 @ d16384": 11,
        "ik_llama.cpp tg64, repacked": 10, "ik_llama.cpp tg32 @ d16384, repacked": 11,
    }  # fmt: skip
    assert all(made["flags"].startswith("-m qwen3-next-80b-a3b.gguf ") for made in record["peers"].values())
    assert not list(tmp_path.glob("*.gguf")) and str(tmp_path) not in json.dumps(record)
    assert "peak" in capsys.readouterr().out


def test_what_no_time_is_left_for_is_named(
    script: dict, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    left = iter([10.0, 10.0])  # before the file is written, and for the profile
    monkeypatch.setattr(script["Clock"], "left", property(lambda self: next(left, 0.0)))
    record = run_rows(script, world, tmp_path, monkeypatch)
    assert len(record["skipped"]) == 3 and not record["peers"]
    assert "the time is up: pshard; llama.cpp" in capsys.readouterr().out
    (tmp_path / "generator.py").unlink()
    assert script["main"]() == 0
    assert "the time is up: next-12000" in capsys.readouterr().out


def test_the_most_memory_that_was_taken_is_kept(script: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([1000, 900, 300, 950])
    monkeypatch.setitem(script["main"].__globals__, "free_mib", lambda: next(free, 1000))
    monkeypatch.setitem(script["main"].__globals__, "EVERY", 0.001)
    with script["peak_memory"]() as peak:
        deadline = time.monotonic() + 20
        while peak[0] < 700 and time.monotonic() < deadline:
            time.sleep(0.001)
    assert peak == [700]


def test_a_file_that_is_there_stays_and_a_generator_that_fails_leaves_none(
    script: dict, world: World, tmp_path: Path
) -> None:
    there = tmp_path / "gpt-oss-120b-layers-24.gguf"
    shutil.copy(world.model, there)
    failing = tmp_path / "failing.py"
    failing.write_text("import sys; open(sys.argv[2], 'w').write('half'); sys.exit(3)")
    with script["written"](script["ROWS"]["oss120-8000"], tmp_path, failing) as file:
        assert file == there
    assert there.exists()
    with pytest.raises(SystemExit, match="failed"), script["written"](script["ROWS"]["oss20-vram"], tmp_path, failing):
        pass
    assert not (tmp_path / "gpt-oss-20b.gguf").exists()
