"""Memory of weights: in huge pages where there are some; the model file does not stay beside its packed form."""

from pathlib import Path

import pytest
import torch
from model_files import write_gguf

from pshard.models import open_model
from pshard.runtime.device import open_device
from pshard.runtime.host_memory import map_memory
from pshard.runtime.weights import HostWeights

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
        before = {name: model.tensor_bytes(name).copy() for name in names}
        address = model.tensor_bytes(names[0]).ctypes.data
        assert smaps_kib(address, "Rss") << 10 > model.spec.packed_nbytes / 2
        HostWeights(model.spec.units, open_device("cpu")).load(model, None, lambda _: None)
        assert smaps_kib(address, "Rss") << 10 < model.spec.packed_nbytes / 10
        assert all((model.tensor_bytes(name) == before[name]).all() for name in names)
