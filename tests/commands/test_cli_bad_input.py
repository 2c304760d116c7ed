"""Bad input, tried through the commands: exit code 2, one line with cause and cure, nothing half written."""

import contextlib
import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from cli_world import World, edit_json, make_world, tokenizer_metadata, world_in
from model_files import write_gguf
from warm_python import WarmProcess, run_warm

from pshard.commands import cli_bench, cli_plan, cli_profile, cli_report, cli_run
from pshard.commands.command_line import run_cli

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "profile": cli_profile.main,
    "plan": cli_plan.main,
    "run": cli_run.main,
    "bench": cli_bench.main,
    "report": lambda argv: run_cli(cli_report.make_report, argv),
}
Refuse = Callable[..., str]


@pytest.fixture(scope="session")
def planned_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world with a plan, made once and copied by every test."""
    folder = tmp_path_factory.mktemp("planned")
    world = make_world(folder)
    with pytest.MonkeyPatch.context() as patch:  # conftest's own is for one test
        patch.setenv("PSHARD_CACHE", str(world.profile.parent))
        patch.setenv("PSHARD_VALIDATE", "0")
        assert cli_plan.main(["-m", str(world.model), "--vram", str(world.budget), "-c", "128"]) == 0
    return folder


@pytest.fixture
def planned(planned_once: Path, tmp_path: Path) -> World:
    shutil.copytree(planned_once, tmp_path, dirs_exist_ok=True)
    return world_in(tmp_path)


@pytest.fixture
def world(planned: World) -> World:
    planned.registry.unlink()
    return planned


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture, tmp_path: Path) -> Refuse:
    """Run a command that must fail like a user's error; returns its line. No temporary file may be left."""

    def run(command: str, *argv: object) -> str:
        code = COMMANDS[command]([str(word) for word in argv])
        out, err = capsys.readouterr()
        lines = err.splitlines()
        assert (code, len(lines), out) == (2, 1, ""), (code, out, err)
        assert lines[0].startswith("error: ") and "Traceback" not in err
        assert leftovers(tmp_path) == []
        return lines[0]

    return run


def leftovers(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.suffix == ".tmp"]


def commands_of(world: World) -> list[tuple[object, ...]]:
    """One call of each command that opens a model."""
    m = ("-m", world.model, "--vram", world.budget)
    return [("plan", *m, "-c", 128), ("run", *m, "-p", "hi", "-n", 2), ("bench", *m, "-p", 8, "-n", 0, "-r", 1)]


# Model files


def refused_by_all(world: World, refuse: Refuse, *words: str) -> None:
    for call in commands_of(world):
        line = refuse(*call)
        assert str(world.model) in line
        for word in words:
            assert word in line
    assert not world.registry.exists()


@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_truncated_model_file(world: World, refuse: Refuse, share: float) -> None:
    whole = world.model.read_bytes()
    world.model.write_bytes(whole[: int(share * len(whole))])
    refused_by_all(world, refuse, "truncated")


@pytest.mark.parametrize(("content", "word"), [(b"", "empty"), (b"PK\3\4 something else" * 9, "not a GGUF file")])
def test_file_that_is_no_model(world: World, refuse: Refuse, content: bytes, word: str) -> None:
    world.model.write_bytes(content)
    refused_by_all(world, refuse, word)


def test_missing_model_file(world: World, refuse: Refuse) -> None:
    world.model.unlink()
    refused_by_all(world, refuse, "there is no such file; give a GGUF file, a folder, or a model of the Hub")


