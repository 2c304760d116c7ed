"""The runtime on a CUDA GPU: placements, graphs, budgets. Skipped without one."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from engines import converse, open_engine, pinned_everywhere, read_twice
from model_files import write_gguf
from plan_samples import keep_rows, make_tier, random_places, shrink_places, split_places
from rounded_kernels import RoundedKernels

from pshard.models import open_model
from pshard.runtime import build_executor as loading
from pshard.runtime.devices import device as device_module
from pshard.runtime.devices.device import CudaDevice, open_device
from pshard.runtime.memory import staging
from pshard.runtime.memory.host import host_arena
from pshard.runtime.memory.host.host_memory import map_memory
from pshard.runtime.memory.staging import StagingRing
from pshard.runtime.memory.weights import HostWeights
from pshard.runtime.walks import walk as micro_batch
from pshard.runtime.walks.step_sizes import fill_rows
from pshard.units.attention import ATTENTION
from pshard.units.divide_unit import whole_unit
from pshard.units.ffn import FFN

pytestmark = pytest.mark.gpu
CONTEXT = 256


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Normalised mean square error."""
    return (((got - expected) ** 2).mean() / (expected**2).mean()).item()


def talk(engine, rng: random.Random) -> torch.Tensor:
    """A long prompt, a short one and single tokens: logits of every position."""
    prompts = [[rng.randrange(320) for _ in range(n)] for n in (100, 9, 1, 1, 4, 1, 70, 1)]
    with engine:
        return torch.cat([engine.forward(p, all_logits=True) for p in prompts])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("qtype", "bound"), [("BF16", None), ("Q4_0", 2e-3), ("Q6_K", 2e-3)])
def test_random_plans_give_the_reference_logits(
    tmp_path: Path, qtype: str, bound: float | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype=qtype, n_layers=3)
    rng, spec = random.Random(seed), open_model(tmp_path / "m.gguf").spec
    decode = random_places(spec, rng)
    tiers = tuple(
        make_tier(spec, n, places, rng.randint(1, 4), CONTEXT, 1)
        for n, places in ((4, decode), (80, shrink_places(spec, decode, rng)))
    )
    reference = pinned_everywhere(spec, (4, 80), CONTEXT)
    expected = talk(open_engine(path, reference, context=CONTEXT), random.Random(seed))
    got = talk(open_engine(path, tiers, "fast", CONTEXT, device="cuda"), random.Random(seed))
    assert torch.isfinite(got).all()
    found = error(got, expected)
    if bound is None:  # exact weights: what bfloat16 alone costs (8.3e-5 to 1.23e-4 on these models)
        monkeypatch.setattr(loading, "PlainKernels", RoundedKernels)
        bound = 1.05 * error(talk(open_engine(path, reference, context=CONTEXT), random.Random(seed)), expected)
    assert found < bound, (found, bound)
    again = talk(open_engine(path, tiers, "fast", CONTEXT, device="cuda"), random.Random(seed))
    assert torch.equal(got, again)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("qtype", ["BF16", "Q4_0", "Q6_K"])
def test_split_ffns_give_the_reference_logits(tmp_path: Path, qtype: str, seed: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype=qtype, n_layers=3)
    rng, spec = random.Random(seed), open_model(tmp_path / "m.gguf").spec
    places = random_places(spec, rng)
    places["blk.1.ffn"] = ("streamed", None)
    split = [split_places(spec, places, rng) for _ in range(2)]
    for name in places:  # what both tiers pin, they cut alike
        if split[0][name][0] == "pinned":
            split[1][name] = split[0][name]
        elif split[1][name][0] == "pinned":
            split[1][name] = ("streamed", *split[1][name][1:])
    whole = shrink_places(spec, places, rng)
    if seed % 2:
        whole = keep_rows(spec, whole, *split)
    slots = rng.randint(1, 4)
    tiers = tuple(make_tier(spec, n, p, slots, CONTEXT, 1) for n, p in zip((4, 16, 80), (*split, whole)))
    expected = talk(open_engine(path, pinned_everywhere(spec, (4, 16, 80), CONTEXT), context=CONTEXT),
                    random.Random(seed))  # fmt: skip
    got = talk(open_engine(path, tiers, "fast", CONTEXT, device="cuda"), random.Random(seed))
    assert torch.isfinite(got).all()
    assert error(got, expected) < (3e-4 if qtype == "BF16" else 2e-3)
    again = talk(open_engine(path, tiers, "fast", CONTEXT, device="cuda"), random.Random(seed))
    assert torch.equal(got, again)


