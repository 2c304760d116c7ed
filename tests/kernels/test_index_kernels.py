"""An index of cells: tokens leave the same whoever comes with them, and all devices choose what plain torch does."""

import importlib.util
import os

import pytest
import torch
from interpreted import expect_interpreted_to_pass, mend_interpreter
from random_weights import DEVICE

from pshard.runtime.kernels.api import Kernels, RopeTable, RowIndex, Segment
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.kernels.row_index import make_rows
from pshard.units.kv_cells import KV_BLOCK

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = pytest.mark.skipif(not HAS_TRITON or not (INTERPRETED or DEVICE == "cuda"), reason="runs in the interpreter")
HEADS, HEAD, TURNED, POOL = 4, 32, 16, 24
PARTS = {
    "one token": [(1, 0)],
    "tokens": [(1, 700), (1, 63), (1, 127), (1, 3)],
    "some": [(5, 126), (2, 0), (4, 191)],
    "prompts": [(70, 0), (10 if INTERPRETED else 90, 380)],  # which goes on within a block, and begins another
}

if INTERPRETED:
    mend_interpreter()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON or INTERPRETED or DEVICE == "cuda", reason="Triton's kernels run here directly")
def test_the_kernels_of_gpus_in_the_interpreter() -> None:
    expect_interpreted_to_pass(__file__, "kernels_of_gpus")


def make_rows_of(parts: list[tuple[int, int]], device: str) -> RowIndex:
    """Rows over blocks in no order."""
    free = torch.randperm(POOL, generator=torch.Generator().manual_seed(7)).tolist()
    segments, start = list[Segment](), 0
    for number, (tokens, past) in enumerate(parts):
        held = tuple(free.pop() for _ in range(0, past + tokens, KV_BLOCK))
        segments.append(Segment(number, start, tokens, past, held))
        start += tokens
    return make_rows(segments, device)


