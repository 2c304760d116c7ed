"""What a sheet takes for our kernels: one formula, its shares from result files, beside what an H100 measured."""

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.example_sheets import MACHINES
from pshard.planner.price.kernel_rates import (
    H100,
    H100_CLOCK,
    H100_PROCESSORS,
    KERNELS,
    PAIRED,
    RTX_4060,
    RTX_5080,
    CardRates,
    Work,
    experts_kernel,
    memory_of,
    pass_work,
    rate_of,
    seconds_of,
)
from pshard.quant import packed_nbytes
from pshard.registries.profile_store import load_profile
from pshard.runtime.kernels.gpu.experts.pairs import FEW

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PROFILE = load_profile(ROOT / "registries" / "examples" / "h100-80gb-16-cores-measured.json")
LAUNCH = 3e-6  # seconds that a kernel takes beside its work, as of a sheet
KINDS = json.loads((RESULTS / "h100-as-sm86-kernels-1206.json").read_text(encoding="utf-8"))
WAYS = {"as_card": 86, "native": 90}
APART = {"latent 16x512+64 q8_0, 1x1 of 32768"}  # docs/cards.md names each with what is known of it
WITHIN = 0.15


def pairs_of(tokens: int, context: int) -> float:
    """Pairs of a token and a cell that it sees."""
    return tokens * (context - tokens) + tokens * (tokens + 1) / 2


def test_every_share_names_where_it_is_from() -> None:
    for reached in KERNELS.values():
        folder = ROOT if reached.source.startswith("docs/") else RESULTS
        assert (folder / reached.source).is_file(), reached


@pytest.mark.parametrize(("code", "way"), [(86, "fits_us"), (90, "native_us")])
@pytest.mark.parametrize(("heads", "size"), [("64x8x64", 64), ("32x8x128", 128), ("16x8x256", 256)])
def test_slots_are_what_the_h100_did_as_that_card(code: int, way: str, heads: str, size: int) -> None:
    reached = KERNELS[f"prompts, heads of {size}", code]
    rows = {row["case"]: row for row in json.loads((RESULTS / reached.source).read_text(encoding="utf-8"))["rows"]}
    timed = [rows[f"{heads} bf16 1x{tokens}@{context}"][way] for tokens, context in ((4096, 4096), (1024, 16384))]
    work = 4 * int(heads.split("x")[0]) * size * (pairs_of(4096, 4096) + pairs_of(1024, 16384))
    assert reached.slots == pytest.approx(work / (1e-6 * sum(timed)) / H100_PROCESSORS / H100_CLOCK, rel=0.002)


def test_the_share_of_products_is_what_the_library_reached() -> None:
    found = json.loads((RESULTS / KERNELS["products of many tokens", 90].source).read_text(encoding="utf-8"))
    assert rate_of(H100, "products of many tokens") / 1e12 == pytest.approx(found["gemm_tflops"], rel=0.005)
    assert memory_of(H100) / 1e9 == pytest.approx(found["copy_gbs"], rel=0.005)


def test_the_least_limit_counts() -> None:
    for card in (RTX_5080, RTX_4060):
        for size in (64, 128, 256):
            assert rate_of(card, f"prompts, heads of {size}") == 0.8 * card.tensor
        assert 512 * card.processors * card.clock == pytest.approx(card.tensor, rel=0.005)  # by its tensor cores
    assert rate_of(H100, "prompts, heads of 256") == 910 * H100_PROCESSORS * H100_CLOCK < 0.8 * H100.tensor
    with pytest.raises(KeyError):
        rate_of(H100, "sorting")


@pytest.mark.parametrize("name,card", [("rtx5080-xeon-w5-3425", RTX_5080), ("rtx4060-ryzen-7700", RTX_4060)])
def test_the_sheets_of_geforce_cards_are_the_formulas(name: str, card: CardRates) -> None:
    sheet = MACHINES[name]
    assert (sheet.acc_flops, sheet.acc_attention) == (
        rate_of(card, "products of many tokens"),
        rate_of(card, "prompts, heads of 128"),
    )
    assert sheet.acc_memory == sheet.acc_unpack == memory_of(card)


def test_whichever_of_three_limits_takes_longest_counts() -> None:
    """Decoding, products that share what is decoded, and bytes; each alone, then together."""
    kernel, slots = "experts of many tokens", 424 * RTX_5080.processors * RTX_5080.clock
    half_rate = seconds_of(RTX_5080, kernel, Work(slots, 0.0, each=74.0))
    assert half_rate == pytest.approx(2.0, rel=1e-4)
    assert seconds_of(RTX_5080, kernel, Work(slots, 3 * memory_of(RTX_5080), each=74.0)) == pytest.approx(3.0, rel=1e-4)
    decoding = 6 * RTX_5080.processors * RTX_5080.clock
    assert seconds_of(RTX_5080, "experts of few tokens", Work(0.0, 0.0, decoding)) == pytest.approx(1.0, rel=1e-4)
    assert memory_of(RTX_5080, "rows") == 1.22 * RTX_5080.memory


def test_a_sheet_of_a_card_has_rows_by_the_formula() -> None:
    """Experts, delta nets and norms; without a card a sheet counts by its own few rates and has no delta nets."""
    rates = MACHINES["rtx5080-xeon-w5-3425"]
    sheet, plain = profile_from_datasheet(rates), profile_from_datasheet(replace(rates, card=None))
    norms = [
        e.seconds
        for p in (sheet, plain)
        for e in p.elementwise
        if (e.device, e.what, e.width) == ("acc", "norm", 8192) and e.tokens == 4096
    ]
    assert norms[0] == seconds_of(RTX_5080, "norms", Work(0.0, 8 * 4096 * 8192)) < norms[1]
    assert {e.tokens for e in sheet.experts if e.device == "acc"} > {
        e.tokens for e in plain.experts if e.device == "acc"
    }
    assert [e for e in sheet.experts if e.device == "host"] == [e for e in plain.experts if e.device == "host"]
    assert sheet.deltas and not plain.deltas


