"""Attention over latents is timed as it is run, for the shapes of the model, and its rows are what plans look up."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from golden.machines import find_machine
from golden.shapes import make_shape

from pshard.batch import Batch
from pshard.planner.price.price_operations import OneSide, price_operation
from pshard.planner.price.profile_tables import Tables
from pshard.planner.price.tier_loads import TierLoad
from pshard.profile.effort import model_shapes, quick_effort
from pshard.profile.timed.kernel_jobs import list_jobs
from pshard.profile.timed.operands import OperandPool
from pshard.profile.timed.time_kernels import KernelBench
from pshard.profile.timed.time_latent import time_latent
from pshard.profile.timing_loop import Pace
from pshard.runtime.kernels.plain import PlainKernels
from pshard.units.operations import Attend, AttendLatent

CPU = torch.device("cpu")
SHAPE = AttendLatent(4, 64, 32)
LITE = AttendLatent(16, 512, 64)


class Recorder(PlainKernels):
    """Plain kernels that keep what they are called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def attend_latent(self, *arguments: Any) -> None:
        self.calls.append(arguments)
        super().attend_latent(*arguments)


def bench(kernels: PlainKernels, pool: int = 1 << 20) -> KernelBench:
    return KernelBench("host", kernels, CPU, OperandPool(pool, CPU), Pace(1e-4, least=3, most=5), slow=0.5)


def test_cells_rotate_and_rows_stand_at_the_end_of_their_context() -> None:
    kernels = Recorder()
    rows = time_latent(bench(kernels), SHAPE, "bf16", 2, [64, 130], 1)
    assert [(r.n_heads, r.n_kv_heads, r.head_dim, r.tokens, r.context) for r in rows] == [
        (4, 1, 96, 2, 64), (4, 1, 96, 2, 130)]  # fmt: skip
    q, rank, cells, index, _, out, _ = next(call for call in kernels.calls if call[2].shape[0] == 3)
    assert q.shape == out.shape == (2, 4, 96) and rank == 64 and cells.shape[1:] == (64, 1, 96)
    assert index.position.tolist() == [128, 129]
    assert len({call[2].data_ptr() for call in kernels.calls}) > 1


def test_sequences_that_the_pool_has_no_room_for_are_left_out() -> None:
    assert not time_latent(bench(PlainKernels(), 64 << 10), SHAPE, "bf16", 1, [64], 16)
    assert time_latent(bench(PlainKernels()), SHAPE, "bf16", 1, [64], 16)[0].sequences == 16


def test_a_model_s_own_latents_are_timed() -> None:
    shapes = model_shapes(make_shape("deepseek-v2-lite"))
    assert shapes.latent == (LITE,) and not shapes.attention
    assert ("Q4_0", 16 * 512, 128) in shapes.matmuls and ("Q4_0", 16 * 128, 512) in shapes.matmuls
    labels = [job.label for job in list_jobs("host", quick_effort(1 << 20, 1 << 34), shapes)]
    assert sum("over latents" in label for label in labels) > 4


def _price(tables: Tables, load: TierLoad, operation: Any = LITE) -> float:
    return sum(seconds for _, seconds in price_operation(operation, OneSide("acc", tables, load, load.tokens, "bf16")))


@pytest.mark.parametrize("tokens", [1, 256])
def test_latents_that_were_not_timed_cost_what_as_wide_a_head_does_and_for_a_token_half(tokens: int) -> None:
    """Which waits for its cells, and these are read once."""
    tables = Tables(find_machine("h100"))
    load = TierLoad(Batch.even(tokens, 1, 4096))
    share = _price(tables, load) / _price(tables, load, Attend(16, 1, 576))
    assert share == pytest.approx(0.5 if tokens == 1 else 1.0)


def test_rows_of_latents_are_looked_up_as_they_were_timed() -> None:
    profile = find_machine("h100")
    some = [a for a in profile.attention if a.device == "acc" and a.tokens == 1 and a.sequences == 1]
    timed = [replace(a, n_heads=16, n_kv_heads=1, head_dim=576, seconds=1e-3) for a in some]
    tables = Tables(replace(profile, attention=(*profile.attention, *timed)))
    load = TierLoad(Batch.even(1, 1, some[0].context - 1))
    assert _price(tables, load) == pytest.approx(1e-3)
