"""The Triton kernels of latent attention compute what plain torch does (runtime/kernels/plain_latent.py).

As in test_triton_kernels.py they run on a GPU when there is one, else in Triton's interpreter, in a process of their
own; without Triton everything here is skipped.
"""

import os

import pytest
import torch
from interpreted import expect_interpreted_to_pass, mend_interpreter
from random_weights import DEVICE, random_tensor, random_weight

triton = pytest.importorskip("triton", reason="Triton is installed with the CUDA build of torch only")
READY = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
needs_kernels = pytest.mark.skipif(not READY, reason="runs inside test_latent_kernels_in_the_interpreter")

from pshard.quant import QUANT_TYPES  # noqa: E402
from pshard.runtime.kernels.api import RopeTable, RowIndex, Segment  # noqa: E402
from pshard.runtime.kernels.gpu import cuda  # noqa: E402
from pshard.runtime.kernels.gpu.card_limits import KNOWN_CARDS  # noqa: E402
from pshard.runtime.kernels.gpu.tiles.attention_tiles import latent_piece, number_bytes  # noqa: E402
from pshard.runtime.kernels.kv_codec import decode_cells  # noqa: E402
from pshard.runtime.kernels.plain import PlainKernels  # noqa: E402
from pshard.runtime.kernels.row_index import make_rows  # noqa: E402
from pshard.runtime.memory.kv_cache import KV_DTYPES  # noqa: E402
from pshard.units.kv_cells import KV_BLOCK, kv_nbytes  # noqa: E402
from pshard.units.latent_attention import latent_pieces  # noqa: E402

if READY and DEVICE == "cpu":
    mend_interpreter()

RANK, ROPE, EPS = 96, 32, 1e-6
WIDTH = RANK + ROPE
SEGMENTS = {
    "one token": (Segment(0, 0, 1, 150, (4, 0, 2)),),
    "several sequences": (Segment(0, 0, 2, 0, (3,)), Segment(1, 2, 1, 70, (1, 5)), Segment(2, 3, 3, 62, (0, 2))),
}


@pytest.mark.slow
@pytest.mark.skipif(READY, reason="the kernels run here directly")
def test_latent_kernels_in_the_interpreter() -> None:
    expect_interpreted_to_pass(__file__)


@pytest.fixture(scope="module")
def kernels() -> cuda.CudaKernels:
    return cuda.CudaKernels(DEVICE, 64)


