"""Weights beyond what the system page-locks: staged through a ring, with the results and the order of direct copies."""

import random
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from ceiling_device import CeilingDevice
from engines import converse, pinned_everywhere
from model_files import write_gguf
from plan_samples import make_rank_plan, make_tier, make_variant

from pshard.errors import StepFailed
from pshard.models import open_model
from pshard.plan import TierPlan
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices import copiers
from pshard.runtime.devices.copiers import Copiers
from pshard.runtime.devices.device import CopyThread, CpuDevice
from pshard.runtime.engine import Engine
from pshard.runtime.kernels.cpu import native
from pshard.runtime.memory import staging
from pshard.runtime.memory.host import host_arena
from pshard.runtime.memory.staging import DirectFill, StagingRing
from pshard.units.attention import ATTENTION
from pshard.units.divide_unit import share_sixteenths
from pshard.units.ffn import FFN

CONTEXT = 320
KIB = 1 << 10


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of a small model take several chunks of the ring, and several of page-locking."""
    monkeypatch.setattr(staging, "CHUNK", 16 * KIB)
    monkeypatch.setattr(host_arena, "LOCK_CHUNK", 128 * KIB)


def streaming_tiers(spec: Any) -> tuple[TierPlan, ...]:
    """Decode splits an FFN, leaves one to the CPU and streams; prefill streams what decode pins."""
    places: dict[str, tuple] = {u.name: ("streamed", "vram" if u.kind is ATTENTION else None) for u in spec.units}
    places["embedding"] = ("cpu", None)
    ffns = [u for u in spec.units if u.kind is FFN]
    small = places | {ffns[0].name: ("streamed", None, share_sixteenths(ffns[0], 8)), ffns[1].name: ("cpu", None)}
    small |= {u.name: ("pinned", "vram") for u in spec.units if u.kind is ATTENTION}
    return make_tier(spec, 4, small, 2, CONTEXT, 1), make_tier(spec, 64, places, 2, CONTEXT, 1)


def open_ceiling(path: Path, ceiling: int, tiers: Any = streaming_tiers) -> tuple[Engine, CeilingDevice]:
    file, device = open_model(path), CeilingDevice(ceiling)
    return build_engine(file, make_variant(file.spec, tiers(file.spec), CONTEXT, 1), device, kernels="plain"), device


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q8_0", n_layers=3)


def test_staged_weights_give_the_same_bits_as_page_locked_ones(model: Path) -> None:
    plain, device = open_ceiling(model, 1 << 40)
    with plain:
        expected = converse(plain)
        needed = plain.memory().host_locked
        assert device.filled == 0 and plain.memory().staging == 0 and plain.memory().page_locked
    shares = []
    for ceiling in (needed // 4, needed // 2):
        engine, device = open_ceiling(model, ceiling)
        with engine:
            memory = engine.memory()
            assert 0 < memory.staging <= 4 * 16 * KIB and memory.host_locked <= ceiling and not memory.page_locked
            assert sum(device.locked.values()) == memory.host_locked
            assert torch.equal(converse(engine), expected)
            assert device.filled > 0 and device.copied[False] == 0  # nothing goes by way of the driver's own staging
            assert any("pageable" in note and "staged" in note for note in engine.notes)
            shares.append(device.filled)
        assert not device.locked and not lanes_alive(device)
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1]


def lanes_alive(device: CeilingDevice) -> bool:
    lanes = [device._in, device._out, *([device._fill[0]] if device._fill else ())]
    return any(lane._thread.is_alive() for lane in lanes)


def test_a_ring_that_is_refused_leaves_copies_to_the_driver_with_a_note(model: Path) -> None:
    generous, _ = open_ceiling(model, 1 << 40)
    with generous:
        expected = converse(generous)
        buffers = sum(m.numel() for m in generous._executor.host.locked)
    engine, device = open_ceiling(model, buffers)
    with engine:
        assert engine._executor.host.is_locked and engine.memory().staging == 0
        assert device.answers[-1] is False and all(device.answers[:-1])  # weights are not asked for after a refusal
        assert torch.equal(converse(engine), expected)
        assert device.filled == 0 and device.copied[False] > 0
        assert any("by the driver" in note for note in engine.notes)


def test_without_a_lane_for_filling_weights_are_still_page_locked(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CeilingDevice, "fills", False)
    generous, _ = open_ceiling(model, 1 << 40)
    with generous:
        needed = generous.memory().host_locked
    engine, device = open_ceiling(model, needed // 2)
    with engine:
        converse(engine)
        assert 0 < engine._executor.weights.pageable < engine._executor.weights.nbytes
        assert engine.memory().staging == 0 and device.copied[False] > 0


def test_what_plans_copy_is_page_locked_first(model: Path) -> None:
    spec = open_model(model).spec
    plan = make_rank_plan(spec, streaming_tiers(spec))
    order = plan.lock_order
    kinds = {"blk.0.ffn": 0, "blk.2.ffn": 0, "output": 0, "blk.1.ffn": 1, "blk.1.attention": 1, "embedding": 2}
    places = [order.index(name) for name in kinds]  # streamed at decode; at prefill; never copied
    assert sorted(order) == sorted(u.name for u in spec.units)
    assert max(places[:3]) < min(places[3:5]) and max(places[3:5]) < places[5]
    everything = make_rank_plan(spec, pinned_everywhere(spec))
    assert everything.lock_order == ()
    tiers = (pinned_everywhere(spec, (4,))[0], streaming_tiers(spec)[1])
    assert make_rank_plan(spec, tiers).lock_order[-1] == "embedding"  # copied when decode is entered, but not before


def test_units_that_only_the_cpu_computes_leave_the_page_locked_memory_to_others(model: Path) -> None:
    spec = open_model(model).spec

    def tiers(spec: Any) -> tuple[TierPlan, ...]:
        where = {"ffn": "cpu", "embedding": "cpu"}
        kv = {"attention": "vram"}
        places = {u.name: (where.get(u.kind.name, "streamed"), kv.get(u.kind.name)) for u in spec.units}
        return (make_tier(spec, 64, places, 2, CONTEXT, 1),)

    generous, _ = open_ceiling(model, 1 << 40, tiers)
    with generous:
        needed = generous.memory().host_locked
    unused = sum(u.packed_nbytes for u in spec.units if u.kind.name in ("ffn", "embedding"))
    engine, device = open_ceiling(model, needed - unused + 4 * 16 * KIB + 128 * KIB, tiers)
    with engine:
        converse(engine)
        assert not engine.memory().page_locked and device.filled == 0 and device.copied[False] == 0


class _Failing:
    def wait(self) -> None:
        raise OSError("the memory is gone")


@pytest.mark.quick("5")
@pytest.mark.parametrize("sound", [0, 5])
def test_a_staged_copy_that_fails_is_told_before_wrong_logits(
    model: Path, sound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generous, _ = open_ceiling(model, 1 << 40)
    with generous:
        needed, expected = generous.memory().host_locked, [generous.forward([i]) for i in range(60)]
    engine, device = open_ceiling(model, needed // 4)
    real, left = device.fill, sound

    def fill(dst: torch.Tensor, src: torch.Tensor, after: Any = ()) -> Any:
        nonlocal left
        left -= 1
        return real(dst, src, (*after, _Failing()) if left < 0 else after)

    monkeypatch.setattr(device, "fill", fill)
    with engine, pytest.raises(StepFailed, match="load the model again"):
        for i in range(60):
            assert torch.equal(engine.forward([i]), expected[i])
    assert not device.locked and not lanes_alive(device)


@pytest.mark.parametrize("after", [0, 3, 6, 9])
def test_loading_that_is_interrupted_while_memory_is_page_locked_leaves_nothing(model: Path, after: int) -> None:
    device = CeilingDevice(1 << 40)
    real = device.page_lock

    def page_lock(memory: torch.Tensor) -> bool:
        if len(device.answers) == after:
            raise KeyboardInterrupt
        return real(memory)

    device.page_lock = page_lock  # type: ignore[method-assign]
    device.page_unlock = lambda m: device.locked.pop(m.data_ptr(), None)  # type: ignore[method-assign, misc]
    file = open_model(model)
    with pytest.raises(KeyboardInterrupt):
        build_engine(file, make_variant(file.spec, streaming_tiers(file.spec), CONTEXT, 1), device, kernels="plain")
    assert not device.locked and not lanes_alive(device)


def test_copies_through_a_ring_keep_their_order_among_direct_ones() -> None:
    rng, device = random.Random(3), CeilingDevice(1 << 40)
    ring = StagingRing(device, 64 * KIB)
    source = torch.randint(256, (1 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    target, expected = torch.zeros(1 << 18, dtype=torch.uint8), torch.zeros(1 << 18, dtype=torch.uint8)
    for _ in range(300):
        n = rng.choice((1, 100, 16 * KIB, 16 * KIB + 1, 60 * KIB))
        to, at = rng.randrange(target.numel() - n), rng.randrange(source.numel() - n)
        copy = rng.choice((ring.copy_in, super(CeilingDevice, device).copy_in))
        done = copy(target[to : to + n], source[at : at + n], [device.mark()])
        expected[to : to + n] = source[at : at + n]
        if rng.random() < 0.1:
            device.host_wait(done)
            assert torch.equal(target, expected)
    device.synchronize()
    assert torch.equal(target, expected)
    ring.close()
    device.close()


@pytest.mark.parametrize("library", [True, False])
def test_copiers_copy_every_byte_and_no_more(library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if library and not native.is_available():
        pytest.skip(f"no native library: {native.why_missing()}")
    monkeypatch.setattr(native, "is_available", lambda: library)
    monkeypatch.setattr(copiers, "copy_threads", lambda: 3)
    team = Copiers()
    source = torch.randint(256, (3 << 20,), dtype=torch.uint8)
    for n in (0, 1, 255, 256 * KIB, 256 * KIB + 1, 3 << 20):
        for _ in range(30):
            copy = torch.zeros(n + 8, dtype=torch.uint8)
            team.copy(copy[:n], source[:n])
            assert torch.equal(copy[:n], source[:n]) and not copy[n:].any()
    team.close()
    team.close()


def test_what_is_filled_in_place_is_there_when_a_later_copy_is() -> None:
    """Who waits for the last of several copies waits for a slow fill before it too; each buffer takes what it is to."""

    def move(dst: torch.Tensor, src: torch.Tensor) -> None:
        time.sleep(0.02)
        dst.copy_(src)

    lane, sizes = CopyThread("slow", move), list[int]()
    origin, place = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    with closing(CpuDevice()) as device:

        def fill(dst: torch.Tensor, src: torch.Tensor, after: Any = ()) -> Any:
            sizes.append(dst.numel())
            return lane.submit(dst, src, after)

        DirectFill(device, fill, lambda _: [60, 40]).copy_in(place, origin)
        device.copy_in(torch.zeros(1), torch.ones(1)).wait()
        assert torch.equal(place, origin) and sizes == [60, 40]
        lane.end()