@pytest.mark.parametrize("size", [5, 16, 18, 40, 64])
def test_batches_of_one_size_at_other_pasts_are_not_confused(tmp_path: Path, size: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="BF16")
    spec, rng = open_model(path).spec, random.Random(size)
    turns = [[rng.randrange(320) for _ in range(size)] for _ in range(3)]
    sizes = (1, 16, 128)

    def speak(engine) -> torch.Tensor:
        with engine:
            return torch.stack([engine.forward(turn) for turn in turns])

    expected = speak(open_engine(path, pinned_everywhere(spec, sizes, CONTEXT), context=CONTEXT))
    places = pinned_everywhere(spec, sizes, CONTEXT)
    got = speak(open_engine(path, places, "fast", CONTEXT, device="cuda"))
    assert max(error(g, e) for g, e in zip(got, expected)) < 1e-3


def test_small_batches_are_captured_in_large_tiers(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q4_0")
    with open_engine(path, pinned_everywhere(open_model(path).spec, (1, 128), CONTEXT), "fast", CONTEXT,
                     device="cuda") as engine:  # fmt: skip
        engine.forward([i % 320 for i in range(40)])
        captured = len(engine.device._graphs)
        engine.forward([i % 320 for i in range(40)])
        assert captured > 0 and len(engine.device._graphs) == captured


def test_graphs_that_were_not_used_for_long_make_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q4_0")
    places, rng = pinned_everywhere(open_model(path).spec, (1, 64), CONTEXT), random.Random(4)
    sizes = (3, 5, 3, 9, 3, 13, 3, 5, 9)  # none is filled to another's rows
    turns = [[rng.randrange(320) for _ in range(n)] for n in sizes]

    def speak() -> tuple[int, int, torch.Tensor]:
        with open_engine(path, places, "fast", CONTEXT, device="cuda") as engine:
            real, captures = torch.cuda.CUDAGraph, []
            monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: captures.append(1) or real())
            outputs = []
            for turn in turns:
                engine.reset(0)
                outputs.append(engine.forward(turn))
            monkeypatch.setattr(torch.cuda, "CUDAGraph", real)
            return len(captures), len(engine.device._graphs), torch.stack(outputs)

    captured, kept, expected = speak()
    assert captured == kept == len({fill_rows(n, 64, exact=False) for n in sizes}) == 4
    monkeypatch.setattr(device_module, "MOST_GRAPHS", 2)
    captured, kept, got = speak()
    assert (captured, kept) == (6, 2)  # that of 3 tokens stays until others were used twice in a row
    assert torch.equal(got, expected)


@pytest.mark.parametrize(("attention", "graphs"), [("pinned", 1), ("streamed", 18)])
def test_full_micro_batches_of_a_prompt_repeat_a_graph_for_each_run_of_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: str, graphs: int
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q4_0", n_layers=9, context=1024)
    spec, rng = open_model(path).spec, random.Random(8)
    places = {u.name: (attention, "vram") if u.kind is ATTENTION else ("pinned", None) for u in spec.units}
    places["embedding"] = ("cpu", None)
    tiers = tuple(make_tier(spec, n, places, 2 * (attention == "streamed"), 1024, 1) for n in (1, 128))
    prompts = [[rng.randrange(320) for _ in range(128)] for _ in range(5)]

    captured, got = read_twice(open_engine(path, tiers, "fast", 1024, device="cuda"), prompts)
    monkeypatch.setattr(micro_batch, "is_launch_bound", lambda *_: False)
    launched, expected = read_twice(open_engine(path, tiers, "fast", 1024, device="cuda"), prompts)
    assert (captured, launched) == (graphs, 0)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("kv_types", [("q8_0", "q8_0"), ("q8_0", "bf16"), ("bf16", "q8_0")])
def test_quantised_cells_cost_the_logits_little(tmp_path: Path, kv_types: tuple[str, str]) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="BF16", n_layers=3)
    tiers = pinned_everywhere(open_model(path).spec, (4, 80), CONTEXT)
    expected = talk(open_engine(path, tiers, context=CONTEXT), random.Random(2))
    runs = [
        talk(open_engine(path, tiers, "fast", CONTEXT, device="cuda", kv_types=kv_types), random.Random(2))
        for _ in range(2)
    ]
    assert torch.equal(*runs)
    found = error(runs[0], expected)  # q8_0 costs up to 1.8e-4, bfloat16 activations up to 1.3e-4
    assert found < 5e-4, found


