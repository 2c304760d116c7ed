"""The fastest way of summing is chosen per size, rounded type and company from what was timed."""

import pytest
import torch

from pshard.batch_sizes import SMALL_BATCH
from pshard.collectives import NORMED, PUSHED, fastest_collective, norm_seconds, wire_type
from pshard.machine import CollectiveTiming
from pshard.runtime.ranks.group import TorchGroup

TIMED = (
    CollectiveTiming("rows", 2, 1 << 14, 5e-6),
    CollectiveTiming("nccl", 2, 1 << 14, 12e-6),
    CollectiveTiming("rows", 2, 1 << 20, 30e-6),
    CollectiveTiming("nccl", 2, 1 << 20, 14e-6),
    CollectiveTiming("nccl", 2, 1 << 20, 11e-6, "bf16"),
    CollectiveTiming("rows", 2, 1 << 14, 20e-6, copies=True),
    CollectiveTiming("nccl", 4, 1 << 14, 40e-6),
)


@pytest.mark.parametrize(
    ("chosen", "tokens", "on_gpu", "wire"),
    [
        ("auto", 1, True, "f32"),
        ("auto", SMALL_BATCH, True, "f32"),
        ("auto", SMALL_BATCH + 1, True, "bf16"),
        ("auto", 4096, False, "f32"),
        ("f32", 4096, True, "f32"),
        ("f16", 1, False, "f16"),
    ],
)
def test_prompts_between_gpus_travel_in_bfloat16_unless_told_otherwise(
    chosen: str, tokens: int, on_gpu: bool, wire: str
) -> None:
    assert wire_type(chosen, tokens, on_gpu) == wire


def test_each_size_has_its_fastest() -> None:
    assert fastest_collective(TIMED, 2, 1 << 14) == ("rows", 5e-6)
    assert fastest_collective(TIMED, 2, 1 << 20) == ("nccl", 14e-6)
    name, seconds = fastest_collective(TIMED, 2, 4 << 20) or ("", 0.0)
    assert name == "nccl" and abs(seconds - 56e-6) < 1e-12


def test_the_rounded_type_and_copies_count() -> None:
    assert fastest_collective(TIMED, 2, 1 << 20, "f16") == ("nccl", 11e-6)
    # what a run takes is the fastest alone
    assert fastest_collective(TIMED, 2, 1 << 14, copies=True) == ("rows", 20e-6)


def test_only_what_the_group_can_do_is_chosen() -> None:
    assert fastest_collective(TIMED, 2, 1 << 14, among=("nccl", "one-shot")) == ("nccl", 12e-6)
    assert fastest_collective(TIMED, 2, 1 << 14, among=("gloo",)) is None
    assert fastest_collective((), 2, 1 << 14) is None


@pytest.mark.parametrize(("early", "wins"), [(4e-6, True), (6e-6, False), (None, False)])
def test_a_row_leaves_early_where_that_was_timed_as_faster(early: float | None, wins: bool) -> None:
    timed = (*TIMED, *([CollectiveTiming(PUSHED, 2, 1 << 14, early)] if early else []))
    assert fastest_collective(timed, 2, 1 << 14) == ("rows", 5e-6)  # what is not for every sum has no say
    group = object.__new__(TorchGroup)
    group.size, group._timings, group._pushed = 2, timed, {}
    assert group.pushes(torch.empty(1, 1 << 12)) == wins
    assert not group.pushes(torch.empty(2, 1 << 11))
    group.reduce_dtype = "bf16"
    assert not group.pushes(torch.empty(1, 1 << 12))


def test_a_norm_goes_with_sums_by_rows_only() -> None:
    timed = (*TIMED, CollectiveTiming(NORMED, 2, 1 << 14, 2e-6), CollectiveTiming(NORMED, 2, 1 << 20, 3e-6, "bf16"))
    assert fastest_collective(timed, 2, 1 << 14) == ("rows", 5e-6)  # what is no sum has no say
    assert norm_seconds(timed, 2, 1, 1 << 12) == 2e-6
    assert norm_seconds(timed, 2, 64, 1 << 12) is None  # NCCL is faster there
    assert norm_seconds(timed, 2, 128, 1 << 11, "bf16") is None
    whole_rows = (*timed, CollectiveTiming("many-rows", 2, 1 << 20, 20e-6, "bf16"))
    assert norm_seconds(whole_rows, 2, 128, 1 << 11, "bf16") == 3e-6
    assert norm_seconds(whole_rows, 4, 128, 1 << 11, "bf16") is None  # only two ranks sum so
    assert norm_seconds(whole_rows, 2, 128, 5376, "bf16") == pytest.approx(3e-6 * 4 * 128 * 5376 / (1 << 20))
    assert norm_seconds(whole_rows, 2, 128, 12288, "bf16") is None  # longer rows than a program takes
    assert norm_seconds(TIMED, 2, 1, 1 << 12) is None  # a profile of before


def test_another_number_of_ranks_takes_the_nearest() -> None:
    assert fastest_collective(TIMED, 8, 1 << 14) == ("nccl", 40e-6)
