"""Host kernels: C++ on packed weights for few tokens; for many a matrix unit, or else torch's bf16 GEMM."""

import torch
import torch.nn.functional as F

from pshard.batch_sizes import SMALL_BATCH, TILE_TOKENS
from pshard.model_config import LEAST_SUM, Experts
from pshard.quant import QUANT_TYPES
from pshard.runtime.kernels.api import (
    AS_THEY_ARE,
    ExpertWeights,
    LayerKV,
    Packed,
    RopeTable,
    Routes,
    RowIndex,
    Scoring,
)
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host_streams import StreamsOnHost
from pshard.runtime.kernels.row_index import list_spans
from pshard.runtime.kernels.unpack import plain_rows
from pshard.units.operations import BENDS

_KV_NAMES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int8: "q8_0",
    torch.uint8: "q4_0",
}
_TILE_LOSES = ("F32", "F16")  # bf16 tiles would drop bits that the file has
# without a matrix unit: up to here the C++ kernel keeps up with torch's GEMM: 1.1 against 0.75 TFLOP/s on two Zen 5
# cores, dequantisation included
NATIVE_TOKENS = 512
# F32 and BF16 weights need no dequantisation. Up to here the C++ kernel is used all the same: a row's bits do not
# depend on how many there are, and torch, which has one thread then, takes 0.4 to 1.2 of its time at 16 to 64 rows on
# two cores. F16 takes torch 3.5 times as long.
PLAIN_TOKENS = {"F32": SMALL_BATCH, "BF16": SMALL_BATCH, "F16": NATIVE_TOKENS}
PLAIN_TILES = 8  # of a matrix unit, up to here vectors are faster
_NEVER = 2**31 - 1  # tokens
LATENT_ROWS = 64  # above this many new tokens per sequence torch attends over latents


