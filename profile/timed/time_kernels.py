"""Times the runtime's own kernels on a device: matmuls, attention and what lies between them."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

import torch

from pshard.batch_sizes import SMALL_BATCH
from pshard.buffers import DEQUANT_BYTES
from pshard.machine import AttentionTiming, ElementwiseTiming, MatmulTiming
from pshard.profile.timed.operands import OperandPool
from pshard.profile.timing_loop import Pace, graph_seconds, mean_seconds, median_seconds, replay_seconds
from pshard.runtime.kernels.api import InnerNorm, Kernels, LayerKV, Packed, RopeTable, RowIndex, Segment
from pshard.runtime.kernels.cpu.recording import record
from pshard.runtime.kernels.row_index import make_rows
from pshard.steps.graph_runs import LAUNCH_BOUND
from pshard.units.attention import ATTENTION_PIECES
from pshard.units.kv_cells import KV_BLOCK, kv_blocks
from pshard.units.operations import Attend
from pshard.units.state import CellState, StateShape

NORM_EPS = 1e-6
EMBEDDING_ROWS = 16384
DOUBTFUL, LEAST_DOUBT = 1.25, 8e-6  # times, and seconds, that a timing may exceed what its neighbours allow
AGAIN = 3  # times that a doubtful one is measured more
UNLIKE, LARGE = 1.4, 1 << 24  # times as long for each weight as another matrix of at least so many takes
LOOKS = 8  # slow calls that measuring such ones again may take
HEATS = 1024  # tokens whose products keep a GPU's matrix units busy enough to reach its power limit
UNLIKE_TOKENS = 64  # that a host is given, which would take a while to draw more
THIN = 64  # columns of a matmul that is only there to carry the thing that is timed


@dataclass(frozen=True)
class KernelBench:
    """Kernels of one device with what timing them takes.

    `side` is "host" or "acc", as in the profile's tables. A series of growing sizes ends at calls longer than `slow`.
    rehearses: every call is made once and takes no time, for those who want to know which kernels there will be.
    """

    side: str
    kernels: Kernels
    device: torch.device
    pool: OperandPool
    pace: Pace
    slow: float
    rehearses: bool = False

    def seconds(self, run: Callable[[int], object], tokens: int) -> float:
        """Seconds of run(i), a kernel call for so many tokens, as a step adds them up."""
        if self.device.type == "cpu" and not self.rehearses:
            return mean_seconds(run, self.pace)
        return self.median(run, tokens)

    def replayed_seconds(self, run: Callable[[int], object], tokens: int) -> float:
        """The same of calls that read much, as layers on the host make them: written down before, in small batches."""
        if self.device.type != "cpu" or self.rehearses or tokens > SMALL_BATCH or not self.kernels.recordable:
            return self.seconds(run, tokens)
        return replay_seconds(run, self.pace, _write_down)

    def median(self, run: Callable[[int], object], tokens: int) -> float:
        """The median of `seconds`, fit for differences; in a CUDA graph where the runtime uses one."""
        if self.rehearses:
            run(0)
            return 0.0
        cuda = self.device.type == "cuda"
        pace = self.pace.under_load() if cuda and tokens >= HEATS else self.pace
        if cuda and self.kernels.repeatable and tokens <= LAUNCH_BOUND:
            return graph_seconds(run, pace)
        return median_seconds(run, pace, cuda)

    def linear_calls(self, weights: Sequence[Packed], tokens: int) -> Callable[[int], None]:
        """A function of i that multiplies so many tokens with copy i of a matrix; copies take turns."""
        x, out = self.normed(tokens, weights[0].cols), self.activations(tokens, weights[0].rows)
        tile = _tile(self, tokens)
        return lambda i: self.kernels.linear(x, weights[i % len(weights)], out, tile)

    def normed(self, tokens: int, width: int) -> torch.Tensor:
        """Activations that a norm has handed over, as in a model: the next product's launches quantise nothing."""
        x = self.activations(tokens, width)
        if tokens <= SMALL_BATCH:
            self.kernels.rms_norm(x.float(), torch.ones(width, device=self.device), NORM_EPS, x)
        return x

    def activations(self, tokens: int, width: int) -> torch.Tensor:
        """Random [tokens, width] in the kernels' activation type, every token another: a GPU that multiplies equal ones
        takes less power, and so lowers its clock less than in a model."""
        unlike = min(tokens, UNLIKE_TOKENS) if self.device.type == "cpu" else tokens
        generator = torch.Generator(self.device).manual_seed(0)
        rows = torch.randn(unlike, width, generator=generator, device=self.device, dtype=self.kernels.act_dtype)
        return rows if unlike == tokens else rows.repeat(-(-tokens // unlike), 1)[:tokens]


def _write_down(work: Callable[[], object]) -> Callable[[], object] | None:
    def once() -> None:
        work()

    calls = record(once)
    return calls.replay if calls else None


def time_series(sizes: Iterable[int], slow: float, seconds_of: Callable[[int], float]) -> list[tuple[int, float]]:
    """(size, seconds) for growing sizes; ends after a slow one, and before one that would take twice as long as that.

    Above the last one the planner goes on in proportion.
    """
    series: list[tuple[int, float]] = []
    for size in sorted(sizes):
        if series and series[-1][1] * max(1.0, size / series[-1][0] / 2) > slow:
            break
        series.append((size, seconds_of(size)))
    _repeat_doubtful(series, seconds_of)
    return series


def _repeat_doubtful(series: list[tuple[int, float]], seconds_of: Callable[[int], float]) -> None:
    """Measure again what takes longer than more of the same, or longer for each piece than less of it, and keep the
    shortest: a machine whose cores others use stands still for milliseconds, and one such row spoils a plan."""
    for i, (size, _) in enumerate(series):
        bounds = [seconds for _, seconds in series[i + 1 : i + 2]]
        bounds += [seconds * size / fewer for fewer, seconds in series[max(0, i - 1) : i]]
        for _ in range(AGAIN):
            if not bounds or series[i][1] <= DOUBTFUL * min(bounds) + LEAST_DOUBT:
                break
            series[i] = size, min(series[i][1], seconds_of(size))


def time_matmul(bench: KernelBench, qtype: str, rows: int, cols: int, tokens: Sequence[int]) -> list[MatmulTiming]:
    """x[t, cols] @ W[rows, cols].T for each t of `tokens`, until one is slow; W is another copy in every call."""
    weights = bench.pool.rotate_weights(qtype, rows, cols)
    series = time_series(tokens, bench.slow, lambda count: bench.seconds(bench.linear_calls(weights, count), count))
    return [MatmulTiming(bench.side, qtype, rows, cols, count, seconds) for count, seconds in series]


def repeat_unlike(bench: KernelBench, rows: Sequence[MatmulTiming]) -> dict[object, MatmulTiming]:
    """Measure some rows again: those that take much longer for each weight than another large matrix of their type does
    with as many tokens. Row -> what counts, the shorter, as seconds in which others use the machine's memory double
    whole rows. The most unlike come first; takes as long as LOOKS slow calls at most.
    """
    large = [r for r in rows if r.rows * r.cols >= LARGE]
    least: dict[tuple[str, int], float] = {}
    for r in large:
        key = r.qtype, r.tokens
        least[key] = min(least.get(key, inf), r.seconds / (r.rows * r.cols))

    def unlike(r: MatmulTiming) -> float:
        return r.seconds / (r.rows * r.cols) / least[r.qtype, r.tokens]

    found: dict[object, MatmulTiming] = {}
    end = time.monotonic() + LOOKS * bench.slow
    for r in sorted((r for r in large if unlike(r) > UNLIKE), key=unlike, reverse=True):
        if time.monotonic() > end:
            break
        (now,) = time_matmul(bench, r.qtype, r.rows, r.cols, [r.tokens])
        found[r] = replace(r, seconds=min(r.seconds, now.seconds))
    return found


def time_attention(
    bench: KernelBench, shape: Attend, kv_type: str, tokens: int, contexts: Sequence[int], sequences: int = 1
) -> list[AttentionTiming]:
    """Attention of the last `tokens` of each context, of so many sequences, over KV caches that rotate; until one is
    slow. Caches of several sequences that the operand pool has no room for are left out."""
    width = shape.n_kv_heads * shape.head_dim
    if sequences > 1:
        block = CellState(width, kv_type, kv_type).nbytes(StateShape(KV_BLOCK, 1, kv_type, kv_type))
        most = bench.pool.nbytes // block // sequences  # blocks of each
        contexts = [context for context in contexts if kv_blocks(context, 1) <= most]
    series = time_series(
        contexts, bench.slow, lambda context: _time_attention(bench, shape, kv_type, tokens, context, sequences)
    )
    return [
        AttentionTiming(bench.side, *shape.heads, kv_type, tokens, context, seconds, sequences)
        for context, seconds in series
    ]


def _time_attention(
    bench: KernelBench, shape: Attend, kv_type: str, tokens: int, context: int, sequences: int
) -> float:
    cells = sequences * kv_blocks(context, 1) * KV_BLOCK
    caches = bench.pool.rotate_kv(cells, shape.n_kv_heads, shape.head_dim, kv_type)
    qkv, out, partial = attention_buffers(bench, shape, sequences * tokens)
    rows, scale = index_rows(bench.device, tokens, context, sequences), shape.head_dim**-0.5
    return bench.seconds(
        lambda i: bench.kernels.attention(qkv, shape.heads, caches[i % len(caches)], rows, scale, out, partial),
        sequences * tokens,
    )


def time_elementwise(
    bench: KernelBench, d_model: int, d_ffn: int, shape: Attend, tokens: Sequence[int]
) -> list[ElementwiseTiming]:
    """Norm, residual add, RoPE with KV store, and SwiGLU product for each number of tokens; where one launch makes a
    norm of what is added and the norm that follows, that too."""
    rope_width = (shape.n_heads + shape.n_kv_heads) * shape.head_dim
    kinds: tuple[tuple[str, int, Callable[[int], float]], ...] = (
        ("norm", d_model, lambda count: _time_norm(bench, d_model, count)),
        ("residual", d_model, lambda count: _time_residual(bench, d_model, count)),
        ("rope", rope_width, lambda count: _time_rope(bench, shape, count)),
        ("silu_mul", d_ffn, lambda count: _time_silu_mul(bench, d_ffn, count)),
    )
    if bench.kernels.fuses_norms:
        kinds += (("two norms", d_model, lambda count: _time_two_norms(bench, d_model, count)),)
    rows = [
        ElementwiseTiming(bench.side, what, count, width, seconds)
        for what, width, seconds_of in kinds
        for count, seconds in time_series(tokens, inf, seconds_of)
    ]
    return [*rows, *_time_quantise(bench, d_model, [count for count in tokens if count <= SMALL_BATCH])]


def _time_quantise(bench: KernelBench, width: int, tokens: Sequence[int]) -> list[ElementwiseTiming]:
    """What a GPU's product of few rows takes longer where nobody has left its input quantised; the matrix is kept small
    and in cache. None where rounding costs no launch."""
    if bench.device.type == "cpu" and not bench.rehearses:
        return []
    weight = bench.pool.rotate_weights("Q4_0", THIN, width)[0]

    def seconds_of(count: int) -> float:
        out, tile, fresh = bench.activations(count, THIN), _tile(bench, count), bench.activations(count, width)
        handed = bench.median(bench.linear_calls([weight], count), count)
        return bench.median(lambda i: bench.kernels.linear(fresh, weight, out, tile), count) - handed

    found = time_series(tokens, inf, seconds_of)
    return [ElementwiseTiming(bench.side, "quantise", count, width, s) for count, s in found if s > 0]


def time_embedding(bench: KernelBench, qtype: str, width: int, tokens: Sequence[int]) -> list[ElementwiseTiming]:
    """Looking up the rows of so many tokens in an embedding table of a quant type."""
    tables = bench.pool.rotate_weights(qtype, EMBEDDING_ROWS, width)
    series = time_series(tokens, inf, lambda count: _time_lookup(bench, tables, count))
    return [ElementwiseTiming(bench.side, "embed", count, width, seconds) for count, seconds in series]


def _time_lookup(bench: KernelBench, tables: list[Packed], tokens: int) -> float:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(EMBEDDING_ROWS, (8, tokens), generator=generator).to(bench.device)
    out = torch.empty(tokens, tables[0].cols, device=bench.device)

    def run(i: int) -> None:
        bench.kernels.look_up(tables[i % len(tables)], ids[i % len(ids)], out)

    return bench.median(run, tokens)


def _time_norm(bench: KernelBench, d_model: int, tokens: int) -> float:
    hidden, normed = bench.activations(tokens, d_model).float(), bench.activations(tokens, d_model)
    weight = torch.ones(d_model, device=bench.device)
    return bench.seconds(lambda i: bench.kernels.rms_norm(hidden, weight, NORM_EPS, normed), tokens)


def _time_two_norms(bench: KernelBench, d_model: int, tokens: int) -> float:
    hidden, normed = bench.activations(tokens, d_model).float(), bench.activations(tokens, d_model)
    weight = torch.ones(d_model, device=bench.device)
    inner = InnerNorm(hidden.clone(), weight, NORM_EPS)
    return bench.seconds(lambda i: bench.kernels.add_normed(inner, hidden, (weight, NORM_EPS, normed)), tokens)


def _time_residual(bench: KernelBench, d_model: int, tokens: int) -> float:
    """What accumulating a matmul's result into the residual stream adds; the matmul is kept small and in cache."""
    weight = bench.pool.rotate_weights("BF16", d_model, THIN)[0]
    x, out, tile = bench.activations(tokens, THIN), bench.activations(tokens, d_model), _tile(bench, tokens)
    hidden = out.float()
    added = bench.median(lambda i: bench.kernels.linear(x, weight, hidden, tile, None, True), tokens)
    alone = bench.median(lambda i: bench.kernels.linear(x, weight, out, tile), tokens)
    return max(0.0, added - alone)


def _time_rope(bench: KernelBench, shape: Attend, tokens: int) -> float:
    rows, dim = index_rows(bench.device, tokens, tokens), shape.head_dim
    angles = torch.rand(2, tokens, dim // 2, device=bench.device)
    rope = RopeTable(angles[0].cos(), angles[1].sin(), "halves")
    caches = bench.pool.rotate_kv(tokens, shape.n_kv_heads, dim, "bf16")
    qkv, _, _ = attention_buffers(bench, shape, tokens)

    def run(i: int) -> None:
        kv: LayerKV = caches[i % len(caches)]
        bench.kernels.rope_store(qkv, shape.heads, None, None, NORM_EPS, rope, rows, kv)

    return bench.seconds(run, tokens)


def _time_silu_mul(bench: KernelBench, d_ffn: int, tokens: int) -> float:
    """What gate_up takes beyond its two matmuls; the matmuls are kept small and in cache."""
    weight = bench.pool.rotate_weights("BF16", d_ffn, THIN)[0]
    x, both, tile = bench.activations(tokens, THIN), bench.activations(tokens, 2 * d_ffn), _tile(bench, tokens)
    fused = bench.median(lambda i: bench.kernels.gate_up(x, weight, weight, both[:, :d_ffn], both, tile), tokens)
    one = bench.median(lambda i: bench.kernels.linear(x, weight, both[:, :d_ffn], tile), tokens)
    return max(0.0, fused - 2 * one)


def attention_buffers(
    bench: KernelBench, shape: Attend, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(qkv, out, partial) for so many tokens."""
    n_heads, n_kv, dim = shape.heads
    qkv = bench.activations(tokens, (n_heads + 2 * n_kv) * dim)
    partial = None
    if tokens <= SMALL_BATCH:
        partial = torch.empty(tokens, n_heads, ATTENTION_PIECES, dim + 2, device=bench.device)
    return qkv, bench.activations(tokens, n_heads * dim), partial


def index_rows(device: torch.device, tokens: int, context: int, sequences: int = 1) -> RowIndex:
    """The last `tokens` cells of each of so many sequences of `context` cells, whose blocks follow each other."""
    each = kv_blocks(context, 1)
    blocks = [tuple(range(s * each, (s + 1) * each)) for s in range(sequences)]
    segments = [Segment(s, s * tokens, tokens, context - tokens, held) for s, held in enumerate(blocks)]
    return make_rows(segments, device)


def _tile(bench: KernelBench, tokens: int) -> torch.Tensor:
    return torch.empty(DEQUANT_BYTES if tokens > SMALL_BATCH else 0, dtype=torch.uint8, device=bench.device)
