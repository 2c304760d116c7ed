"""A model file that is cut short, or written to, while it is read is one line: no bus error, no other numbers."""

import os
from pathlib import Path

import numpy as np
import pytest
from engines import make_variant, open_engine, pinned_everywhere
from model_files import write_gguf, write_hf_folder

from pshard.errors import UserError
from pshard.models import open_model
from pshard.models.stored import MappedFile
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.kernels.cpu import native
from pshard.runtime.memory.kv_store import fingerprint_model

CHANGED = "was cut short or written to while it was read; start again when the file is whole"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf", n_layers=2, vocab=512, d_model=256, d_ffn=512)


def spoil(path: Path, how: str) -> None:
    if how == "rewritten":  # as cp does it: the same bytes, but nobody knows that
        data = path.read_bytes()
        os.truncate(path, 0)
        path.write_bytes(data)
        os.utime(path, ns=(0, 0))
    else:
        os.truncate(path, 0 if how == "emptied" else path.stat().st_size // 2)


@pytest.mark.parametrize("how", ["halved", "emptied", "rewritten"])
@pytest.mark.parametrize("unit", [1, 3])
def test_a_file_that_changes_while_it_loads_is_told(path: Path, how: str, unit: int) -> None:
    seen = []

    def progress(_: int) -> None:
        seen.append(1)
        if len(seen) == unit:
            spoil(path, how)

    with open_model(path) as file:
        variant = make_variant(file.spec, pinned_everywhere(file.spec), 128, 1)
        with pytest.raises(UserError, match=CHANGED):
            build_engine(file, variant, open_device("cpu"), kernels="plain", progress=progress)


@pytest.mark.parametrize(
    ("kind", "how"), [("file", "halved"), ("file", "emptied"), ("file", "rewritten"), ("folder", "halved")]
)
def test_a_file_that_changes_before_it_is_read_is_told(path: Path, tmp_path: Path, kind: str, how: str) -> None:
    if kind == "folder":
        write_hf_folder(tmp_path)
        path = tmp_path / "model.safetensors"
    with open_model(tmp_path if kind == "folder" else path) as file:
        spoil(path, how)
        with pytest.raises(UserError, match=CHANGED):
            fingerprint_model(file)


@pytest.mark.skipif(not native.is_available(), reason="guards mappings")
def test_what_is_gone_of_a_mapped_file_reads_as_zeros(path: Path) -> None:
    file = MappedFile(path, "")
    file.map(native.guard_map, native.unguard_map)
    raw, half = file.view(0, file.nbytes), file.nbytes // 2
    whole = raw.copy()
    os.truncate(path, half)
    assert np.array_equal(raw[:half], whole[:half]) and not raw[half:].any() and whole[half:].any()
    with pytest.raises(UserError, match=CHANGED):
        file.forget(0, half)


def test_a_file_that_is_replaced_or_removed_stays_what_was_opened(path: Path, tmp_path: Path) -> None:
    with open_engine(path) as engine:
        expected = engine.forward([5, 77])
    with open_model(path) as file:
        os.replace(write_gguf(tmp_path / "other.gguf", seed=2), path)
        variant = make_variant(file.spec, pinned_everywhere(file.spec), 128, 1)
        with build_engine(file, variant, open_device("cpu"), kernels="plain") as engine:
            assert engine.forward([5, 77]).equal(expected)
        path.unlink()
        fingerprint_model(file)


def test_a_header_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"x.words": [f"word {i}" * (i % 7) for i in range(3000)], "x.numbers": list(range(5000)), "x.last": "end"}
    path = write_gguf(tmp_path / "m.gguf", metadata=words)
    with open_model(path) as at_once:
        monkeypatch.setattr("pshard.models.gguf_header._FIRST_READ", 7)
        with open_model(path) as in_pieces:
            assert in_pieces.metadata == at_once.metadata and in_pieces.metadata["x.words"] == words["x.words"]
            assert in_pieces.spec == at_once.spec
