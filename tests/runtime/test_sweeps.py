"""Sweeps: micro-batches of a prompt that read what is on disk once, with the bits of one after the other."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import converse, open_engine, pinned_everywhere
from hybrid_files import random_hybrid, write_hybrid_gguf
from model_files import write_gguf
from plan_samples import make_tier, make_variant
from toy_kinds import VOCAB, ToyFile, know_decay  # noqa: F401

from pshard.errors import StepFailed
from pshard.model import ModelSpec
from pshard.models import open_model
from pshard.plan import TierPlan
from pshard.planner.check_plan import check_runnable
from pshard.runtime.build_engine import build_engine
from pshard.runtime.checkpoints import checkpoints
from pshard.runtime.devices.device import CpuDevice, CpuEvent, open_device
from pshard.runtime.walks.sweep import Turn
from pshard.steps.move import WaitingRows
from pshard.units.unit import places_of

FAST = "fake:rate=20G,jitter=1ms"  # pieces arrive in random order


def on_disk(
    spec: ModelSpec,
    sweep: int,
    tokens=(1, 64),
    state: str = "vram",
    context: int = 512,
    site: str = "disk",
    sequences: int = 1,
) -> tuple[TierPlan, ...]:
    """Tiers with all that may live on disk there, or at another site, two slots, and sweeps of so many batches."""
    places = {}
    for unit in spec.units:
        far = [place for place in places_of(unit.kind, False) if place[0] == site]
        own = [place for place in far if place[1] == state] or far
        places[unit.name] = own[-1] if own else ("pinned", "vram" if unit.kind.state else None)
    return tuple(
        make_tier(spec, n, places, 2, context, sequences, batch=tokens[-1], sweep=sweep * (n == tokens[-1]))
        for n in tokens
    )


def count_read(spec: ModelSpec, tier: TierPlan) -> int:
    """Bytes of the file that a micro-batch of a tier, or a sweep, reads."""
    units = [spec.unit(p.unit) for p in tier.placements if p.site.is_beyond_host]
    return sum(t.file_nbytes for u in units for t in u.tensors if len(t.shape) == 2)


@pytest.mark.quick("qwen3moe-shape1-vram-2")
@pytest.mark.parametrize(
    ("arch", "shape", "state", "sweep"),
    [
        ("llama", {"qtype": "Q4_0", "qtypes": {"ffn_down.weight": "Q6_K", "attn_k.weight": "BF16"}}, "host", 7),
        ("qwen3moe", {"qtype": "Q8_0"}, "vram", 2),
    ],
)
def test_a_prompt_in_sweeps_has_the_logits_of_one_micro_batch_after_the_other(
    arch: str, shape: dict, state: str, sweep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSHARD_DISK", FAST)
    path = write_gguf(tmp_path / "m.gguf", arch, **shape)
    spec = open_model(path).spec
    with open_engine(path, on_disk(spec, sweep, state=state), context=512) as engine:
        found = converse(engine)
    with open_engine(path, pinned_everywhere(spec, context=512), context=512) as engine:
        assert torch.equal(found, converse(engine))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_sweep_reads_what_is_on_disk_once(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several lengths, of which the last micro-batch may have few tokens; and texts side by side."""
    monkeypatch.setenv("PSHARD_DISK", FAST)
    path = write_gguf(tmp_path / "m.gguf", qtype="Q4_0", context=2048)
    spec = open_model(path).spec
    rng, found = random.Random(2), []
    prompts = [[rng.randrange(320) for _ in range(n)] for n in (70, 256, 250, 257, 640, 65)]
    tiers = on_disk(spec, 4, context=2048)
    kernels = "fast" if device == "cpu" else "plain"
    with open_engine(path, tiers, kernels, 2048, device=device) as engine:
        engine.forward(prompts[0])
        for prompt, passes in zip(prompts, (1, 1, 1, 2, 3, 1), strict=True):
            engine.reset(0)
            engine.device.synchronize()
            before = engine.memory().read
            found.append(engine.forward(prompt))
            engine.device.synchronize()
            assert engine.memory().read - before == passes * count_read(spec, tiers[-1])
    with open_engine(path, pinned_everywhere(spec, context=2048), kernels, 2048, device=device) as engine:
        for prompt, row in zip(prompts, found, strict=True):
            engine.reset(0)
            if len(prompt) % 64 > 1 or device == "cpu":  # few tokens have other kernels on a GPU
                assert torch.equal(row, engine.forward(prompt))


