"""Memory of weights: in huge pages where there are some; the model file does not stay beside its packed form."""

import mmap
import time
from pathlib import Path

import pytest
import torch
from ceiling_device import CeilingDevice
from model_files import write_gguf
from plan_samples import make_tier, make_variant

from pshard.errors import UserError
from pshard.models import open_model
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.memory.host import fresh_memory, host_arena
from pshard.runtime.memory.host.host_memory import map_memory, measure_process
from pshard.runtime.memory.weights import HostWeights, pack_unit
from pshard.units.attention import ATTENTION
from pshard.units.divide_unit import whole_unit

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SMAPS = Path("/proc/self/smaps")
MIB = 1 << 20


def smaps_kib(address: int, field: str) -> int:
    """A field of the mapping that holds an address."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == f"{field}:":
            return int(rest[0])
    raise LookupError(field)


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or not SMAPS.exists() or "[never]" in HUGE_PAGES.read_text(), reason="no huge pages here"
)
def test_weights_lie_in_huge_pages() -> None:
    memory = map_memory(16 * MIB).fill_(1)
    found = smaps_kib(memory.data_ptr() + 8 * MIB, "AnonHugePages")
    if found == 0 and smaps_kib(memory.data_ptr() + 8 * MIB, "THPeligible"):
        pytest.skip("this system has no free huge page now")
    assert found >= 8 * 1024


def test_memory_is_zeroed_of_exact_size_and_outlives_its_views() -> None:
    memory = map_memory(3 * MIB + 5)
    assert memory.dtype == torch.uint8 and memory.numel() == 3 * MIB + 5 and not memory.any()
    part = memory[MIB:]
    del memory
    assert part.fill_(3).sum() == 3 * part.numel()


@pytest.mark.skipif(not SMAPS.exists(), reason="asks Linux for its mappings")
def test_a_loaded_model_file_is_given_back_and_can_be_read_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", n_layers=2, vocab=4096, d_model=512, d_ffn=2048)
    with open_model(path) as model:
        names = [t.name for u in model.spec.units for t in u.tensors]
        model.map_files(lambda address, nbytes: None, lambda address: None)
        before = {name: model.tensor_bytes(name).copy() for name in names}
        address = model.tensor_bytes(names[0]).ctypes.data
        assert smaps_kib(address, "Rss") << 10 > model.spec.packed_nbytes / 2
        HostWeights(map(whole_unit, model.spec.units), open_device("cpu")).load(model, None, lambda _: None)
        assert smaps_kib(address, "Rss") << 10 < model.spec.packed_nbytes / 10
        assert all((model.tensor_bytes(name) == before[name]).all() for name in names)


def test_memory_that_the_system_says_it_lacks_is_noted_once_before_it_is_filled(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    info = tmp_path / "meminfo"
    info.write_text("MemTotal:  9000000 kB\nMemAvailable:    2048 kB\nSwapFree:        1024 kB\n")
    monkeypatch.setattr(fresh_memory, "MEMORY_INFO", info)
    monkeypatch.setattr(fresh_memory, "_noted", [])
    assert map_memory(3 * MIB).numel() == 3 * MIB
    assert capsys.readouterr().err == ""
    for _ in range(2):  # it may have more: some systems get memory as it is filled
        assert map_memory(4 * MIB).fill_(1).numel() == 4 * MIB
    assert capsys.readouterr().err.count("note: the system says that 3 MiB of host memory are free") == 1
    monkeypatch.setattr(fresh_memory, "_noted", [])
    info.write_text("a system that does not say\n")
    assert map_memory(4 * MIB).numel() == 4 * MIB
    assert capsys.readouterr().err == ""


def test_memory_that_the_system_refuses_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"cannot take \d+ MiB of host memory"):
        map_memory(1 << 60)


@pytest.mark.parametrize("ceiling_mib", [0, 12, 1000])
def test_weights_are_page_locked_in_chunks_of_whole_units_up_to_the_ceiling(
    tmp_path: Path, monkeypatch, ceiling_mib: int
) -> None:
    path = write_gguf(tmp_path / "m.gguf", n_layers=4, vocab=4096)
    monkeypatch.setattr(host_arena, "LOCK_CHUNK", MIB)
    with open_model(path) as model:
        device = CeilingDevice(ceiling_mib * MIB)
        host = HostWeights(map(whole_unit, model.spec.units), device)
        host.load(model, None, lambda _: None)
        assert sum(device.locked.values()) == host.nbytes - host.pageable
        assert host.page_locked == (ceiling_mib == 1000) and (host.pageable == host.nbytes) == (ceiling_mib == 0)
        assert len(device.locked) > 1 or ceiling_mib == 0
        assert all(device.answers[:-1]) and device.answers[-1] == host.page_locked  # a refusal is the last question
        borders = sorted(device.locked.items())
        assert all(start % mmap.PAGESIZE == 0 for start, _ in borders)
        for unit in model.spec.units:  # a blob lies in one chunk
            blob = host.blob(unit.name)
            end = blob.data_ptr() + blob.numel()
            assert sum(at < end and blob.data_ptr() < at + n for at, n in borders) <= 1
            alone = torch.empty_like(blob)
            pack_unit(model, unit, alone)
            assert torch.equal(blob, alone)
        host.close()
        assert not device.locked and not host.page_locked
        device.close()


def test_chunks_are_page_locked_while_the_next_are_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_arena, "LOCK_CHUNK", MIB)
    with open_model(write_gguf(tmp_path / "m.gguf", n_layers=4, vocab=4096)) as model:
        device, names = CeilingDevice(1000 * MIB), [unit.name for unit in model.spec.units]
        host, expected, done = HostWeights(map(whole_unit, model.spec.units), device), list[str](), list[int]()
        monkeypatch.setattr(model, "expect_tensor", expected.append)

        def note(nbytes: int) -> None:
            done.append(nbytes)
            if len(done) == len(names):  # the last is about to be done
                for _ in range(12_000):
                    if len(device.answers) == len(host._chunks) - 1:
                        return
                    time.sleep(0.005)

        host.pack(model, None, note, locks=True)
        assert len(device.answers) == len(host._chunks) - 1 >= 2 and 0 < host.pageable <= host._chunks[-1].numel()
        assert expected == [t.name for name in names[1:] for t in model.spec.unit(name).tensors]  # read ahead
        host.lock()
        assert host.page_locked and sum(device.locked.values()) == host.nbytes
        host.close()
        failing = HostWeights(map(whole_unit, model.spec.units), device)
        monkeypatch.setattr(model, "forget_tensor", lambda name: 1 / (name != f"{names[-1]}.weight"))
        with pytest.raises(ZeroDivisionError):
            failing.pack(model, None, lambda _: None, locks=True)
        failing.close()
        assert not device.locked
        device.close()


@pytest.mark.parametrize("ceiling_mib", [2, 12, 1000])
def test_what_graphs_transfer_is_page_locked_before_weights_take_the_rest(
    tmp_path: Path, monkeypatch, ceiling_mib: int
) -> None:
    path = write_gguf(tmp_path / "m.gguf", n_layers=4, vocab=4096)
    monkeypatch.setattr(host_arena, "LOCK_CHUNK", 1 << 18)
    with open_model(path) as model:
        placed = {u.name: ("cpu", "host" if u.kind is ATTENTION else None) for u in model.spec.units}
        variant = make_variant(model.spec, (make_tier(model.spec, 1, placed, 0, 128, 1),), 128, 1)
        device = CeilingDevice(ceiling_mib * MIB)
        engine = build_engine(model, variant, device, kernels="plain")
        executor = engine._executor
        assert executor.host.is_locked and executor.host.locked
        assert executor.page_locked == (ceiling_mib == 1000)
        assert any("pageable" in note for note in engine.notes) == (ceiling_mib != 1000)
        assert all(device.answers[:-1]) and device.answers[-1] == executor.page_locked  # a refusal is the last question
        engine.close()
        assert not device.locked


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="asks Linux for the size of the process")
def test_the_size_of_the_process_counts_memory_and_no_pages_of_files(tmp_path: Path) -> None:
    before, path = measure_process(), tmp_path / "file"
    path.write_bytes(bytes(64 * MIB))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        assert not any(view[:: mmap.PAGESIZE])
        with_file = measure_process()
    memory = map_memory(64 * MIB)
    memory.fill_(1)
    assert before > MIB and abs(with_file - before) < 32 * MIB < measure_process() - before
