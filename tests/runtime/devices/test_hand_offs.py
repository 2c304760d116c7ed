"""Hand-offs of GPU and CPU: by kernels that wait, or by events where Windows schedules the GPU or a switch says so."""

import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_world import make_world
from engines import open_engine
from flag_relay import FlagKernel
from model_files import write_gguf
from plan_samples import make_tier

from pshard.commands.program import one_program
from pshard.errors import UserError
from pshard.models import open_model
from pshard.runtime.devices import relay
from pshard.runtime.devices.hand_offs import SWITCH, describe_hand_offs, kernels_may_wait
from pshard.runtime.devices.relay import open_relay
from pshard.runtime.kernels.cpu import native
from pshard.runtime.ranks.peer_memory import _reaches_all
from pshard.session.this_machine import doubt_free_memory

LINUX, WSL = "6.8.0-45-generic", "5.15.167.4-microsoft-standard-WSL2"


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch):
    """Says which kernel of Linux runs."""
    return lambda release: monkeypatch.setattr(platform, "release", lambda: release)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of a GPU as a relay asks for when it is opened."""
    kernels = FlagKernel(lambda flag: None), FlagKernel(lambda flag: None)
    monkeypatch.setattr(relay, "_find_kernels", lambda: kernels)
    return SimpleNamespace(kind="cuda", page_lock=lambda memory: True, page_unlock=lambda memory: None)


@pytest.mark.skipif(not native.is_available(), reason="needs the C++ library")
@pytest.mark.parametrize(
    ("release", "word", "waits"),
    [(LINUX, None, True), (WSL, None, False), (LINUX, "events", False), (WSL, "flags", True)],
)
def test_kernels_wait_unless_windows_schedules_them_or_the_switch_says_otherwise(
    release: str, word: str | None, waits: bool, on: Any, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(release)
    if word is not None:
        monkeypatch.setenv(SWITCH, word)
    assert kernels_may_wait() is waits and (describe_hand_offs() == ()) is waits
    opened = open_relay(gpu, 3)
    assert (opened is not None) is waits
    if opened is not None:
        opened.close()
    if not waits:
        assert "hand-offs between GPU and CPU go by events" in describe_hand_offs()[0]
        assert not _reaches_all(0, 2)  # nor do kernels wait for other GPUs


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "spin")
    with pytest.raises(UserError, match="PSHARD_HAND_OFFS: 'spin' is neither flags nor events"):
        kernels_may_wait()


def test_free_memory_is_doubtful_where_windows_schedules_the_gpu(
    on: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    make_world(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (7 << 30, 8 << 30))
    on(LINUX)
    assert doubt_free_memory() is None
    one_program.main(["doctor"])
    assert "VRAM is free is doubtful" not in capsys.readouterr().out
    on(WSL)
    one_program.main(["doctor"])
    assert "-> how much VRAM is free is doubtful where Windows schedules the GPU" in capsys.readouterr().out


@pytest.mark.gpu
def test_hand_offs_by_events_give_the_bits_of_those_by_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q4_0", n_layers=4)
    with open_model(path) as file:
        spec = file.spec
    where = {u.name: ("cpu", None) for u in spec.units if u.kind.name == "ffn" and u.layer % 2}
    places = {u.name: where.get(u.name, ("pinned", "vram" if u.kind.state else None)) for u in spec.units}
    tiers = tuple(make_tier(spec, n, places, 0, 256, 1) for n in (4, 128))
    found = []
    for word in ("flags", "events"):
        monkeypatch.setenv(SWITCH, word)
        with open_engine(path, tiers, "fast", 256, device="cuda") as engine:
            assert any("go by events" in note for note in engine.notes) is (word == "events")
            rows = [engine.forward([i % 320 for i in range(90)]), *(engine.forward([i]) for i in range(12))]
            found.append(torch.cat(rows))
    assert torch.equal(*found)
