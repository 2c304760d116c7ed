"""Cards of 4 to 8 GB, and kernels that a card cannot run: what is planned, and what is refused in a line."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from experts_file import ExpertsFile
from golden.shapes import make_shape
from registry_samples import make_registry

from pshard.buffers import arena_bytes
from pshard.errors import UserError
from pshard.machine import MachineProfile, RefusedKernel, Reserve
from pshard.model_config import Experts
from pshard.plan import RankPlan, Variant
from pshard.planner.check_plan import PlanError, check_variant
from pshard.planner.make_plan import plan_variant
from pshard.planner.prepare_ranks import check_kernels
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.example_sheets import MACHINES
from pshard.planner.price.kernel_rates import RTX_4060, rate_of
from pshard.planner.shown.memory_use import measure_use
from pshard.predicted_times import round_seconds
from pshard.registries.codec import decode_registry, encode_registry
from pshard.registries.fingerprint import digest_profile
from pshard.registries.profile_store import load_profile, save_profile
from pshard.reserve import RUN_MIB, TORCH_RESERVE_MIB, reserve_mib
from pshard.session.open_plan import check_plan
from pshard.tensor import TensorSpec
from pshard.workload import Workload

SHEET = MACHINES["rtx4060-ryzen-7700"]
WHY = "prefill_kernel needs 163840 of shared memory, of which the card has 101376"
NEEDS = {  # what a model of each kind needs a kernel of
    "qwen3-2b": ("attention with heads of 128", "products of Q4_0", "products of Q6_K"),
    "deepseek-v2-lite": ("attention over latents of 512", "experts of Q4_0", "routers of F32"),
    "qwen3-next-80b-a3b": ("attention with heads of 256", "delta nets with heads of 128"),
}


def small_card(gib: int) -> MachineProfile:
    return profile_from_datasheet(replace(SHEET, acc_memory_bytes=gib << 30))


def refused(*kernels: str) -> MachineProfile:
    return replace(small_card(8), refused=tuple(RefusedKernel("acc", kernel, WHY) for kernel in kernels))


def work_of(mib: int) -> Workload:
    return Workload((mib,), 4096, prompt=2048, generated=256)


@cache
def plan_small(name: str, gib: int, mib: int) -> Variant:
    return plan_variant(make_shape(name), small_card(gib), work_of(mib))


@pytest.mark.parametrize(
    ("name", "gib", "budgets"),
    [
        ("qwen3-2b", 4, (2500, 3500)),
        pytest.param("llama3-8b", 4, (2500, 3500), marks=pytest.mark.slow),
        pytest.param("llama3-8b", 8, (5000, 7000), marks=pytest.mark.slow),
        pytest.param("qwen3.5-35b-a3b", 8, (2500, 7000), marks=pytest.mark.slow),
    ],
)
def test_small_cards_have_plans_that_keep_their_budget(name: str, gib: int, budgets: tuple[int, int]) -> None:
    """More VRAM is never slower, and what a plan takes of it, with the reserve, is checked independently."""
    spec, profile = make_shape(name), small_card(gib)
    seconds = []
    for mib in budgets:
        assert mib << 20 < profile.accelerators[0].memory_bytes
        plan = plan_small(name, gib, mib)
        check_variant([spec], plan, "cuda")
        seconds.append(round_seconds(plan))
    assert seconds[1] <= seconds[0]


@pytest.mark.parametrize("processors", [20, 24, 46, 84, 188])
def test_more_processors_are_priced_as_faster_until_tensor_cores_bind(processors: int) -> None:
    card = replace(RTX_4060, processors=processors, tensor=512 * processors * RTX_4060.clock)
    for kernel in ("products of many tokens", "prompts, heads of 128", "prompts, heads of 256"):
        assert rate_of(card, kernel) / processors == pytest.approx(rate_of(RTX_4060, kernel) / 24, rel=0.005)


@pytest.mark.parametrize(("name", "kernel"), [(name, kernel) for name, those in NEEDS.items() for kernel in those])
def test_a_model_that_needs_a_refused_kernel_gets_no_plan_but_a_line(name: str, kernel: str) -> None:
    spec, profile = make_shape(name), refused("products of Q2_K", kernel)
    with pytest.raises(UserError) as told:
        plan_variant(spec, profile, Workload((4000,), 2048))
    line = str(told.value)
    assert f"needs {kernel}, which this GPU cannot run ({WHY}); plan for the CPU" in line and "\n" not in line


def test_refused_kernels_that_a_model_does_without_change_nothing() -> None:
    profile = refused(
        "attention with heads of 256", "delta nets with heads of 128", "experts of MXFP4", "products of Q2_K"
    )
    for name in ("qwen3-2b", "llama3-8b"):
        check_kernels(make_shape(name), profile, 1)


def test_a_type_of_gates_that_was_refused_with_itself_is_refused_beside_other_types_of_downs() -> None:
    """A profile of many pairs of types has timed no others."""
    spec = ExpertsFile(Experts(8, 2, 256), d_model=256).spec

    def choose(tensor: TensorSpec) -> TensorSpec:
        return replace(tensor, qtype="IQ3_S" if "down" in tensor.name else "Q2_K") if tensor.parts else tensor

    units = tuple(replace(unit, tensors=tuple(map(choose, unit.tensors))) for unit in spec.units)
    spec = replace(spec, units=units)
    check_kernels(spec, refused("experts of IQ3_S", "experts of IQ3_S and Q2_K"), 1)
    with pytest.raises(UserError, match="needs experts of Q2_K, which"):
        check_kernels(spec, refused("experts of Q2_K"), 1)


def test_what_another_accelerator_refuses_matters_to_plans_with_it_alone() -> None:
    two = profile_from_datasheet(replace(SHEET, ranks=2, collective_rate=1e10))
    second = tuple(replace(row, device="acc1") for row in two.matmuls if row.device == "acc")
    kernel = RefusedKernel("acc1", "attention with heads of 128", WHY)
    profile, spec = replace(two, matmuls=(*two.matmuls, *second), refused=(kernel,)), make_shape("qwen3-2b")
    check_kernels(spec, profile, 1)
    with pytest.raises(UserError, match="needs attention with heads of 128"):
        check_kernels(spec, profile, 2)


def test_ranks_with_fewer_heads_need_the_same_kernels() -> None:
    two = Workload((4000, 4000), 2048, split_mode="tensor", tensor_split=(1.0, 1.0))
    profile = profile_from_datasheet(replace(SHEET, ranks=2, collective_rate=1e10))
    profile = replace(profile, refused=(RefusedKernel("acc", "attention with heads of 128", WHY),))
    with pytest.raises(UserError, match="needs attention with heads of 128"):
        plan_variant(make_shape("qwen3-2b"), profile, two)


def test_a_profile_keeps_what_was_refused_and_others_stay_what_they_were(tmp_path: Path) -> None:
    profile = refused("attention with heads of 256")
    assert load_profile(save_profile(profile, tmp_path / "profile.json")) == profile
    assert digest_profile(replace(profile, refused=())) == digest_profile(small_card(8)) != digest_profile(profile)


def measured(gib: int, mib: int) -> MachineProfile:
    """A small card of which a profile found so many MiB taken beside what was allocated."""
    return replace(small_card(gib), reserves=(Reserve("acc", mib << 20),))


def arena_of(rank: RankPlan) -> int:
    return arena_bytes(rank.budget_mib, "cuda", rank.reserve_mib)


NEARLY = make_shape("qwen3-2b"), Workload((1300,), 2048, prompt=1024, generated=256)  # a model that all but fits


@cache
def plan_nearly() -> tuple[Variant, Variant]:
    """Its plans on a card that may need 320 MiB, and on one that was measured to need 100."""
    assumed, found = (plan_variant(NEARLY[0], profile, NEARLY[1]) for profile in (small_card(4), measured(4, 100)))
    return assumed, found


def test_a_plan_uses_what_its_card_was_measured_not_to_need() -> None:
    """A model that all but fits: what 320 MiB would have kept holds weights, and the plan says what it keeps."""
    spec, (assumed, found) = NEARLY[0], plan_nearly()
    assert [p.ranks[0].reserve_mib for p in (assumed, found)] == [TORCH_RESERVE_MIB, 100 + RUN_MIB]
    for plan, profile in ((assumed, small_card(4)), (found, measured(4, 100))):
        check_variant([spec], plan, "cuda")
        rank = plan.ranks[0]
        most = max(tier.buffers.total for tier in rank.tiers)
        assert arena_of(assumed.ranks[0]) - (64 << 20) < most <= arena_of(rank)
        (used,) = measure_use(spec, profile, plan).vram_mib
        assert used == rank.reserve_mib - -most // (1 << 20) <= 1300
    assert max(tier.buffers.total for tier in found.ranks[0].tiers) > arena_of(assumed.ranks[0])
    assert round_seconds(found) < round_seconds(assumed)


@pytest.mark.parametrize(
    ("name", "gib", "mib"),
    [
        ("qwen3-2b", 4, 2500),
        pytest.param("llama3-8b", 4, 2500, marks=pytest.mark.slow),
        pytest.param("llama3-8b", 6, 5000, marks=pytest.mark.slow),
        pytest.param("llama3-8b", 8, 7000, marks=pytest.mark.slow),
    ],
)
def test_a_measured_reserve_keeps_the_budget_and_makes_no_plan_slower(name: str, gib: int, mib: int) -> None:
    spec, assumed = make_shape(name), plan_small(name, gib, mib)
    found = plan_variant(spec, measured(gib, 100), work_of(mib))
    check_variant([spec], found, "cuda")
    (used,) = measure_use(spec, measured(gib, 100), found).vram_mib
    assert used <= mib and round_seconds(found) <= round_seconds(assumed) * (1 + 1e-9)


def test_no_more_is_kept_than_any_run_was_seen_to_take() -> None:
    assert [reserve_mib(n) for n in (None, 100 << 20, (100 << 20) + 1, 2 << 30)] == [320, 228, 229, 320]


def test_a_profile_of_before_assumes_its_reserve_and_makes_the_plans_that_it_made(tmp_path: Path) -> None:
    profile = measured(4, 100)
    path = save_profile(profile, tmp_path / "profile.json")
    assert load_profile(path) == profile
    data = json.loads(path.read_text())
    del data["reserves"]
    path.write_text(json.dumps(data))
    before = load_profile(path)
    assert before == small_card(4) and before.reserve_of(0) is None
    assert digest_profile(before) == digest_profile(small_card(4)) != digest_profile(profile)


def test_each_accelerator_has_the_reserve_of_the_one_whose_rows_are_its_own() -> None:
    two = profile_from_datasheet(replace(SHEET, ranks=2, collective_rate=1e10))
    assert [replace(two, reserves=measured(8, 90).reserves).reserve_of(i) for i in range(2)] == [90 << 20] * 2
    second = tuple(replace(row, device="acc1") for row in two.matmuls if row.device == "acc")
    unlike = replace(
        two, matmuls=(*two.matmuls, *second), reserves=(Reserve("acc", 90 << 20), Reserve("acc1", 5 << 25))
    )
    assert [unlike.reserve_of(i) for i in range(2)] == [90 << 20, 160 << 20]
    workload = Workload((2000, 2000), 2048, split_mode="layer", tensor_split=(1.0, 1.0))
    plan = plan_variant(make_shape("qwen3-2b"), unlike, workload)
    assert [rank.reserve_mib for rank in plan.ranks] == [90 + RUN_MIB, 160 + RUN_MIB]


def test_a_plan_made_under_another_reserve_keeps_its_own_and_is_refused_beyond_its_budget() -> None:
    """With a larger one it runs as it was planned; one that was edited to a larger one is over its arena."""
    spec, (plan, found) = NEARLY[0], plan_nearly()
    check_plan(spec, plan, measured(4, 100))
    check_plan(spec, found, small_card(4))
    registry = make_registry(variants=(plan, found))
    assert decode_registry(encode_registry(registry)) == registry
    old = json.loads(encode_registry(registry))
    for variant in old["sets"][0]["variants"]:
        del variant["ranks"][0]["reserve_mib"]
    assert decode_registry(json.dumps(old)).sets[0].variants[0] == plan
    with pytest.raises(PlanError, match="over the arena"):
        check_plan(spec, decode_registry(json.dumps(old)).sets[0].variants[1], measured(4, 100))