@pytest.mark.parametrize("kv_types", [("f32", "f32"), ("q8_0", "q8_0"), ("q8_0", "bf16")])
@pytest.mark.parametrize("lengths", [(50,) * 8, (100, 3, 0, 40, 41, 42, 1, 90)])
def test_many_sequences_with_host_kv_give_the_logits_of_kv_in_vram(
    tmp_path: Path, lengths: tuple[int, ...], kv_types: tuple[str, str]
) -> None:
    path, n = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q4_0", n_layers=3), len(lengths)
    spec = open_model(path).spec
    places = {u.name: ("pinned", "host" if u.kind is ATTENTION else None) for u in spec.units}
    places["embedding"] = ("cpu", None)
    in_vram = {name: (where, kv and "vram") for name, (where, kv) in places.items()}
    found = []
    for layout in (places, in_vram):
        tiers = tuple(make_tier(spec, m, layout, 0, n * CONTEXT, n) for m in (8, 512))
        with open_engine(path, tiers, "fast", n * CONTEXT, sequences=n, device="cuda", kv_types=kv_types) as engine:
            rng = random.Random(4)
            outputs = engine.forward([[rng.randrange(320) for _ in range(length)] for length in lengths])
            for step in range(6):
                outputs += engine.forward([[rng.randrange(320)] if (s + step) % 3 else [] for s in range(n)])
            found.append(outputs)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("where", ["vram", "host"])
