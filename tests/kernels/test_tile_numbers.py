"""Whatever tile a profile chooses, the numbers are right: every candidate in Triton's interpreter, or on a GPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from interpreted import expect_interpreted_to_pass

pytest.importorskip("triton", reason="Triton is installed with the CUDA build of torch only")
from random_weights import DEVICE, random_weight
from test_triton_kernels import (
    NO_TILE,
    READY,
    error,
    needs_kernels,
    numpy64,
    poisoned,
    random_tensor,
)

from pshard.quant import QUANT_TYPES
from pshard.runtime.build_executor import choose_kernels
from pshard.runtime.devices.device import open_device
from pshard.runtime.kernels.gpu import cuda
from pshard.runtime.kernels.gpu.card_limits import KNOWN_CARDS
from pshard.runtime.kernels.gpu.default_tiles import candidate_tiles
from pshard.runtime.kernels.gpu.products import few_rows
from pshard.times.gpu_tiles import Tile, TileChoice

PLANED = sorted(name for name, q in QUANT_TYPES.items() if q.planes)


@pytest.mark.slow
@pytest.mark.skipif(READY, reason="the kernels run here directly")
def test_every_candidate_in_the_interpreter() -> None:
    expect_interpreted_to_pass(__file__)


@pytest.fixture(scope="module")
def kernels() -> cuda.CudaKernels:
    return cuda.CudaKernels(DEVICE, 64)


def tiles_to_check(kernel: str, qtype: str, tokens: int) -> list[Tile]:
    """The candidates; in the interpreter without what changes nothing there, or nothing of how types are decoded."""
    tiles = candidate_tiles(kernel, qtype, tokens, KNOWN_CARDS[90])
    if DEVICE == "cpu":
        same = {"registers": None} if qtype in ("Q4_0", "Q6_K") else {"registers": None, "programs": 1, "stages": 1}
        tiles = tuple(replace(tile, **same) for tile in tiles)
    return list(dict.fromkeys(tiles))


def choice(kernel: str, qtype: str, tokens: int, tile: Tile) -> TileChoice:
    return TileChoice("acc", kernel, qtype, tokens, tile, 1.0, 1.0)


@needs_kernels
@pytest.mark.parametrize("qtype", PLANED)
def test_products_of_one_row(kernels: cuda.CudaKernels, qtype: str) -> None:
    check_products(kernels, qtype, 1, 1, 23, 3 * QUANT_TYPES[qtype].block, PLANED.index(qtype) % 3)


@needs_kernels
@pytest.mark.parametrize(("qtype", "bucket", "tokens", "rows", "cols"), [
    ("Q4_0", 4, 3, 23, 32), ("Q4_0", 1, 1, 16, 1600), ("Q4_K", 2, 2, 1, 256), ("Q8_0", 32, 21, 20, 96),
    ("Q2_K", 8, 7, 17, 256), ("Q3_K", 8, 5, 40, 512), ("MXFP4", 16, 16, 15, 64), ("Q6_K", 16, 13, 23, 512),
    ("Q4_1", 64, 41, 9, 32), ("IQ3_S", 2, 2, 17, 256), ("IQ2_S", 8, 7, 20, 512), ("IQ1_S", 4, 3, 9, 256),
    ("NVFP4", 16, 9, 40, 192), ("TQ1_0", 8, 5, 17, 256), ("Q2_0", 2, 2, 9, 64), ("Q1_0", 8, 6, 9, 128)])  # fmt: skip
def test_products_of_odd_sizes(
    kernels: cuda.CudaKernels, qtype: str, bucket: int, tokens: int, rows: int, cols: int
) -> None:
    check_products(kernels, qtype, bucket, tokens, rows, cols)


def check_products(
    kernels: cuda.CudaKernels, qtype: str, bucket: int, tokens: int, rows: int, cols: int, third: int | None = None
) -> None:
    """third: in the interpreter a third of the tiles, as other types take the others; two types take all."""
    weight, values = random_weight(qtype, rows, cols, seed=tokens)
    x, bias = random_tensor(tokens, cols, seed=1), random_tensor(rows, seed=2, dtype=torch.float32)
    expected = numpy64(x) @ values.T + numpy64(bias)
    tiles = tiles_to_check("matvec", qtype, bucket)
    if third is not None and DEVICE == "cpu" and qtype not in ("Q4_0", "Q6_K"):
        tiles = tiles[third::3]
    for tile in tiles:
        kernels.use_tiles([choice("matvec", qtype, bucket, tile)])
        wide = poisoned(tokens, rows + 24)
        kernels.linear(x, weight, wide[:, 8 : 8 + rows], NO_TILE, bias)
        assert error(wide[:, 8 : 8 + rows], expected) < 0.015, tile
        assert torch.isnan(wide[:, :8]).all() and torch.isnan(wide[:, 8 + rows :]).all(), tile
    kernels.use_tiles(())


@needs_kernels
@pytest.mark.parametrize(("qtype", "kernel", "bucket", "tokens"), [
    ("Q4_0", "gated few", 1, 1), ("Q2_K", "gated", 4, 3), ("Q6_K", "gated", 1, 1), ("Q4_K", "gated", 8, 7),
    ("MXFP4", "gated", 16, 9), ("Q4_1", "gated", 32, 17), ("IQ2_XXS", "gated", 2, 2)])  # fmt: skip
def test_gate_and_up_and_what_they_hand_over(
    kernels: cuda.CudaKernels, qtype: str, kernel: str, bucket: int, tokens: int
) -> None:
    cols = QUANT_TYPES[qtype].block
    for rows in (23, 32) if tokens == 1 else (32,):
        gate, gate_values = random_weight(qtype, rows, cols, seed=3)
        up, up_values = random_weight(qtype, rows, cols, seed=4)
        x = random_tensor(tokens, cols, seed=5) * 0.5
        g, u = numpy64(x) @ gate_values.T, numpy64(x) @ up_values.T
        expected = g / (1 + np.exp(-g)) * u
        for tile in tiles_to_check(kernel, qtype, bucket):
            kernels.use_tiles([choice(kernel, qtype, bucket, tile)])
            both = poisoned(tokens, 2 * rows)
            out = both[:, :rows]
            kernels.gate_up(x, gate, up, out, both, NO_TILE)
            assert error(out, expected) < 0.03, (tile, rows)
            if rows % 32 == 0:  # handed over quantised: the next product gives the same bits as from a copy
                down, _ = random_weight("Q4_0", 32, rows, seed=6)
                first, second = (poisoned(tokens, 32, dtype=torch.float32) for _ in range(2))
                kernels.linear(out, down, first, NO_TILE)
                kernels.linear(out.clone(), down, second, NO_TILE)
                assert torch.equal(first, second) and not torch.isnan(first).any(), tile
    kernels.use_tiles(())


@needs_kernels
def test_chosen_tiles_are_taken_for_their_kernel_type_and_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Tile(32, 8, 1, 1, 400)
    kernels = cuda.CudaKernels(DEVICE, 64, [choice("matvec", "Q4_0", 4, mine)])
    used: list[Tile] = []
    cut = few_rows.cut_columns
    monkeypatch.setattr(few_rows, "cut_columns", lambda tile, *rest: used.append(tile) or cut(tile, *rest))
    for qtype, tokens in (("Q4_0", 3), ("Q4_0", 4), ("Q4_0", 2), ("Q8_0", 4)):
        weight, _ = random_weight(qtype, 32, 64, seed=7)
        kernels.linear(random_tensor(tokens, 64, seed=8), weight, poisoned(tokens, 32), NO_TILE)
    assert [tile == mine for tile in used] == [True, True, False, False]


@needs_kernels
@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="tuning is timed in CUDA graphs")
def test_a_gpu_is_tuned_and_runs_with_what_was_chosen() -> None:
    from pshard.profile.effort import Shapes
    from pshard.profile.timed.operands import OperandPool
    from pshard.profile.timed.time_kernels import KernelBench
    from pshard.profile.timing_loop import Pace
    from pshard.profile.tuning.tile_cases import tile_cases
    from pshard.profile.tuning.tile_tuning import tune_tiles

    shapes = Shapes((("Q4_0", 2048, 1024), ("Q4_0", 4096, 1024)), (), (), ((1024, 4096),), (), 64)
    device = open_device("cuda")
    try:
        fast, *_ = choose_kernels(device, "fast", 64)
        bench = KernelBench("acc", fast, device.torch_device, OperandPool(64 << 20, device.torch_device), Pace(0.01), 1)
        assert isinstance(fast, cuda.CudaKernels)
        tuned = tune_tiles(bench, fast, tile_cases(shapes, (1, 8), 2), 60.0)
        assert tuned.failures == () and tuned.untried == 0
        assert {(c.kernel, c.tokens) for c in tuned.choices} == {("matvec", 1), ("matvec", 8), ("gated few", 1),
                                                                 ("gated", 8)}  # fmt: skip
        assert all(1e-6 < c.seconds <= c.default_seconds < 1e-3 for c in tuned.choices)
        chosen, *_ = choose_kernels(device, "fast", 64, tuned.choices)
        weight, values = random_weight("Q4_0", 2048, 1024, seed=9)
        for tokens in (1, 8):
            x, first, second = random_tensor(tokens, 1024, seed=10), poisoned(tokens, 2048), poisoned(tokens, 2048)
            fast.linear(x, weight, first, NO_TILE)
            chosen.linear(x, weight, second, NO_TILE)
            assert torch.equal(first, second)  # the same tiles
            assert error(second, numpy64(x) @ values.T) < 0.012
    finally:
        device.close()
