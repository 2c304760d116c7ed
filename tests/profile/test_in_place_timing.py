"""Reading experts in place is timed with the runtime's kernels, from page-locked host memory, and priced by it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from golden.machines import find_machine
from golden.shapes import make_shape

from pshard.batch import Batch
from pshard.machine import InPlaceTiming
from pshard.model_config import Experts
from pshard.planner.make_plan import plan_variant
from pshard.planner.price.profile_tables import Tables
from pshard.planner.price.tier_costs import tier_costs
from pshard.planner.price.tier_loads import TierLoad
from pshard.profile.timed.operands import OperandPool
from pshard.profile.timed.time_in_place import READ_TOKENS, time_in_place
from pshard.profile.timed.time_kernels import KernelBench
from pshard.profile.timing_loop import Pace
from pshard.quant import packed_nbytes
from pshard.registries.check_profile import check_timings
from pshard.registries.fingerprint import digest_profile
from pshard.runtime.kernels.plain import PlainKernels
from pshard.units.operations import used_share
from pshard.workload import Workload

CPU, RULE = torch.device("cpu"), Experts(16, 2, 32)
EXPERT = 2 * packed_nbytes("Q4_0", 32, 64) + packed_nbytes("Q4_0", 64, 32)
LAYER = ("Q4_0", "Q4_0", 64, RULE)


class Recorder(PlainKernels):
    """Plain kernels that keep the addresses of the experts that they are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[torch.Tensor] = []

    def experts(self, *arguments: Any) -> None:
        self.addresses.append(arguments[2].addresses)


class Locker:
    """A device that locks memory, or refuses."""

    def __init__(self, locks: bool = True) -> None:
        self.locks, self.locked, self.unlocked = locks, list[torch.Tensor](), list[torch.Tensor]()

    def page_lock(self, memory: torch.Tensor) -> bool:
        self.locked.append(memory)
        return self.locks

    def page_unlock(self, memory: torch.Tensor) -> None:
        self.unlocked.append(memory)


def bench(kernels: PlainKernels) -> KernelBench:
    pool = OperandPool(256 << 10, CPU)
    return KernelBench("acc", kernels, CPU, pool, Pace(1e-4, least=10, most=10), slow=0.5)


def test_experts_are_read_from_the_memory_that_was_locked_and_each_size_is_timed_once() -> None:
    kernels, device = Recorder(), Locker()
    rows = time_in_place(bench(kernels), device, [LAYER, ("Q4_0", "Q4_0", 64, replace(RULE, used=4))])  # type: ignore[arg-type]
    assert [row.tokens for row in rows] == list(READ_TOKENS) == [1, 2, 4, 8, 16, 32]
    for row in rows:
        assert (row.device, row.expert_nbytes) == ("acc", EXPERT) and row.seconds > 0
        assert row.nbytes == round(16 * used_share(2, 16, row.tokens) * EXPERT)
    (memory,) = device.locked
    inside = range(memory.data_ptr(), memory.data_ptr() + memory.numel())
    assert all(address in inside for each in kernels.addresses for address in each.flatten().tolist())
    assert device.unlocked and device.unlocked[0] is memory


def test_memory_that_cannot_be_locked_is_not_read() -> None:
    kernels, device = Recorder(), Locker(locks=False)
    assert time_in_place(bench(kernels), device, [LAYER]) == [] and not kernels.addresses  # type: ignore[arg-type]
    assert time_in_place(bench(kernels), Locker(), []) == []  # type: ignore[arg-type]


def measured(rate: float) -> tuple[InPlaceTiming, ...]:
    """Rows of experts of 2.6 MB that are read at so many bytes per second."""
    return tuple(InPlaceTiming("acc", 2_654_208, n, n * 20_000_000, n * 2e7 / rate) for n in READ_TOKENS)


@pytest.fixture(scope="module", name="made")
def _made():
    return make_shape("qwen3-30b-a3b", "Q4_0"), find_machine("h100")


def test_the_price_is_what_was_measured_and_a_copy_where_nothing_was(made) -> None:
    spec, profile = made
    load, work = TierLoad(Batch.even(4, 4, 100)), Workload((6000,), sequences=4)
    unit = next(unit.name for unit in spec.units if unit.kind.parts)

    def read(rows: tuple[InPlaceTiming, ...]) -> float:
        return tier_costs(spec, Tables(replace(profile, in_place=rows)), load, work).units[unit].read

    slow, copied = read(measured(20e9)), read(())
    assert slow == pytest.approx(2 * read(measured(10e9)) / 4)
    assert slow > copied == read(measured(1e15))  # never faster than a copy


def test_a_plan_by_what_was_measured_reads_less_over_the_link(made) -> None:
    spec, profile = made
    work = Workload((6000,), 256, prompt=16, max_ubatch=16)
    before, after = (
        plan_variant(spec, replace(profile, in_place=rows), work).ranks[0].tiers[0] for rows in ((), measured(20e9))
    )
    assert after.prediction.seconds > before.prediction.seconds
    assert after.prediction.link_bytes < before.prediction.link_bytes


def test_profiles_of_before_keep_their_fingerprint_and_damaged_rows_are_refused(made) -> None:
    profile = made[1]
    assert digest_profile(profile) != digest_profile(replace(profile, in_place=measured(4e10)))
    check_timings(replace(profile, in_place=measured(4e10)))
    with pytest.raises(ValueError, match=r"in_place\[0\].seconds is 0; on every machine"):
        check_timings(replace(profile, in_place=(replace(measured(4e10)[0], seconds=0.0),)))
