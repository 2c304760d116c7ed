"""Runs of units on the CPU as one native call: the bits of the plain path, and nothing of Python in between."""

import gc
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engines import converse, open_engine
from hybrid_files import LIKE, random_hybrid, write_hybrid_gguf
from model_files import write_gguf
from plan_samples import Places, make_tier, random_places, shrink_places

from pshard.models import open_model
from pshard.models.stored import MappedFile
from pshard.quant import packed_nbytes
from pshard.runtime.engine import Engine
from pshard.runtime.kernels.api import Packed
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.kernels.cpu.recording import CallList, Recordings, record
from pshard.units.moe.experts import EXPERTS

pytestmark = pytest.mark.skipif(not native.is_available(), reason=f"CPU kernels: {native.why_missing()}")


def open_on_cpu(path: Path, sequences: int = 1, seed: int | None = None) -> Engine:
    """All units on the CPU, or placed by chance."""
    spec = open_model(path).spec
    on_cpu: Places = {u.name: ("cpu", "host" if u.kind.state else None) for u in spec.units}
    rng, tiers, places = random.Random(seed), [], on_cpu
    for tokens in (1, 16, 64):
        if seed is not None:
            places = shrink_places(spec, places, rng) if tiers else random_places(spec, rng)
        tiers.append(make_tier(spec, tokens, places, 2, 512, sequences))
    return open_engine(path, tuple(tiers), "fast", 512, sequences, kv_types=("bf16", "bf16"))


def talk(engine: Engine) -> torch.Tensor:
    """Steps of one and of several sequences, as many tokens now and then: all logits."""
    logits = [converse(engine)]
    for step in ([[3], [5, 6], []], [[4], [9], [1]], [[7], [8], [2]], [[1] * 70, [], [3]], [[5], [5], [5]]):
        logits += [rows for rows in engine.forward(step) if rows.numel()]
    return torch.cat([rows.reshape(-1, engine.vocab) for rows in logits])


def on_plain_path(recordings: Recordings, key: object, work: Callable[[], None]) -> None:
    work()


@pytest.mark.quick("qwen2-Q8_0-1")
@pytest.mark.parametrize(
    ("arch", "qtype", "seed"), [("qwen3", "Q4_0", None), ("qwen2", "Q8_0", 1), ("llama", "BF16", None)]
)
def test_lists_give_the_bits_of_the_plain_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, qtype: str, seed: int | None
) -> None:
    path = write_gguf(tmp_path / "m.gguf", arch, qtype=qtype, n_layers=3)
    with open_on_cpu(path, 3, seed) as engine:
        got = talk(engine)
    monkeypatch.setattr(Recordings, "run", on_plain_path)
    with open_on_cpu(path, 3, seed) as engine:
        assert torch.equal(talk(engine), got)


@pytest.mark.quick("next")
@pytest.mark.parametrize("arch", [*LIKE, "qwen2moe", "gpt-oss"])
def test_layers_with_states_experts_or_sinks_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    """Those of families are in test_families.py."""
    path, lists = tmp_path / "m.gguf", list[CallList | None]()
    if arch in LIKE:
        write_hybrid_gguf(path, arch, random_hybrid(arch))
    else:
        write_gguf(path, arch)

    def record_too(work: Callable[[], None]) -> CallList | None:
        lists.append(record(work))
        return lists[-1]

    monkeypatch.setattr("pshard.runtime.kernels.cpu.recording.record", record_too)

    def say(engine: Engine) -> torch.Tensor:
        return torch.stack([engine.forward([token]) for token in range(5)])

    with open_engine(path, kernels="fast") as engine:
        got = say(engine)
    assert len(lists) == 2 and lists[1] is not None  # the embedding, which may be scaled by torch, then the layers
    monkeypatch.setattr(Recordings, "run", on_plain_path)
    with open_engine(path, kernels="fast") as engine:
        assert torch.equal(say(engine), got)


@pytest.mark.parametrize("where", ["cpu", "pinned"])
def test_the_layers_of_a_token_are_one_native_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    calls: Counter[str] = Counter()
    for name, function in native._C.items():

        def count(*arguments, name=name, function=function):
            calls[name] += 1
            return function(*arguments)

        monkeypatch.setitem(native._C, name, count)
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q4_0", n_layers=3)
    with open_on_cpu(path) if where == "cpu" else open_engine(path, kernels="fast") as engine:
        engine.forward([1])
        assert calls["attention"] == calls["ffn"] == 3 and not calls["replay"]
        calls.clear()
        engine.forward([2])
    # the embedding is a run of its own; the last two are the output's
    assert dict(calls) == {"replay": 2, "rms_norm": 1, "linear": 1}


