"""Routed experts, some pinned, some streamed, some on the CPU, at once: planned, simulated, checked and run."""

import random
from dataclasses import replace

import pytest
import torch
from experts_file import N_EXPERTS, RULES, WAYS, ExpertsFile
from plan_samples import make_tier, make_variant
from planner_cases import DESKTOP, OWN, simulate_tier
from short_searches import lengthen_searches
from toy_kinds import CONTEXT, VOCAB

from pshard.model_config import Experts
from pshard.plan import Placement, TierPlan, Variant
from pshard.planner.check_plan import PlanError, check_runnable, check_variant
from pshard.planner.make_plan import plan_variant
from pshard.planner.prepare_ranks import prepare_ranks
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.draft import tier_steps
from pshard.routing.expert_uses import read_nbytes
from pshard.runtime.blocks.block import Laid
from pshard.runtime.blocks.find_block import find_block
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.memory.weights import view_unit
from pshard.steps.emit import emit_steps
from pshard.steps.move import Move, Weights
from pshard.steps.step import StepShape
from pshard.units.moe.experts import EXPERTS
from pshard.units.moe.router import ROUTER
from pshard.units.moe.shared_experts import SHARED_EXPERTS
from pshard.units.share import Share
from pshard.workload import Workload

CLOSE = dict(rtol=1e-4, atol=1e-4)


def make_toy_tier(
    file: ExpertsFile,
    tokens: int,
    ways: list[tuple],
    slots: int,
    sequences: int,
    others: dict[str, tuple] | None = None,
    in_place: bool | None = None,
) -> TierPlan:
    """Everything pinned but the experts, layer by layer, the embedding, and what `others` says."""
    places: dict[str, tuple] = {u.name: ("pinned", "vram" if u.kind.state else None) for u in file.spec.units}
    parts = [u.name for u in file.spec.units if u.kind is EXPERTS]
    places |= {"embedding": ("cpu", None)} | (others or {}) | dict(zip(parts, ways, strict=True))
    return make_tier(file.spec, tokens, places, slots, CONTEXT * sequences, sequences, in_place=in_place)


def open_toy(file: ExpertsFile, tiers: tuple[TierPlan, ...], sequences: int):
    variant = make_variant(file.spec, tiers, CONTEXT * sequences, sequences)
    check_runnable((file.spec,), variant, "cpu")
    return build_engine(file, variant, open_device("cpu"), kernels="plain")


def check_talk(engine, file: ExpertsFile, sequences: int, seed: int) -> None:
    """Turns of unequal length and single tokens: all logits are those of every text alone."""
    rng, texts = random.Random(seed), [list[int]() for _ in range(sequences)]
    found = [list[torch.Tensor]() for _ in range(sequences)]
    for sizes in [(21, 3, 9), (1, 1, 1), (1, 0, 1), (2, 30, 1), (1, 1, 1), (40, 1, 2), (1, 1, 1)]:
        new = [[rng.randrange(VOCAB) for _ in range(n)] for n in sizes[:sequences]]
        for s, logits in enumerate(engine.forward(new, all_logits=True)):
            texts[s] += new[s]
            found[s].append(logits)
    for text, rows in zip(texts, found, strict=True):
        torch.testing.assert_close(torch.cat(rows).double(), file.logits(text), **CLOSE)


@pytest.mark.quick("('streamed', None, 1, 6)-3-1")
@pytest.mark.parametrize(
    ("way", "sequences", "slots"), [(way, *((1, 2), (3, 1))[i % 2]) for i, way in enumerate(WAYS)], ids=str
)
def test_every_placement_gives_the_logits_of_a_plain_forward(way: tuple, sequences: int, slots: int) -> None:
    file = ExpertsFile()
    tiers = tuple(make_toy_tier(file, n, [way] * 3, slots, sequences) for n in (sequences, 16))
    with open_toy(file, tiers, sequences) as engine:
        check_talk(engine, file, sequences, slots)


