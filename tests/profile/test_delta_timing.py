"""Delta nets are timed as they are run, in both forms, and their rows are what plans look up."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from golden.machines import find_machine

from pshard.batch import Batch
from pshard.machine import DeltaTiming
from pshard.planner.price.price_operations import OneSide, price_operation
from pshard.planner.price.profile_tables import Tables
from pshard.planner.price.tier_loads import TierLoad
from pshard.profile.effort import Shapes, quick_effort
from pshard.profile.timed.kernel_jobs import list_jobs
from pshard.profile.timed.operands import OperandPool
from pshard.profile.timed.time_delta import time_delta
from pshard.profile.timed.time_kernels import KernelBench
from pshard.profile.timing_loop import Pace
from pshard.registries.check_profile import check_timings
from pshard.registries.fingerprint import digest_profile
from pshard.runtime.kernels.plain import PlainKernels
from pshard.tensor import TensorSpec
from pshard.units.operations import DeltaNet

NONE = TensorSpec("blk.0.none", "F32", (1,))
SMALL, NEXT = (DeltaNet((NONE,), NONE, NONE, NONE, *shape) for shape in ((2, 4, 16), (16, 32, 128)))


class Recorder(PlainKernels):
    """Plain kernels that keep what they are called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def delta_net(self, qkv: torch.Tensor, *rest: Any, **named: Any) -> None:
        self.calls.append({"tokens": qkv.shape[0], "states": rest[4], **named})
        super().delta_net(qkv, *rest, **named)


def bench(kernels: PlainKernels, pool: int = 1 << 20) -> KernelBench:
    cpu = torch.device("cpu")
    return KernelBench("host", kernels, cpu, OperandPool(pool, cpu), Pace(1e-4, least=3, most=5), slow=0.5)


def test_states_take_turns_and_sequences_bring_as_many_tokens_each() -> None:
    kernels = Recorder()
    rows = time_delta(bench(kernels), SMALL, [1, 20], 3)
    assert [(r.key_heads, r.value_heads, r.head, r.tokens, r.sequences) for r in rows] == [
        (2, 4, 16, 1, 3), (2, 4, 16, 20, 3)]  # fmt: skip
    assert len({call["states"].data_ptr() for call in kernels.calls}) > 1
    last = max(kernels.calls, key=lambda call: call["tokens"])
    assert last["offsets"].tolist() == [0, 20, 40, 60] and last["longest"] == 20 and last["tokens"] == 60
    assert last["states"].isfinite().all()


def test_sequences_whose_states_the_pool_has_no_room_for_are_left_out() -> None:
    assert not time_delta(bench(PlainKernels(), 8 << 10), SMALL, [1], 16)
    assert time_delta(bench(PlainKernels()), SMALL, [1], 16)


def test_a_model_s_own_heads_are_timed_in_both_forms() -> None:
    shapes = Shapes((), (), (), (), (), 4096, delta=(NEXT,))
    jobs = [j for j in list_jobs("acc", quick_effort(1 << 20, 1 << 34), shapes) if "delta net" in j.label]
    said = [job.run.keywords for job in jobs]  # type: ignore[attr-defined]
    assert [(s["tokens"][0], s["tokens"][-1], s["sequences"]) for s in said] == [(1, 4096, 1), (1, 1, 16), (1, 1, 64)]


def price(tables: Tables, tokens: int, sequences: int, net: DeltaNet = NEXT, side: str = "acc") -> float:
    load = TierLoad(Batch.even(tokens, sequences))
    return sum(seconds for _, seconds in price_operation(net, OneSide(side, tables, load, tokens, "bf16")))


def row(tokens: int, sequences: int, seconds: float) -> DeltaTiming:
    return DeltaTiming("acc", 16, 32, 128, tokens, sequences, seconds)


def test_rows_are_looked_up_as_they_were_timed_and_grow_with_what_a_state_has() -> None:
    profile = replace(find_machine("h100"), deltas=(row(1, 1, 4e-6), row(1, 16, 3e-5), row(4096, 1, 4e-4)))
    check_timings(profile)
    tables = Tables(profile)
    assert price(tables, 1, 1) == pytest.approx(4e-6) and price(tables, 16, 16) == pytest.approx(3e-5)
    assert price(tables, 4096, 1) == pytest.approx(4e-4)
    assert price(tables, 32, 16) == pytest.approx(3e-5)  # the states, which two tokens each need no less of
    assert price(tables, 16, 16, replace(NEXT, value_heads=16)) == pytest.approx(1.5e-5)


@pytest.mark.parametrize("side", ["host", "acc"])
def test_without_rows_bytes_and_arithmetic_are_priced(side: str) -> None:
    """A sequence's state moves both ways, whatever the tokens; a prompt's chunks are products."""
    tables = Tables(find_machine("h100"))
    sixteen = price(tables, 16, 16, side=side)
    assert 2 * sixteen < price(tables, 64, 64, side=side) < 5 * sixteen
    one, many = price(tables, 512, 1, side=side), price(tables, 4096, 1, side=side)
    assert one < many < 16 * one


def test_profiles_of_before_are_what_they_were() -> None:
    profile = find_machine("h100")
    timed = replace(profile, deltas=(row(1, 1, 4e-6),))
    assert digest_profile(profile) == digest_profile(replace(profile, deltas=())) != digest_profile(timed)
    with pytest.raises(ValueError, match=r"deltas\[0\].seconds"):
        check_timings(replace(profile, deltas=(row(1, 1, 0.0),)))
