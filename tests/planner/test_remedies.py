"""What a machine with too little of everything is told."""

import re
from dataclasses import replace

import pytest
from golden.machines import find_machine
from golden.shapes import make_shape
from planner_cases import DESKTOP, make_model

from pshard.errors import BudgetTooSmall, NoPlan, Shortage, UserError
from pshard.machine import MachineProfile
from pshard.planner.choose_mode import plan_mode
from pshard.planner.make_plan import plan_baseline, plan_roughly, plan_variant
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.remedies.advise import STEP_MIB, USUAL, requantise
from pshard.workload import Workload


def refuse(memory: int, context: int, **machine: object) -> str:
    """What planning says on a machine with so many bytes of host memory."""
    spec = make_model(layers=8, d_model=2048, heads=16, d_ffn=8192)
    profile = profile_from_datasheet(replace(DESKTOP, **machine))
    profile = replace(profile, host=replace(profile.host, memory_bytes=memory))
    with pytest.raises(UserError) as caught:
        plan_variant(spec, profile, Workload((330,), context=context, prompt=64, generated=16))
    return str(caught.value)


def packed() -> int:
    return make_model(layers=8, d_model=2048, heads=16, d_ffn=8192).packed_nbytes


def test_a_shorter_context_is_named_where_one_fits() -> None:
    told = refuse(int(1.2 * packed()), 65536)
    shorter = int(re.search(r"-c (\d+)", told).group(1))  # type: ignore[union-attr]
    assert 512 <= shorter < 65536 and "what may work: --vram " in told


def test_a_smaller_file_is_named_by_its_size_and_quantisation() -> None:
    told = refuse(int(1.2 * packed()), 512, kind="cpu")
    assert re.search(r"what may work: a file of at most [\d.]+ GiB, as I?Q\d\w* makes$", told), told


def test_no_way_is_said_too() -> None:
    assert "a smaller model is needed, or a larger machine" in refuse(packed() // 20, 512, kind="cpu")


def with_memory(profile: MachineProfile, gib: float) -> MachineProfile:
    return replace(profile, host=replace(profile.host, memory_bytes=int(gib * (1 << 30))))


@pytest.mark.quick("qwen3-30b-a3b-12")
@pytest.mark.parametrize(("model", "gib"), [("llama3-8b", 4), ("qwen3-30b-a3b", 12)])
def test_a_budget_that_is_named_was_planned(model: str, gib: float) -> None:
    """Units are not divisible at will, so that a budget which the bytes fit into may be too small."""
    spec, profile = make_shape(model), with_memory(find_machine("rtx5080"), gib)
    with pytest.raises(Shortage) as bare:
        plan_roughly(spec, profile, Workload((500,)))
    with pytest.raises(BudgetTooSmall, match="it will not load; what may work: --vram ") as advised:
        plan_variant(spec, profile, Workload((500,)))
    least, budget = bare.value.smallest_mib, advised.value.smallest_mib
    assert least and least <= budget <= profile.accelerators[0].memory_bytes >> 20
    assert f"--vram {budget}" in str(advised.value)
    plan_roughly(spec, profile, Workload((budget,)))
    if budget - STEP_MIB >= least:
        with pytest.raises(Shortage):
            plan_roughly(spec, profile, Workload((budget - STEP_MIB,)))


def test_a_budget_that_the_bytes_fit_into_but_no_plan_does_names_one_that_works() -> None:
    spec, profile = make_shape("llama3-8b"), with_memory(find_machine("rtx5080"), 4)
    with pytest.raises(Shortage) as bare:
        plan_roughly(spec, profile, Workload((500,)))
    tight = Workload((bare.value.smallest_mib,))
    with pytest.raises(
        BudgetTooSmall, match=r"no plan found for llama3-8b that keeps at most .* what may work"
    ) as told:
        plan_variant(spec, profile, tight)
    plan_roughly(spec, profile, replace(tight, vram_mib=(told.value.smallest_mib,)))


def test_a_published_strategy_is_told_a_budget_that_works_for_it() -> None:
    spec, profile = make_shape("llama3-8b"), with_memory(find_machine("rtx5080"), 4)
    with pytest.raises(BudgetTooSmall) as told:
        plan_baseline("ffn-stream", spec, profile, Workload((500,)))
    plan_baseline("ffn-stream", spec, profile, Workload((told.value.smallest_mib,)))


def test_several_devices_are_told_a_budget_of_each_that_works() -> None:
    spec = make_model(layers=8, d_model=2048, heads=16, d_ffn=8192)
    profile = profile_from_datasheet(replace(DESKTOP, ranks=2, collective_rate=1e10))
    profile = with_memory(profile, packed() * 0.6 / (1 << 30))
    load = Workload((330, 330), context=512, prompt=64, generated=16, split_mode="auto")
    with pytest.raises(BudgetTooSmall, match="what may work: --vram ") as told:
        plan_mode(spec, profile, load, True)
    plan_mode(spec, profile, replace(load, vram_mib=(told.value.smallest_mib,) * 2), True)


def test_where_the_devices_memory_is_too_small_other_ways_are_named() -> None:
    told = refuse(int(1.2 * packed()), 65536, acc_memory_bytes=340 << 20)
    assert "--vram" not in told and re.search(r"what may work: -c \d+", told)


def test_a_smaller_file_that_is_named_was_planned() -> None:
    spec = make_shape("llama3-8b", "Q8_0")
    profile = with_memory(find_machine("rtx5080"), 6)
    profile = replace(profile, accelerators=tuple(replace(a, memory_bytes=1 << 30) for a in profile.accelerators))
    with pytest.raises(NoPlan, match=r"what may work: a file of at most [\d.]+ GiB, as (Q\d\w+) makes$") as told:
        plan_variant(spec, profile, Workload((500,)))
    name = re.search(r"as (\w+) makes", str(told.value)).group(1)  # type: ignore[union-attr]
    larger = [each for each in USUAL if [*USUAL].index(each) < [*USUAL].index(name)]
    plan_roughly(requantise(spec, USUAL[name]), profile, Workload((500,)))
    for each in larger:
        with pytest.raises(Shortage):
            plan_roughly(requantise(spec, USUAL[each]), profile, Workload((500,)))
