"""Times the CUDA kernels beside what the machine allows: bytes against a device copy, FLOPs against a library GEMM.

    python benchmarks/gpu_kernels.py --out benchmarks/results/gpu_kernels.json
    python benchmarks/gpu_kernels.py --decode --out benchmarks/results/gpu_decode.json
    python benchmarks/gpu_kernels.py --sweep --out benchmarks/results/gpu_sweep.json

Every timed call is checked first, on random inputs and a NaN-filled output, against float64. Weights repeat after 64
rows, so the reference is small; they rotate over more than 1 GiB, so no cache holds them. Times are medians of CUDA
graph replays. A case that fails is recorded with its traceback and the others go on.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from pshard.buffers import DEQUANT_BYTES
from pshard.model_config import ModelConfig, Rope
from pshard.profile.timed.operands import random_record
from pshard.quant import QUANT_TYPES, ROW_BLOCK, align, packed_nbytes
from pshard.runtime.blocks.block import ALONE, Side, Work
from pshard.runtime.blocks.find_block import find_block
from pshard.runtime.blocks.listed_block import Listed
from pshard.runtime.kernels.api import Kernels, LayerKV, Packed, RopeTable, RowIndex, Segment
from pshard.runtime.kernels.gpu.card_limits import card_limits
from pshard.runtime.kernels.gpu.cuda import CudaKernels
from pshard.runtime.kernels.gpu.default_tiles import candidate_tiles
from pshard.runtime.kernels.layout import unpack_reference
from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.kernels.row_index import make_rows
from pshard.runtime.memory.weights import UnitWeights
from pshard.runtime.memory.workspace import Workspace
from pshard.tensor import TensorSpec
from pshard.times.gpu_tiles import ANY_BATCH, Tile, TileChoice
from pshard.units.attention import ATTENTION, ATTENTION_PIECES
from pshard.units.ffn import FFN
from pshard.units.kv_cells import KV_BLOCK
from pshard.units.rewrites import rewrite
from pshard.units.unit import UnitKind

Run = Callable[[], dict[str, Any]]  # times a case
GIB = 1 << 30
PERIOD = 64  # rows after which a benchmark matrix repeats
HEADS = (64, 8, 128)  # query heads, KV heads, head dim of a 32B model
QUANTISED = [name for name, q in QUANT_TYPES.items() if q.planes]


@dataclass
class Bench:
    """Kernels, results so far, ceilings, and the time after which no case is started."""

    kernels: CudaKernels
    deadline: float
    cases: list[dict[str, Any]] = field(default_factory=list)
    copy_gbs: float = 0.0
    gemm_tflops: float = 0.0

    def case(self, name: str, run: Run) -> dict[str, Any]:
        """Run one case; keep its result, or its traceback, or that there was no time left."""
        start = time.perf_counter()
        if start > self.deadline:
            result: dict[str, Any] = {"skipped": "no time left"}
        else:
            try:
                result = run()
                torch.cuda.synchronize()
            except Exception:
                result = {"failed": traceback.format_exc(limit=-6)}
        result = {"case": name, **result, "took_s": round(time.perf_counter() - start, 2)}
        self.cases.append(result)
        brief = {k: v if k != "failed" else v.strip().splitlines()[-1][:160] for k, v in result.items() if k != "case"}
        print(f"{name:44s} {json.dumps(brief)}", flush=True)
        return result

    def bytes_case(self, us: float, nbytes: int, error: float) -> dict[str, Any]:
        """A memory-bound result."""
        rate = nbytes / us / 1e3
        return {"us": round(us, 2), "gbs": round(rate), "of_copy": round(rate / self.copy_gbs, 3), "error": error}


def time_us(calls: list[Callable[[], Any]], repeats: int = 9) -> float:
    """Median microseconds of one call, from replays of a CUDA graph that holds all of `calls` in order."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def make_weights(qtype: str, rows: int, cols: int, total: int = GIB + (GIB >> 3)) -> tuple[list[Packed], torch.Tensor]:
    """Copies of a matrix that together exceed `total` bytes, and float64 values of its first PERIOD rows."""
    data = np.concatenate([random_record(qtype, cols, rows + i) for i in range(PERIOD // ROW_BLOCK)])
    values = torch.from_numpy(unpack_reference(data, qtype, PERIOD, cols)).cuda().double()
    one = torch.from_numpy(data).cuda().repeat(rows // PERIOD)
    assert one.numel() == packed_nbytes(qtype, rows, cols)
    copies = max(1, -(-total // one.numel()))
    return [Packed(one if i == 0 else one.clone(), qtype, rows, cols) for i in range(copies)], values


def activations(tokens: int, cols: int, seed: int = 1) -> torch.Tensor:
    """Random bfloat16 [tokens, cols]."""
    return torch.randn(tokens, cols, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """NaN everywhere."""
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def periodic_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error of out [M, rows] against expected [M, PERIOD] float64 repeated; NaN is an error."""
    worst = 0.0
    for part in out.view(out.shape[0], -1, PERIOD).split(64, dim=1):  # bounds the float64 copy
        difference = (part.double() - expected[:, None]).norm() / (expected.norm() * part.shape[1] ** 0.5)
        worst = max(worst, float(difference)) if not torch.isnan(difference) else float("nan")
        check(worst)
    return round(worst, 5)


def check(error: float, bound: float = 0.02) -> float:
    """The error, when it is within the bound. Raises AssertionError."""
    assert error < bound, f"relative error {error} is not below {bound}"
    return error


# --- cases -----------------------------------------------------------------------------------------------------------


def ceilings(bench: Bench) -> None:
    """Device copy of 2 GiB (bytes read + written) and a library GEMM."""

    def copy() -> dict[str, Any]:
        source = torch.randint(0, 256, (2 * GIB,), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        bench.copy_gbs = 4 * GIB / time_us([lambda: target.copy_(source)]) / 1e3
        return {"gbs": round(bench.copy_gbs)}

    def gemm() -> dict[str, Any]:
        x, w, out = activations(8192, 5120), activations(25600, 5120, 2), poisoned(8192, 25600)
        us = time_us([lambda: torch.mm(x, w.T, out=out)] * 3)
        bench.gemm_tflops = 2 * 8192 * 5120 * 25600 / us / 1e6
        return {"us": round(us, 1), "tflops": round(bench.gemm_tflops)}

    bench.case("copy 2 GiB", copy)
    bench.case("bf16 GEMM 8192x25600x5120", gemm)


def small_linear(bench: Bench, weights: list[Packed], values: torch.Tensor, tokens: int) -> dict[str, Any]:
    """linear for a small batch, rotating over the weights."""
    first = weights[0]
    x, out = activations(tokens, first.cols), poisoned(tokens, first.rows)
    none = torch.empty(0, dtype=torch.uint8, device="cuda")
    bench.kernels.linear(x, first, out, none)
    error = periodic_error(out, x.double() @ values.T)
    again = poisoned(tokens, first.rows)
    bench.kernels.linear(x, first, again, none)
    assert torch.equal(out, again), "a repeated run differs"
    us = time_us([lambda w=w: bench.kernels.linear(x, w, out, none) for w in weights])  # type: ignore[misc]
    return bench.bytes_case(us, first.data.numel(), error)


def small_batches(bench: Bench, qtypes: Iterable[str], shape: tuple[int, int], batches: Iterable[int]) -> None:
    """Every type at every batch size on one shape."""
    for qtype in qtypes:
        weights, values = make_weights(qtype, *shape)
        for tokens in batches:
            name = f"linear {qtype} {shape[0]}x{shape[1]} M={tokens}"
            bench.case(name, lambda t=tokens, w=weights, v=values: small_linear(bench, w, v, t))  # type: ignore[misc]


def gate_up(bench: Bench, qtype: str, tokens: int) -> dict[str, Any]:
    """Both matrices of a gated FFN and the product, rotating."""
    weights, values = make_weights(qtype, 25600, 5120)
    x = activations(tokens, 5120) * 0.05
    out, both = poisoned(tokens, 25600), poisoned(tokens, 51200)
    none = torch.empty(0, dtype=torch.uint8, device="cuda")
    bench.kernels.gate_up(x, weights[0], weights[1], out, both, none)
    y = x.double() @ values.T
    error = periodic_error(out, torch.nn.functional.silu(y) * y)
    pairs = [(weights[i], weights[i + 1]) for i in range(0, len(weights) - 1, 2)]
    us = time_us([lambda p=p: bench.kernels.gate_up(x, *p, out, both, none) for p in pairs])  # type: ignore[misc]
    return bench.bytes_case(us, 2 * weights[0].data.numel(), error)


def large_batch(bench: Bench, qtype: str, rows: int, cols: int, tokens: int, accumulate: bool) -> dict[str, Any]:
    """linear through dequantised tiles beside the same product by the library from bfloat16 weights."""
    weights, values = make_weights(qtype, rows, cols, total=1)
    x, tile = activations(tokens, cols), torch.empty(DEQUANT_BYTES, dtype=torch.uint8, device="cuda")
    out = poisoned(tokens, rows, dtype=torch.float32 if accumulate else torch.bfloat16)
    if accumulate:
        out.fill_(0.5)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    bench.kernels.linear(x, weights[0], out, tile, None, accumulate)
    grown = torch.cuda.max_memory_allocated() - before
    error = periodic_error(out, x.double() @ values.T + (0.5 if accumulate else 0.0))
    us = time_us([lambda: bench.kernels.linear(x, weights[0], out, tile, None, accumulate)] * 2, 5)
    dense, plain = activations(rows, cols, 3), poisoned(tokens, rows)
    library = time_us([lambda: torch.mm(x, dense.T, out=plain)] * 2, 5)
    return {"us": round(us, 1), "tflops": round(2 * tokens * rows * cols / us / 1e6), "library_us": round(library, 1),
            "of_gemm": round(library / us, 3), "error": error, "allocated": grown}  # fmt: skip


def dequantise(bench: Bench, qtype: str) -> dict[str, Any]:
    """Packed to bfloat16, 8192 rows at a time; bytes read + written."""
    weights, values = make_weights(qtype, 8192, 5120, total=GIB // 2)
    out = poisoned(8192, 5120)
    bench.kernels.dequantise(weights[0], 0, out)
    wanted = values.to(torch.bfloat16).repeat(8192 // PERIOD, 1)
    differing = int((out != wanted).sum())
    assert differing == 0, f"{differing} of {out.numel()} differ"
    us = time_us([lambda w=w: bench.kernels.dequantise(w, 0, out) for w in weights])  # type: ignore[misc]
    return bench.bytes_case(us, weights[0].data.numel() + 2 * out.numel(), 0.0)


def index_of(sequences: list[int], position: int, cells: int) -> RowIndex:
    """One new token for each of the sequences."""
    each = -(-cells // KV_BLOCK)
    segments = [Segment(s, i, 1, position, tuple(range(s * each, (s + 1) * each))) for i, s in enumerate(sequences)]
    return replace(make_rows(segments, "cuda"), cells=cells)


def cache_of(cells: int, groups: int, d: int, seed: int) -> torch.Tensor:
    """Keys or values of one sequence, bfloat16, in blocks."""
    return activations(align(cells, KV_BLOCK), groups * d, seed).view(-1, KV_BLOCK, groups, d)


def rows_of(tokens: int, past: int) -> RowIndex:
    """New tokens of one sequence, whose blocks follow each other."""
    return make_rows([Segment(0, 0, tokens, past, tuple(range(-(-(past + tokens) // KV_BLOCK))))], "cuda")


def long_cache() -> LayerKV:
    """Eight sequences of 32768 cells, 1 GiB of bfloat16."""
    return LayerKV(*(cache_of(8 * 32768, 8, 128, seed) for seed in (7, 8)))


def decode_attention(bench: Bench, kv: LayerKV, rows: int, context: int) -> dict[str, Any]:
    """One token for each of `rows` sequences against `context` cells; launches sized for the whole cache."""
    n, groups, d = HEADS
    qkv, out = activations(rows, (n + 2 * groups) * d), poisoned(rows, n * d)
    partial = poisoned(rows, n, ATTENTION_PIECES, d + 2, dtype=torch.float32)
    cells = kv.k.shape[0] * KV_BLOCK // 8
    sets = [
        index_of([(first + i) % 8 for i in range(rows)], context - 1, cells) for first in range(0, max(8, rows), rows)
    ]
    bench.kernels.attention(qkv, HEADS, kv, sets[0], d**-0.5, out, partial)
    q = qkv[:, : n * d].view(rows, groups, n // groups, d).float()
    k, v = (c.view(8, cells, groups, d)[:rows, :context].float() for c in (kv.k, kv.v))
    p = torch.einsum("mghd,mcgd->mghc", q, k).mul_(d**-0.5).softmax(-1)
    expected = torch.einsum("mghc,mcgd->mghd", p, v).reshape(rows, n * d)
    error = check(float((out.float() - expected).norm() / expected.norm()))
    calls = [lambda s=s: bench.kernels.attention(qkv, HEADS, kv, s, d**-0.5, out, partial) for s in sets]
    us = time_us(calls)  # type: ignore[arg-type]
    return bench.bytes_case(us, 2 * 2 * rows * context * groups * d, round(error, 5))


def prefill_attention(bench: Bench, tokens: int, past: int) -> dict[str, Any]:
    """`tokens` new tokens of one sequence after `past`."""
    n, groups, d = HEADS
    qkv, out = activations(tokens, (n + 2 * groups) * d), poisoned(tokens, n * d)
    cells = past + tokens
    kv, rows = LayerKV(*(cache_of(cells, groups, d, seed) for seed in (5, 6))), rows_of(tokens, past)
    k, v = (c.flatten(0, 1) for c in (kv.k, kv.v))
    bench.kernels.attention(qkv, HEADS, kv, rows, d**-0.5, out, None)
    assert not torch.isnan(out).any(), "not every element was written"
    some = torch.arange(0, tokens, 61, device="cuda")
    q = qkv[some, : n * d].view(-1, groups, n // groups, d).float()
    scores = torch.einsum("mghd,cgd->mghc", q, k.float()).mul_(d**-0.5)
    future = torch.arange(cells, device="cuda")[None, :] > (past + some)[:, None]
    p = scores.masked_fill_(future[:, None, None], float("-inf")).softmax(-1)
    expected = torch.einsum("mghc,cgd->mghd", p, v.float()).reshape(-1, n * d)
    error = check(float((out[some].float() - expected).norm() / expected.norm()))
    us = time_us([lambda: bench.kernels.attention(qkv, HEADS, kv, rows, d**-0.5, out, None)] * 2, 5)
    flops = 4 * n * d * (tokens * past + tokens * (tokens + 1) // 2)
    return {"us": round(us, 1), "tflops": round(flops / us / 1e6), "error": round(error, 5)}


def rms_norm(bench: Bench, tokens: int) -> dict[str, Any]:
    """[tokens, 5120] float32 to bfloat16."""
    hidden, weight = activations(tokens, 5120).float(), activations(1, 5120, 2)[0].float()
    out = poisoned(tokens, 5120)
    bench.kernels.rms_norm(hidden, weight, 1e-6, out)
    h = hidden.double()
    expected = h * torch.rsqrt((h * h).mean(1, keepdim=True) + 1e-6) * weight.double()
    error = check(float((out.double() - expected).norm() / expected.norm()))
    us = time_us([lambda: bench.kernels.rms_norm(hidden, weight, 1e-6, out)] * 8)
    return bench.bytes_case(us, 6 * hidden.numel(), round(error, 5))


def rope_store(bench: Bench, tokens: int) -> dict[str, Any]:
    """q and k norm, rotation and the store of k and v; bytes of qkv read and written once."""
    n, groups, d = HEADS
    qkv = activations(tokens, (n + 2 * groups) * d)
    angle = torch.rand(tokens, d // 2, device="cuda") * 6
    rope = RopeTable(angle.cos(), angle.sin(), "halves")
    norm = activations(1, d, 3)[0].float()
    kv = LayerKV(*(poisoned(-(-tokens // KV_BLOCK), KV_BLOCK, groups, d) for _ in range(2)))
    rows = rows_of(tokens, 0)
    x = qkv.view(tokens, -1, d)[:, n : n + groups].double()
    x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * norm.double()
    a, b, c, s = x[..., : d // 2], x[..., d // 2 :], rope.cos.double()[:, None], rope.sin.double()[:, None]
    expected = torch.cat([a * c - b * s, b * c + a * s], dim=-1)
    bench.kernels.rope_store(qkv, HEADS, norm, norm, 1e-6, rope, rows, kv)
    error = check(float((kv.k.flatten(0, 1)[:tokens].double() - expected).norm() / expected.norm()))
    us = time_us([lambda: bench.kernels.rope_store(qkv, HEADS, norm, norm, 1e-6, rope, rows, kv)] * 8)
    return bench.bytes_case(us, 4 * qkv.numel(), round(error, 5))


def run_all(bench: Bench) -> None:
    """The whole table, the most important cases first."""
    small_batches(bench, ["Q4_0", "Q6_K", "Q4_K", "Q8_0"], (25600, 5120), (1, 8, 16))
    small_batches(bench, ["Q4_0"], (5120, 25600), (1, 8, 16, 64))
    bench.case("gate_up Q4_0 25600x5120 M=1", lambda: gate_up(bench, "Q4_0", 1))
    bench.case("gate_up Q4_0 25600x5120 M=16", lambda: gate_up(bench, "Q4_0", 16))
    bench.case("linear Q4_0 25600x5120 M=4096", lambda: large_batch(bench, "Q4_0", 25600, 5120, 4096, False))
    bench.case("linear Q4_0 5120x25600 M=4096 +=f32", lambda: large_batch(bench, "Q4_0", 5120, 25600, 4096, True))
    bench.case("linear Q6_K 25600x5120 M=4096", lambda: large_batch(bench, "Q6_K", 25600, 5120, 4096, False))
    for rows, context in ((1, 32768), (8, 32768), (1, 1000)):
        name = f"decode attention M={rows} context {context}"
        bench.case(name, lambda r=rows, c=context: decode_attention(bench, long_cache(), r, c))  # type: ignore[misc]
    bench.case("prefill attention 4096", lambda: prefill_attention(bench, 4096, 0))
    bench.case("prefill attention 4096 after 12288", lambda: prefill_attention(bench, 4096, 12288))
    for tokens in (1, 4096):
        bench.case(f"rms_norm {tokens}x5120", lambda t=tokens: rms_norm(bench, t))  # type: ignore[misc]
        bench.case(f"rope_store {tokens}x80x128", lambda t=tokens: rope_store(bench, t))  # type: ignore[misc]
    for qtype in ("Q4_0", "Q6_K"):
        bench.case(f"dequantise {qtype}", lambda q=qtype: dequantise(bench, q))  # type: ignore[misc]
    rest = [q for q in QUANTISED if q not in ("Q4_0", "Q6_K", "Q4_K", "Q8_0")]
    small_batches(bench, [*rest, "BF16"], (25600, 5120), (1, 8, 16))


# --- sweep -----------------------------------------------------------------------------------------------------------


PROMPT = [Tile(128, 128, 8, 3), Tile(128, 128, 8, 2), Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(128, 64, 4, 3),
          Tile(64, 64, 4, 3)]  # fmt: skip


def sweep(bench: Bench) -> dict[str, Any]:
    """Try tiles for the cases that matter most, of matmuls those that a profile tries; for each, [us, tile] with the
    best first."""
    best: dict[str, Any] = {}

    def attempt(name: str, tiles: Iterable[Tile], use: Callable[[Tile], None], run: Run) -> None:
        found = []
        for tile in tiles:
            use(tile)
            result = bench.case(f"{name} {_brief(tile)}", run)
            if "us" in result:
                found.append((result["us"], _brief(tile)))
        best[name] = sorted(found)

    def matmul(kernel: str, qtype: str, tokens: int, name: str, run: Run) -> None:
        def use(tile: Tile) -> None:
            bench.kernels.try_tile(TileChoice("acc", kernel, qtype, tokens, tile, 1.0, 1.0))

        attempt(f"{name} M={tokens}", candidate_tiles(kernel, qtype, tokens, bench.kernels.limits), use, run)
        bench.kernels.use_tiles(())

    def linears(qtype: str, shape: tuple[int, int], *tokens: int) -> None:
        weights, values = make_weights(qtype, *shape)
        for m in tokens:
            name = f"{qtype} {shape[0]}x{shape[1]}"
            matmul("matvec", qtype, m, name, lambda t=m: small_linear(bench, weights, values, t))  # type: ignore[misc]

    linears("Q4_0", (5120, 25600), 1, 8, 16)
    linears("Q4_0", (10240, 5120), 1)
    linears("Q4_0", (5120, 8192), 1)
    for tokens in (1, 16):
        matmul("gated", "Q4_0", tokens, "gate_up Q4_0", lambda t=tokens: gate_up(bench, "Q4_0", t))  # type: ignore[misc]
    for qtype in ("Q4_0", "Q4_K"):
        linears(qtype, (25600, 5120), 1, 4, 8, 16, 64)
    for qtype in ("Q2_K", "Q3_K", "Q6_K"):
        linears(qtype, (25600, 5120), 1, 4, 8, 16)

    def read(tile: Tile) -> None:
        bench.kernels.try_tile(TileChoice("acc", "prompt 128", "bf16", ANY_BATCH, tile, 1.0, 1.0))

    for past, tiles in ((0, PROMPT), (12288, PROMPT[:3])):
        attempt(f"prefill 4096 after {past}", tiles, read, lambda p=past: prefill_attention(bench, 4096, p))  # type: ignore[misc]
    bench.kernels.use_tiles(())
    return best


def _brief(tile: Tile) -> str:
    return f"({tile.rows}, {tile.depth}, {tile.warps}, {tile.stages}, {tile.programs}, {tile.registers}, {tile.tokens})"


# --- decode ----------------------------------------------------------------------------------------------------------

LAYERS = 8
CONFIG = ModelConfig("qwen3", LAYERS, 5120, *HEADS, 25600, 151936, 1e-6, 40960, Rope(128, 1e6, "halves"), qk_norm=True)
CALLS = ("rms_norm", "q k v", "rope_store", "attention", "o", "rms_norm", "gate_up", "down")


class FirstCalls:
    """Makes only the first `count` of the calls of every layer: the difference to one more is what a call adds."""

    def __init__(self, real: CudaKernels, count: int) -> None:
        self.real, self.count, self.made = real, count, 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*arguments: Any, **more: Any) -> None:
            self.made += 1
            if (self.made - 1) % len(CALLS) < self.count:
                getattr(self.real, name)(*arguments, **more)

        return call


def make_layers() -> list[tuple[Listed, Listed]]:
    """Attention and FFN of LAYERS layers in Q4_0, as their lists take them; no two share memory."""
    n, groups, d = HEADS
    model, wide = CONFIG.d_model, CONFIG.d_ffn
    shapes = {"attn_q": (n * d, model), "attn_k": (groups * d, model), "attn_v": (groups * d, model),
              "attn_output": (model, n * d), "ffn_gate": (wide, model), "ffn_up": (wide, model),
              "ffn_down": (model, wide)}  # fmt: skip
    copies = {
        role: make_weights("Q4_0", *shape, total=LAYERS * packed_nbytes("Q4_0", *shape))[0]
        for role, shape in shapes.items()
    }
    ones, head = torch.ones(model, device="cuda"), torch.ones(d, device="cuda")
    attention = {"attn_norm.weight": ones, "attn_q_norm.weight": head, "attn_k_norm.weight": head}
    layers = []
    for i in range(LAYERS):
        at = {f"{role}.weight": made[i] for role, made in copies.items()}
        heads, wide_ones = ({k: w for k, w in at.items() if k.startswith(unit)} for unit in ("attn", "ffn"))
        layers.append((_listed(ATTENTION, heads, attention), _listed(FFN, wide_ones, {"ffn_norm.weight": ones})))
    return layers


def _listed(kind: UnitKind, matrices: dict[str, Packed], vectors: dict[str, torch.Tensor]) -> Listed:
    """A unit of these tensors, to be carried out."""
    shapes = {role: (w.qtype, (w.rows, w.cols)) for role, w in matrices.items()}
    shapes |= {role: ("F32", (v.numel(),)) for role, v in vectors.items()}
    tensors = {role: TensorSpec(f"blk.0.{role}", qtype, shape) for role, (qtype, shape) in shapes.items()}
    return Listed(rewrite(kind.operations(tensors, CONFIG)), UnitWeights(matrices, vectors))


def make_side(kernels: Kernels, context: int) -> Side:
    """Scratch and rotary table for one token."""
    n, groups, d = HEADS
    act = kernels.act_dtype
    tensors = {
        "hidden": activations(1, CONFIG.d_model, 4).float(), "normed": poisoned(1, CONFIG.d_model, dtype=act),
        "qkv": poisoned(1, (n + 2 * groups) * d, dtype=act), "mixed": poisoned(1, n * d, dtype=act),
        "gate_up": poisoned(1, 2 * CONFIG.d_ffn, dtype=act),
        "partial": poisoned(1, n, ATTENTION_PIECES, d + 2, dtype=torch.float32),
    }  # fmt: skip
    angle = torch.outer(torch.arange(context, device="cuda"), 1e6 ** -(torch.arange(0, d, 2, device="cuda") / d))
    space = Workspace(1, tensors, torch.empty(0, dtype=torch.uint8, device="cuda"))
    return Side(kernels, space, {"rope": RopeTable(angle.cos(), angle.sin(), "halves")}, CONFIG)


def decode_layer(bench: Bench, layers: list[tuple[Listed, Listed]], context: int) -> dict[str, Any]:
    """One token through LAYERS layers in one graph: microseconds of a layer, and what each call adds to it."""
    _, groups, d = HEADS
    caches = [LayerKV(*(cache_of(context, groups, d, seed) for seed in (i, 50 + i))) for i in range(LAYERS)]
    rows = index_of([0], context - 1, context)

    def run(side: Side, count: int) -> None:
        no_logits: Any = None
        work = Work(side, rows, torch.zeros(1, dtype=torch.int64), no_logits)
        for (attention, ffn), kv in zip(layers[:count], caches, strict=False):
            find_block(ATTENTION).run(work, attention, kv, ALONE)
            find_block(FFN).run(work, ffn, None, ALONE)

    plain, fast = make_side(PlainKernels(), context), make_side(bench.kernels, context)
    start = fast.space.tensors["hidden"].clone()
    run(plain, 1)
    run(fast, 1)
    expected = plain.space.tensors["hidden"] - start
    error = check(float((fast.space.tensors["hidden"] - start - expected).norm() / expected.norm()), 0.05)
    at = [0.0]
    for count in range(1, len(CALLS) + 1):
        side = replace(fast, kernels=FirstCalls(bench.kernels, count))  # type: ignore[arg-type]
        at.append(time_us([lambda s=side: run(s, LAYERS)]) / LAYERS)  # type: ignore[misc]
    assert not torch.isnan(fast.space.tensors["hidden"]).any(), "NaN after replays"
    parts = [f"{name} {at[i + 1] - at[i]:.1f}" for i, name in enumerate(CALLS)]
    nbytes = (
        sum(w.data.numel() for unit in layers[0] for w in unit.weights.matrices.values()) + 4 * context * groups * d
    )
    return {**bench.bytes_case(at[-1], nbytes, round(error, 5)), "parts": parts}


def decode(bench: Bench) -> None:
    """Layers of a 32B model in Q4_0, one token."""
    layers = make_layers()
    for context in (1000, 16384):
        bench.case(f"decode layer context {context}", lambda c=context: decode_layer(bench, layers, c))  # type: ignore[misc]


def main() -> None:
    """Run the table or the sweep and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--sweep", action="store_true", help="try other tiles for the most important cases")
    what.add_argument("--decode", action="store_true", help="whole layers of a 32B model, one token")
    parser.add_argument("--seconds", type=float, default=220, help="start no case after this time")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: these kernels need one")
    bench = Bench(CudaKernels("cuda", 64), time.perf_counter() + args.seconds)
    ceilings(bench)
    best: dict[str, Any] = {}
    if args.sweep:
        best = sweep(bench)
    elif args.decode:
        decode(bench)
    else:
        run_all(bench)
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                            capture_output=True, text=True).stdout.strip()  # fmt: skip
    report = {
        "device": card_limits("cuda").name, "driver": driver, "torch": torch.__version__,
        "triton": triton.__version__, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(["python", *sys.argv]), "copy_gbs": bench.copy_gbs, "gemm_tflops": bench.gemm_tflops,
        "scratch_nbytes": bench.kernels.scratch_nbytes, "best": best, "cases": bench.cases,
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    for name, found in best.items():
        print(f"{name}  rows, depth, warps, stages, programs, registers, tokens")
        for us, tile in found[:5]:
            print(f"    {us:8.2f} us  {tile}")
    failed = [c["case"] for c in bench.cases if "failed" in c]
    print(f"{len(bench.cases)} cases, {len(failed)} failed: {failed}")


if __name__ == "__main__":
    main()
