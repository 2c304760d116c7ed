"""States that do not grow: wherever they lie, and whatever moves them, the logits are those of a plain forward."""

import random
from dataclasses import replace

import pytest
import torch
from plan_samples import make_tier, make_variant, random_places, shrink_places
from planner_cases import DESKTOP
from toy_kinds import CONTEXT, DECAY, VOCAB, ToyFile, know_decay  # noqa: F401

from pshard.errors import UserError
from pshard.planner.check_plan import check_runnable, check_variant
from pshard.planner.make_plan import plan_variant
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.runtime.blocks.find_block import find_block
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.session import bench_engine
from pshard.session.bench_engine import BenchTest
from pshard.steps.emit import emit_steps
from pshard.steps.move import Move, UnitState
from pshard.steps.step import Compute, StepShape
from pshard.workload import Workload

pytestmark = pytest.mark.usefixtures("know_decay")
CLOSE = dict(rtol=1e-4, atol=1e-4)


def open_toy(file: ToyFile, tiers, sequences: int, kernels: str = "plain"):
    variant = make_variant(file.spec, tiers, CONTEXT * sequences, sequences)
    check_runnable((file.spec,), variant, "cpu")
    return build_engine(file, variant, open_device("cpu"), kernels=kernels)


def check_talk(engine, file: ToyFile, sequences: int, seed: int) -> None:
    """Turns of unequal length, pauses, resets and single tokens: all logits are those of every text alone."""
    rng, texts = random.Random(seed), [list[int]() for _ in range(sequences)]
    turns = [(21, 3, 9), (1, 1, 1), (1, 0, 1), (0, 30, 1), (1, 1, 0), (1, 1, 1), (40, 1, 2), (1, 1, 1)]
    for turn, sizes in enumerate(turns):
        if turn in (3, 6):
            engine.reset(sequences - 1)
            texts[-1] = []
        new = [[rng.randrange(VOCAB) for _ in range(n)] for n in sizes[:sequences]]
        if not any(new):
            continue
        for s, logits in enumerate(engine.forward(new, all_logits=True)):
            texts[s] += new[s]
            if new[s]:
                expected = file.logits(texts[s])[-len(new[s]) :]
                torch.testing.assert_close(logits.double(), expected, **CLOSE)


@pytest.mark.quick("streamed host-3")
@pytest.mark.parametrize(
    ("where", "sequences"),
    [("pinned vram", 3), ("streamed vram", 1), ("pinned host", 1), ("streamed host", 3), ("cpu host", 3)],
)
def test_every_placement_gives_the_logits_of_a_plain_forward(where: str, sequences: int) -> None:
    file, (weights, state) = ToyFile(), where.split()
    places = {u.name: (weights, state if u.kind.state else None) for u in file.spec.units}
    places["embedding"] = ("cpu", None)
    tiers = tuple(make_tier(file.spec, n, places, 2, CONTEXT * sequences, sequences) for n in (sequences, 16))
    for kernels in ("plain", "fast"):
        with open_toy(file, tiers, sequences, kernels) as engine:
            check_talk(engine, file, sequences, 1)


@pytest.mark.parametrize(("seed", "sequences"), [(seed, 1 + seed % 2 * 2) for seed in range(4)])
def test_states_follow_when_tiers_are_switched(seed: int, sequences: int) -> None:
    file, rng = ToyFile(), random.Random(seed)
    places, tiers = random_places(file.spec, rng), []
    for tokens in (sequences, 8, 24):
        tiers.append(make_tier(file.spec, tokens, places, 2, CONTEXT * sequences, sequences))
        places = shrink_places(file.spec, places, rng)
    with open_toy(file, tuple(tiers), sequences) as engine:
        check_talk(engine, file, sequences, seed)
        assert engine.switches > 2


def test_a_step_moves_the_states_of_its_own_sequences_and_touches_no_others() -> None:
    file = ToyFile("dd")
    places = {u.name: ("pinned", "host" if u.kind.state else None) for u in file.spec.units}
    places["embedding"] = ("cpu", None)
    tier = make_tier(file.spec, 8, places, 0, 4 * CONTEXT, 4)
    with open_toy(file, (tier,), 4) as engine:
        engine.forward([[1], [2, 3], [4], [5]])
        engine.device.synchronize()  # write-backs run on their own lane
        kept = {name: memory.clone() for name, memory in engine._executor.host.states.items()}
        before = engine.link_bytes
        engine.forward([[], [7], [], [8]])
        moved = engine.link_bytes - before
        engine.device.synchronize()
        each = 4 * file.spec.config.d_model
        assert moved == 2 * 2 * each + 2 * each  # two states of two layers, and the hidden rows of the look-up
        for name, memory in engine._executor.host.states.items():
            changed = [not torch.equal(a, b) for a, b in zip(memory.view(4, -1), kept[name].view(4, -1))]
            assert changed == [False, True, False, True]


