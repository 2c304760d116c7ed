"""Products on tiles: the blocking code that AMX runs, here over emulated tiles (and AMX itself where it exists)."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from random_blocks import random_rows
from test_native_kernels import PLANED, TYPES, least_cols, matrix, poisoned, relative_error

from pshard.runtime.kernels.api import Packed
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.kernels.layout import pack_reference

pytestmark = pytest.mark.skipif(not native.is_available(), reason=f"CPU kernels: {native.why_missing()}")


@pytest.fixture(params=["emulated", "amx"], autouse=True)
def tiles(request: pytest.FixtureRequest) -> Iterator[str]:
    best = native.tiles()
    try:
        native.set_tiles(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    native.set_threads(2)
    yield request.param
    native.set_tiles(best)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """What bfloat16 keeps of x, in float64."""
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).bfloat16().double().numpy()


@pytest.mark.parametrize("qtype", TYPES)
@pytest.mark.parametrize(
    ("rows", "blocks", "tokens"), [(1, 1, 9), (16, 1, 16), (37, 3, 17), (300, 2, 33), (48, 1, 64), (33, 5, 100)]
)
def test_the_product_is_that_of_the_bf16_roundings(qtype: str, rows: int, blocks: int, tokens: int) -> None:
    cols = blocks * least_cols(qtype)
    packed, weights = matrix(qtype, rows, cols)
    x = np.random.default_rng(1).standard_normal((tokens, cols + 3), np.float32)[:, :cols]
    out = poisoned(tokens, rows + 5)
    native.linear_tiled(x, packed, out, tokens, x_stride=cols + 3, out_stride=rows + 5)
    assert np.isnan(out[:, rows:]).all()
    assert relative_error(out[:, :rows], to_bf16(x) @ to_bf16(weights).T) < 1e-5


@pytest.mark.parametrize("tokens", [512, 513, 600])
def test_tokens_beyond_one_slice(tokens: int) -> None:
    rows, cols = 70, 1056  # the last block of columns is a single chunk
    packed, weights = matrix("Q4_0", rows, cols)
    x = np.random.default_rng(1).standard_normal((tokens, cols), np.float32)
    out = poisoned(tokens, rows)
    native.linear_tiled(x, packed, out, tokens)
    assert relative_error(out, to_bf16(x) @ to_bf16(weights).T) < 1e-5


@pytest.mark.parametrize("qtype", PLANED)
def test_bf16_on_both_sides_costs_under_half_a_percent(qtype: str) -> None:
    packed, weights = matrix(qtype, 64, 2048)
    x = np.random.default_rng(1).standard_normal((20, 2048), np.float32)
    out = poisoned(20, 64)
    native.linear_tiled(x, packed, out, 20)
    assert relative_error(out, x.astype(np.float64) @ weights.astype(np.float64).T) < 0.005


def test_a_token_and_the_thread_count_do_not_change_a_result() -> None:
    rows, cols = 290, 1536
    packed, _ = matrix("Q4_K", rows, cols)
    x = np.random.default_rng(2).standard_normal((40, cols), np.float32)
    together = poisoned(40, rows)
    native.linear_tiled(x, packed, together, 40)
    native.set_threads(1)
    for first, count in ((0, 16), (5, 9), (30, 10)):
        some = poisoned(count, rows)
        native.linear_tiled(x[first:], packed, some, count)
        np.testing.assert_array_equal(some, together[first : first + count])


def test_a_nan_among_the_activations_reaches_its_token_only() -> None:
    packed, _ = matrix("Q4_0", 16, 64)
    x = np.ones((20, 64), np.float32)
    x[7, 40] = np.nan
    out = np.zeros((20, 16), np.float32)
    native.linear_tiled(x, packed, out, 20)
    assert np.isnan(out[7]).all() and np.isfinite(np.delete(out, 7, 0)).all()


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(("gate_type", "up_type"), [("Q4_0", "Q4_0"), ("Q4_K", "Q6_K"), ("BF16", "BF16")])
def test_gate_and_up(gate_type: str, up_type: str, gelu: bool) -> None:
    inner, hidden, tokens = 150, 768, 50
    gate, gate_weights = matrix(gate_type, inner, hidden, 1)
    up, up_weights = matrix(up_type, inner, hidden, 2)
    x = np.random.default_rng(3).standard_normal((tokens, hidden), np.float32)
    out = poisoned(tokens, inner)
    native.gate_up_tiled(x, gate, up, out, tokens, gate_kind="gelu" if gelu else "silu")
    g, u = to_bf16(x) @ to_bf16(gate_weights).T, to_bf16(x) @ to_bf16(up_weights).T
    with np.errstate(over="ignore"):
        bent = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) if gelu else g / (1 + np.exp(-g))
        assert relative_error(out, bent * u) < 1e-5


def test_a_matrix_without_columns_gives_zeros() -> None:
    out = poisoned(20, 48)
    native.linear_tiled(out, Packed(0, "Q4_0", 48, 0), out, 20, x_stride=48)
    assert not out.any()


def test_host_kernels_send_many_tokens_to_the_tiles() -> None:
    rows, cols, tokens = 48, 512, 24
    raw = random_rows("Q4_K", rows, cols, 0)
    data = torch.from_numpy(pack_reference(raw, "Q4_K", rows, cols))
    weight = Packed(data, "Q4_K", rows, cols)
    x, bias, before = torch.randn(tokens, cols), torch.randn(rows), torch.randn(tokens, rows)
    want = poisoned(tokens, rows)
    native.linear_tiled(x, weight, want, tokens)
    got = before.clone()
    HostKernels().linear(x, weight, got, torch.empty(0, dtype=torch.uint8), bias, accumulate=True)
    torch.testing.assert_close(got, before + torch.from_numpy(want) + bias)


def test_without_tiles_the_call_is_refused() -> None:
    native.set_tiles("")
    with pytest.raises(RuntimeError, match="matrix unit"):
        native.linear_tiled(0, Packed(0, "Q4_0", 16, 32), 0, 16)
