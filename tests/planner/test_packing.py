"""What packing and reading ahead cost and save in simulations of models on disk."""

import random
from dataclasses import replace

import pytest
from plan_samples import make_tier, make_variant
from planner_cases import DESKTOP
from toy_kinds import ToyFile

from pshard.buffers import BUFFERS, CHUNK
from pshard.machine import DiskTiming, MachineProfile
from pshard.on_disk import PIECE
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.packing import end_of_burst
from pshard.planner.price.predict_published import Predictor
from pshard.planner.price.profile_tables import Tables
from pshard.planner.price.simulate import _Link
from pshard.session.use_disk import describe_disk

SPEC = ToyFile("aaaaaa", d_model=256, d_ffn=512).spec
TOKENS = 1024


def integrate(reads: list[tuple[float, float, float]], start: float, seconds: float, step: float) -> float:
    """When work of so many seconds from `start` ends, in small steps: at each its speed is what reads leave."""
    now, left = start, seconds
    while left > 0:
        now += step
        left -= step * (1 - next((share for begins, ends, share in reads if begins <= now < ends), 0.0))
    return now


@pytest.mark.parametrize("seed", range(8))
def test_work_beside_reads_has_the_cores_that_these_leave(seed: int) -> None:
    rng = random.Random(seed)
    reads, at = list[tuple[float, float, float]](), 0.0
    for _ in range(6):
        begins = at + rng.choice((0.0, rng.uniform(0, 0.3)))
        at = begins + rng.uniform(0.05, 0.5)
        reads.append((begins, at, rng.uniform(0.05, 0.9)))
    link, now = _Link(), 0.0
    for read in reads:
        link.pack(*read)
    for _ in range(4):
        start, seconds = now + rng.uniform(0, 0.2), rng.uniform(0.1, 0.6)
        now = link.beside(start, seconds, (1.0, 1.0))
        assert now == pytest.approx(integrate(reads, start, seconds, 2e-5), abs=2e-3)


def make_machine(rate: float, each: float) -> MachineProfile:
    """Two cores and a disk of such a rate, of whose bytes each takes so much processor time."""
    sizes = (1 << 10, 1 << 20, 1 << 26)
    rows = tuple(DiskTiming("drive", True, 0, 0, n, n / rate, n * each) for n in sizes)
    profile = profile_from_datasheet(replace(DESKTOP, kind="cpu"))
    return replace(profile, host=replace(profile.host, cores=2, threads=2), disks=rows)


def test_a_disk_that_waits_for_the_cores_that_pack_is_not_said_to_be_slow() -> None:
    alone = DiskTiming("drive", True, 1 << 20, 16, 1 << 26, (1 << 26) / 3e9)
    slow, better = "limits that, not the disk", "an NVMe drive would be several times as fast"
    for each, disk, said in ((0.95, 3e9, slow), (0.5, 3e9, better), (0.95, 0.6e9, better)):
        profile = make_machine(0.5e9, each / 0.5e9)
        row = replace(alone, seconds=alone.nbytes / disk)
        line = describe_disk(replace(profile, disks=(*profile.disks, row)))
        assert line.startswith("disk: drive brings 0.50 GB/s of weights to host memory; ") and line.endswith(said)


def test_a_disk_that_may_be_fast_but_for_other_programs_is_not_said_to_be_slow() -> None:
    """A disk of 7 GB/s brought 0.8 on a busy machine, and a line named an NVMe drive as faster."""
    better = "an NVMe drive would be several times as fast"
    for disturbed, said in ((0.0, True), (0.4, True), (0.6, False)):
        profile = make_machine(0.5e9, 0.0)
        rows = tuple(replace(row, disturbed=disturbed) for row in profile.disks)
        assert (better in describe_disk(replace(profile, disks=rows))) == said


