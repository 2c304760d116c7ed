"""Plans whose prompts go through the model in sweeps, where a part of it lives on disk."""

from dataclasses import replace

import pytest
from plan_samples import make_tier, make_variant, with_workload
from planner_cases import DESKTOP
from toy_kinds import ToyFile

from pshard.batch import Batch
from pshard.errors import UserError
from pshard.homes import READ
from pshard.machine import DiskTiming, MachineProfile
from pshard.plan import PlanSet, Registry, Sweep, Variant
from pshard.planner.check_plan import PlanError, check_variant
from pshard.planner.make_plan import plan_variant
from pshard.planner.price import host_limits
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.host_limits import usable_bytes
from pshard.planner.price.predict_published import Predictor
from pshard.planner.serving.promise import promise, promise_times, widen_gap
from pshard.planner.serving.step_times import time_steps as time_server_steps
from pshard.planner.shown.show_summary import describe_reads
from pshard.planner.time_steps import time_steps
from pshard.predicted_times import first_token_seconds
from pshard.registries.codec import decode_registry, encode_registry
from pshard.registries.fingerprint import digest
from pshard.speculation import Acceptance, Drafting
from pshard.workload import Workload

MIB = 1 << 20
SPEC = ToyFile("aaaaaa", d_model=256, d_ffn=512, context=4096).spec
WORKLOAD = Workload((1,), 2048, type_k="f32", type_v="f32", max_ubatch=128, prompt=1000, generated=20)
RATE = 2e7  # of the disk, which is slow


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are tiny here: nothing is taken off for the process."""
    monkeypatch.setattr(host_limits, "PROCESS", {"cpu": 0, "cuda": 0})


def plan_slow_disk(kind: str, budget: int, ram: int, **more: int) -> tuple[MachineProfile, Variant]:
    """A plan that leaves something on disk, with so many MiB of host memory."""
    rows = tuple(DiskTiming("drive", True, 0, 0, n, 1e-5 + n / RATE) for n in (1 << 16, 1 << 20, 1 << 26))
    profile = replace(profile_from_datasheet(replace(DESKTOP, kind=kind)), disks=rows, ram_bytes=ram * MIB)
    variant = plan_variant(SPEC, profile, replace(WORKLOAD, vram_mib=(budget,), ram_mib=ram, **more))
    check_variant((SPEC,), variant, kind, usable_bytes(profile, 1))
    assert variant.ranks[0].beyond_host
    return profile, variant


@pytest.mark.quick("cpu-6-11")
@pytest.mark.parametrize(("kind", "budget", "ram"), [("cpu", 6, 11), ("cuda", 332, 3)])
def test_a_prompt_is_priced_by_one_pass_over_the_disk(kind: str, budget: int, ram: int) -> None:
    profile, variant = plan_slow_disk(kind, budget, ram)
    last = variant.ranks[0].tiers[-1]
    batches = -(-WORKLOAD.prompt // last.tokens)
    assert last.sweep and last.sweep.batches == batches > 4
    far = [SPEC.unit(p.unit).packed_nbytes for p in last.placements if p.site.is_beyond_host]
    assert first_token_seconds(variant) == pytest.approx(sum(far) / RATE, rel=0.05)
    assert last.prediction.seconds > 0.95 * sum(far) / RATE  # a micro-batch alone reads as much
    assert describe_reads(variant) == f"a prompt of {WORKLOAD.prompt} tokens reads them once"  # nothing to record
    said = describe_reads(variant, routes=True)
    assert said.endswith(f"reads them once; {batches} times where routing is recorded or played")
    (sheet,) = time_steps(SPEC, profile, variant, WORKLOAD.prompt)
    reads = [step for step in sheet.steps if step.lane == READ.name]
    computed = [step for step in sheet.steps if step.step == "Compute" and step.what == "blk.0.ffn"]
    assert sum(step.nbytes for step in reads) == sum(far) and len(computed) == batches
    with pytest.raises(UserError, match="no tier covers"):
        time_steps(SPEC, profile, replace(variant, ranks=(without_sweep(variant),)), WORKLOAD.prompt)
    text = encode_registry(Registry((PlanSet(digest(()), (), "toy", "", (variant,)),)))
    assert decode_registry(text).variants == (variant,)
    with pytest.raises(ValueError, match="no sweep of 2"):
        decode_registry(text.replace(f'"batches": {batches}', '"batches": 1'))


def test_a_plan_says_why_its_prompts_read_the_disk_for_each_micro_batch() -> None:
    drafted, places = {"acceptance": Acceptance((0.5,))}, {u.name: ("pinned", "vram") for u in SPEC.units}
    tiers = tuple(make_tier(SPEC, n, places, 0, 256, 1, batch=64) for n in (1, 64))
    for more, why in (
        ({}, ""),
        ({"drafting": Drafting("mtp", 1)} | drafted, ", as the head follows each micro-batch"),
        ({"drafting": Drafting("lookup,draft", 1)} | drafted, ", as the draft model follows each micro-batch"),
        ({"drafting": Drafting("lookup", 1)} | drafted, ""),
        ({"concurrency": 1}, ""),
    ):
        variant = with_workload(make_variant(SPEC, tiers, 256, 1), prompt=200, **more)
        assert describe_reads(variant) == f"a prompt of 200 tokens reads them 4 times, for every 64 tokens{why}"
    once = with_workload(variant, prompt=64)
    assert describe_reads(once) == "a prompt of 64 tokens reads them once"


def without_sweep(variant: Variant):
    (rank,) = variant.ranks
    return replace(rank, tiers=(*rank.tiers[:-1], replace(rank.tiers[-1], sweep=None)))


def test_rows_that_have_no_room_to_wait_make_a_prompt_read_the_disk_more_often() -> None:
    _, variant = plan_slow_disk("cpu", 4, 11)
    last = variant.ranks[0].tiers[-1]
    assert last.sweep and 1 < last.sweep.batches < 8
    passes = -(-8 // last.sweep.batches)
    assert f"reads them {passes} times, in sweeps of {last.sweep.batches} micro-batches" in describe_reads(variant)
    far = sum(SPEC.unit(name).packed_nbytes for name in variant.ranks[0].beyond_host)
    assert first_token_seconds(variant) == pytest.approx(passes * far / RATE, rel=0.05)


def test_a_sweep_for_which_rows_have_no_room_is_refused() -> None:
    _, variant = plan_slow_disk("cpu", 6, 11)
    (rank,) = variant.ranks
    for at, sweep in ((-1, Sweep(99)), (-1, Sweep(1)), (-1, None), (0, Sweep(8))):
        tiers = list(rank.tiers)
        tiers[at] = replace(tiers[at], sweep=sweep)
        with pytest.raises(PlanError, match=r"bytes of scratch|has no use here"):
            check_variant((SPEC,), replace(variant, ranks=(replace(rank, tiers=tuple(tiers)),)), "cpu")


def test_a_prompt_of_one_micro_batch_has_no_sweeps() -> None:
    profile, variant = plan_slow_disk("cpu", 6, 11, prompt=100)
    assert variant.ranks[0].tiers[-1].sweep is None
    times = time_server_steps(SPEC, profile, variant)
    assert not times.sweep and times.largest == variant.ranks[0].tiers[-1].tokens


def test_a_servers_plan_has_sweeps_and_promises_by_them() -> None:
    """A step of several micro-batches takes what a simulation of their sweep does. Beside answers for which the disk is
    too slow to keep a gap, a step takes twice as long as theirs at most."""
    profile, variant = plan_slow_disk("cpu", 6, 11, sequences=2, concurrency=1)
    last, predictor = variant.ranks[0].tiers[-1], Predictor([SPEC], profile, variant)
    times = time_server_steps(SPEC, profile, variant)
    assert last.sweep and times.largest == last.most_swept * last.tokens > WORKLOAD.prompt - last.tokens
    for count in range(2, last.most_swept + 1):
        swept = predictor.sweep_seconds(Batch.even(last.tokens, 1, (count - 1) * last.tokens // 2), count)
        assert times.seconds(0, 0, count * last.tokens) == pytest.approx(swept, rel=0.05)
    steps = [times.seconds(1, 500, n) for n in range(1, times.largest, 40)]
    assert steps == sorted(steps)
    with pytest.raises(ValueError, match="no tier covers"):
        times.seconds(1, 500, times.largest)
    alone, _ = promise(SPEC, profile, variant).paces
    assert alone.first_token == pytest.approx(first_token_seconds(variant), rel=0.05)
    least = times.seconds(1, WORKLOAD.prompt, 1)
    told = promise_times(variant.workload, times, least / 2)  # the disk is too slow for this gap
    assert told.chunk > 4 * last.tokens and widen_gap(least / 2, least) == 2 * least
    assert told.paces[1].longest_gap <= 2.05 * least


@pytest.mark.parametrize("budget", [6, 4])
def test_a_bench_of_prompts_is_predicted_in_the_sweeps_that_the_plan_has(budget: int) -> None:
    """Of the expected prompt it is what the plan says; others read the disk as often as sweeps hold them."""
    profile, variant = plan_slow_disk("cpu", budget, 11)
    predictor, last = Predictor([SPEC], profile, variant), variant.ranks[0].tiers[-1]
    assert predictor.prefill(WORKLOAD.prompt) == pytest.approx(first_token_seconds(variant), rel=0.05)
    held = last.tokens * last.most_swept
    assert predictor.prefill(held) == pytest.approx(predictor.prefill(last.tokens + 1), rel=0.1)
    assert predictor.prefill(held + 1) == pytest.approx(2 * predictor.prefill(held), rel=0.1)
    single = Predictor([SPEC], profile, replace(variant, ranks=(without_sweep(variant),)))
    assert single.prefill(held) > 0.9 * last.most_swept * predictor.prefill(held)