def test_a_plan_with_fixed_states_is_made_checked_and_run() -> None:
    file = ToyFile("dadd", d_model=256, d_ffn=512)
    profile = profile_from_datasheet(replace(DESKTOP, kind="cpu"))
    workload = Workload((4,), context=3 * CONTEXT, sequences=3, type_k="f32", type_v="f32", max_ubatch=32, prompt=40,
                        generated=20)  # fmt: skip
    variant = plan_variant(file.spec, profile, workload)
    check_variant((file.spec,), variant, "cpu")
    with build_engine(file, variant, open_device("cpu"), kernels="plain") as engine:
        check_talk(engine, file, 3, 4)


def test_steps_say_what_a_fixed_state_moves_and_where_it_lies() -> None:
    spec = ToyFile("da").spec
    places = {u.name: ("pinned", "host" if u.kind is DECAY else "vram" if u.kind.state else None) for u in spec.units}
    tier = make_tier(spec, 16, places, 0, CONTEXT, 3)
    body = emit_steps(spec, tier, StepShape(16, 100, 1, 3)).body
    each = 4 * spec.config.d_model
    assert [
        (s.unit, s.nbytes, s.is_decided_late) for s in body if isinstance(s, Move) and isinstance(s.portion, UnitState)
    ] == [("blk.0.decay", 3 * each, True)] * 2
    assert {s.unit: s.state for s in body if isinstance(s, Compute) and s.state} == {
        "blk.0.decay": "host",
        "blk.1.attention": "vram",
    }
    fetched = [
        s.unit
        for s in emit_steps(spec, tier, StepShape(16, 0, 1, 3)).body
        if isinstance(s, Move) and s.brings(UnitState)
    ]
    assert fetched == ["blk.0.decay"]  # its zeros, where sequences begin


def test_a_text_with_a_fixed_state_is_computed_again_where_it_is_cut_and_is_not_saved(tmp_path) -> None:
    file = ToyFile()
    places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in file.spec.units}
    with open_toy(file, (make_tier(file.spec, 8, places, 0, CONTEXT, 1),), 1) as engine:
        engine.forward([1, 2, 3])
        engine.reset(0, 3)
        engine.reset(0, 2)
        assert engine.lengths == (2,)
        torch.testing.assert_close(engine.forward([7]).double(), file.logits([1, 2, 7])[-1], **CLOSE)
        with pytest.raises(UserError, match=r"blk\.0\.decay \(decay\) keeps a state that is no KV cache"):
            engine.save(tmp_path / "cache")
        with pytest.raises(UserError, match=r"blk\.0\.decay \(decay\) keeps a state that is no KV cache"):
            engine.load(tmp_path / "cache")
        engine.reset(0, 0)
        torch.testing.assert_close(engine.forward([5]).double(), file.logits([5])[-1], **CLOSE)


def test_a_kind_without_a_block_is_an_error_that_names_it() -> None:
    with pytest.raises(NotImplementedError, match="no block computes units of kind 'strange'; there are n-grams, "):
        find_block(replace(DECAY, name="strange"))


def test_decoding_at_a_depth_is_measured_without_the_switch_from_what_is_computed_again(monkeypatch) -> None:
    file = ToyFile()
    places = {u.name: ("streamed", "vram" if u.kind.state else None) for u in file.spec.units}
    places["embedding"] = ("cpu", None)
    tiers = tuple(make_tier(file.spec, n, places, 2, CONTEXT, 1) for n in (1, 16))
    during = []
    once = bench_engine._run_once

    def run_once(engine, test) -> None:
        before = engine.switches
        once(engine, test)
        during.append(engine.switches - before)

    monkeypatch.setattr(bench_engine, "_run_once", run_once)
    with open_toy(file, tiers, 1) as engine:
        engine.forward([1] * 30)
        assert engine.reset(length=20) == 20  # this state cannot be cut back
        found = bench_engine.run_test(
            engine, None, BenchTest(0, 4, n_depth=20), 3, bench_engine.BenchSetting("toy", 1, "hand", (), "")
        )
        assert engine.lengths[0] == 24
    assert found.n_depth == 20 and during and not any(during)
