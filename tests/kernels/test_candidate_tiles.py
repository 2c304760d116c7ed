"""Every tile that a profile may race on some card: the numbers of plain torch, and nothing written beside its own.

Scratch has the size that units declare. As the other tests of Triton's kernels: on a GPU, else interpreted. A GPU with
less shared memory than a card, or taken for such a one (`--as-card`), has no room for that card's tiles.
"""

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from interpreted import expect_interpreted_to_pass, mend_interpreter
from random_weights import DEVICE

triton = pytest.importorskip("triton", reason="Triton is not installed")
READY = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
needs_kernels = pytest.mark.skipif(not READY, reason="runs in the interpreter, inside another test here")

from pshard.batch_sizes import SMALL_BATCH  # noqa: E402
from pshard.model_config import Experts  # noqa: E402
from pshard.profile.checked.check_kernels import check_case  # noqa: E402
from pshard.profile.checked.kernel_cases import _random, _weight, list_cases  # noqa: E402
from pshard.runtime.kernels.api import ExpertWeights, LayerKV, Routes, RowIndex, Segment  # noqa: E402
from pshard.runtime.kernels.gpu.card_limits import KNOWN_CARDS, CardLimits, card_limits  # noqa: E402
from pshard.runtime.kernels.gpu.cuda import CudaKernels  # noqa: E402
from pshard.runtime.kernels.gpu.default_tiles import grouped_tiles  # noqa: E402
from pshard.runtime.kernels.gpu.tiles.attention_tiles import (  # noqa: E402
    decode_tiles,
    latent_decode_tiles,
    latent_prompt_tiles,
    prompt_tiles,
)
from pshard.runtime.kernels.kv_codec import encode_cells  # noqa: E402
from pshard.runtime.kernels.plain import PlainKernels  # noqa: E402
from pshard.runtime.kernels.row_index import make_rows  # noqa: E402
from pshard.runtime.memory.kv_cache import KV_DTYPES  # noqa: E402
from pshard.runtime.memory.workspace import view_buffers  # noqa: E402
from pshard.times.gpu_tiles import (  # noqa: E402
    ANY_BATCH,
    Tile,
    TileChoice,
    pairs_together,
)
from pshard.units.attention import decode_pieces  # noqa: E402
from pshard.units.kv_cells import KV_BLOCK  # noqa: E402
from pshard.units.latent_attention import latent_pieces  # noqa: E402
from pshard.units.moe.routed import scratch_of  # noqa: E402

if READY and DEVICE == "cpu":
    mend_interpreter()

RTX_3060 = KNOWN_CARDS[86]
CARDS = (86, 90)  # one whose sums of values are in pieces, and one whose are not
GUARD, BESIDE = 512, 7.0  # elements on either side of what a kernel may write, and what they hold
CLOSE = 0.02
PARTS = {
    "prompt": [(37, 150), (6, 0)],  # new tokens, and cells before them: less than a tile's rows, blocks begun by others
    "decode": [(1, 333), (1, 0), (1, 127)],
}
HEADS = (6, 2, 48)  # three of queries share one of KV, and numbers of a head are no power of two
SHARE, PADDED = 16, 64
LATENTS, RANK, TAIL, LATENT_HEADS = 128, 96, 32, 18  # heads that two programs share unevenly


@pytest.mark.slow
@pytest.mark.skipif(READY, reason="the kernels run here directly")
def test_candidates_in_the_interpreter() -> None:
    expect_interpreted_to_pass(__file__)


@pytest.mark.stand_in
@pytest.mark.skipif(READY, reason="the kernels run here directly")
def test_the_largest_candidates_in_the_interpreter() -> None:
    expect_interpreted_to_pass(f"{__file__}::test_the_largest_tiles")


def rows_of(kind: str, window: int) -> tuple[RowIndex, int]:
    """Rows over blocks in no order, and of how many blocks; what a window has left behind is block 0, of NaN."""
    segments, start, free = list[Segment](), 0, [5, 2, 9, 1, 8, 3, 7, 4, 6, 11, 10]
    for i, (tokens, past) in enumerate(PARTS[kind]):
        blocks = [free.pop() for _ in range(0, past + tokens, KV_BLOCK)]
        gone = max(0, past + 1 - window) // KV_BLOCK if window else 0
        segments.append(Segment(i, start, tokens, past, tuple([0] * gone + blocks[gone:])))
        start += tokens
    rows = make_rows(segments, DEVICE)
    return RowIndex(rows.begin, rows.position, rows.blocks, rows.segments, rows.cells, None, window), 12


def cells_of(count: int, groups: int, dim: int, kind: str, seed: int) -> torch.Tensor:
    """Random cells, and NaN in block 0."""
    found = encode_cells(_random(torch.device(DEVICE), count, KV_BLOCK, groups, dim, seed=seed), KV_DTYPES[kind])
    found = found.contiguous()
    found[0].view(torch.uint8).fill_(255)
    return found


