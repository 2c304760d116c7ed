"""CudaKernels: the kernels of a CUDA device, in Triton, with cuBLAS for large batches. See runtime/kernels/api.py.

Weights are read in the packed layout. Up to SMALL_BATCH rows: int8 activations, integer products on the tensor cores or
with dp4a. Above: a tile is dequantised to bfloat16 and a library GEMM does the rest. Every sum has a fixed order and no
launch size depends on device data, so runs repeat bit for bit and can be captured in a CUDA graph.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from pshard.batch_sizes import SMALL_BATCH
from pshard.gpu_tiles import Tile, TileChoice
from pshard.quant import ROW_BLOCK, align
from pshard.runtime.kernels.api import LayerKV, Packed, RopeTable, RowIndex
from pshard.runtime.kernels.gpu import triton_attention, triton_cells, triton_rows
from pshard.runtime.kernels.gpu.default_tiles import TUNING, default_tile, gated_kernel
from pshard.runtime.kernels.gpu.products import triton_dequant, triton_float, triton_matvec, triton_quantise
from pshard.runtime.kernels.gpu.products.triton_decode import ENCODINGS, places
from pshard.runtime.kernels.gpu.products.triton_fragments import FACTORS
from pshard.units.attention import decode_pieces

if TYPE_CHECKING:
    from pshard.runtime.ranks.peer_memory import PeerExchange

MAX_COLS = 65536  # widest input of a matrix for up to SMALL_BATCH rows: sizes the activations' scratch
PARTIAL_FLOATS = 4 << 20  # partial sums of matrices whose columns are cut into pieces
COUNTERS = 1 << 16  # one for each program of a piece, where the columns of a matrix are cut into pieces
QUANTISED_CHUNK = 32 + 4 + 8  # bytes of 32 activations: codes, scale, two sums
# of `matvec_kernel`, where the result is no part of a sum over ranks
NO_PUSH: dict[str, Any] = {
    "peers": None, "epochs": None, "WORDS": 0, "RANKS": 0, "RANK": 0, "WIRE": None, "SLICES": 0,
}  # fmt: skip
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _pieces(tile: Tile, rows: int, depth: int, tokens: int) -> tuple[int, int]:
    """(pieces, depth of a piece): cut until `tile.programs` run, each piece whole tiles, partial sums within bounds."""
    blocks = -(-rows // tile.rows)
    wanted = min(-(-tile.programs // blocks), PARTIAL_FLOATS // (rows * tokens))
    each = align(-(-depth // max(1, wanted)), tile.depth)
    return -(-depth // each), each


@dataclass(frozen=True)
class Quantised:
    """Activations as `store_quantised` leaves them for the matvec kernel: room for a power of two of rows."""

    words: torch.Tensor
    scale: torch.Tensor
    sums: torch.Tensor


class CudaKernels:
    """Kernels of one CUDA device (with TRITON_INTERPRET=1: of the CPU, for tests). Implements `Kernels`.

    Holds `scratch_nbytes` bytes on the device beside the arena, allocated here and never again: 27 MiB for
    `max_tokens` of SMALL_BATCH or more. Not for use by two threads or two streams at once.

    For up to SMALL_BATCH rows, rms_norm, attention and gate_up leave their `out` quantised as well. The calls that
    follow on that very tensor use it, so nobody else may write to it in between; any other call forgets it.
    """

    act_dtype = torch.bfloat16
    repeatable = True
    fuses_sums = True

    def __init__(self, device: torch.device | str, max_tokens: int, tiles: Iterable[TileChoice] = ()) -> None:
        tokens = 1 << (max(16, min(max_tokens, SMALL_BATCH)) - 1).bit_length()
        self._activations = torch.empty(2 * tokens * MAX_COLS // 32 * QUANTISED_CHUNK, dtype=torch.uint8, device=device)
        self._partial = torch.empty(PARTIAL_FLOATS, dtype=torch.float32, device=device)
        self._counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        self._ready: tuple[torch.Tensor, Quantised] | None = None  # the last output, and itself quantised
        self._turn = 0  # which half of the activations' scratch is quantised into next
        self.use_tiles(tiles)

    def use_tiles(self, choices: Iterable[TileChoice]) -> None:
        """See `TiledKernels.use_tiles`."""
        self._tiles = {(c.kernel, c.qtype, c.tokens): c.tile for c in choices}

    @property
    def scratch_nbytes(self) -> int:
        """Bytes this object holds on the device."""
        return self._activations.numel() + 4 * (self._partial.numel() + self._counters.numel())

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """See `Kernels.rms_norm`."""
        tokens, cols = hidden.shape
        block = triton.next_power_of_2(cols)
        ready = self._hand_over(out)
        triton_rows.rms_norm_kernel[(tokens,)](
            hidden, hidden.stride(0), weight, out, out.stride(0), cols, eps, *_tensors(ready), BLOCK=block,
            QUANTISE=ready is not None, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip

    def sum_rms_norm(
        self,
        exchange: "PeerExchange",
        part: torch.Tensor,
        wire: str,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        """See `SumKernels.sum_rms_norm`."""
        ready = self._hand_over(out)
        exchange.sum_rows(part, hidden, wire, True, (weight, eps, out), _tensors(ready))

    def linear_part(
        self,
        exchange: "PeerExchange",
        wire: str,
        x: torch.Tensor,
        weight: Packed,
        part: torch.Tensor,
        tile: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """See `SumKernels.linear_part`."""
        if weight.qtype in PLAIN:
            self._rows(x, weight, part, bias, False)
        else:
            self._matvec(self._quantised(x), (weight,), part, (bias,), False, exchange.push(part, wire))

    def linear(
        self,
        x: torch.Tensor,
        weight: Packed,
        out: torch.Tensor,
        tile: torch.Tensor,
        bias: torch.Tensor | None = None,
        accumulate: bool = False,
    ) -> None:
        """See `Kernels.linear`."""
        tokens = x.shape[0]
        if tokens > SMALL_BATCH:
            self._gemm(x, weight, out, tile, bias, accumulate)
        elif weight.qtype in PLAIN:
            self._rows(x, weight, out, bias, accumulate)
        else:
            self._matvec(self._quantised(x), (weight,), out, (bias,), accumulate)

    def linear_group(
        self,
        x: torch.Tensor,
        weights: tuple[Packed, ...],
        out: torch.Tensor,
        tile: torch.Tensor,
        biases: tuple[torch.Tensor | None, ...],
    ) -> None:
        """See `Kernels.linear_group`. One launch for up to SMALL_BATCH rows and three weights of one type."""
        alike = len({w.qtype for w in weights}) == 1 and len({b is None for b in biases}) == 1
        whole = all(w.rows % ROW_BLOCK == 0 for w in weights)
        if x.shape[0] <= SMALL_BATCH and alike and whole and len(weights) <= 3 and weights[0].qtype not in PLAIN:
            self._matvec(self._quantised(x), weights, out, biases, False)
            return
        at = 0
        for weight, bias in zip(weights, biases, strict=True):
            self.linear(x, weight, out[:, at : at + weight.rows], tile, bias)
            at += weight.rows

    def gate_up(
        self, x: torch.Tensor, gate: Packed, up: Packed, out: torch.Tensor, both: torch.Tensor, tile: torch.Tensor
    ) -> None:
        """See `Kernels.gate_up`."""
        if x.shape[0] <= SMALL_BATCH and gate.qtype == up.qtype and gate.qtype not in PLAIN:
            self._gated(x, gate, up, out)
            return
        first, second = both[:, : gate.rows], both[:, gate.rows : 2 * gate.rows]
        self.linear_group(x, (gate, up), both[:, : 2 * gate.rows], tile, (None, None))
        grid = (triton.cdiv(gate.rows, 1024), x.shape[0])
        triton_rows.silu_mul_kernel[grid](
            first, second, both.stride(0), out, out.stride(0), gate.rows, BLOCK=1024, num_warps=4
        )

    def ffn(self, x: torch.Tensor, gate: Packed, up: Packed, down: Packed, out: torch.Tensor, accumulate: bool) -> bool:
        return False

    def place(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See `Kernels.place`. What `out` is part of was handed over quantised without these rows, if at all."""
        self._ready = None
        out.copy_(rows)

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
    ) -> None:
        """See `Kernels.rope_store`. Numbers of a cell are contiguous. q8_0 takes a launch more for each of k and v."""
        self._ready = None
        n_heads, groups, d = heads
        half = rope.cos.shape[1]
        block = 8 if qkv.shape[0] > SMALL_BATCH else 2
        grid = (triton.cdiv(n_heads + 2 * groups, block), qkv.shape[0])
        triton_rows.rope_store_kernel[grid](
            qkv, qkv.stride(0), q_norm, k_norm, eps, rope.cos, rope.sin, rows.begin, rows.position, rows.blocks,
            kv.k, kv.v, *kv.k.stride()[:2], *kv.v.stride()[:2], HEADS=n_heads, GROUPS=groups, D=d, HALF=half,
            HP=triton.next_power_of_2(half), TP=triton.next_power_of_2(d - 2 * half) if d > 2 * half else 0,
            HB=block, CELLS=kv.k.shape[1], ADJACENT=rope.pairing == "adjacent", Q_NORM=q_norm is not None,
            K_NORM=k_norm is not None, num_warps=max(1, block // 2),
        )  # fmt: skip
        for cache, column in ((kv.k, n_heads * d), (kv.v, (n_heads + groups) * d)):
            if cache.dtype == torch.int8:
                triton_cells.store_cells_kernel[(qkv.shape[0],)](
                    qkv, qkv.stride(0), column, cache, *cache.stride()[:2], rows.begin, rows.position, rows.blocks,
                    WIDTH=groups * d, BLOCKS=triton.next_power_of_2(groups * d // 32), CELLS=cache.shape[1],
                    num_warps=4,
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
    ) -> None:
        """See `Kernels.attention`. Without `partial` every batch goes the way of prompts, segment by segment."""
        self._ready = None
        if partial is not None and qkv.shape[0] <= SMALL_BATCH:
            self._decode_attention(qkv, heads, kv, rows, scale, out, partial)
        else:
            self._prefill_attention(qkv, heads, kv, rows, scale, out)

    def dequantise(self, weight: Packed, first_row: int, out: torch.Tensor) -> None:
        """out[n, cols], contiguous, bfloat16 or float32 = rows first_row..first_row + n; first_row a multiple of 16."""
        self._ready = None
        n, cols = out.shape
        if weight.qtype in PLAIN:
            source = weight.data.view(PLAIN[weight.qtype])[first_row * cols :]
            triton_dequant.convert_kernel[(triton.cdiv(n * cols, 2048),)](source, out, n * cols, BLOCK=2048)
            return
        record, high, scales, mins, d, dmin = places(weight.qtype, cols)
        encoding, tile = ENCODINGS[weight.qtype], TUNING["dequantise", 0]
        grid = (triton.cdiv(cols // 32, tile.depth), triton.cdiv(n, ROW_BLOCK))
        triton_dequant.dequantise_kernel[grid](
            weight.data, out, first_row, n, cols, record, high, scales, mins, d, dmin, BC=tile.depth,
            QTYPE=weight.qtype, LOW=encoding.low, HIGH=encoding.high, num_warps=tile.warps,
        )  # fmt: skip

    def _room(self, tokens: int, cols: int) -> Quantised:
        """Room for quantised activations [tokens, cols] in the half of the scratch whose turn it is."""
        n = _bucket(tokens) * align(_chunks_of(cols), 8)
        self._turn = 1 - self._turn
        room = self._activations[self._turn * self._activations.numel() // 2 :][: QUANTISED_CHUNK * n]
        return Quantised(room[: 32 * n].view(torch.int32), room[32 * n : 36 * n].view(torch.float32),
                         room[36 * n :].view(torch.float32))  # fmt: skip

    def _hand_over(self, out: torch.Tensor) -> Quantised | None:
        """Where the kernel that writes `out` shall quantise it too, for the calls that follow; None where it cannot."""
        self._ready = None
        tokens, cols = out.shape
        if tokens > SMALL_BATCH or cols % 32 or cols > MAX_COLS:
            return None
        self._ready = out, self._room(tokens, cols)
        return self._ready[1]

    def _quantised(self, x: torch.Tensor) -> Quantised:
        """x quantised: as it was handed over, or now."""
        if self._ready is not None:
            out, ready = self._ready
            if out.data_ptr() == x.data_ptr() and out.shape == x.shape and out.stride() == x.stride():
                return ready
        self._ready = None
        tokens, chunks = x.shape[0], _chunks_of(x.shape[1])
        room = self._room(tokens, x.shape[1])
        triton_quantise.quantise_kernel[(triton.cdiv(chunks, 32), tokens)](
            x, x.stride(0), *_tensors(room), chunks, BC=32, num_warps=4
        )
        return room

    def _tile(self, kernel: str, qtype: str, tokens: int) -> Tile:
        bucket = _bucket(tokens)
        return self._tiles.get((kernel, qtype, bucket)) or default_tile(kernel, qtype, bucket)

    def _gated(self, x: torch.Tensor, gate: Packed, up: Packed, out: torch.Tensor) -> None:
        quantised = self._quantised(x)
        ready = self._hand_over(out)
        tile = self._tile(gated_kernel(gate.qtype, x.shape[0], gate.rows), gate.qtype, x.shape[0])
        self._launch_matvec(quantised, (gate, up), out, (None,), tile, 1, gate.cols // 32, gated=True, ready=ready)

    def _matvec(
        self,
        x: Quantised,
        weights: tuple[Packed, ...],
        out: torch.Tensor,
        biases: tuple[torch.Tensor | None, ...],
        accumulate: bool,
        push: dict[str, Any] = NO_PUSH,
    ) -> None:
        tokens, rows = out.shape
        tile = self._tile("matvec", weights[0].qtype, tokens)
        pieces, each = _pieces(tile, rows, weights[0].cols // 32, tokens)
        self._launch_matvec(x, weights, out, biases, tile, pieces, each, accumulate=accumulate, push=push)

    def _launch_matvec(
        self,
        x: Quantised,
        weights: tuple[Packed, ...],
        out: torch.Tensor,
        biases: tuple[torch.Tensor | None, ...],
        tile: Tile,
        pieces: int,
        each: int,
        gated: bool = False,
        accumulate: bool = False,
        ready: Quantised | None = None,
        push: dict[str, Any] = NO_PUSH,
    ) -> None:
        first, tokens, encoding = weights[0], out.shape[0], ENCODINGS[weights[0].qtype]
        second, third = (weights + weights[-1:] * 2)[1:3]
        bias, second_bias, third_bias = (biases + biases[-1:] * 2)[:3]
        end, chunks = -(-first.rows // ROW_BLOCK), first.cols // 32
        each_tokens = min(_bucket(tokens), tile.tokens)
        triton_matvec.matvec_kernel[(triton.cdiv(tokens, each_tokens), triton.cdiv(out.shape[1], tile.rows), pieces)](
            first.data, second.data, third.data, end, end + second.rows // ROW_BLOCK, *_tensors(x),
            out, bias, second_bias, third_bias, self._partial, self._counters, *_tensors(ready),
            tokens, out.shape[1], chunks, out.stride(0), pieces, each, *places(first.qtype, first.cols),
            TOKENS=each_tokens, ROWS=tile.rows, DEPTH=tile.depth, WARPS=tile.warps, QTYPE=first.qtype, LOW=encoding.low,
            HIGH=encoding.high, FACTOR=FACTORS.get(first.qtype, 1),
            MASKED=chunks % tile.depth != 0 or out.shape[1] % tile.rows != 0, AHEAD=tile.stages - 1,
            PARTS=1 if gated else len(weights), GATED=gated, BIAS=bias is not None, ACCUMULATE=accumulate,
            PIECES=triton.next_power_of_2(pieces), QUANTISE=ready is not None, num_warps=tile.warps,
            maxnreg=tile.registers, **push,
        )  # fmt: skip

    def _rows(
        self, x: torch.Tensor, weight: Packed, out: torch.Tensor, bias: torch.Tensor | None, accumulate: bool
    ) -> None:
        self._ready = None
        tokens, bucket = x.shape[0], max(16, triton.next_power_of_2(x.shape[0]))
        tile = TUNING["rows", bucket]
        pieces, each = _pieces(tile, weight.rows, weight.cols, tokens)
        direct = pieces == 1
        triton_float.rows_kernel[(triton.cdiv(weight.rows, tile.rows), pieces)](
            weight.data.view(PLAIN[weight.qtype]), x, x.stride(0), out if direct else self._partial, bias, tokens,
            weight.rows, weight.cols, out.stride(0) if direct else weight.rows, each,
            TOKENS=bucket, BN=tile.rows, BK=tile.depth, STAGES=tile.stages, BIAS=direct and bias is not None,
            ACCUMULATE=direct and accumulate, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if not direct:
            self._combine(out, bias, accumulate, pieces, weight.rows)

    def _combine(self, out: torch.Tensor, bias: torch.Tensor | None, accumulate: bool, pieces: int, rows: int) -> None:
        triton_float.combine_kernel[(triton.cdiv(rows, 256), out.shape[0])](
            self._partial, out, bias, rows, out.stride(0), pieces,
            BLOCK=256, BIAS=bias is not None, ACCUMULATE=accumulate, num_warps=4,
        )  # fmt: skip

    def _gemm(
        self,
        x: torch.Tensor,
        weight: Packed,
        out: torch.Tensor,
        tile: torch.Tensor,
        bias: torch.Tensor | None,
        accumulate: bool,
    ) -> None:
        """Tile by tile of rows: dequantise, then a GEMM into columns of `out`; even tiles, whole 256 where they fit."""
        self._ready = None
        if weight.qtype == "BF16":
            step = weight.rows
        else:
            most = tile.numel() // (2 * weight.cols) // ROW_BLOCK * ROW_BLOCK
            even = -(-weight.rows // -(-weight.rows // most))
            step = min(most, align(even, 256))
        for first in range(0, weight.rows, step):
            n = min(step, weight.rows - first)
            if weight.qtype == "BF16":
                w = weight.data.view(torch.bfloat16).view(weight.rows, weight.cols)
            else:
                w = tile[: 2 * n * weight.cols].view(torch.bfloat16).view(n, weight.cols)
                self.dequantise(weight, first, w)
            _multiply(x, w, out[:, first : first + n], accumulate)
        if bias is not None:
            triton_rows.add_bias_kernel[(triton.cdiv(weight.rows, 1024), x.shape[0])](
                out, out.stride(0), bias, weight.rows, BLOCK=1024, num_warps=4
            )

    def _decode_attention(
        self,
        qkv: torch.Tensor,
        heads: tuple[int, int, int],
        kv: LayerKV,
        rows: RowIndex,
        scale: float,
        out: torch.Tensor,
        partial: torch.Tensor,
    ) -> None:
        n_heads, groups, d = heads
        tokens, tile = qkv.shape[0], TUNING["decode", 0]
        room = partial.numel() // (tokens * n_heads * (d + 2))  # a rank's layer may have fewer KV heads than most
        splits = min(decode_pieces(tokens, groups), room, triton.cdiv(rows.cells, tile.depth))
        padded = max(16, triton.next_power_of_2(d))
        triton_attention.decode_kernel[(splits, groups, tokens)](
            qkv, qkv.stride(0), kv.k, kv.v, *kv.k.stride()[:2], *kv.v.stride()[:2], rows.begin, rows.position,
            rows.blocks, partial, scale, splits, HEADS=n_heads, GROUPS=groups,
            SHARE=max(16, triton.next_power_of_2(n_heads // groups)), D=d, DP=padded, BLOCK=tile.depth,
            CELLS=kv.k.shape[1], STAGES=tile.stages, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        ready = self._hand_over(out) if d == padded and d % 32 == 0 else None
        triton_attention.decode_combine_kernel[(n_heads, tokens)](
            partial, out, out.stride(0), splits, *_tensors(ready), HEADS=n_heads, D=d, DP=padded,
            SPLITS=triton.next_power_of_2(splits), QUANTISE=ready is not None, num_warps=4,
        )  # fmt: skip

    def _prefill_attention(
        self,
        qkv: torch.Tensor,
        heads: tuple[int, int, int],
        kv: LayerKV,
        rows: RowIndex,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        n_heads, groups, d = heads
        padded = max(16, triton.next_power_of_2(d))
        tile = TUNING["prefill", max(64, padded)]
        at = 0
        for segment in rows.segments:
            new = slice(segment.start, segment.start + segment.tokens)
            triton_attention.prefill_kernel[(triton.cdiv(segment.tokens, tile.rows), n_heads)](
                qkv[new], qkv.stride(0), kv.k, kv.v, *kv.k.stride()[:2], *kv.v.stride()[:2], rows.blocks, at,
                rows.position[new], out[new], out.stride(0), segment.tokens, scale, HEADS=n_heads, GROUPS=groups, D=d,
                DP=padded, BM=tile.rows, BN=tile.depth, CELLS=kv.k.shape[1], num_warps=tile.warps,
                num_stages=tile.stages,
            )  # fmt: skip
            at += len(segment.blocks)


def _bucket(tokens: int) -> int:
    """Rows that a kernel for few rows is compiled for."""
    return triton.next_power_of_2(tokens)


def _chunks_of(cols: int) -> int:
    if cols > MAX_COLS:
        raise ValueError(f"a matrix with {cols} columns; the scratch for activations holds {MAX_COLS}")
    return cols // 32


def _tensors(quantised: Quantised | None) -> tuple[torch.Tensor | None, ...]:
    """Kernel arguments: words, scale, sums."""
    return (quantised.words, quantised.scale, quantised.sums) if quantised else (None, None, None)


def _multiply(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    """out (+)= x @ w.T by the library, in place: bfloat16 inputs, float32 sums, out bfloat16 or float32."""
    if out.dtype == x.dtype:
        torch.addmm(out, x, w.T, out=out) if accumulate else torch.mm(x, w.T, out=out)
    elif accumulate:
        torch.ops.aten.addmm.dtype_out(out, x, w.T, out.dtype, out=out)
    else:
        torch.ops.aten.mm.dtype_out(x, w.T, out.dtype, out=out)
