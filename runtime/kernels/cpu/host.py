"""Host kernels: C++ on packed weights for few tokens; for many a matrix unit, or else torch's bf16 GEMM."""

import torch
import torch.nn.functional as F

from pshard.batch_sizes import TILE_TOKENS
from pshard.quant import QUANT_TYPES
from pshard.runtime.kernels.api import LayerKV, Packed, RopeTable, RowIndex
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.kernels.unpack import plain_rows

_KV_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int8: "q8_0"}
_TILE_LOSES = ("F32", "F16")  # bf16 tiles would drop bits that the file has
# without a matrix unit: up to here the C++ kernel keeps up with torch's GEMM: 1.1 against 0.75 TFLOP/s on two Zen 5
# cores, dequantisation included
NATIVE_TOKENS = 512
# F32, F16 and BF16 weights need no dequantisation: torch's GEMM is as fast at 16 rows, and faster above
PLAIN_TOKENS = 8
ATTENTION_ROWS = 64  # above this many new tokens per sequence torch's attention is faster than the C++ one


class HostKernels(PlainKernels):
    """Float32 activations. What the C++ library does not speed up is inherited from the plain kernels."""

    act_dtype = torch.float32

    def linear(
        self,
        x: torch.Tensor,
        weight: Packed,
        out: torch.Tensor,
        tile: torch.Tensor,
        bias: torch.Tensor | None = None,
        accumulate: bool = False,
    ) -> None:
        if suits_tiles(x.shape[0], weight.qtype):
            self._linear_on_tiles(x, weight, out, bias, accumulate)
            return
        rows = plain_rows(weight) if x.shape[0] > PLAIN_TOKENS else None
        if rows is not None:
            result = F.linear(x.to(rows.dtype), rows, None if bias is None else bias.to(rows.dtype))
            out.add_(result) if accumulate else out.copy_(result)
        elif x.shape[0] <= NATIVE_TOKENS:
            self._linear_packed(x, weight, out, bias, accumulate)
        else:
            self._linear_tiled(x, weight, out, tile, bias, accumulate)

    def linear_group(
        self,
        x: torch.Tensor,
        weights: tuple[Packed, ...],
        out: torch.Tensor,
        tile: torch.Tensor,
        biases: tuple[torch.Tensor | None, ...],
    ) -> None:
        tokens = x.shape[0]
        if not all(_suits_vectors(tokens, weight.qtype) for weight in weights):
            super().linear_group(x, weights, out, tile, biases)
            return
        parts, strides = [(w.data, w.qtype, w.rows) for w in weights], (x.stride(0), out.stride(0))
        native.linear_group(x, parts, weights[0].cols, out, tokens, x_stride=strides[0], out_stride=strides[1])
        at = 0
        for weight, bias in zip(weights, biases):
            if bias is not None:
                out[:, at : at + weight.rows] += bias
            at += weight.rows

    def _linear_on_tiles(
        self, x: torch.Tensor, weight: Packed, out: torch.Tensor, bias: torch.Tensor | None, accumulate: bool
    ) -> None:
        native.linear_tiled(
            x,
            weight.data,
            weight.qtype,
            weight.rows,
            weight.cols,
            out,
            x.shape[0],
            x_stride=x.stride(0),
            out_stride=out.stride(0),
            accumulate=accumulate,
        )
        if bias is not None:
            out += bias

    def _linear_packed(
        self, x: torch.Tensor, weight: Packed, out: torch.Tensor, bias: torch.Tensor | None, accumulate: bool
    ) -> None:
        native.linear(
            x,
            weight.data,
            weight.qtype,
            weight.rows,
            weight.cols,
            out,
            x.shape[0],
            x_stride=x.stride(0),
            out_stride=out.stride(0),
            accumulate=accumulate,
        )
        if bias is not None:
            out += bias

    def _linear_tiled(
        self,
        x: torch.Tensor,
        weight: Packed,
        out: torch.Tensor,
        tile: torch.Tensor,
        bias: torch.Tensor | None,
        accumulate: bool,
    ) -> None:
        half = x.bfloat16()
        rows_at_once = max(16, tile.numel() // (2 * weight.cols) // 16 * 16)
        for start in range(0, weight.rows, rows_at_once):
            stop = min(start + rows_at_once, weight.rows)
            rows = tile[: (stop - start) * weight.cols * 2].view(torch.bfloat16).view(stop - start, weight.cols)
            native.dequantize(weight.data, weight.qtype, weight.rows, weight.cols, start, stop, rows, "bf16")
            part = F.linear(half, rows)
            if accumulate:
                out[:, start:stop] += part
            else:
                out[:, start:stop] = part
        if bias is not None:
            out += bias

    def gate_up(
        self, x: torch.Tensor, gate: Packed, up: Packed, out: torch.Tensor, both: torch.Tensor, tile: torch.Tensor
    ) -> None:
        width, tokens = gate.rows, x.shape[0]
        on_tiles = suits_tiles(tokens, gate.qtype) and suits_tiles(tokens, up.qtype)
        if on_tiles or tokens <= _vector_tokens(gate.qtype):
            run = native.gate_up_tiled if on_tiles else native.gate_up
            run(
                x,
                gate.data,
                gate.qtype,
                up.data,
                up.qtype,
                width,
                gate.cols,
                out,
                tokens,
                x_stride=x.stride(0),
                out_stride=out.stride(0),
            )
            return
        self.linear(x, gate, both[:, :width], tile)
        self.linear(x, up, both[:, width:], tile)
        torch.mul(F.silu(both[:, :width]), both[:, width:], out=out)

    def ffn(self, x: torch.Tensor, gate: Packed, up: Packed, down: Packed, out: torch.Tensor, accumulate: bool) -> bool:
        """Waking the pool's threads once instead of twice saves 20 us."""
        tokens = x.shape[0]
        if not all(_suits_vectors(tokens, weight.qtype) for weight in (gate, up, down)):
            return False
        native.ffn(
            x,
            gate.data,
            gate.qtype,
            up.data,
            up.qtype,
            down.data,
            down.qtype,
            down.rows,
            down.cols,
            out,
            tokens,
            x_stride=x.stride(0),
            out_stride=out.stride(0),
            accumulate=accumulate,
        )
        return True

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
        if any(s.tokens > ATTENTION_ROWS for s in rows.segments):
            super().attention(qkv, heads, kv, rows, scale, out, partial)
            return
        segments, at = [], 0
        for s in rows.segments:
            segments.append((s.start, s.tokens, s.past, at))
            at += len(s.blocks)
        kinds, blocks = _kinds(kv), (rows.blocks, kv.k.shape[1])
        strides = qkv.stride(0), out.stride(0)
        native.attention(qkv, kv.k, kv.v, kinds, segments, heads, scale, out, strides=strides, blocks=blocks)

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        (tokens, width), strides = hidden.shape, (hidden.stride(0), out.stride(0))
        native.rms_norm(hidden, weight, eps, tokens, width, out, strides=strides)

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
        turn = (rope.cos, rope.sin, rope.cos.shape[-1], rope.pairing)
        index = (rows.begin, rows.position, rows.blocks)
        native.rope_store(
            qkv, qkv.stride(0), rows.tokens, heads, (q_norm, k_norm), eps, turn, index, (kv.k, kv.v), _kinds(kv),
            kv.k.shape[1],
        )  # fmt: skip


def _kinds(kv: LayerKV) -> tuple[str, str]:
    return _KV_NAMES[kv.k.dtype], _KV_NAMES[kv.v.dtype]


def _vector_tokens(qtype: str) -> int:
    """Up to so many tokens the C++ vector kernels are used where there are no tiles."""
    return NATIVE_TOKENS if QUANT_TYPES[qtype].planes else PLAIN_TOKENS


def _suits_vectors(tokens: int, qtype: str) -> bool:
    return tokens <= _vector_tokens(qtype) and not suits_tiles(tokens, qtype)


def suits_tiles(tokens: int, qtype: str) -> bool:
    """Whether so many tokens are fastest on this machine's matrix unit, which it may lack."""
    least = TILE_TOKENS if QUANT_TYPES[qtype].planes else PLAIN_TOKENS
    return tokens > least and qtype not in _TILE_LOSES and native.tiles() != ""
