"""Streams and choices of cells are timed as they are run, and their rows are what plans look up."""

from dataclasses import replace

import pytest
import torch
from golden.machines import find_machine

from pshard.batch import Batch
from pshard.machine import ElementwiseTiming
from pshard.planner.price.price_operations import OneSide, price_operations
from pshard.planner.price.profile_tables import Tables
from pshard.planner.price.tier_loads import TierLoad
from pshard.profile.effort import Shapes, quick_effort
from pshard.profile.timed.kernel_jobs import list_jobs
from pshard.profile.timed.operands import OperandPool
from pshard.profile.timed.time_kernels import KernelBench
from pshard.profile.timed.time_streams import time_index, time_streams
from pshard.profile.timing_loop import Pace
from pshard.runtime.kernels.plain import PlainKernels
from pshard.tensor import TensorSpec
from pshard.units.operands import NOWHERE, Rows
from pshard.units.operations import Attend, ChooseCells, InjectStream, MixStreams, NormStreams, Operation

INDEX = ChooseCells(4, 128, 4, 512)
STREAMS = (InjectStream(2560, 4), NormStreams(TensorSpec("blk.0.n", "F32", (4 * 2560,)), 4))
MIX = MixStreams(2560, 4, NOWHERE, NOWHERE, NOWHERE, True)
SEES = 2051
ALL, CHOSEN = Attend(24, 2, 256), Attend(24, 2, 256, seen=Rows("seen"), chosen=SEES)


def bench() -> KernelBench:
    cpu = torch.device("cpu")
    return KernelBench("host", PlainKernels(), cpu, OperandPool(1 << 20, cpu), Pace(1e-4, least=3, most=5), slow=0.5)


def price(operations: tuple[Operation, ...], *rows: ElementwiseTiming, load: TierLoad, side: str = "acc") -> float:
    profile = find_machine("h100")
    tables = Tables(replace(profile, elementwise=(*profile.elementwise, *rows)))
    return price_operations(operations, OneSide(side, tables, load, load.tokens, "bf16"))


def decode(past: int) -> TierLoad:
    return TierLoad(Batch.even(1, 1, past))


def test_rows_say_how_many_numbers_all_streams_have_and_all_keys() -> None:
    rows = time_streams(bench(), (4, 64), [1, 3])
    assert [(r.what, r.tokens, r.width) for r in rows] == [
        ("streams", 1, 256), ("streams", 3, 256), ("mix", 1, 256), ("mix", 3, 256)]  # fmt: skip
    (found,) = time_index(bench(), ChooseCells(2, 16, 4, 8), [100])
    assert (found.what, found.tokens, found.width) == ("index", 1, 25 * 2 * 16)


def test_a_model_s_own_streams_and_index_are_timed() -> None:
    shapes = Shapes((), (), (), (), (), 16384, streams=((4, 2560),), index=(INDEX,))
    jobs = list_jobs("acc", quick_effort(1 << 20, 1 << 34), shapes)
    said = {j.label.split(maxsplit=1)[-1]: j.run.keywords for j in jobs if hasattr(j.run, "keywords")}
    assert said["residual streams"]["shape"] == (4, 2560)
    assert said["choice of cells"]["contexts"] == (4096, 8192, 16384)


def test_rows_of_streams_are_looked_up_and_have_what_goes_into_them() -> None:
    rows = ElementwiseTiming("acc", "streams", 1, 10240, 3e-6), ElementwiseTiming("acc", "mix", 1, 10240, 2e-6)
    assert price(STREAMS, *rows, load=decode(0)) == pytest.approx(3e-6)
    assert price((MIX,), *rows, load=decode(0)) == pytest.approx(2e-6)
    assert price((*STREAMS, MIX), load=decode(0)) > 0


def test_a_choice_costs_a_launch_where_all_cells_are_seen_and_else_as_its_row_says() -> None:
    row = ElementwiseTiming("acc", "index", 1, 4096 * 4 * 128, 5e-5)
    launch = ElementwiseTiming("acc", "norm", 1, 1, 1e-6)
    assert price((INDEX,), row, launch, load=decode(2000)) == pytest.approx(1e-6)
    assert price((INDEX,), row, load=decode(2000), side="host") == 0
    assert price((INDEX,), row, load=decode(16383)) == pytest.approx(5e-5)


def test_attention_of_chosen_cells_costs_no_more_at_any_depth() -> None:
    assert price((CHOSEN,), load=decode(1000)) == price((ALL,), load=decode(1000))
    assert price((CHOSEN,), load=decode(16384)) == price((ALL,), load=decode(SEES - 1))
    assert price((CHOSEN,), load=decode(16384)) < price((ALL,), load=decode(16384))


def test_a_prompt_on_the_cpu_attends_token_by_token_from_where_cells_are_chosen() -> None:
    load = TierLoad(Batch.even(512, 1, 8192))
    whole, one = price((CHOSEN,), load=load, side="host"), price((CHOSEN,), load=decode(8192), side="host")
    assert whole == pytest.approx(512 * one)
    assert price((CHOSEN,), load=load) == price((ALL,), load=load)  # a GPU reads them all
