"""Row kernels of the CPU: RMS norm, rotation and cells as torch makes them; attention of many sequences at once."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import gguf
import numpy as np
import pytest
import torch
from planner_cases import make_model

from pshard.batch_sizes import SMALL_BATCH
from pshard.quant import packed_nbytes
from pshard.runtime.kernels.api import LayerKV, Packed, RopeTable, Segment
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.kernels.cpu.recording import record
from pshard.runtime.kernels.kv_codec import encode_cells
from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.kernels.row_index import make_rows
from pshard.runtime.memory.kv_cache import KV_DTYPES, view_layer
from pshard.units.kv_cells import CODED, KV_BLOCK, kv_blocks
from pshard.units.state import CellState, StateShape

pytestmark = pytest.mark.skipif(not native.is_available(), reason=f"no C++ library: {native.why_missing()}")
KV_TYPES = [("f32", "f32"), ("bf16", "bf16"), ("f16", "q8_0"), ("q8_0", "bf16"), ("q8_0", "q4_0")]


@pytest.fixture(params=(1, 3))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = native.threads()
    native.set_threads(request.param)
    yield request.param
    native.set_threads(before)


def make_cache(kv_types: tuple[str, str], kv_heads: int, dim: int, blocks: int) -> LayerKV:
    shape = StateShape(blocks * KV_BLOCK, 1, *kv_types)
    config = make_model(heads=kv_heads, kv_heads=kv_heads, head_dim=dim, d_model=kv_heads * dim).config
    law = CellState(config.n_kv_heads * config.head_dim, *kv_types)
    return view_layer(torch.full((law.nbytes(shape),), 7, dtype=torch.uint8), kv_heads, dim, shape)


@pytest.mark.parametrize(("tokens", "width"), [(1, 5120), (3, 40), (70, 2048), (2, 17)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_rms_norm_is_torchs(threads: int, tokens: int, width: int, accumulate: bool) -> None:
    torch.manual_seed(1)
    wide, weight = torch.randn(tokens, width + 5), torch.randn(width)
    out = torch.full((tokens, width + 3), torch.nan)
    want = torch.randn(tokens, width)
    out[:, :width] = want if accumulate else torch.nan
    scale = torch.tensor([0.7]) if accumulate else None
    PlainKernels().rms_norm(wide[:, :width], weight, 1e-6, want, accumulate, scale=scale)
    HostKernels().rms_norm(wide[:, :width], weight, 1e-6, out[:, :width], accumulate, scale=scale)
    torch.testing.assert_close(out[:, :width], want, rtol=2e-6, atol=1e-6)
    assert out[:, width:].isnan().all()


@pytest.mark.parametrize("kv_types", KV_TYPES)
@pytest.mark.parametrize("pairing", ["halves", "neighbours"])
@pytest.mark.parametrize(("norm", "turned"), [(True, 64), (False, 32)])
def test_rotation_and_cells_are_torchs(
    threads: int, kv_types: tuple[str, str], pairing: str, norm: bool, turned: int
) -> None:
    torch.manual_seed(2)
    n_heads, n_kv, dim = heads = 6, 2, 64
    segments = [Segment(0, 0, 3, 62, (4, 1)), Segment(1, 3, 1, 0, (3,)), Segment(2, 4, 90, 5, (0, 5))]
    rows, width = make_rows(segments), (n_heads + 2 * n_kv) * dim
    qkv = torch.randn(94, width + 16)
    weights = (torch.randn(dim), torch.randn(dim)) if norm else (None, None)
    angles = torch.randn(256, turned // 2)
    rope = RopeTable(angles.cos(), angles.sin(), pairing)
    found = []
    for kernels in (PlainKernels(), HostKernels()):
        ours, kv = qkv.clone(), make_cache(kv_types, n_kv, dim, 6)
        kernels.rope_store(ours[:, :width], heads, *weights, 1e-6, rope, rows, kv, values=norm)
        found.append((ours, kv))
    (want, cells), (got, ours) = found
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for kind, a, b in zip(kv_types, (cells.k, cells.v), (ours.k, ours.v), strict=True):
        if kind == "q8_0":  # a code may round the other way, a scale in its last bit
            near = (a.short() - b.short()).abs() <= 1
            assert near.all() and (a == b).float().mean() > 0.99
        elif kind == "q4_0":
            assert (a == b).float().mean() > 0.99
        else:
            torch.testing.assert_close(b, a, rtol=1e-2, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_queries_alone_are_turned_and_nothing_is_stored(kind: str) -> None:
    n_heads, dim, rows = 3, 64, make_rows([Segment(0, 0, 3, 62, (4, 1))])
    angles, norm, q = torch.randn(128, dim // 2), torch.randn(dim), torch.randn(3, n_heads * dim)
    rope, found = RopeTable(angles.cos(), angles.sin(), "halves"), []
    for kernels in (PlainKernels(), HostKernels()):
        kv, turned = make_cache((kind, kind), 2, dim, 6), q.clone()
        before = [part.clone() for part in (kv.k, kv.v)]
        kernels.rope_store(turned, (n_heads, 0, dim), norm, None, 1e-6, rope, rows, kv)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, (kv.k, kv.v)))
        found.append(turned)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16", "q8_0", "q4_0"])
def test_any_number_becomes_the_cell_that_torch_makes(kind: str) -> None:
    """Denormal, huge, halfway, infinite: values are stored as they come, without rotation."""
    dim = 64
    edges = [0.0, -0.0, 6e-8, 2.9e-8, 3e-8, 6.1e-5, 65504.0, 65519.9, 65520.0, 1e30, 1.00048828125, 1.0009765625, 1e-42]
    numbers = torch.tensor(edges + [-x for x in edges] + [1.0 + i / 4096 for i in range(38)])
    if kind not in CODED:
        numbers[-1], numbers[-2] = torch.inf, torch.nan
    else:
        numbers = numbers.clamp(-5e5, 5e5)
    qkv = torch.cat([torch.zeros(2 * dim), numbers])[None]
    kv = make_cache((kind, kind), 1, dim, 1)
    rope = RopeTable(torch.ones(64, 32), torch.zeros(64, 32), "halves")
    HostKernels().rope_store(qkv, (1, 1, dim), None, None, 1e-6, rope, make_rows([Segment(0, 0, 1, 9, (0,))]), kv)
    want = encode_cells(numbers.view(1, dim), KV_DTYPES[kind])
    found = kv.v[0, 9].view(want.shape)
    whole = torch.zeros_like(want, dtype=torch.bool) if kind in CODED else want.isnan()
    assert whole.sum() == (0 if kind in CODED else 1)
    assert torch.equal(found[~whole].view(torch.uint8), want[~whole].view(torch.uint8))
    assert found[whole].isnan().all()


SHORT = [(700, 1), (0, 5), (63, 1), (130, 0), (64, 2), (1000, 1)]  # cells before, new tokens
LONG = [(3000 + i, 20) for i in range(80)]  # partial sums of 38 MiB: more than one job


@pytest.mark.parametrize(
    ("kv_types", "spans"),
    [(("bf16", "bf16"), SHORT), (("q8_0",) * 2, SHORT), (("q4_0",) * 2, SHORT), (("f16",) * 2, LONG)],
)
def test_sequences_attended_together_get_the_bits_they_get_alone(
    threads: int, kv_types: tuple[str, str], spans: list[tuple[int, int]]
) -> None:
    rng = np.random.default_rng(3)
    torch.manual_seed(3)
    heads, dim, kv_heads = 8, 64, 2
    n_blocks = sum(-(-(before + new) // KV_BLOCK) for before, new in spans)
    order = rng.permutation(n_blocks).astype(np.int32)
    cells = [encode_cells(torch.randn(n_blocks * KV_BLOCK, kv_heads, dim), KV_DTYPES[k]) for k in kv_types]
    tokens = sum(new for _, new in spans)
    q = torch.randn(tokens, heads * dim + 24)
    segments, row, block = [], 0, 0
    for before, new in spans:
        segments.append((row, new, before, block))
        row, block = row + new, block + -(-(before + new) // KV_BLOCK)
    together, alone = torch.full((2, tokens, heads * dim + 8), torch.nan)
    shape = (heads, kv_heads, dim), 0.3
    blocks, strides = (order, KV_BLOCK), (q.stride(0), heads * dim + 8)
    native.attention(q, *cells, kv_types, segments, *shape, together, strides=strides, blocks=blocks)
    for segment in segments:
        native.attention(q, *cells, kv_types, [segment], *shape, alone, strides=strides, blocks=blocks)
    assert together[:, : heads * dim].isfinite().all() and together[:, heads * dim :].isnan().all()
    torch.testing.assert_close(together, alone, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("tokens", "width"), [(1, 5120), (3, 40), (70, 2048), (2, 17), (0, 16)])
def test_biases_gates_and_temperatures_are_torchs(threads: int, tokens: int, width: int) -> None:
    torch.manual_seed(4)
    wide, gate, hidden = torch.randn(tokens, width + 5), 9 * torch.randn(tokens, width + 3), torch.randn(tokens, 99)
    bias, weight, table = torch.randn(width), torch.randn(99), 1 + torch.rand(50)
    position = torch.randint(0, 50, (tokens,), dtype=torch.int32)
    work = {
        "gate_rows": lambda k, x: k.gate_rows(x, gate[:, :width]),
        "softplus": lambda k, x: k.gate_rows(x, gate[:, :width], "softplus"),
        "times_rows": lambda k, x: k.times_rows(x, gate[:, :width]),
        "scale_rows": lambda k, x: k.scale_rows(x, hidden, weight),
        "warm_rows": lambda k, x: k.warm_rows(x, table, position),
        "centre_rows": lambda k, x: k.centre_rows(x),
        "place": lambda k, x: k.place(gate[:, :width], x),
        "add_rows": lambda k, x: k.add_rows(x, gate[:, :width]),
        "clamp": lambda k, x: k.bend_rows(x, "clamp", limit=0.5),
        "relu2": lambda k, x: k.bend_rows(x, "relu2"),
        "gelu": lambda k, x: k.bend_rows(x, "gelu"),
        "xielu": lambda k, x: k.bend_rows(x, "xielu", torch.tensor([0.8, 1.7, 0.5, -0.01])),
    }
    if width % 8 == 0:  # a gate for each eight
        for curve in ("sigmoid", "softplus"):
            work[f"{curve} of eight"] = lambda k, x, curve=curve: k.gate_rows(x, gate[:, : width // 8], curve)
    for kind in ("silu", "gelu", "relu", "silu<0.5"):
        work[kind] = lambda k, x, kind=kind: k.gate_mul(x, gate[:, :width], x, kind)
        work[f"{kind} of another"] = lambda k, x, kind=kind: k.gate_mul(gate[:, :width], gate[:, :width], x, kind)
    order = torch.randperm(width).float()
    work["order"] = lambda k, x: k.bend_rows(x, "order", order)
    for how in ("times", "plus"):
        work[how] = lambda k, x, how=how: k.bend_rows(x, how, bias)
        if width % 8 == 0:
            work[f"{how} again"] = lambda k, x, how=how: k.bend_rows(x, how, table[:8])
    for centred in (False, True) if width % 8 == 0 else ():
        work[f"norm_heads {centred}"] = lambda k, x, centred=centred: k.norm_heads(x, bias, 8, 1e-5, centred)
    if width > 2:  # some columns are q's
        sums, n = torch.rand(tokens, 2), width // 3
        norm = lambda k, x: k.norm_wide(x, bias[:n], bias[n:], sums, (2 * n, 7), 1e-5)  # noqa: E731
        work["norm_wide"] = norm
    for name, act in work.items():
        got = wide.clone()
        want = wide[:, :width].clone()
        act(PlainKernels(), want)
        act(HostKernels(), got[:, :width])
        torch.testing.assert_close(got[:, :width], want, rtol=3e-6, atol=1e-6, msg=name)
        assert torch.equal(got[:, width:], wide[:, width:])
    got, want, weights = wide.clone(), wide[:, :width].clone(), table[position.long()][:, None]
    for kernels, x in ((PlainKernels(), want), (HostKernels(), got[:, :width])):
        kernels.weigh_rows(x, own := weights.clone())
        assert (own == 1).all()
    assert torch.equal(got[:, :width], want) and torch.equal(got[:, width:], wide[:, width:])
    got = wide.clone()
    native.add_bias(got, (tokens, width), got.stride(0), bias)
    assert torch.equal(got[:, :width], wide[:, :width] + bias)


@pytest.mark.parametrize(("tokens", "width", "first"), [(1, 5, 3), (3, 200, 160), (70, 1200, 1000)])
def test_squares_of_two_parts_are_added_up(threads: int, tokens: int, width: int, first: int) -> None:
    x, got, want = torch.randn(tokens, width + 3)[:, :width], torch.empty(tokens, 2), torch.empty(tokens, 2)
    HostKernels().sum_squares(x, first, got)
    PlainKernels().sum_squares(x, first, want)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("inner", "outer"), [(48, 32), (32, 48), (5, 5)])
def test_heads_are_cut_or_filled_with_zeros(threads: int, inner: int, outer: int) -> None:
    x = torch.randn(70, 6 * inner + 3)[:, : 6 * inner]
    got, want = torch.full((70, 6 * outer + 2), torch.nan), torch.empty(70, 6 * outer)
    HostKernels().resize_heads(x, got[:, : 6 * outer], 6, 0.707)
    PlainKernels().resize_heads(x, want, 6, 0.707)
    assert torch.equal(got[:, : 6 * outer], want) and got[:, 6 * outer :].isnan().all()
    rest = want.view(70, 6, outer)[..., inner:]
    assert not rest.any() and torch.equal(
        want.view(70, 6, outer)[..., :inner], 0.707 * x.reshape(70, 6, inner)[..., :outer]
    )


def test_a_gate_that_is_no_number_makes_none() -> None:
    x, gate = torch.ones(1, 33), torch.zeros(1, 33)
    gate[0, [0, 20, 32]] = torch.nan
    gate[0, [1, 21]], gate[0, [2, 22]] = torch.inf, -torch.inf
    HostKernels().gate_rows(x, gate)
    assert x[0, [0, 20, 32]].isnan().all() and (x[0, [3, 30]] == 0.5).all()
    assert (x[0, [1, 21]] == 1).all() and (x[0, [2, 22]] < 1e-30).all()


def test_temperatures_are_those_of_the_positions_when_the_call_is_made() -> None:
    x, table, position = torch.ones(2, 32), torch.arange(8.0), torch.tensor([1, 2], dtype=torch.int32)
    calls = record(lambda: HostKernels().warm_rows(x, table, position))
    position.copy_(torch.tensor([3, 7]))
    calls.replay()
    assert x[:, 0].tolist() == [3, 14]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 300])
def test_attention_has_the_same_bits_however_a_text_is_cut_into_steps(dtype: torch.dtype, window: int) -> None:
    tokens, shape = 700, (8, 2, 32)
    blocks = kv_blocks(tokens, 1)
    made = torch.Generator().manual_seed(1)
    kv = LayerKV(*(torch.randn(blocks, KV_BLOCK, 2, 32, generator=made).to(dtype) for _ in range(2)))
    qkv, kernels = torch.randn(tokens, 12 * 32, generator=made), HostKernels()

    def attend(cuts: list[int]) -> torch.Tensor:
        out = torch.empty(tokens, 8 * 32)
        for start, end in pairwise([0, *cuts, tokens]):
            held = tuple(range(-(-end // KV_BLOCK)))
            rows = replace(make_rows([Segment(0, 0, end - start, start, held)]), window=window)
            kernels.attention(qkv[start:end], shape, kv, rows, 32**-0.5, out[start:end], None)
        return out

    whole = attend([])
    for cuts in ([64, 128, 513], [1, 2, 3, 300, 365, 430], list(range(650, 700)), list(range(7, 700, 77))):
        assert torch.equal(attend(cuts), whole)


@pytest.mark.parametrize("qtype", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_a_row_of_a_product_has_the_same_bits_beside_others(qtype: str) -> None:
    if native.tiles():
        pytest.skip("from 9 or 17 rows on this machine's matrix unit computes them, in another order")
    raw = gguf.quants.quantize(
        np.random.default_rng(0).standard_normal((96, 256), np.float32), gguf.GGMLQuantizationType[qtype]
    )
    packed = np.empty(packed_nbytes(qtype, 96, 256), np.uint8)
    native.pack(raw.view(np.uint8), qtype, 96, 256, packed)
    weight = Packed(torch.from_numpy(packed), qtype, 96, 256)
    x, kernels, none = torch.randn(SMALL_BATCH, 256), HostKernels(), torch.empty(0, dtype=torch.uint8)
    alone = torch.empty(SMALL_BATCH, 96)
    for i in range(SMALL_BATCH):
        kernels.linear(x[i : i + 1], weight, alone[i : i + 1], none)
    for n in (2, 9, 17, 64):
        out = torch.empty(n, 96)
        kernels.linear(x[:n], weight, out, none)
        assert torch.equal(out, alone[:n])
