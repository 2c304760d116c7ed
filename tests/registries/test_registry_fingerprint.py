"""Fingerprints change with what plans depend on, and say what changed."""

from dataclasses import replace

import pytest
from registry_samples import make_plan_set, make_profile, make_registry, make_variant

from pshard.errors import StaleRegistry
from pshard.machine import DiskTiming, ReadTiming
from pshard.plan import Registry
from pshard.registries.fingerprint import digest, explain_difference, fingerprint_inputs
from pshard.registries.store import describe_other_locks, own_plans

MODEL = (("architecture", "llama"), ("tensors", "abc"), ("bytes", "1000"))


def host_with(profile, **changes):
    return replace(profile, host=replace(profile.host, **changes))


def accelerator_with(profile, **changes):
    return replace(profile, accelerators=(replace(profile.accelerators[0], **changes),))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p: host_with(p, threads=12), "threads: 8 -> 12"),
        (lambda p: host_with(p, cpu="Other CPU"), "cpu: Some CPU -> Other CPU"),
        (lambda p: host_with(p, isa="avx512"), "isa: avx2 -> avx512"),
        (lambda p: host_with(p, kernels="torch"), "kernels: native -> torch"),
        (lambda p: accelerator_with(p, driver="571"), "driver 0: 570.1 -> 571"),
        (lambda p: accelerator_with(p, pcie_width=8), "PCIe 4 x16 -> cuda Some GPU, 16384 MiB, PCIe 4 x8"),
        (lambda p: accelerator_with(p, memory_bytes=8 << 30), "16384 MiB, PCIe 4 x16 -> cuda Some GPU, 8192 MiB"),
        (lambda p: replace(p, accelerators=()), "accelerator 0: cuda Some GPU, 16384 MiB, PCIe 4 x16 -> absent"),
        (lambda p: replace(p, lockable_bytes=3 << 20), "page-locked memory: absent -> 3145728 bytes at most"),
        (lambda p: replace(p, reads=(ReadTiming(4, 1e10),)), "profile: measured 2026-01-02"),
    ],
)
def test_each_change_of_the_machine_is_named(change, named):
    old, new = (fingerprint_inputs(MODEL, p) for p in (make_profile(), change(make_profile())))
    assert digest(old) != digest(new)
    assert named in "; ".join(explain_difference(old, new))


def test_a_change_of_the_model_is_named():
    old = fingerprint_inputs(MODEL, make_profile())
    new = fingerprint_inputs((*MODEL[:2], ("bytes", "1001")), make_profile())
    assert explain_difference(old, new) == ["model bytes: 1000 -> 1001"]
    called = (("model file sizes", "1"), ("draft model", "a"))  # as a file calls them, "model" included
    told = explain_difference(fingerprint_inputs((), make_profile()), fingerprint_inputs(called, make_profile()))
    assert told == ["model file sizes: absent -> 1", "draft model: absent -> a"]


def test_plans_for_another_limit_of_page_locking_come_behind_those_for_this_one():
    limits = [fingerprint_inputs(MODEL, replace(make_profile(), lockable_bytes=b)) for b in (None, 1 << 20, 2 << 20)]
    far, near = (make_plan_set(inputs=inputs, variants=variants) for inputs, variants in (
        (limits[0], (make_variant((100,)), make_variant((200,)))), (limits[1], (make_variant((100,), seconds=1.0),)),
    ))  # fmt: skip
    both = Registry((far, near))
    found = own_plans(both, limits[1], "plan")
    assert found.variants == (*near.variants, far.variants[1])
    told = [describe_other_locks(both, variant, limits[1]) for variant in found.variants]
    assert told == [None, "page-locked memory: absent -> 1048576 bytes at most"]
    assert own_plans(both, limits[2], "plan").variants == (*far.variants,)
    with pytest.raises(StaleRegistry, match="threads: 8 -> 12"):
        own_plans(both, fingerprint_inputs(MODEL, host_with(make_profile(), threads=12)), "plan")


def test_plans_that_were_made_without_a_disk_run_beside_one_and_not_the_other_way_round():
    disk = (DiskTiming("drive", True, 0, 0, 1 << 20, 1e-3),)
    without, beside = (fingerprint_inputs(MODEL, replace(make_profile(), disks=rows)) for rows in ((), disk))
    (one, other) = (Registry((make_plan_set(inputs=inputs),)) for inputs in (without, beside))
    variants = own_plans(one, beside, "plan").variants
    assert describe_other_locks(one, variants[0], beside) is None
    loaded = replace(make_profile(), disks=(replace(disk[0], disturbed=0.3),))
    assert fingerprint_inputs(MODEL, loaded) == beside  # the load is no timing
    with pytest.raises(StaleRegistry, match=r"disk: drive, timed as .* -> absent"):
        own_plans(other, without, "plan")


def test_equal_inputs_give_the_same_fingerprint():
    assert digest(fingerprint_inputs(MODEL, make_profile())) == digest(fingerprint_inputs(MODEL, make_profile()))
    assert explain_difference(MODEL, MODEL) == []


def test_a_registry_without_plans_names_the_command():
    with pytest.raises(StaleRegistry, match=r"the registry has no plans; run: pshard-plan -m m$"):
        own_plans(Registry(()), MODEL, "pshard-plan -m m")


def test_stale_registry_names_the_input_and_the_command():
    registry = make_registry(inputs=(("threads", "8"), ("cpu", "x")))
    assert own_plans(registry, (("threads", "8"), ("cpu", "x")), "pshard-plan -m m") is registry.sets[0]
    with pytest.raises(StaleRegistry, match=r"\(threads: 8 -> 12\); run: pshard-plan -m m"):
        own_plans(registry, (("threads", "12"), ("cpu", "x")), "pshard-plan -m m")