class HostRows:
    """What moves or scales rows of activations: see `RowKernels`."""

    def warm_rows(self, x: torch.Tensor, table: torch.Tensor, position: torch.Tensor) -> None:
        native.warm_rows(x, (x.shape[0], x.shape[1]), x.stride(0), table, position)

    def gate_rows(self, x: torch.Tensor, gate: torch.Tensor, curve: str = "sigmoid") -> None:
        each = x.shape[1] // gate.shape[1]
        native.gate_rows(x, (x.shape[0], x.shape[1]), (x.stride(0), gate.stride(0)), gate, each, curve)

    def gate_mul(self, x: torch.Tensor, up: torch.Tensor, out: torch.Tensor, activation: str = "silu") -> None:
        strides = x.stride(0), up.stride(0), out.stride(0)
        native.gate_mul(x, up, (x.shape[0], x.shape[1]), strides, out, activation)

    def resize_heads(self, x: torch.Tensor, out: torch.Tensor, heads: int, by: float = 1.0) -> None:
        sizes = heads, x.shape[1] // heads, out.shape[1] // heads
        native.resize_heads(x, x.shape[0], sizes, by, out, (x.stride(0), out.stride(0)))

    def times_rows(self, x: torch.Tensor, by: torch.Tensor) -> None:
        native.times_rows(x, (x.shape[0], x.shape[1]), (x.stride(0), by.stride(0)), by)

    def place(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        native.copy_rows(rows, (rows.shape[0], rows.shape[1]), (rows.stride(0), out.stride(0)), out)

    def add_rows(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        native.add_rows(x, (x.shape[0], x.shape[1]), (x.stride(0), rows.stride(0)), rows)

    def weigh_rows(self, x: torch.Tensor, weights: torch.Tensor) -> None:
        native.weigh_rows(x, (x.shape[0], x.shape[1]), (x.stride(0), weights.stride(0)), weights)

    def centre_rows(self, x: torch.Tensor) -> None:
        native.centre_rows(x, (x.shape[0], x.shape[1]), x.stride(0))

    def bend_rows(self, x: torch.Tensor, how: str, numbers: torch.Tensor | None = None, limit: float = 0.0) -> None:
        native.bend_rows(x, (x.shape[0], x.shape[1]), x.stride(0), BENDS.index(how), numbers, limit)

    def norm_heads(self, x: torch.Tensor, weight: torch.Tensor, head: int, eps: float, centred: bool = False) -> None:
        native.norm_heads(x, (x.shape[0], x.shape[1]), x.stride(0), weight, head, eps, centred)

    def sum_squares(self, x: torch.Tensor, first: int, out: torch.Tensor) -> None:
        native.sum_squares(x, (x.shape[0], x.shape[1]), x.stride(0), first, out)

    def norm_wide(
        self,
        x: torch.Tensor,
        q_norm: torch.Tensor,
        k_norm: torch.Tensor,
        sums: torch.Tensor,
        of: tuple[int, int],
        eps: float,
    ) -> None:
        widths = q_norm.shape[0], k_norm.shape[0]
        native.norm_wide(x, x.shape[0], x.stride(0), widths, (q_norm, k_norm), sums, of, eps)

    def scale_rows(self, x: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        strides = x.stride(0), hidden.stride(0)
        native.scale_rows(x, (x.shape[0], x.shape[1]), strides, hidden, weight, hidden.shape[1])


class HostKernels(HostRows, StreamsOnHost):
    """Float32 activations. What the C++ library does not speed up is inherited from the plain kernels. exact: products
    leave the matrix unit alone, which takes many tokens at once and rounds otherwise than vectors."""

    act_dtype = torch.float32
    fills = False  # rows are not skipped here, and more of them cost a CPU more
    recordable = True
    fuses_norms = False

    def __init__(self, exact: bool = False) -> None:
        self._exact = exact

    def look_up(self, table: Packed, ids: torch.Tensor, out: torch.Tensor) -> None:
        native.get_rows(table, ids, ids.numel(), out)

    def linear(
        self,
        x: torch.Tensor,
        weight: Packed,
        out: torch.Tensor,
        tile: torch.Tensor,
        bias: torch.Tensor | None = None,
        accumulate: bool = False,
    ) -> None:
        tokens, on_tiles = x.shape[0], suits_tiles(x.shape[0], weight.qtype, self._exact)
        plain = None if on_tiles or tokens <= PLAIN_TOKENS.get(weight.qtype, 0) else plain_rows(weight)
        if plain is not None:
            result = F.linear(x.to(plain.dtype), plain, None if bias is None else bias.to(plain.dtype))
            out.add_(result) if accumulate else out.copy_(result)
            return
        if on_tiles or tokens <= NATIVE_TOKENS:
            run = native.linear_tiled if on_tiles else native.linear
            run(x, weight, out, tokens, x_stride=x.stride(0), out_stride=out.stride(0), accumulate=accumulate)
        else:
            _multiply_dequantised(x, weight, out, tile, accumulate)
        if bias is not None:
            _add_bias(out, bias)

    def linear_group(
        self,
        x: torch.Tensor,
        weights: tuple[Packed, ...],
        out: torch.Tensor,
        tile: torch.Tensor,
        biases: tuple[torch.Tensor | None, ...],
    ) -> None:
        tokens = x.shape[0]
        if not all(_suits_vectors(tokens, weight.qtype, self._exact) for weight in weights):
            super().linear_group(x, weights, out, tile, biases)
            return
        native.linear_group(x, weights, out, tokens, x_stride=x.stride(0), out_stride=out.stride(0))
        at = 0
        for weight, bias in zip(weights, biases):
            if bias is not None:
                _add_bias(out[:, at : at + weight.rows], bias)
            at += weight.rows

    def gate_up(
        self,
        x: torch.Tensor,
        gate: Packed,
        up: Packed,
        out: torch.Tensor,
        both: torch.Tensor,
        tile: torch.Tensor,
        activation: str = "silu",
    ) -> None:
        width, tokens = gate.rows, x.shape[0]
        on_tiles = all(suits_tiles(tokens, weight.qtype, self._exact) for weight in (gate, up))
        if on_tiles or tokens <= _vector_tokens(gate.qtype):
            run = native.gate_up_tiled if on_tiles else native.gate_up
            run(x, gate, up, out, tokens, x_stride=x.stride(0), out_stride=out.stride(0), gate_kind=activation)
            return
        self.linear(x, gate, both[:, :width], tile)
        self.linear(x, up, both[:, width:], tile)
        self.gate_mul(both[:, :width], both[:, width:], out, activation)

    def ffn(
        self,
        x: torch.Tensor,
        gate: Packed,
        up: Packed,
        down: Packed,
        out: torch.Tensor,
        accumulate: bool,
        activation: str = "silu",
    ) -> bool:
        """Waking the pool's threads once instead of twice saves 20 us."""
        tokens = x.shape[0]
        if not all(_suits_vectors(tokens, weight.qtype, self._exact) for weight in (gate, up, down)):
            return False
        strides = {"x_stride": x.stride(0), "out_stride": out.stride(0)}
        native.ffn(x, gate, up, down, out, tokens, **strides, accumulate=accumulate, gate_kind=activation)
        return True

    def route(
        self,
        x: torch.Tensor,
        router: Packed,
        rule: Experts,
        routes: Routes,
        bias: torch.Tensor | None = None,
        choice_bias: torch.Tensor | None = None,
        begin: torch.Tensor | None = None,
        factors: torch.Tensor | None = None,
    ) -> None:
        """See `Kernels.route`; x has no rows that only fill a micro-batch."""
        found, most = (routes.ids, routes.weights), routes.ids.shape[0]
        biases = (bias, choice_bias, factors)
        native.route(x, router, rule, found, x.shape[0], x_stride=x.stride(0), biases=biases, rows=most)

    def choose_chunks(self, scored: Routes, rule: Experts, routes: Routes) -> None:
        """See `Kernels.choose_chunks`."""
        assert rule.chunks is not None
        sizes = (*scored.ids.shape, rule.of_chunks().used, rule.chunks.each)
        given, found = (scored.ids, scored.weights), (routes.ids, routes.weights)
        native.choose_chunks(given, sizes, rule.scale * rule.chunks.scale, LEAST_SUM, found)

    def experts(
        self,
        x: torch.Tensor,
        routes: Routes,
        weights: ExpertWeights,
        rule: Experts,
        out: torch.Tensor,
        scratch: dict[str, torch.Tensor],
        accumulate: bool,
    ) -> None:
        room = (scratch["gated"], scratch["picked"], scratch["order"])
        taken, strides = (routes.ids, routes.weights), {"x_stride": x.stride(0), "out_stride": out.stride(0)}
        matrices = _describe_experts(weights, out.shape[1], self._exact)
        added = weights.addresses if weights.summed is None else weights.summed
        native.experts(
            x, taken, matrices, rule, out, room, x.shape[0], **strides, accumulate=accumulate,
            added=added if weights.wave.is_last else 0, demand=weights.demand.open() if weights.demand else None,
        )  # fmt: skip

    def attention(
        self,
        qkv: torch.Tensor,
        heads: tuple[int, int, int],
        kv: LayerKV,
        rows: RowIndex,
        scale: float,
        out: torch.Tensor,
        partial: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
        bent: Scoring = AS_THEY_ARE,
    ) -> None:
        if bent.seen is not None and (bent.slopes is not None or rows.window):
            super().attention(qkv, heads, kv, rows, scale, out, partial, sinks=sinks, bent=bent)
            return
        spans = list_spans(rows.segments) if rows.spans is None else rows.spans
        kinds, blocks = _kinds(kv), (rows.blocks, kv.k.shape[1])
        strides, seen = (qkv.stride(0), out.stride(0)), (rows.window, sinks)
        given, scores = (qkv, kv.k, kv.v, kinds, spans, heads), (bent.cap, bent.slopes, bent.chunked)
        words = (None, 0) if bent.seen is None else (bent.seen, bent.seen.stride(0))
        chosen = (*words, bent.each, bent.most)
        native.attention(*given, scale, out, strides=strides, blocks=blocks, seen=seen, bent=scores, chosen=chosen)

    def head_products(self, x: torch.Tensor, stack: Packed, out: torch.Tensor) -> None:
        tokens, heads, _ = x.shape
        if tokens > NATIVE_TOKENS:
            super().head_products(x, stack, out)
            return
        strides = (x.stride(0), x.stride(1)), (out.stride(0), out.stride(1))
        native.head_products(x, stack, heads, out, tokens, x_strides=strides[0], out_strides=strides[1])

    def store_latent(
        self,
        kv: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        rope: RopeTable,
        rows: RowIndex,
        cells: torch.Tensor,
    ) -> None:
        native.store_latent(
            (kv, kv.stride(0)),
            (q, q.stride(0), q.stride(1)),
            (out, out.stride(0), out.stride(1)),
            (q.shape[0], q.shape[1], norm.shape[0]),
            (norm, eps),
            (rope.cos, rope.sin, rope.cos.shape[-1], rope.pairing),
            (rows.begin, rows.position, rows.blocks),
            (cells, _KV_NAMES[cells.dtype], cells.shape[1]),
        )

    def attend_latent(
        self,
        q: torch.Tensor,
        rank: int,
        cells: torch.Tensor,
        rows: RowIndex,
        scale: float,
        out: torch.Tensor,
        partial: torch.Tensor | None,
    ) -> None:
        """As attention of which cells are keys and values: what it mixes of their last numbers nobody reads."""
        if any(s.tokens > LATENT_ROWS for s in rows.segments):
            super().attend_latent(q, rank, cells, rows, scale, out, partial)
            return
        _, heads, width = q.shape
        self.attention(q.flatten(1), (heads, 1, width), LayerKV(cells, cells), rows, scale, out.flatten(1), None)

    def rms_norm(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        accumulate: bool = False,
        rounded: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        (tokens, width), strides = hidden.shape, (hidden.stride(0), out.stride(0))
        sizes = (tokens, width)
        native.rms_norm(hidden, weight, eps, *sizes, out, strides=strides, accumulate=accumulate, scale=scale)

    def rope_store(
        self,
        qkv: torch.Tensor,
        heads: tuple[int, int, int],
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        rope: RopeTable,
        rows: RowIndex,
        kv: LayerKV,
        values: bool = False,
    ) -> None:
        turn = (rope.cos, rope.sin, rope.cos.shape[-1], rope.pairing)
        index = (rows.begin, rows.position, rows.blocks)
        cache = (kv.k, kv.v, _kinds(kv), kv.k.shape[1])
        norms = (q_norm, k_norm, eps)
        native.rope_store(qkv, qkv.stride(0), rows.tokens, heads, norms, turn, index, cache, values=values)


def _add_bias(out: torch.Tensor, bias: torch.Tensor) -> None:
    """Torch's adding could not be recorded."""
    native.add_bias(out, (out.shape[0], out.shape[1]), out.stride(0), bias)


def _multiply_dequantised(
    x: torch.Tensor, weight: Packed, out: torch.Tensor, tile: torch.Tensor, accumulate: bool
) -> None:
    """As many rows at a time as `tile` holds in bf16, for torch's GEMM."""
    half = x.bfloat16()
    rows_at_once = max(16, tile.numel() // (2 * weight.cols) // 16 * 16)
    for start in range(0, weight.rows, rows_at_once):
        stop = min(start + rows_at_once, weight.rows)
        rows = tile[: (stop - start) * weight.cols * 2].view(torch.bfloat16).view(stop - start, weight.cols)
        native.dequantize(weight, start, stop, rows, "bf16")
        part = F.linear(half, rows)
        if accumulate:
            out[:, start:stop] += part
        else:
            out[:, start:stop] = part


def _describe_experts(weights: ExpertWeights, hidden: int, exact: bool) -> native.ExpertMatrices:
    """Of experts none of which is here, types and rows do not matter."""
    stacks = (weights.gate, weights.up, weights.down)
    qtypes = [next((matrix.qtype for matrix in stack if matrix is not None), "F32") for stack in stacks]
    inner = next((matrix.rows for matrix in weights.gate if matrix is not None), 1)
    gate, up, down = (_least_tiled(qtype, exact) for qtype in qtypes)
    return native.ExpertMatrices(
        weights.addresses, (qtypes[0], qtypes[1], qtypes[2]), hidden, inner, weights.biases, (max(gate, up), down)
    )


def _kinds(kv: LayerKV) -> tuple[str, str]:
    return _KV_NAMES[kv.k.dtype], _KV_NAMES[kv.v.dtype]


def _vector_tokens(qtype: str) -> int:
    """Up to so many tokens the C++ vector kernels are used where there are no tiles."""
    return PLAIN_TOKENS.get(qtype, NATIVE_TOKENS)


def _suits_vectors(tokens: int, qtype: str, exact: bool) -> bool:
    return tokens <= _vector_tokens(qtype) and not suits_tiles(tokens, qtype, exact)


def suits_tiles(tokens: int, qtype: str, exact: bool = False) -> bool:
    """Whether so many tokens are for this machine's matrix unit, which it may lack: where it is fastest, and bits may
    depend on how many tokens there are."""
    return not exact and tokens >= _worth_tiles(qtype) and _has_tiles(qtype)


def _least_tiled(qtype: str, exact: bool) -> int:
    """So many tokens and more are for the matrix unit."""
    return _worth_tiles(qtype) if _has_tiles(qtype) and not exact else _NEVER


def _worth_tiles(qtype: str) -> int:
    return 1 + (TILE_TOKENS if QUANT_TYPES[qtype].planes else PLAIN_TILES)


def _has_tiles(qtype: str) -> bool:
    return qtype not in _TILE_LOSES and native.tiles() != ""
