"""The benchmark scripts that need a model run from nothing but a profile, and give their result."""

import json
import os
import runpy
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_world import World, make_world
from warm_python import run_warm

from pshard.session.bench_engine import BenchTest
from pshard.times.stolen_time import DISTURBED

NEED_TRITON = ("gpu_experts.py", "gpu_kernels.py")
SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts import each other, as they may when one of them is the program."""
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path, context=8192, n_layers=1)


def run_script(world: World, name: str, *flags: str) -> subprocess.CompletedProcess:
    env = os.environ | {"PSHARD_CACHE": str(world.profile.parent)}
    command = [sys.executable, str(SCRIPTS / name), "-m", str(world.model), *flags]
    return run_warm(command, env, timeout=120)


@pytest.mark.slow
def test_a_soak_does_each_kind_of_action_however_slow_the_machine_and_checks_logits(
    world: World, tmp_path: Path
) -> None:
    out = tmp_path / "soak.json"
    done = run_script(world, "soak.py", "--vram", str(world.budget), "--seconds", "0.01", "-o", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    assert record["passed"]
    assert all(record["counts"][what] for what in ("checks", "conversations", "cuts", "refused", "interrupts"))
    assert "loaded" in done.stderr and "longest prompt" in done.stderr


def test_a_soak_leaves_checks_out_that_take_longer_than_the_time_left() -> None:
    soak = runpy.run_path(str(SCRIPTS / "soak.py"))["Soak"]
    late = SimpleNamespace(errors=[0.0], history=[[1] * 100], checked_rate=1.0, end=time.monotonic(), counts=Counter())
    soak.check(late, [], 0)
    assert late.counts == {"checks left out": 1} and late.errors == [0.0]


def test_a_soak_of_experts_allows_single_tokens_that_take_another_one_and_no_wrong_cells() -> None:
    """Of 40 prompts of random models with experts the farthest was 0.52 off for a flipped choice, the median 0.003."""
    is_right = runpy.run_path(str(SCRIPTS / "soak.py"))["is_right"]
    flipped, wrong_cell, near = [1e-4, 2e-3, 0.5], [1e-4, 2e-3, 0.95], [1e-4, 2e-3, 9e-3]
    assert is_right(flipped, True) and not is_right(flipped, False)
    assert not is_right(wrong_cell, True) and not is_right([0.02, 0.02, 1e-3], True)
    assert is_right(near, False) and is_right(near, True) and not is_right([], True)


def test_turns_of_a_disk_have_no_ratio_where_others_had_all_cores() -> None:
    script = runpy.run_path(str(SCRIPTS / "disk_by_turns.py"))
    half, none = ([script["Sample"](2.0, 1.0, share)] for share in (0.5, 1.0))
    assert [script["find_ratio"](*both) for both in ((half, half), (half, none), (none, half))] == [1.0, None, None]
    found = {"ratio": None, "predicted": 1.1, "predicted_without_packing": 1.05}
    found |= {name: [vars(one) for one in none] for name in ("from_disk", "from_memory")}
    assert "no ratio, as others had all cores" in script["describe"]("1 GB/s", found)


@pytest.mark.slow
def test_truth_runs_plans_and_strategies_of_each_tests_workload(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "truth.json"
    monkeypatch.setenv("PSHARD_CACHE", str(world.profile.parent))
    monkeypatch.setattr(sys, "argv", ["truth.py", "-m", str(world.model), "--vram", "64", "-o", str(out)])
    truth = runpy.run_path(str(SCRIPTS / "truth.py"))
    named = truth["main"].__globals__
    monkeypatch.setitem(named, "TESTS", (BenchTest(16, 0), BenchTest(0, 2)))
    monkeypatch.setitem(named, "list_published", lambda spec: ("layer-stream",))
    monkeypatch.setitem(named, "HOPELESS", 0.0)
    monkeypatch.setitem(named, "ROUNDS", 2)
    monkeypatch.setitem(named, "SAMPLE_SECONDS", 0.0)  # two samples
    assert truth["main"]() == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["test"], row["strategy"]) for row in rows] == [
        (test, name) for test in ("pp16", "tg2") for name in ("pshard", "layer-stream")
    ]
    for row in rows:
        assert row["measured"] and row["predicted"]
        assert 1 <= len(row["rounds"]) <= 2 and all(r["samples"] for r in row["rounds"])
        assert row["quiet"] == sum(r["lost"] < DISTURBED for r in row["rounds"])  # no unit is large enough to be read
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["64 pp16", "64 tg2"]


def test_kernels_as_another_card_stand_beside_both_their_rates_and_what_a_sheet_says() -> None:
    """A library's products keep this GPU's share in both codes; others have shares of their own."""
    script = SimpleNamespace(**runpy.run_path(str(SCRIPTS / "as_card_kernels.py")))
    cases = script.list_cases()
    kinds = {case.name.split()[0] for case in cases}
    assert kinds == {"product", "attention", "latent", "experts", "router", "delta", "norm", "rope", "silu_mul"}
    assert {q for q in script.QTYPES for case in cases if f"product {q} " in case.name} == set(script.QTYPES)
    assert {case.name.split()[0] for case in cases[:6]} >= {"product", "attention", "latent", "experts", "delta"}
    cards = {"native": script.card_of("NVIDIA H100", 90), "as_card": script.card_of("NVIDIA H100", 86)}
    times = {way: {case.name: 2e-3 if way == "as_card" else 1e-3 for case in cases} for way in script.WAYS}
    library, _ = next(case for case in cases if case.is_library), times["native"].pop("norm of 4096, 1 tokens")
    times["as_card"]["rope of 5120, 1 tokens"] = "KernelRefused: no room"
    rows = {row["case"]: row for row in script.make_rows(cases, times, cards)}
    row, left, failed = rows[library.name], rows["norm of 4096, 1 tokens"], rows["rope of 5120, 1 tokens"]
    assert row["share"] == 0.5 and row["as_card"]["sheet_us"] == row["native"]["sheet_us"]
    for way, us in (("as_card", 2000.0), ("native", 1000.0)):
        assert row[way]["us"] == us and row[way]["off"] == pytest.approx(row[way]["sheet_us"] / us - 1, abs=1e-3)
    assert (left["native"], left["share"]) == ("no time left", None) and left["as_card"]["us"] == 2000.0
    assert (failed["as_card"], failed["share"]) == ("KernelRefused: no room", None)
    latent = rows["latent 16x512+64 bf16, 1x4096 of 4096"]
    assert latent["as_card"]["sheet_us"] < latent["native"]["sheet_us"]
    assert latent["as_card"]["slots"] > 0 < latent["as_card"]["tensor"]


def test_quiet_rounds_count_and_only_plans_near_the_fastest_need_two() -> None:
    truth = runpy.run_path(str(SCRIPTS / "truth.py"))
    quiet, loud = (truth["Round"]((rate, rate), (), 0.0, rate > 50) for rate in (100.0, 50.0))
    rate, settled = truth["measured_rate"], truth["is_settled"]
    assert rate([loud, quiet, loud]) == 100 and rate([loud]) == 50
    assert not settled([], 10, 1000)
    assert settled([quiet], 10, 1000) and not settled([quiet], 10, 105) and settled([quiet, loud, quiet], 10, 105)
    assert settled([loud, loud], 10, 1000) and not settled([loud], 10, 1000) and not settled([loud, loud], 950, 1000)


def test_a_budget_that_is_too_small_is_told_in_one_line(world: World, tmp_path: Path) -> None:
    done = run_script(world, "truth.py", "--vram", "1", "-o", str(tmp_path / "truth.json"))
    assert done.returncode == 2 and done.stdout.count("\n") == 1 and "Traceback" not in done.stderr


def run_captured(words: list[str], *, timeout: float | None, **captured: bool) -> subprocess.CompletedProcess:
    """What the script asks of `subprocess.run`."""
    assert captured == {"capture_output": True, "text": True}
    return run_warm(words, timeout=120 if timeout is None else timeout)


def run_parallel(world: World, out: Path, monkeypatch: pytest.MonkeyPatch, seconds: str) -> dict:
    monkeypatch.setenv("PSHARD_CACHE", str(world.profile.parent))
    flags = ["--cases", "vram", "--devices", "2", "--seconds", seconds, "-o", str(out)]
    monkeypatch.setattr(sys, "argv", ["parallel.py", "-m", str(world.model), *flags])
    script = runpy.run_path(str(SCRIPTS / "parallel.py"))
    case = script["Case"](64, 64, 16, "-c 128", "-p 32 -n 8 -r 1", {(2, "tg8"): 1.4})
    named = script["main"].__globals__
    monkeypatch.setitem(named["CASES"], "vram", case)
    errors = {"TimeoutExpired": subprocess.TimeoutExpired, "CompletedProcess": subprocess.CompletedProcess}
    monkeypatch.setitem(named, "subprocess", SimpleNamespace(run=run_captured, **errors))
    assert script["main"]() == 0
    return json.loads(out.read_text())["tiny vram"]


@pytest.mark.slow
def test_ways_to_use_several_devices_are_measured_and_the_planners_choice_is_judged(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    record = run_parallel(world, tmp_path / "parallel.json", monkeypatch, "1000")
    said = capsys.readouterr().out
    assert list(record["ways"]) == ["one device", "2 devices, tensor", "2 devices, layer"] and not record["skipped"]
    for way in record["ways"].values():
        assert [m["test"] for m in way["measurements"]] == ["pp32", "tg8"]
    choice = record["choices"]["2 devices"]
    fastest = min(choice["measured"], key=choice["measured"].get)
    assert set(choice["measured"]) == set(record["ways"])
    assert "NOT the fastest" in choice["said"] or choice["measured"][choice["chosen"]] <= 1.03 * min(
        choice["measured"].values()
    )
    assert ("the fastest measured" in choice["said"]) == ("NOT" not in choice["said"])
    assert "NOT" not in choice["said"] or f"{fastest} is" in choice["said"]
    assert "of one device (goal x1.4)" in said and "of predicted" in said


@pytest.mark.parametrize("script", ["budgets.py", "parallel.py"])
def test_notes_of_a_benchmark_are_passed_on(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run = runpy.run_path(str(SCRIPTS / script))["run"]
    done = subprocess.CompletedProcess([], 0, "", "loading\nnote: a core was stolen\nnote: plain kernels\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: done)
    run(["pshard-bench", "-m", "model"])
    assert capsys.readouterr().out == "note: a core was stolen\nnote: plain kernels\n"
    run(["pshard-plan", "-m", "model"])
    assert not capsys.readouterr().out


@pytest.mark.slow
def test_ways_that_no_time_is_left_for_are_named_and_nothing_is_judged(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = run_parallel(world, tmp_path / "parallel.json", monkeypatch, "0.1")
    assert not record["ways"] and len(record["skipped"]) == 3
    assert "not enough was measured" in record["choices"]["2 devices"]["said"]


@pytest.mark.quick("None-truth.py", "active-soak.py")
@pytest.mark.parametrize("name", ["truth.py", "soak.py"])  # the others import torch late
@pytest.mark.parametrize("chosen", [None, "active"])
def test_threads_of_torch_sleep_in_scripts_that_run_engines_unless_told_otherwise(
    name: str, chosen: str | None
) -> None:
    """torch reads it when it is imported."""
    code = (
        "import os, runpy, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n"
        "            sys.exit(f\"torch: {os.environ.get('OMP_WAIT_POLICY')}\")\n"
        f"sys.meta_path.insert(0, Watch())\nrunpy.run_path({str(SCRIPTS / name)!r})\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"} | (
        {"OMP_WAIT_POLICY": chosen} if chosen else {}
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert done.stderr.strip() == f"torch: {chosen or 'passive'}"


def test_busy_measures_with_cores_held_and_leaves_no_program_behind(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("PSHARD_CACHE", str(world.profile.parent))
    busy, out = runpy.run_path(str(SCRIPTS / "busy.py")), tmp_path / "busy.json"
    monkeypatch.setitem(busy["decode"].__globals__, "TOKENS", 2)
    flags = ["-m", str(world.model), "-t", "1", "--rounds", "2", "--seconds", "0.05", "-o", str(out)]
    assert busy["main"](flags) == 0
    rows = json.loads(out.read_text())["results"]
    cores = len(os.sched_getaffinity(0))
    assert [row["held"] for row in rows] == sorted({0, 1, cores})
    assert all(len(row["samples"]) == 2 and row["rate"] > 0 for row in rows) and rows[0]["share"] == 1
    assert rows[-1]["goal"] == 0.35 and "of idle" in capsys.readouterr().out
    started = []
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, real=subprocess.Popen, **kw: started.append(real(*args, **kw)) or started[-1]
    )
    with busy["hold"]([min(os.sched_getaffinity(0))]):
        assert started[0].poll() is None
    assert started[0].poll() is not None


@pytest.mark.slow
def test_steps_of_a_server_are_timed_beside_those_of_its_engine(world: World, tmp_path: Path) -> None:
    for extra in ("uvicorn", "starlette"):
        pytest.importorskip(extra, reason=f"{extra} is not installed; pip install 'pshard[serve]'")
    out = tmp_path / "served.json"
    words = ["--vram", str(world.budget), "--streams", "2", "--steps", "40", "--turns", "1", "--idle", "1"]
    done = run_script(world, "served_steps.py", *words, "-o", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    assert record["direct_ms"]["p50"] >= 1 and record["in_machine_ms"]["p50"] >= 1 and record["loop_ms"]["p50"] > 0
    assert record["served_ms"]["p50"] >= record["in_machine_ms"]["p50"]


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*.py")))
def test_every_script_finds_what_it_imports(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python starts it: with its own folder first, and without those that the tests' setup adds."""
    if script in NEED_TRITON:
        pytest.importorskip("triton", reason="Triton comes with torch for GPUs")
    tests = str(SCRIPTS.parent / "tests")
    paths = [path for path in sys.path if not path.startswith(tests)]
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *paths])
    for name in [name for name, module in sys.modules.items() if _is_of_tests(module, tests)]:
        monkeypatch.delitem(sys.modules, name)
    runpy.run_path(str(SCRIPTS / script), run_name="imported")


def _is_of_tests(module: object, tests: str) -> bool:
    return str(getattr(module, "__file__", "") or "").startswith(tests)