def random_cells(kind: str, seed: int = 7) -> torch.Tensor:
    """Six blocks of cells of a type."""
    if kind != "q8_0":
        return random_tensor(6, KV_BLOCK, 1, WIDTH, seed=seed, dtype=torch.float32).to(KV_DTYPES[kind])
    cells = torch.randint(-127, 128, (6, KV_BLOCK, kv_nbytes(kind, WIDTH)), dtype=torch.int8)
    scales = torch.full((6, KV_BLOCK, WIDTH // 32), 0.01, dtype=torch.float16)
    cells[..., WIDTH:] = scales.view(torch.int8)
    return cells.to(DEVICE)


@needs_kernels
@pytest.mark.parametrize("qtype", sorted(QUANT_TYPES))
@pytest.mark.parametrize(("tokens", "heads", "rows", "cols"), [(1, 3, 80, 64), (20, 2, 32, 96)])
def test_each_head_is_multiplied_by_its_own_matrix(
    kernels: cuda.CudaKernels, qtype: str, tokens: int, heads: int, rows: int, cols: int
) -> None:
    cols = -(-cols // QUANT_TYPES[qtype].block) * QUANT_TYPES[qtype].block
    stack, _ = random_weight(qtype, heads * rows, cols, 1)
    x = random_tensor(tokens, heads, cols + 16, seed=2)[..., :cols]
    out, want = (torch.full((tokens, heads, rows + 8), float("nan"), device=DEVICE) for _ in range(2))
    got = out.bfloat16()
    kernels.head_products(x, stack, got[..., :rows])
    PlainKernels().head_products(x.float(), stack, want[..., :rows])
    error = (got[..., :rows].float() - want[..., :rows]).abs().max() / want[..., :rows].std()
    assert error < 0.06  # of weights and results rounded to bfloat16
    assert got[..., rows:].isnan().all()


@needs_kernels
@pytest.mark.parametrize("pairing", ["adjacent", "halves"])
@pytest.mark.parametrize("kind", ["f32", "bf16", "f16", "q8_0"])
def test_latents_are_normed_keys_turned_and_both_stored(kernels: cuda.CudaKernels, kind: str, pairing: str) -> None:
    rows, heads = make_rows(SEGMENTS["several sequences"], DEVICE), 10
    angle = torch.rand(200, ROPE // 2, device=DEVICE)
    rope = RopeTable(angle.cos(), angle.sin(), pairing)
    kv, q = random_tensor(6, WIDTH + 8, seed=3)[:, :WIDTH], random_tensor(6, heads, 64 + ROPE, seed=4)[..., 64:]
    norm, cells = torch.rand(RANK, device=DEVICE) + 0.5, random_cells(kind)
    want_cells, want = cells.clone(), torch.empty(6, heads, ROPE, device=DEVICE)
    PlainKernels().store_latent(kv.clone(), q, want, norm, EPS, rope, rows, want_cells)
    got = torch.empty(6, heads, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    kernels.store_latent(kv, q, got[..., RANK:], norm, EPS, rope, rows, cells)
    torch.testing.assert_close(got[..., RANK:].float(), want, rtol=0.01, atol=0.02)
    found, expected = decode_cells(cells, WIDTH), decode_cells(want_cells, WIDTH)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05 if kind == "q8_0" else 0.02)


@needs_kernels
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=list(SEGMENTS))
@pytest.mark.parametrize("kind", ["f32", "bf16", "f16", "q8_0"])
@pytest.mark.parametrize("heads", [4, 18])
def test_queries_see_their_own_cells_and_no_later_ones(
    kernels: cuda.CudaKernels, segments: tuple[Segment, ...], kind: str, heads: int
) -> None:
    """In splits as few tokens go, and segment by segment as prompts do."""
    rows, cells = make_rows(segments, DEVICE), random_cells(kind)
    q = random_tensor(rows.tokens, heads, WIDTH, seed=5)
    partial = torch.full(
        (rows.tokens * latent_pieces(rows.tokens, heads), heads, RANK + 2), float("nan"), device=DEVICE
    )
    want = torch.empty(rows.tokens, heads, WIDTH, device=DEVICE)
    PlainKernels().attend_latent(q.float(), RANK, cells, rows, 0.1, want, None)
    for room in (partial, None):
        got = torch.full_like(q, float("nan"))
        kernels.attend_latent(q, RANK, cells, rows, 0.1, got, room)
        torch.testing.assert_close(got[..., :RANK].float(), want[..., :RANK], rtol=0.02, atol=0.02)


@needs_kernels
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=list(SEGMENTS))
def test_latents_in_pieces_are_attended_as_whole_ones(segments: tuple[Segment, ...]) -> None:
    """As an RTX 50 takes those of q8_0: four pieces of 32 numbers, of which the last has none."""
    rows, cells, heads = make_rows(segments, DEVICE), random_cells("q8_0"), 18
    q = random_tensor(rows.tokens, heads, WIDTH, seed=5)
    partial = torch.empty(rows.tokens * latent_pieces(rows.tokens, heads), heads, RANK + 2, device=DEVICE)
    found = {}
    for card in (86, 120):
        kernels = cuda.CudaKernels(DEVICE, 64, limits=KNOWN_CARDS[card])
        for room in (partial, None):
            found[card, room is None] = got = torch.full_like(q, float("nan"))
            kernels.attend_latent(q, RANK, cells, rows, 0.1, got, room)
    assert latent_piece(128, number_bytes("q8_0"), KNOWN_CARDS[120]) == 32
    for without in (False, True):
        whole, pieces = found[86, without][..., :RANK], found[120, without][..., :RANK]
        torch.testing.assert_close(pieces.float(), whole.float(), rtol=0.01, atol=0.01)


@needs_kernels
def test_texts_with_one_token_beside_a_prompt_go_as_few_tokens_do(kernels: cuda.CudaKernels) -> None:
    before = Segment(2, 0, 1, 100, (4, 1)), Segment(0, 1, 1, 0, (5,))
    segments = (*before, Segment(1, 2, 70, 40, (2, 0)), Segment(3, 72, 1, 9, (3,)))
    rows, cells, heads = make_rows(segments, DEVICE), random_cells("bf16"), 4
    q = random_tensor(rows.tokens, heads, WIDTH, seed=5)
    want, got = torch.full_like(q, float("nan")), torch.full_like(q, float("nan"))
    partial = torch.full((2 * latent_pieces(2, heads), heads, RANK + 2), float("nan"), device=DEVICE)
    kernels.attend_latent(q, RANK, cells, rows, 0.1, want, None)
    kernels.attend_latent(q, RANK, cells, rows, 0.1, got, partial)
    assert not partial[0, 0].isnan().any()  # it went there
    torch.testing.assert_close(got[..., :RANK].float(), want[..., :RANK].float(), rtol=0.02, atol=0.02)
    assert torch.equal(got[2:72, :, :RANK], want[2:72, :, :RANK])


@needs_kernels
def test_a_longer_index_than_cells_changes_nothing(kernels: cuda.CudaKernels) -> None:
    """A captured launch is made for the longest context of its key."""
    (segment,) = SEGMENTS["one token"]
    rows, cells = make_rows((segment,), DEVICE), random_cells("bf16")
    longer = RowIndex(rows.begin, rows.position, rows.blocks, rows.segments, 16 * 1024)
    q = random_tensor(1, 4, WIDTH, seed=6)
    partial = torch.empty(latent_pieces(1, 4), 4, RANK + 2, device=DEVICE)
    got, want = torch.empty_like(q), torch.empty_like(q)
    kernels.attend_latent(q, RANK, cells, rows, 0.1, want, partial)
    kernels.attend_latent(q, RANK, cells, longer, 0.1, got, partial)
    torch.testing.assert_close(got[..., :RANK].float(), want[..., :RANK].float(), rtol=0.01, atol=0.01)
