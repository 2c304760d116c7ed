"""Plans of models with a table larger than host memory: its rows are read from disk as they are looked up."""

from dataclasses import replace
from pathlib import Path

import pytest
from planner_cases import DESKTOP, make_model

from pshard.errors import NoPlan
from pshard.homes import ON_DEMAND, PINNED
from pshard.machine import DiskTiming, MachineProfile
from pshard.model import ModelSpec
from pshard.on_disk import RowRun, mark_made, rows_nbytes
from pshard.planner.check_plan import check_variant, count_host_bytes
from pshard.planner.make_plan import plan_variant
from pshard.planner.prepare_ranks import price_tiers
from pshard.planner.price import host_limits
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.draft import Beyond, tier_steps
from pshard.planner.price.host_limits import usable_bytes
from pshard.planner.price.profile_tables import find_tables
from pshard.planner.price.scattered_reads import ScatteredReads
from pshard.planner.search.round_times import switch_seconds
from pshard.planner.serving.step_times import time_steps
from pshard.steps.step import Compute
from pshard.tensor import TensorSpec
from pshard.units.unit import Unit
from pshard.workload import Workload

MIB = 1 << 20
READ = 1e-4  # seconds of a small read; of 16 at once each takes a tenth of it


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are tiny here: nothing is taken off for the process."""
    monkeypatch.setattr(host_limits, "PROCESS", {"cpu": 0, "cuda": 0})


def with_large_table() -> ModelSpec:
    """A model of 7 MiB without its table, which has 576."""
    spec = make_model(4, 256, d_ffn=1024, vocab=512)
    table = replace(spec.units[0], tensors=(TensorSpec("token_embd.weight", "Q4_0", (1 << 22, 256)),))
    return replace(spec, units=(table, *spec.units[1:]))


def make_machine(ram: int, kind: str, small: bool = True) -> MachineProfile:
    rows = [DiskTiming("drive", True, 0, 0, n, 1e-4 + n / 1e9) for n in (1 << 16, 1 << 20, 1 << 26)]
    rows += [DiskTiming("drive", True, 1 << 12, 1, 100 << 12, 100 * READ)] * small
    rows += [DiskTiming("drive", True, 1 << 12, 16, 1000 << 12, 100 * READ)] * small
    return replace(profile_from_datasheet(replace(DESKTOP, kind=kind)), disks=tuple(rows), ram_bytes=ram * MIB)


def load_for(kind: str, ram: int) -> Workload:
    return Workload((12 if kind == "cpu" else 330,), 128, max_ubatch=32, prompt=40, generated=20, ram_mib=ram)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_table_larger_than_memory_stays_on_disk_and_its_rows_are_priced(kind: str) -> None:
    spec, profile, load = with_large_table(), make_machine(48, kind), load_for(kind, 48)
    variant = plan_variant(spec, profile, load)
    check_variant((spec,), variant, kind, usable_bytes(profile, 1))
    assert count_host_bytes((spec,), variant, kind) <= 48 * MIB < spec.units[0].packed_nbytes
    (rank,) = variant.ranks
    assert list(rank.beyond_host) == ["embedding"]  # all else fits
    assert {tier.placement("embedding").where for tier in rank.tiers} == {ON_DEMAND}
    ample = plan_variant(spec, replace(make_machine(0, kind), ram_bytes=0), replace(load, ram_mib=0))
    assert not ample.ranks[0].beyond_host
    (task,) = price_tiers(spec, find_tables(profile), load, tuple(tier.tokens for tier in rank.tiers))
    for tier, cost in zip(rank.tiers, task.costs):
        first = next(step for step in tier_steps(task.room, tier, cost).body if isinstance(step, Compute))
        assert first.reads == rows_nbytes(spec.units[0], spec.config, tier.tokens) == 144 * tier.tokens
    slower = rank.tiers[0].prediction.seconds - ample.ranks[0].tiers[0].prediction.seconds
    (row,) = (dict(tier.prediction.busy)["disk"] for tier in rank.tiers[:1])
    assert row == pytest.approx(READ * (4096 + 144) / 4096)
    assert slower == pytest.approx(row, rel=0.3)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_where_no_small_reads_were_timed_or_the_file_has_no_such_rows_a_table_stays_in_memory(kind: str) -> None:
    spec, load = with_large_table(), load_for(kind, 48)
    with pytest.raises(NoPlan):
        plan_variant(spec, make_machine(48, kind, small=False), load)
    made = replace(spec, units=(replace(spec.units[0], stays_in_memory=True), *spec.units[1:]))
    with pytest.raises(NoPlan):
        plan_variant(made, make_machine(48, kind), load)


def test_a_table_that_a_drafter_computes_with_stays_in_memory() -> None:
    spec = with_large_table()
    head = replace(spec, units=(replace(spec.units[0], tensors=(), lent=spec.units[0].tensors), *spec.units[1:]))
    (task,) = price_tiers(spec, find_tables(make_machine(48, "cpu")), load_for("cpu", 48), (1,))
    for drafter, legal in ((None, True), (head, False)):
        room = replace(task.room, spec=replace(spec, head=drafter), beyond=Beyond(host_limits.DISK, 1 << 25, True))
        assert ((ON_DEMAND, None) in room.list_places("embedding")) == legal
    assert (ON_DEMAND, None) not in replace(task.room, beyond=None).list_places("embedding")


def test_rows_with_a_factor_that_are_made_or_in_pieces_of_records_stay_in_memory() -> None:
    class Everywhere:
        def __init__(self, qtype: str, runs: tuple[RowRun, ...]) -> None:
            table, self.runs = with_large_table().units[0], runs
            self.spec = replace(with_large_table(), units=(self.retype(table, qtype),))

        def retype(self, unit: Unit, qtype: str) -> Unit:
            return replace(unit, tensors=tuple(replace(tensor, qtype=qtype) for tensor in unit.tensors))

        def locate(self, name: str, part: int | None = None):
            return "m.gguf", 0

        def locate_rows(self, name: str):
            return self.runs

    whole = RowRun(Path("m.gguf"), 0, 1 << 22)
    cut = RowRun(Path("m.gguf"), 0, 24)  # rows of two records, of which one goes on elsewhere
    for qtype, stays in (("Q6_K", True), ("F32", False)):
        assert mark_made(Everywhere(qtype, (cut, cut))).units[0].stays_in_memory == stays
    for qtype, runs, stays in (("Q6_K", 1, False), ("Q6_K", 3, False), ("Q6_K", 0, True), ("NVFP4", 1, True)):
        assert mark_made(Everywhere(qtype, runs * (whole,))).units[0].stays_in_memory == stays, (qtype, runs)


def test_a_switch_reads_all_of_a_table_that_only_answers_have_in_vram() -> None:
    spec, profile, load = with_large_table(), make_machine(48, "cuda"), load_for("cuda", 48)
    variant = plan_variant(spec, profile, load)
    first, *rest = variant.ranks[0].tiers
    table, *others = first.placements
    first = replace(first, placements=(replace(table, where=PINNED), *others))
    tables, tiers = find_tables(profile), (first, *rest)
    (task,) = price_tiers(spec, tables, load, tuple(tier.tokens for tier in tiers))
    reads = tables.copy("disk", spec.unit("embedding").packed_nbytes)
    assert reads > 0.5
    assert {place.unit for place in first.placements if place not in rest[-1].placements} == {"embedding"}
    assert switch_seconds(task.room, tiers, task.costs) == pytest.approx(reads)
    times = time_steps(spec, profile, replace(variant, ranks=(replace(variant.ranks[0], tiers=tiers),)))
    assert times.switch_seconds(32, 1) == pytest.approx(reads) and not times.switch_seconds(1, 32)


def test_small_reads_take_as_long_as_one_alone_or_as_all_side_by_side() -> None:
    reads = ScatteredReads(make_machine(48, "cpu"))
    assert reads.seconds(1, 4096) == pytest.approx(2 * READ)  # of two blocks
    assert reads.seconds(9, 4096) == pytest.approx(2 * READ)  # which wait for each other's latency
    assert reads.seconds(17, 4096) == pytest.approx(17 * 2 * READ / 10)
    with pytest.raises(ValueError, match="no small reads"):
        ScatteredReads(make_machine(48, "cpu", small=False)).seconds(1, 4096)
