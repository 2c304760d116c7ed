"""A model runs without a profile, without a plan, and with whatever context it needs."""

import errno
import io
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cli_world import World, edit_json, made_up_profile, make_world
from manual_clock import ManualClock
from planner_cases import make_model

from pshard.commands import cli_plan, cli_run
from pshard.commands.program import one_program
from pshard.machine import BUSY, MachineProfile
from pshard.profile.effort import COMPILE_SECONDS, SHORT_SECONDS
from pshard.profile.measure import COMPILING
from pshard.registries.profile_store import save_profile
from pshard.registries.store import load_registry
from pshard.session.readiness import first_profile
from pshard.session.run_request import RunRequest


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path)


def run(world: World, *more: object) -> int:
    return one_program.main(["run", str(world.model), "-n", "3", "--temp", "0", *map(str, more)])


def test_a_model_without_a_plan_is_planned_once(world: World, capsys: pytest.CaptureFixture) -> None:
    assert run(world, "-p", "To be") == 0
    said = capsys.readouterr()
    assert f"kept in {world.registry}" in said.err and f"pshard-plan -m {world.model} --vram " in said.err
    before = world.registry.read_bytes()
    assert run(world, "-p", "To be") == 0
    again = capsys.readouterr()
    assert again.out == said.out and "plan:" not in again.err and world.registry.read_bytes() == before


def test_a_plan_without_a_budget_is_the_one_that_a_run_takes(world: World, capsys: pytest.CaptureFixture) -> None:
    assert cli_plan.main([str(world.model)]) == 0
    (variant,) = load_registry(world.registry).variants
    assert variant.workload.vram_mib[0] * 2**20 > world.model.stat().st_size
    capsys.readouterr()
    assert run(world, "-p", "a") == 0
    assert "plan:" not in capsys.readouterr().err


def test_a_context_that_no_plan_has_is_planned(world: World, capsys: pytest.CaptureFixture) -> None:
    assert cli_plan.main(["-m", str(world.model), "--vram", "6", "-c", "64"]) == 0
    capsys.readouterr()
    assert run(world, "--vram", 6, "-p", "a" * 200) == 0
    said = capsys.readouterr().err
    assert "no plan fits 6 MiB -c 203" in said and "so it was planned anew" in said
    assert [v.workload.context for v in load_registry(world.registry).variants] == [64, 512]


def test_a_profile_that_is_new_makes_the_run_plan_anew_and_say_so(world: World, capsys: pytest.CaptureFixture) -> None:
    assert run(world, "-p", "a") == 0
    edit_json(world.profile, "host", "threads", value=2)
    capsys.readouterr()
    assert run(world, "-p", "a") == 0
    assert "threads: 1 -> 2" in (said := capsys.readouterr().err) and "so it was planned anew" in said
    assert len(load_registry(world.registry).sets) == 2


def test_the_largest_micro_batch_is_as_large_as_asked(world: World, capsys: pytest.CaptureFixture) -> None:
    assert run(world, "-p", "a") == 0
    assert run(world, "-p", "a", "-ub", 64, "-b", 32) == 0
    assert sorted(v.workload.max_ubatch for v in load_registry(world.registry).variants) == [32, 128]
    assert "-ub 32" in capsys.readouterr().err


def test_a_prompt_may_be_piped_in(world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    assert run(world, "-p", "To be") == 0
    flagged = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("To be"))
    assert run(world) == 0
    assert capsys.readouterr().out == flagged


def test_the_figures_of_a_run_stand_behind_its_text_where_both_go_to_one_place(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(place))  # buffered, as a pipe is
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(place, write_through=True))
    assert run(world, "-p", "To be") == 0
    sys.stdout.flush()
    assert b"\n3 tokens; first after" in place.getvalue()


def test_without_a_number_of_tokens_the_model_s_context_is_enough(world: World) -> None:
    assert cli_run.main(["-m", str(world.model), "-p", "a" * 500, "--temp", "0"]) == 0


