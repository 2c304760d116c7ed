"""Plans over VRAM, host memory and disk."""

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
from latent_files import random_tensors, write_latent_gguf
from planner_cases import DESKTOP
from toy_kinds import ToyFile

from pshard.errors import NoPlan
from pshard.homes import DISK
from pshard.machine import DiskTiming, MachineProfile
from pshard.models import open_model
from pshard.plan import Variant
from pshard.planner.check_plan import check_variant, count_host_bytes
from pshard.planner.make_plan import plan_variant
from pshard.planner.price import host_limits
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.host_limits import usable_bytes
from pshard.predicted_times import round_seconds
from pshard.profile.timed.time_disk import mark_made
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


@pytest.mark.usefixtures("quick_search")
def test_what_ram_does_not_hold_stays_on_disk_and_within_ram() -> None:
    found = {}
    for mib in (8, 12, 64):
        profile = make_machine(mib * MIB)
        found[mib] = variant = plan_variant(SPEC, profile, replace(WORKLOAD, ram_mib=mib))
        check_variant((SPEC,), variant, "cpu", usable_bytes(profile, 1))
        assert count_host_bytes((SPEC,), variant, "cpu") <= mib * MIB
        assert set(variant.ranks[0].beyond_host.values()) <= {DISK}
    assert list_far(found[8]) > list_far(found[12]) and not list_far(found[64])


@pytest.mark.usefixtures("quick_search")
def test_what_the_files_do_not_hold_as_it_is_used_never_stays_on_disk(tmp_path: Path) -> None:
    path = write_latent_gguf(tmp_path / "m.gguf", "lite", random_tensors("lite", 2), "joint")  # keys beside values
    with open_model(path) as file:
        marked = {unit.name for unit in mark_made(file).units if unit.stays_in_memory}
    assert marked == {"blk.0.attention", "blk.1.attention"}
    profile, workload = make_machine(12 * MIB), replace(WORKLOAD, ram_mib=12)
    held = min(plan_variant(SPEC, profile, workload).ranks[0].beyond_host)
    spec = replace(SPEC, units=tuple(replace(u, stays_in_memory=u.name == held) for u in SPEC.units))
    variant = plan_variant(spec, profile, workload)
    check_variant((spec,), variant, "cpu", usable_bytes(profile, 1))
    assert list_far(variant) and held not in variant.ranks[0].beyond_host


@pytest.mark.usefixtures("quick_search")
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_more_ram_or_a_faster_disk_makes_no_plan_slower(kind: str) -> None:
    for rates, sizes in (((1e8, 1e9), (10,)), ((1e9,), (8, 10, 12, 64))):
        rounds = list[float]()
        for rate, mib in product(rates, sizes):
            workload = replace(WORKLOAD, vram_mib=(4 if kind == "cpu" else 330,), ram_mib=mib)
            try:
                rounds.append(round_seconds(plan_variant(SPEC, make_machine(mib * MIB, rate, kind), workload)))
            except NoPlan:
                assert not rounds, f"{mib} MiB have no plan, and fewer have one"
        assert len(rounds) > 1
        assert all(after <= before * (1 + 1e-9) for before, after in pairwise(rounds)), rounds
