"""The Triton kernels compute what numpy computes in float64 from gguf's dequantised weights.

They run on a GPU when there is one, else in Triton's interpreter on the CPU. The interpreter must be chosen before
anything imports Triton, so one test runs this file again in a process of its own. Without Triton (a CPU install)
everything here is skipped.
"""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import expect_interpreted_to_pass, mend_interpreter
from random_weights import DEVICE, random_tensor, random_weight

triton = pytest.importorskip("triton", reason="Triton is installed with the CUDA build of torch only")
READY = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
needs_kernels = pytest.mark.skipif(not READY, reason="runs inside test_every_kernel_in_the_interpreter")

from pshard.quant import QUANT_TYPES  # noqa: E402
from pshard.runtime.kernels.api import InnerNorm, LayerKV, Packed, RopeTable, RowIndex, Segment  # noqa: E402
from pshard.runtime.kernels.gpu import attend, cuda  # noqa: E402
from pshard.runtime.kernels.gpu.products import few_rows  # noqa: E402
from pshard.runtime.kernels.kv_codec import decode_cells, encode_cells, gather_cells  # noqa: E402
from pshard.runtime.kernels.layout import pack_reference, unpack_reference  # noqa: E402
from pshard.runtime.kernels.plain import PlainKernels  # noqa: E402
from pshard.runtime.kernels.row_index import make_rows  # noqa: E402
from pshard.runtime.memory.kv_cache import KV_DTYPES, view_layer  # noqa: E402
from pshard.units.attention import ATTENTION_PIECES  # noqa: E402
from pshard.units.kv_cells import KV_BLOCK  # noqa: E402
from pshard.units.operations import BENDS  # noqa: E402
from pshard.units.state import CellState, StateShape  # noqa: E402

if READY and DEVICE == "cpu":
    mend_interpreter()

TYPES = sorted(QUANT_TYPES)


@pytest.mark.slow
@pytest.mark.skipif(READY, reason="the kernels run here directly")
def test_every_kernel_in_the_interpreter() -> None:
    expect_interpreted_to_pass(__file__)


@pytest.fixture(scope="module")
def kernels() -> cuda.CudaKernels:
    return cuda.CudaKernels(DEVICE, 64)


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def numpy64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().cpu().numpy()


def error(out: torch.Tensor, expected: np.ndarray) -> float:
    """Relative error in the Euclidean norm; NaN stays NaN and fails every comparison.

    Bounds below leave room for the interpreter, which cuts float32 to bfloat16 where a GPU rounds.
    """
    return float(np.linalg.norm(numpy64(out) - expected) / np.linalg.norm(expected))


NO_TILE = torch.empty(0, dtype=torch.uint8)


@needs_kernels
@pytest.mark.parametrize(  # one row of packed types is in test_tile_numbers.py
    ("qtype", "tokens"),
    [(q, n) for i, q in enumerate(TYPES) for n in (1, (3, 9)[i % 2])[bool(QUANT_TYPES[q].planes) :]],
)
def test_small_batches_multiply_packed_weights(kernels: cuda.CudaKernels, qtype: str, tokens: int) -> None:
    rows, cols = 40, 512
    weight, values = random_weight(qtype, rows, cols, seed=tokens)
    x = random_tensor(tokens, cols + 64, seed=1)[:, :cols]
    bias = random_tensor(rows, seed=2, dtype=torch.float32)
    wide = poisoned(tokens, rows + 24)
    out = wide[:, 8 : 8 + rows]
    kernels.linear(x, weight, out, NO_TILE, bias)
    expected = numpy64(x) @ values.T + numpy64(bias)
    assert error(out, expected) < 0.012
    assert torch.isnan(wide[:, :8]).all() and torch.isnan(wide[:, 8 + rows :]).all()


@needs_kernels
@pytest.mark.parametrize(("qtype", "tokens", "cols"), [("Q4_0", 1, 2048), ("Q6_K", 2, 2048), ("Q4_K", 33, 512),
                                                       ("Q4_0", 40, 1024), ("BF16", 5, 2048),
                                                       ("FP8", 5, 2048)])  # fmt: skip
