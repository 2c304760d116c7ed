"""Products of up to SMALL_BATCH rows: packed weights times int8 activations, and float weights times bfloat16."""

from collections.abc import Iterable
from typing import Any

import torch
import triton

from pshard.quant import ROW_BLOCK, align
from pshard.runtime.kernels.api import Packed
from pshard.runtime.kernels.gpu.activations import NOT_QUANTISED, Quantised, bucket_of
from pshard.runtime.kernels.gpu.default_tiles import TUNING, default_tile, gated_kernel
from pshard.runtime.kernels.gpu.next_norm import NO_NORM, Unscaled
from pshard.runtime.kernels.gpu.products import triton_float, triton_matvec
from pshard.runtime.kernels.gpu.products.triton_decode import ENCODINGS, places
from pshard.runtime.kernels.gpu.products.triton_fragments import FACTORS
from pshard.runtime.kernels.unpack import PLAIN
from pshard.times.gpu_tiles import Tile, TileChoice

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

    def __init__(self, device: torch.device | str) -> None:
        self._partial = torch.empty(PARTIAL_FLOATS, dtype=torch.float32, device=device)
        self.scratch = self._partial, torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        self._tiles: dict[tuple[str, str, int], Tile] = {}

    def use_tiles(self, choices: Iterable[TileChoice]) -> None:
        """See `TiledKernels.use_tiles`."""
        self._tiles = {(c.kernel, c.qtype, c.tokens): c.tile for c in choices}

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
        qtype = weights[0].qtype
        tile = (self._norm_tile(qtype, tokens) if following else None) or self._tile("matvec", qtype, tokens)
        cut = cut_columns(tile, rows, weights[0].cols // 32, tokens)
        self._launch(x, weights, out, biases, tile, cut, accumulate=accumulate, push=push, following=following)

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
        tile = self._tile(gated_kernel(gate.qtype, tokens, gate.rows), gate.qtype, tokens)
        self._launch(x, (gate, up), out, (None,), tile, (1, gate.cols // 32), gate=activation, ready=ready)

    def leaves_norm(self, weight: Packed, tokens: int) -> bool:
        """Whether such a product can leave its results for a norm."""
        return weight.rows % 32 == 0 and self._norm_tile(weight.qtype, tokens) is not None

    def _norm_tile(self, qtype: str, tokens: int) -> Tile | None:
        """A tile whose programs complete 32 results: one of 16 rows saves less than a launch for the norm takes."""
        tiles = self._tile("matvec", qtype, tokens), default_tile("matvec", qtype, bucket_of(tokens))
        return next((tile for tile in tiles if tile.rows == 32), None)

    def multiply_plain(
        self, x: torch.Tensor, weight: Packed, out: torch.Tensor, bias: torch.Tensor | None, accumulate: bool
    ) -> None:
        """out[M, rows] (+)= x @ W.T + bias of F32, F16 or BF16 weights."""
        tokens, bucket = x.shape[0], max(16, triton.next_power_of_2(x.shape[0]))
        tile = TUNING["rows", bucket]
        pieces, each = cut_columns(tile, weight.rows, weight.cols, tokens)
        direct = pieces == 1
        target, stride = (out, out.stride(0)) if direct else (self._partial, weight.rows)
        sizes = (tokens, weight.rows, weight.cols)
        triton_float.rows_kernel[(triton.cdiv(weight.rows, tile.rows), pieces)](
            weight.data.view(PLAIN[weight.qtype]), x, x.stride(0), target, bias, *sizes, stride, each,
            TOKENS=bucket, BN=tile.rows, BK=tile.depth, STAGES=tile.stages, BIAS=direct and bias is not None,
            ACCUMULATE=direct and accumulate, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if not direct:
            triton_float.combine_kernel[(triton.cdiv(weight.rows, 256), tokens)](
                self._partial, out, bias, weight.rows, out.stride(0), pieces,
                BLOCK=256, BIAS=bias is not None, ACCUMULATE=accumulate, num_warps=4,
            )  # fmt: skip

    def _tile(self, kernel: str, qtype: str, tokens: int) -> Tile:
        bucket = bucket_of(tokens)
        return self._tiles.get((kernel, qtype, bucket)) or default_tile(kernel, qtype, bucket)

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
            *places(first.qtype, first.cols),
            TOKENS=each_tokens, ROWS=tile.rows, DEPTH=tile.depth, WARPS=tile.warps, QTYPE=first.qtype, LOW=encoding.low,
            HIGH=encoding.high, FACTOR=FACTORS.get(first.qtype, 1),
            MASKED=chunks % tile.depth != 0 or out.shape[1] % tile.rows != 0, AHEAD=tile.stages - 1,
            PARTS=1 if gate else len(weights), GATED=bool(gate), GELU=gate == "gelu", BIAS=addends[0] is not None,
            ACCUMULATE=accumulate, PIECES=triton.next_power_of_2(cut[0]), QUANTISE=ready is not None,
            UNSCALED=normed, NEXT=following is not None,
            num_warps=tile.warps, maxnreg=tile.registers, **push,
        )  # fmt: skip


def find_runs(weights: tuple[Packed, ...], biases: tuple[torch.Tensor | None, ...]) -> list[list[int]]:
    """Numbers of those that one launch multiplies: up to three neighbours of one packed type, of whole records, all
    with a bias or none."""
    runs: list[list[int]] = []
    last = None
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        alone = weight.qtype in PLAIN or weight.rows % ROW_BLOCK
        like = None if alone else (weight.qtype, bias is None)
        if like is not None and like == last and len(runs[-1]) < 3:
            runs[-1].append(i)
        else:
            runs.append([i])
        last = like
    return runs


def cut_columns(tile: Tile, rows: int, depth: int, tokens: int) -> tuple[int, int]:
    """(pieces, depth of a piece): cut until `tile.programs` run, each piece whole tiles, partial sums within bounds."""
    blocks = -(-rows // tile.rows)
    wanted = min(-(-tile.programs // blocks), PARTIAL_FLOATS // (rows * tokens))
    each = align(-(-depth // max(1, wanted)), tile.depth)
    return -(-depth // each), each