def draw(*shape: int, seed: int, device: str) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def make_rope(device: str) -> RopeTable:
    angle = torch.arange(1024)[:, None] * 100.0 ** (-torch.arange(TURNED // 2) / (TURNED // 2))
    return RopeTable(angle.cos().to(device), angle.sin().to(device), "halves")


def store(kernels: Kernels, rows: RowIndex, each: int, device: str, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The queries and the index after a micro-batch."""
    kind = kernels.act_dtype
    q, key = (
        draw(rows.tokens, HEADS * HEAD, seed=seed, device=device),
        draw(rows.tokens, HEAD, seed=seed + 1, device=device),
    )
    index = draw(POOL, KV_BLOCK, HEAD, seed=3, device=device)
    norms = draw(HEAD, seed=4, device=device), draw(HEAD, seed=5, device=device)
    q = q.to(torch.bfloat16).to(kind)
    kernels.store_index(
        q, key.to(torch.bfloat16).to(kind), norms, each, 1e-6, rope=make_rope(device), rows=rows, index=index
    )
    return q, index


def choose(
    kernels: Kernels, q: torch.Tensor, index: torch.Tensor, rows: RowIndex, rule: tuple[int, int]
) -> torch.Tensor:
    """Bits of the cells that each row may see, others are cleared."""
    device = q.device
    seen = torch.full((rows.tokens, POOL), 77, dtype=torch.int32, device=device)
    scores = torch.empty(3, POOL * KV_BLOCK // rule[0], device=device)
    kernels.choose_cells(q, index, rule, rows, scores, seen)
    cells = torch.arange(POOL * KV_BLOCK, device=device)
    bits = seen[:, cells // KV_BLOCK] >> (cells % KV_BLOCK // rule[0]) & 1
    return bits.bool() & (cells <= rows.position[:, None])


@pytest.mark.parametrize("each", [2, 4, 16])
def test_tokens_one_by_one_leave_the_index_that_a_prompt_leaves(each: int) -> None:
    kernels, (tokens, past) = PlainKernels(), (45, 30)
    whole = make_rows_of([(tokens, past)], "cpu")
    held = whole.segments[0].blocks
    norms, rope = (draw(HEAD, seed=4, device="cpu"), draw(HEAD, seed=5, device="cpu")), make_rope("cpu")
    key, found = draw(tokens, HEAD, seed=2, device="cpu"), []
    for step in (tokens, 7, 1):
        index = draw(POOL, KV_BLOCK, HEAD, seed=3, device="cpu")
        for first in range(0, tokens, step):
            own = key[first : first + step]
            rows = make_rows([Segment(0, 0, len(own), past + first, held)])
            kernels.store_index(own.repeat(1, HEADS), own, norms, each, 1e-6, rope=rope, rows=rows, index=index)
        found.append(index)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("rule", [(4, 5), (16, 3), (2, 40), (4, 1000)], ids=str)
@pytest.mark.parametrize("parts", PARTS.values(), ids=list(PARTS))
@pytest.mark.parametrize("kernels", [PlainKernels(), HostKernels()], ids=["plain", "host"])
def test_the_best_complete_blocks_and_a_tokens_own_are_chosen(kernels, parts, rule: tuple[int, int]) -> None:
    rows = make_rows_of(parts, "cpu")
    q, index = store(kernels, rows, rule[0], "cpu")
    found = choose(kernels, q, index, rows, rule)
    for s in rows.segments:
        places = torch.tensor(s.blocks)
        keys = index[places].flatten(0, 1)[rule[0] - 1 :: rule[0]]
        for row in range(s.tokens):
            complete = (s.past + row + 1) // rule[0]
            heads = q[s.start + row].view(HEADS, HEAD) @ keys[:complete].T
            best = heads.clamp(min=0).sum(0).argsort(descending=True, stable=True)[: rule[1]].tolist()
            cells = [block * rule[0] + i for block in best for i in range(rule[0])]
            cells += range(complete * rule[0], s.past + row + 1)
            assert found[s.start + row].nonzero()[:, 0].tolist() == sorted(cells)


@ON_GPU
@pytest.mark.parametrize("rule", [(4, 5), (16, 3), (2, 40), (4, 1000)], ids=str)
@pytest.mark.parametrize("parts", PARTS.values(), ids=list(PARTS))
def test_kernels_of_gpus_choose_what_plain_torch_does(monkeypatch, parts, rule: tuple[int, int]) -> None:
    from pshard.runtime.kernels.gpu import index_on_gpu
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    kernels, rows = CudaKernels(DEVICE, 64), make_rows_of(parts, DEVICE)
    q, index = store(kernels, rows, rule[0], DEVICE)
    expected = store(PlainKernels(), rows, rule[0], DEVICE)
    assert (q.float() - expected[0]).abs().max() < 0.02 * expected[0].abs().max()
    assert (index - expected[1]).abs().max() < 0.02 * expected[1].abs().max()
    wanted = choose(PlainKernels(), q.float(), index, rows, rule)
    for at_once in (index_on_gpu.PICKED, 64):
        monkeypatch.setattr(index_on_gpu, "PICKED", at_once)
        assert torch.equal(choose(kernels, q, index, rows, rule), wanted)


@ON_GPU
def test_kernels_of_gpus_choose_the_first_of_equal_blocks() -> None:
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    rows, (each, most) = make_rows_of([(1, 700), (40, 600)], DEVICE), (4, 9)
    index = torch.zeros(POOL, KV_BLOCK, HEAD, device=DEVICE)
    index[rows.blocks[3].long(), each - 1 :: each] = (
        1.0  # a block of the cache whose scores are equal, the others' zero
    )
    q = torch.ones(rows.tokens, HEADS * HEAD, dtype=torch.bfloat16, device=DEVICE)
    found = choose(CudaKernels(DEVICE, 64), q, index, rows, (each, most))
    assert torch.equal(found, choose(PlainKernels(), q.float(), index, rows, (each, most)))
