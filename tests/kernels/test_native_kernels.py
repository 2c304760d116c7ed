"""The C++ kernels against float64 sums over the gguf dequantiser, on every instruction set that this machine runs."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from random_blocks import dequantise_rows, random_rows

from pshard.quant import QUANT_TYPES, packed_nbytes, record_nbytes
from pshard.runtime.kernels.api import Packed
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.kernels.kv_codec import decode_cells, encode_cells
from pshard.runtime.kernels.layout import pack_reference
from pshard.runtime.kernels.plain_rows import gate_of
from pshard.runtime.memory.kv_cache import KV_DTYPES

pytestmark = pytest.mark.skipif(not native.is_available(), reason=f"CPU kernels: {native.why_missing()}")

TYPES = sorted(QUANT_TYPES)
PLANED = [name for name in TYPES if QUANT_TYPES[name].planes]
BEST = native.isa() if native.is_available() else ""
RANK = ["portable", "avx2", "avx512_vnni"]


@pytest.fixture(params=RANK)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if RANK.index(request.param) > RANK.index(BEST):
        pytest.skip(f"this machine has no {request.param}")
    native.set_isa(request.param)
    yield request.param
    native.set_isa(BEST)


@pytest.fixture(autouse=True)
def two_threads() -> None:
    if native.threads() != 2:
        native.set_threads(2)


def matrix(qtype: str, rows: int, cols: int, seed: int = 0) -> tuple[Packed, np.ndarray]:
    """A packed matrix, its data in numpy, and the float32 weights it stands for."""
    raw = random_rows(qtype, rows, cols, seed)
    weights = dequantise_rows(raw, qtype, rows, cols)
    return Packed(pack_reference(raw, qtype, rows, cols), qtype, rows, cols), weights


def least_cols(qtype: str) -> int:
    return max(QUANT_TYPES[qtype].block, 1 if QUANT_TYPES[qtype].planes else 7)


def rounded_activations(x: np.ndarray) -> np.ndarray:
    """What int8 with one scale per 32 columns keeps of x, in float64."""
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / 127
    return (np.rint(blocks / np.where(scale == 0, 1, scale)) * scale).reshape(x.shape)


def poisoned(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    assert np.isfinite(got).all()
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


@pytest.mark.parametrize("qtype", TYPES)
@pytest.mark.parametrize(
    ("rows", "blocks", "tokens"), [(1, 1, 1), (16, 1, 3), (37, 3, 2), (33, 2, 8), (18, 1, 65), (16, 5, 13)]
)
def test_linear_is_the_product_with_the_dequantised_weights(
    isa: str, qtype: str, rows: int, blocks: int, tokens: int
) -> None:
    cols = blocks * least_cols(qtype)
    packed, weights = matrix(qtype, rows, cols)
    x = np.random.default_rng(1).standard_normal((tokens, cols + 3), np.float32)[:, :cols]
    out = poisoned(tokens, rows + 5)
    native.linear(x, packed, out, tokens, x_stride=cols + 3, out_stride=rows + 5)
    assert np.isnan(out[:, rows:]).all()
    planes = bool(QUANT_TYPES[qtype].planes)
    want = (rounded_activations(x) if planes else x.astype(np.float64)) @ weights.astype(np.float64).T
    # against the same rounding only float32 sums differ; a value that lies on a rounding edge may go the other way
    assert relative_error(out[:, :rows], want) < (2e-3 if planes else 1e-5)


@pytest.mark.parametrize("qtype", PLANED)
def test_int8_activations_cost_under_one_percent(qtype: str) -> None:
    packed, weights = matrix(qtype, 64, 2048)
    x = np.random.default_rng(1).standard_normal((4, 2048), np.float32)
    out = poisoned(4, 64)
    native.linear(x, packed, out, 4)
    assert relative_error(out, x.astype(np.float64) @ weights.astype(np.float64).T) < 0.01


@pytest.mark.parametrize("qtype", TYPES)
def test_a_token_and_the_thread_count_do_not_change_a_result(isa: str, qtype: str) -> None:
    rows, cols = 70, 2 * max(least_cols(qtype), 32)
    packed, _ = matrix(qtype, rows, cols)
    x = np.random.default_rng(2).standard_normal((15, cols), np.float32)
    together = poisoned(15, rows)
    native.linear(x, packed, together, 15)
    native.set_threads(1)
    for token in range(15):
        alone = poisoned(1, rows)
        native.linear(x[token:], packed, alone, 1)
        np.testing.assert_array_equal(alone[0], together[token])


@pytest.mark.parametrize(
    "types", [("Q4_0",), ("Q4_K", "Q4_K", "Q6_K"), ("F16", "Q8_0", "F16"), ("Q4_0", "BF16", "Q4_1")]
)
@pytest.mark.parametrize("tokens", [1, 7, 70])
def test_matrices_multiplied_together_give_the_bits_of_each_alone(
    isa: str, types: tuple[str, ...], tokens: int
) -> None:
    rows, cols = (700, 16, 37)[: len(types)], 512
    made = [matrix(qtype, n, cols, n)[0] for qtype, n in zip(types, rows)]
    x = np.random.default_rng(3).standard_normal((tokens, cols + 4), np.float32)[:, :cols]
    out, strides = poisoned(tokens, sum(rows) + 3), {"x_stride": cols + 4, "out_stride": sum(rows) + 3}
    native.linear_group(x, made, out, tokens, **strides)
    at = 0
    for packed, n in zip(made, rows):
        alone = poisoned(tokens, n)
        native.linear(x, packed, alone, tokens, x_stride=cols + 4)
        np.testing.assert_array_equal(out[:, at : at + n], alone)
        at += n
    assert np.isnan(out[:, at:]).all()


@pytest.mark.parametrize("qtype", ["Q4_0", "Q6_K", "F16"])
@pytest.mark.parametrize("tokens", [1, 11, 65])
def test_a_product_can_be_added_to_what_is_there(isa: str, qtype: str, tokens: int) -> None:
    packed, _ = matrix(qtype, 37, 512)
    rng = np.random.default_rng(4)
    x, there = rng.standard_normal((tokens, 512), np.float32), rng.standard_normal((tokens, 40), np.float32)
    alone, out = poisoned(tokens, 37), there.copy()
    native.linear(x, packed, alone, tokens)
    native.linear(x, packed, out, tokens, out_stride=40, accumulate=True)
    np.testing.assert_array_equal(out[:, :37], there[:, :37] + alone)
    np.testing.assert_array_equal(out[:, 37:], there[:, 37:])


def test_a_nan_among_the_activations_reaches_its_token_only(isa: str) -> None:
    packed, _ = matrix("Q4_0", 16, 64)
    x = np.ones((3, 64), np.float32)
    x[1, 40] = np.nan
    out = np.zeros((3, 16), np.float32)
    native.linear(x, packed, out, 3)
    assert np.isnan(out[1]).all() and np.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize("qtype", TYPES)
def test_pack_equals_the_numpy_twin_byte_for_byte(qtype: str) -> None:
    q = QUANT_TYPES[qtype]
    rows, cols = 53, 4 * max(q.block, 32)
    raw = random_rows(qtype, rows, cols)
    out = np.full(packed_nbytes(qtype, rows, cols), 255, np.uint8)
    native.pack(raw, qtype, rows, cols, out)
    np.testing.assert_array_equal(out, pack_reference(raw, qtype, rows, cols))
    first, last = cols // 4, cols // 4 * 3
    part = np.full(packed_nbytes(qtype, 30, last - first), 255, np.uint8)
    native.pack(raw, qtype, rows, cols, part, row_start=11, row_stop=41, col_start=first, col_stop=last)
    cut = raw[11:41, first // q.block * q.nbytes : last // q.block * q.nbytes]
    np.testing.assert_array_equal(part, pack_reference(cut, qtype, 30, last - first))


@pytest.mark.parametrize("qtype", TYPES)
def test_dequantize_equals_the_gguf_dequantiser(isa: str, qtype: str) -> None:
    import torch

    rows, cols = 37, 3 * least_cols(qtype)
    packed, weights = matrix(qtype, rows, cols)
    out = poisoned(26, cols)
    native.dequantize(packed, 9, 35, out)
    np.testing.assert_array_equal(out.view(np.uint32), weights[9:35].view(np.uint32))
    half = torch.full((26, cols), torch.nan, dtype=torch.bfloat16)
    native.dequantize(packed, 9, 35, half, "bf16")
    assert torch.equal(half, torch.from_numpy(weights[9:35].copy()).to(torch.bfloat16))


@pytest.mark.parametrize("qtype", TYPES)
def test_get_rows_looks_up_exact_rows(isa: str, qtype: str) -> None:
    rows, cols = 40, 2 * least_cols(qtype)
    packed, weights = matrix(qtype, rows, cols)
    ids = np.array([39, 0, 17, 17], np.int64)
    out = poisoned(4, cols)
    native.get_rows(packed, ids, 4, out)
    np.testing.assert_array_equal(out, weights[ids])
    with pytest.raises(IndexError, match="row 40"):
        native.get_rows(packed, np.array([40], np.int64), 1, out)


def inputs_for_silu(tokens: int, gate: np.ndarray) -> np.ndarray:
    """Activations [tokens, cols of gate] whose products with the gate are of order 2, where silu bends."""
    x = np.random.default_rng(4).standard_normal((tokens, gate.shape[1]), np.float32)
    return x * np.float32(2 / np.std(x @ gate.T))


@pytest.mark.parametrize(
    ("gate_type", "up_type", "down_type"), [("Q4_0", "Q4_0", "Q4_0"), ("Q4_K", "Q6_K", "Q6_K"), ("BF16", "Q8_0", "F16")]
)
@pytest.mark.parametrize("tokens", [1, 5, 66])
def test_ffn_is_swiglu(isa: str, gate_type: str, up_type: str, down_type: str, tokens: int) -> None:
    hidden, inner = 256, 768
    (gate, g), (up, u), (down, d) = (
        matrix(gate_type, inner, hidden, 1),
        matrix(up_type, inner, hidden, 2),
        matrix(down_type, hidden, inner, 3),
    )
    x = inputs_for_silu(tokens, g)
    out = poisoned(tokens, hidden)
    native.ffn(x, gate, up, down, out, tokens)
    a = x.astype(np.float64) @ g.astype(np.float64).T
    want = (a / (1 + np.exp(-a)) * (x @ u.astype(np.float64).T)) @ d.astype(np.float64).T
    assert relative_error(out, want) < 0.02


@pytest.mark.parametrize("types", [("Q4_0", "Q4_0", "Q6_K"), ("BF16", "BF16", "Q8_0")], ids=" ".join)
@pytest.mark.parametrize("tokens", [1, 6, 16, 17, 600])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_whole_ffn_gives_the_bits_of_its_halves_or_leaves_it_to_them(
    types: tuple[str, str, str], tokens: int, accumulate: bool
) -> None:
    hidden, inner, kernels = 256, 768, HostKernels()
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    packed = [matrix(qtype, *shape, i)[0] for i, (qtype, shape) in enumerate(zip(types, shapes))]
    gate, up, down = (replace(p, data=torch.from_numpy(p.data.ravel())) for p in packed)
    x, tile = torch.randn(tokens, hidden + 8)[:, :hidden], torch.empty(1 << 20, dtype=torch.uint8)
    start = torch.randn(tokens, hidden) if accumulate else torch.full((tokens, hidden), torch.nan)
    both, one, two = torch.empty(tokens, 2 * inner), start.clone(), start.clone()
    kernels.gate_up(x, gate, up, both[:, :inner], both, tile)
    kernels.linear(both[:, :inner], down, two, tile, accumulate=accumulate)
    if kernels.ffn(x, gate, up, down, one, accumulate):
        assert torch.equal(one, two) and torch.isfinite(one).all()
    else:
        assert tokens > (8 if types[0] == "BF16" else 16) and torch.equal(one.isnan(), start.isnan())
    few = min(tokens, 6)
    assert kernels.ffn(x[:few], gate, up, down, one[:few].clone(), accumulate)


@pytest.mark.parametrize(("gate_type", "up_type"), [("Q4_0", "Q4_0"), ("Q6_K", "Q4_K"), ("F32", "F32")])
def test_gate_up_is_the_first_half_of_swiglu(isa: str, gate_type: str, up_type: str) -> None:
    hidden, inner, tokens = 256, 51, 3
    (gate, g), (up, u) = matrix(gate_type, inner, hidden, 1), matrix(up_type, inner, hidden, 2)
    x = inputs_for_silu(tokens, g)
    out = poisoned(tokens, inner + 1)
    native.gate_up(x, gate, up, out, tokens, out_stride=inner + 1)
    assert np.isnan(out[:, inner:]).all()
    a = x.astype(np.float64) @ g.astype(np.float64).T
    assert relative_error(out[:, :inner], a / (1 + np.exp(-a)) * (x @ u.astype(np.float64).T)) < 0.02


@pytest.mark.parametrize(
    "types", [("Q4_0", "Q4_0", "Q6_K"), ("F32", "F32", "F32"), ("BF16", "BF16", "Q8_0")], ids=" ".join
)
@pytest.mark.parametrize("tokens", [1, 5, 33, 600])
def test_gelu_takes_the_place_of_silu(isa: str, types: tuple[str, str, str], tokens: int) -> None:
    """By its approximation with tanh; also where torch multiplies."""
    hidden, inner, kernels = 256, 768, HostKernels()
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    made = [matrix(qtype, *shape, i) for i, (qtype, shape) in enumerate(zip(types, shapes))]
    gate, up, down = (replace(p, data=torch.from_numpy(p.data.ravel())) for p, _ in made)
    x, tile = torch.randn(tokens, hidden), torch.empty(1 << 20, dtype=torch.uint8)
    both, out = torch.full((tokens, 2 * inner), torch.nan), torch.full((tokens, hidden), torch.nan)
    g, u, d = (torch.from_numpy(values).double() for _, values in made)
    wanted = torch.nn.functional.gelu(x.double() @ g.T, approximate="tanh") * (x.double() @ u.T)
    kernels.gate_up(x, gate, up, both[:, :inner], both, tile, "gelu")
    assert relative_error(both[:, :inner].numpy(), wanted.numpy()) < 0.02
    if kernels.ffn(x, gate, up, down, out, False, "gelu"):
        assert relative_error(out.numpy(), (wanted @ d.T).numpy()) < 0.02


def test_a_table_s_gelu_gives_half_precision_numbers(isa: str) -> None:
    """Of every half-precision number, and of ones beside them: what torch rounds, or of few the next one; near
    -5 torch's tanh is -1 already, which costs 1.8e-7."""
    numbers = torch.arange(65536).to(torch.uint16).view(torch.float16).float()
    numbers = numbers[numbers.isfinite()]
    numbers = torch.cat([numbers, numbers * 1.0002, torch.tensor([-1e30, 1e30])])
    x, out = torch.zeros(len(numbers), 32), torch.empty(len(numbers), 16)
    x[:, 0], x[:, 1] = numbers, 1.0
    both = [torch.zeros(16, 32) for _ in range(2)]
    both[0][:, 0] = both[1][:, 1] = 1.0
    gate, up = (Packed(rows.view(torch.uint8).flatten(), "F32", 16, 32) for rows in both)
    native.gate_up(x, gate, up, out, len(x), gate_kind="gelu16")
    want = gate_of("gelu16")(numbers)
    near = (out[:, 0] == want) | ((out[:, 0] - want).abs() <= 2e-3 * want.abs() + 2e-7)
    assert near.all() and (out[:, 0] == want).float().mean() > 0.98


