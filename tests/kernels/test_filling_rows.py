"""Rows that only fill a micro-batch leave no trace, and change no bit of the others: each of the GPU's kernels that
keeps something of a row. On a GPU where there is one, else in Triton's interpreter (a process of its own)."""

import os
from dataclasses import replace

import pytest
import torch
from interpreted import expect_interpreted_to_pass, mend_interpreter
from random_weights import DEVICE, random_tensor, random_weight

pytest.importorskip("triton", reason="Triton is installed with the CUDA build of torch only")
READY = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
needs_kernels = pytest.mark.skipif(not READY, reason="runs inside test_filling_rows_in_the_interpreter")

from pshard.model_config import Experts  # noqa: E402
from pshard.runtime.kernels.api import ExpertWeights, LayerKV, Packed, RopeTable, Routes, RowIndex, Segment  # noqa: E402
from pshard.runtime.kernels.gpu.cuda import CudaKernels  # noqa: E402
from pshard.runtime.kernels.gpu.experts.sorted_pairs import sort_pairs  # noqa: E402
from pshard.runtime.kernels.kv_codec import encode_cells  # noqa: E402
from pshard.runtime.kernels.row_index import make_rows  # noqa: E402
from pshard.runtime.memory.kv_cache import KV_DTYPES  # noqa: E402
from pshard.units.kv_cells import KV_BLOCK  # noqa: E402

if READY and DEVICE == "cpu":
    mend_interpreter()

SEGMENTS = (Segment(0, 0, 1, 70, (4, 2)), Segment(1, 1, 2, 5, (3,)))
ROWS, FILLED = 3, 4


@pytest.mark.slow
@pytest.mark.skipif(READY, reason="the kernels run here directly")
def test_filling_rows_in_the_interpreter() -> None:
    expect_interpreted_to_pass(__file__)


@pytest.fixture(scope="module")
def kernels() -> CudaKernels:
    return CudaKernels(DEVICE, 64)


def both_indexes() -> tuple[RowIndex, RowIndex]:
    """The index of the segments, and the same with a row more that only fills."""
    rows = make_rows(SEGMENTS, DEVICE)
    more = torch.ones(FILLED - ROWS, dtype=torch.int32, device=DEVICE)
    return rows, replace(rows, begin=torch.cat([rows.begin, -more]), position=torch.cat([rows.position, 0 * more]))


def poison(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def with_poison(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, poison(FILLED - ROWS, *x.shape[1:], dtype=x.dtype)])


@needs_kernels
@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
@pytest.mark.parametrize("window", [0, 8])
def test_they_store_no_keys_and_values_and_others_attend_alike(kernels: CudaKernels, kind: str, window: int) -> None:
    heads, (rows, filled) = (4, 2, 64), both_indexes()
    angle = torch.rand(100, 24, device=DEVICE)
    rope, qkv = RopeTable(angle.cos(), angle.sin(), "halves"), random_tensor(ROWS, 8 * 64, seed=1)
    pool = encode_cells(random_tensor(6, KV_BLOCK, 2, 64, seed=2), KV_DTYPES[kind])
    found = []
    for index, x in ((rows, qkv.clone()), (filled, with_poison(qkv))):
        index, kv = replace(index, window=window), LayerKV(pool.clone(), pool.clone())
        kernels.rope_store(x, heads, None, None, 1e-6, rope, index, kv)
        out, n = poison(x.shape[0], 256), x.shape[0]
        partial = poison(FILLED * 64, 4, 66, dtype=torch.float32)[: n * 64]
        kernels.attention(x, heads, kv, index, 0.125, out, partial)
        found.append((kv.k.view(torch.uint8), kv.v.view(torch.uint8), out[:ROWS]))
    assert all(torch.equal(one, other) for one, other in zip(*found))
    assert (found[0][0] != pool.view(torch.uint8)).any() and not found[0][2].isnan().any()