def test_cut_columns_add_up_and_accumulate(
    kernels: cuda.CudaKernels, qtype: str, tokens: int, cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 32
    weight, values = random_weight(qtype, rows, cols, seed=3)
    x = random_tensor(tokens, cols, seed=4)
    bias = random_tensor(rows, seed=5, dtype=torch.float32)
    hidden = random_tensor(tokens, rows, seed=6, dtype=torch.float32)
    expected = numpy64(hidden) + numpy64(x) @ values.T + numpy64(bias)
    used: list[int] = []
    cut = few_rows.cut_columns

    def note_and_cut(*rest: Any) -> tuple[int, int]:
        used.append(cut(*rest)[0])
        return cut(*rest)

    monkeypatch.setattr(few_rows, "cut_columns", note_and_cut)
    again = hidden.clone()
    kernels.linear(x, weight, hidden, NO_TILE, bias, accumulate=True)
    kernels.linear(x, weight, again, NO_TILE, bias, accumulate=True)
    assert used and used[0] > 1
    assert torch.equal(hidden, again)  # counters are back at zero
    assert error(hidden, expected) < 0.012


@needs_kernels
@pytest.mark.parametrize("qtype", TYPES)
def test_dequantised_rows_are_the_weights(kernels: cuda.CudaKernels, qtype: str) -> None:
    rows, cols = 40, 768
    weight, values = random_weight(qtype, rows, cols, seed=7)
    out = poisoned(rows - 16, cols, dtype=torch.float32)
    kernels.dequantise(weight, 16, out)
    assert error(out, values[16:]) < 1e-6


@needs_kernels
@pytest.mark.parametrize(("qtype", "cols"), [*((qtype, 256) for qtype in TYPES), *((q, 2816) for q in TYPES[::4])])
def test_rows_are_looked_up_to_the_bit(kernels: cuda.CudaKernels, qtype: str, cols: int) -> None:
    weight, _ = random_weight(qtype, 40, cols, seed=17)
    ids = torch.tensor([0, 15, 16, 39, 7, 7], device=DEVICE)
    out, wanted = poisoned(6, cols, dtype=torch.float32), poisoned(6, cols, dtype=torch.float32)
    kernels.look_up(weight, ids, out)
    PlainKernels().look_up(weight, ids, wanted)  # ranks, of which one has the table on its host, must see the same bits
    assert torch.equal(out, wanted) and wanted.isfinite().all()


@needs_kernels
@pytest.mark.parametrize("qtype", ["Q4_0", "Q6_K", "BF16", "F16"])
def test_large_batches_go_tile_by_tile(kernels: cuda.CudaKernels, qtype: str) -> None:
    rows, cols, tokens = 80, 256, 70
    weight, values = random_weight(qtype, rows, cols, seed=8)
    x = random_tensor(tokens, cols, seed=9)
    tile = torch.empty(2 * 32 * cols, dtype=torch.uint8, device=DEVICE)
    bias = random_tensor(rows, seed=10, dtype=torch.float32)
    wide = poisoned(tokens, rows + 16)
    kernels.linear(x, weight, wide[:, 16:], tile, bias)
    assert error(wide[:, 16:], numpy64(x) @ values.T + numpy64(bias)) < 0.01
    assert torch.isnan(wide[:, :16]).all()


@needs_kernels
@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="torch has no mixed-precision addmm on the CPU")
def test_large_batches_accumulate_in_float32(kernels: cuda.CudaKernels) -> None:
    weight, values = random_weight("Q4_0", 80, 256, seed=11)
    x = random_tensor(70, 256, seed=12)
    hidden = random_tensor(70, 80, seed=13, dtype=torch.float32)
    tile = torch.empty(2 * 32 * 256, dtype=torch.uint8, device=DEVICE)
    expected = numpy64(hidden) + numpy64(x) @ values.T
    kernels.linear(x, weight, hidden, tile, None, accumulate=True)
    assert error(hidden, expected) < 0.01


@needs_kernels
@pytest.mark.parametrize(("qtypes", "tokens"), [(("Q4_0", "Q4_0"), 1), (("Q6_K", "Q6_K"), 2), (("Q4_K", "Q6_K"), 3),
                                                (("Q5_1", "Q5_1"), 12), (("BF16", "BF16"), 1)])  # fmt: skip
@pytest.mark.parametrize("activation", ["silu", "gelu", "silu<20"])
def test_gate_up_is_the_bent_gate_times_up(
    kernels: cuda.CudaKernels, qtypes: tuple[str, str], tokens: int, activation: str
) -> None:
    rows, cols = 48, 512
    gate, gate_values = random_weight(qtypes[0], rows, cols, seed=14)
    up, up_values = random_weight(qtypes[1], rows, cols, seed=15)
    x = random_tensor(tokens, cols, seed=16) * 0.5
    both = poisoned(tokens, 2 * rows)
    kernels.gate_up(x, gate, up, both[:, :rows], both, NO_TILE, activation)
    g = numpy64(x) @ gate_values.T
    bent = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
    bent, u = bent if activation == "gelu" else g / (1 + np.exp(-g)), numpy64(x) @ up_values.T
    if activation == "silu<20":
        bent, u = bent.clip(max=20), u.clip(-20, 20)
    assert error(both[:, :rows], bent * u) < 0.03


@needs_kernels
@pytest.mark.parametrize(("qtypes", "tokens", "biased"), [
    (("Q4_0", "Q4_0", "Q4_0"), 1, False), (("Q4_0", "Q4_0", "Q4_0"), 3, True),
    (("Q4_K", "Q4_K", "Q6_K"), 2, True), (("Q5_0", "Q5_0"), 1, True),
    (("BF16", "BF16", "BF16"), 1, False), (("Q8_0", "Q8_0", "Q8_0"), 6, True),
    (("Q3_K", "Q3_K", "Q3_K"), 1, True), (("Q4_0", "Q4_0", "Q4_0"), 9, True)])  # fmt: skip
