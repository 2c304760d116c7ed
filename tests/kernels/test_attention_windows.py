"""Attention over the last cells of a sequence, with sinks, and of bent scores: every device's kernels against float64.

Triton's run on a GPU when there is one, else in the interpreter in a process of their own.
"""

import importlib.util
import os

import numpy as np
import pytest
import torch
from interpreted import expect_interpreted_to_pass, mend_interpreter
from random_weights import DEVICE

from pshard.runtime.kernels.api import AS_THEY_ARE, LayerKV, RowIndex, Scoring, Segment
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.kernels.kv_codec import decode_cells, encode_cells
from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.kernels.row_index import make_rows
from pshard.runtime.memory.kv_cache import KV_DTYPES
from pshard.units.attention import ATTENTION_PIECES
from pshard.units.kv_cells import KV_BLOCK

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
POOL, HEADS = 32, (8, 2, 64)
PARTS = {  # (tokens, past) of each sequence
    "one token": [(1, 0)],
    "tokens": [(1, 700), (1, 64), (1, 127), (1, 3)],
    "some": [(5, 126), (2, 0), (4, 190)],
    "a few": [(5, 126), (3, 0), (17, 190)],
    "a prompt": [(200, 60)],
    "prompts": [(70, 0), (90, 333)],
}

ON_HOSTS = {name: parts for name, parts in PARTS.items() if name != "some"}
ON_GPUS = [name for name in PARTS if name != "a few"]  # each row is a program of its own

if INTERPRETED:
    mend_interpreter()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON or INTERPRETED or DEVICE == "cuda", reason="Triton's kernels run here directly")
def test_the_kernels_of_gpus_in_the_interpreter() -> None:
    expect_interpreted_to_pass(__file__, "kernels_of_gpus")


def make_rows_of(parts: list[tuple[int, int]], window: int, device: str) -> RowIndex:
    """Rows over blocks in no order. Those that no row sees are nobody's: their number stands for a block of NaN."""
    free = np.random.default_rng(7).permutation(np.arange(1, POOL)).tolist()
    segments, start = list[Segment](), 0
    for i, (tokens, past) in enumerate(parts):
        blocks = [free.pop() for _ in range(0, past + tokens, KV_BLOCK)]
        gone = max(0, past + 1 - window) // KV_BLOCK if window else 0
        segments.append(Segment(i, start, tokens, past, tuple([0] * gone + blocks[gone:])))
        start += tokens
    rows = make_rows(segments, device)
    return RowIndex(rows.begin, rows.position, rows.blocks, rows.segments, rows.cells, None, window)


def make_cells(kv_types: tuple[str, str], device: str) -> LayerKV:
    """Random cells, and NaN in block 0."""
    caches = []
    for seed, kind in enumerate(kv_types):
        numbers = torch.randn(POOL, KV_BLOCK, *HEADS[1:], generator=torch.Generator().manual_seed(seed))
        cells = encode_cells(numbers, KV_DTYPES[kind])
        cells[0].view(torch.uint8).fill_(255)
        caches.append(cells.to(device))
    return LayerKV(*caches)


