"""Every placement of every unit gives the logits of the plain reference."""

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import open_engine, pinned_everywhere
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import write_gguf
from plan_samples import keep_rows, make_tier, make_variant, random_places, shrink_places, split_places

from pshard.models import open_model
from pshard.quant import TENSOR_ALIGN
from pshard.runtime import executor
from pshard.runtime.blocks.find_block import find_block
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import CpuDevice
from pshard.runtime.kernels.plain import PlainKernels
from pshard.steps.emit import emit_steps
from pshard.steps.move import Move, Weights
from pshard.steps.step import StepList
from pshard.units.attention import ATTENTION
from pshard.units.divide_unit import count_shares, divide_unit
from pshard.units.ffn import FFN
from pshard.units.share import Share

CONTEXT = 96


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_gguf(path, "qwen3", qtype="Q4_0", qtypes={"output.weight": "Q6_K"}, n_layers=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with packed and with plain weights; 3 layers with FFNs of 256 rows."""
    folder = tmp_path_factory.mktemp("models")
    return {
        q: write_gguf(folder / f"{q}.gguf", "qwen3", qtype=q, n_layers=3, d_model=256, d_ffn=256)
        for q in ("Q4_0", "Q6_K", "BF16")
    }


def talk(engine, rng: random.Random) -> torch.Tensor:
    """A prompt in two parts and a few single tokens: logits of every position, [n, vocabulary]."""
    prompts = [[rng.randrange(320) for _ in range(n)] for n in (23, 9, 1, 1, 4, 1)]
    with engine:
        return torch.cat([engine.forward(p, all_logits=True) for p in prompts])


@settings(max_examples=24)
@given(seed=st.integers(0, 10**6), slots=st.integers(1, 4), repeats=st.booleans())
def test_random_plans_give_bit_identical_logits(model: Path, seed: int, slots: int, repeats: bool) -> None:
    rng = random.Random(seed)
    spec = open_model(model).spec
    decode = random_places(spec, rng)
    tiers = tuple(
        make_tier(spec, tokens, places, slots, CONTEXT, 1)
        for tokens, places in ((4, decode), (16, shrink_places(spec, decode, rng)))
    )
    reference = pinned_everywhere(spec, (4, 16), CONTEXT)
    expected = talk(open_engine(model, reference, context=CONTEXT), random.Random(seed))
    with pytest.MonkeyPatch.context() as patch:  # as on a GPU, where transfers go with the units' graphs
        patch.setattr(PlainKernels, "repeatable", repeats)
        patch.setattr(PlainKernels, "fills", False)  # products of more rows may round otherwise
        got = talk(open_engine(model, tiers, context=CONTEXT), random.Random(seed))
    assert torch.isfinite(got).all()
    assert torch.equal(got, expected)


@settings(max_examples=6)
@given(
    seed=st.integers(0, 10**6),
    slots=st.integers(1, 4),
    qtype=st.sampled_from(("Q4_0", "Q6_K", "BF16")),
    keeps=st.booleans(),
)
def test_split_ffns_give_the_logits_of_whole_ones(
    models: dict[str, Path], seed: int, slots: int, qtype: str, keeps: bool
) -> None:
    rng, model = random.Random(seed), models[qtype]
    spec = open_model(model).spec
    places = random_places(spec, rng)
    places["blk.1.ffn"] = ("streamed", None)  # at least one is split
    decode = split_places(spec, places, rng)
    prefill = shrink_places(spec, places, rng)  # whole units: what is pinned in part leaves VRAM
    if keeps:
        prefill = keep_rows(spec, prefill, decode)
    tiers = tuple(make_tier(spec, n, p, slots, CONTEXT, 1) for n, p in ((4, decode), (16, prefill)))
    assert any(p.cpu_rows for p in tiers[0].placements)
    expected = talk(open_engine(model, pinned_everywhere(spec, (4, 16), CONTEXT), "fast", CONTEXT), random.Random(seed))
    got = talk(open_engine(model, tiers, "fast", CONTEXT), random.Random(seed))
    assert torch.isfinite(got).all()
    assert ((got - expected) ** 2).mean() < 1e-12 * (expected**2).mean()  # products of other shapes: other sums
    assert torch.equal(got, talk(open_engine(model, tiers, "fast", CONTEXT), random.Random(seed)))


def test_only_the_accelerators_rows_of_a_split_ffn_are_copied(model: Path) -> None:
    spec = open_model(model).spec
    places = {u.name: ("pinned", "vram" if u.kind is ATTENTION else None) for u in spec.units}
    places["embedding"] = ("cpu", None)
    places["blk.0.ffn"] = places["blk.1.ffn"] = ("streamed", None, 32)
    places["blk.2.ffn"] = ("pinned", None, 64)
    tier = make_tier(spec, 4, places, 1, CONTEXT, 1)
    with open_engine(model, (tier,), context=CONTEXT) as engine:
        engine.forward([1])
        before = engine._executor.link_bytes
        engine.forward([1])
        moved = engine._executor.link_bytes - before
        memory = engine._executor.arena.pinned("blk.2.ffn").numel()
    whole, hidden = spec.unit("blk.0.ffn"), 4 * spec.config.d_model
    streamed, pinned = (divide_unit(whole, Share(n)).on_acc.packed_nbytes for n in (32, 64))
    assert whole.packed_nbytes > streamed > pinned == memory
    assert moved == 2 * streamed + 4 * (32 + 32 + 64) + hidden


def test_a_large_tier_streams_the_rows_that_a_small_one_leaves_to_the_cpu(model: Path) -> None:
    """What decoding has in VRAM of a divided FFN stays there, and only the other rows are copied."""
    spec = open_model(model).spec
    whole = spec.unit("blk.2.ffn")
    places = {u.name: ("pinned", "vram" if u.kind is ATTENTION else None) for u in spec.units}
    places["embedding"] = ("cpu", None)
    decode = places | {whole.name: ("pinned", None, 64)}
    prefill = keep_rows(spec, places, decode)
    tiers = tuple(make_tier(spec, n, p, 1, CONTEXT, 1) for n, p in ((4, decode), (16, prefill)))
    assert tiers[1].buffers.pinned == tiers[0].buffers.pinned
    with open_engine(model, pinned_everywhere(spec, (4, 16), CONTEXT), context=CONTEXT) as reference:
        expected = [reference.forward(list(range(n))) for n in (12, 1, 16)]
    with open_engine(model, tiers, context=CONTEXT) as engine:
        got = [engine.forward(list(range(n))) for n in (12, 1)]
        resident = engine._executor.arena.pinned(whole.name).clone()
        before = engine._executor.link_bytes
        got.append(engine.forward(list(range(16))))
        moved = engine._executor.link_bytes - before
        assert torch.equal(resident, engine._executor.arena.pinned(whole.name))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    kept = divide_unit(whole, Share(64)).on_acc.packed_nbytes
    copied = divide_unit(whole, Share(kept=count_shares(whole) - 64)).brought.nbytes
    assert kept + copied <= whole.packed_nbytes + 2 * TENSOR_ALIGN
    hidden = 16 * 4 * spec.config.d_model
    assert copied + hidden <= moved <= copied * 2 + hidden  # it may be ahead by one


def test_sizes_that_are_decided_when_a_step_runs_are_not_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, rng = open_model(model).spec, random.Random(1)
    tiers = (make_tier(spec, 4, random_places(spec, rng), 2, CONTEXT, 1),)

    def speak() -> tuple[torch.Tensor, int]:
        engine = open_engine(model, tiers, context=CONTEXT)
        return talk(engine, random.Random(1)), engine.link_bytes

    def emit_without_sizes(*given: Any) -> StepList:
        steps = emit_steps(*given)
        body = (
            replace(s, nbytes=-1) if not (isinstance(s, Move) and s.brings(Weights)) and hasattr(s, "nbytes") else s
            for s in steps.body
        )
        return StepList(steps.enter, tuple(body))

    expected, moved = speak()
    monkeypatch.setattr(executor, "emit_steps", emit_without_sizes)
    got, moved_again = speak()
    assert torch.equal(got, expected) and moved_again == moved


@pytest.mark.slow
def test_pins_that_arrive_wait_for_kv_that_leaves_their_place(tmp_path: Path) -> None:
    context = 1024
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q4_0", n_layers=6, d_ffn=1024, context=context)
    spec = open_model(path).spec
    prefill = {u.name: ("streamed", "vram" if u.kind is ATTENTION else None) for u in spec.units}
    decode = {u.name: ("pinned", "host" if u.kind is ATTENTION else None) for u in spec.units}
    prefill["embedding"] = decode["embedding"] = ("cpu", None)
    tiers = (make_tier(spec, 1, decode, 1, context, 1), make_tier(spec, 64, prefill, 1, context, 1))
    ids = [random.Random(5).randrange(320) for _ in range(context - 3)]

    def answer(engine) -> torch.Tensor:
        with engine:
            return torch.stack([engine.forward(ids), engine.forward([5]), engine.forward([6])])

    expected = answer(open_engine(path, pinned_everywhere(spec, (1, 64), context), context=context))
    engine = open_engine(path, tiers, context=context)
    kv_begins = engine._executor.arena.memory.numel() - tiers[1].buffers.kv
    assert tiers[0].buffers.pinned > kv_begins  # the two overlap, or this test shows nothing
    assert torch.equal(answer(engine), expected)


class HeldDevice(CpuDevice):
    """The last of the copies in that bring a pin waits until `held` is set, or fails after a minute."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.place = threading.Event(), 0  # address of the pin

    def copy_in(self, dst: torch.Tensor, src: torch.Tensor, after: Any = ()) -> Any:
        return super().copy_in(dst, src, (*after, self) if dst.data_ptr() == self.place else after)

    def wait(self, event: Any = None) -> None:
        if event is not None:
            super().wait(event)
        elif not self.held.wait(60):
            raise TimeoutError("nothing was computed while a pin was on its way")


def test_units_compute_while_what_a_switch_brings_is_on_its_way(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = open_model(model)
    spec = file.spec
    decode = {u.name: ("pinned", "vram" if u.kind is ATTENTION else None) for u in spec.units}
    decode["embedding"], decode["blk.0.attention"] = ("cpu", None), ("streamed", "vram")
    decode["blk.1.ffn"] = ("cpu", None)  # units that nothing interrupts are one launch, which waits for all of theirs
    prefill = {u.name: ("streamed", "host" if u.kind is ATTENTION else None) for u in spec.units}
    prefill["embedding"] = ("cpu", None)
    tiers = (make_tier(spec, 1, decode, 1, CONTEXT, 1), make_tier(spec, 16, prefill, 1, CONTEXT, 1))
    with open_engine(model, pinned_everywhere(spec, (1, 16), CONTEXT), context=CONTEXT) as reference:
        expected = [reference.forward(list(range(20))), reference.forward([5])]
    device = HeldDevice()
    with build_engine(file, make_variant(spec, tiers, CONTEXT, 1), device, kernels="plain") as engine:
        assert torch.equal(engine.forward(list(range(20))), expected[0])
        device.place = engine._executor.arena.pinned("blk.2.ffn").data_ptr()
        block = find_block(FFN)
        real = block.run

        def run(*given: Any) -> None:
            real(*given)
            device.held.set()

        monkeypatch.setattr(block, "run", run)
        assert torch.equal(engine.forward([5]), expected[1])


def test_unequal_prompts_in_one_batch_give_the_logits_of_each_alone(model: Path) -> None:
    rng = random.Random(3)
    spec = open_model(model).spec
    prompts = [[rng.randrange(320) for _ in range(n)] for n in (5, 0, 17, 30)]
    places = random_places(spec, rng)
    tiers = tuple(make_tier(spec, n, places, 2, 4 * CONTEXT, 4) for n in (4, 16))
    with open_engine(model, tiers, context=4 * CONTEXT, sequences=4) as engine:
        together = engine.forward(prompts)
        again = engine.forward([[7], [8, 9], [], [10]])
    for i, prompt in enumerate(prompts):
        extra = [[7], [8, 9], [], [10]][i]
        with open_engine(model, context=CONTEXT) as engine:
            if prompt:
                torch.testing.assert_close(together[i], engine.forward(prompt), rtol=1e-4, atol=1e-4)
            else:
                assert together[i].numel() == 0
            if extra:
                torch.testing.assert_close(again[i], engine.forward(extra), rtol=1e-4, atol=1e-4)


def test_two_runs_are_bit_identical(model: Path) -> None:
    runs = []
    for _ in range(2):
        engine = open_engine(model, kernels="fast")
        assert not engine.notes, engine.notes
        runs.append(talk(engine, random.Random(1)))
    assert torch.equal(*runs)
