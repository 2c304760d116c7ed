"""Latent attention's kernels of the CPU give what plain torch gives, and may be recorded and replayed."""

from collections.abc import Iterator

import pytest
import torch
from random_weights import random_weight

from pshard.runtime.kernels.api import RopeTable, RowIndex, Segment
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.kernels.cpu.recording import record
from pshard.runtime.kernels.kv_codec import decode_cells
from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.kernels.row_index import list_spans, make_rows
from pshard.runtime.memory.kv_cache import view_cells
from pshard.units.kv_cells import KV_BLOCK
from pshard.units.state import LatentState, StateShape

pytestmark = pytest.mark.skipif(not native.is_available(), reason=f"no C++ library: {native.why_missing()}")
HEADS, RANK, ROPE = 5, 96, 32
WIDTH = RANK + ROPE
SEGMENTS = (Segment(0, 0, 3, 62, (4, 1)), Segment(1, 3, 1, 0, (3,)), Segment(2, 4, 30, 5, (0, 5)))


@pytest.fixture(params=(1, 3))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = native.threads()
    native.set_threads(request.param)
    yield request.param
    native.set_threads(before)


def make_cells(kind: str) -> torch.Tensor:
    shape = StateShape(6 * KV_BLOCK, 1, kind, kind)
    return view_cells(torch.full((LatentState(WIDTH, kind).nbytes(shape),), 7, dtype=torch.uint8), WIDTH, shape)


@pytest.mark.parametrize(("qtype", "rows"), [("Q4_0", 48), ("Q8_0", 64), ("Q6_K", 32), ("F32", 20), ("BF16", 36)])
@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_each_head_is_multiplied_by_its_own_matrix(threads: int, qtype: str, rows: int, tokens: int) -> None:
    torch.manual_seed(0)
    cols = 256 if qtype == "Q6_K" else 96
    stack, _ = random_weight(qtype, HEADS * rows, cols, 1)
    stack = type(stack)(stack.data.cpu(), qtype, HEADS * rows, cols)
    x = torch.randn(tokens, HEADS, cols + 16)[..., 8 : cols + 8]
    out, want = torch.full((tokens, HEADS, rows + 3), torch.nan), torch.empty(tokens, HEADS, rows)
    PlainKernels().head_products(x, stack, want)
    HostKernels().head_products(x, stack, out[..., :rows])
    assert (out[..., :rows] - want).abs().max() < (1e-4 if qtype in ("F32", "BF16") else 0.06) * want.std()
    assert out[..., rows:].isnan().all()


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16", "q8_0"])
@pytest.mark.parametrize("pairing", ["halves", "adjacent"])
def test_latents_are_normed_keys_turned_and_both_stored(threads: int, kind: str, pairing: str) -> None:
    torch.manual_seed(1)
    rows = make_rows(SEGMENTS)
    angle = torch.rand(128, ROPE // 2)
    rope, norm = RopeTable(angle.cos(), angle.sin(), pairing), torch.rand(RANK)
    kv, q = torch.randn(rows.tokens, WIDTH + 4)[:, :WIDTH], torch.randn(rows.tokens, HEADS, 64 + ROPE)[..., 64:]
    found = []
    for kernels in (PlainKernels(), HostKernels()):
        cells, out = make_cells(kind), torch.zeros(rows.tokens, HEADS, WIDTH)
        kernels.store_latent(kv, q, out[..., RANK:], norm, 1e-6, rope, rows, cells)
        found.append((out, decode_cells(cells, WIDTH).nan_to_num(0.0, 0.0, 0.0)))
    (want, want_cells), (out, cells) = found
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    close = {"f32": 1e-5, "f16": 2e-3, "bf16": 0.02, "q8_0": 0.05}[kind]
    torch.testing.assert_close(cells, want_cells, rtol=close, atol=close)


def test_calls_of_latents_are_recorded_and_repeat_with_new_numbers() -> None:
    torch.manual_seed(2)
    kernels, cells = HostKernels(), make_cells("bf16")
    made = make_rows((Segment(0, 0, 1, 70, (4, 1)),))
    rows = RowIndex(
        made.begin, made.position, made.blocks, made.segments, 71, native.make_spans(list_spans(made.segments))
    )
    angle = torch.rand(128, ROPE // 2)
    rope, norm = RopeTable(angle.cos(), angle.sin(), "adjacent"), torch.rand(RANK)
    (key_b, _), (value_b, _) = random_weight("Q8_0", HEADS * RANK, 64, 3), random_weight("Q8_0", HEADS * 48, RANK, 4)
    kv, q, values = torch.randn(1, WIDTH), torch.randn(1, HEADS, 64 + ROPE), torch.empty(1, HEADS, 48)
    absorbed, mixed = torch.zeros(2, 1, HEADS, WIDTH)
    decode_cells(cells, WIDTH)

    def work(by: PlainKernels = kernels) -> None:
        by.head_products(q[..., :64], key_b, absorbed[..., :RANK])
        by.store_latent(kv, q[..., 64:], absorbed[..., RANK:], norm, 1e-6, rope, rows, cells)
        by.attend_latent(absorbed, RANK, cells, rows, 0.1, mixed, None)
        by.head_products(mixed[..., :RANK], value_b, values)

    cells.fill_(0.5)
    calls = record(work)
    assert calls is not None
    q.normal_()
    kv.normal_()
    calls.replay()
    got = values.clone()
    work(PlainKernels())
    assert (got - values).abs().max() < 0.05 * values.std()
