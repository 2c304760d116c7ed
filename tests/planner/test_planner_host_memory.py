"""Plans on machines whose host memory does not hold the model: a limit that no start, step or exchange breaks."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import strategies as st
from planner_cases import (
    DESKTOP,
    OWN,
    few_or_many,
    machines,
    make_model,
    models,
    rival_variants,
    try_cases,
    workloads,
)
from test_planner_plans import workload_seconds

from pshard.cuts.rank_parts import cut_ranks
from pshard.errors import BudgetTooSmall, UserError
from pshard.machine import MachineProfile
from pshard.planner.check_plan import PlanError, check_variant
from pshard.planner.make_plan import plan_several, plan_variant, same_placements
from pshard.planner.prepare_ranks import prepare_ranks
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.predicted_times import round_seconds
from pshard.workload import Workload

PROFILE = profile_from_datasheet(DESKTOP)
MIB = 1 << 20


def with_memory(profile: MachineProfile, usable: int) -> MachineProfile:
    """The machine with so much host memory that plans may use `usable` bytes of it: all but a sixteenth here."""
    return replace(profile, host=replace(profile.host, memory_bytes=-(-usable * 16 // 15)))


def kept_on_host(specs, variant, kind: str) -> int:
    """Counted anew: what any tier has not pinned whole, cells that any tier leaves on the host, arenas of the CPU."""
    total = 0
    for spec, rank in zip(specs, variant.ranks):
        cell = 2 * 2 * spec.config.n_kv_heads * spec.config.head_dim
        for unit in spec.units:
            places = [t.placement(unit.name) for t in rank.tiers]
            total += unit.packed_nbytes * any(p.where != "pinned" or p.cpu_rows for p in places)
            total += cell * variant.workload.context * any(p.kv == "host" for p in places)
        total += max(t.buffers.total for t in rank.tiers) if kind == "cpu" else 0
    return total


def everything(spec, workload: Workload) -> int:
    """Bytes of weights and KV cache."""
    cell = 2 * 2 * spec.config.n_kv_heads * spec.config.head_dim
    return spec.packed_nbytes + cell * workload.context * spec.config.n_layers


@few_or_many
def test_no_plan_keeps_more_on_the_host_than_it_has(cases):
    try_cases(cases, expect_within_host_memory, st.data())


def expect_within_host_memory(data):
    spec, rates = data.draw(models()), data.draw(machines())
    profile = profile_from_datasheet(rates)
    workload = data.draw(workloads(spec, OWN + 64))
    usable = int(data.draw(st.floats(0.0, 1.1)) * everything(spec, workload)) + MIB
    usable += (workload.vram_mib[0] << 20) if rates.kind == "cpu" else 0
    profile = with_memory(profile, usable)
    try:
        (task,) = prepare_ranks(spec, profile, workload)
        several = plan_several(task, 5.0)
    except UserError as error:
        assert "host memory" in str(error) or "too small" in str(error)
        with pytest.raises(UserError):
            plan_variant(spec, profile, workload)
        return
    variant = plan_variant(spec, profile, workload)
    for each in (variant, *several):
        check_variant((spec,), each, rates.kind, usable)
        assert kept_on_host((spec,), each, rates.kind) <= usable
    own = workload_seconds(spec, profile, workload, variant)
    for name, published in rival_variants(spec, profile, workload, variant):
        assert kept_on_host((spec,), published, rates.kind) <= usable
        assert own <= workload_seconds(spec, profile, workload, published) * (1 + 1e-9), name


@pytest.mark.slow
def test_memory_that_holds_everything_changes_nothing_and_less_never_makes_plans_faster(share: float):
    spec = make_model(layers=24, d_model=2048, heads=16, d_ffn=8192)
    workload = Workload((OWN + 500,), context=4096, prompt=1024, generated=128)
    whole, arena = everything(spec, workload), 500 * MIB
    want = plan_variant(spec, PROFILE, workload)
    found = []
    held = (2 * whole, whole, whole - arena // 2, whole - arena * 3 // 4, whole - arena * 7 // 8)
    for usable in held if share == 1 else held[1::3]:
        variant = plan_variant(spec, with_memory(PROFILE, usable), workload)
        check_variant((spec,), variant, "cuda", usable)
        found.append(round_seconds(variant))
        if usable >= whole:
            assert same_placements(variant.ranks[0].tiers, want.ranks[0].tiers)
    assert all(later >= earlier * 0.99 for earlier, later in pairwise(found))
    with pytest.raises(BudgetTooSmall, match=r"stay in host memory.*what may work: --vram") as caught:
        plan_variant(spec, with_memory(PROFILE, whole - arena * 11 // 10), workload)
    more = replace(workload, vram_mib=(caught.value.smallest_mib,))
    plan_variant(spec, with_memory(PROFILE, whole - arena * 11 // 10), more)


@pytest.mark.slow  # less memory is planned above
def test_where_the_limit_binds_the_plan_without_it_would_not_have_loaded():
    """Prefill alone would stream more than decode pins; then it must pin more itself."""
    spec = make_model(layers=24, d_model=2048, heads=16, d_ffn=8192)
    workload = Workload((OWN + 500,), context=4096, prompt=4000, generated=16)
    free = plan_variant(spec, PROFILE, workload)
    usable = kept_on_host((spec,), free, "cuda") - 40 * MIB
    with pytest.raises(PlanError, match="stay in host memory"):
        check_variant((spec,), free, "cuda", usable)
    bound = plan_variant(spec, with_memory(PROFILE, usable), workload)
    assert kept_on_host((spec,), bound, "cuda") <= usable


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "budgets"), [("tensor", (200, 300)), ("layer", (250, 300))])
def test_ranks_share_the_memory_of_their_host(mode: str, budgets: tuple[int, ...]):
    spec = make_model(layers=48, d_model=2048, heads=16, d_ffn=4096)
    profile = profile_from_datasheet(replace(DESKTOP, ranks=2, collective_rate=1e10))
    vram = tuple(OWN + mib for mib in budgets)
    workload = Workload(vram, context=2048, prompt=512, generated=64, split_mode=mode)
    free = plan_variant(spec, profile, workload)
    specs = cut_ranks(spec, free.split)
    usable = kept_on_host(specs, free, "cuda") - 60 * MIB
    variant = plan_variant(spec, with_memory(profile, usable), workload)
    check_variant(specs, variant, "cuda", usable)
    assert kept_on_host(specs, variant, "cuda") <= usable


def test_with_the_cpu_as_accelerator_no_budget_helps_a_model_that_is_too_large():
    spec = make_model(layers=8, d_model=2048, heads=16, d_ffn=8192)
    profile = with_memory(profile_from_datasheet(replace(DESKTOP, kind="cpu")), spec.packed_nbytes // 2)
    with pytest.raises(UserError, match=r"it will not load; (what may work|a smaller model)") as caught:
        plan_variant(spec, profile, Workload((300,), context=512))
    assert not isinstance(caught.value, BudgetTooSmall)