def predict(rate: float, each: float) -> tuple[float, float]:
    """Seconds of a micro-batch with all FFNs on disk, and of reading these."""
    places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in SPEC.units}
    far = {u.name: ("disk", None) for u in SPEC.units if u.name.endswith("ffn")}
    tier = make_tier(SPEC, TOKENS, places | far, 2, 2048, 1)
    predictor = Predictor([SPEC], make_machine(rate, each), make_variant(SPEC, (tier,), 2048, 1))
    return predictor.micro_batch(TOKENS, 1, 0), sum(SPEC.unit(name).packed_nbytes for name in far) / rate


def test_what_computes_takes_longer_by_the_cores_that_pack() -> None:
    """A disk that is fast enough to be no limit: the time is the units' own and half of what packing takes of two
    cores."""
    rate = 6e10
    free, reading = predict(rate, 0.0)
    assert reading < free / 2
    packed, _ = predict(rate, 1 / rate)  # one core while the disk is read: half of both
    assert packed == pytest.approx(free + reading / 2, rel=0.02)


def test_a_disk_that_limits_hides_what_packing_takes() -> None:
    free, reading = predict(2e7, 0.0)
    packed, _ = predict(2e7, 0.25e-9)
    assert free == pytest.approx(reading, rel=0.1) and packed == pytest.approx(free, rel=1e-3)


def test_reads_that_somebody_waits_for_end_with_a_latency_and_the_packing_of_one_piece() -> None:
    rate, late, each = 1e9, 2e-4, 0.5e-9
    profile = make_machine(rate, each)
    small = [DiskTiming("drive", True, PIECE, depth, PIECE, PIECE / rate + late / depth) for depth in (1, 16)]
    timed = Tables(replace(profile, disks=(*profile.disks, *small)))
    assert end_of_burst(timed) == pytest.approx(late * (1 - 1 / 16) + PIECE * each, rel=1e-6)
    assert end_of_burst(Tables(replace(profile, disks=()))) == 0.0


LARGE = ToyFile("aaaa", d_model=2048, d_ffn=8192).spec  # an FFN is larger than the ring
FAR = [unit.name for unit in LARGE.units if unit.name.endswith("ffn")]


def time_one_slot(tokens: int, rate: float, site: str, kind: str = "cuda") -> float:
    """Seconds of a micro-batch whose FFNs come from there, by one slot."""
    rows = tuple(DiskTiming("drive", True, 0, 0, n, n / rate) for n in (1 << 10, 1 << 28))
    profile = replace(profile_from_datasheet(replace(DESKTOP, kind=kind)), disks=rows)
    places: dict[str, tuple] = {u.name: ("pinned", "vram" if u.kind.state else None) for u in LARGE.units}
    places |= {name: (site, None) for name in FAR}
    variant = make_variant(LARGE, (make_tier(LARGE, tokens, places, 1, 2048, 1),), 2048, 1)
    return Predictor([LARGE], profile, variant).micro_batch(tokens, 1, 0)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_disk_reads_ahead_for_the_only_slot_of_a_gpu_while_that_is_in_use(kind: str) -> None:
    """As much as the ring holds. Without a GPU there is none, and what is computed comes on top."""
    rate = 1e10
    ahead, reading = (len(FAR) * n / rate for n in (BUFFERS * CHUNK, LARGE.unit(FAR[0]).packed_nbytes))
    computing = time_one_slot(512, rate, "pinned", kind)
    with_disk = time_one_slot(512, rate, "disk", kind)
    if kind == "cpu":
        assert with_disk == pytest.approx(reading + computing, rel=0.01)
        return
    assert reading / 20 < computing < ahead
    assert with_disk == pytest.approx(reading, rel=0.01)
    longer = time_one_slot(2048, rate, "pinned")
    assert ahead < longer
    assert time_one_slot(2048, rate, "disk") == pytest.approx(reading + longer - ahead, rel=0.02)


def test_what_was_read_ahead_waits_for_the_slot() -> None:
    """A disk that is never waited for brings FFNs no sooner than host memory does."""
    assert time_one_slot(2048, 1e12, "disk") == pytest.approx(time_one_slot(2048, 1e12, "streamed"), rel=1e-4)
