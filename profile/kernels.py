"""Times the runtime's own kernels on a device: matmuls, attention and what lies between them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pshard.buffers import ATTENTION_SPLITS, DEQUANT_BYTES, SMALL_BATCH
from pshard.machine import AttentionTiming, ElementwiseTiming, MatmulTiming
from pshard.profile.operands import OperandPool
from pshard.profile.timing import Pace, median_seconds
from pshard.runtime.kernels.api import Kernels, LayerKV, RopeTable, RowIndex, Segment

NORM_EPS = 1e-6


@dataclass(frozen=True)
class AttentionShape:
    """Head geometry of attention: query heads, KV heads, elements per head."""

    n_heads: int
    n_kv_heads: int
    head_dim: int

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.n_heads, self.n_kv_heads, self.head_dim


@dataclass(frozen=True)
class KernelBench:
    """Kernels of one device with what timing them takes.

    `side` is "host" or "acc", as in the profile's tables. `slow` ends a series of growing token counts: after a call
    that took longer, the planner extrapolates in proportion to the tokens.
    """

    side: str
    kernels: Kernels
    device: torch.device
    pool: OperandPool
    pace: Pace
    slow: float

    def median(self, run) -> float:
        return median_seconds(run, self.pace, cuda=self.device.type == "cuda")

    def activations(self, tokens: int, width: int) -> torch.Tensor:
        """Random [tokens, width] in the kernels' activation type."""
        generator = torch.Generator().manual_seed(0)
        row = torch.randn(width, generator=generator).to(self.device, self.kernels.act_dtype)
        return row.repeat(tokens, 1)


def time_matmul(bench: KernelBench, qtype: str, rows: int, cols: int, tokens: Sequence[int]) -> list[MatmulTiming]:
    """x[t, cols] @ W[rows, cols].T for each t of `tokens`, until one is slow; W is another copy in every call."""
    weights = bench.pool.rotate_weights(qtype, rows, cols)
    timings: list[MatmulTiming] = []
    for count in sorted(tokens):
        x, out, tile = bench.activations(count, cols), bench.activations(count, rows), _tile(bench, count)
        seconds = bench.median(lambda i: bench.kernels.linear(x, weights[i % len(weights)], out, tile))
        timings.append(MatmulTiming(bench.side, qtype, rows, cols, count, seconds))
        if seconds > bench.slow:
            break
    return timings


def time_attention(
    bench: KernelBench, shape: AttentionShape, kv_type: str, tokens: int, contexts: Sequence[int]
) -> list[AttentionTiming]:
    """Attention of the last `tokens` of each context, over KV caches that rotate; until one is slow."""
    timings: list[AttentionTiming] = []
    for context in sorted(c for c in contexts if c >= tokens):
        caches = bench.pool.rotate_kv(context, shape.n_kv_heads, shape.head_dim, kv_type)
        qkv, out, partial = _attention_buffers(bench, shape, tokens)
        rows, scale = _row_index(bench.device, tokens, context), shape.head_dim**-0.5
        seconds = bench.median(
            lambda i: bench.kernels.attention(qkv, shape.heads, caches[i % len(caches)], rows, scale, out, partial)
        )
        timings.append(AttentionTiming(bench.side, *shape.heads, kv_type, tokens, context, seconds))
        if seconds > bench.slow:
            break
    return timings


def time_elementwise(
    bench: KernelBench, d_model: int, d_ffn: int, shape: AttentionShape, tokens: int
) -> list[ElementwiseTiming]:
    """Norm, residual, RoPE with KV store, and SwiGLU product for `tokens` tokens."""
    kernels, act = bench.kernels, bench.activations
    hidden, normed, branch = act(tokens, d_model).float(), act(tokens, d_model), act(tokens, d_model).float()
    weight = torch.ones(d_model, device=bench.device)
    norm = bench.median(lambda i: kernels.rms_norm(hidden, weight, NORM_EPS, normed))
    residual = bench.median(lambda i: hidden.add_(branch))
    seconds = {("norm", d_model): norm, ("residual", d_model): residual}
    seconds["rope", (shape.n_heads + shape.n_kv_heads) * shape.head_dim] = _time_rope(bench, shape, tokens)
    seconds["silu_mul", d_ffn] = _time_silu_mul(bench, d_ffn, tokens)
    return [ElementwiseTiming(bench.side, what, tokens, width, s) for (what, width), s in seconds.items()]


def _time_rope(bench: KernelBench, shape: AttentionShape, tokens: int) -> float:
    rows, dim = _row_index(bench.device, tokens, tokens), shape.head_dim
    angles = torch.rand(2, tokens, dim // 2, device=bench.device)
    rope = RopeTable(angles[0].cos(), angles[1].sin(), "halves")
    caches = bench.pool.rotate_kv(tokens, shape.n_kv_heads, dim, "bf16")
    qkv, _, _ = _attention_buffers(bench, shape, tokens)

    def run(i: int) -> None:
        kv: LayerKV = caches[i % len(caches)]
        bench.kernels.rope_store(qkv, shape.heads, None, None, NORM_EPS, rope, rows, kv)

    return bench.median(run)


def _time_silu_mul(bench: KernelBench, d_ffn: int, tokens: int) -> float:
    """What gate_up takes beyond its two matmuls; the matmuls are kept small (64 columns) and in cache."""
    weight = bench.pool.rotate_weights("BF16", d_ffn, 64)[0]
    x, both, tile = bench.activations(tokens, 64), bench.activations(tokens, 2 * d_ffn), _tile(bench, tokens)
    fused = bench.median(lambda i: bench.kernels.gate_up(x, weight, weight, both[:, :d_ffn], both, tile))
    one = bench.median(lambda i: bench.kernels.linear(x, weight, both[:, :d_ffn], tile))
    return max(0.0, fused - 2 * one)


def _attention_buffers(
    bench: KernelBench, shape: AttentionShape, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(qkv, out, partial) for so many tokens."""
    n_heads, n_kv, dim = shape.heads
    qkv = bench.activations(tokens, (n_heads + 2 * n_kv) * dim)
    partial = None
    if tokens <= SMALL_BATCH:
        partial = torch.empty(tokens, n_heads, ATTENTION_SPLITS, dim + 2, device=bench.device)
    return qkv, bench.activations(tokens, n_heads * dim), partial


def _row_index(device: torch.device, tokens: int, context: int) -> RowIndex:
    """The last `tokens` cells of one sequence of `context` cells."""
    past = context - tokens
    position = torch.arange(past, context, dtype=torch.int32, device=device)
    return RowIndex(torch.zeros_like(position), position, (Segment(0, 0, tokens, past),), context)


def _tile(bench: KernelBench, tokens: int) -> torch.Tensor:
    return torch.empty(DEQUANT_BYTES if tokens > SMALL_BATCH else 0, dtype=torch.uint8, device=bench.device)
