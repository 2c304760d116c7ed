"""Loading: weights are packed while tokenizer and kernels are made ready, and page-locked while pins are brought in."""

import threading
from pathlib import Path

import pytest
import torch
from ceiling_device import CeilingDevice
from engines import pinned_everywhere
from model_files import write_gguf
from plan_samples import make_tier, make_variant

from pshard.errors import UserError
from pshard.models import ModelFile, open_model
from pshard.plan import Variant
from pshard.runtime import build_engine as building
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.executor import Executor

LONG = 20.0  # seconds


@pytest.fixture
def model(tmp_path: Path) -> ModelFile:
    return open_model(write_gguf(tmp_path / "m.gguf", qtype="Q4_0", n_layers=3))


def some_streamed(model: ModelFile) -> Variant:
    """FFNs are streamed, all else stays in VRAM."""
    tiers = []
    for tier in pinned_everywhere(model.spec):
        places = {p.unit: (p.where, p.kv) for p in tier.placements}
        places |= {u.name: ("streamed", None) for u in model.spec.units if u.name.endswith("ffn")}
        tiers.append(make_tier(model.spec, tier.tokens, places, 2, 128, 1, batch=64))
    return make_variant(model.spec, tuple(tiers), 128, 1)


def test_weights_are_packed_before_tokenizer_and_kernels_are_there(
    model: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, choose, sizes = threading.Event(), building.choose_kernels, list[int]()

    def choose_late(*given, **named):
        assert begun.wait(LONG)
        return choose(*given, **named)

    def load_tokenizer() -> None:
        assert begun.wait(LONG)

    def note(nbytes: int) -> None:
        sizes.append(nbytes)
        begun.set()

    monkeypatch.setattr(building, "choose_kernels", choose_late)
    monkeypatch.setattr(model, "tokenizer", load_tokenizer)
    with build_engine(model, some_streamed(model), open_device("cpu"), kernels="plain", progress=note) as engine:
        assert sum(sizes) == model.spec.packed_nbytes
        assert engine._executor.host_nbytes < model.spec.packed_nbytes
        got = engine.forward(list(range(20)), all_logits=True)
    monkeypatch.undo()
    tiers = pinned_everywhere(model.spec)
    variant = make_variant(model.spec, tiers, 128, 1)
    with build_engine(model, variant, open_device("cpu"), kernels="plain") as engine:
        assert torch.equal(got, engine.forward(list(range(20)), all_logits=True))


@pytest.mark.parametrize("what", ["choose_kernels", "build_executor"])
def test_what_goes_wrong_meanwhile_ends_the_packing(
    model: ModelFile, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given, **named):
        raise UserError("no")

    monkeypatch.setattr(building, what, fail)
    device = CeilingDevice(1 << 40)
    with pytest.raises(UserError, match="no"):
        build_engine(model, some_streamed(model), device, kernels="plain")
    assert not device.locked and not [t for t in threading.enumerate() if t.name.startswith(("pack", "page-lock"))]


def test_an_error_of_packing_is_told(model: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "forget_tensor", lambda name: 1 / (name != "blk.1.ffn_up.weight"))
    device = CeilingDevice(1 << 40)
    with pytest.raises(ZeroDivisionError):
        build_engine(model, some_streamed(model), device, kernels="plain")
    assert not device.locked


def test_weights_are_page_locked_while_pins_are_brought_in(model: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    device, brought, load = CeilingDevice(1 << 40), threading.Event(), Executor.load_pins
    lock, waited = device.page_lock, list[bool]()

    def lock_late(memory: torch.Tensor) -> bool:
        if threading.current_thread().name.startswith("page-lock"):
            waited.append(brought.wait(LONG))
        return lock(memory)

    def load_pins(*given) -> None:
        load(*given)
        brought.set()

    monkeypatch.setattr(device, "page_lock", lock_late)
    monkeypatch.setattr(Executor, "load_pins", load_pins)
    with build_engine(model, some_streamed(model), device, kernels="plain") as engine:
        assert waited == [True] and engine._executor.page_locked
        engine.forward([1, 2, 3])
    assert not device.locked
