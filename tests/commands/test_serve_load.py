"""The benchmark of servers: parts are written as they come, end in time, and give the ratios that goals are about."""

import argparse
import asyncio
import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_world import make_world
from fake_openai_server import fake_server
from warm_python import WarmProcess, run_warm

from pshard.errors import UserError
from pshard.session.serve_bench import drive

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DEMO = BENCHMARKS.parent / "examples" / "demo.gguf"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return runpy.run_path(str(BENCHMARKS / "serve_load.py"))


@pytest.fixture
def args(script: dict[str, Any]) -> argparse.Namespace:
    words = ["-m", "x.gguf", "--vram", "64", "-o", "out.json", "-p", "20", "-n", "8", "--long", "90", "--prefix", "70"]
    return script["make_parser"]().parse_args([*words, "--clients", "2", "--max-gap", "500"])


def test_ratios_are_ours_over_theirs_and_over_the_promise(script: dict[str, Any]) -> None:
    data = {
        "promise_ms": 1000.0,
        "serve_16": {"answer_rate": 96.0, "gap": {"p99": 300.0}},
        "serve_4": {"answer_rate": 30.0, "gap": None},
        "npl": {"16": {"answer_rate": 100.0}, "64": {"answer_rate": 400.0}},
        "llama_server_16": {"answer_rate": 40.0},
        "long": {"gap_meanwhile_ms": {"most": 1100.0}, "first_token_among_ms": 3.0, "first_token_alone_ms": 2.0},
        "prefix": {"first_token_warm_ms": 150.0, "first_token_short_ms": 100.0},
    }
    assert script["find_ratios"](data) == {
        "gap_16": 0.3, "npl_16": 0.96, "llama_server_16": 2.4, "long_gap": 1.1, "long_first_token": 1.5,
        "prefix_steps": 1.5,
    }  # fmt: skip
    assert script["find_ratios"]({"promise_ms": 1.0}) == {}
    rows = [
        {"n_sequences": 4, "n_prompt": 512, "n_gen": 0, "avg_ns": 1e9},
        {"n_sequences": 16, "n_prompt": 512, "n_gen": 0, "avg_ns": 2e9},
        {"n_sequences": 16, "n_prompt": 0, "n_gen": 32, "avg_ns": 1.5e9},
    ]
    assert script["read_npl"](rows, 16, 128) == {"prompt_seconds": 2.0, "decode_seconds": 6.0, "answer_rate": 256.0}


def test_a_part_is_written_when_it_is_known_and_left_out_without_time(script: dict[str, Any], tmp_path: Path) -> None:
    record = script["Record"](tmp_path / "out.json", 100.0, {"promise_ms": 10.0})
    record.run("npl_4", 20.0, lambda left: {"answer_rate": left})
    assert 90 < json.loads((tmp_path / "out.json").read_text())["npl_4"]["answer_rate"] <= 100

    def fail(left: float) -> None:
        raise UserError("the server is gone")

    record.run("long", 20.0, fail)
    record.run("prefix", 200.0, fail)
    assert record.data["left_out"][0] == "long: the server is gone"
    assert "it needs 200" in record.data["left_out"][1] and "prefix" not in record.data


@pytest.mark.slow
def test_loops_the_long_prompt_and_the_shared_prefix_are_asked_of_a_server(
    script: dict[str, Any], args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive, "AFTER_ERROR", 0.0)
    with fake_server(first=0.15, gap=0.02) as fake:
        point = script["measure_loop"](fake.url, 2, args, 30.0)
        assert point.whole == 4 and point.answer_tokens == 32
        begun = len(fake.seen)
        long = asyncio.run(script["measure_long"](fake.url, args, 30.0))
        lengths = [len(body["prompt"]) for body in fake.seen[begun:]]
        assert lengths == [90, 90, *[64] * 8, 90] and fake.most == 9
        assert 140 < long["first_token_alone_ms"] < 400 and long["gap_meanwhile_ms"].count >= 8 * 5
        begun = len(fake.seen)
        prefix = asyncio.run(script["measure_prefix"](fake.url, args, 30.0))
        prompts = [tuple(body["prompt"]) for body in fake.seen[begun:]]
        assert len({ids[:70] for ids in prompts[:4]}) == 1 and len(set(prompts)) == 7 and prefix["cached"] == [3] * 3
    with fake_server(cut_after=1) as fake, pytest.raises(UserError, match="cut"):
        script["measure_loop"](fake.url, 2, args, 30.0)


def test_the_context_holds_every_part(script: dict[str, Any]) -> None:
    words = ["-m", "x.gguf", "--vram", "64", "-o", "out.json", "--clients", "1,64"]
    args = script["make_parser"]().parse_args(words)
    assert script["context_of"](args) == 64 * 640
    args.clients = (4,)
    assert script["context_of"](args) >= 16384 + 8 * (64 + 3 * 128)


def test_what_was_measured_is_drawn(script: dict[str, Any], tmp_path: Path) -> None:
    data = json.loads((BENCHMARKS / "results" / "h100-serve-1124.json").read_text())
    loads = script["read_loads"](data)
    assert [load.server for load in loads] == ["pshard", "llama-server, best setting"]
    assert [point.load for point in loads[0].points] == [16, 1, 64, 4]
    script["draw_loads_of"](data, tmp_path / "loads.png")
    assert (tmp_path / "loads.png").read_bytes().startswith(b"\x89PNG")


def run_forked(words: list[str], timeout: float, **captured: bool) -> subprocess.CompletedProcess[str]:
    return run_warm(words, timeout=timeout)


@pytest.mark.slow
def test_it_measures_our_own_server_on_the_demo_model(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("uvicorn", reason="uvicorn is not installed; pip install 'pshard[serve]'")
    pytest.importorskip("starlette", reason="starlette is not installed; pip install 'pshard[serve]'")
    out, main = tmp_path / "out.json", script["main"]
    words = ["-m", str(DEMO), "--vram", "64", "--clients", "2", "-p", "64", "-n", "32", "--long", "300"]
    words += ["--prefix", "128", "--seconds", "200", "--registry", str(tmp_path / "plan.json"), "-o", str(out)]
    forked = SimpleNamespace(**vars(subprocess) | {"Popen": WarmProcess, "run": run_forked})
    monkeypatch.setitem(main.__globals__, "subprocess", forked)
    monkeypatch.setattr(sys, "argv", ["serve_load.py", *words])
    monkeypatch.setenv("PSHARD_CACHE", str(make_world(tmp_path).profile.parent))
    assert main() == 0
    data = json.loads(out.read_text())
    assert not data["left_out"]
    assert data["serve_2"]["whole"] == 4 and data["npl"]["2"]["answer_rate"] > 0
    assert min(data["prefix"]["cached"]) >= 64
    assert {"npl_2", "gap_2", "long_gap", "long_first_token", "prefix_steps"} <= set(data["ratios"])