def test_norms_of_two_units_are_one_launch_on_sheets_of_gpus() -> None:
    """Of few and of many rows it takes what an H200 measured (docs/results.md), and less than launches apart."""
    h200 = CardRates("NVIDIA H200", 90, H100_PROCESSORS, H100_CLOCK, H100.tensor, 4800e9, H100.copies)
    one, many = (1e6 * seconds_of(h200, *pass_work("two norms", n, 5376)) for n in (1, 4096))
    assert 2.45 < one < 4.22 and many == pytest.approx(83.5, rel=0.02)
    rates = MACHINES["rtx5080-xeon-w5-3425"]
    for sheet in (rates, replace(rates, card=None)):
        rows = {(e.device, e.what, e.tokens, e.width): e.seconds for e in profile_from_datasheet(sheet).elementwise}
        together = [key for key in rows if key[1] == "two norms"]
        assert together and {side for side, *_ in together} == {"acc"}
        for side, _, *size in together:
            norm, added, both = (rows[side, what, *size] for what in ("norm", "residual", "two norms"))
            assert norm < both < 2 * norm + added
    assert not [e for e in profile_from_datasheet(replace(rates, kind="cpu")).elementwise if e.what == "two norms"]


def test_products_of_an_h100_are_within_15_percent_of_its_profile() -> None:
    """Of 2048 tokens and more; unpacking as a sheet has it."""
    rows = [m for m in PROFILE.matmuls if m.device == "acc" and m.rows * m.cols > 1 << 26 and m.tokens >= 2048]
    assert len(rows) >= 4
    for m in rows:
        unpacked = packed_nbytes(m.qtype, m.rows, m.cols) + 2 * m.rows * m.cols
        seconds = 2 * m.tokens * m.rows * m.cols / rate_of(H100, "products of many tokens")
        seconds += unpacked / memory_of(H100) + LAUNCH
        assert seconds == pytest.approx(m.seconds, rel=WITHIN), m


def test_products_of_one_token_of_an_h100_are_within_15_percent_of_its_profile() -> None:
    rows = [m for m in PROFILE.matmuls if m.device == "acc" and (m.qtype, m.tokens) == ("Q4_0", 1)]
    rows = [m for m in rows if m.rows * m.cols > 1 << 26]
    assert {(m.rows, m.cols) for m in rows} == {(25600, 5120), (5120, 25600)}
    for m in rows:
        assert packed_nbytes(m.qtype, m.rows, m.cols) / memory_of(H100) + LAUNCH == pytest.approx(m.seconds, rel=WITHIN)


def test_attention_of_an_h100_is_within_15_percent_of_its_profile() -> None:
    """Prompts of 64 heads from 4096 cells on, and decoding of 16384: shorter ones do not fill the card, which a sheet
    does not know (2048 tokens of 32 heads take 1.2 to 1.6 times as long)."""
    rows = [a for a in PROFILE.attention if a.device == "acc" and a.n_heads == 64]
    prompts = [a for a in rows if a.tokens >= 2048 and a.context >= 4096]
    decoding = [a for a in rows if a.tokens == 1 and a.context >= 16384]
    assert len(prompts) == 4 and decoding
    for a in prompts:
        work = 4 * a.n_heads * a.head_dim * pairs_of(a.tokens, a.context)
        assert work / rate_of(H100, "prompts, heads of 128") + 2 * LAUNCH == pytest.approx(a.seconds, rel=WITHIN), a
    for a in decoding:
        nbytes = 4 * a.context * a.n_kv_heads * a.head_dim
        assert nbytes / memory_of(H100) + 2 * LAUNCH == pytest.approx(a.seconds, rel=WITHIN), a


@pytest.fixture(scope="module")
def kinds() -> Iterator[ModuleType]:
    """benchmarks/as_card_kernels.py, whose result file has what an H100 did."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("as_card_kernels")
    sys.path.remove(str(ROOT / "benchmarks"))
    sys.modules.pop("as_card_kernels", None)


@pytest.mark.parametrize("way", WAYS)
def test_every_kernel_is_within_15_percent_of_what_an_h100_measured_in_both_codes(kinds: ModuleType, way: str) -> None:
    """Those that are not are the named ones, no more and no fewer."""
    measured = {row["case"]: row[way]["us"] for row in KINDS["rows"]}
    cases, card = kinds.list_cases(), kinds.card_of(KINDS["gpu"], WAYS[way])
    assert {case.name for case in cases} == set(measured)
    off = {case.name: 1e6 * kinds.sheet_seconds(case, card) / measured[case.name] - 1 for case in cases}
    assert {name for name, ratio in off.items() if abs(ratio) > WITHIN} == APART


def test_the_page_of_cards_has_each_kernel_in_both_codes_and_the_exceptions(kinds: ModuleType) -> None:
    page = (ROOT / "docs" / "cards.md").read_text(encoding="utf-8")
    assert kinds.page_table(KINDS) in page
    assert all(name in page for name in APART)


def test_experts_run_by_the_kernel_that_their_numbers_of_tokens_choose() -> None:
    tokens = [(1, 1.0), (8, 1.3), (9, 1.3), (256, 16.0), (257, 16.1), (4096, 256.0)]
    kinds = [experts_kernel(*pair).split()[2] for pair in tokens]
    assert kinds == ["one", "one", "few", "few", "many", "many"]
    assert experts_kernel(PAIRED, 1.0) != experts_kernel(PAIRED + 1, 1.0) and PAIRED == FEW