def guarded(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, Callable[[], bool]]:
    """A tensor of NaN amid others' memory, and whether that is untouched."""
    size = torch.Size(shape).numel()
    whole = torch.full((size + 2 * GUARD,), BESIDE, dtype=dtype, device=DEVICE)
    whole[GUARD:-GUARD] = float("nan") if dtype.is_floating_point else 255
    return whole[GUARD:-GUARD].view(shape), lambda: bool(
        (whole[:GUARD] == BESIDE).all() and (whole[-GUARD:] == BESIDE).all()
    )


def limits_with_room(card: int) -> CardLimits:
    """The limits of a card, whose tiles the GPU at hand can run. Else the test is skipped."""
    here, wanted = card_limits(DEVICE), KNOWN_CARDS[card]
    if here.shared_block < wanted.shared_block:
        pytest.skip(f"{here.name} has {here.shared_block} bytes of shared memory a block, {wanted.name} more")
    return wanted


def worth_running(tiles: tuple[Tile, ...]) -> list[Tile]:
    """All on a GPU; in the interpreter, which has no stages of copies, one of those that differ in these alone."""
    return list(tiles if DEVICE == "cuda" else dict.fromkeys(replace(tile, stages=1) for tile in tiles))


def kernels_with(limits: CardLimits, kernel: str, kind: str, tokens: int, tile: Tile) -> CudaKernels:
    """Kernels of a card of these limits that have this tile and no other."""
    kernels = CudaKernels(DEVICE, 128, limits=limits)
    kernels.try_tile(TileChoice("acc", kernel, kind, tokens, tile, 1.0, 1.0))
    return kernels


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error."""
    return float((found.float() - wanted).norm() / wanted.norm())


def attend(kind: str, cells: str, window: int, limits: CardLimits, tile: Tile) -> None:
    """One attention by a tile and by plain torch."""
    heads, groups, dim = HEADS
    rows, count = rows_of(kind, window)
    kv = LayerKV(*(cells_of(count, groups, dim, cells, seed) for seed in (1, 2)))
    qkv = _random(torch.device(DEVICE), rows.tokens, (heads + 2 * groups) * dim, seed=3)
    sinks = _random(torch.device(DEVICE), heads, seed=4) if window else None
    out, out_kept = guarded(rows.tokens, heads * dim, dtype=torch.bfloat16)
    most = max(n * decode_pieces(n, groups) for n in range(1, min(rows.tokens, SMALL_BATCH) + 1))
    partial, partial_kept = guarded(most, heads, dim + 2)
    kernel = f"prompt {PADDED}" if kind == "prompt" else f"decode {PADDED}x{SHARE}"
    kernels = kernels_with(limits, kernel, cells, ANY_BATCH, tile)
    given = (HEADS, kv, rows, dim**-0.5)
    kernels.attention(qkv.bfloat16(), *given, out, partial if kind == "decode" else None, sinks)
    wanted = torch.empty(rows.tokens, heads * dim, device=DEVICE)
    PlainKernels().attention(qkv, *given, wanted, None, sinks)
    assert off(out, wanted) < CLOSE and out_kept() and partial_kept(), (kernel, cells, window, limits.name, tile)


def attend_latents(kind: str, cells: str, limits: CardLimits, tile: Tile) -> None:
    """The same over latents."""
    rows, count = rows_of(kind, 0)
    width = RANK + TAIL
    those = cells_of(count, 1, width, cells, 1)
    q = _random(torch.device(DEVICE), rows.tokens, LATENT_HEADS, width, seed=3)
    out, out_kept = guarded(rows.tokens, LATENT_HEADS, width, dtype=torch.bfloat16)
    most = max(n * latent_pieces(n, LATENT_HEADS) for n in range(1, min(rows.tokens, SMALL_BATCH) + 1))
    partial, partial_kept = guarded(most, LATENT_HEADS, RANK + 2)
    kernels = kernels_with(limits, f"latent {kind} {LATENTS}", cells, ANY_BATCH, tile)
    given = (RANK, those, rows, width**-0.5)
    kernels.attend_latent(q.bfloat16(), *given, out, partial if kind == "decode" else None)
    wanted = torch.empty(rows.tokens, LATENT_HEADS, width, device=DEVICE)
    PlainKernels().attend_latent(q, *given, wanted, None)
    assert off(out[..., :RANK], wanted[..., :RANK]) < CLOSE, (kind, cells, limits.name, tile)
    assert out[..., RANK:].isnan().all() and out_kept() and partial_kept(), (kind, cells, limits.name, tile)


def multiply_experts(qtype: str, tokens: int, kernel: str, limits: CardLimits, tile: Tile) -> None:
    """Two experts, of which one has few of the tokens, whose rows and columns are not whole tiles."""
    device, width = torch.device(DEVICE), 288
    rule = Experts(2, 1, 96, "chosen", normed=False, activation="clamped", biases=True)
    shapes = ((rule.d_expert, width), (rule.d_expert, width), (width, rule.d_expert))
    stacks = [tuple(_weight(device, qtype, *s, 100 * i + 10 * e) for e in range(2)) for i, s in enumerate(shapes)]
    addresses = torch.tensor([[m.data.data_ptr() for m in stack] for stack in stacks], device=device)
    biases = [0.1 * _random(device, 2, rows, seed=i) for i, (rows, _) in enumerate(shapes)]
    weights = ExpertWeights(stacks[0], stacks[1], stacks[2], addresses, (biases[0], biases[1], biases[2]))
    ids = (torch.arange(tokens, device=device) % 5 == 0).int()[:, None].contiguous()
    routes = Routes(ids, torch.full((tokens, 1), 0.5, device=device))
    x = _random(device, tokens, width)
    buffers = scratch_of(rule, width, tokens)
    memory, kept = guarded(sum(b.nbytes(2) for b in buffers), dtype=torch.uint8)
    scratch, _ = view_buffers(memory, buffers, torch.bfloat16)
    out, out_kept = guarded(tokens, width)
    kernels = kernels_with(limits, kernel, qtype, pairs_together(tokens, 2), tile)
    kernels.experts(x.bfloat16(), routes, weights, rule, out, scratch, False)
    wanted = torch.zeros(tokens, width, device=device)
    PlainKernels().experts(x, routes, weights, rule, wanted, {}, False)
    assert off(out, wanted) < CLOSE and kept() and out_kept(), (qtype, tokens, kernel, tile)


@needs_kernels
@pytest.mark.parametrize("processors", [20, 188])
def test_cards_of_any_number_of_processors(processors: int) -> None:
    """Their programs and partial sums are counted by processors, within scratch that is not."""
    kernels = CudaKernels(DEVICE, 128, limits=replace(KNOWN_CARDS[86], processors=processors))
    wanted = {
        "product": ("Q4_0, 1 token", "Q6_K, 16 tokens", "BF16, 16 tokens"),
        "attention over cells": ("heads of 64, bf16, 1 token", "window and sinks, 1 token"),
        "router": ("1 token",), "experts": ("Q8_0, 1 token",), "latent attention": ("bf16, 1 token",),
        "gated delta net": ("1 token",),
    }  # fmt: skip
    cases = [case for case in list_cases() if case.what in wanted.get(case.kernel, ())]
    assert len(cases) == sum(map(len, wanted.values()))
    for case in cases:
        row = check_case(case, kernels, torch.device(DEVICE))
        assert row.passed, row


@needs_kernels
def test_the_largest_tiles() -> None:
    attend("prompt", "bf16", 100, RTX_3060, prompt_tiles(RTX_3060, PADDED, 4.0)[0])
    attend("decode", "bf16", 100, RTX_3060, decode_tiles(RTX_3060, PADDED, 4.0, SHARE)[0])
    here = card_limits(DEVICE)
    multiply_experts("MXFP4", 100, "grouped gate", here, grouped_tiles("grouped gate", "MXFP4", 128, here)[-1])


@needs_kernels
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(("cells", "each", "window"), [("bf16", 4.0, 0), ("bf16", 4.0, 100), ("f32", 8.0, 64)])
def test_attention(card: int, cells: str, each: float, window: int) -> None:
    limits = limits_with_room(card)
    for tile in worth_running(prompt_tiles(limits, PADDED, each)):
        attend("prompt", cells, window, limits, tile)
    for tile in worth_running(decode_tiles(limits, PADDED, each, SHARE)):
        attend("decode", cells, window, limits, tile)


@needs_kernels
@pytest.mark.parametrize(("card", "cells", "each"), [(90, "bf16", 2.0), (86, "bf16", 2.0), (86, "q8_0", 34 / 32)])
def test_latents(card: int, cells: str, each: float) -> None:
    limits = limits_with_room(card)
    for tile in worth_running(latent_prompt_tiles(limits, LATENTS, TAIL, each)):
        attend_latents("prompt", cells, limits, tile)
    for tile in worth_running(latent_decode_tiles(limits, LATENTS, TAIL, each, 16)):
        attend_latents("decode", cells, limits, tile)


@needs_kernels
@pytest.mark.parametrize(
    ("kernel", "tokens", "qtype"),
    [
        ("grouped gate", 13, "MXFP4"), ("grouped gate", 40, "Q4_0"), ("grouped gate", 100, "MXFP4"),
        ("grouped down", 13, "Q4_0"), ("grouped down", 40, "MXFP4"), ("grouped down", 100, "Q4_0"),
    ],
)  # fmt: skip
def test_experts_of_many_tokens(kernel: str, tokens: int, qtype: str) -> None:
    limits = card_limits(DEVICE)
    for tile in worth_running(grouped_tiles(kernel, qtype, pairs_together(tokens, 2), limits)):
        multiply_experts(qtype, tokens, kernel, limits, tile)