def test_a_group_is_its_members_side_by_side(
    kernels: cuda.CudaKernels, qtypes: tuple[str, ...], tokens: int, biased: bool
) -> None:
    cols, heights = 1024, (48, 16, 32)
    made = [random_weight(q, rows, cols, seed=40 + i) for i, (q, rows) in enumerate(zip(qtypes, heights, strict=False))]
    biases = tuple(random_tensor(w.rows, seed=50 + w.rows, dtype=torch.float32) if biased else None for w, _ in made)
    x, width = random_tensor(tokens, cols, seed=41), sum(w.rows for w, _ in made)
    wide = poisoned(tokens, width + 16)
    kernels.linear_group(x, tuple(w for w, _ in made), wide[:, :width], NO_TILE, biases)
    expected = [numpy64(x) @ v.T + (numpy64(b) if b is not None else 0) for (_, v), b in zip(made, biases, strict=True)]
    assert error(wide[:, :width], np.concatenate(expected, axis=1)) < 0.012
    assert torch.isnan(wide[:, width:]).all()


@needs_kernels
@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_what_is_handed_over_quantised_gives_the_same_bits(kernels: cuda.CudaKernels, tokens: int) -> None:
    weight, _ = random_weight("Q4_0", 32, 256, seed=60)
    gate, _ = random_weight("Q5_0", 64, 256, seed=61)
    narrow, _ = random_weight("Q4_0", 32, 64, seed=69)
    hidden = random_tensor(tokens, 256, seed=62, dtype=torch.float32)
    norm = random_tensor(256, seed=63, dtype=torch.float32)
    rows = rows_of([(0, tokens, 20)])
    kv = LayerKV(*(random_tensor(POOL, KV_BLOCK, 1, 64, seed=seed) for seed in (64, 65)))
    partial = poisoned(tokens, 4, ATTENTION_PIECES, 66, dtype=torch.float32)
    normed, mixed, both = poisoned(tokens, 256), poisoned(tokens, 256), poisoned(tokens, 512)
    qkv = random_tensor(tokens, 6 * 64, seed=66)

    def after(x: torch.Tensor) -> torch.Tensor:
        """The product with x as handed over, after checking that it equals the product with a copy of x."""
        assert kernels._activations.ready is not None and kernels._activations.ready[0].data_ptr() == x.data_ptr()
        first, second = poisoned(tokens, 32, dtype=torch.float32), poisoned(tokens, 32, dtype=torch.float32)
        matrix = weight if x.shape[1] == weight.cols else narrow
        kernels.linear(x, matrix, first, NO_TILE)
        kernels.linear(x.clone(), matrix, second, NO_TILE)
        assert not torch.isnan(first).any() and torch.equal(first, second)
        return first

    kernels.rms_norm(hidden, norm, 1e-5, normed)
    after(normed)
    kernels.attention(qkv, (4, 1, 64), kv, rows, 0.125, mixed, partial)
    after(mixed)
    kernels.gate_rows(mixed, random_tensor(tokens, 256, seed=70))
    after(mixed)
    kernels.scale_rows(mixed, hidden, norm)
    after(mixed)
    kernels.rms_norm(hidden, norm, 1e-5, normed)
    kernels.gate_up(normed, gate, gate, both[:, :64], both, NO_TILE)
    before = after(both[:, :64])
    kernels.gate_up(normed.clone(), gate, gate, both[:, :64], both, NO_TILE)
    assert torch.equal(after(both[:, :64]), before)


@needs_kernels
@pytest.mark.parametrize("shape", [(1, 64), (3, 1000), (70, 96)])
def test_rows_are_multiplied_by_the_sigmoid_of_their_gates(kernels: cuda.CudaKernels, shape: tuple[int, int]) -> None:
    tokens, cols = shape
    x, gate = (random_tensor(tokens, cols + 8, seed=seed)[:, :cols] for seed in (71, 72))
    expected = numpy64(x) / (1 + np.exp(-numpy64(gate)))
    kernels.gate_rows(x, gate)
    assert error(x, expected) < 0.01


@needs_kernels
@pytest.mark.parametrize("curve", ["sigmoid", "softplus"])
def test_heads_are_multiplied_by_a_curve_of_their_gates(kernels: cuda.CudaKernels, curve: str) -> None:
    x, gate = random_tensor(3, 104, seed=76)[:, :96], random_tensor(3, 14, seed=77)[:, :12]
    grown = np.exp(numpy64(gate))
    by = np.log1p(grown) if curve == "softplus" else grown / (1 + grown)
    expected = numpy64(x) * np.repeat(by, 8, axis=1)
    kernels.gate_rows(x, gate, curve)
    assert error(x, expected) < 0.01


@needs_kernels
@pytest.mark.parametrize("shape", [(1, 64), (3, 1000), (70, 96)])
def test_rows_are_multiplied_by_the_sigmoid_of_one_product_each(
    kernels: cuda.CudaKernels, shape: tuple[int, int]
) -> None:
    tokens, cols = shape
    x = random_tensor(tokens, cols + 8, seed=73)[:, :cols]
    hidden, weight = random_tensor(tokens, 200, seed=74, dtype=torch.float32), random_tensor(200, seed=75).float()
    expected = numpy64(x) / (1 + np.exp(-numpy64(hidden) @ numpy64(weight)))[:, None]
    kernels.scale_rows(x, hidden, weight)
    assert error(x, expected) < 0.01


