"""What there is, and what is wrong: the lists of pshard models and pshard doctor."""

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_world import World, edit_json, make_world
from http_client import serve
from quick_service import QuickService
from small_service import demo_model

from pshard.commands import cli_plan
from pshard.commands.program import one_program
from pshard.server.http.guards import Door
from pshard.server.routes.make_app import make_app
from pshard.session.readiness import diagnose
from pshard.session.readiness.name_reinstall import name_reinstall


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return make_world(tmp_path)


def list_json(capsys: pytest.CaptureFixture, *folders: Path) -> list[dict]:
    capsys.readouterr()
    assert one_program.main(["models", "--json", *map(str, folders)]) == 0
    return json.loads(capsys.readouterr().out)


def test_models_are_listed_with_size_and_rates(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert list_json(capsys, empty) == []
    for part in ("big-00001-of-00002.gguf", "big-00002-of-00002.gguf"):
        (world.model.parent / part).write_bytes(b"x" * 100)
    whole = world.model.read_bytes()
    (world.model.parent / "other.gguf").write_bytes(whole)
    assert cli_plan.main(["-m", str(world.model), "--vram", "6", "-c", "128"]) == 0
    big, other, tiny = list_json(capsys, world.model.parent)
    assert tiny["nbytes"] == world.model.stat().st_size and tiny["name"] == str(world.model)
    (rate,) = tiny["plans"]
    assert rate["vram_mib"] == [6] and rate["context"] == 128 and rate["prompt"] > 0 < rate["decode"]
    assert big["nbytes"] == 200 and big["plans"] == other["plans"] == []
    assert [model["name"] for model in list_json(capsys, empty)] == [str(world.model)]  # it was planned before
    assert one_program.main(["models", str(world.model.parent)]) == 0
    said = capsys.readouterr().out
    assert "6 MiB, 128 tokens: " in said and "none; pshard plan makes one" in said
    assert " 200 B " in said and f" {len(whole) / 2**20:.4g} MiB " in said
    assert one_program.main(["models", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize(
    ("kept", "said"),
    [(0, "the file is empty"), (20, "truncated or damaged"), (-64, "truncated or damaged")],
    ids=("empty", "within its header", "within a tensor"),
)
def test_files_that_no_command_takes_are_listed_with_what_is_wrong(
    kept: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    whole = make_world(tmp_path).model
    whole.write_bytes(whole.read_bytes()[:kept])
    (model,) = list_json(capsys, whole.parent)
    assert said in model["problem"] and str(whole) not in model["problem"]


@pytest.mark.parametrize("given", ["", "org/repo:Q4_0", "models/tiny.gguf"])
def test_models_are_listed_without_a_folder_whatever_the_usual_model_is(
    given: str, world: World, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with a KeyError where PSHARD_MODEL was not set, and could not name a model of the Hub."""
    monkeypatch.chdir(tmp_path)
    if given:
        monkeypatch.setenv("PSHARD_MODEL", given)
    assert [model["name"] for model in list_json(capsys)] == [given] * ("tiny" in given)


def test_models_of_the_hub_s_cache_have_the_names_of_their_repositories(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    blob = tmp_path / "hub" / "models--org--some-model" / "blobs" / "abc"
    snapshot = blob.parents[1] / "snapshots" / "123"
    folder = tmp_path / "hub" / "models--org--folder" / "snapshots" / "1"
    for path in (blob.parent, snapshot, folder):
        path.mkdir(parents=True)
    blob.write_bytes(b"x" * 300)
    (snapshot / "m-Q4_0.gguf").symlink_to(os.path.relpath(blob, snapshot))
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x" * 50)
    found = {model["name"]: model["nbytes"] for model in list_json(capsys, empty)}
    assert found == {"org/folder": 50, "org/some-model:m-Q4_0.gguf": 300}


def cached_model(hub: Path, repo: str, *files: str) -> Path:
    """Files of a repository in the Hub's cache, as links to blobs; the snapshot's folder."""
    snapshot = hub / f"models--{repo.replace('/', '--')}" / "snapshots" / "1"
    blobs = snapshot.parents[1] / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for file in files:
        (blobs / f"of-{file}").write_bytes(b"x" * 100)
        (snapshot / file).symlink_to(os.path.relpath(blobs / f"of-{file}", snapshot))
    return snapshot


def test_a_fetched_model_is_deleted_with_its_bytes_alone(world: World, tmp_path, capsys, monkeypatch) -> None:
    snapshot = cached_model(tmp_path / "hub", "org/some", "m-Q4_0.gguf", "m-Q8_0.gguf", "README.md")
    remove = ["rm", "org/some:q4_0"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert one_program.main(remove) == 2 and "add -y" in capsys.readouterr().err  # nobody was asked
    assert one_program.main(["rm", "org/some", "-y"]) == 2 and "m-Q4_0.gguf, org/some:m-Q8_0" in capsys.readouterr().err
    assert one_program.main(["rm", str(world.model), "-y"]) == 2 and world.model.exists()
    assert one_program.main(["rm", "org/other", "-y"]) == 2
    assert one_program.main([*remove, "-y"]) == 0
    blobs = snapshot.parents[1] / "blobs"
    assert sorted(file.name for file in blobs.iterdir()) == ["of-README.md", "of-m-Q8_0.gguf"]
    assert one_program.main(["rm", "org/some", "-y"]) == 0 and not snapshot.parents[1].exists()


def test_servers_say_what_they_hold(capsys: pytest.CaptureFixture) -> None:
    with serve(make_app(QuickService(), demo_model(), door=Door(keys=("k",)))) as url:
        assert one_program.main(["ps", url]) == 2 and "--api-key" in capsys.readouterr().err
        assert one_program.main(["ps", url, "--api-key", "k"]) == 0
        told = capsys.readouterr().out
        assert all(word in told for word in ("demo", "ready", "64", "512", "0 of 4"))
        assert one_program.main(["ps", url, "--api-key", "k", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[0]["vram_mib"] == [64]
    assert one_program.main(["ps", url]) == 2 and "no pshard serve answers" in capsys.readouterr().err
    assert one_program.main(["ps", "nonsense"]) == 2


def test_a_registry_that_cannot_be_read_is_said_beside_its_model(world: World, capsys: pytest.CaptureFixture) -> None:
    world.registry.write_text("{")
    (model,) = list_json(capsys, world.model.parent)
    assert "is corrupt" in model["problem"]


def test_the_doctor_looks_at_everything_and_says_what_to_do(world: World, capsys: pytest.CaptureFixture) -> None:
    one_program.main(["doctor"])
    said = capsys.readouterr().out
    for what in ("CPU kernels", "GPU", "page-locking", "limits", "NUMA", "free memory", "profile"):
        assert f" {what}: " in said
    assert "could not be looked at" not in said and "days old" in said


def test_the_doctor_tells_programs_what_it_tells_people(world: World, capsys: pytest.CaptureFixture) -> None:
    assert one_program.main(["doctor"]) == 0
    people = capsys.readouterr().out
    assert one_program.main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["version"].startswith("pshard") and not told["wrong"]
    assert {found["state"] for found in told["found"]} <= {"ok", "note", "wrong"}
    assert all(found["what"] in people for found in told["found"])
    world.profile.write_text("{")
    assert one_program.main(["doctor", "--json"]) == 1 and json.loads(capsys.readouterr().out)["wrong"]
    assert one_program.main(["doctor", "--json", "--gpu"]) == 2


def test_help_of_models_names_the_folders(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        one_program.main(["models", "--help"])
    assert capsys.readouterr().out.startswith("usage: pshard models [FOLDER...] [flags]")


def test_a_profile_of_another_machine_is_wrong(world: World, capsys: pytest.CaptureFixture) -> None:
    edit_json(world.profile, "host", "cpu", value="another")
    assert one_program.main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert (
        "WRONG profile: the machine profile is of another machine: cpu: another" in said and "-> pshard profile" in said
    )


def test_missing_kernels_are_wrong_and_the_remedy_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pshard.runtime.kernels.cpu.native.is_available", lambda: False)
    monkeypatch.setattr("pshard.session.readiness.diagnose.shutil.which", lambda name: None)
    found = next(iter(diagnose.diagnose()))
    assert found.state == "wrong" and "install a C++20 compiler" in found.remedy
    assert found.remedy.endswith(name_reinstall()) and "ten times slower" in found.says


@pytest.mark.parametrize(
    ("prefix", "source", "command"),
    [
        ("env", {"url": "file:///src/my%20clone", "dir_info": {}}, "pip install --force-reinstall --no-deps "),
        ("env", {"url": "file:///src/clone", "dir_info": {"editable": True}}, "pip install --force-reinstall "),
        ("pipx/venvs/pshard", {}, "pipx reinstall pshard"),
        ("uv/tools/pshard", {"url": "file:///src/pshard.whl"}, "uv tool install --reinstall /src/pshard.whl"),
        ("uv/tools/pshard", {}, "uv tool install --reinstall pshard"),
        ("clone/.venv", {}, "bash "),
    ],
)
def test_pshard_is_installed_again_the_way_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, source: dict, command: str
) -> None:
    package = SimpleNamespace(read_text=lambda name: json.dumps(source) if source else None)
    monkeypatch.setattr("pshard.session.readiness.name_reinstall.distribution", lambda name: package)
    place = tmp_path / prefix
    place.mkdir(parents=True)
    if prefix == "clone/.venv":
        (place / ".installed").touch()
    said = name_reinstall(place)
    assert said.startswith(command)
    if prefix == "env":
        assert said.endswith("-e /src/clone" if source["dir_info"] else "--no-cache-dir '/src/my clone'")
    if prefix == "clone/.venv":
        assert said == f"bash {tmp_path}/clone/scripts/setup"


@pytest.mark.parametrize(("short", "said"), [(True, "it was made in seconds"), (False, "it is old")])
def test_short_and_old_profiles_are_noted(world: World, short: bool, said: str) -> None:
    edit_json(world.profile, "provenance", "short", value=short)
    found = list(diagnose.diagnose())[-1]
    assert found.state == "note" and said in found.says and "pshard profile" in found.remedy
