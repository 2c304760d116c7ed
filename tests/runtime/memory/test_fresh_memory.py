"""Memory that threads fill with pages ahead of whoever writes there."""

import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_files import write_gguf

from pshard.models import open_model
from pshard.runtime.devices.device import open_device
from pshard.runtime.kernels.cpu import native
from pshard.runtime.memory.host import fresh_memory
from pshard.runtime.memory.host.fresh_memory import FilledMemory
from pshard.runtime.memory.host.host_memory import as_tensor
from pshard.runtime.memory.weights import HostWeights
from pshard.units.divide_unit import whole_unit

MIB = 1 << 20


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> Iterator[FilledMemory]:
    monkeypatch.setattr(fresh_memory, "PIECE", 2 * MIB)
    memory = FilledMemory(31 * MIB + 5)
    yield memory
    memory.stop()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not native.is_available() or sys.platform != "linux", reason="needs the C++ library, and Linux")
def test_it_is_filled_without_being_written_to() -> None:
    before = resident_bytes()
    memory = FilledMemory(256 * MIB)
    memory.wait()
    assert resident_bytes() - before > 200 * MIB
    memory.release()
    assert resident_bytes() - before < 50 * MIB


def test_what_is_written_meanwhile_stays_and_the_rest_is_zero(filled: FilledMemory) -> None:
    tensor = as_tensor(filled.memory, filled.nbytes)
    tensor[::4096] = 7
    filled.wait()
    assert tensor.numel() == 31 * MIB + 5 and filled.done <= filled.nbytes
    assert (tensor[::4096] == 7).all() and tensor.count_nonzero() == tensor[::4096].numel()


def test_memory_that_nothing_fills_ahead_is_used_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_memory.native, "is_available", lambda: False)
    memory = FilledMemory(64 * MIB)
    memory.wait()
    assert as_tensor(memory.memory, 64 * MIB).fill_(1).sum() == 64 * MIB


@pytest.mark.parametrize("beyond", [0, 1])
def test_weights_take_memory_of_their_size_and_release_any_other(tmp_path: Path, beyond: int) -> None:
    with open_model(write_gguf(tmp_path / "m.gguf", n_layers=2)) as model:
        portions = list(map(whole_unit, model.spec.units))
        device = open_device("cpu")
        plain = HostWeights(portions, device)
        filled = FilledMemory(plain.nbytes + beyond)
        weights = HostWeights(portions, device, filled)
        for each in (plain, weights):
            each.load(model, None, lambda _: None)
        assert all(torch.equal(plain.blob(p.unit.name), weights.blob(p.unit.name)) for p in portions)
        assert filled.memory.closed == bool(beyond)
        if not beyond:
            assert weights.blob(portions[0].unit.name)[:64].numpy().tobytes() == filled.memory[:64]
        for each in (plain, weights):
            each.close()
        device.close()