@needs_kernels
@pytest.mark.parametrize("shape", [(1, 64), (3, 1000), (70, 96)])
def test_rows_lose_their_mean(kernels: cuda.CudaKernels, shape: tuple[int, int]) -> None:
    tokens, cols = shape
    wide = 3 + random_tensor(tokens, cols + 8, seed=76, dtype=torch.float32)
    x, beside = wide[:, :cols], wide[:, cols:].clone()
    expected = numpy64(x) - numpy64(x).mean(1, keepdims=True)
    kernels.centre_rows(x)
    assert error(x, expected) < 1e-6 and torch.equal(wide[:, cols:], beside)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", [*BENDS, "norm", "centred norm"])
def test_rows_are_bent_as_plain_kernels_bend_them(kernels: cuda.CudaKernels, how: str, dtype: torch.dtype) -> None:
    x = random_tensor(3, 1208, seed=78, dtype=dtype)[:, :1200]
    numbers, four = 1 + 0.3 * random_tensor(1200, seed=79).float(), torch.tensor([0.8, 1.7, 0.5, -0.01], device=DEVICE)
    order = torch.randperm(1200, generator=torch.Generator().manual_seed(1)).float().to(DEVICE)
    given = {"times": numbers[:400].clone(), "plus": numbers, "xielu": four, "order": order}.get(how)
    expected = x.float()
    for act, rows in ((PlainKernels(), expected), (kernels, x)):
        if how in BENDS:
            act.bend_rows(rows, how, given, 0.7 if how == "clamp" else 0.0)
        else:
            act.norm_heads(rows, numbers, 48, 1e-5, how == "centred norm")
    assert error(x, numpy64(expected)) < (1e-6 if dtype is torch.float32 else 0.01)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "q", "k"), [(1, 1536, 512), (3, 700, 500), (70, 96, 32)])
def test_heads_are_normalised_by_sums_of_squares(
    kernels: cuda.CudaKernels, tokens: int, q: int, k: int, dtype: torch.dtype
) -> None:
    wide = random_tensor(tokens, q + k + 8, seed=80, dtype=dtype)
    x, beside = wide[:, : q + k], wide[:, q + k :].clone()
    sums, expected = poisoned(tokens, 2, dtype=torch.float32), torch.empty(tokens, 2, device=DEVICE)
    kernels.sum_squares(x, q, sums)
    PlainKernels().sum_squares(x, q, expected)
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=0)
    weights, rows = 1 + 0.3 * random_tensor(q + k, seed=81).float(), x.float()
    for act, target in ((PlainKernels(), rows), (kernels, x)):
        act.norm_wide(target, weights[:q], weights[q:], 2 * sums, (2 * q, 3 * k), 1e-5)
    assert error(x, numpy64(rows)) < (1e-6 if dtype is torch.float32 else 0.01)
    assert torch.equal(wide[:, q + k :], beside)


@needs_kernels
def test_another_call_forgets_what_was_handed_over(kernels: cuda.CudaKernels) -> None:
    weight, values = random_weight("Q4_0", 32, 256, seed=67)
    hidden, norm = random_tensor(1, 256, seed=68, dtype=torch.float32), torch.ones(256, device=DEVICE)
    normed, out = poisoned(1, 256), poisoned(1, 32, dtype=torch.float32)
    kernels.rms_norm(hidden, norm, 1e-5, normed)
    kernels.linear(random_tensor(9, 256, seed=69), weight, poisoned(9, 32), NO_TILE)
    normed.copy_(hidden)
    kernels.linear(normed, weight, out, NO_TILE)
    assert error(out, numpy64(normed) @ values.T) < 0.012


@needs_kernels
@pytest.mark.parametrize("shape", [(1, 64), (5, 1000)])
def test_rms_norm(kernels: cuda.CudaKernels, shape: tuple[int, int]) -> None:
    hidden = random_tensor(*shape, seed=17, dtype=torch.float32)
    weight = random_tensor(shape[1], seed=18, dtype=torch.float32)
    out = poisoned(*shape)
    kernels.rms_norm(hidden, weight, 1e-5, out)
    h = numpy64(hidden)
    expected = h / np.sqrt((h**2).mean(1, keepdims=True) + 1e-5) * numpy64(weight)
    assert error(out, expected) < 0.005
    stream = random_tensor(*shape, seed=19, dtype=torch.float32)
    before = numpy64(stream)
    kernels.rms_norm(hidden, weight, 1e-5, stream, accumulate=True)
    assert error(stream, before + expected) < 1e-6
    kernels.rms_norm(hidden, weight, 1e-5, stream, True, scale=torch.tensor([0.7], device=DEVICE))
    assert error(stream, 0.7 * (before + 2 * expected)) < 1e-6