def test_work_that_computes_anything_else_is_not_replayed() -> None:
    x, out = torch.ones(4, 64), torch.zeros(4, 64)

    def norm(rows: torch.Tensor) -> None:
        native.rms_norm(rows, x[0], 1e-6, 2, 64, out, strides=(64, 64))

    calls = record(lambda: norm(x[:2]))  # a view computes nothing
    assert calls is not None and (out[:2] - 1).abs().max() < 1e-5
    x[0], out[:] = 3.0, 0.0
    calls.replay()
    assert (out[0] - 3).abs().max() < 1e-5
    assert record(lambda: norm(x + 0)) is None
    assert record(lambda: native.memcpy(out, x, 64)) is None


def test_a_mapped_file_that_is_collected_meanwhile_is_no_part_of_a_list(tmp_path: Path) -> None:
    """A server that has moved to another model leaves the old one's mappings to Python's collector."""
    file: MappedFile | None = MappedFile(write_gguf(tmp_path / "m.gguf"), "")
    assert file is not None
    file.map(native.guard_map, native.unguard_map)
    file.itself, unmapped = file, file._unguard  # type: ignore[attr-defined]  # so that only the collector finds it
    file, x, out = None, torch.ones(1, 64), torch.zeros(1, 64)

    def work() -> None:
        native.rms_norm(x, x[0], 1e-6, 1, 64, out, strides=(64, 64))
        gc.collect()

    assert record(work) is not None
    assert not unmapped.alive


@pytest.mark.parametrize("tokens", [1, 40])
def test_products_of_every_size_that_tiers_replay_are_replayed(tokens: int) -> None:
    weight = Packed(torch.zeros(packed_nbytes("Q4_0", 32, 64), dtype=torch.uint8), "Q4_0", 32, 64)
    x, out, tile = torch.ones(tokens, 64), torch.ones(tokens, 32), torch.empty(0, dtype=torch.uint8)
    calls = record(lambda: HostKernels().linear(x, weight, out, tile))
    assert calls is not None
    out.fill_(1)
    calls.replay()
    assert not out.any()


def test_what_reading_takes_is_counted_when_it_is_replayed() -> None:
    memory = torch.ones(1 << 20, dtype=torch.uint8)
    calls = record(lambda: native.read_bandwidth(memory, memory.numel()))
    assert calls is not None
    before = native.read_seconds()
    for _ in range(3):
        calls.replay()
    assert before < native.read_seconds() < before + 3


@pytest.mark.parametrize("places", [("cpu", None), ("pinned", None, 3)], ids=str)
def test_experts_on_the_cpu_are_replayed_from_their_second_token_on(tmp_path: Path, monkeypatch, places: tuple) -> None:
    """Making the tables of experts is no part of what is written down: else Python would issue each layer, 250 us."""
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", qtype="Q4_0", n_layers=2)
    with open_model(path) as file:
        spec = file.spec
    everywhere = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
    everywhere |= {u.name: places for u in spec.units if u.kind is EXPERTS}
    recorded = list[object]()

    def record_too(work: Callable[[], None]) -> CallList | None:
        recorded.append(record(work))
        return recorded[-1]

    with open_engine(path, (make_tier(spec, 4, everywhere, 2, 64, 1),), "fast", 64) as engine:
        monkeypatch.setattr("pshard.runtime.kernels.cpu.recording.record", record_too)
        engine.forward([1])
    on_cpu = [calls for calls in recorded if calls is not None]
    assert len(on_cpu) >= 2 and (places[0] != "cpu" or len(on_cpu) == len(recorded))


def test_old_lists_go_when_all_together_are_too_long(monkeypatch) -> None:
    monkeypatch.setattr("pshard.runtime.kernels.cpu.recording.MOST_WORDS", 40)
    x, out, weight = torch.ones(2, 64), torch.empty(2, 64), torch.ones(64)
    lists = Recordings()
    for key in range(400):
        lists.run(key, lambda: native.rms_norm(x, weight, 1e-6, 2, 64, out, strides=(64, 64)))
    kept = [key for key in range(400) if lists.knows(key)]
    assert 2 <= len(kept) <= 10 and kept[-1] == 399, "the last ones stay"
    found = [lists.find(key) for key in kept]
    assert sum(len(calls.words) for calls in found if calls) <= 40
