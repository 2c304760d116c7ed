"""Units with parts, some pinned, some streamed, some on the CPU, at once: planned, simulated, checked and run."""

import random
from dataclasses import replace

import pytest
import torch
from plan_samples import make_tier, make_variant
from planner_cases import DESKTOP, OWN, simulate_tier
from toy_kinds import CONTEXT, VOCAB
from toy_parts import N_PARTS, PARTS, PartsFile, choose, know_parts  # noqa: F401

from pshard.plan import Placement, TierPlan, Variant
from pshard.planner.check_plan import PlanError, check_runnable, check_variant
from pshard.planner.make_plan import plan_variant
from pshard.planner.prepare_ranks import prepare_ranks
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.steps.emit import emit_steps
from pshard.steps.step import Compute, CopyIn, Join, StepShape
from pshard.units.divide_unit import divide_unit
from pshard.units.share import Share
from pshard.workload import Workload

pytestmark = pytest.mark.usefixtures("know_parts")
CLOSE = dict(rtol=1e-4, atol=1e-4)
WAYS = [
    ("pinned", None),
    ("streamed", None),
    ("cpu", None),
    ("pinned", None, 3),
    ("streamed", None, 3),
    ("streamed", None, 0, 2),
    ("streamed", None, 3, 2),
    ("streamed", None, 1, 6),
]


def make_toy_tier(file: PartsFile, tokens: int, ways: list[tuple], slots: int, sequences: int) -> TierPlan:
    """Everything pinned but the units with parts, layer by layer, and the embedding."""
    places: dict[str, tuple] = {u.name: ("pinned", "vram" if u.kind.state else None) for u in file.spec.units}
    parts = [u.name for u in file.spec.units if u.kind is PARTS]
    places |= {"embedding": ("cpu", None)} | dict(zip(parts, ways, strict=True))
    return make_tier(file.spec, tokens, places, slots, CONTEXT * sequences, sequences)


def open_toy(file: PartsFile, tiers: tuple[TierPlan, ...], sequences: int):
    variant = make_variant(file.spec, tiers, CONTEXT * sequences, sequences)
    check_runnable((file.spec,), variant, "cpu")
    return build_engine(file, variant, open_device("cpu"), kernels="plain")


def check_talk(engine, file: PartsFile, sequences: int, seed: int) -> None:
    """Turns of unequal length and single tokens: all logits are those of every text alone."""
    rng, texts = random.Random(seed), [list[int]() for _ in range(sequences)]
    for sizes in [(21, 3, 9), (1, 1, 1), (1, 0, 1), (2, 30, 1), (1, 1, 1), (40, 1, 2), (1, 1, 1)]:
        new = [[rng.randrange(VOCAB) for _ in range(n)] for n in sizes[:sequences]]
        for s, logits in enumerate(engine.forward(new, all_logits=True)):
            texts[s] += new[s]
            if new[s]:
                torch.testing.assert_close(logits.double(), file.logits(texts[s])[-len(new[s]) :], **CLOSE)


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_placement_gives_the_logits_of_a_plain_forward(way: tuple, sequences: int) -> None:
    file = PartsFile()
    for slots in (1, 2):
        tiers = tuple(make_toy_tier(file, n, [way] * 3, slots, sequences) for n in (sequences, 16))
        with open_toy(file, tiers, sequences) as engine:
            check_talk(engine, file, sequences, slots)


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_kept_parts_stay_where_they_are_when_tiers_are_switched(seed: int, sequences: int) -> None:
    file, rng = PartsFile(layers=4), random.Random(seed)
    kept = [rng.randrange(1, N_PARTS) for _ in range(4)]
    small = [
        rng.choice((("pinned", None, N_PARTS - n), ("streamed", None, rng.randrange(N_PARTS - n), n))) for n in kept
    ]
    middle = [("streamed", None, 0, n) for n in kept]
    large = [*middle[:2], ("streamed", None), ("cpu", None)]
    tiers = tuple(
        make_toy_tier(file, n, ways, 2, sequences) for n, ways in ((sequences, small), (8, middle), (24, large))
    )
    with open_toy(file, tiers, sequences) as engine:
        check_talk(engine, file, sequences, seed)
        assert engine.switches > 2


def test_a_micro_batch_copies_the_parts_that_its_tokens_take() -> None:
    file = PartsFile(layers=2)
    tier = make_toy_tier(file, 4, [("streamed", None, 2, 3)] * 2, 2, 1)
    each = divide_unit(file.spec.unit("blk.0.parts"), Share(2, 3)).brought.nbytes // 3
    hidden = 4 * file.spec.config.d_model
    with open_toy(file, (tier,), 1) as engine:
        engine.forward([0])
        for ids in ([1], [9, 3], [5, 6, 7, 8]):
            before = engine.link_bytes
            engine.forward(ids)
            streamed = set(choose(torch.tensor(ids)).flatten().tolist()) & {3, 4, 5}
            activations = len(ids) * hidden * (1 + 2)  # of the look-up, and what the CPU joins of each unit
            assert engine.link_bytes - before == 2 * len(streamed) * each + activations


