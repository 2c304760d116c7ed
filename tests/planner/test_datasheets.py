"""Datasheets: rates of our kernels, not of the box that a card comes in."""

from itertools import product
from pathlib import Path

import pytest
from golden.shapes import make_shape

from pshard.planner.make_plan import plan_variant
from pshard.planner.price.datasheet import Rates, profile_from_datasheet
from pshard.planner.price.example_sheets import HEADS, HOST_MEMORY, SAPPHIRE_RAPIDS
from pshard.planner.price.predict_published import Predictor
from pshard.planner.price.profile_tables import Tables
from pshard.registries.profile_store import load_profile
from pshard.units.operations import Attend
from pshard.workload import Workload

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "registries" / "examples"
# what a library's GEMM of 16-bit numbers with float32 sums is rated at and, on the first card, was measured at
RATED = {"rtx4060-ryzen-7700": 30.2e12, "rtx5080-xeon-w5-3425": 112.6e12}

# model, MiB, prompt, answer, sequences, then tests as (prompt, answer, depth, tokens per second): docs/results.md
MEASURED_ON_H100 = (
    ("qwen3-32b", 12000, 4096, 256, 1, ((512, 0, 0, 3630), (4096, 0, 0, 9575), (0, 64, 0, 14.9))),
    ("qwen3-32b", 12000, 16384, 128, 1, ((16384, 0, 0, 7899), (0, 64, 16384, 10.2))),
    ("qwen3-32b", 12000, 1024, 64, 16, ((0, 16, 1024, 110),)),
    ("qwen3-32b", 12000, 1024, 64, 64, ((0, 8, 1024, 165),)),
    ("qwen3-32b", 6000, 4096, 256, 1, ((4096, 0, 0, 9537), (0, 64, 0, 7.68))),
    ("llama3-70b", 16000, 4096, 256, 1, ((4096, 0, 0, 4604), (0, 32, 0, 4.94))),
)


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


@pytest.mark.quick("qwen3-32b 12000 1024 x64")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[] if c[1:3] == (12000, 4096) or c[4] == 64 else [pytest.mark.slow])
        for c in MEASURED_ON_H100
    ],
    ids=lambda case: f"{case[0]} {case[1]} {case[2]} x{case[4]}",
)
def test_a_sheet_made_as_the_examples_are_meets_what_was_measured_on_an_h100(case: tuple) -> None:
    """Within 20%, with that day's link and memory: so much do rates alone tell of a machine."""
    model, mib, prompt, answer, sequences, tests = case
    day = load_profile(ROOT / "benchmarks" / "results" / "h100-profile-0529.json")
    rates = Rates(
        link=53.6e9, acc_memory=2432e9, acc_flops=769e12, acc_attention=416e12, acc_unpack=2432e9, heads=HEADS,
        host_memory=HOST_MEMORY * max(r.rate for r in day.reads), host_flops=SAPPHIRE_RAPIDS[0],
        host_attention=SAPPHIRE_RAPIDS[1], link_with_cpu=day.contention.link_with_cpu,
        cpu_with_link=day.contention.cpu_with_link, acc_memory_bytes=80 << 30, host_memory_bytes=125 << 30,
    )  # fmt: skip
    spec, profile = make_shape(model), profile_from_datasheet(rates)
    workload = Workload((mib,), sequences * (prompt + answer), sequences, prompt=prompt, generated=answer)
    predictor = Predictor([spec], profile, plan_variant(spec, profile, workload))
    for tokens, decoded, depth, measured in tests:
        if tokens:
            found = tokens / predictor.prefill(tokens, sequences, depth)
        else:
            found = sequences * decoded / predictor.decode(decoded, sequences, depth)
        assert found == pytest.approx(measured, rel=0.2)


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
