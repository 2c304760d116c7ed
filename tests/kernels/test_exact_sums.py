"""Products of few rows whose sums are whole numbers times a block's scale: they equal gguf's weights to the bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from interpreted import expect_interpreted_to_pass

pytest.importorskip("triton", reason="Triton is installed with the CUDA build of torch only")
from gguf import GGMLQuantizationType, quants
from random_blocks import random_rows
from random_weights import DEVICE
from test_triton_kernels import NO_TILE, READY, needs_kernels, numpy64, poisoned

from pshard.runtime.kernels.api import Packed
from pshard.runtime.kernels.codebooks import BOOK_TYPES
from pshard.runtime.kernels.gpu.card_limits import KNOWN_CARDS
from pshard.runtime.kernels.gpu.cuda import CudaKernels
from pshard.runtime.kernels.gpu.default_tiles import COLUMN_TYPES, candidate_tiles
from pshard.runtime.kernels.layout import pack_reference
from pshard.times.gpu_tiles import Tile, TileChoice


@pytest.mark.slow
@pytest.mark.skipif(READY, reason="the kernels run here directly")
def test_every_exact_sum_in_the_interpreter() -> None:
    expect_interpreted_to_pass(__file__, "every")


@pytest.mark.stand_in
@pytest.mark.skipif(READY, reason="the kernels run here directly")
def test_some_exact_sums_in_the_interpreter() -> None:
    expect_interpreted_to_pass(__file__, "some")


@pytest.fixture(scope="module")
def kernels() -> CudaKernels:
    return CudaKernels(DEVICE, 64)


@needs_kernels
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 11])
@pytest.mark.parametrize("qtype", sorted(COLUMN_TYPES))
def test_sums_of_every_type_are_those_of_the_weights_of_gguf(kernels: CudaKernels, qtype: str, tokens: int) -> None:
    check_sums(kernels, qtype, tokens, 512 if tokens == 3 else 256)  # two blocks of a row once


@needs_kernels
@pytest.mark.parametrize(("qtype", "tokens"), [("IQ3_XXS", 1), ("IQ2_XS", 2), ("IQ1_M", 5)])
def test_sums_of_some_types_are_those_of_the_weights_of_gguf(kernels: CudaKernels, qtype: str, tokens: int) -> None:
    check_sums(kernels, qtype, tokens, 256)


def check_sums(kernels: CudaKernels, qtype: str, tokens: int, cols: int) -> None:
    """A row of activations has one chunk of whole numbers up to 127, which are their own codes; every chunk has its
    turn, in the interpreter every third where rows are few, and each of these with one of the tiles: how a chunk is
    decoded goes by its type alone, and many rows show it."""
    rows, bucket = 32, 1 << (tokens - 1).bit_length()
    raw = random_rows(qtype, rows, cols, seed=tokens)
    values = quants.dequantize(raw, GGMLQuantizationType[qtype]).astype(np.float64)
    weight = Packed(torch.from_numpy(pack_reference(raw, qtype, rows, cols)).to(DEVICE), qtype, rows, cols)
    rng = np.random.default_rng(tokens)
    tiles, chunks = tiles_of_columns(qtype, bucket), cols // 32
    apart = tokens if DEVICE == "cuda" or tokens >= 8 else 3 * tokens
    for i, tile in enumerate(tiles):
        turns = range(0, chunks, apart) if apart == tokens else range(apart * i % chunks, chunks, apart * len(tiles))
        kernels.use_tiles([TileChoice("acc", "matvec", qtype, bucket, tile, 1.0, 1.0)])
        for first in turns:
            x = np.zeros((tokens, chunks, 32))
            for m in range(tokens):
                x[m, (first + m) % chunks] = rng.permutation(np.r_[127, rng.integers(-127, 128, 31)])
            given = torch.from_numpy(x.reshape(tokens, cols)).bfloat16().to(DEVICE)
            out = poisoned(tokens, rows, dtype=torch.float32)
            kernels.linear(given, weight, out, NO_TILE)
            expected = numpy64(given) @ values.T
            if qtype in BOOK_TYPES:
                assert np.array_equal(out.cpu().numpy(), expected.astype(np.float32)), (tile, first)
            else:  # a sum of two scales is rounded
                assert np.abs(numpy64(out) - expected).max() < 1e-6 * np.abs(expected).max(), (tile, first)
    kernels.use_tiles(())


def tiles_of_columns(qtype: str, bucket: int) -> list[Tile]:
    """One of each number of warps; on a GPU all."""
    tiles = [t for t in candidate_tiles("matvec", qtype, bucket, KNOWN_CARDS[90]) if t.rows == 32]
    alike = {t.warps: replace(t, registers=None, stages=1, programs=1) for t in tiles}
    return tiles if DEVICE == "cuda" else list(alike.values())