def test_steps_copy_what_is_expected_and_nothing_ahead_of_its_tokens() -> None:
    spec = PartsFile(layers=3).spec
    tier = make_toy_tier(PartsFile(layers=3), 4, [("streamed", None, 2, 2)] * 3, 2, 1)
    steps = emit_steps(spec, tier, StepShape(1, 8, 1))
    copies = [s for s in steps.body if isinstance(s, CopyIn)]
    part = divide_unit(spec.unit("blk.0.parts"), Share(2, 2)).brought.nbytes // 4
    assert not steps.enter
    assert [(s.unit, s.nbytes, s.decided, s.share) for s in copies] == [
        (f"blk.{i}.parts", part, True, Share(2, 2)) for i in range(3)
    ]  # a token takes a quarter of the parts, here one of four
    assert steps.body[:2] == tuple(copies[:2])
    own = [s for s in steps.body if isinstance(s, Compute) and s.unit == "blk.1.parts"]
    assert [(s.on, s.source, s.part) for s in own] == [
        ("acc", "slot", "share"), ("cpu", "host", "share"), ("acc", "slot", "rest"),
    ]  # fmt: skip
    assert {s.nbytes for s in steps.body if isinstance(s, Join)} == {4 * spec.config.d_model}


# --- a plan ---------------------------------------------------------------------------------------------------------

RATES = replace(DESKTOP, link=20e9, host_memory=80e9, host_flops=10e9, handoff_seconds=5e-6)


def plan_toy(file: PartsFile, arena: int) -> Variant:
    workload = Workload((OWN + arena,), context=128, max_ubatch=128, prompt=100, generated=200)
    return plan_variant(file.spec, profile_from_datasheet(RATES), workload)


@pytest.fixture(scope="module")
def planned() -> tuple[PartsFile, Variant]:
    file = PartsFile(layers=2, d_model=512)
    return file, plan_toy(file, 12)


def places(tier: TierPlan) -> list[Placement]:
    return [p for p in tier.placements if "parts" in p.unit]


def test_a_plan_pins_streams_and_computes_parts_of_one_unit_at_once(planned: tuple[PartsFile, Variant]) -> None:
    file, variant = planned
    decode, largest = variant.ranks[0].tiers[0], variant.ranks[0].tiers[-1]
    assert any(p.where == "streamed" and p.cpu_rows and p.kept_parts for p in places(decode))
    assert largest.tokens > 64 and not any(p.cpu_rows for p in places(largest))  # the CPU takes part in small batches
    check_variant((file.spec,), variant, "cuda")
    assert set(variant.ranks[0].pin_order) >= {p.unit for p in places(decode) if p.kept_parts}
    assert not set(variant.ranks[0].resident) & {p.unit for p in places(decode) if p.share}


def test_a_mix_is_simulated_as_faster_than_whole_units(planned: tuple[PartsFile, Variant]) -> None:
    file, variant = planned
    decode = variant.ranks[0].tiers[0]
    (task,) = prepare_ranks(file.spec, profile_from_datasheet(RATES), variant.workload)
    result = simulate_tier(task.room, decode, task.costs[0])
    assert result.seconds == pytest.approx(decode.prediction.seconds)
    mixed = next(p.unit for p in places(decode) if p.cpu_rows and p.kept_parts)
    ends = {(e.lane, getattr(e.step, "part", "")): e for e in result.events if getattr(e.step, "unit", "") == mixed}
    assert ends["link", ""].end <= ends["acc", "share"].start < ends["acc", "rest"].start
    assert ends["cpu", "share"].start < ends["link", ""].end  # the CPU does not wait for the copy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(kept_parts=0), "prefix|bytes of pinned"),
        (dict(kept_parts=N_PARTS - 1), "leave none between"),
        (dict(kept_parts=-1), "leave none between|prefix"),
        (dict(cpu_rows=N_PARTS), "leave none between"),
        (dict(where="pinned"), "kept beside a slot"),
        (dict(where="cpu"), "cannot be divided"),
        (dict(kept_parts=1), "different rows or parts|bytes of pinned"),
    ],
)
def test_a_broken_mix_is_refused(planned: tuple[PartsFile, Variant], change: dict, message: str) -> None:
    file, variant = planned
    rank = variant.ranks[0]
    at = next(i for i, p in enumerate(rank.tiers[0].placements) if p.cpu_rows and p.kept_parts)
    changed = list(rank.tiers[0].placements)
    changed[at] = replace(changed[at], **change)
    tiers = (replace(rank.tiers[0], placements=tuple(changed)), *rank.tiers[1:])
    with pytest.raises(PlanError, match=message):
        check_variant((file.spec,), replace(variant, ranks=(replace(rank, tiers=tiers),)), "cuda")


def test_an_attention_unit_has_no_parts_to_keep(planned: tuple[PartsFile, Variant]) -> None:
    file, variant = planned
    rank = variant.ranks[0]
    placements = tuple(
        replace(p, where="streamed", kept_parts=1) if p.kv is not None else p for p in rank.tiers[0].placements
    )
    tiers = (replace(rank.tiers[0], placements=placements), *rank.tiers[1:])
    with pytest.raises(PlanError, match="cannot be divided"):
        check_variant((file.spec,), replace(variant, ranks=(replace(rank, tiers=tiers),)), "cuda")


@pytest.mark.parametrize("sequences", [1, 3])
def test_a_planned_mix_runs(planned: tuple[PartsFile, Variant], sequences: int) -> None:
    """The plan's placements, with buffers for the CPU as accelerator."""
    file, variant = planned
    tiers = tuple(
        make_tier(
            file.spec, max(t.tokens, sequences), {p.unit: (p.where, p.kv, *p.share) for p in t.placements},
            t.buffers.slots, CONTEXT * sequences, sequences,
        )
        for t in variant.ranks[0].tiers
        if t.tokens >= sequences
    )  # fmt: skip
    with open_toy(file, tiers, sequences) as engine:
        check_talk(engine, file, sequences, 5)