def test_folder_without_a_model(world: World, refuse: Refuse, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json" in refuse("plan", "-m", empty, "--vram", 6)


def test_unsupported_architecture_is_named(world: World, refuse: Refuse) -> None:
    write_gguf(world.model, "mamba2")
    refused_by_all(world, refuse, "'mamba2' is not supported", "qwen3")


def test_unsupported_quant_type_is_named(world: World, refuse: Refuse) -> None:
    write_gguf(world.model, qtypes={"ffn_down.weight": "Q8_0"})
    data, name = bytearray(world.model.read_bytes()), b"blk.0.ffn_down.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions and two sizes
    data[at : at + 4] = gguf.GGMLQuantizationType.Q8_K.to_bytes(4, "little")
    world.model.write_bytes(data)
    refused_by_all(world, refuse, "Q8_K", "ffn_down.weight", "Q4_K")


def test_missing_tensor_is_named(world: World, refuse: Refuse) -> None:
    write_gguf(world.model, omit=("blk.1.ffn_up.weight",))
    refused_by_all(world, refuse, "blk.1.ffn_up.weight", "missing")


def test_misshapen_tensor_is_named(world: World, refuse: Refuse) -> None:
    write_gguf(world.model, extra={"blk.1.ffn_up.weight": np.zeros((512, 128), np.float32)})
    refused_by_all(world, refuse, "blk.1.ffn_up.weight", "512, 128")


def test_moved_tensor_is_named(world: World, refuse: Refuse) -> None:
    data = bytearray(world.model.read_bytes())
    offset = data.index(b"blk.1.ffn_up.weight") + len(b"blk.1.ffn_up.weight") + 4 + 16 + 4
    data[offset] ^= 32
    world.model.write_bytes(data)
    refused_by_all(world, refuse, "blk.1.ffn_up.weight begins at byte", "fetch it again")


# Budgets


def test_budget_too_small_names_the_smallest_that_works(world: World, refuse: Refuse) -> None:
    write_gguf(world.model, vocab=6000, n_layers=1)
    call = ("-m", world.model, "-c", 128 * 512, "-np", 128, "--prompt", 4, "--generated", 4)
    line = refuse("plan", *call, "--vram", 1)
    smallest = int(line.rsplit("is ", 1)[1].split(" MiB")[0])
    assert smallest > 1 and not world.registry.exists()
    assert f"--vram {smallest - 1} MiB is too small" in refuse("plan", *call, "--vram", smallest - 1)
    assert cli_plan.main([str(word) for word in (*call, "--vram", smallest)]) == 0


def test_sweep_whose_budgets_are_all_too_small(world: World, capsys: pytest.CaptureFixture) -> None:
    assert cli_plan.main(["-m", str(world.model), "--sweep", "0:0:1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("skipped: ") and lines[1].startswith("error: no budget of the sweep")


def test_budget_below_every_planned_one_lists_what_is_planned(planned: World, refuse: Refuse) -> None:
    line = refuse("bench", "-m", planned.model, "--vram", 2, "-p", 8, "-n", 0)
    assert "no plan fits 2 MiB" in line and "6 MiB -c 128" in line
    assert f"pshard-plan -m {planned.model} --vram 2" in line


# Profiles


def test_missing_profile(world: World, refuse: Refuse) -> None:
    world.profile.unlink()
    for call in commands_of(world)[::2]:  # a run makes one
        line = refuse(*call)
        assert str(world.profile) in line and line.endswith("run pshard-profile")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("{", "not a JSON file"),
        ("[" * 100_000, "not a JSON file"),
        ("[]", "no machine profile"),
        ('{"version": 1}', "damaged"),
        ("\0", "not a JSON file"),
    ],
)
def test_damaged_profile(world: World, refuse: Refuse, content: str, word: str) -> None:
    world.profile.write_text(content)
    for call in commands_of(world):
        line = refuse(*call)
        assert word in line and "run pshard-profile again" in line


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("accelerators",), [], "accelerators is empty"),
        (("handoff_seconds",), math.nan, "handoff_seconds is nan"),
        (("lockable_bytes",), -1, "lockable_bytes is -1"),
        (("matmuls", 3, "cols"), 0, "matmuls[3].cols is 0, not 1 or more"),
        (("host", "memory_bytes"), -5, "host.memory_bytes is -5"),
        (("host", "threads"), 10**30, "host.threads is 1000000000000000000000000000000, not a number from 1 to"),
        (("contention", "link_with_cpu"), math.inf, "contention.link_with_cpu is inf"),
    ],
)
def test_figures_that_no_machine_has(world: World, refuse: Refuse, where: tuple, value: object, said: str) -> None:
    edit_json(world.profile, *where, value=value)
    for call in commands_of(world):
        line = refuse(*call)
        assert said in line and "is damaged" in line and "run pshard-profile again" in line


def test_profile_of_a_newer_version(world: World, refuse: Refuse) -> None:
    edit_json(world.profile, "version", value=99)
    assert "run pshard-profile again" in refuse(*commands_of(world)[0])


def test_profile_of_another_machine(planned: World, refuse: Refuse) -> None:
    edit_json(planned.profile, "host", "cpu", value="Another CPU")
    for call in commands_of(planned):
        line = refuse(*call)
        assert "another machine" in line and "Another CPU" in line and "pshard-profile" in line


