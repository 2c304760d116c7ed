"""Datasheets: rates of our kernels, not of the box that a card comes in."""

from itertools import product
from pathlib import Path

import pytest

from pshard.planner.price.datasheet import Rates, profile_from_datasheet
from pshard.planner.price.profile_tables import Tables
from pshard.registries.profile_store import load_profile
from pshard.units.operations import Attend

EXAMPLES = Path(__file__).resolve().parents[2] / "registries" / "examples"
# what a library's GEMM of 16-bit numbers with float32 sums is rated at and, on the first card, was measured at
RATED = {"rtx4060-ryzen-7700": 30.2e12, "rtx5080-xeon-w5-3425": 112.6e12}


def tables(name: str) -> Tables:
    return Tables(load_profile(EXAMPLES / f"{name}.json"))


@pytest.mark.parametrize("name", RATED)
def test_products_of_a_geforce_card_are_as_fast_as_float32_sums_allow(name: str) -> None:
    """Not as those of half precision, which are twice as fast there, and less what unpacking takes."""
    rate = 2 * 4096 * 25600 * 5120 / tables(name).matmul("acc", "Q4_0", 25600, 5120, 4096)
    assert 0.9 * RATED[name] < rate < RATED[name]


@pytest.mark.parametrize("tokens", [512, 2048, 4096])
def test_unpacking_brings_a_sheet_to_what_was_measured_on_an_h100(tokens: int) -> None:
    """By the rates of benchmarks/results/h100-gpu-kernels.json: copies, and the library's GEMM."""
    measured = tables("h100-80gb-16-cores-measured")
    rates = Rates(link=1, acc_memory=2432e9, acc_flops=769e12, host_memory=1, host_flops=1, acc_unpack=2432e9)
    sheet = Tables(profile_from_datasheet(rates))
    for rows, cols in ((25600, 5120), (5120, 25600)):
        seconds = [t.matmul("acc", "Q4_0", rows, cols, tokens) for t in (sheet, measured)]
        assert seconds[0] == pytest.approx(seconds[1], rel=0.25)


def test_only_what_is_stored_otherwise_is_unpacked_and_only_for_many_tokens() -> None:
    slow, fast = (
        Tables(profile_from_datasheet(Rates(1e10, 1e12, 1e14, 1e11, 1e12, acc_unpack=rate))) for rate in (1e12, 0.0)
    )
    for qtype, tokens in product(("Q4_0", "F16", "BF16"), (64, 128)):
        more = slow.matmul("acc", qtype, 4096, 4096, tokens) - fast.matmul("acc", qtype, 4096, 4096, tokens)
        assert (more > 1e-5) == (qtype != "BF16" and tokens > 64)
    assert slow.matmul("host", "Q4_0", 4096, 4096, 128) == fast.matmul("host", "Q4_0", 4096, 4096, 128)


def test_attention_of_more_heads_over_the_same_cells_takes_longer_on_the_cpu() -> None:
    """It is bound by products there, so 64 heads that share 8 take longer than 32, as was measured."""
    sheet = tables("rtx5080-xeon-w5-3425")
    seconds = [sheet.attention("host", Attend(n, 8, 128), "bf16", 1, 65536) for n in (32, 64, 96)]
    assert seconds[0] < seconds[1] < seconds[2]
    prompts = [sheet.attention("acc", Attend(64, 8, 128), "bf16", 4096, 8192), 4 * 64 * 128 * 4096 * 6144.5]
    assert prompts[1] / prompts[0] == pytest.approx(0.8 * RATED["rtx5080-xeon-w5-3425"], rel=0.01)


def test_the_published_machine_has_its_memory() -> None:
    assert load_profile(EXAMPLES / "rtx5080-xeon-w5-3425.json").host.memory_bytes == 512 << 30