def test_a_text_goes_on_after_a_sweep_of_another_though_its_walk_was_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under one tier: the sweep writes its indexes where that of the walk was kept."""
    monkeypatch.setenv("PSHARD_DISK", FAST)
    path = write_gguf(tmp_path / "m.gguf", qtype="Q4_0", context=1024)
    spec = open_model(path).spec
    rng, found = random.Random(3), list[torch.Tensor]()
    prompt = [rng.randrange(320) for _ in range(200)]
    swept = on_disk(spec, 4, (64,), context=1024, sequences=2)
    for tiers in (swept, pinned_everywhere(spec, (64,), 1024, 2)):
        with open_engine(path, tiers, "fast", 1024, 2) as engine:
            assert engine.texts.most_swept == (4 if tiers is swept else 1)
            for token in ([1, 2, 3], [4]):
                engine.forward([token, []])
            engine.forward([[], prompt])
            found.append(engine.forward([[5], []])[0])
    assert torch.equal(*found)


@pytest.mark.quick("aawwd")
@pytest.mark.usefixtures("know_decay")
@pytest.mark.parametrize("layers", ["wawa", "aawwd"])
def test_windows_and_states_of_a_fixed_size_go_through_sweeps(layers: str) -> None:
    """Several texts, all logits, and windows of which a prompt fills the room several times."""
    file, rng = ToyFile(layers, context=768), random.Random(4)
    turns = [[[rng.randrange(VOCAB) for _ in range(n)] for n in sizes] for sizes in ((400, 3), (1, 300), (150, 200))]

    def speak(where: str, sweep: int) -> list[torch.Tensor]:
        places = {
            u.name: (where if where in dict(u.kind.places) else "pinned", "vram" if u.kind.state else None)
            for u in file.spec.units
        }
        tiers = tuple(make_tier(file.spec, n, places, 2, 1536, 2, batch=24, sweep=sweep * (n == 24)) for n in (2, 24))
        variant = make_variant(file.spec, tiers, 1536, 2)
        check_runnable((file.spec,), variant, "cpu")
        with build_engine(file, variant, open_device("cpu"), kernels="plain") as engine:
            return [row for turn in turns for row in engine.forward(turn, all_logits=True)]

    for found, expected in zip(speak("streamed", 5), speak("pinned", 0), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("like", ["dense", pytest.param("next", marks=pytest.mark.slow)])
def test_checkpoints_in_the_middle_of_a_sweep_are_those_of_micro_batches_in_turn(
    like: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "EVERY", 40)
    path = write_hybrid_gguf(tmp_path / "m.gguf", like, random_hybrid(like))
    spec, ids = open_model(path).spec, [n % 320 for n in range(7, 7 + 171)]

    def speak(sweep: int) -> tuple[list[int], list[torch.Tensor]]:
        far, near = on_disk(spec, sweep, (1, 16), "host", site="streamed"), pinned_everywhere(spec, (1, 16), 512)
        with open_engine(path, far if sweep else near, context=512, checkpoint_bytes=1 << 20) as engine:
            rows = [engine.forward(ids, all_logits=True)]
            lengths = [one.length for one in engine._checkpoints.all_of(0)]
            for cut in (165, 100, 33):
                engine.reset(0, cut)
                rows.append(engine.forward(ids[cut:], all_logits=True))
            return lengths, rows

    lengths, rows = speak(3)
    expected, others = speak(0)
    assert lengths == expected and len(lengths) > 3
    assert all(map(torch.equal, rows, others))


def test_a_disk_that_fails_in_a_sweep_ends_it_and_names_file_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSHARD_DISK", f"{FAST},fault=dead@40")
    path = write_gguf(tmp_path / "m.gguf", qtype="Q4_0")
    with open_engine(path, on_disk(open_model(path).spec, 8), context=512) as engine:
        with pytest.raises(StepFailed, match=r"m\.gguf at byte \d+"):
            for _ in range(9):
                engine.forward(list(range(300)))
                engine.reset(0)
        with pytest.raises(StepFailed, match="an earlier step failed"):
            engine.forward([1])


def test_an_interrupt_in_the_middle_of_a_sweep_leaves_an_engine_that_refuses_and_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSHARD_DISK", FAST)
    path, calls = write_gguf(tmp_path / "m.gguf", qtype="Q4_0"), list[WaitingRows]()

    def put_aside(turn: Turn, portion: WaitingRows) -> None:
        calls.append(portion)
        if len(calls) == 7:
            raise KeyboardInterrupt

    with open_engine(path, on_disk(open_model(path).spec, 4), context=512) as engine:
        monkeypatch.setattr(Turn, "put_aside", put_aside)
        with pytest.raises(KeyboardInterrupt):
            engine.forward(list(range(256)))
        with pytest.raises(StepFailed, match="an earlier step failed"):
            engine.forward([1])
    assert [portion.returns for portion in calls] == [False] * 4 + [True, False, True]


class SendsLate(CpuDevice):
    """A device that may read what it is sent until the host waits for it; `changed` counts what was written before."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.changed = 0

    def send(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        super().send(dst, src)
        self._sent.append((src, src.clone()))

    def repeat(self, key: tuple, worth_it: bool, work: Callable[[], Any]) -> None:
        self.changed += sum(not torch.equal(src, kept) for src, kept in self._sent)
        super().repeat(key, worth_it, work)

    def host_wait(self, event: CpuEvent) -> None:
        super().host_wait(event)
        self._sent.clear()


@pytest.mark.parametrize("sweep", [0, 4])
def test_the_host_keeps_what_a_micro_batch_sends_until_it_has_been_read(sweep: int, tmp_path: Path) -> None:
    path, device = write_gguf(tmp_path / "m.gguf", qtype="Q4_0", context=512), SendsLate()
    with open_model(path) as file:
        tiers = on_disk(file.spec, sweep, site="streamed")
        with build_engine(file, make_variant(file.spec, tiers, 512, 1), device, kernels="plain") as engine:
            for tokens in (256, 250):
                engine.reset(0)
                engine.forward(list(range(tokens)))
    assert device.changed == 0


@pytest.mark.gpu
@pytest.mark.parametrize("state", ["vram", "host"])
@pytest.mark.parametrize(("arch", "shape"), [("llama", {"qtype": "Q4_0"}), ("qwen3moe", {"qtype": "Q4_K"})])
def test_a_gpu_gives_the_same_bits_in_sweeps(
    arch: str, shape: dict, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With graphs, which prompts have from their second time on, and from disk and host memory."""
    monkeypatch.setenv("PSHARD_DISK", FAST)
    path = write_gguf(tmp_path / "m.gguf", arch, context=2048, d_model=256, **shape)
    spec, rng = open_model(path).spec, random.Random(6)
    prompts = [[rng.randrange(320) for _ in range(n)] for n in (1000, 1024, 1024, 300)]
    for site in ("disk", "streamed"):
        found = []
        for sweep in (0, 4):
            tiers = on_disk(spec, sweep, (1, 256), state, 2048, site)
            with open_engine(path, tiers, "fast", 2048, device="cuda", kv_types=("bf16", "bf16")) as engine:
                for prompt in prompts:
                    engine.reset(0)
                    found.append(engine.forward(prompt))
        assert all(map(torch.equal, found[:4], found[4:]))
