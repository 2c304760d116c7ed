"""Prefixes that outlive a process: whole or not at all, of the right tokens, within what they may take."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from engines import open_engine
from hybrid_files import VOCAB as HYBRID_VOCAB
from hybrid_files import random_hybrid, write_hybrid_gguf
from manual_clock import ManualClock
from model_files import write_gguf
from plan_samples import make_tier, make_variant, random_places, shrink_places
from test_text_pool import feed, some_ids
from thread_ranks import random_tiers, run_ranks
from toy_kinds import ToyFile

from pshard.errors import UserError
from pshard.models import open_model
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.texts import prefix_files
from pshard.runtime.texts.block_record import BlockRecord, encode_record
from pshard.runtime.texts.prefix_files import PrefixFiles

GIB, MIB = 1 << 30, 1 << 20
IDS = some_ids(200, 3)
IDS_OF_SEVEN_BLOCKS = some_ids(460, 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "m.gguf", "qwen3", qtype="Q8_0", n_layers=2)


def run_text(engine, ids: list[int], folder: Path, size: int = 64) -> tuple[int, np.ndarray]:
    """How many tokens of a text were known, and the logits after it, with blocks kept in files."""
    engine.texts.keep_in_files(folder, GIB, 4 * MIB)
    text = engine.texts.open(ids)
    cached, row = text.cached, feed(engine, text, ids, size, full=True)
    engine.texts.close(text)
    return cached, row.full


def make_record(number: int, nbytes: int = 1000) -> BlockRecord:
    return BlockRecord(bytes([number] * 32), bytes(32), (number,) * 64, {"cells": bytes([number]) * nbytes})


@pytest.mark.parametrize("kv_types", [("f32", "f32"), ("q8_0", "q4_0")])
def test_another_engine_finds_what_one_has_computed_wherever_either_has_its_cache(
    model: Path, tmp_path: Path, kv_types: tuple[str, str]
) -> None:
    rng = random.Random(1)
    with open_model(model) as file:
        spec = file.spec
    found = []
    for _ in range(3):
        places = random_places(spec, rng)
        tiers = ((2, places), (64, shrink_places(spec, places, rng)))
        made = tuple(make_tier(spec, n, p, 2, 512, 1) for n, p in tiers)
        with open_engine(model, made, context=512, kv_types=kv_types) as engine:
            found.append(run_text(engine, IDS, tmp_path / "cache"))
    assert [cached for cached, _ in found] == [0, 192, 192]
    for _, logits in found[1:]:
        np.testing.assert_allclose(logits, found[0][1], atol=1e-4)
    folder = next((tmp_path / "cache").iterdir())
    assert len(list(folder.iterdir())) == 3
    assert os.stat(folder).st_mode & 0o077 == 0  # they tell what was asked


def test_a_hybrid_finds_cells_and_states(tmp_path: Path) -> None:
    path = write_hybrid_gguf(tmp_path / "m.gguf", "dense", random_hybrid("dense"))
    ids, found = some_ids(150, 0)[:150], []
    ids = [i % HYBRID_VOCAB for i in ids]
    for _ in range(2):
        with open_engine(path, context=512, tokens=(1, 64), checkpoint_bytes=MIB) as engine:
            found.append(run_text(engine, ids, tmp_path / "cache"))
    assert [cached for cached, _ in found] == [0, 128]
    np.testing.assert_allclose(found[1][1], found[0][1], atol=1e-5)


def test_layers_with_a_window_find_its_cells(tmp_path: Path) -> None:
    file, found = ToyFile("wawa", context=512), []
    places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in file.spec.units}
    made = tuple(make_tier(file.spec, n, places, 1, 512, 1, batch=64) for n in (1, 64))
    for _ in range(2):
        with build_engine(file, make_variant(file.spec, made, 512, 1), open_device("cpu"), kernels="plain") as engine:
            found.append(run_text(engine, IDS, tmp_path / "cache"))
    assert [cached for cached, _ in found] == [0, 192]
    np.testing.assert_allclose(found[1][1], file.logits(IDS)[-1], atol=1e-4)


def test_ranks_take_up_what_all_of_them_find(model: Path, tmp_path: Path) -> None:
    def talk(engine) -> tuple[int, np.ndarray]:
        return run_text(engine, IDS, tmp_path / "cache", 16)

    def run() -> list[tuple[int, np.ndarray]]:
        return run_ranks(model, (1.0, 1.0), talk, 256, random_tiers(3, 256))

    first, second = run(), run()
    assert [cached for cached, _ in first + second] == [0, 0, 192, 192]
    folders = sorted((tmp_path / "cache").iterdir())
    assert len(folders) == 2
    files = sorted(folders[0].iterdir(), key=lambda path: path.stat().st_mtime)
    files[1].unlink()
    third = run()
    assert third[0][0] == third[1][0] and third[0][0] in (0, 64, 128)
    for _, logits in (*second, *third):
        np.testing.assert_allclose(logits, first[0][1], atol=1e-4)


@pytest.fixture(scope="module")
def written(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A folder with the blocks of a text, and the logits after it."""
    folder = tmp_path_factory.mktemp("written")
    with open_engine(model, context=512) as engine:
        return folder, run_text(engine, IDS, folder)[1]


