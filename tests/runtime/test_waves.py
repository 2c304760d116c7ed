"""Layers of experts that come to slots in several waves: the logits of all in memory, to the bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import converse, open_engine, pinned_everywhere
from model_files import write_gguf
from plan_samples import make_tier, make_variant

from pshard.models import open_model
from pshard.plan import Sweep, TierPlan
from pshard.planner.check_plan import PlanError, check_runnable
from pshard.steps.emit import emit_steps
from pshard.steps.move import Move, Weights
from pshard.steps.step import Compute, StepShape
from pshard.units.divide_unit import find_wave
from pshard.units.share import Wave

CONTEXT = 256
TOKENS = 1, 64
SHAPES: dict[str, dict] = {
    "qwen3moe": {"qtype": "Q8_0"},
    "gpt-oss": {"qtype": "F32", "qtypes": {"ffn_up_exps.weight": "MXFP4"}},
}


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSHARD_DISK", "fake:rate=20G,jitter=1ms")


def stream_experts(
    path: Path, home: str, waves: int, slots: int, sweep: int = 0, tokens: tuple[int, int] = TOKENS
) -> tuple[TierPlan, ...]:
    """All layers of experts streamed in both tiers, all else in the arena."""
    spec = open_model(path).spec
    places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
    places |= {u.name: (home, None) for u in spec.units if u.kind.parts}
    shape = {"in_place": False, "batch": TOKENS[-1], "waves": waves}
    return tuple(
        make_tier(spec, n, places, slots, CONTEXT, 1, **shape, sweep=sweep if n == TOKENS[-1] else 0) for n in tokens
    )


@pytest.mark.quick("3-streamed-fast-qwen3moe", "4-disk-fast-gpt-oss")
@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss"])
@pytest.mark.parametrize(("home", "kernels"), [("streamed", "fast"), ("disk", "fast"), ("disk", "plain")])
@pytest.mark.parametrize("waves", [3, 4])
def test_no_bit_depends_on_how_many_waves_a_layer_comes_in(
    tmp_path: Path, arch: str, home: str, kernels: str, waves: int
) -> None:
    """Of 8 experts three waves have 3, 3 and 2."""
    path = write_gguf(tmp_path / "m.gguf", arch, **SHAPES[arch])
    with open_engine(path, pinned_everywhere(open_model(path).spec, TOKENS, CONTEXT), kernels, CONTEXT) as engine:
        right = converse(engine)
    for slots in (1, 2, 3):
        with open_engine(path, stream_experts(path, home, waves, slots), kernels, CONTEXT) as engine:
            assert torch.equal(converse(engine), right), slots


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss"])
@pytest.mark.parametrize(("home", "waves"), [("streamed", 3), ("disk", 4)])
def test_no_bit_depends_on_waves_on_a_gpu(tmp_path: Path, arch: str, home: str, waves: int) -> None:
    """Of up to eight tokens experts are multiplied pair by pair, where they are all there."""
    path = write_gguf(tmp_path / "m.gguf", arch, **SHAPES[arch])
    tokens, found = (8, TOKENS[-1]), []
    for times in (1, waves):
        small = stream_experts(path, home, 1, 2, tokens=tokens)[0]
        tiers = small, stream_experts(path, home, times, 2, tokens=tokens)[1]
        with open_engine(path, tiers, "fast", CONTEXT, device="cuda") as engine:
            found.append(converse(engine))
    assert torch.isfinite(found[0]).all() and torch.equal(*found)


def test_each_wave_has_a_slot_of_its_own_and_all_of_them_bring_the_layer_once(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", **SHAPES["qwen3moe"])
    spec, tier = open_model(path).spec, stream_experts(path, "streamed", 3, 2)[-1]
    body = emit_steps(spec, tier, StepShape(64, 0, 1)).body
    experts = [unit for unit in spec.units if unit.kind.parts]
    moves = [step for step in body if isinstance(step, Move) and isinstance(step.portion, Weights)]
    computed = [(step.unit, step.wave, step.slot) for step in body if isinstance(step, Compute) and step.wave.of > 1]
    numbered = enumerate((unit.name, Wave(wave, 3)) for unit in experts for wave in range(3))
    assert computed == [(name, wave, i % 2) for i, (name, wave) in numbered]
    assert len(moves) == len(computed)
    shared = sum(t.packed_nbytes for t in experts[0].tensors if not t.parts)
    brought = sum(step.nbytes for step in moves)
    assert brought == sum(unit.packed_nbytes + 2 * shared for unit in experts)
    assert tier.buffers.slot_bytes >= max(step.nbytes for step in moves) == find_wave(experts[0], 0, 3).nbytes


@pytest.mark.parametrize(
    ("change", "message"),
    [({"waves": 0}, "in 0 waves"), ({"waves": 2}, "do not hold what is streamed"), ({"sweep": Sweep(3)}, "3 waves")],
)
def test_waves_that_cannot_be_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", **SHAPES["qwen3moe"])
    spec, tiers = open_model(path).spec, stream_experts(path, "streamed", 3, 2)
    check_runnable((spec,), make_variant(spec, tiers, CONTEXT, 1), "cpu")
    sweep = 3 if "sweep" in change else 0
    tiers = stream_experts(path, "streamed", 3, 2, sweep) if sweep else (tiers[0], replace(tiers[1], **change))
    with pytest.raises(PlanError, match=message):
        check_runnable((spec,), make_variant(spec, tiers, CONTEXT, 1), "cpu")
