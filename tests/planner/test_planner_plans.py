"""Whole plans: legal, within budget, never worse than a published strategy, and told apart from what needs no plan."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import strategies as st
from planner_cases import (
    DESKTOP,
    MANY,
    OWN,
    few_or_many,
    machines,
    make_model,
    models,
    published_variants,
    rival_variants,
    try_cases,
    workloads,
)

from pshard import predicted_times as pace
from pshard.cuts.rank_parts import cut_ranks
from pshard.errors import BudgetTooSmall, UserError
from pshard.plan import Variant
from pshard.planner.check_plan import PlanError, check_variant
from pshard.planner.join_ranks import join_ranks
from pshard.planner.make_plan import choose_fastest, place_ranks, plan_baseline, plan_variant, refine_ranks
from pshard.planner.prepare_ranks import prepare_ranks, rank_shares
from pshard.planner.price.datasheet import Rates, profile_from_datasheet
from pshard.planner.price.draft import draft_tier
from pshard.planner.program.unit_classes import SIXTEENTHS
from pshard.planner.published.strategies import list_strategies
from pshard.planner.search.one_placement import common_plans
from pshard.planner.search.round_times import plan_seconds
from pshard.predicted_times import first_token_seconds, tier_seconds
from pshard.units.divide_unit import list_shares, without_cpu
from pshard.workload import Split, Workload

PROFILE = profile_from_datasheet(DESKTOP)
LARGE = profile_from_datasheet(replace(DESKTOP, host_memory_bytes=256 << 30))  # holds 128 layers


def smallest_budget(spec, profile, workload: Workload) -> int:
    try:
        plan_variant(spec, profile, replace(workload, vram_mib=(1,)))
    except BudgetTooSmall as error:
        return error.smallest_mib
    return 1


def workload_seconds(spec, profile, workload: Workload, variant: Variant) -> float:
    """Simulated seconds of one round of the workload, priced the same way for every variant."""
    task = prepare_ranks(spec, profile, replace(workload, max_ubatch=variant.workload.max_ubatch))[0]
    tiers = variant.ranks[0].tiers
    return plan_seconds(task.room, tiers, tuple(t.prediction.seconds for t in tiers), task.costs)


@few_or_many
def test_every_plan_is_legal_within_budget_and_no_worse_than_published_strategies(cases):
    try_cases(cases, expect_legal_and_no_worse, st.data())


def expect_legal_and_no_worse(data):
    spec, rates = data.draw(models()), data.draw(machines())
    profile = profile_from_datasheet(rates)
    least = smallest_budget(spec, profile, Workload((1,), context=2048, sequences=3, max_ubatch=16, prompt=64))
    workload = data.draw(workloads(spec, least))
    variant = plan_variant(spec, profile, workload)
    check_variant((spec,), variant, rates.kind)
    own = workload_seconds(spec, profile, workload, variant)
    for name, published in rival_variants(spec, profile, workload, variant):
        check_variant((spec,), published, rates.kind)
        assert own <= workload_seconds(spec, profile, workload, published) * (1 + 1e-9), name


@pytest.mark.quick("0")
@pytest.mark.parametrize("seed", range(8))
def test_the_joint_objective_of_all_tiers_beats_every_published_strategys(seed):
    """Long prompts: what a large prefill tier alone would have liked otherwise must pay off in the whole round."""
    rng = Random(seed)
    rates = replace(
        DESKTOP,
        link=rng.choice((6e9, 12e9, 25e9, 50e9)),
        host_memory=rng.choice((40e9, 80e9, 150e9)),
        acc_flops=rng.choice((2e13, 1e14, 6e14)),
    )
    spec, profile = (
        make_model(layers=rng.randint(8, 32), d_model=2048, heads=16, d_ffn=8192),
        profile_from_datasheet(rates),
    )
    budget = OWN + 400 + rng.randint(0, spec.packed_nbytes >> 20)
    workload = Workload((budget,), context=8192, prompt=4096, generated=rng.choice((16, 128, 1024)))
    variant = plan_variant(spec, profile, workload)
    own = workload_seconds(spec, profile, workload, variant)
    same, compared = replace(workload, max_ubatch=variant.workload.max_ubatch), 0
    for name, published in published_variants(spec, profile, same):
        assert published.workload.max_ubatch == variant.workload.max_ubatch
        assert own <= workload_seconds(spec, profile, workload, published) * (1 + 1e-9), name
        compared += 1
    assert compared


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, *range(2, MANY)))])
def test_ranks_that_wait_for_each_other_are_no_slower_than_under_any_published_strategy(seed):
    """Each rank's plan is chosen as if it were alone, which need not be the best for all of them together."""
    rng = Random(seed)

    def between(low: float, high: float) -> float:
        return low * (high / low) ** rng.random()

    n, kind = rng.choice((2, 3)), rng.choice(("cuda", "cpu"))
    rates = Rates(
        link=between(4e9, 60e9),
        acc_memory=between(8e10, 2e12),
        acc_flops=between(1e13, 5e14),
        host_memory=between(2e10, 1.5e11),
        host_flops=between(2e11, 2e12),
        handoff_seconds=between(5e-6, 1e-4),
        collective_rate=between(5e8, 2e11),
        ranks=n,
        kind=kind,
    )
    spec, profile = make_model(rng.randint(25, 32), d_ffn=256 * rng.randint(4, 16)), profile_from_datasheet(rates)
    arenas = tuple(30 + rng.randint(0, spec.packed_nbytes >> 20) // n for _ in range(n))
    budgets = tuple((OWN if kind == "cuda" else 0) + mib for mib in arenas)
    workload = Workload(budgets, context=1024, max_ubatch=128, prompt=512, generated=256, split_mode="tensor")
    variant, compared = plan_variant(spec, profile, workload), 0
    for name, published in published_variants(spec, profile, replace(workload, max_ubatch=variant.workload.max_ubatch)):
        if published.workload.max_ubatch == variant.workload.max_ubatch:
            assert pace.round_seconds(variant) <= pace.round_seconds(published) * (1 + 1e-9), name
            compared += 1
    assert compared


@pytest.mark.parametrize(
    ("kv_heads", "shares", "least_gain", "launch"),
    [pytest.param(8, (), 1.2, 1e-6, marks=pytest.mark.slow), (4, (3.0, 2.0), 1.05, 3e-6)],
)
def test_unlike_ranks_do_not_wait_for_units_that_are_slow_on_one_of_them(kv_heads, shares, least_gain, launch):
    """Alone each would be as fast as it is here together with the others."""
    n = len(shares) or 3
    profile = profile_from_datasheet(replace(DESKTOP, ranks=n, collective_rate=2e10, kernel_seconds=launch))
    workload = Workload(
        (OWN + 40,) * n, 1024, max_ubatch=128, prompt=512, generated=256, split_mode="tensor", tensor_split=shares
    )
    tasks = prepare_ranks(make_model(48, heads=8, kv_heads=kv_heads), profile, workload)
    chosen = refine_ranks(tasks, place_ranks(tasks, 10.0))
    assert not all(task.is_like(tasks[0]) for task in tasks)
    alone = max(candidate.total for candidate in chosen)
    apart, together = (pace.round_seconds(join_ranks(tasks, c)) for c in (chosen, choose_fastest(tasks, chosen)))
    assert together * least_gain < apart and together < 1.15 * alone


def test_a_plan_that_keeps_rows_beside_a_slot_is_tried_on_all_ranks():
    """A large tier streams the rows that are the CPU's in a small one: a share that no class of units lists."""
    profile = profile_from_datasheet(replace(DESKTOP, ranks=2, collective_rate=2e10))
    workload = Workload(
        (OWN + 200,) * 2, 1024, max_ubatch=128, prompt=512, split_mode="tensor", tensor_split=(3.0, 2.0)
    )
    tasks = prepare_ranks(make_model(48, heads=8, kv_heads=8), profile, workload)
    first = tasks[0]
    ffn = next(u for u in first.room.spec.units if u.name == "ffn.0")
    share = without_cpu(ffn, list_shares(ffn, SIXTEENTHS)[0])
    where = {u.name: "cpu" if u.kind.is_looked_up else "streamed" for u in first.room.spec.units}
    tiers = tuple(draft_tier(first.room, c.load.tokens, where, frozenset(), 1, {ffn.name: share}) for c in first.costs)
    plan = replace(place_ranks(tasks, 10.0)[0], tiers=tiers, total=1e9)
    adopted = list(common_plans(tasks, (plan, place_ranks(tasks, 10.0)[1])))
    assert any(0 < tier.placements[2].kept_parts < share.kept for _, other in adopted for tier in other.tiers)


@pytest.mark.parametrize("sequences", (pytest.param(3, marks=pytest.mark.slow), 64))
def test_the_residency_of_many_sequences_is_one_chain(sequences, share):
    """The round never enters the smallest tier, whose pins once changed the order that the others were placed in."""
    for seed in range(max(1, int(3 * share))):
        rng = Random(seed)
        spec = make_model(layers=rng.randint(25, 64), d_model=2048, heads=16, d_ffn=8192)
        budget = OWN + 600 + rng.randint(0, spec.packed_nbytes >> 20)
        workload = Workload((budget,), context=1024 * sequences, sequences=sequences, prompt=512, generated=64)
        check_variant((spec,), plan_variant(spec, PROFILE, workload), "cuda")


@pytest.mark.parametrize(
    ("layers", "d_model", "d_ffn", "sequences", "gib"),
    [
        (64, 5120, 25600, 1, 12),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((64, 5120, 25600, 1, 6), (80, 8192, 28672, 1, 6), (128, 8192, 28672, 4, 12))
        ),
    ],
)
def test_models_of_real_shapes_are_planned_in_seconds_and_nearly_all_is_proven(layers, d_model, d_ffn, sequences, gib):
    spec = make_model(layers, d_model, heads=d_model // 128, kv_heads=8, d_ffn=d_ffn, vocab=128256)
    workload = Workload((gib << 10,), context=8192 * sequences, sequences=sequences, max_ubatch=16384)
    began = time.process_time()
    variant = plan_variant(spec, LARGE, workload)
    assert time.process_time() - began < 10
    assert max(t.solve.program_gap for t in variant.ranks[0].tiers) <= 0.02 + 1e-9


def test_everything_fits_means_no_plan_is_needed():
    variant = plan_variant(make_model(), PROFILE, Workload((4000,), context=512, prompt=256))
    assert not variant.plan_needed
    for tier in variant.ranks[0].tiers:
        assert {p.where for p in tier.placements[1:]} == {"pinned"}
        assert {p.kv for p in tier.placements} == {"vram", None}


def test_a_strategy_that_streams_what_would_fit_is_not_said_to_keep_everything():
    workload, needed = Workload((4000,), context=512, prompt=256), {}
    for name in list_strategies(make_model()):
        variant = plan_baseline(name, make_model(), PROFILE, workload)
        places = {p.where for t in variant.ranks[0].tiers for p in t.placements[1:]}
        assert variant.plan_needed == (places != {"pinned"})
        assert {t.solve.status for t in variant.ranks[0].tiers} == {"placed" if variant.plan_needed else "not needed"}
        needed[name] = variant.plan_needed
    assert needed["ffn-cpu"] and not needed["fit"]


def test_a_budget_below_scratch_names_the_smallest_that_works():
    spec, workload = make_model(), Workload((20,), context=512, prompt=256)
    with pytest.raises(BudgetTooSmall) as caught:
        plan_variant(spec, PROFILE, workload)
    smallest = caught.value.smallest_mib
    assert f"{smallest} MiB" in str(caught.value)
    check_variant((spec,), plan_variant(spec, PROFILE, replace(workload, vram_mib=(smallest,))), "cuda")
    with pytest.raises(BudgetTooSmall):
        plan_variant(spec, PROFILE, replace(workload, vram_mib=(smallest - 1,)))


def test_more_memory_never_makes_the_workload_slower():
    spec, workload = make_model(layers=6), Workload((0,), context=512, prompt=256, generated=64, max_ubatch=128)
    seconds = []
    for mib in (OWN + 54, OWN + 84, OWN + 124, OWN + 204):
        at = replace(workload, vram_mib=(mib,))
        seconds.append(workload_seconds(spec, PROFILE, at, plan_variant(spec, PROFILE, at)))
    assert all(later <= earlier * 1.01 for earlier, later in pairwise(seconds))


def test_memory_that_holds_everything_does_not_keep_work_on_a_device_that_is_slower_than_its_host():
    slow = replace(DESKTOP, acc_memory=DESKTOP.host_memory / 10, acc_flops=DESKTOP.host_flops / 10)
    spec, profile = make_model(layers=6), profile_from_datasheet(slow)
    workload = Workload((0,), context=512, prompt=256, generated=64, max_ubatch=128)
    tight, roomy = (replace(workload, vram_mib=(OWN + mib,)) for mib in (54, 2000))
    made = plan_variant(spec, profile, roomy)
    assert made.plan_needed and made.ranks[0].covering(1).prediction.binds == "cpu"
    assert pace.round_seconds(made) <= 1.01 * pace.round_seconds(plan_variant(spec, profile, tight))


def test_ranks_of_any_ratio_are_planned_over_their_own_slices():
    spec = make_model(layers=3)
    for split in ((), (3.0, 1.0), (1.0, 0.0)):
        workload = Workload((OWN + 44, OWN + 34), context=256, prompt=128, split_mode="tensor", tensor_split=split)
        variant = plan_variant(spec, PROFILE, workload)
        shares = rank_shares(workload)
        assert variant.workload.tensor_split == shares
        check_variant(cut_ranks(spec, Split("tensor", shares)), variant, "cuda")
        assert len({tuple(t.tokens for t in r.tiers) for r in variant.ranks}) == 1


@few_or_many
def test_ranks_that_hold_whole_layers_are_planned_within_their_own_budgets(cases):
    try_cases(cases, expect_layers_within_budgets, st.data())


def expect_layers_within_budgets(data):
    spec, rates = data.draw(models()), data.draw(machines())
    profile = profile_from_datasheet(rates)
    split = data.draw(st.sampled_from(((1.0, 1.0), (3.0, 1.0), (1.0, 0.0), (0.0, 1.0, 1.0), (1.0,) * 4)))
    least = smallest_budget(spec, profile, Workload((1,), context=2048, sequences=3, max_ubatch=16, prompt=64))
    one = data.draw(workloads(spec, least))
    budgets = tuple(one.vram_mib[0] + data.draw(st.integers(0, 40)) for _ in split)
    workload = replace(one, vram_mib=budgets, split_mode="layer", tensor_split=split)
    variant = plan_variant(spec, profile, workload)
    shares = rank_shares(workload)
    assert (variant.workload.split_mode, variant.workload.tensor_split) == ("layer", shares)
    assert tuple(r.budget_mib for r in variant.ranks) == budgets
    check_variant(cut_ranks(spec, Split("layer", shares)), variant, rates.kind)
    assert len({tuple(t.tokens for t in r.tiers) for r in variant.ranks}) == 1


def test_the_check_notices_layers_that_are_missing_or_on_two_ranks():
    spec, workload = make_model(layers=4), Workload((OWN + 54,) * 2, context=256, prompt=128, split_mode="layer")
    variant = plan_variant(spec, PROFILE, workload)
    first, second = cut_ranks(spec, Split("layer", (0.5, 0.5)))
    check_variant((first, second), variant, "cuda")
    for parts in ((first, first), (second, first), (first, cut_ranks(spec, Split("layer", (0.2, 0.8)))[1])):
        with pytest.raises(PlanError, match=r"expects them|each once"):
            check_variant(parts, variant, "cuda")
    larger = replace(variant.ranks[1], budget_mib=variant.workload.vram_mib[1] + 1)
    with pytest.raises(PlanError, match="plan 1 is of rank 1 with"):
        check_variant((first, second), replace(variant, ranks=(variant.ranks[0], larger)), "cuda")
    with pytest.raises(PlanError, match="plan 0 is of rank 1 with"):
        twice = (replace(variant.ranks[0], rank=1), variant.ranks[1])
        check_variant((first, second), replace(variant, ranks=twice), "cuda")


def test_a_pipeline_takes_smaller_micro_batches_so_that_all_ranks_work():
    spec = make_model(layers=8, d_model=4096, heads=32, kv_heads=8, d_ffn=12288)
    one = Workload((4000,), context=8192, prompt=4096)
    whole = plan_variant(spec, PROFILE, one)
    pipeline = plan_variant(spec, PROFILE, replace(one, vram_mib=(4000, 4000), split_mode="layer"))
    assert pipeline.workload.max_ubatch < whole.workload.max_ubatch
    assert first_token_seconds(pipeline) < 0.75 * first_token_seconds(whole)
    decode, alone = tier_seconds(pipeline)[1], tier_seconds(whole)[1]
    assert 0.95 * alone < decode < 1.2 * alone


def test_an_unknown_strategy_and_mismatched_budgets_are_named():
    with pytest.raises(UserError, match="unknown strategy 'greedy'"):
        plan_baseline("greedy", make_model(), PROFILE, Workload((500,)))
    with pytest.raises(UserError, match="2 budgets for one device"):
        plan_variant(make_model(), PROFILE, Workload((500, 500)))


def test_the_check_notices_what_it_is_there_for():
    spec = make_model()
    variant = plan_variant(spec, PROFILE, Workload((OWN + 54,), context=512, prompt=256, max_ubatch=128))
    rank = variant.ranks[0]
    tier = rank.tiers[0]

    def with_tier(changed):
        return replace(variant, ranks=(replace(rank, tiers=(changed, *rank.tiers[1:])),))

    missing = with_tier(replace(tier, placements=tier.placements[:-1]))
    dishonest = with_tier(replace(tier, buffers=replace(tier.buffers, scratch=tier.buffers.scratch - 1)))
    over = replace(variant, ranks=(replace(rank, budget_mib=OWN + 1),))
    illegal = tuple(replace(p, kv="vram", where="cpu") if p.unit == "attention.0" else p for p in tier.placements)
    shuffled = replace(variant, ranks=(replace(rank, pin_order=rank.pin_order[::-1]),))
    for broken, complaint in (
        (missing, "each once"),
        (dishonest, "bytes of scratch"),
        (over, "over the arena"),
        (with_tier(replace(tier, placements=illegal)), "cannot be cpu"),
        (shuffled, "not a prefix"),
    ):
        with pytest.raises(PlanError, match=complaint):
            check_variant((spec,), broken, "cuda")


@pytest.mark.slow
def test_planning_works_where_torch_cannot_be_imported():
    code = """
import sys
sys.modules["torch"] = None
from planner_cases import DESKTOP, OWN, make_model
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.make_plan import plan_variant
from pshard.workload import Workload
import pshard.commands.cli_plan, pshard.planner.show_plan, pshard.planner.explain, pshard.planner.llama_cpp_arguments
profile = profile_from_datasheet(DESKTOP)
print(plan_variant(make_model(layers=2), profile, Workload((OWN + 24,), context=256, prompt=64)).plan_needed)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1] / "makers")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "True", done.stderr