def damage(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.mark.quick("other block", "body", "cut", "other tokens")
@pytest.mark.parametrize("what", ["body", "header", "cut", "empty", "other block", "other tokens", "version 1"])
def test_what_is_damaged_or_of_other_tokens_is_computed_again(
    model: Path, written: tuple[Path, np.ndarray], tmp_path: Path, what: str
) -> None:
    expected = written[1]
    shutil.copytree(written[0], tmp_path, dirs_exist_ok=True)
    paths = sorted(next(tmp_path.iterdir()).iterdir(), key=lambda path: path.stat().st_mtime)
    raw = paths[0].read_bytes()
    if what in ("body", "header"):
        damage(paths[0], -1 if what == "body" else 40)
    elif what == "version 1":  # as files were before texts and blocks had one format
        paths[0].write_bytes(b"pshardpc\1" + raw[9:])
    elif what == "other block":
        paths[0].write_bytes(paths[1].read_bytes())
    elif what == "other tokens":  # whole, and of that key all the same
        parts = {"cells": b"\0" * (len(raw) // 2)}
        paths[0].write_bytes(encode_record(BlockRecord(bytes.fromhex(paths[0].stem), bytes(32), (1,) * 64, parts)))
    else:
        paths[0].write_bytes(raw[: len(raw) // 2 if what == "cut" else 0])
    with open_engine(model, context=512) as engine:
        cached, logits = run_text(engine, IDS, tmp_path)
    assert cached == 0 and np.array_equal(logits, expected)
    assert paths[0].read_bytes() == raw  # written anew


def test_files_are_at_most_the_budget_and_those_used_longest_ago_go(tmp_path: Path) -> None:
    each = len(encode_record(make_record(1)))
    files = PrefixFiles(tmp_path, 4 * each + each // 2, 1 << 20)
    for number in (1, 2, 3, 4):
        files.put(make_record(number))
    files.close()
    for number, when in ((1, 3000), (2, 1000), (3, 1000), (4, 2000)):
        os.utime(tmp_path / f"{bytes([number] * 32).hex()}.block", (when, when))
    files = PrefixFiles(tmp_path, 4 * each + each // 2, 1 << 20)
    assert files.get(bytes([3] * 32)) == make_record(3)  # which uses it
    files.put(make_record(5))
    files.close()
    left = {int(path.name[:2], 16) for path in tmp_path.iterdir()}
    assert left == {1, 3, 4, 5}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4 * each + each // 2


def test_host_memory_is_bounded_and_what_is_not_written_yet_waits(tmp_path: Path) -> None:
    files = PrefixFiles(tmp_path, GIB, 5000)
    for number in range(1, 9):
        while not files.has_room(make_record(number).nbytes):
            time.sleep(0.001)
        files.put(make_record(number))
        assert files.nbytes <= 5000 + make_record(1).nbytes
    files.close()
    assert files.nbytes <= 5000 and len(list(tmp_path.iterdir())) == 8
    assert files.get(bytes([1] * 32)) == make_record(1)  # from its file


def test_the_end_waits_for_blocks_that_host_memory_has_no_room_for_yet(
    model: Path, tmp_path: Path, monkeypatch
) -> None:
    def write_late(path: Path, data: bytes) -> None:
        time.sleep(0.02)
        path.write_bytes(data)

    monkeypatch.setattr(prefix_files, "write_bytes_atomically", write_late)
    with open_engine(model, context=512, kv_types=("f32", "f32")) as engine:
        engine.texts.keep_in_files(tmp_path, GIB, 2 * sum(engine.texts._prefix_cache._copies.sizes.values()))
        text = engine.texts.open(IDS_OF_SEVEN_BLOCKS)
        feed(engine, text, IDS_OF_SEVEN_BLOCKS, 64)
        engine.texts.close(text)
        engine.texts.finish_files()
    assert len(list(tmp_path.rglob("*.block"))) == 7


def test_a_cache_that_holds_no_two_blocks_and_a_folder_that_is_a_file_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with open_engine(model, context=512) as engine:
        with pytest.raises(UserError, match="a block of this model takes"):
            engine.texts.keep_in_files(tmp_path, GIB, 1000)
        with pytest.raises(UserError, match="cannot keep the prefix cache"):
            engine.texts.keep_in_files(tmp_path / "file", GIB, MIB)


def test_a_disk_that_is_full_stops_nobody_and_is_told(model: Path, tmp_path: Path, monkeypatch) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prefix_files, "write_bytes_atomically", refuse)
    with open_engine(model, context=512) as engine:
        cached, logits = run_text(engine, IDS, tmp_path)
        engine.texts.keep_some(1.0)
        end = time.monotonic() + 60
        while engine.texts.files_problem is None:
            assert time.monotonic() < end
        assert "No space left" in engine.texts.files_problem == engine.texts.counts().files_problem
        again = engine.texts.open(IDS)
        assert np.array_equal(feed(engine, again, IDS, 64, full=True).full, logits)


def test_what_is_not_kept_leaves_no_file(model: Path, tmp_path: Path) -> None:
    with open_engine(model, context=512) as engine:
        engine.texts.keep_in_files(tmp_path, GIB, MIB)
        text = engine.texts.open(IDS)
        feed(engine, text, IDS, 64)
        while engine.texts.keep_some(1.0):
            pass
        assert engine.texts.counts().cache_bytes > 0
        engine.texts.close(text, keep=False)
        assert engine.texts.counts().cache_bytes == 0
    assert list(next(tmp_path.iterdir()).iterdir()) == []


WRITER = """
import sys
from pathlib import Path
from pshard.runtime.texts.block_record import BlockRecord
from pshard.runtime.texts.prefix_files import PrefixFiles
files = PrefixFiles(Path(sys.argv[1]), 1 << 30, 1 << 30)
for number in range(100000):
    key = number.to_bytes(32, "little")
    while not files.has_room(8 << 20):
        pass
    files.put(BlockRecord(key, bytes(32), (number,) * 64, {"cells": key * (1 << 15)}))
    if number == 20:
        print("writing", flush=True)
"""


def test_a_process_that_is_killed_while_it_writes_leaves_whole_blocks_only(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        end = time.monotonic() + 120
        while len(list(tmp_path.glob("*.block"))) < 5 or not list(tmp_path.glob(".*.tmp")):
            assert time.monotonic() < end
        process.send_signal(signal.SIGKILL)
    left = list(tmp_path.glob(".*.tmp"))
    for path in left:
        os.utime(path, (1000, 1000))
    paths = list(tmp_path.glob("*.block"))
    assert len(paths) >= 5
    files = PrefixFiles(tmp_path, GIB, 1 << 25)
    for path in paths:
        record = files.get(bytes.fromhex(path.stem))
        assert record is not None and record.parts["cells"] == record.key * (1 << 15)
    files.close()
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_prefix_is_read_from_files_for_as_long_as_it_may_take(model: Path, tmp_path: Path, monkeypatch) -> None:
    clock, get = ManualClock(), PrefixFiles.get

    def read_slowly(files, key):
        clock.sleep(1.0)
        return get(files, key)

    with open_engine(model, context=512, tokens=(1, 64)) as engine:
        _, wanted = run_text(engine, IDS_OF_SEVEN_BLOCKS, tmp_path)
    monkeypatch.setattr(PrefixFiles, "get", read_slowly)
    monkeypatch.setattr("pshard.runtime.texts.prefix_cache.time", clock)
    with open_engine(model, context=512, tokens=(1, 64)) as engine:
        engine.texts.keep_in_files(tmp_path, GIB, 4 * MIB)
        text = engine.texts.open(IDS_OF_SEVEN_BLOCKS, seconds=2.5)
        assert text.cached == 3 * 64 and clock.monotonic() == 3.0
        np.testing.assert_allclose(feed(engine, text, IDS_OF_SEVEN_BLOCKS, 64, full=True).full, wanted, atol=1e-4)
