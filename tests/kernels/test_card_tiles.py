"""Which tiles of attention, latents, products and experts a card takes by its limits, and what happens to those that
do not work."""

from dataclasses import replace

import pytest

from pshard.errors import KernelRefused
from pshard.quant import QUANT_TYPES
from pshard.runtime.kernels.gpu.card_limits import KNOWN_CARDS, CardLimits
from pshard.runtime.kernels.gpu.default_tiles import (
    TUNING,
    candidate_tiles,
    default_tile,
    grouped_tiles,
    share_programs,
)
from pshard.runtime.kernels.gpu.tiles.attention_tiles import (
    decode_tiles,
    latent_decode_tiles,
    latent_prompt_tiles,
    prompt_tiles,
)
from pshard.runtime.kernels.gpu.tiles.kernel_failures import is_kernel_failure
from pshard.runtime.kernels.gpu.tiles.pick_tiles import TilePicker
from pshard.times.gpu_tiles import Tile, TileChoice

CARDS = [card for card in KNOWN_CARDS.values() if card.runs_kernels]
CELLS = {"bf16": 4.0, "q8_0": 2.125, "q8_0 and q4_0": 1.625, "f32": 8.0, "f32 and q8_0": 5.0625}
HEADS = (16, 32, 64, 128, 256, 512)
H100, RTX_3060 = KNOWN_CARDS[90], KNOWN_CARDS[86]


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
@pytest.mark.parametrize("cells", CELLS)
def test_every_card_has_a_tile_for_every_attention(card: CardLimits, cells: str) -> None:
    for padded in HEADS:
        assert prompt_tiles(card, padded, CELLS[cells])
        assert decode_tiles(card, padded, CELLS[cells], 16)
        assert latent_prompt_tiles(card, padded, 64, CELLS[cells] / 2)
        assert latent_decode_tiles(card, padded, 64, CELLS[cells] / 2, 16)
        if padded <= 128:  # up to 64 heads that share one of k and v
            assert decode_tiles(card, padded, CELLS[cells], 64)


def test_a_large_card_keeps_the_large_tiles() -> None:
    """As they were before there were others: measured on an H100."""
    for cells in (4.0, 2.125):
        assert [prompt_tiles(H100, padded, cells)[0] for padded in (64, 128, 256)] == [
            Tile(128, 128, 8, 3), Tile(128, 128, 8, 3), Tile(64, 64, 8, 2)
        ]  # fmt: skip
        assert {decode_tiles(H100, padded, cells, 16)[0] for padded in HEADS[:-2]} == {Tile(16, 64, 4, 3)}
        assert latent_prompt_tiles(H100, 512, 64, cells / 2)[0] == Tile(32, 32, 8, 1)
    assert decode_tiles(H100, 256, 4.0, 16)[0] == Tile(16, 64, 4, 3)
    assert latent_decode_tiles(H100, 512, 64, 2.0, 16)[0] == Tile(16, 32, 8, 1)
    assert prompt_tiles(KNOWN_CARDS[80], 128, 4.0)[0] == Tile(128, 128, 8, 3)
    for qtype in QUANT_TYPES:
        for kernel, tokens in (("matvec", 1), ("matvec", 8), ("gated", 4), ("rows", 16)):
            wanted = TUNING.get((f"{kernel} {qtype}", tokens)) or TUNING[kernel, tokens]
            assert default_tile(kernel, qtype, tokens, H100) == wanted


def test_a_geforce_takes_tiles_that_fit_it() -> None:
    assert prompt_tiles(RTX_3060, 128, 4.0)[0] == Tile(64, 64, 4, 2)
    assert prompt_tiles(RTX_3060, 256, 4.0)[0] == Tile(64, 64, 4, 2)
    assert decode_tiles(RTX_3060, 256, 4.0, 16)[0] == Tile(16, 32, 4, 3)
    assert decode_tiles(RTX_3060, 128, 4.0, 16)[0] == Tile(16, 64, 4, 3)
    assert latent_prompt_tiles(RTX_3060, 512, 64, 2.0)[0] == Tile(32, 32, 8, 2)


def test_q8_0_cells_are_decoded_with_tiles_that_registers_hold() -> None:
    """Others of the same list spill more than 64 bytes a thread: scripts/cards --whole."""
    rtx_5060, rtx_4060 = KNOWN_CARDS[120], KNOWN_CARDS[89]
    q8_0, shapes = CELLS["q8_0"], ((128, 16), (256, 16), (128, 64), (512, 16))
    found = {card: [decode_tiles(card, padded, q8_0, share)[0] for padded, share in shapes] for card in CARDS}
    for card in CARDS:
        large = card.capability >= 100
        assert [tile.depth for tile in found[card]] == ([64, 32, 16, 16] if large else [64, 32, 32, 32])
        assert found[card][-1].stages == 2
        latent = latent_decode_tiles(card, 512, 64, q8_0 / 2, 16)[0]
        assert latent.depth == (32 if card.capability in (86, 89) else 16)
    for padded, share in ((64, 16), (128, 16), (128, 64), (256, 16)):
        assert set(decode_tiles(rtx_5060, padded, q8_0, share)) == set(decode_tiles(rtx_4060, padded, q8_0, share))
        assert decode_tiles(rtx_5060, padded, 4.0, share) == decode_tiles(rtx_4060, padded, 4.0, share)


