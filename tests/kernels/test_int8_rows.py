"""Products of many rows in int8 compute what float64 does from the unpacked weights, but for rounded activations.

On a GPU where there is one, else in Triton's interpreter: see test_triton_kernels.
"""

import os

import numpy as np
import pytest
import torch
from interpreted import expect_interpreted_to_pass, mend_interpreter
from random_weights import DEVICE, random_tensor, random_weight

pytest.importorskip("triton", reason="Triton is installed with the CUDA build of torch only")
READY = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
needs_kernels = pytest.mark.skipif(not READY, reason="runs inside test_int8_rows_in_the_interpreter")

from pshard.runtime.kernels.gpu import cuda  # noqa: E402
from pshard.runtime.kernels.gpu.products import int8_rows, many_rows  # noqa: E402
from pshard.times.gpu_tiles import INT8_KERNEL, INT8_TYPES, Tile, TileChoice, settle_math  # noqa: E402

if READY and DEVICE == "cpu":
    mend_interpreter()

TILE = Tile(64, 1, 2, 1, tokens=64)


@pytest.mark.slow
@pytest.mark.skipif(READY, reason="the kernels run here directly")
def test_int8_rows_in_the_interpreter() -> None:
    expect_interpreted_to_pass(__file__)


def kernels_with(qtypes: tuple[str, ...], tile: Tile = TILE, gain: float = 2.0) -> cuda.CudaKernels:
    choices = [TileChoice("acc", INT8_KERNEL, qtype, 128, tile, 1.0, gain) for qtype in qtypes]
    return cuda.CudaKernels(DEVICE, 128, settle_math(choices, "auto"))


def numpy64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().cpu().numpy()


def error(out: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.linalg.norm(numpy64(out) - expected) / np.linalg.norm(expected))


def scratch(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)


@needs_kernels
@pytest.mark.parametrize("qtype", INT8_TYPES)
def test_int8_rows_are_the_product_of_rounded_activations(qtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, cols, tokens = 40, 256, 70  # neither whole tiles of rows nor of tokens
    weight, values = random_weight(qtype, rows, cols, seed=1)
    x = random_tensor(tokens, cols + 32, seed=2)[:, :cols]
    bias = random_tensor(rows, seed=3, dtype=torch.float32)
    wide = torch.full((tokens, rows + 16), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    monkeypatch.setattr(many_rows, "dequantise", None)  # no tile is made
    kernels_with((qtype,)).linear(x, weight, wide[:, 8 : 8 + rows], scratch(1 << 16), bias)
    expected = numpy64(x) @ values.T + numpy64(bias)
    assert error(wide[:, 8 : 8 + rows], expected) < 0.012
    assert torch.isnan(wide[:, :8]).all() and torch.isnan(wide[:, 8 + rows :]).all()


@needs_kernels
@pytest.mark.parametrize("qtype", ["Q4_0", "Q6_K"])
def test_sums_of_rounded_activations_are_exact(qtype: str) -> None:
    """Activations that int8 holds exactly leave nothing but the rounding of float32 sums."""
    rows, cols, tokens = 32, 512, 96
    weight, values = random_weight(qtype, rows, cols, seed=4)
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-127, 128, (tokens, cols), generator=generator).float()
    x[:, ::32] = 127.0
    x = x.to(torch.bfloat16).to(DEVICE)
    hidden = random_tensor(tokens, rows, seed=6, dtype=torch.float32)
    expected = numpy64(hidden) + numpy64(x) @ values.T
    kernels_with((qtype,)).linear(x, weight, hidden, scratch(1 << 16), accumulate=True)
    assert error(hidden, expected) < 1e-6


@needs_kernels
def test_tokens_go_in_turns_where_scratch_is_small_and_bits_stay() -> None:
    weight, _ = random_weight("Q4_0", 48, 128, seed=7)
    x = random_tensor(200, 128, seed=8)
    outs = []
    for turns, tile in ((1, TILE), (4, TILE), (2, Tile(32, 1, 2, 1, tokens=128))):
        out = torch.empty(200, 48, dtype=torch.float32, device=DEVICE)
        room = 4 * int8_rows.CHUNK_NBYTES * -(-256 // turns) // int8_rows.GROUP
        kernels_with(("Q4_0",), tile).linear(x, weight, out, scratch(room))
        outs.append(out)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@needs_kernels
def test_weights_beside_each_other_go_each_its_way() -> None:
    kinds = ("Q4_0", "Q6_K", "BF16", "Q4_0")
    made = [random_weight(qtype, 32, 256, seed=i) for i, qtype in enumerate(kinds)]
    x = random_tensor(80, 256, seed=9)
    out = torch.empty(80, 128, dtype=torch.bfloat16, device=DEVICE)
    weights = tuple(weight for weight, _ in made)
    kernels_with(("Q4_0",)).linear_group(x, weights, out, scratch(1 << 16), (None,) * 4)
    for i, (_, values) in enumerate(made):
        bound = 0.012 if kinds[i] == "Q4_0" else 0.006
        assert error(out[:, 32 * i : 32 * i + 32], numpy64(x) @ values.T) < bound


@needs_kernels
def test_a_type_that_is_slower_in_int8_stays_with_the_library() -> None:
    weight, values = random_weight("Q4_0", 32, 256, seed=10)
    x, room = random_tensor(80, 256, seed=11), scratch(1 << 16)
    slower, without = x.new_empty(80, 32), x.new_empty(80, 32)
    kernels_with(("Q4_0",), gain=0.9).linear(x, weight, slower, room)
    kernels_with(()).linear(x, weight, without, room)
    assert torch.equal(slower, without)
    assert error(slower, numpy64(x) @ values.T) < 0.006
