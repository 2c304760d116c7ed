"""Packed files: the bits of the model's own file without packing, and none that is stale, foreign, damaged or half
written."""

import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cli_world import World, make_world
from engines import converse
from hybrid_files import random_hybrid, write_hybrid_gguf
from model_files import write_gguf
from plan_samples import make_variant, with_workload
from test_disk import on_disk
from test_experts_on_disk import plan_by_hand
from warm_python import WarmProcess

import pshard
from pshard.commands.everyday.cli_models import main as models
from pshard.commands.everyday.cli_pack import main as pack
from pshard.commands.everyday.cli_rm import main as rm
from pshard.errors import StepFailed, UserError
from pshard.models import ModelFile, open_model
from pshard.on_disk import BLOCK, lies_as_used, may_move
from pshard.packed_file import describe_contents, find_packed, packed_place
from pshard.plan import Variant
from pshard.planner.price import host_limits
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.kernels.cpu import native
from pshard.session.packed_models import pack_model

FAST = "fake:rate=20G,jitter=1ms"  # pieces arrive in random order


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PSHARD_DISK", FAST)
    monkeypatch.setenv("PSHARD_CACHE", str(tmp_path / "cache"))


def plan_far(file: ModelFile) -> Variant:
    """All that may live on disk there."""
    variant = make_variant(file.spec, on_disk(file.spec), 256, 1)
    return with_workload(variant, type_k="f32", type_v="f32")


def plan_in_slots(file: ModelFile) -> Variant:
    return plan_by_hand(file.spec, 9)


def speak(path: Path, folder: Path | None, plan=plan_far, gone: bool = False) -> torch.Tensor:
    """Logits of a model on disk, of its packed file in a folder. gone: nothing of the model's own is left by then."""
    with open_model(path) as file:
        if folder:
            file.packed, why = find_packed(file, folder)
            assert file.packed and not why
        with build_engine(file, plan(file), open_device("cpu"), kernels="plain") as engine:
            if gone:
                os.truncate(path, 0)
            return converse(engine)


def list_files(folder: Path) -> list[Path]:
    """All but locks, which stay."""
    return [one for one in folder.iterdir() if one.suffix != ".lock"]


def pack_quietly(path: Path, folder: Path) -> Path:
    with open_model(path) as file:
        return pack_model(file, folder, lambda _: None)


@pytest.mark.quick("llama-shape0-plan_far")
@pytest.mark.parametrize(
    ("arch", "shape", "plan"),
    [
        ("llama", {"qtype": "Q4_0", "qtypes": {"ffn_down.weight": "Q6_K", "attn_k.weight": "BF16"}}, plan_far),
        ("llama", {"qtype": "NVFP4"}, plan_far),
        ("qwen3moe", {"qtype": "Q8_0"}, plan_in_slots),
        ("gpt-oss", {"qtype": "F32", "qtypes": {"ffn_up_exps.weight": "MXFP4"}}, plan_far),
    ],
)
def test_logits_are_those_of_the_models_own_file_which_is_not_read(
    arch: str, shape: dict, plan, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", arch, **shape)
    right = speak(path, None, plan)
    place = pack_quietly(path, tmp_path / "kept")
    assert list_files(tmp_path / "kept") == [place]
    assert torch.equal(speak(path, tmp_path / "kept", plan, gone=True), right)


def test_what_the_file_does_not_hold_as_it_is_used_is_left_out(tmp_path: Path) -> None:
    """Rows of queries that lie between those of their gates."""
    path = write_hybrid_gguf(tmp_path / "m.gguf", "dense", random_hybrid("dense"))
    with open_model(path) as file:
        names = {tensor.name for tensor in describe_contents(file).tensors}
        lying = {t.name for u in file.spec.units if may_move(u) and lies_as_used(file, u) for t in u.matrices}
    assert names == lying and "blk.3.ffn_up.weight" in names and "blk.3.attn_q.weight" not in names


def test_an_experts_matrices_lie_side_by_side_and_pieces_begin_at_blocks(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q8_0")
    with open_model(path) as file:
        contents = describe_contents(file)
        unit = next(u for u in file.spec.units if u.kind.parts)
    stacks = [t for t in contents.tensors if t.name in {m.name for m in unit.matrices}]
    runs = [[place for t in stacks for place in t.list_pieces(part)] for part in range(stacks[0].parts)]
    for one, following in pairwise(runs):
        assert max(at + nbytes for at, nbytes, _ in one) <= min(at for at, _, _ in following) < one[0][0] + 2**20
    everything = sorted(p for t in contents.tensors for part in range(t.parts) for p in t.list_pieces(part))
    assert all(at % BLOCK == 0 for at, _, _ in everything)
    assert all(0 <= then - at - nbytes < BLOCK for (at, nbytes, _), (then, _, _) in pairwise(everything))
    assert sorted(number for *_, number in everything) == list(range(contents.pieces))


def test_a_byte_that_changed_is_found_and_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", qtype="Q4_0")
    right, place = speak(path, None), pack_quietly(path, tmp_path)
    data = bytearray(place.read_bytes())
    with open_model(path) as file:
        (at, nbytes, _), *_ = describe_contents(file).tensors[3].list_pieces(0)
    for wrong in (at, at + nbytes - 1):
        changed = bytearray(data)
        changed[wrong] ^= 16
        place.write_bytes(changed)
        with pytest.raises(StepFailed, match=rf"packed at byte {at}: its bytes are not those that were packed"):
            speak(path, tmp_path)
    place.write_bytes(data)
    assert torch.equal(speak(path, tmp_path), right)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 63, 4097])
