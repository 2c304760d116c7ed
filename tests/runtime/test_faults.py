"""What breaks: copies that fail, memory that ends, Ctrl-C at any moment, a registry swapped under a running engine."""

import mmap
import random
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from cli_world import make_world
from engines import open_engine, pinned_everywhere
from model_files import write_gguf
from plan_samples import make_tier, make_variant

import pshard
from pshard.commands.command_line import run_cli
from pshard.errors import StepFailed, UserError
from pshard.models import open_model
from pshard.plan import TierPlan
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import CpuDevice, open_device
from pshard.runtime.engine import Engine
from pshard.units.attention import ATTENTION

CONTEXT = 96


class BreakableDevice(CpuDevice):
    """One copy fails for real, in its lane, when a countdown ends."""

    def __init__(self) -> None:
        super().__init__()
        self.sound: dict[str, int | None] = {"in": None, "out": None}  # copies before the one that fails; None: all

    def _goes_wrong(self, lane: str) -> bool:
        left = self.sound[lane]
        if left is not None:
            self.sound[lane] = left - 1
        return left == 0

    def copy_in(self, dst: torch.Tensor, src: torch.Tensor, after: Any = ()) -> Any:
        return super().copy_in(dst, src, (*after, _Failing()) if self._goes_wrong("in") else after)

    def copy_out(self, dst: torch.Tensor, src: torch.Tensor, after: Any = ()) -> Any:
        return super().copy_out(dst, src, (*after, _Failing()) if self._goes_wrong("out") else after)


class _Failing:
    def wait(self) -> None:
        raise OSError("the link is gone")


def switching_tiers(spec: Any, streams_kv: bool = True) -> tuple[TierPlan, ...]:
    """Decode pins what prefill streams, and KV goes from VRAM to the host and back."""
    kv = "host" if streams_kv else "vram"
    prefill = {u.name: ("streamed", kv if u.kind is ATTENTION else None) for u in spec.units}
    prefill["embedding"] = ("cpu", None)
    decode = {u.name: ("pinned", "vram" if u.kind is ATTENTION else None) for u in spec.units}
    decode["embedding"], decode[spec.output.name] = ("cpu", None), ("streamed", None)
    return (
        make_tier(spec, 2, decode, 1, CONTEXT, 1),
        make_tier(spec, 32, prefill, 2, CONTEXT, 1),
    )


def open_breakable(path: Path) -> tuple[Engine, BreakableDevice]:
    file, device = open_model(path), BreakableDevice()
    variant = make_variant(file.spec, switching_tiers(file.spec), CONTEXT, 1)
    return build_engine(file, variant, device, kernels="plain"), device


STEPS = [list(range(20)), [1], [2, 3], list(range(30)), [4], [5]]


@pytest.fixture(scope="module")
def sound_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[torch.Tensor]]:
    """A model, and the logits of STEPS where no copy fails."""
    path = write_gguf(tmp_path_factory.mktemp("m") / "m.gguf", "qwen3", qtype="Q8_0", n_layers=2)
    with open_engine(path, pinned_everywhere(open_model(path).spec, (64,), CONTEXT), context=CONTEXT) as reference:
        return path, [reference.forward(ids) for ids in STEPS]


@pytest.mark.parametrize(
    ("lane", "sound"), [("in", n) for n in range(0, 36, 5)] + [("out", n) for n in range(1, 12, 3)]
)
def test_a_failed_copy_never_leads_to_wrong_logits(
    sound_steps: tuple[Path, list[torch.Tensor]], lane: str, sound: int
) -> None:
    """Weights, pins, KV of a switch, KV fetched and written back: whatever fails is told before logits come of it."""
    path, expected = sound_steps
    engine, device = open_breakable(path)
    with engine:
        device.sound[lane] = sound
        told = False
        for ids, logits in zip(STEPS, expected):
            try:
                got = engine.forward(ids)
            except StepFailed as error:
                told = "failed" in str(error) and "load the model again" in str(error)
                break
            torch.testing.assert_close(got, logits, rtol=1e-4, atol=1e-4)
        assert told
        with pytest.raises(StepFailed, match="load the model again"):
            engine.forward([1])
    assert not [t for t in threading.enumerate() if t in (device._in._thread, device._out._thread)]