def test_captured_graphs_follow_the_blocks_that_sequences_take(tmp_path: Path, where: str) -> None:
    path, n, cells = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q4_0", n_layers=3), 3, 3 * 192
    spec = open_model(path).spec
    places = {u.name: ("pinned", where if u.kind is ATTENTION else None) for u in spec.units}
    places["embedding"] = ("cpu", None)
    tiers = tuple(make_tier(spec, m, places, 0, cells, n) for m in (4, 128))
    found = []
    for mixed in (False, True):
        rng, outputs = random.Random(6), []
        with open_engine(path, tiers, "fast", cells, sequences=n, device="cuda") as engine:
            if mixed:  # blocks that are taken and given back in turn come in another order
                engine.forward([[1] * 100, [2] * 70, [3] * 150])
                engine.forward([[1], [2], [3]])
                engine.reset(2)
                engine.forward([[1] * 100, [], []])
                engine.reset(1)
            else:
                engine.forward([[1] * 201, [], []])
            engine.reset(0, 0)
            engine.reset(1)
            order = (1, 0, 2) if mixed else (0, 1, 2)
            for s in order:
                prompt = [(11 * s + i) % 320 for i in range(50 + 7 * s)]
                outputs.append((s, engine.forward([prompt if t == s else [] for t in range(n)])[s]))
            outputs = [rows for _, rows in sorted(outputs, key=lambda found: found[0])]
            for _ in range(80):  # every sequence takes a block or two
                outputs += engine.forward([[rng.randrange(320)] for _ in range(n)])
            held = [tuple(engine._sequences._texts[s].blocks) for s in range(n)]
        found.append((held, outputs))
    (straight, expected), (turned, got) = found
    assert straight != turned
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.alone
def test_steady_decode_allocates_nothing_and_stays_within_the_budget(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q4_0", n_layers=4, d_model=1024, d_ffn=4096, context=4096)
    spec = open_model(path).spec
    where = {"embedding": "cpu", "ffn": "streamed"}
    places = {u.name: (where.get(u.kind.name, "pinned"), "vram" if u.kind is ATTENTION else None) for u in spec.units}
    tiers = tuple(make_tier(spec, n, places, 2, 2048, 1) for n in (1, 512))
    with open_engine(path, tiers, "fast", 2048, device="cuda") as engine:
        held = {"load": engine.memory().accelerator}
        engine.forward([1])
        held["warm-up"] = engine.memory().accelerator
        engine.reset()
        engine.forward([i % 320 for i in range(2048)])
        held["longest prompt"] = engine.memory().accelerator
        engine.reset()
        engine.forward([i % 320 for i in range(1000)])
        for i in range(8):
            engine.forward([i])
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for i in range(16):
            engine.forward([i])
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        switches = engine.switches
        for _ in range(50):
            engine.reset(0, 1000)
            engine.forward([3] * 40)
            engine.forward([5])
        assert engine.switches == switches + 100
        memory = engine.memory()
        held["a hundred switches"] = memory.accelerator
        assert max(held.values()) <= memory.budget, held
        assert memory.page_locked


def test_an_engine_runs_in_a_thread_that_did_not_load_it(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q4_0")
    spec = open_model(path).spec
    places = {u.name: ("streamed" if u.kind is FFN else "cpu" if u.name == "output" else "pinned", "vram")
              for u in spec.units}  # fmt: skip
    places |= {u.name: (places[u.name][0], None) for u in spec.units if u.kind is not ATTENTION}
    places["embedding"] = ("cpu", None)
    tiers = tuple(make_tier(spec, n, places, 2, CONTEXT, 1) for n in (1, 16))
    steps = ([3] * 16, [5], [6])
    with open_engine(path, tiers, "fast", CONTEXT, device="cuda") as engine:
        expected = [engine.forward(ids) for ids in steps]
        engine.reset(0)
        with ThreadPoolExecutor(1) as thread:
            got = [thread.submit(engine.forward, ids).result() for ids in steps]
    assert torch.equal(torch.stack(got), torch.stack(expected))


def test_weights_that_are_page_locked_in_chunks_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_arena, "LOCK_CHUNK", 1 << 20)
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q4_0", n_layers=4, d_model=1024, d_ffn=4096)
    with open_model(path) as model:
        device = open_device("cuda")
        host = HostWeights(map(whole_unit, model.spec.units), device)
        host.load(model, None, lambda _: None)
        assert host.page_locked
        for unit in model.spec.units:
            blob = host.blob(unit.name)
            there = device.allocate(blob.numel())
            device.copy_in(there, blob)
            device.synchronize()
            assert torch.equal(there.cpu(), blob)
        host.close()
        device.close()


def test_staged_copies_keep_their_order_among_direct_ones() -> None:
    rng, device = random.Random(3), open_device("cuda")
    source, locked, there = map_memory(96 << 20), map_memory(96 << 20), device.allocate(32 << 20)
    source.copy_(torch.randint(256, source.shape, dtype=torch.uint8))
    locked.copy_(source)
    assert device.fills and device.page_lock(locked)
    ring, expected = StagingRing(device, 32 << 20), torch.zeros(32 << 20, dtype=torch.uint8)
    there.zero_()
    device.synchronize()
    for _ in range(200):
        n = rng.choice((64, 1 << 16, (4 << 20) + 64, 17 << 20))
        to, at = rng.randrange(there.numel() - n), rng.randrange(source.numel() - n)
        direct = rng.random() < 0.4
        done = (device.copy_in if direct else ring.copy_in)(
            there[to : to + n], (locked if direct else source)[at : at + n], [device.mark()]
        )
        expected[to : to + n] = source[at : at + n]
        if rng.random() < 0.2:  # the compute lane sees what its event promises
            device.wait(done)
            with device.computing():
                seen = there[to : to + n].clone()
            device.synchronize()
            assert torch.equal(seen.cpu(), source[at : at + n])
    device.synchronize()
    assert torch.equal(there.cpu(), expected)
    ring.close()
    device.page_unlock(locked)
    device.close()


@pytest.mark.alone
def test_staged_weights_give_the_same_bits_and_graphs_as_page_locked_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "CHUNK", 1 << 20)
    monkeypatch.setattr(host_arena, "LOCK_CHUNK", 1 << 21)
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q4_0", n_layers=4, d_model=1024, d_ffn=4096)
    spec = open_model(path).spec
    where = {"embedding": "cpu", "attention": "pinned"}
    places = {u.name: (where.get(u.kind.name, "streamed"), "vram" if u.kind is ATTENTION else None) for u in spec.units}
    places["blk.1.ffn"] = ("cpu", None)
    tiers = tuple(make_tier(spec, n, places, 2, 320, 1) for n in (1, 64))
    with open_engine(path, tiers, "fast", 320, device="cuda") as engine:
        expected, graphs = converse(engine), len(engine.device._graphs)
        locked = engine.memory().host_locked
        assert engine.memory().page_locked and engine.memory().staging == 0 and graphs
    real, left = CudaDevice.page_lock, locked // 2

    def page_lock(self: CudaDevice, memory: torch.Tensor) -> bool:
        nonlocal left
        left -= memory.numel()
        return left >= 0 and real(self, memory)

    monkeypatch.setattr(CudaDevice, "page_lock", page_lock)
    with open_engine(path, tiers, "fast", 320, device="cuda") as engine:
        memory = engine.memory()
        assert memory.staging == 4 << 20 and not memory.page_locked and memory.host_locked <= locked // 2
        assert torch.equal(converse(engine), expected) and len(engine.device._graphs) == graphs
        assert engine.device._fill is not None and memory.accelerator <= memory.budget


@pytest.mark.parametrize("nbytes", [1 << 15, 64 * 5120 * 4])  # hidden states of one token or two, and of 64
def test_activations_do_not_wait_for_the_copy_engine(nbytes: int) -> None:
    device = open_device("cuda")
    big, small = map_memory(1 << 30), map_memory(2 * nbytes)
    assert device.page_lock(big) and device.page_lock(small)
    there, target = device.allocate(1 << 30), device.allocate(nbytes)
    sent, back = small.view(2, nbytes)
    sent.copy_(torch.randint(256, (nbytes,), dtype=torch.uint8))
    for _ in range(2):  # the first time compiles
        arrived = device.copy_in(there, big)
        device.send(target, sent)
        device.receive(back, target)
        early = not device.happened(arrived)
        device.synchronize()
    assert torch.equal(back, sent)
    assert early
    for memory in (big, small):
        device.page_unlock(memory)
    device.close()