def test_experts_leave_out_a_tile_that_a_type_has_no_room_for() -> None:
    large = Tile(128, 64, 4, 3, tokens=128)
    for qtype in ("IQ3_S", "IQ3_XXS"):
        assert large in grouped_tiles("grouped down", qtype, 128, H100)
        assert large not in grouped_tiles("grouped down", qtype, 128, RTX_3060)
    assert large in grouped_tiles("grouped down", "Q4_0", 128, RTX_3060)


def test_few_rows_have_more_registers_where_the_assembler_takes_more() -> None:
    for kernel in ("matvec", "gated"):
        of = kernel, "IQ2_S", 8
        before, now = (default_tile(*of, KNOWN_CARDS[card]).registers for card in (90, 120))
        assert now == (before or 0) + 16 and default_tile(kernel, "Q4_0", 1, KNOWN_CARDS[120]).registers == 144


def test_cards_run_as_many_programs_for_each_of_their_processors() -> None:
    small, large = replace(RTX_3060, processors=28), replace(RTX_3060, processors=188)
    assert [share_programs(800, card) for card in (small, H100, large)] == [170, 800, 1139]
    assert share_programs(1, small) == 1
    assert default_tile("matvec", "Q4_0", 1, small).programs == 170
    for card in (small, large):
        tried = {tile.programs for tile in candidate_tiles("matvec", "Q4_0", 1, card)}
        assert {200, 400, 800, 1600} <= tried


def test_heads_that_no_tile_is_for_are_refused_in_words() -> None:
    for tiles in (lambda: prompt_tiles(H100, 1024, 4.0), lambda: decode_tiles(H100, 1024, 4.0, 16)):
        with pytest.raises(KernelRefused, match=r"heads of 1024 numbers.*up to 512.*--kernels plain"):
            tiles()


KEY = ("matvec", "Q4_0", 8)


def fail_unless(works: Tile, tried: list[Tile]):  # type: ignore[no-untyped-def]
    """Starts a kernel that only one tile has room for."""
    errors = pytest.importorskip("triton.runtime.errors", reason="needs Triton")

    def start(tile: Tile) -> None:
        tried.append(tile)
        if tile != works:
            raise errors.OutOfResources(163840, 101376, "shared memory")

    return start


def test_a_tile_that_does_not_work_is_passed_over_and_not_tried_again() -> None:
    picker, tried = TilePicker(RTX_3060), list[Tile]()
    first, second, *_ = picker.few_rows(*KEY)
    start = fail_unless(second, tried)
    picker.launch(KEY, picker.few_rows(*KEY), start)
    picker.launch(KEY, picker.few_rows(*KEY), start)
    assert tried == [first, second, second]
    assert len(picker.passed_over) == 1 and "163840 of shared memory" in picker.passed_over[0]


def test_a_kernel_of_which_no_tile_works_is_refused_by_its_cards_name() -> None:
    picker, tried = TilePicker(RTX_3060), list[Tile]()
    start = fail_unless(Tile(1, 1, 1, 1), tried)
    with pytest.raises(KernelRefused, match=r"RTX 3060 \(sm_86\) cannot run this.*--kernels plain"):
        picker.launch(KEY, picker.few_rows(*KEY), start)
    assert tried == list(candidate_tiles(*KEY, RTX_3060))
    with pytest.raises(KernelRefused, match="no tile of matvec Q4_0 fits GeForce RTX 3060"):
        picker.launch(KEY, (), start)


def test_a_tile_that_is_tried_has_no_other_behind_it() -> None:
    picker, tried = TilePicker(RTX_3060), list[Tile]()
    chosen = Tile(32, 8, 1, 1, 800)
    picker.try_tile(TileChoice("acc", *KEY, chosen, 1.0, 1.0))
    with pytest.raises(KernelRefused):
        picker.launch(KEY, picker.few_rows(*KEY), fail_unless(Tile(1, 1, 1, 1), tried))
    assert tried == [chosen]
    picker.use((TileChoice("acc", *KEY, chosen, 1.0, 1.0),))
    assert picker.few_rows(*KEY)[:2] == (chosen, default_tile(*KEY, RTX_3060))


def test_other_errors_are_no_failures_of_tiles() -> None:
    assert not is_kernel_failure(RuntimeError("CUDA error: an illegal memory access"))

    def start(tile: Tile) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    picker = TilePicker(H100)
    with pytest.raises(RuntimeError, match="illegal"):
        picker.launch(KEY, picker.few_rows(*KEY), start)
    assert not picker.passed_over


def test_only_tiles_of_whole_results_are_followed_by_a_norm() -> None:
    picker = TilePicker(H100)
    assert picker.few_rows_of_32("matvec", "Q5_K", 1) == ()  # its default has 16 rows
    assert picker.few_rows_of_32("matvec", "Q4_0", 1) == (default_tile("matvec", "Q4_0", 1, H100),)
    narrow = Tile(16, 32, 4, 1, 1056)
    picker.use((TileChoice("acc", "matvec", "Q4_0", 1, narrow, 1.0, 1.0),))
    assert picker.few_rows("matvec", "Q4_0", 1)[0] == narrow
    assert picker.few_rows_of_32("matvec", "Q4_0", 1) == (default_tile("matvec", "Q4_0", 1, H100),)
