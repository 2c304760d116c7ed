"""Products of many rows in int8 compute what float64 does from the unpacked weights, but for rounded activations.

On a GPU where there is one, else in Triton's interpreter: see test_triton_kernels.
"""

import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from interpreted import expect_interpreted_to_pass, mend_interpreter
from random_weights import DEVICE, random_tensor, random_weight
from rounded_products import quantise

pytest.importorskip("triton", reason="Triton is installed with the CUDA build of torch only")
READY = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
needs_kernels = pytest.mark.skipif(not READY, reason="runs inside test_int8_rows_in_the_interpreter")

from pshard.model_config import Experts  # noqa: E402
from pshard.runtime.kernels.api import ExpertWeights, Routes  # noqa: E402
from pshard.runtime.kernels.gpu import cuda  # noqa: E402
from pshard.runtime.kernels.gpu.experts import grouped, int8_pairs  # noqa: E402
from pshard.runtime.kernels.gpu.products import int8_rows, many_rows  # noqa: E402
from pshard.runtime.memory.workspace import view_buffers  # noqa: E402
from pshard.times.gpu_tiles import (  # noqa: E402
    INT8_EXPERTS,
    INT8_GATED,
    INT8_KERNEL,
    INT8_TYPES,
    Tile,
    TileChoice,
    experts_type,
    pairs_together,
    settle_math,
)
from pshard.units.moe.routed import scratch_of  # noqa: E402

if READY and DEVICE == "cpu":
    mend_interpreter()

TILE = Tile(64, 1, 2, 1, tokens=64)


@pytest.mark.slow
@pytest.mark.skipif(READY, reason="the kernels run here directly")
def test_int8_rows_in_the_interpreter() -> None:
    expect_interpreted_to_pass(__file__)


def kernels_with(
    qtypes: tuple[str, ...], tile: Tile = TILE, gain: float = 2.0, kernel: str = INT8_KERNEL, tokens: int = 128
) -> cuda.CudaKernels:
    choices = [TileChoice("acc", kernel, qtype, tokens, tile, 1.0, gain) for qtype in qtypes]
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
def test_products_are_those_of_the_rounding_by_which_their_cost_is_measured() -> None:
    weight, values = random_weight("Q4_0", 32, 128, seed=17)
    x, out = random_tensor(70, 128, seed=18), torch.empty(70, 32, device=DEVICE)
    kernels_with(("Q4_0",)).linear(x, weight, out, scratch(1 << 16))
    assert error(out, numpy64(quantise(x.cpu(), fused=DEVICE == "cuda")) @ values.T) < 1e-5


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


@needs_kernels
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gate_and_up_are_one_launch_that_gives_what_both_products_give(
    activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gate, g), (up, u) = (random_weight("Q4_K", 48, 256, seed=i) for i in (12, 13))
    x = random_tensor(70, 256, seed=14)
    out, both = x.new_full((70, 48), float("nan")), x.new_empty(70, 96)
    monkeypatch.setattr(cuda.CudaKernels, "gate_mul", None)
    kernels = kernels_with(("Q4_K",), Tile(64, 1, 4, 1, tokens=64), kernel=INT8_GATED)
    kernels.gate_up(x, gate, up, out, both, scratch(1 << 16), activation)
    gates, ups = (torch.from_numpy(numpy64(x) @ w.T) for w in (g, u))
    scale = float(gates.std())
    act = torch.nn.functional.silu if activation == "silu" else partial(torch.nn.functional.gelu, approximate="tanh")
    assert scale > 0 and error(out, (act(gates) * ups).numpy()) < 0.02


def test_a_matrix_that_is_not_to_be_in_int8_suits_no_tile() -> None:
    weight, _ = random_weight("Q4_0", 32, 64, seed=19)
    room = torch.empty(1 << 16, dtype=torch.uint8)
    assert int8_rows.fits(weight, TILE, room) and not int8_rows.fits(replace(weight, never_int8=True), TILE, room)


@needs_kernels
def test_gate_and_up_are_two_products_where_a_card_has_no_room_for_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    def refuse(*given: object) -> None:
        raise OutOfResources(163840, 101376, "shared memory")

    (gate, g), (up, u) = (random_weight("Q4_0", 48, 64, seed=i) for i in (12, 13))
    x = random_tensor(70, 64, seed=14)
    out, both = x.new_full((70, 48), float("nan")), x.new_empty(70, 96)
    kernels = kernels_with(("Q4_0",), kernel=INT8_GATED)
    monkeypatch.setattr(int8_rows, "multiply_gated", refuse)
    for _ in range(2):  # the second asks for it no more
        kernels.gate_up(x, gate, up, out.fill_(float("nan")), both, scratch(1 << 16))
        gates, ups = (torch.from_numpy(numpy64(x) @ w.T) for w in (g, u))
        assert error(out, (torch.nn.functional.silu(gates) * ups).numpy()) < 0.02
    assert len(kernels.passed_over) == 1 and "163840 of shared memory" in kernels.passed_over[0]


