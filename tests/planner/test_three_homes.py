"""Plans over VRAM, host memory and disk."""

from dataclasses import replace
from io import StringIO
from itertools import pairwise, product
from pathlib import Path

import pytest
from latent_files import random_tensors, write_latent_gguf
from planner_cases import DESKTOP, make_model
from rich.console import Console
from toy_kinds import ToyFile

from pshard.errors import NoPlan
from pshard.homes import DISK
from pshard.machine import DiskTiming, MachineProfile
from pshard.model import ModelSpec
from pshard.model_config import Experts
from pshard.models import open_model
from pshard.on_disk import mark_made
from pshard.plan import Variant
from pshard.planner.check_plan import check_variant, count_host_bytes
from pshard.planner.explain import WhatIf, explain_gains
from pshard.planner.make_plan import RoughPlan, plan_roughly, plan_variant
from pshard.planner.price import host_limits
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.host_limits import usable_bytes
from pshard.planner.show_plan import print_explanation
from pshard.predicted_times import decode_rate, round_seconds
from pshard.workload import Workload

MIB = 1 << 20
WORKLOAD = Workload((4,), context=128, type_k="f32", type_v="f32", max_ubatch=32, prompt=40, generated=20)
SPEC = ToyFile("aaaaaa", d_model=256, d_ffn=512).spec


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are tiny here: nothing is taken off for the process."""
    monkeypatch.setattr(host_limits, "PROCESS", {"cpu": 0, "cuda": 0})


def make_machine(ram: int, rate: float = 1e9, kind: str = "cpu") -> MachineProfile:
    """A machine with a disk of such a rate, and so many bytes of host memory for plans."""
    rows = tuple(DiskTiming("drive", True, 0, 0, n, 1e-4 + n / rate) for n in (1 << 16, 1 << 20, 1 << 26))
    profile = profile_from_datasheet(replace(DESKTOP, kind=kind))
    return replace(profile, disks=rows, ram_bytes=ram)


def list_far(variant: Variant) -> int:
    return len(variant.ranks[0].beyond_host)


def test_what_ram_does_not_hold_stays_on_disk_and_within_ram() -> None:
    found = {}
    for mib in (8, 12, 64):
        profile = make_machine(mib * MIB)
        found[mib] = variant = plan_variant(SPEC, profile, replace(WORKLOAD, ram_mib=mib))
        check_variant((SPEC,), variant, "cpu", usable_bytes(profile, 1))
        assert count_host_bytes((SPEC,), variant, "cpu") <= mib * MIB
        assert set(variant.ranks[0].beyond_host.values()) <= {DISK}
    assert list_far(found[8]) > list_far(found[12]) and not list_far(found[64])


def test_what_the_files_do_not_hold_as_it_is_used_never_stays_on_disk(tmp_path: Path) -> None:
    path = write_latent_gguf(tmp_path / "m.gguf", "lite", random_tensors("lite", 2), "joint")  # keys beside values
    with open_model(path) as file:
        marked = {unit.name for unit in mark_made(file).units if unit.stays_in_memory}
    assert marked == {"blk.0.attention", "blk.1.attention"}
    profile, workload = make_machine(10 * MIB), replace(WORKLOAD, ram_mib=10)
    held = min(plan_variant(SPEC, profile, workload).ranks[0].beyond_host)
    spec = replace(SPEC, units=tuple(replace(u, stays_in_memory=u.name == held) for u in SPEC.units))
    variant = plan_variant(spec, profile, workload)
    check_variant((spec,), variant, "cpu", usable_bytes(profile, 1))
    assert list_far(variant) and held not in variant.ranks[0].beyond_host


@pytest.mark.quick("cuda")
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_more_ram_or_a_faster_disk_makes_no_plan_slower(kind: str) -> None:
    for rates, sizes in (((1e8, 1e9), (10,)), ((1e9,), (8, 10, 64))):
        rounds = list[float]()
        for rate, mib in product(rates, sizes):
            workload = replace(WORKLOAD, vram_mib=(4 if kind == "cpu" else 330,), ram_mib=mib)
            try:
                rounds.append(round_seconds(plan_variant(SPEC, make_machine(mib * MIB, rate, kind), workload)))
            except NoPlan:
                assert not rounds, f"{mib} MiB have no plan, and fewer have one"
        assert len(rounds) > 1
        assert all(after <= before * (1 + 1e-9) for before, after in pairwise(rounds)), rounds


def plan_of_disk(spec: ModelSpec, ram: int, vram: int, rate: float) -> tuple[MachineProfile, RoughPlan]:
    rows = tuple(DiskTiming("drive", True, 0, 0, n, 1e-4 + n / rate) for n in (1 << 16, 1 << 20, 1 << 28))
    profile = replace(profile_from_datasheet(DESKTOP), disks=rows, ram_bytes=ram * MIB)
    workload = Workload((vram,), 1024, max_ubatch=512, prompt=512, generated=64, ram_mib=ram)
    return profile, plan_roughly(spec, profile, workload)


def test_what_leaves_for_the_disk_leaves_pins_and_cells_of_tiers_within_each_other() -> None:
    spec = make_model(16, d_ffn=2048, experts=Experts(8, 2, 512))
    profile, plan = plan_of_disk(spec, 90, 412, 7e9)
    check_variant((spec,), plan.variant, "cuda", usable_bytes(profile, 1))
    assert list_far(plan.variant)


@pytest.mark.slow
def test_a_plan_that_divided_experts_still_leaves_memory_for_what_may_live_on_disk() -> None:
    spec = make_model(10, odd_qtype="Q8_0", experts=Experts(8, 2, 512))
    profile, plan = plan_of_disk(spec, 50, 378, 7e9)
    assert list_far(plan_variant(spec, profile, plan.variant.workload))


def test_answers_of_a_dense_model_come_within_a_fifth_of_the_disks_bound() -> None:
    spec = make_model(24, 8192, 64, 8, 28672, 8192)
    profile, plan = plan_of_disk(spec, 8192, 2600, 7e9)
    room, decoding = plan.tasks[0].room, plan.variant.ranks[0].tiers[0].prediction
    outside = spec.packed_nbytes + sum(room.states.values()) + room.scratch(1) - room.arena - profile.ram_bytes
    assert list_far(plan.variant)
    assert max(outside / 7e9, decoding.bound_seconds) / decoding.seconds > 0.8


def test_what_binds_at_the_disk_is_said_in_words() -> None:
    _, plan = plan_of_disk(make_model(16, d_ffn=2048, experts=Experts(8, 2, 512)), 90, 412, 1e8)
    out = StringIO()
    print_explanation(plan.variant, (WhatIf("a disk twice as fast", (), 1.5, 20.0),), (), Console(file=out, width=200))
    said = out.getvalue()
    assert "x divided, d on disk; KV" in said and ": bound by reads from disk (busy: " in said
    assert "a disk twice as fast: +50%, 20 tok/s; " in said


@pytest.mark.slow
def test_memory_and_a_faster_disk_are_worth_something_where_the_disk_binds() -> None:
    profile, workload = make_machine(8 * MIB, 1e8), replace(WORKLOAD, ram_mib=8)
    variant = plan_variant(SPEC, profile, workload)
    gains = {gain.change: gain for gain in explain_gains(SPEC, profile, workload, variant)}
    assert all(gain.of_round >= 1 - 1e-9 for gain in gains.values())
    for change in ("1 GiB more host memory", "a disk twice as fast", "twice the host memory"):
        assert gains[change].of_round > 1.1 and gains[change].decode_rate > 1.1 * decode_rate(variant)


def test_a_budget_in_host_memory_that_ram_does_not_hold_is_refused() -> None:
    with pytest.raises(NoPlan, match=r"host memory lacks \d+ MiB for a budget of 9 in it"):
        plan_roughly(SPEC, make_machine(8 * MIB), replace(WORKLOAD, vram_mib=(9,), ram_mib=8))