def attention_in_float64(q: np.ndarray, k: np.ndarray, v: np.ndarray, before: int, scale: float) -> np.ndarray:
    tokens, heads, _ = q.shape
    shared = heads // k.shape[1]
    out = np.empty(q.shape, np.float64)
    for t in range(tokens):
        for h in range(heads):
            seen = k[: before + t + 1, h // shared].astype(np.float64)
            scores = seen @ q[t, h].astype(np.float64) * scale
            p = np.exp(scores - scores.max())
            out[t, h] = p / p.sum() @ v[: before + t + 1, h // shared].astype(np.float64)
    return out


@pytest.mark.parametrize("kv_types", [("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("bf16", "f32")])
@pytest.mark.parametrize(
    ("before", "tokens", "heads", "kv_heads", "dim"),
    [
        (0, 1, 1, 1, 16),
        (5, 1, 8, 1, 64),
        (700, 1, 8, 2, 128),
        (1100, 3, 4, 4, 80),
        (63, 65, 6, 2, 40),
        (0, 130, 4, 1, 72),
        (0, 3, 3, 1, 32),
        (70, 9, 6, 1, 96),
        (260, 2, 20, 2, 160),
    ],
)
def test_attention_is_causal_softmax(
    isa: str, kv_types: tuple[str, str], before: int, tokens: int, heads: int, kv_heads: int, dim: int
) -> None:
    check_attention(kv_types, before, tokens, heads, kv_heads, dim)


@pytest.mark.parametrize(
    "kv_types", [("q8_0", "q8_0"), ("q8_0", "bf16"), ("f16", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0")]
)
@pytest.mark.parametrize(
    ("before", "tokens", "heads", "kv_heads", "dim"),
    [(0, 1, 1, 1, 32), (700, 1, 8, 2, 128), (63, 65, 6, 2, 96), (130, 2, 2, 1, 544)],
)
def test_attention_reads_quantised_cells(
    isa: str, kv_types: tuple[str, str], before: int, tokens: int, heads: int, kv_heads: int, dim: int
) -> None:
    check_attention(kv_types, before, tokens, heads, kv_heads, dim)


def check_attention(kv_types: tuple[str, str], before: int, tokens: int, heads: int, kv_heads: int, dim: int) -> None:
    """Attention over cells with gaps between them against float64 over what the cells hold."""
    rng = np.random.default_rng(5)
    q = rng.standard_normal((tokens, heads, dim), np.float32)
    cells, values = [], []
    for kind in kv_types:
        numbers = torch.from_numpy(rng.standard_normal((before + tokens, kv_heads, dim), np.float32))
        encoded = encode_cells(numbers, KV_DTYPES[kind])
        values.append(decode_cells(encoded, dim).numpy())
        cells.append(torch.nn.functional.pad(encoded.flatten(1), (0, 8)))
    out = poisoned(tokens, heads, dim)
    shape = [(0, tokens, before, 0)], (heads, kv_heads, dim)
    strides = cells[0][0].nbytes, cells[1][0].nbytes
    native.attention(q, *cells, kv_types, *shape, 0.3, out, cell_strides=strides)
    np.testing.assert_allclose(out, attention_in_float64(q, *values, before, 0.3), rtol=2e-4, atol=2e-5)
    for block in (64, 192):
        order = rng.permutation(-(-(before + tokens) // block)).astype(np.int32)
        pools = [scatter_blocks(part, order, block) for part in cells]
        again = poisoned(tokens, heads, dim)
        native.attention(q, *pools, kv_types, *shape, 0.3, again, cell_strides=strides, blocks=(order, block))
        np.testing.assert_array_equal(again, out)


def scatter_blocks(cells: torch.Tensor, order: np.ndarray, block: int) -> torch.Tensor:
    """A pool that has the i-th block of the cells at order[i]; what is nobody's cell is no number."""
    pool = torch.empty(len(order) * block, cells.shape[1], dtype=cells.dtype)
    pool.view(torch.uint8).fill_(255)
    for i, at in enumerate(order):
        part = cells[i * block : (i + 1) * block]
        pool[at * block : at * block + len(part)] = part
    return pool


@pytest.mark.parametrize("qtype", TYPES)
def test_the_library_and_python_agree_on_sizes(qtype: str) -> None:
    for cols in (32, 256, 5120):
        if QUANT_TYPES[qtype].planes and cols % QUANT_TYPES[qtype].block == 0:
            assert native.record_nbytes(qtype, cols) == record_nbytes(qtype, cols)


def test_memcpy_and_read_bandwidth_touch_every_byte(isa: str) -> None:
    source = np.random.default_rng(0).integers(0, 256, 9_000_001, dtype=np.uint8)
    copy = np.zeros(source.size + 5, np.uint8)
    native.memcpy(copy[5:], source, source.nbytes)
    np.testing.assert_array_equal(copy[5:], source)
    assert not copy[:5].any()
    assert native.read_bandwidth(source, source.nbytes) > 0.1


def test_calls_from_several_threads_do_not_mix() -> None:
    packed, _ = matrix("Q4_0", 160, 320)
    x = np.random.default_rng(3).standard_normal((8, 320), np.float32)
    want = poisoned(8, 160)
    native.linear(x, packed, want, 8)

    def call(token: int) -> np.ndarray:
        out = poisoned(1, 160)
        for _ in range(50):
            native.linear(x[token:], packed, out, 1)
        return out[0]

    with ThreadPoolExecutor(4) as pool:
        np.testing.assert_array_equal(np.stack(list(pool.map(call, range(8)))), want)


def test_nothing_to_do_is_no_error(isa: str) -> None:
    """A rank of an uneven split may hold no rows, no columns or no heads."""
    x, out = np.ones((2, 64), np.float32), poisoned(2, 16)
    native.linear(x, Packed(0, "Q4_0", 0, 64), out, 2, out_stride=16)
    assert np.isnan(out).all()
    native.linear(x, Packed(0, "Q4_0", 16, 0), out, 2)
    assert not out.any()
    out = poisoned(2, 64)
    gate, down = Packed(0, "Q4_0", 0, 64), Packed(0, "Q4_0", 64, 0)
    native.ffn(x, gate, gate, down, out, 2)
    assert not out.any()
    native.attention(x, 0, 0, ("f32", "f32"), [(0, 1, 0, 0)], (0, 0, 64), 1.0, 0)


def test_wrong_sizes_are_refused() -> None:
    buffer = np.zeros(4096, np.uint8)
    with pytest.raises(ValueError, match="block"):
        native.linear(buffer, Packed(buffer, "Q4_K", 16, 128), buffer, 1)
    with pytest.raises(ValueError, match="rows"):
        native.dequantize(Packed(buffer, "Q4_0", 16, 32), 0, 17, buffer)
    with pytest.raises(ValueError, match="cannot run"):
        native.set_isa("sse9")


def test_the_pool_survives_a_fork() -> None:
    import os

    packed, _ = matrix("Q4_0", 64, 64)
    x, out = np.ones((1, 64), np.float32), poisoned(1, 64)
    native.linear(x, packed, out, 1)
    child = os.fork()
    if child == 0:
        again = poisoned(1, 64)
        native.linear(x, packed, again, 1)
        os._exit(0 if np.array_equal(again, out) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