@needs_kernels
@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize("shape", [(1, 5376), (3, 1000), (4, 96), (70, 96)])
def test_inner_norms_and_the_norm_that_follows(kernels: cuda.CudaKernels, shape: tuple[int, int], parts: int) -> None:
    """As the norms apart, of plain kernels; what is left quantised too."""

    def random(seed: int, *size: int) -> torch.Tensor:
        return random_tensor(*size, seed=seed, dtype=torch.float32)

    (tokens, cols), eps, factor = shape, 1e-5, torch.tensor([0.7], device=DEVICE)
    both = tuple((random(90 + i, tokens, 2 * cols)[:, :cols], random(92 + i, cols)) for i in range(parts))
    x = poisoned(*shape, dtype=torch.float32) if parts else random(94, *shape)
    stream, before, normed = random(96, *shape), random(96, *shape), poisoned(*shape)
    wide, rounded = poisoned(*shape, dtype=torch.float32), poisoned(*shape)
    for scale in (None, factor):
        inner = InnerNorm(x.clone(), random(95, cols), eps, scale, both)
        following = random(97, cols), 1e-3
        kernels.add_normed(inner, stream, (*following, normed))
        PlainKernels().add_normed(inner, before, (*following, wide))
        assert error(stream, numpy64(before)) < 1e-6 and error(normed, numpy64(wide)) < 0.005
        if cols % 32 == 0 and tokens <= 64:
            assert kernels._activations.ready is not None and kernels._activations.ready[0] is normed
            weight, out = random_weight("Q4_0", 32, cols, seed=98)[0], poisoned(tokens, 32, dtype=torch.float32)
            kernels.linear(normed, weight, out, NO_TILE)
            fresh = poisoned(tokens, 32, dtype=torch.float32)
            kernels.linear(normed.clone(), weight, fresh, NO_TILE)
            assert torch.equal(out, fresh)
    stream.copy_(before)
    kernels.add_normed(inner, stream, (*following, wide), rounded)
    PlainKernels().add_normed(inner, before)
    assert error(stream, numpy64(before)) < 1e-6 and error(rounded, numpy64(wide)) < 0.005
    kernels.add_normed(inner, stream)
    PlainKernels().add_normed(inner, before)
    assert error(stream, numpy64(before)) < 1e-6


POOL = 14  # blocks of the caches below


def rows_of(segments: list[tuple[int, int, int]], block: int = KV_BLOCK) -> RowIndex:
    """(sequence, tokens, past) one after the other -> RowIndex, in blocks of POOL that lie in no order."""
    free = np.random.default_rng(len(segments)).permutation(POOL).tolist()
    parts, start = [], 0
    for sequence, tokens, past in segments:
        blocks = tuple(free.pop() for _ in range(0, past + tokens, block))
        parts.append(Segment(sequence, start, tokens, past, blocks))
        start += tokens
    return make_rows(parts, DEVICE)