def make_experts(qtypes: tuple[str, str], rule: Experts, width: int) -> tuple[ExpertWeights, list[list[np.ndarray]]]:
    """A layer's packed experts, some of which are not on this side, and the values of their gates, ups and downs."""
    shapes = ((rule.d_expert, width), (rule.d_expert, width), (width, rule.d_expert))
    packed, values = [], []
    for i, (rows, cols) in enumerate(shapes):
        made = [random_weight(qtypes[i // 2], rows, cols, seed=100 * i + e) for e in range(rule.count)]
        packed.append(tuple(weight for weight, _ in made))
        values.append([value for _, value in made])
    addresses = torch.tensor([[m.data.data_ptr() for m in stack] for stack in packed], device=DEVICE)
    biases = [random_tensor(rule.count, rows, seed=20 + i, dtype=torch.float32) for i, (rows, _) in enumerate(shapes)]
    return ExpertWeights(*packed, addresses, tuple(biases) if rule.biases else None), values


def expected_of(x: torch.Tensor, routes: Routes, weights: ExpertWeights, values: list, rule: Experts) -> np.ndarray:
    """float64, one expert and token after the other."""
    found = np.zeros((x.shape[0], values[2][0].shape[0]))
    for token, row in enumerate(numpy64(x)):
        for expert, weight in zip(routes.ids[token].tolist(), routes.weights[token].tolist()):
            biases = [numpy64(b[expert]) if weights.biases else 0.0 for b in weights.biases or (None,) * 3]
            gate, up = (values[i][expert] @ row + biases[i] for i in (0, 1))
            if rule.activation == "clamped":
                low = np.minimum(gate, 7.0)
                inner = low / (1 + np.exp(-1.702 * low)) * (np.clip(up, -7.0, 7.0) + 1)
            else:
                inner = gate / (1 + np.exp(-gate)) * up
            found[token] += weight * (values[2][expert] @ inner + biases[2])
    return found


@needs_kernels
@pytest.mark.parametrize(
    ("qtypes", "activation", "tile"),
    [
        (("Q4_0", "Q4_0"), "silu", Tile(64, 1, 2, 1, tokens=32)),
        (("MXFP4", "MXFP4"), "clamped", Tile(64, 1, 4, 1, tokens=64)),
        (("Q4_K", "Q5_0"), "silu", Tile(64, 1, 2, 1, tokens=32)),
    ],
)
def test_experts_in_int8_are_the_products_of_rounded_activations(
    qtypes: tuple[str, str], activation: str, tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = 96  # no whole tile of rows
    rule = Experts(4, 2, inner, "chosen", normed=False, activation=activation, biases=activation == "clamped")
    width, tokens = 256 if "Q4_K" in qtypes else 64, 3 * tile.tokens + 20
    weights, values = make_experts(qtypes, rule, width)
    generator = torch.Generator().manual_seed(3)
    first = torch.randint(0, 2, (tokens,), generator=generator) * 3  # expert 1 is nobody's first choice
    second = torch.where(torch.arange(tokens) % 7 == 0, 1, 2)
    routes = Routes(
        torch.stack([first, second], 1).int().contiguous().to(DEVICE),
        torch.rand(tokens, 2, generator=generator).to(DEVICE),
    )
    x, out = random_tensor(tokens, width, seed=15), torch.ones(tokens, width, device=DEVICE)
    buffers = scratch_of(rule, width, tokens)
    memory = torch.empty(sum(b.nbytes(2) for b in buffers), dtype=torch.uint8, device=DEVICE)
    room, _ = view_buffers(memory, buffers, torch.bfloat16)
    kernels = kernels_with((experts_type(*qtypes),), tile, kernel=INT8_EXPERTS, tokens=pairs_together(2 * tokens, 4))
    monkeypatch.setattr(grouped, "_multiply_in_bf16", None)
    kernels.experts(x, routes, weights, rule, out, room, True)
    assert not kernels.passed_over
    assert error(out - 1, expected_of(x, routes, weights, values, rule)) < 0.02


def test_down_takes_as_many_sums_a_warp_as_gate_and_up_together() -> None:
    assert int8_pairs.widen(Tile(64, 1, 4, 1, tokens=64)) == Tile(128, 1, 4, 1, tokens=64)
    assert int8_pairs.widen(Tile(32, 1, 2, 1, tokens=64)) == Tile(64, 1, 2, 1, tokens=64)
    for tile in (Tile(64, 1, 2, 1, tokens=32), TILE):  # no second group of tokens, and two groups a warp already
        assert int8_pairs.widen(tile) == tile


@needs_kernels
def test_few_pairs_without_room_for_their_tiles_stay_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Experts(4, 2, 64)
    weights, values = make_experts(("Q4_0", "Q4_0"), rule, 64)
    ids = torch.tensor([[0, 1]] * 20, dtype=torch.int32, device=DEVICE)
    routes = Routes(ids, torch.full((20, 2), 0.5, device=DEVICE))
    x, out = random_tensor(20, 64, seed=16), torch.zeros(20, 64, device=DEVICE)
    buffers = scratch_of(rule, 64, 20)
    memory = torch.empty(sum(b.nbytes(2) for b in buffers), dtype=torch.uint8, device=DEVICE)
    room, _ = view_buffers(memory, buffers, torch.bfloat16)
    kernels = kernels_with(("Q4_0",), kernel=INT8_EXPERTS, tokens=pairs_together(40, 4))
    monkeypatch.setattr(int8_pairs, "multiply", None)
    kernels.experts(x, routes, weights, rule, out, room, False)
    assert error(out, expected_of(x, routes, weights, values, rule)) < 0.02