def test_memory_that_ends_in_a_step_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", qtype="Q8_0")
    with open_engine(path) as engine:
        engine.forward([1, 2, 3])

        def no_memory(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB\nand much more")

        monkeypatch.setattr(engine._executor, "run", no_memory)

        def command(_: list[str]) -> int:
            engine.forward([4])
            return 0

        assert run_cli(command, []) == 1
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and "out of memory" in message and "load the model again" in message


def test_host_memory_that_is_not_there_is_the_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = mmap.mmap

    def refuse(descriptor: int, *arguments: Any, **options: Any) -> mmap.mmap:
        if descriptor == -1:
            raise OSError(12, "Cannot allocate memory")
        return real(descriptor, *arguments, **options)

    path = write_gguf(tmp_path / "m.gguf", "llama", qtype="Q8_0")
    before = copy_threads()
    monkeypatch.setattr("pshard.runtime.memory.host.fresh_memory.mmap.mmap", refuse)
    with pytest.raises(UserError, match=r"host memory.*Cannot allocate memory"):
        open_engine(path)
    assert copy_threads() == before


@pytest.mark.parametrize("units", [0, 2, 5])
def test_interrupted_loading_leaves_no_thread_and_no_locked_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, units: int
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q8_0", n_layers=2)
    file, device, locked = open_model(path), open_device("cpu"), set()
    monkeypatch.setattr(device, "page_lock", lambda m: locked.add(m.data_ptr()) or True)
    monkeypatch.setattr(device, "page_unlock", lambda m: locked.discard(m.data_ptr()))
    done = 0

    def progress(_: int) -> None:
        nonlocal done
        done += 1
        if done > units:
            raise KeyboardInterrupt

    tiers = (
        make_tier(
            file.spec,
            8,
            {u.name: ("pinned", "vram" if u.kind is ATTENTION else None) for u in file.spec.units},
            0,
            CONTEXT,
            1,
        ),
    )
    for plan in (tiers, switching_tiers(file.spec)):
        done = 0
        with pytest.raises(KeyboardInterrupt):
            build_engine(file, make_variant(file.spec, plan, CONTEXT, 1), device, kernels="plain", progress=progress)
        assert not locked and not device._in._thread.is_alive() and not device._out._thread.is_alive()
        device = open_device("cpu")
        monkeypatch.setattr(device, "page_lock", lambda m: locked.add(m.data_ptr()) or True)
        monkeypatch.setattr(device, "page_unlock", lambda m: locked.discard(m.data_ptr()))
    device.close()


def test_ctrl_c_at_any_moment_of_a_step_gives_right_logits_or_a_refusal(tmp_path: Path) -> None:
    """A real signal at random moments; the engine goes on as if nothing was, or refuses and is loaded again."""
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q8_0", n_layers=2)
    rng, before = random.Random(5), copy_threads()
    refused = went_on = 0
    spec = open_model(path).spec

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    reference = open_engine(path, pinned_everywhere(spec, (64,), CONTEXT), context=CONTEXT)
    engine = open_engine(path, switching_tiers(spec), context=CONTEXT)
    engine.forward([1, 2, 3])
    began = time.perf_counter()
    engine.forward(list(range(20)))
    step = time.perf_counter() - began
    try:
        for _ in range(25):
            engine.reset()
            history: list[int] = []
            for ids in ([*range(20)], [7], [*range(5)]):
                seconds = rng.uniform(0.02, 4) * step
                try:
                    signal.setitimer(signal.ITIMER_REAL, seconds)
                    engine.forward(ids)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    pass
                signal.setitimer(signal.ITIMER_REAL, 0)
                history = (history + ids)[: engine.lengths[0]]
                try:
                    got = engine.forward([9])
                except StepFailed:
                    refused += 1
                    engine.close()
                    engine = open_engine(path, switching_tiers(spec), context=CONTEXT)
                    break
                went_on += 1
                history.append(9)
                reference.reset()
                torch.testing.assert_close(got, reference.forward(history), rtol=1e-4, atol=1e-4)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        engine.close()
        reference.close()
    assert refused and went_on
    assert copy_threads() == before


def test_an_interrupt_as_a_step_enters_a_mode_of_torch_leaves_none_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modes live as long as what entered them, which the traceback of an interrupt holds."""
    path, enter = write_gguf(tmp_path / "m.gguf", "llama", qtype="Q8_0"), torch.inference_mode.__enter__

    def interrupted(mode: torch.inference_mode) -> None:
        enter(mode)
        raise KeyboardInterrupt

    with open_engine(path) as engine:
        expected = engine.forward([1, 2, 3])
        engine.reset()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as kept:
            patch.setattr(torch.inference_mode, "__enter__", interrupted)
            engine.forward([1, 2, 3])
        assert not torch.is_inference_mode_enabled()
    with open_engine(path) as engine:
        del kept
        assert torch.equal(engine.forward([1, 2, 3]), expected)


def test_a_registry_swapped_under_a_running_engine_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(tmp_path)
    monkeypatch.setenv("PSHARD_CACHE", str(tmp_path / "cache"))
    with pshard.load(world.model, vram=world.budget, context=64, replan=True) as engine:
        expected = list(engine.generate([1, 2, 3], 12, text=False, sampling=greedy()))
        engine.reset()
        tokens = engine.generate([1, 2, 3], 12, text=False, sampling=greedy())
        got = [next(tokens) for _ in range(4)]
        world.registry.write_text("{ not a registry")
        got += list(tokens)
        assert got == expected
    with pytest.raises(UserError, match="pshard-plan"):
        pshard.load(world.model, vram=world.budget)


@pytest.mark.parametrize("ids", [[1, 2.7], [[1], [2.0]], ["a"], "ab", [1, [2]], [[[1]]]])
def test_ids_that_are_no_whole_numbers_are_refused_and_change_nothing(tmp_path: Path, ids: Any) -> None:
    with open_engine(write_gguf(tmp_path / "m.gguf", "llama", qtype="Q8_0"), sequences=2, tokens=(2, 64)) as engine:
        with pytest.raises(UserError, match="whole numbers"):
            engine.forward(ids)
        assert engine.lengths == (0, 0)
        engine.forward([1, 2])


@pytest.mark.parametrize("kind", [torch.tensor, np.array, tuple])
def test_ids_may_be_of_any_integer_type(tmp_path: Path, kind: Any) -> None:
    with open_engine(write_gguf(tmp_path / "m.gguf", "llama", qtype="Q8_0")) as engine:
        expected = engine.forward([1, 2, 3])
        engine.reset()
        assert torch.equal(engine.forward(kind([1, 2, 3])), expected)


@pytest.mark.parametrize("sequence", [-1, 2])
def test_a_sequence_that_the_engine_does_not_have_is_refused(tmp_path: Path, sequence: int) -> None:
    with open_engine(write_gguf(tmp_path / "m.gguf", "llama", qtype="Q8_0"), sequences=2, tokens=(2, 64)) as engine:
        engine.forward([[1, 2], [3]])
        for act in (engine.reset, lambda s: engine.save(tmp_path / "kv", s), lambda s: engine.load(tmp_path / "kv", s)):
            with pytest.raises(UserError, match=f"no sequence {sequence}"):
                act(sequence)
        assert engine.lengths == (2, 1) and not (tmp_path / "kv").exists()


@pytest.mark.parametrize("given", [{"context": 0}, {"context": -3}, {"sequences": 0}, {"kernels": "slow"}])
def test_loading_with_what_is_no_choice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    world = make_world(tmp_path)
    monkeypatch.setenv("PSHARD_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=next(iter(given))):
        pshard.load(world.model, **({"vram": world.budget, "context": 64, "replan": True} | given))


def greedy() -> Any:
    from pshard.runtime.sampling import Sampling

    return Sampling(temperature=0.0)


def copy_threads() -> int:
    """Copy threads of CPU devices that are alive."""
    return sum(t.name.startswith("copy-") for t in threading.enumerate())