def test_the_processors_checksum_is_that_of_tables(nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes + 8, np.uint8)
    for start in range(8):
        address = data.ctypes.data + start
        assert native.crc32c(address, nbytes) == native.crc32c(address, nbytes, plain=True)


def test_the_checksum_is_castagnolis() -> None:
    """The check value of the published catalogue of checksums, and of RFC 3720's zeros and ones."""
    for data, right in ((b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)):
        assert native.crc32c(np.frombuffer(data, np.uint8).ctypes.data, len(data)) == right


def spoil_time(path: Path, place: Path) -> None:
    os.utime(path, ns=(1, 1))


def spoil_bytes(path: Path, place: Path) -> None:
    """As a copy that keeps size and time."""
    before = path.stat()
    data = np.fromfile(path, np.uint8)
    data[len(data) // 2 :] ^= 1
    path.write_bytes(data.tobytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def spoil_by_another(path: Path, place: Path) -> None:
    other = write_gguf(path.with_name("other.gguf"), qtype="Q4_0", d_ffn=512)
    shutil.move(pack_quietly(other, place.parent), place)


def cut_off(path: Path, place: Path) -> None:
    os.truncate(place, place.stat().st_size - 1)


def lose_the_head(path: Path, place: Path) -> None:
    """What is written last is not there."""
    place.write_bytes(bytes(BLOCK) + place.read_bytes()[BLOCK:])


def damage_the_end(path: Path, place: Path) -> None:
    data = bytearray(place.read_bytes())
    data[-3] ^= 1
    place.write_bytes(data)


@pytest.mark.quick(
    "cut_off-cut, or half written",
    "damage_the_end-it is damaged",
    "spoil_time-another than the one that was packed",
    "lose_the_head-no packed file, or half written",
)
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (spoil_time, "another than the one that was packed"),
        (spoil_bytes, "another than the one that was packed"),
        (spoil_by_another, "another than the one that was packed"),
        (cut_off, "cut, or half written"),
        (lose_the_head, "no packed file, or half written"),
        (damage_the_end, "it is damaged"),
    ],
)
def test_one_that_is_not_right_is_not_used_and_written_anew(spoil, why: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", qtype="Q4_0")
    place = pack_quietly(path, tmp_path)
    spoil(path, place)
    with open_model(path) as file:
        found, said = find_packed(file, tmp_path)
        assert found is None and str(place) in said and why in said
    assert pack_quietly(path, tmp_path) == place
    fresh = tmp_path / "fresh"
    assert place.read_bytes() == pack_quietly(path, fresh).read_bytes()
    with open_model(path) as file:
        again, said = find_packed(file, tmp_path)
        assert again and not said


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    path = write_gguf(tmp_path / "m.gguf", qtype="Q4_0")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    assert pack([str(path), "--disk-cache", str(tmp_path / "kept")]) == 2
    said = capfd.readouterr().err.strip()
    assert said.startswith(f"error: {tmp_path / 'kept'} has 0.0 GiB free") and "\n" not in said
    assert not list_files(tmp_path / "kept")


@pytest.mark.parametrize("how", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupt_and_a_full_disk_leave_nothing(
    how: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    path = write_gguf(tmp_path / "m.gguf", qtype="Q4_0")

    def write(*_: object) -> None:
        raise how

    monkeypatch.setattr("pshard.runtime.memory.disk.write_packed._Output.write", write)
    code = pack([str(path), "--disk-cache", str(tmp_path / "kept")])
    said = capfd.readouterr().err.strip().splitlines()[-1]
    assert (code, said == "interrupted") in ((130, True), (2, False))
    assert code == 130 or ("cannot be written: No space left on device; free some space" in said)
    assert not list_files(tmp_path / "kept")


def test_a_model_that_cannot_be_read_ends_packing_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    path = write_gguf(tmp_path / "m.gguf", qtype="Q4_0")
    monkeypatch.setenv("PSHARD_DISK", f"{FAST},fault=dead@3")
    assert pack([str(path), "--disk-cache", str(tmp_path / "kept")]) == 2
    assert "cannot be packed" in capfd.readouterr().err
    assert not list_files(tmp_path / "kept")


@pytest.mark.slow
def test_two_processes_at_once_write_one_file(tmp_path: Path) -> None:
    """One waits for the other; what a writer left that was killed is gone then."""
    path, kept = write_gguf(tmp_path / "m.gguf", qtype="Q4_0"), tmp_path / "kept"
    kept.mkdir()
    with open_model(path) as file:
        place = packed_place(file, kept)
    (kept / f".{place.name}.x1.tmp").write_bytes(b"half")
    words = [sys.executable, "-P", "-m", "pshard.commands.everyday.cli_pack", str(path), "--disk-cache", str(kept)]
    env = os.environ | {"PSHARD_DISK": "fake:rate=1M"}
    both = [WarmProcess(words, env, stderr=subprocess.PIPE) for _ in range(2)]
    assert [one.wait(60) for one in both] == [0, 0]
    assert sum(b"packing" in one.stderr.read() for one in both if one.stderr) == 1
    assert list_files(kept) == [place]
    assert torch.equal(speak(path, None), speak(path, kept))


@pytest.fixture(name="world")
def _world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A model of 14 MiB, and a process that takes 4 MiB."""
    monkeypatch.setattr(host_limits, "PROCESS", {"cpu": 4 << 20, "cuda": 4 << 20})
    return make_world(tmp_path, n_layers=6)


def test_a_run_with_a_folder_for_it_packs_once_and_reads_from_there(world: World, tmp_path: Path, capfd) -> None:
    found = []
    for more in ({}, {"disk_cache": tmp_path / "kept"}, {"disk_cache": tmp_path / "kept"}):
        with pshard.load(
            world.model, ram=20, context=128, type_k="f32", type_v="f32", kernels="plain", **more
        ) as engine:
            assert engine.rank_plan.beyond_host
            found.append(engine.forward([1, 2, 3]))
    said = capfd.readouterr().err
    assert said.count("packing tiny into") == 1
    assert said.count(" brings ") == 2 and said.count(", packed brings ") == 1  # what it brings without packing
    assert all(torch.equal(found[0], one) for one in found)


def test_models_lists_packed_files_and_removes_them(world: World, tmp_path: Path, capfd) -> None:
    place = pack_quietly(world.model, tmp_path / "cache" / "packed")
    left = place.with_name(f".{place.name}.x.tmp")
    left.write_bytes(b"half")
    assert models([str(world.model.parent)]) == 0
    said = capfd.readouterr().out
    assert place.name in said and str(world.model) in said and "left by a process" in said
    assert models(["--unpack", str(world.model)]) == 0
    assert f"deleted {place}" in capfd.readouterr().err
    assert not place.exists() and left.exists()
    assert models(["--unpack", "all"]) == 0 and not left.exists()
    assert models(["--unpack", str(world.model)]) == 2
    assert "has no packed file of" in capfd.readouterr().err


def test_rm_leaves_files_elsewhere_alone(world: World) -> None:
    place = pack_quietly(world.model, world.model.parent)
    assert rm([str(world.model), "-y"]) == 2
    assert place.exists()


def test_what_cannot_be_used_from_disk_is_not_packed(tmp_path: Path, capfd) -> None:
    assert pack([str(tmp_path / "nothing.gguf")]) == 2
    assert "there is no such file" in capfd.readouterr().err
    with pytest.raises(UserError, match="cannot be written: File exists"):
        (tmp_path / "file").touch()
        pack_quietly(write_gguf(tmp_path / "m.gguf"), tmp_path / "file")