@pytest.mark.quick("of the chosen-1")
@pytest.mark.parametrize(("rule", "seed"), [(rule, i % 2) for i, rule in enumerate(RULES)])
def test_every_rule_of_a_router_holds_wherever_router_and_experts_are(rule: str, seed: int) -> None:
    """The normed hidden states and the choice are handed to the side that lacks them."""
    rng, file = random.Random(seed), ExpertsFile(replace(RULES[rule], dense_layers=seed), layers=4, seed=seed)
    routed = [u.name for u in file.spec.units if u.kind in (ROUTER, SHARED_EXPERTS)]
    ways = [rng.choice(WAYS) for u in file.spec.units if u.kind is EXPERTS]
    others = {name: (rng.choice(("cpu", "streamed")), None) for name in routed}
    tier = make_toy_tier(file, 16, ways, rng.randrange(1, 4), 1, others)
    with open_toy(file, (tier,), 1) as engine:
        check_talk(engine, file, 1, seed)


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("way", [("streamed", None, 3), ("streamed", None, 3, 2)], ids=str)
def test_the_cpu_takes_experts_of_long_prompts_while_others_are_streamed(way: tuple, sequences: int) -> None:
    """Micro-batches for which other kernels run, and that are larger than what is in them."""
    file, rng = ExpertsFile(), random.Random(7)
    kept = ("streamed", None, 0, way[3]) if way[3:] else ("streamed", None)
    tiers = tuple(make_toy_tier(file, n, [w] * 3, 2, sequences) for n, w in ((sequences, kept), (200, way)))
    texts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (120, 66, 3)[:sequences]]
    with open_toy(file, tiers, sequences) as engine:
        assert engine.rank_plan.covering(100).placement("blk.0.experts").cpu_rows
        for text, logits in zip(texts, engine.forward(texts, all_logits=True)):
            torch.testing.assert_close(logits.double(), file.logits(text), **CLOSE)


@pytest.mark.quick("('streamed', None, 1, 6)")
@pytest.mark.parametrize("way", [w for w in WAYS if w[0] == "streamed"], ids=str)
def test_experts_that_are_read_in_place_give_the_bits_of_copied_ones(way: tuple) -> None:
    file, rng = ExpertsFile(), random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (16, 20, 32, 9)]
    found, moved = [], []
    for in_place in (True, False):
        tiers = tuple(make_toy_tier(file, n, [way] * 3, 1, 1, in_place=in_place or n == 1) for n in (1, 16, 32))
        with open_toy(file, tiers, 1) as engine:
            found.append([engine.forward(p, all_logits=True) for p in prompts])
            before = engine.link_bytes
            engine.forward(prompts[0][:4])
            moved.append(engine.link_bytes - before)
    assert all(torch.equal(one, other) for one, other in zip(*found))
    texts = [token for p in prompts for token in p]
    torch.testing.assert_close(torch.cat(found[0]).double(), file.logits(texts), **CLOSE)
    assert moved[0] < moved[1]  # four tokens use few experts, and copies bring all


def test_bytes_that_kernels_read_over_the_link_are_counted() -> None:
    """By a run, and by the steps that the plan is printed from: what so many tokens are expected to use."""
    file = ExpertsFile()
    unit, config = file.spec.unit("blk.0.experts"), file.spec.config
    tiers = tuple(make_toy_tier(file, n, [("streamed", None, 3)] * 3, 2, 1, in_place=True) for n in (1, 16))
    pinned = tuple(make_toy_tier(file, n, [("pinned", None, 3)] * 3, 2, 1) for n in (1, 16))
    moved = []
    for some in (tiers, pinned):
        with open_toy(file, some, 1) as engine:
            engine.forward([1])
            before = engine.link_bytes
            engine.forward(list(range(2, 14)))
            moved.append(engine.link_bytes - before)
    assert moved[0] - moved[1] == 3 * read_nbytes(unit, Share(3), config, 12)
    steps = [emit_steps(file.spec, of[1], StepShape(16, 0, 16)).link_bytes for of in (tiers, pinned)]
    assert steps[0] - steps[1] == 3 * read_nbytes(unit, Share(3), config, 16)
    assert read_nbytes(unit, Share(3), config, 1) < unit.packed_nbytes // 4