def test_a_profile_of_another_machine_that_was_asked_for_is_named(planned: World, refuse: Refuse) -> None:
    other = planned.profile.with_name("other.json")
    shutil.copy(planned.profile, other)
    edit_json(other, "host", "cpu", value="Another CPU")
    line = refuse(*commands_of(planned)[1], "--profile", other)
    assert f"--profile {other} is of another machine: cpu: Another CPU" in line and "leave it out" in line
    assert "run pshard-profile" not in line  # which would change nothing


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_missing_model_is_named_before_all_else_that_is_missing(
    world: World, refuse: Refuse, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.profile.unlink()
    assert "llama3: there is no such file; give a GGUF file" in refuse(command, "llama3")  # no profile, no prompt
    monkeypatch.setenv("PSHARD_MODEL", "llama3")
    assert "llama3: there is no such file" in refuse(command)


def test_profile_of_another_accelerator(planned: World, refuse: Refuse) -> None:
    edit_json(planned.profile, "accelerators", 0, "name", value="Some GPU")
    for call in commands_of(planned)[1:]:
        assert "Some GPU -> " in refuse(*call)


def test_profile_of_the_same_machine_with_other_parts(planned: World, refuse: Refuse) -> None:
    run = commands_of(planned)[1]
    edit_json(planned.profile, "accelerators", 0, "driver", value="570.1")
    assert "driver 0: 570.1 -> " in refuse(*run)
    edit_json(planned.profile, "accelerators", 0, "driver", value="")
    edit_json(planned.profile, "host", "threads", value=9999)
    edit_json(planned.profile, "host", "cores", value=9999)
    assert "cores: 9999 -> " in refuse(*run)


def test_planning_for_another_machine_says_so(world: World, capsys: pytest.CaptureFixture) -> None:
    edit_json(world.profile, "host", "cpu", value="Another CPU")
    call = ["-m", str(world.model), "--vram", "6", "-c", "128", "--profile", str(world.profile)]
    assert cli_plan.main(call) == 0
    assert "note: the profile is of another machine (CPU Another CPU" in capsys.readouterr().err


# Registries


@pytest.mark.parametrize("place", ["folder", "file/r.json"])
def test_a_place_where_no_registry_can_be_is_refused_before_anything_is_planned(
    world: World, refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr("pshard.planner.choose_mode.plan_split", lambda *_: pytest.fail("it was planned"))
    monkeypatch.setattr("pshard.session.try_plans.choose_by_trial", lambda *_: pytest.fail("it was planned"))
    line = refuse("plan", "-m", world.model, "--vram", world.budget, "-c", 128, "--registry", tmp_path / place)
    assert f"cannot write the registry {tmp_path / place}" in line and "choose another place with --registry" in line


def test_missing_registry(world: World, refuse: Refuse) -> None:
    for call in commands_of(world)[2:]:  # a run plans
        line = refuse(*call)
        assert str(world.registry) in line and f"run: pshard-plan -m {world.model} --vram 6" in line


def test_stale_registry_after_a_new_profile(planned: World, refuse: Refuse) -> None:
    edit_json(planned.profile, "host", "threads", value=2)
    before = planned.registry.read_bytes()
    for call in commands_of(planned)[2:]:
        line = refuse(*call)
        assert "threads: 1 -> 2" in line and f"run: pshard-plan -m {planned.model} --vram 6" in line
        assert "--replan" in line
    assert planned.registry.read_bytes() == before


def test_stale_registry_after_a_new_model(planned: World, refuse: Refuse) -> None:
    write_gguf(planned.model, qtype="Q8_0", n_layers=4, vocab=258)
    for call in commands_of(planned)[2:]:
        line = refuse(*call)
        assert "tensor shapes and quant types: " in line and "model file sizes: " in line


@pytest.mark.parametrize("damage", ["cut", "fingerprint", "placement", "nothing", "binary"])
def test_corrupt_registry(planned: World, refuse: Refuse, damage: str) -> None:
    text = planned.registry.read_text()
    if damage == "cut":
        planned.registry.write_text(text[: len(text) // 2])
    elif damage == "fingerprint":
        edit_json(planned.registry, "sets", 0, "fingerprint", value="0" * 64)
    elif damage == "placement":
        tier = ("sets", 0, "variants", 0, "ranks", 0, "tiers", 0)
        edit_json(planned.registry, *tier, "placements", 0, "where", value="nowhere")
    else:
        planned.registry.write_bytes(b"" if damage == "nothing" else bytes(range(256)))
    before = planned.registry.read_bytes()
    for call in commands_of(planned):
        line = refuse(*call)
        assert "corrupt" in line and str(planned.registry) in line and "delete it and run: pshard-plan" in line
    assert planned.registry.read_bytes() == before


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("tiers", 0, "placements", 2, "unit"), "blk.9.ffn", "placements are not the model's units"),
        (("tiers", 0, "placements", 1, "kv"), None, "cannot be"),
        (("pin_order", 0), "blk.9.ffn", "the pin order names"),
        (("tiers", 0, "buffers", "scratch"), 64, "bytes of scratch"),
        (("budget_mib",), 1, "over the arena"),
    ],
)
def test_plan_that_reads_well_but_is_not_the_models(
    planned: World, refuse: Refuse, place: tuple, value: object, words: str
) -> None:
    edit_json(planned.registry, "sets", 0, "variants", 0, "ranks", 0, *place, value=value)
    for call in commands_of(planned)[1:]:
        line = refuse(*call)
        assert "corrupt" in line and words in line and "delete it and run: pshard-plan" in line


def test_registry_of_a_newer_format(planned: World, refuse: Refuse) -> None:
    edit_json(planned.registry, "version", value=99)
    for call in commands_of(planned):
        assert "update pshard" in refuse(*call)


def test_registry_of_an_older_format(planned: World, refuse: Refuse) -> None:
    edit_json(planned.registry, "version", value=1)
    for call in commands_of(planned)[2:]:
        line = refuse(*call)
        assert "older format version 1" in line and f"run: pshard-plan -m {planned.model} --vram 6" in line


# Places that cannot be written


def fail_with(code: int) -> Callable:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_plan_beside_a_model_in_a_read_only_folder_goes_to_the_cache(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != world.model.parent and real(path, mode))
    for call in commands_of(world)[:2]:
        assert COMMANDS[str(call[0])]([str(word) for word in call[1:]]) == 0
    assert not world.registry.exists()
    (found,) = (tmp_path / "cache" / "registries").glob("tiny.gguf-*.pshard.json")
    assert str(found) in capsys.readouterr().err


def test_registry_in_a_read_only_folder(
    world: World, refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.mkstemp", fail_with(errno.EROFS))
    line = refuse("plan", "-m", world.model, "--vram", 6, "-c", 128, "--registry", tmp_path / "r.json")
    assert "Read-only file system" in line and "--registry" in line
    assert not (tmp_path / "r.json").exists()


def test_full_disk_keeps_the_old_registry(planned: World, refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    before = planned.registry.read_bytes()
    monkeypatch.setattr(os, "fsync", fail_with(errno.ENOSPC))
    line = refuse("plan", "-m", planned.model, "--vram", 8, "-c", 128)
    assert "No space left on device" in line and "free some space" in line
    assert planned.registry.read_bytes() == before


def test_profile_to_a_place_that_cannot_be_written_fails_before_measuring(
    tmp_path: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pshard.profile.measure.measure_machine", fail_with(errno.EIO))  # must not be reached
    assert "is a folder" in refuse("profile", "--quick", "-o", tmp_path)
    assert "cannot be written" in refuse("profile", "--quick", "-o", "/proc/p.json")  # which not even root can
    monkeypatch.setattr(os, "fsync", fail_with(errno.ENOSPC))
    assert "free some space" in refuse("profile", "--quick", "-o", tmp_path / "p.json")
    assert "free some space" in refuse("profile", "--quick")
    monkeypatch.setenv("PSHARD_CACHE", "/proc/cache")
    assert "with PSHARD_CACHE" in refuse("profile", "--quick")
    assert not (tmp_path / "p.json").exists()


def test_plans_and_caches_to_places_that_cannot_be_written_fail_before_the_work(
    world: World, refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pshard.commands.cli_plan._plan_all", fail_with(errno.EIO))  # must not be reached
    monkeypatch.setattr("pshard.session.open_plan.open_plan", fail_with(errno.EIO))
    plan, run, _ = commands_of(world)
    assert "cannot write the registry /proc/r.json" in refuse(*plan, "--registry", "/proc/r.json")
    for flag in ("--prompt-cache", "--record-routing"):
        assert f"{flag} /proc/file: cannot be written" in refuse(*run, flag, "/proc/file")
        assert f"{flag}: there is no folder" in refuse(*run, flag, tmp_path / "no" / "file")
    assert "--write-lp /proc/file: cannot be written" in refuse(*plan, "--write-lp", "/proc/file")
    monkeypatch.setattr(os, "fsync", fail_with(errno.ENOSPC))
    assert f"cannot write the registry {world.registry}: No space left" in refuse(*plan)
    assert "free some space" in refuse(*run, "--prompt-cache", tmp_path / "kv.bin")


@pytest.mark.parametrize(
    ("flags", "said"),
    [((), "give -o FILE"), (("-o", "p.json", "-t", 1), "-m and -t"), (("-o", "p.json"), "without torchrun")],
)
def test_profile_by_ranks_that_torchrun_started(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch, flags: tuple, said: str
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert said in refuse("profile", *flags)


def test_full_disk_keeps_the_old_profile(world: World, refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    from pshard.registries.profile_store import load_profile

    before, made = world.profile.read_bytes(), load_profile()
    monkeypatch.setattr("pshard.profile.measure.measure_machine", lambda request, progress: made)
    monkeypatch.setattr(os, "fsync", fail_with(errno.ENOSPC))
    assert "No space left on device" in refuse("profile", "--quick")
    assert world.profile.read_bytes() == before


def test_bench_output_that_cannot_be_written_fails_before_measuring(
    planned: World, refuse: Refuse, tmp_path: Path
) -> None:
    call = commands_of(planned)[2]
    assert "is a folder" in refuse(*call, "-of", tmp_path)
    assert "cannot be written" in refuse(*call, "-of", planned.model / "x.json")


def test_texts_that_are_not_utf8(planned: World, refuse: Refuse, tmp_path: Path) -> None:
    text = tmp_path / "latin.txt"
    text.write_bytes("Gr\u00fc\u00dfe".encode("latin-1"))
    assert f"cannot read the prompt file {text}" in refuse("run", "-m", planned.model, "-f", text)
    assert f"cannot read {text}" in refuse("bench", "-m", planned.model, "--perplexity", text)


@pytest.mark.parametrize("token", [258, 2**32 - 1])  # the last is -1 for llama.cpp
def test_end_token_beyond_the_vocabulary_is_named(planned: World, refuse: Refuse, token: int) -> None:
    write_gguf(
        planned.model, n_layers=1, vocab=258, metadata=tokenizer_metadata() | {"tokenizer.ggml.eos_token_id": token}
    )
    line = refuse("run", "-m", planned.model, "-p", "hi")
    assert f"tokenizer.ggml.eos_token_id is {token}, not one of the 258 tokens" in line


def test_an_error_shows_what_a_file_holds_as_one_line_that_a_terminal_can_show(world: World, refuse: Refuse) -> None:
    write_gguf(world.model, metadata={"llama.attention.head_count": "\x1b[2J\n" + 9000 * "x"})
    line = refuse("plan", "-m", world.model, "--vram", 6)
    assert (
        "head_count is" in line
        and line.endswith("not a whole number above 0; take another file or model")
        and "\x1b" not in line
    )
    assert len(line) < 2100 and " [...] " in line


def test_places_that_are_no_files(planned: World, refuse: Refuse, tmp_path: Path) -> None:
    fifo, folder = tmp_path / "fifo", tmp_path / "folder"
    os.mkfifo(fifo)
    folder.mkdir()
    for place in (fifo, folder):
        assert f"cannot write the registry {place}" in refuse_registry(planned, refuse, place)
        assert "give a file name" in refuse("profile", "--quick", "-o", place)
        assert "give a file name" in refuse(*commands_of(planned)[2], "-of", place)
    assert fifo.is_fifo() and list(folder.iterdir()) == []
    assert "cannot read the registry" in refuse(*commands_of(planned)[1], "--registry", folder)
    assert "cannot be read" in refuse(*commands_of(planned)[1], "--profile", folder)
    assert "cannot read the prompt file" in refuse("run", "-m", planned.model, "-f", folder)
    assert "cannot read" in refuse("bench", "-m", planned.model, "--perplexity", folder)


def refuse_registry(world: World, refuse: Refuse, place: Path) -> str:
    return refuse(*commands_of(world)[0], "--registry", place)


def test_registry_behind_a_link_is_written_where_it_lies(planned: World, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(planned.registry)
    call = ["-m", str(planned.model), "--vram", "8", "-c", "128", "--registry", str(link)]
    assert cli_plan.main(call) == 0
    assert link.is_symlink() and len(json.loads(planned.registry.read_text())["sets"][0]["variants"]) == 2


def test_cache_that_is_a_file(world: World, refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PSHARD_CACHE", str(tmp_path / "file"))
    plan, run, bench = commands_of(world)
    for call in (plan, bench):
        assert "cannot be read: Not a directory" in refuse(*call)
    assert "no folder for the machine profile" in (line := refuse(*run)) and "set PSHARD_CACHE" in line


def test_report_to_a_place_that_cannot_be_written(planned: World, refuse: Refuse) -> None:
    line = refuse("report", planned.registry, "-o", planned.model)
    assert "cannot write the report" in line and "-o" in line


# Ctrl-C


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["pshard.planner.choose_mode.plan_variant", "os.fsync", "os.replace"])
def test_interrupted_plan_leaves_the_old_registry(
    planned: World, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    before = planned.registry.read_bytes()
    monkeypatch.setattr(when, interrupt)
    assert cli_plan.main(["-m", str(planned.model), "--vram", "8", "-c", "128"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert planned.registry.read_bytes() == before and leftovers(tmp_path) == []


def test_interrupted_run_and_bench_end_quietly(
    planned: World, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pshard.runtime.executor.Executor.run", interrupt)
    for call in commands_of(planned)[1:]:
        assert COMMANDS[str(call[0])]([str(word) for word in call[1:]]) == 130
        assert capsys.readouterr().err.splitlines()[-1] == "interrupted"


def test_an_interrupt_that_an_import_swallows_is_told_and_not_what_came_of_it(capsys: pytest.CaptureFixture) -> None:
    def import_half(_: list[str]) -> int:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise AttributeError("module 'numpy' has no attribute 'multiply'")

    before = signal.getsignal(signal.SIGINT)
    assert run_cli(import_half, []) == 130
    assert capsys.readouterr().err == "interrupted\n" and signal.getsignal(signal.SIGINT) is before


def test_interrupted_profile_leaves_no_file(tmp_path: Path) -> None:
    place = tmp_path / "profile.json"
    words = [sys.executable, "-m", "pshard.commands.cli_profile", "-o", str(place), "-t", "1"]
    with open(tmp_path / "printed", "w+") as printed:
        process = WarmProcess(words, stdout=printed, stderr=subprocess.PIPE)
        assert process.stderr is not None
        with process.stderr as said:
            try:
                assert said.readline().startswith(b"A full profile takes about")  # it measures from here on
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 130
            finally:
                process.kill()
            assert said.read() == b"interrupted\n"
        printed.seek(0)
        assert printed.read() == ""
    assert list(tmp_path.glob("*profile.json*")) == []


# Flags


@pytest.mark.parametrize("command", list(COMMANDS))
def test_unknown_flag(refuse: Refuse, command: str) -> None:
    needed = ["x.json"] if command == "report" else []
    line = refuse(command, *needed, "--frobnicate")
    assert "there is no flag --frobnicate" in line and f"pshard-{command} --help" in line


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        ("profile", ["--qui"]),
        ("plan", ["--vra", "6"]),
        ("run", ["--vra", "6", "-p", "hi"]),
        ("bench", ["--vra", "6"]),
        ("report", ["x.json", "--out", "y"]),
    ],
)
def test_abbreviated_flag(refuse: Refuse, command: str, argv: list[str]) -> None:
    assert "there is no flag" in refuse(command, *argv)


@pytest.mark.parametrize("command", ["plan", "run", "bench"])
@pytest.mark.parametrize("size", ["12x", "G", "1.2.3", "12000,", "1e4", "nan", "-5", ""])
def test_bad_size(refuse: Refuse, command: str, size: str) -> None:
    line = refuse(command, "-m", "x", "--vram", size)
    assert "--vram" in line and ("is not a size in MiB" in line or "expected one argument" in line)


@pytest.mark.parametrize("command", ["plan", "run", "bench"])
@pytest.mark.parametrize("count", ["-3", "x", "1.5"])
def test_bad_context(refuse: Refuse, command: str, count: str) -> None:
    assert "is not a number of tokens" in refuse(command, "-c", count)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-p", "x"], "is not a number or range"),
        (["-p", "1-"], "is not a number or range"),
        (["-p", "5-1"], "ends before it begins"),
        (["-n", "1-8+0"], "never reaches its end"),
        (["-n", "1-8*1"], "never reaches its end"),
        (["-n", "0-8*2"], "never reaches its end"),
        (["-p", "1-999999999999"], "lists more than 1000 numbers"),
        (["-npl", "0"], "each is 1 or more"),
        (["-r", "0"], "is not a whole number of 1 or more"),
        (["-p", "0", "-n", "0"], "no tests"),
        (["--baseline", "other"], "invalid choice: 'other'"),
        (["--strategy", "other"], "--strategy other is unknown; choose from fit"),
        (["--ppl-window", "1"], "2 tokens or more"),
        (["-o", "xml"], "invalid choice: 'xml'"),
    ],
)
def test_bad_bench_flags(refuse: Refuse, flags: list[str], words: str) -> None:
    assert words in refuse("bench", "-m", "x", *flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--vram", "6", "--sweep", "4:8:2"], "exclude each other"),
        (["--sweep", "4:8"], "is not A:B:STEP"),
        (["--sweep", "8:4:1"], "no range"),
        (["--sweep", "1:99999999:1"], "no range"),
        (["--vram", "6,6"], "add -sm tensor"),
        (["--vram", "6", "-ts", "1,1"], "-ts needs -sm tensor"),
        (["--vram", "6,6", "-sm", "tensor", "-ts", "1,1,1"], "3 ratios"),
        (["--vram", "6", "-ts", "1,x"], "is not a list of ratios"),
        (["--vram", "6", "-ts", "0,0"], "one is above 0"),
        (["--vram", "6", "-ts", "1,nan"], "one is above 0"),
        (["--vram", "6", "-ts", "auto"], "-ts needs -sm tensor"),
        (["--vram", "6,6", "-sm", "tensor", "-ts", "auto", "--strategy", "fit"], "exclude each other"),
        (["--vram", "6", "-sm", "auto"], "-sm auto: the profile knows one device; give --vram a budget for each rank"),
        (["--vram", "6,6", "-sm", "auto", "--strategy", "fit"], "exclude each other"),
        (["--vram", "6,6", "-sm", "auto", "-ts", "1,1,1"], "3 ratios"),
        (["--vram", "6,6", "-sm", "both"], "invalid choice: 'both'"),
        (["--vram", "6,6", "--max-tp", "attn=1"], "--max-tp needs -sm tensor"),
        (["--vram", "6,6", "-sm", "tensor", "--max-tp", "attn"], "is not a number of ranks"),
        (["--vram", "6,6", "-sm", "tensor", "--max-tp", "attn=0"], "is not a number of ranks"),
        (["--vram", "6,6", "-sm", "tensor", "--max-tp", "attn=-1"], "is not a number of ranks"),
        (["--vram", "6,6", "-sm", "tensor", "--max-tp", "expert=1"], "delta, conv, ffn, shared, experts, head"),
        (["--vram", "6,6", "-sm", "tensor", "--max-tp", "ffn=1,ffn=2"], "names ffn twice"),
        (["--vram", "6", "-c", "4096"], "model's context of 512"),
        (["--vram", "6", "-c", "100", "--prompt", "100"], "do not fit the context"),
        (["--vram", "6", "-np", "9", "-ub", "8"], "-ub 8"),
        (["--vram", "6", "--strategy", "other"], "unknown strategy 'other'"),
        (
            ["--vram", "6", "--strategy", "cpu-moe"],
            "'cpu-moe' places routed experts, and tiny has none; choose from fit",
        ),
        (["--vram", "6", "--time-limit", "0"], "is not a number of seconds"),
        (["--vram", "6", "-ctk", "q5_0"], "invalid choice: 'q5_0'"),
    ],
)
def test_bad_plan_flags(world: World, refuse: Refuse, flags: list[str], words: str) -> None:
    assert words in refuse("plan", "-m", world.model, *flags)
    assert not world.registry.exists()


@pytest.mark.parametrize("command", ["plan", "run", "bench"])
def test_heads_that_no_block_divides(tmp_path: Path, refuse: Refuse, command: str) -> None:
    world = make_world(tmp_path, head_dim=48, n_layers=1)
    more = ["-p", "hi", "-n", "1"] if command == "run" else []
    said = refuse(command, "-m", world.model, "--vram", "6", "-ctk", "q8_0", "-ctv", "q4_0", *more)
    assert "heads have 48 numbers; give -ctk bf16" in said
    assert not world.registry.exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "-p TEXT or -f FILE"),
        (["-p", "hi", "-f", "x"], "-p and -f exclude each other"),
        (["-f", "no/such/file"], "cannot read the prompt file no/such/file: No such file or directory; give a text"),
        (["-p", ""], "there is no prompt"),
        (["-p", "hi", "-n", "0"], "is not a whole number of 1 or more"),
        (["-p", "a\udcff"], "-p is not UTF-8"),
        (["-p", "a\udcff", "--chat"], "-p is not UTF-8"),
        (["-p", "1,x", "--tokens"], "list of token ids"),
        (["-p", "9" * 5000, "--tokens"], "list of token ids"),
        (["-p", "1,258", "--tokens", "-n", "1"], "token ids must be in 0..257"),
        (["-p", "-1", "--tokens", "-n", "1"], "token ids must be in 0..257"),
        (["-p", "1", "--tokens", "--chat"], "exclude each other"),
        (["-p", "hi", "--chat", "--no-parse-special"], "leave out --no-parse-special: --chat never"),
        (["-p", "1", "--tokens", "--no-parse-special"], "leave out --no-parse-special: --tokens takes ids"),
        (["-p", "hi", "--temp", "-1"], "--temp is -1"),
        (["-p", "hi", "--temp", "nan"], "--temp is nan"),
        (["-p", "hi", "--top-k", "-1"], "--top-k is -1"),
        (["-p", "hi", "--top-p", "0"], "--top-p is 0"),
        (["-p", "hi", "--min-p", "2"], "--min-p is 2"),
        (["-p", "hi", "-s", "-2"], "--seed is -2"),
        (["-p", "hi", "-s", "99999999999999999999"], "--seed is 99999999999999999999"),
        (["-p", "hi", "-ts", "1,1"], "-ts needs -sm tensor"),
        (["-p", "hi", "--vram", "3,3"], "add -sm tensor"),
        (["-p", "hi", "--vram", "3,3", "-sm", "tensor", "-ts", "1,1,1"], "3 ratios"),
        (["-p", "hi", "--vram", "3", "--max-tp", "attn=1"], "--max-tp needs -sm tensor"),
        (["-p", "hi", "--vram", "3,3", "-sm", "tensor", "--max-tp", "attn=x"], "is not a number of ranks"),
    ],
)
def test_bad_run_flags(planned: World, refuse: Refuse, flags: list[str], words: str) -> None:
    assert words in refuse("run", "-m", planned.model, *flags)


def test_prompt_longer_than_the_model_s_context(planned: World, refuse: Refuse) -> None:
    line = refuse("run", "-m", planned.model, "--vram", 6, "-p", "a" * 600, "-n", 20)
    assert "the prompt has 600 tokens, and the model's context is 512; give a shorter one" in line
    file = planned.model.with_name("long.txt")
    file.write_text("a" * 600)
    assert f"the prompt file {file} has 600 tokens" in refuse("run", "-m", planned.model, "-f", file)
    line = refuse("run", "-m", planned.model, "--vram", 6, "-p", "a" * 500, "-n", 120)
    assert "620 tokens of context are more than the model's 512; give a smaller -c or -n" in line
    line = refuse("bench", "-m", planned.model, "--vram", 6, "-p", 600)
    assert "600 tokens of context are more than the model's 512; give a smaller -c, -n, -p or -d" in line


def test_prompt_longer_than_the_context_that_was_asked_for(planned: World, refuse: Refuse) -> None:
    line = refuse("run", "-m", planned.model, "--vram", 6, "-c", 100, "-p", "a" * 200)
    assert "the prompt has 200 tokens, more than -c 100; give a larger -c or less text" in line


def test_text_for_a_model_without_tokenizer(world: World, refuse: Refuse) -> None:
    write_gguf(world.model)
    assert "no tokenizer" in refuse("run", "-m", world.model, "--vram", 6, "-p", "hi")


def test_chat_with_a_model_without_template(world: World, refuse: Refuse) -> None:
    write_gguf(world.model, vocab=258, metadata=tokenizer_metadata() | {"tokenizer.chat_template": None})
    assert "no chat template" in refuse("run", "-m", world.model, "--vram", 6, "-p", "hi", "--chat")


@pytest.mark.parametrize(("content", "words"), [(None, "No such"), (b"\xff\xfe\xfd", "cannot read"), (b"a", "two")])
def test_bad_perplexity_text(planned: World, refuse: Refuse, tmp_path: Path, content: bytes | None, words: str) -> None:
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    assert words in refuse("bench", "-m", planned.model, "--vram", 6, "--perplexity", text)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"not json", "not JSON at line 1"),
        (b"\x89PNG\r\n\x1a\n\xff", "is not a JSON text"),
        (b"{}", "holds no measurement, plan, profile or timeline"),
        (b"[" * 100000, "nested too deeply"),
        (b'{"samples_ts": [], "strategy": 1}', "broken"),
    ],
)
def test_report_of_other_files(refuse: Refuse, tmp_path: Path, content: bytes | None, words: str) -> None:
    given, out = tmp_path / "given.json", tmp_path / "report"
    if content is not None:
        given.write_bytes(content)
    assert words in refuse("report", given, "-o", out)
    assert not out.exists()


def test_report_with_another_model_than_the_planned_one(planned: World, refuse: Refuse, tmp_path: Path) -> None:
    other = write_gguf(tmp_path / "other.gguf", n_layers=1)
    assert "is not the model that was planned" in refuse("report", planned.registry, "-m", other, "-o", tmp_path / "r")


def test_profile_flags(refuse: Refuse) -> None:
    assert "is not a number of threads" in refuse("profile", "-t", "0")
    assert "give at most that many" in refuse("profile", "-t", "99999")
    assert "invalid choice: 'tpu'" in refuse("profile", "-dev", "tpu")


@pytest.mark.parametrize(
    ("name", "value", "command"),
    [("VRAM", "lots", "plan"), ("VRAM", "lots", "run"), ("CTX_SIZE", "-1", "plan"), ("CTX_SIZE", "-1", "bench")],
)
def test_bad_environment_variable_is_named(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch, name: str, value: str, command: str
) -> None:
    monkeypatch.setenv(f"PSHARD_{name}", value)
    assert f"environment variable PSHARD_{name}: " in refuse(command, "-m", "x")


# The installed commands, as a shell sees them


def shell(*words: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", *map(str, words)], capture_output=True, text=True, timeout=120)


def test_errors_of_processes(world: World) -> None:
    world.model.write_bytes(b"GGUF")
    done = shell("pshard.commands.cli_plan", "-m", world.model, "--vram", 6)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {world.model}: ends inside its header") and done.stderr.count("\n") == 1
    done = shell("pshard.commands.cli_report", world.model)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.mark.slow
def test_ranks_that_fail_alike_say_it_once(planned: World) -> None:
    flags = ["-m", str(planned.model), "--vram", "3,3", "-sm", "tensor", "-p", "8", "-n", "0"]
    done = run_warm([sys.executable, "-m", "pshard.commands.cli_bench", *flags])
    assert (done.returncode, done.stdout) == (2, "")
    assert "no plan fits 3,3 MiB" in done.stderr and done.stderr.count("\n") == 1


def test_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    world = make_world(tmp_path, n_layers=1)
    command = f"{sys.executable} -m pshard.commands.cli_plan -m {world.model} --vram 2 -c 128 --json | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("{") and "Traceback" not in done.stderr
    assert json.loads(world.registry.read_text())["sets"][0]["model"] == "tiny"


def test_a_short_flag_is_not_taken_for_a_longer_one(capsys: pytest.CaptureFixture[str]) -> None:
    from pshard.commands import cli_run

    assert cli_run.main(["-t", "2", "-p", "hi"]) == 2
    assert "-t: the profile knows how many threads" in capsys.readouterr().err


def test_a_model_that_loses_its_tokenizer_meanwhile_is_told(
    planned: World, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("pshard.runtime.build_engine._tokenizer", lambda file: None)
        line = refuse("run", "-m", planned.model, "-p", "hello", "-n", 4)
    assert "the model file has no tokenizer, which its prompt was read with: start again" in line


@pytest.mark.parametrize("command", ["run", pytest.param("chat", marks=pytest.mark.slow)])
def test_closed_standard_input_holds_nothing(planned: World, command: str) -> None:
    words = ["-m", "pshard.commands.program.one_program", command, str(planned.model), "-n", "2"]
    done = subprocess.run(
        ["bash", "-c", '"$@" <&-', "bash", sys.executable, *words], capture_output=True, text=True, timeout=120
    )
    assert "Traceback" not in done.stderr
    if command == "run":
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: there is no prompt") and done.stderr.count("\n") == 1
    else:  # as one whose standard input is empty
        assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        (["plan", "--vram", "6", "--json", "--strategy", "ffn-stream"], ""),  # as no search is needed to fail
        (["models", "--json"], "1"),
        pytest.param(["run", "-p", "a", "-n", "2", "--temp", "0"], "", marks=pytest.mark.slow),
    ],
)
def test_output_that_cannot_be_written_is_one_line(
    planned: World, tmp_path: Path, words: list[str], unbuffered: str
) -> None:
    model = [str(planned.model.parent if words[0] == "models" else planned.model)]
    command = [sys.executable, "-m", "pshard.commands.program.one_program", words[0], *model, *words[1:]]
    start = WarmProcess if words[0] == "run" else subprocess.Popen  # ones that end as Python ends
    with open("/dev/full", "w") as full, open(tmp_path / "said", "w+") as said:
        run = start(command, env=os.environ | {"PYTHONUNBUFFERED": unbuffered}, stdout=full, stderr=said)
        code = run.wait(120)
        said.seek(0)
        told = said.read()
    assert code == 2 and "Traceback" not in told
    last = told.splitlines()[-1]
    assert last.startswith("error: cannot write ") and last.endswith(": No space left on device; free some space")


def test_a_stream_that_is_closed_gives_its_number_to_no_file(tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom pshard.commands.command_line import run_cli\n"
        "def main(argv):\n    print('lost')\n"
        f"    return 5 if os.open({str(tmp_path / 'new')!r}, os.O_CREAT) > 2 else 6\n"
        "sys.exit(run_cli(main, []))"
    )
    command = ["bash", "-c", '"$@" <&- >&- 2>&-', "bash", sys.executable, "-c", program]
    assert subprocess.run(command, timeout=60).returncode == 5


@pytest.mark.quick("True")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to a full disk")
@pytest.mark.parametrize("asked", [False, True])
def test_a_measurement_that_cannot_be_printed_is_kept(planned: World, tmp_path: Path, asked: bool) -> None:
    own = tmp_path / "own.json"
    words = ["-m", planned.model, "--vram", planned.budget, "-p", 8, "-n", 0, "-r", 1, "-o", "json"]
    words += ["-of", own] if asked else []
    command = [sys.executable, "-m", "pshard.commands.cli_bench", *map(str, words)]
    with open("/dev/full", "w") as full, open(tmp_path / "said", "w+") as said:
        start = WarmProcess if asked else subprocess.Popen  # one that ends as Python ends
        assert start(command, stdout=full, stderr=said).wait(120) == 2
        said.seek(0)
        told = said.read()
    assert "Traceback" not in told and "Exception ignored" not in told
    line = told.splitlines()[-1]
    found = re.search(r"cannot write to standard output: No space left on device; what was measured is in (.*)", line)
    assert found and json.loads(Path(found[1]).read_text())[0]["test"] == "pp8"
    assert (Path(found[1]) == own) == asked


def test_an_error_after_half_an_answer_begins_its_own_line(capsys: pytest.CaptureFixture[str]) -> None:
    def break_off(count: int):
        yield from range(count)
        raise ValueError("a rank is gone")

    for count, expected in ((2, "0 1 \n"), (0, "")):
        with pytest.raises(ValueError, match="gone"):
            for token in cli_run._end_line(break_off(count)):
                print(token, end=" ", flush=True)
        assert capsys.readouterr().out == expected
