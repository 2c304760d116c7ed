"""Products of up to SMALL_BATCH rows: packed weights times int8 activations, and float weights times bfloat16."""

from typing import Any

import torch
import triton

from pshard.quant import ROW_BLOCK, align
from pshard.runtime.kernels.api import Packed
from pshard.runtime.kernels.gpu.activations import NOT_QUANTISED, Quantised, bucket_of
from pshard.runtime.kernels.gpu.default_tiles import gated_kernel
from pshard.runtime.kernels.gpu.next_norm import NO_NORM, Unscaled
from pshard.runtime.kernels.gpu.products import triton_float, triton_matvec
from pshard.runtime.kernels.gpu.products.places import places
from pshard.runtime.kernels.gpu.products.triton_decode import ENCODINGS
from pshard.runtime.kernels.gpu.products.triton_fragments import FACTORS
from pshard.runtime.kernels.gpu.tiles.pick_tiles import TilePicker
from pshard.runtime.kernels.unpack import PLAIN
from pshard.times.gpu_tiles import Tile

PARTIAL_FLOATS = 4 << 20  # partial sums of matrices whose columns are cut into pieces
COUNTERS = 1 << 16  # one for each program of a piece, where the columns of a matrix are cut into pieces
# of `matvec_kernel`, where the result is no part of a sum over ranks
NO_PUSH: dict[str, Any] = {
    "peers": None, "epochs": None, "WORDS": 0, "RANKS": 0, "RANK": 0, "WIRE": None, "SLICES": 0,
}  # fmt: skip