@pytest.mark.parametrize(("sequences", "seed"), [(1, 0), (3, 1)])
def test_kept_parts_stay_where_they_are_when_tiers_are_switched(sequences: int, seed: int) -> None:
    file, rng = ExpertsFile(layers=4), random.Random(seed)
    kept = [rng.randrange(1, N_EXPERTS) for _ in range(4)]
    small = [
        rng.choice((("pinned", None, N_EXPERTS - n), ("streamed", None, rng.randrange(N_EXPERTS - n), n))) for n in kept
    ]
    middle = [("streamed", None, 0, n) for n in kept]
    large = [*middle[:2], ("streamed", None), ("cpu", None)]
    tiers = tuple(
        make_toy_tier(file, n, ways, 2, sequences) for n, ways in ((sequences, small), (8, middle), (24, large))
    )
    with open_toy(file, tiers, sequences) as engine:
        check_talk(engine, file, sequences, seed)
        assert engine.switches > 2


def test_experts_read_in_host_memory_have_their_addresses_on_what_computes() -> None:
    file = ExpertsFile()
    unit = next(u for u in file.spec.units if u.kind is EXPERTS)
    blob = torch.zeros(unit.packed_nbytes, dtype=torch.uint8)
    config, view = file.spec.config, view_unit(unit, blob)
    weights = find_block(unit.kind).prepare(Laid(unit, config, view, torch.device("meta"), unit.operations(config)))
    assert weights.addresses.device.type == "meta"


# --- a plan ---------------------------------------------------------------------------------------------------------

RATES = replace(DESKTOP, link=20e9, host_memory=80e9, host_flops=10e9, handoff_seconds=5e-6)


def plan_toy(file: ExpertsFile, arena: int) -> Variant:
    workload = Workload((OWN + arena,), context=128, max_ubatch=128, prompt=100, generated=200)
    return plan_variant(file.spec, profile_from_datasheet(RATES), workload)


@pytest.fixture(scope="module")
def planned() -> tuple[ExpertsFile, Variant]:
    file = ExpertsFile(Experts(N_EXPERTS, 2, 160), layers=2, d_model=512)
    with pytest.MonkeyPatch.context() as patch:
        lengthen_searches(patch)
        return file, plan_toy(file, 5)


def places(tier: TierPlan) -> list[Placement]:
    return [p for p in tier.placements if "experts" in p.unit]


def test_a_plan_has_experts_read_over_the_link_while_the_cpu_computes_others(
    planned: tuple[ExpertsFile, Variant],
) -> None:
    file, variant = planned
    decode = variant.ranks[0].tiers[0]
    assert any(p.cpu_rows and p.where == "streamed" for p in places(decode))
    assert decode.buffers.slot_bytes < file.spec.unit("blk.0.experts").packed_nbytes  # no slot is for experts
    check_variant((file.spec,), variant, "cuda")
    assert not set(variant.ranks[0].resident) & {p.unit for p in places(decode) if p.share}


def test_a_mix_of_all_three_places_works_at_once_in_the_simulation(planned: tuple[ExpertsFile, Variant]) -> None:
    file, variant = planned
    (task,) = prepare_ranks(file.spec, profile_from_datasheet(RATES), variant.workload)
    ways = [("streamed", None, 2, 3)] * 2
    result = simulate_tier(task.room, make_toy_tier(file, 16, ways, 1, 1), task.costs[1])
    name = "blk.1.experts"
    ends = {(e.lane, getattr(e.step, "part", "")): e for e in result.events if getattr(e.step, "unit", "") == name}
    assert ends["link", ""].end <= ends["acc", "share"].start < ends["acc", "rest"].start
    assert ends["cpu", "share"].start < ends["acc", "rest"].start  # both sides work at once