def test_a_grammar_is_followed(world: World, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("llguidance", reason="follows grammars")
    for flags in (["--grammar", 'root ::= "yes" | "no"'], ["-j", '{"enum": ["yes", "no"]}']):
        assert run(world, "-p", "a", "-n", 9, *flags) == 0
        assert capsys.readouterr().out.strip().strip('"') in ("yes", "no")
    for flags, told in ((["--grammar", "root ::= ("], "--grammar cannot"), (["-j", "{"], "--json-schema cannot")):
        assert run(world, "-p", "a", *flags) == 2
        assert told in capsys.readouterr().err


def test_a_schema_gives_compact_json_and_what_is_cut_is_said(world: World, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("llguidance", reason="follows grammars")
    schema = '{"type": "object", "properties": {"a": {"const": 1}, "b": {"const": [1, 2]}}, "required": ["a", "b"]}'
    assert run(world, "-p", "a", "-n", 40, "-j", schema) == 0
    said = capsys.readouterr()
    assert said.out == '{"a":1,"b":[1,2]}\n' and "was cut" not in said.err
    assert run(world, "-p", "a", "-n", 4, "-j", schema) == 0
    said = capsys.readouterr()
    assert said.out == '{"a"\n' and "was cut after 4 tokens" in said.err and "give a larger -n" in said.err
    assert run(world, "-p", "a", "-n", 17, "-j", schema) == 0 and "cut" not in capsys.readouterr().err  # just enough


def test_a_missing_llguidance_is_told_before_anything_is_loaded(world: World, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    world.model.write_bytes(b"no model, which a run would tell when it opens it")
    for command in ("run", "chat"):
        assert one_program.main([command, str(world.model), "-p", "a", "-j", "{}"]) == 2
        assert "pip install llguidance" in capsys.readouterr().err


def test_a_run_as_json_tells_all_of_it(world: World, capsys: pytest.CaptureFixture) -> None:
    assert run(world, "-p", "To be") == 0
    text = capsys.readouterr().out.removesuffix("\n")
    assert run(world, "-p", "To be", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["text"] == text and told["reason"] == "length" and len(told["ids"]) == 3
    assert told["tokens"] == {"prompt": 5, "cached": 0, "made": 3}
    assert told["seconds"]["first"] > 0 and told["rates"]["answer"] > 0 and told["plan"]["predicted"]["answer"] > 0
    assert told["plan"]["vram_mib"] and told["memory"][0]["accelerator"] > 0
    assert run(world, "-p", "To be", "--json", "--stream") == 0
    *tokens, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert [each["token"] for each in tokens if each["token"] is not None] == told["ids"] == last["ids"]
    assert "".join(each["text"] for each in tokens) == text
    assert run(world, "-p", "1,2", "--tokens", "--json") == 0
    assert json.loads(capsys.readouterr().out)["text"] is None
    assert run(world, "-p", "a", "--stream") == 2 and "--json" in capsys.readouterr().err
    assert run(world, "-p", "a", "-cnv", "--json") == 2 and "--json is for one prompt" in capsys.readouterr().err


def test_a_context_of_0_is_the_models(world: World, capsys: pytest.CaptureFixture) -> None:
    assert run(world, "-c", 0, "-p", "a") == 0 and cli_plan.main([str(world.model), "--vram", "6", "-c", "0"]) == 0
    assert {v.workload.context for v in load_registry(world.registry).variants} == {512}


def test_a_text_of_r_ends_an_answer_and_is_no_part_of_it(world: World, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("llguidance", reason="makes the model say what is known")
    flags = ["-p", "a", "-n", 30, "--grammar", 'root ::= "one STOP two"']
    assert run(world, *flags, "-r", "nothing", "-r", " STOP", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["text"], told["reason"], told["stop"]) == ("one", "stop", " STOP")
    assert run(world, *flags, "-r", "STOP") == 0
    said = capsys.readouterr()
    assert said.out == "one \n" and "was cut" not in said.err
    assert run(world, "-p", "a", "-r", "") == 2 and run(world, "-p", "1", "--tokens", "-r", "a") == 2


@pytest.mark.slow
def test_a_machine_without_a_profile_is_measured_briefly(world: World, capsys: pytest.CaptureFixture) -> None:
    world.profile.unlink()
    assert run(world, "-p", "To be") == 0
    said = capsys.readouterr().err
    assert "this machine was measured, briefly" in said and str(world.profile) in said
    made = json.loads(world.profile.read_text())
    assert made["provenance"]["short"] and made["provenance"]["quick"] and made["matmuls"] and made["attention"]
    assert run(world, "-p", "To be") == 0
    assert "profile:" not in capsys.readouterr().err


def test_a_profile_of_a_busy_machine_is_told_by_whoever_plans_with_it(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    world.profile.unlink()
    quiet = made_up_profile()
    note = f"{BUSY}, which may have cost 40% of the time: profile again when nothing else runs"
    busy = replace(quiet, provenance=replace(quiet.provenance, notes=("another", note)))
    monkeypatch.setattr("pshard.session.readiness.first_profile.measure_briefly", lambda model, show: busy)
    assert run(world, "-p", "To be") == 0
    said = capsys.readouterr().err
    assert f"note: the machine is busy: {note}" in said
    assert said.count(f"note: the profile is of a busy machine: {note}") == 1
    assert cli_plan.main([str(world.model), "--vram", "6"]) == 0
    assert f"note: the profile is of a busy machine: {note}" in capsys.readouterr().err
    save_profile(quiet, world.profile)
    assert cli_plan.main([str(world.model), "--vram", "6"]) == 0
    assert "busy machine" not in capsys.readouterr().err


@pytest.mark.parametrize(("timing", "slow"), [(9.0, False), (17.0, True)])
def test_a_first_profile_tells_what_compiling_took_and_is_not_slow_for_it(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, timing: float, slow: bool
) -> None:
    clock, made = ManualClock(), made_up_profile()
    gpu = replace(made.accelerators[0], kind="cuda")

    def measure(model: Path, show: Callable[[str, float], None]) -> MachineProfile:
        for label, seconds in (("link", 0.5), (COMPILING, 30.0), ("products", timing)):
            show(label, 0.0)
            clock.sleep(seconds)
        return replace(made, accelerators=(gpu,))

    world.profile.unlink()
    monkeypatch.setattr(first_profile, "time", clock)
    monkeypatch.setattr(first_profile, "measure_briefly", measure)
    told: list[str] = []
    first_profile.ensure_profile(RunRequest(world.model), told.append)
    said = "\n".join(told)
    assert f"briefly, in {30.5 + timing} s, of which GPU kernels were compiled for 30.0 s; kept in" in said
    assert ("slow or busy, elsewhere it takes 16 s" in said) == slow


def test_a_machine_without_a_gpu_hears_nothing_of_one(world: World, capsys: pytest.CaptureFixture) -> None:
    assert run(world, "-p", "To be") == 0
    said = capsys.readouterr().err
    assert " GiB host memory" in said and "MiB of the budget, " in said
    assert not any(word in said for word in ("VRAM", "accelerator", "link"))


def test_a_machine_whose_cache_cannot_be_written_runs_without_keeping_anything(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("PSHARD_CACHE", "/proc/cache")  # where not even root can write
    monkeypatch.setattr("pshard.session.readiness.first_profile.measure_briefly", lambda model, show: made_up_profile())
    before = set(world.model.parent.iterdir())
    assert run(world, "-p", "To be") == 0
    said = capsys.readouterr()
    assert "note: this run's profile and plan are for this run only: the profile /proc/cache/profile.json" in said.err
    assert "cannot be written: No such file" in said.err and "; not kept\n" in said.err
    assert "/dev/shm" not in said.err and said.out  # the command to plan again names no file that is gone then
    assert set(world.model.parent.iterdir()) == before


@pytest.mark.parametrize("flags", [(), pytest.param(("--vram", "4,4", "-sm", "tensor"), marks=pytest.mark.slow)])
def test_a_run_goes_on_with_a_plan_that_cannot_be_kept(
    world: World, flags: tuple, capfd: pytest.CaptureFixture
) -> None:
    assert run(world, "-p", "To be", "--registry", "/proc/r.json", *flags) == 0
    said = capfd.readouterr()
    assert "note: the plan is for this run only: cannot write the registry /proc/r.json" in said.err and said.out


def test_a_disk_that_fills_up_costs_a_run_its_prompt_cache_only(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert run(world, "-p", "To be") == 0
    text = capsys.readouterr().out
    monkeypatch.setattr("tempfile.mkstemp", fail_full)
    for more in ((), ("--prompt-cache-all",)):
        assert run(world, "-p", "To be", "--prompt-cache", tmp_path / "kv.bin", *more) == 0
        said = capsys.readouterr()
        assert said.out == text and "note: the run goes on without a prompt cache: cannot write" in said.err
    assert not (tmp_path / "kv.bin").exists()


def fail_full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_short_profile_measures_what_every_plan_needs_and_the_rest_while_time_lasts() -> None:
    from pshard.profile.effort import full_effort, short_effort
    from pshard.profile.measure import ProfileRequest, plan_jobs

    effort = short_effort(32 << 20, 16 << 30)
    jobs = plan_jobs(ProfileRequest("cpu", effort, None, None, "x"), False)
    needed = [job.label for job in jobs if not job.optional]
    assert effort.limit < SHORT_SECONDS and len(needed) == 4 and len(jobs) > len(needed)
    assert jobs[: len(needed)] == [job for job in jobs if not job.optional]
    whole = plan_jobs(ProfileRequest("cpu", full_effort(32 << 20, 16 << 30), None, None, "x"), False)
    assert len([job for job in whole if not job.optional]) > 15


def test_compiling_kernels_is_no_part_of_a_short_profiles_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from pshard.profile import measure
    from pshard.profile.effort import short_effort

    effort = short_effort(32 << 20, 16 << 30)
    monkeypatch.setattr(measure, "choose_tiles", lambda *_: ())
    monkeypatch.setattr(measure, "compile_jobs", lambda jobs, bench, seconds, in_time: time.sleep(0.02) or [seconds])
    request, gpu = measure.ProfileRequest("cuda", effort, None, None, "x"), cast(Any, SimpleNamespace())
    _, given, spent = measure.prepare_kernels(request, gpu, [], [])
    assert spent >= 0.02 and given == [COMPILE_SECONDS]


def test_a_short_profile_times_the_matrices_of_which_a_token_reads_most_before_the_others() -> None:
    """From a small matrix, which takes as long as its launch, times of large ones do not follow."""
    from pshard.profile.effort import model_shapes, short_effort
    from pshard.profile.measure import ProfileRequest, plan_jobs

    shapes = model_shapes(make_model())
    jobs = plan_jobs(ProfileRequest("cpu", short_effort(32 << 20, 16 << 30), shapes, None, "x"), False)
    (first,) = [job.label for job in jobs if not job.optional and "matmul" in job.label]
    sizes = [rows * cols for _, rows, cols in shapes.matmuls]
    rows, cols = map(int, first.split()[-1].split("x"))
    assert rows * cols == max(sizes) > 4 * min(sizes)