class FewRows:
    """Launches the products, each cut as its tile says. The scratch is allocated here and never again.

    Attributes:
        scratch: float32 sums of pieces, and int32 counters that are zero between launches.
    """

    def __init__(self, device: torch.device | str, picker: TilePicker) -> None:
        self.picker = picker
        self._partial = torch.empty(PARTIAL_FLOATS, dtype=torch.float32, device=device)
        self.scratch = self._partial, torch.zeros(COUNTERS, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return 4 * sum(part.numel() for part in self.scratch)

    def multiply(
        self,
        x: tuple[Quantised, Unscaled | None],
        weights: tuple[Packed, ...],
        out: torch.Tensor,
        biases: tuple[torch.Tensor | None, ...],
        accumulate: bool,
        push: dict[str, Any] = NO_PUSH,
        following: tuple[Quantised, Unscaled] | None = None,
    ) -> None:
        """out[M, sum of rows] (+)= x @ W.T + bias of up to three packed weights of one type, side by side.

        push: arguments of a kernel that brings its results to the peers, see `PeerExchange.push`. following: where the
        results are left for the norm that follows, see `leaves_norm`.
        """
        tokens, rows = out.shape
        key, chunks = ("matvec", weights[0].qtype, bucket_of(tokens)), weights[0].cols // 32
        ways = (self.picker.few_rows_of_32(*key) if following else ()) or self.picker.few_rows(*key)

        def start(tile: Tile) -> None:
            cut = cut_columns(tile, rows, chunks, tokens)
            self._launch(x, weights, out, biases, tile, cut, accumulate=accumulate, push=push, following=following)

        self.picker.launch(key, ways, start)

    def gate_up(
        self,
        x: tuple[Quantised, Unscaled | None],
        gate: Packed,
        up: Packed,
        out: torch.Tensor,
        ready: Quantised | None,
        activation: str,
    ) -> None:
        """out[M, F] = act(x @ gate.T) * (x @ up.T) of packed weights of one type; quantised into `ready` too."""
        tokens = out.shape[0]
        key = gated_kernel(gate.qtype, tokens, gate.rows), gate.qtype, bucket_of(tokens)
        whole, both = (1, gate.cols // 32), (gate, up)
        self.picker.launch(
            key,
            self.picker.few_rows(*key),
            lambda tile: self._launch(x, both, out, (None,), tile, whole, gate=activation, ready=ready),
        )

    def leaves_norm(self, weight: Packed, tokens: int) -> bool:
        """Whether such a product can leave its results for a norm."""
        return weight.rows % 32 == 0 and bool(self.picker.few_rows_of_32("matvec", weight.qtype, bucket_of(tokens)))

    def multiply_plain(
        self, x: torch.Tensor, weight: Packed, out: torch.Tensor, bias: torch.Tensor | None, accumulate: bool
    ) -> None:
        """out[M, rows] (+)= x @ W.T + bias of weights that lie row by row."""
        tokens, bucket = x.shape[0], max(16, triton.next_power_of_2(x.shape[0]))
        tile = self.picker.fixed("rows", weight.qtype, bucket)
        pieces, each = cut_columns(tile, weight.rows, weight.cols, tokens)
        direct = pieces == 1
        target, stride = (out, out.stride(0)) if direct else (self._partial, weight.rows)
        sizes = (tokens, weight.rows, weight.cols)
        triton_float.rows_kernel[(triton.cdiv(weight.rows, tile.rows), pieces)](
            weight.data.view(PLAIN.get(weight.qtype, torch.uint8)), x, x.stride(0), target, bias, *sizes, stride, each,
            TOKENS=bucket, BN=tile.rows, BK=tile.depth, STAGES=tile.stages, BIAS=direct and bias is not None,
            ACCUMULATE=direct and accumulate, FP8=weight.qtype == "FP8", num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if not direct:
            triton_float.combine_kernel[(triton.cdiv(weight.rows, 256), tokens)](
                self._partial, out, bias, weight.rows, out.stride(0), pieces,
                BLOCK=256, BIAS=bias is not None, ACCUMULATE=accumulate, num_warps=4,
            )  # fmt: skip

    def _launch(
        self,
        x: tuple[Quantised, Unscaled | None],
        weights: tuple[Packed, ...],
        out: torch.Tensor,
        biases: tuple[torch.Tensor | None, ...],
        tile: Tile,
        cut: tuple[int, int],
        gate: str = "",
        accumulate: bool = False,
        ready: Quantised | None = None,
        push: dict[str, Any] = NO_PUSH,
        following: tuple[Quantised, Unscaled] | None = None,
    ) -> None:
        first, tokens, encoding = weights[0], out.shape[0], ENCODINGS[weights[0].qtype]
        second, third = (weights + weights[-1:] * 2)[1:3]
        end, chunks = -(-first.rows // ROW_BLOCK), first.cols // 32
        matrices = (first.data, second.data, third.data, end, end + second.rows // ROW_BLOCK)
        addends = (biases + biases[-1:] * 2)[:3]
        left = following[0] if following else ready
        unscaled = following[1] if following else x[1]
        norm = (unscaled.squares, unscaled.weight, unscaled.eps) if unscaled else NO_NORM
        normed = triton.next_power_of_2(chunks) if x[1] else 0
        sizes = (*norm, tokens, out.shape[1], chunks, out.stride(0), *cut)
        each_tokens = min(bucket_of(tokens), tile.tokens)
        grid = (triton.cdiv(tokens, each_tokens), triton.cdiv(out.shape[1], tile.rows), cut[0])
        triton_matvec.matvec_kernel[grid](
            *matrices, *x[0], out, *addends, *self.scratch, *(left or NOT_QUANTISED), *sizes,
            *places(first, out.device),
            TOKENS=each_tokens, ROWS=tile.rows, DEPTH=tile.depth, WARPS=tile.warps, QTYPE=first.qtype, LOW=encoding.low,
            HIGH=encoding.high, FACTOR=FACTORS.get(first.qtype, 1),
            MASKED=chunks % tile.depth != 0 or out.shape[1] % tile.rows != 0, AHEAD=tile.stages - 1,
            PARTS=1 if gate else len(weights), GATED=bool(gate), GELU=gate not in ("", "silu"),
            BIAS=addends[0] is not None, ACCUMULATE=accumulate, PIECES=triton.next_power_of_2(cut[0]),
            QUANTISE=ready is not None, UNSCALED=normed, NEXT=following is not None,
            num_warps=tile.warps, maxnreg=tile.registers, **push,
        )  # fmt: skip


def cut_columns(tile: Tile, rows: int, depth: int, tokens: int) -> tuple[int, int]:
    """(pieces, depth of a piece): cut until `tile.programs` run, each piece whole tiles, partial sums within bounds."""
    blocks = -(-rows // tile.rows)
    wanted = min(-(-tile.programs // blocks), PARTIAL_FLOATS // (rows * tokens))
    each = align(-(-depth // max(1, wanted)), tile.depth)
    return -(-depth // each), each