def test_what_is_read_over_the_link_in_place_takes_the_link_and_no_slot(planned: tuple[ExpertsFile, Variant]) -> None:
    file, variant = planned
    (task,) = prepare_ranks(file.spec, profile_from_datasheet(RATES), variant.workload)
    tier = make_toy_tier(file, 1, [("streamed", None, 4), ("streamed", None)], 1, 1)
    assert not [s for s in tier_steps(task.room, tier, task.costs[0]).body if isinstance(s, Move) and s.brings(Weights)]
    result = simulate_tier(task.room, tier, task.costs[0])
    for i, cost in ((0, task.costs[0].divided("blk.0.experts", Share(4))), (1, task.costs[0].units["blk.1.experts"])):
        events = [e for e in result.events if getattr(e.step, "unit", "") == f"blk.{i}.experts"]
        read = next(e for e in events if e.lane == "link")
        assert read.end - read.start >= cost.read * 0.999 > 0
        assert all(e.end >= read.end for e in events if e.lane == "acc" and e.start >= read.end)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(kept_parts=0), "prefix|bytes of pinned"),
        (dict(kept_parts=N_EXPERTS - 1), "leave none between"),
        (dict(kept_parts=-1), "leave none between|prefix"),
        (dict(cpu_rows=N_EXPERTS), "leave none between"),
        (dict(where="pinned"), "kept beside a slot"),
        (dict(where="cpu"), "cannot be divided"),
        (dict(kept_parts=1), "different rows or parts|bytes of pinned"),
        (dict(unit="blk.0.attention", kv="vram"), "cannot be divided"),
    ],
)
def test_a_broken_mix_is_refused(change: dict, message: str) -> None:
    file = ExpertsFile(layers=2)
    tiers = tuple(make_toy_tier(file, n, [("streamed", None, 2, 3)] * 2, 2, 1) for n in (1, 16))
    variant = make_variant(file.spec, tiers, CONTEXT, 1)
    check_runnable((file.spec,), variant, "cpu")
    name = change.pop("unit", "blk.0.experts")
    changed = tuple(
        replace(p, **({"kept_parts": 1, "where": "streamed"} | change)) if p.unit == name and "attention" in name
        else replace(p, **change) if p.unit == name else p
        for p in tiers[0].placements
    )  # fmt: skip
    rank = replace(variant.ranks[0], tiers=(replace(tiers[0], placements=changed), tiers[1]))
    with pytest.raises(PlanError, match=message):
        check_runnable((file.spec,), replace(variant, ranks=(rank,)), "cpu")


def test_a_large_tier_that_reads_in_place_is_refused() -> None:
    file = ExpertsFile(layers=2)
    tiers = tuple(make_toy_tier(file, n, [("streamed", None)] * 2, 2, 1, in_place=True) for n in (1, 64))
    with pytest.raises(PlanError, match="tier 64: nothing is read over the link in place"):
        check_runnable((file.spec,), make_variant(file.spec, tiers, CONTEXT, 1), "cpu")


def test_a_tier_that_comes_back_is_not_bound_anew() -> None:
    """Graphs that were captured in it read tables of its experts' addresses, which are made once."""
    file = ExpertsFile()
    tiers = tuple(make_toy_tier(file, n, [(where, None)] * 3, 2, 1) for n, where in ((1, "streamed"), (16, "pinned")))
    with open_toy(file, tiers, 1) as engine:
        engine.forward([5] * 9)
        engine.forward([6])
        executor = engine._executor
        executor.residents.bind = lambda *_: pytest.fail("a unit is bound again")
        engine.forward([7] * 9)
        engine.forward([8])
        assert executor.switches == 3


def test_experts_that_lie_in_vram_in_every_tier_are_not_kept_in_host_memory() -> None:
    file = ExpertsFile()
    kept = {}
    for name, ways in (
        ("all", [("pinned", None)] * 3),
        ("some", [("pinned", None), ("streamed", None), ("cpu", None)]),
    ):
        tiers = tuple(make_toy_tier(file, n, ways, 2, 1) for n in (1, 16))
        with open_toy(file, tiers, 1) as engine:
            kept[name] = engine.memory().host_weights
            check_talk(engine, file, 1, 0)
    each = file.spec.unit("blk.0.experts").packed_nbytes
    assert kept["all"] < each and kept["some"] == pytest.approx(kept["all"] + 2 * each, abs=4096)