def reference(
    q: np.ndarray, kv: LayerKV, rows: RowIndex, window: int, sinks: np.ndarray | None, bent: Scoring
) -> np.ndarray:
    """Token by token from the formula."""
    n, groups, d = HEADS
    out = np.zeros((rows.tokens, n, d))
    slopes = np.zeros(n) if bent.slopes is None else bent.slopes.double().cpu().numpy()
    for s in rows.segments:
        places = torch.tensor(s.blocks).repeat_interleave(KV_BLOCK) * KV_BLOCK + torch.arange(KV_BLOCK).repeat(
            len(s.blocks)
        )
        k, v = (decode_cells(c.cpu().flatten(0, 1)[places], d).double().numpy() for c in (kv.k, kv.v))
        for i in range(s.tokens):
            place = s.past + i
            first = max(0, place + 1 - window) if window else 0
            seen = slice(place // window * window if bent.chunked else first, place + 1)
            counts = slice(None) if bent.seen is None else spell(bent, s.start + i)[seen]
            for h in range(n):
                scores = k[seen, h // (n // groups)] @ q[s.start + i, h] / np.sqrt(d)
                if bent.cap:
                    scores = bent.cap * np.tanh(scores / bent.cap)
                scores = scores - slopes[h] * (place - np.arange(seen.start, seen.stop))
                scores, values = scores[counts], v[seen, h // (n // groups)][counts]
                everything = scores if sinks is None else np.append(scores, sinks[h])
                p = np.exp(everything - everything.max())
                out[s.start + i, h] = (p / p.sum())[: len(scores)] @ values
    return out.reshape(rows.tokens, -1)


def choose(tokens: int, each: int, device: str) -> Scoring:
    """A row sees its first cells, and of all others a third, `each` in a row."""
    drawn = torch.rand(tokens, POOL, KV_BLOCK // each, generator=torch.Generator().manual_seed(5)) < 1 / 3
    drawn[:, 0, 0] = True
    words = (drawn.long() << torch.arange(KV_BLOCK // each)).sum(2).to(torch.int32)
    return Scoring(seen=words.to(device), each=each)


def spell(bent: Scoring, row: int) -> np.ndarray:
    """Which cells count, bit by bit."""
    assert bent.seen is not None
    words = [int(word) for word in bent.seen[row].cpu()]
    return np.array([bool(words[cell // KV_BLOCK] >> (cell % KV_BLOCK // bent.each) & 1) for cell in range(64 * POOL)])


def check(
    kernels, parts, window: int, has_sinks: bool, kv_types, bound: float, device: str = "cpu", bent=AS_THEY_ARE
) -> None:
    n, groups, d = HEADS
    rows, kv = make_rows_of(parts, window, device), make_cells(kv_types, device)
    qkv = torch.randn(rows.tokens, (n + 2 * groups) * d, generator=torch.Generator().manual_seed(2))
    qkv = qkv.to(kernels.act_dtype).to(device)
    sinks = torch.linspace(-2, 6, n, device=device) if has_sinks else None
    out = torch.full((rows.tokens, n * d), torch.nan, dtype=kernels.act_dtype, device=device)
    partial = torch.full((rows.tokens, n, ATTENTION_PIECES, d + 2), torch.nan, device=device)
    kernels.attention(qkv, HEADS, kv, rows, d**-0.5, out, partial if rows.tokens <= 64 else None, sinks, bent)
    q = qkv[:, : n * d].double().cpu().numpy().reshape(-1, n, d)
    expected = reference(q, kv, rows, window, None if sinks is None else sinks.cpu().double().numpy(), bent)
    assert np.abs(out.double().cpu().numpy() - expected).max() < bound * np.abs(expected).max()


@pytest.mark.parametrize(
    ("window", "has_sinks"), [(0, True), (1, False), (1, True), (64, True), (128, False), (150, True)]
)
@pytest.mark.parametrize("parts", ON_HOSTS.values(), ids=list(ON_HOSTS))
@pytest.mark.parametrize("kernels", [PlainKernels(), HostKernels()], ids=["plain", "host"])
def test_rows_see_their_window_and_the_sinks(kernels, parts, window: int, has_sinks: bool) -> None:
    check(kernels, parts, window, has_sinks, ("f32", "f32"), 1e-5)


SLOPES = torch.tensor([2.0 ** -(i + 1) for i in range(HEADS[0])])
BENT = {"cap": (Scoring(1.5), 0), "cap, window": (Scoring(1.5), 128), "slopes": (Scoring(slopes=SLOPES), 0),
        "chunks": (Scoring(chunked=True), 128), "chunks of none": (Scoring(chunked=True), 150)}  # fmt: skip


@pytest.mark.parametrize(("bent", "window"), BENT.values(), ids=list(BENT))
@pytest.mark.parametrize("parts", ON_HOSTS.values(), ids=list(ON_HOSTS))
@pytest.mark.parametrize("kernels", [PlainKernels(), HostKernels()], ids=["plain", "host"])
def test_scores_are_capped_and_fall_with_distance(kernels, parts, bent: Scoring, window: int) -> None:
    check(kernels, parts, window, False, ("f32", "f32"), 1e-5, bent=bent)


@pytest.mark.parametrize("each", [2, 4, 64])
@pytest.mark.parametrize("parts", ON_HOSTS.values(), ids=list(ON_HOSTS))
@pytest.mark.parametrize("kernels", [PlainKernels(), HostKernels()], ids=["plain", "host"])
def test_rows_see_the_cells_that_were_chosen(kernels, parts, each: int) -> None:
    bent = choose(sum(tokens for tokens, _ in parts), each, "cpu")
    check(kernels, parts, 0, False, ("f32", "f32"), 1e-5, bent=bent)


@pytest.mark.skipif(not native.is_available(), reason="the C++ library is not built")
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512_vnni"])
@pytest.mark.parametrize("kv_types", [("bf16", "bf16"), ("q8_0", "q8_0"), ("f16", "bf16")], ids=str)
@pytest.mark.parametrize("window", [0, 1, 128])
def test_every_instruction_set_and_type_of_cells_has_windows(isa: str, kv_types: tuple[str, str], window: int) -> None:
    before = native.isa()
    try:
        native.set_isa(isa)
    except ValueError:
        pytest.skip(f"this machine has no {isa}")
    try:
        for name in ("tokens", "a few"):
            check(HostKernels(), PARTS[name], window, True, kv_types, 1e-4)
            check(HostKernels(), PARTS[name], window, True, kv_types, 1e-4, bent=Scoring(1.5, SLOPES, window > 0))
    finally:
        native.set_isa(before)


@pytest.mark.skipif(not HAS_TRITON or not (INTERPRETED or DEVICE == "cuda"), reason="runs in the interpreter")
@pytest.mark.parametrize(
    ("name", "window", "has_sinks"),
    [(name, 128, True) for name in ON_GPUS] + [("tokens", 1, True), ("prompts", 150, False), ("some", 0, True)],
)
@pytest.mark.parametrize("kv_types", [("bf16", "bf16"), ("q8_0", "q8_0")], ids=str)
def test_kernels_of_gpus_see_windows_and_sinks(name: str, kv_types, window: int, has_sinks: bool) -> None:
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    check(CudaKernels(DEVICE, 64), PARTS[name], window, has_sinks, kv_types, 0.02, DEVICE)


@pytest.mark.skipif(not HAS_TRITON or not (INTERPRETED or DEVICE == "cuda"), reason="runs in the interpreter")
@pytest.mark.parametrize(("bent", "window"), BENT.values(), ids=list(BENT))
@pytest.mark.parametrize("name", ["tokens", "some", "prompts"])
def test_kernels_of_gpus_bend_scores(name: str, bent: Scoring, window: int) -> None:
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    slopes = None if bent.slopes is None else bent.slopes.to(DEVICE)
    bent = Scoring(bent.cap, slopes, bent.chunked)
    check(CudaKernels(DEVICE, 64), PARTS[name], window, False, ("bf16", "bf16"), 0.02, DEVICE, bent)


@pytest.mark.skipif(not HAS_TRITON or not (INTERPRETED or DEVICE == "cuda"), reason="runs in the interpreter")
@pytest.mark.parametrize("each", [2, 4])
@pytest.mark.parametrize("name", ["tokens", "some", "prompts"])
def test_kernels_of_gpus_see_the_cells_that_were_chosen(name: str, each: int) -> None:
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    bent = choose(sum(tokens for tokens, _ in PARTS[name]), each, DEVICE)
    check(CudaKernels(DEVICE, 64), PARTS[name], 0, False, ("bf16", "bf16"), 0.02, DEVICE, bent)