@needs_kernels
@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
def test_they_store_no_latents(kernels: CudaKernels, kind: str) -> None:
    rank, rope_dims, n_heads = 96, 32, 4
    angle, width = torch.rand(100, rope_dims // 2, device=DEVICE), rank + rope_dims
    rope, norm = RopeTable(angle.cos(), angle.sin(), "adjacent"), torch.rand(rank, device=DEVICE) + 0.5
    pool = encode_cells(random_tensor(6, KV_BLOCK, 1, width, seed=3), KV_DTYPES[kind])
    kv, q = random_tensor(ROWS, width, seed=4), random_tensor(ROWS, n_heads, rope_dims, seed=5)
    absorbed, found = random_tensor(ROWS, n_heads, width, seed=6), []
    rows, filled = both_indexes()
    for index, more in ((rows, torch.clone), (filled, with_poison)):
        cells, own, heads = pool.clone(), more(kv), more(absorbed)
        kernels.store_latent(own, more(q), heads[..., rank:], norm, 1e-6, rope, index, cells)
        out, partial = torch.empty_like(heads), poison(64 * FILLED, n_heads, rank + 2, dtype=torch.float32)
        kernels.attend_latent(heads, rank, cells, index, 0.1, out, partial)
        found.append((cells.view(torch.uint8), out[:ROWS, :, :rank]))
    assert torch.equal(found[0][0], found[1][0]) and (found[0][0] != pool.view(torch.uint8)).any()
    torch.testing.assert_close(*(out.float() for _, out in found), rtol=0.01, atol=0.01)


@needs_kernels
@pytest.mark.parametrize(("tokens", "more"), [(3, 1), (6, 2), (12, 20)])
def test_they_take_no_expert(kernels: CudaKernels, tokens: int, more: int) -> None:
    """By pairs and sorted; a launch before has left tiles of other routes."""
    rule, d, inner = Experts(8, 2, 32), 64, 32
    router = random_tensor(8, d, seed=7, dtype=torch.float32)
    packed = Packed(router.flatten().view(torch.uint8), "F32", 8, d)
    stacks = [[random_weight("Q8_0", *shape, seed=10 * i + e)[0] for e in range(8)]
              for i, shape in enumerate(((inner, d), (inner, d), (d, inner)))]  # fmt: skip
    addresses = torch.tensor([[one.data.data_ptr() for one in stack] for stack in stacks], device=DEVICE)
    weights = ExpertWeights(tuple(stacks[0]), tuple(stacks[1]), tuple(stacks[2]), addresses)
    x = random_tensor(tokens, d, seed=8, dtype=torch.float32)
    total = tokens + more
    scratch = {
        "gated": poison(2 * total, inner), "picked": poison(2 * total, d), "normed": poison(total, d),
        "order": torch.zeros(8 * total + 32, dtype=torch.int32, device=DEVICE),
    }  # fmt: skip

    def run(x: torch.Tensor, begin: torch.Tensor) -> tuple[torch.Tensor, Routes]:
        n = x.shape[0]
        routes = Routes(torch.full((n, 2), 99, dtype=torch.int32, device=DEVICE), torch.zeros(n, 2, device=DEVICE))
        out = torch.ones(n, d, device=DEVICE)
        kernels.route(x, packed, rule, routes, begin=begin)
        named = {**scratch, "normed": scratch["normed"][:n]}
        kernels.experts(x.contiguous(), routes, weights, rule, out, named, True)
        return out, routes

    own = torch.arange(total, dtype=torch.int32, device=DEVICE)
    whole = torch.cat([x, random_tensor(more, d, seed=9, dtype=torch.float32)])
    expected, wanted = run(whole, own)
    own[tokens:] = -1
    whole[tokens:] = float("nan")
    got, routes = run(whole, own)
    assert routes.ids[tokens:].tolist() == [[-1, -1]] * more and torch.equal(routes.ids[:tokens], wanted.ids[:tokens])
    assert torch.equal(got[:tokens], expected[:tokens])
    assert (got[tokens:] == 1).all() and (expected[tokens:] != 1).any()


@needs_kernels
def test_no_tile_of_a_launch_before_is_left_where_theirs_would_be(kernels: CudaKernels) -> None:
    ids = torch.full((40, 2), -1, dtype=torch.int32)
    ids[:3] = torch.tensor([[0, 3], [3, 5], [3, 7]])
    routes, memory = Routes(ids.to(DEVICE), torch.ones(40, 2)), torch.full((512,), 6, dtype=torch.int32, device=DEVICE)
    found = sort_pairs(routes, torch.ones(3, 8, dtype=torch.int64, device=DEVICE), memory, 64)
    experts, first, end = found.tiles.view(3, found.slots).tolist()
    tiles = {expert: (at, to) for expert, at, to in zip(experts, first, end) if expert >= 0}
    assert sorted(e for e in experts if e >= 0) == [0, 3, 5, 7]
    pairs = {expert: found.order[at:to].tolist() for expert, (at, to) in tiles.items()}
    assert pairs == {0: [0], 3: [1, 2, 4], 5: [3], 7: [5]}