def cells_of(rows: RowIndex, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of each row's own cell in a cache."""
    return rows.blocks[rows.begin + rows.position // block].long(), rows.position.long() % block


@needs_kernels
@pytest.mark.parametrize("pairing", ["halves", "adjacent"])
@pytest.mark.parametrize(("d", "dims", "normed"), [(64, 64, True), (48, 48, False), (64, 32, True)])
def test_rope_store_normalises_rotates_and_stores(
    kernels: cuda.CudaKernels, pairing: str, d: int, dims: int, normed: bool
) -> None:
    heads, groups, context, block = 6, 2, 12, 4
    rows = rows_of([(1, 3, 4), (0, 1, 9)], block)
    qkv = random_tensor(4, (heads + 2 * groups) * d, seed=19)
    angle = np.random.default_rng(20).uniform(-3, 3, (context, dims // 2)).astype(np.float32)
    rope = RopeTable(torch.from_numpy(np.cos(angle)).to(DEVICE), torch.from_numpy(np.sin(angle)).to(DEVICE), pairing)
    norms = [random_tensor(d, seed=s, dtype=torch.float32) if normed else None for s in (21, 22)]
    kv = LayerKV(poisoned(POOL, block, groups, d), poisoned(POOL, block, groups, d))
    x = numpy64(qkv).reshape(4, -1, d)
    kernels.rope_store(qkv, (heads, groups, d), norms[0], norms[1], 1e-6, rope, rows, kv, values=normed)

    def turned(part: np.ndarray, norm: torch.Tensor | None) -> np.ndarray:
        if norm is not None:
            part = part / np.sqrt((part**2).mean(-1, keepdims=True) + 1e-6) * numpy64(norm)
        result = part.copy()
        at = rows.position.cpu().numpy()
        c, s = np.cos(angle.astype(np.float64))[at][:, None], np.sin(angle.astype(np.float64))[at][:, None]
        pairs = (slice(0, dims, 2), slice(1, dims, 2)) if pairing == "adjacent" else \
            (slice(0, dims // 2), slice(dims // 2, dims))  # fmt: skip
        a, b = part[..., pairs[0]], part[..., pairs[1]]
        result[..., pairs[0]], result[..., pairs[1]] = a * c - b * s, b * c + a * s
        return result

    after = qkv.view(4, -1, d)
    assert error(after[:, :heads], turned(x[:, :heads], norms[0])) < 0.006
    cell = cells_of(rows, block)
    assert error(kv.k[cell], turned(x[:, heads : heads + groups], norms[1])) < 0.006
    v = x[:, heads + groups :]
    v = v / np.sqrt((v**2).mean(-1, keepdims=True) + 1e-6) if normed else v
    assert error(kv.v[cell], v) < (0.006 if normed else 1e-30)
    untouched = torch.ones(POOL, block, dtype=torch.bool, device=DEVICE)
    untouched[cell] = False
    assert torch.isnan(kv.k[untouched]).all() and torch.isnan(kv.v[untouched]).all()


@needs_kernels
@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
def test_queries_alone_are_turned_and_nothing_is_stored(kernels: cuda.CudaKernels, kind: str) -> None:
    heads, groups, d, rows = 4, 2, 64, rows_of([(1, 3, 4), (0, 1, 9)])
    qkv = random_tensor(4, (heads + 2 * groups) * d, seed=34)
    angle = torch.from_numpy(np.random.default_rng(35).uniform(-3, 3, (12, d // 2)).astype(np.float32))
    rope, norm = RopeTable(angle.cos().to(DEVICE), angle.sin().to(DEVICE), "halves"), random_tensor(d, seed=36).float()
    shape = StateShape(POOL * KV_BLOCK, 1, kind, kind)
    memory = torch.full((CellState(groups * d, kind, kind).nbytes(shape),), 77, dtype=torch.uint8, device=DEVICE)
    kv, alone = view_layer(memory, groups, d, shape), qkv[:, : heads * d].clone()
    kernels.rope_store(alone, (heads, 0, d), norm, None, 1e-6, rope, rows, kv)
    assert (memory == 77).all()
    kernels.rope_store(qkv, (heads, groups, d), norm, None, 1e-6, rope, rows, kv)
    assert torch.equal(alone, qkv[:, : heads * d])


@needs_kernels
def test_rows_are_multiplied_by_those_of_a_port(kernels: cuda.CudaKernels) -> None:
    wide = random_tensor(3, 104, seed=37)
    x, by = wide[:, :96], random_tensor(3, 200, seed=38, dtype=torch.float32)[:, 50:146]
    expected, beside = numpy64(x) * numpy64(by), wide[:, 96:].clone()
    kernels.times_rows(x, by)
    assert error(x, expected) < 0.006 and torch.equal(wide[:, 96:], beside)


MIXES = [("q8_0", "q8_0"), ("q8_0", "bf16"), ("f16", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0")]


@needs_kernels
@pytest.mark.parametrize("kv_types", MIXES)
@pytest.mark.parametrize(("groups", "d", "dims", "pairing"), [(2, 64, 64, "halves"), (3, 96, 64, "adjacent")])
def test_rope_store_quantises(
    kernels: cuda.CudaKernels, kv_types: tuple[str, str], groups: int, d: int, dims: int, pairing: str
) -> None:
    heads, context, rows = 4, 12, rows_of([(1, 3, 4), (0, 1, 9)])
    pool = POOL * KV_BLOCK
    qkv = random_tensor(4, (heads + 2 * groups) * d, seed=31)
    qkv[2, heads * d : heads * d + 32] = 0
    angle = torch.from_numpy(np.random.default_rng(32).uniform(-3, 3, (context, dims // 2)).astype(np.float32))
    rope = RopeTable(angle.cos().to(DEVICE), angle.sin().to(DEVICE), pairing)
    norm = random_tensor(d, seed=33, dtype=torch.float32)
    shape = StateShape(pool, 1, *kv_types)
    nbytes = CellState(groups * d, *kv_types).nbytes(shape)
    memory = torch.full((2, nbytes), 77, dtype=torch.uint8, device=DEVICE)
    got, expected = (view_layer(part, groups, d, shape) for part in memory)
    plain = qkv.float()
    values = d == 96
    PlainKernels().rope_store(plain, (heads, groups, d), None, norm, 1e-6, rope, rows, expected, values)
    kernels.rope_store(qkv, (heads, groups, d), None, norm, 1e-6, rope, rows, got, values)
    assert error(qkv[:, : heads * d], numpy64(plain[:, : heads * d])) < 0.006
    for kind, mine, other in zip(kv_types, (got.k, got.v), (expected.k, expected.v)):
        untouched = torch.ones(POOL, KV_BLOCK, dtype=torch.bool, device=DEVICE)
        untouched[cells_of(rows, KV_BLOCK)] = False
        assert (mine[untouched].contiguous().view(torch.uint8) == 77).all()
        a, b = decode_cells(mine[~untouched], d), decode_cells(other[~untouched], d)
        # keys are rounded to bfloat16 before they are quantised, which changes a code of 4 bits by a sixteenth
        assert error(a, numpy64(b)) < (0.04 if kind == "q4_0" else 0.01)
    if kv_types[1] == "q8_0" and not values:  # rounded once: the same codes, but for ties and scales on the edge
        assert (got.v.int() - expected.v.int()).abs().max() <= 1


def attention_reference(qkv: torch.Tensor, heads: tuple[int, int, int], kv: LayerKV, rows: RowIndex) -> np.ndarray:
    n, groups, d = heads
    q = numpy64(qkv).reshape(qkv.shape[0], -1, d)[:, :n]
    out = np.empty((qkv.shape[0], n, d))
    for s in rows.segments:
        k, v = (numpy64(decode_cells(gather_cells(c, s.blocks, s.past + s.tokens), d)) for c in (kv.k, kv.v))
        for m, cells in zip(range(s.start, s.start + s.tokens), range(s.past + 1, s.past + s.tokens + 1), strict=True):
            for h in range(n):
                scores = k[:cells, h // (n // groups)] @ q[m, h] / np.sqrt(d)
                p = np.exp(scores - scores.max())
                out[m, h] = p / p.sum() @ v[:cells, h // (n // groups)]
    return out.reshape(qkv.shape[0], n * d)


@needs_kernels
@pytest.mark.parametrize("heads", [(4, 2, 64), (8, 1, 80), (2, 2, 32)])
@pytest.mark.parametrize("segments", [[(0, 1, 0)], [(1, 1, 299), (0, 1, 4)], [(0, 70, 0)], [(1, 40, 23), (0, 35, 200)]])
def test_attention(
    kernels: cuda.CudaKernels, heads: tuple[int, int, int], segments: list[tuple[int, int, int]]
) -> None:
    n, groups, d = heads
    rows = rows_of(segments)
    qkv = random_tensor(rows.tokens, (n + 2 * groups) * d, seed=23)
    kv = LayerKV(*(random_tensor(POOL, KV_BLOCK, groups, d, seed=seed) for seed in (24, 25)))
    out = poisoned(rows.tokens, n * d)
    partial = poisoned(rows.tokens, n, ATTENTION_PIECES, d + 2, dtype=torch.float32) if rows.tokens <= 64 else None
    kernels.attention(qkv, heads, kv, rows, d**-0.5, out, partial)
    assert error(out, attention_reference(qkv, heads, kv, rows)) < 0.01


BESIDE_PROMPTS = [(3, 1, 299), (2, 1, 0), (0, 70, 3), (1, 1, 130)]


@needs_kernels
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("kv_types", [None, ("q8_0", "q8_0")])
def test_texts_with_one_token_beside_a_prompt_attend_as_few_rows(
    kernels: cuda.CudaKernels, kv_types: tuple[str, str] | None, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, groups, d = 4, 2, 64
    rows = replace(rows_of(BESIDE_PROMPTS), window=window)
    qkv = random_tensor(rows.tokens, (n + 2 * groups) * d, seed=37)
    numbers = [random_tensor(POOL, KV_BLOCK, groups, d, seed=38 + i) for i in range(2)]
    kv = LayerKV(*(encode_cells(x, KV_DTYPES[t]) for x, t in zip(numbers, kv_types)) if kv_types else numbers)
    sinks = random_tensor(n, seed=40, dtype=torch.float32)
    ran, real = list[tuple[int, int]](), attend.attend_rows
    monkeypatch.setattr(
        attend, "attend_rows", lambda qkv, h, kv, rows, *rest, **named: (
            ran.append((rows.tokens, rows.cells)), real(qkv, h, kv, rows, *rest, **named),
        ),
    )  # fmt: skip
    want = poisoned(rows.tokens, n * d)
    kernels.attention(qkv, (n, groups, d), kv, rows, d**-0.5, want, None, sinks)
    assert not ran
    got, partial = poisoned(rows.tokens, n * d), poisoned(64, n, ATTENTION_PIECES, d + 2, dtype=torch.float32)
    kernels.attention(qkv, (n, groups, d), kv, rows, d**-0.5, got, partial, sinks)
    assert ran == [(2, 300), (1, 131)]
    assert error(got, numpy64(want)) < 0.006 and torch.equal(got[2:72], want[2:72])


@needs_kernels
@pytest.mark.parametrize("kv_types", MIXES)
@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 1, 96)])
@pytest.mark.parametrize("segments", [[(1, 1, 299), (0, 1, 4)], [(1, 40, 23), (0, 35, 200)]])
def test_attention_over_quantised_cells(
    kernels: cuda.CudaKernels,
    heads: tuple[int, int, int],
    segments: list[tuple[int, int, int]],
    kv_types: tuple[str, str],
) -> None:
    n, groups, d = heads
    rows = rows_of(segments)
    qkv = random_tensor(rows.tokens, (n + 2 * groups) * d, seed=34)
    numbers = (random_tensor(POOL, KV_BLOCK, groups, d, seed=35 + i) for i in range(2))
    kv = LayerKV(*(encode_cells(x, KV_DTYPES[kind]) for x, kind in zip(numbers, kv_types, strict=True)))
    out = poisoned(rows.tokens, n * d)
    partial = poisoned(rows.tokens, n, ATTENTION_PIECES, d + 2, dtype=torch.float32) if rows.tokens <= 64 else None
    kernels.attention(qkv, heads, kv, rows, d**-0.5, out, partial)
    # with bfloat16 on either side the decoded numbers are rounded to that
    assert error(out, attention_reference(qkv, heads, kv, rows)) < (0.012 if "bf16" in kv_types else 0.007)


@needs_kernels
def test_a_launch_sized_for_a_long_context_serves_a_short_one(kernels: cuda.CudaKernels) -> None:
    heads, rows = (4, 2, 64), rows_of([(0, 1, 5), (1, 1, 130)])
    sized = replace(rows, cells=4096)
    qkv = random_tensor(2, 8 * 64, seed=26)
    kv = LayerKV(*(random_tensor(POOL, KV_BLOCK, 2, 64, seed=seed) for seed in (27, 28)))
    out, partial = poisoned(2, 256), poisoned(2, 4, ATTENTION_PIECES, 66, dtype=torch.float32)
    kernels.attention(qkv, heads, kv, sized, 0.125, out, partial)
    assert error(out, attention_reference(qkv, heads, kv, rows)) < 0.01


@needs_kernels
@pytest.mark.parametrize(("qtype", "scales", "at"), [("Q2_K", slice(0, 16), 80), ("Q3_K", slice(96, 108), 108)])
@pytest.mark.parametrize("tokens", [5, 16, 33])
def test_scales_multiplied_into_codes(
    kernels: cuda.CudaKernels, qtype: str, scales: slice, at: int, tokens: int
) -> None:
    """Least, greatest and any codes with least, greatest and any scales, times activations that int8 holds exactly."""
    rows, blocks, rng = 36, 3, np.random.default_rng(tokens)
    raw = rng.integers(0, 256, (rows, blocks, QUANT_TYPES[qtype].nbytes), dtype=np.uint8)
    kept = raw[:, :, scales].copy()
    raw[0::3], raw[1::3] = 0, 255
    raw[:, :, scales] = kept
    raw[0:12, :, scales], raw[12:24, :, scales] = 0, 255
    if qtype == "Q2_K":  # no minima: these meet the activations' sums at 11 bits
        raw[:, :, scales] &= 15
        raw[:, :, 82:84] = 0
    d = 2.0 ** rng.integers(-8, 8, (rows, blocks))
    raw[:, :, at : at + 2] = d.astype(np.float16)[..., None].view(np.uint8)
    data = pack_reference(raw.reshape(rows, -1), qtype, rows, 256 * blocks)
    values = unpack_reference(data, qtype, rows, 256 * blocks).astype(np.float64)
    codes, unit = rng.integers(-127, 128, (tokens, 8 * blocks, 32)) * 1.0, 2.0 ** rng.integers(-40, 40, (tokens, 1))
    codes[:, :, 0], codes[0], codes[1] = 127, 127, -127
    x = codes.reshape(tokens, -1) * unit
    out = poisoned(tokens, rows, dtype=torch.float32)
    weight = Packed(torch.from_numpy(data).to(DEVICE), qtype, rows, 256 * blocks)
    kernels.linear(torch.from_numpy(x).to(torch.bfloat16).to(DEVICE), weight, out, NO_TILE)
    # integer sums are exact, but start at 1.5 * 2^23: four of them are added up in units of up to 4
    assert (np.abs(numpy64(out) - x @ values.T) < 16 * unit * d.sum(axis=1)).all()


@needs_kernels
def test_runs_repeat_bit_for_bit(kernels: cuda.CudaKernels) -> None:
    weight, _ = random_weight("Q4_K", 48, 256, seed=29)
    for tokens in (1, 20):
        x = random_tensor(tokens, 256, seed=30)
        first, second = poisoned(tokens, 48, dtype=torch.float32), poisoned(tokens, 48, dtype=torch.float32)
        kernels.linear(x, weight, first, NO_TILE)
        kernels.linear(x, weight, second, NO_TILE)
        assert torch.equal(first, second)


@needs_kernels
@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="there are no CUDA graphs on the CPU")
def test_a_graph_replays_what_is_handed_over(kernels: cuda.CudaKernels) -> None:
    weight, _ = random_weight("Q4_0", 64, 2048, seed=70)
    down, _ = random_weight("Q4_0", 2048, 64, seed=71)
    hidden, norm = random_tensor(1, 2048, seed=72, dtype=torch.float32), torch.ones(2048, device=DEVICE)
    normed, both = poisoned(1, 2048), poisoned(1, 128)

    def run() -> None:
        kernels.rms_norm(hidden, norm, 1e-5, normed)
        kernels.gate_up(normed, weight, weight, both[:, :64], both, NO_TILE)
        kernels.linear(both[:, :64], down, hidden, NO_TILE, None, accumulate=True)

    run()
    start = hidden.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
    replayed = hidden.clone()
    hidden.copy_(start)
    for _ in range(3):
        run()
    assert not torch.isnan(hidden).any() and torch.equal(hidden, replayed)
