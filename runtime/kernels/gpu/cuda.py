"""CudaKernels: the kernels of a CUDA device, in Triton, with cuBLAS for large batches. See runtime/kernels/api.py.

Weights are read in the packed layout. Up to SMALL_BATCH rows: int8 activations, integer products on the tensor cores or
with dp4a. Above: a tile is dequantised to bfloat16 and a library GEMM does the rest. Routed experts: see experts/.
Every sum has a fixed order and no launch size depends on device data, so runs repeat bit for bit and can be captured in
a CUDA graph.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import triton

from pshard.batch_sizes import SMALL_BATCH
from pshard.model_config import limit_of
from pshard.runtime.kernels.api import AS_THEY_ARE, LayerKV, NextNorm, Packed, PendingSum, RopeTable, RowIndex, Scoring
from pshard.runtime.kernels.gpu import triton_cells, triton_rows
from pshard.runtime.kernels.gpu.activations import NOT_QUANTISED, Activations
from pshard.runtime.kernels.gpu.attend import attend_prompts, attend_rows
from pshard.runtime.kernels.gpu.card_limits import CardLimits, card_limits
from pshard.runtime.kernels.gpu.conv_kernels import ConvOnGpu
from pshard.runtime.kernels.gpu.delta.delta_kernels import DeltaOnGpu
from pshard.runtime.kernels.gpu.experts.experts_kernels import ExpertsOnGpu
from pshard.runtime.kernels.gpu.index_on_gpu import IndexOnGpu
from pshard.runtime.kernels.gpu.latent.latent_kernels import LatentOnGpu
from pshard.runtime.kernels.gpu.products import many_rows
from pshard.runtime.kernels.gpu.products.few_rows import FewRows
from pshard.runtime.kernels.gpu.products.int8_rows import Target
from pshard.runtime.kernels.gpu.stable_keys import keep_keys_stable
from pshard.runtime.kernels.gpu.streams_on_gpu import StreamsOnGpu
from pshard.runtime.kernels.gpu.tiles.pick_tiles import TilePicker
from pshard.runtime.kernels.kv_codec import CODES
from pshard.runtime.kernels.unpack import BY_ROWS
from pshard.times.gpu_tiles import Tile, TileChoice
from pshard.units.quantised import find_runs, is_packed

if TYPE_CHECKING:
    from pshard.runtime.ranks.peer_memory import PeerExchange


class CudaKernels(ExpertsOnGpu, LatentOnGpu, DeltaOnGpu, ConvOnGpu, StreamsOnGpu, IndexOnGpu):
    """Kernels of one CUDA device (with TRITON_INTERPRET=1: of the CPU, for tests). Implements `Kernels`.

    Holds `scratch_nbytes` bytes on the device beside the arena, allocated here and never again: 27 MiB for
    `max_tokens` of SMALL_BATCH or more. Not for use by two threads or two streams at once.

    For up to SMALL_BATCH rows, rms_norm, attention and gate_up leave their `out` quantised as well. The calls that
    follow on that very tensor use it, so nobody else may write to it in between; any other call forgets it.
    """

    act_dtype = torch.bfloat16
    repeatable = True
    fills = True
    fuses_sums = True
    recordable = False
    leaves_norms = fuses_norms = True

    def __init__(
        self,
        device: torch.device | str,
        max_tokens: int,
        tiles: Iterable[TileChoice] = (),
        limits: CardLimits | None = None,
    ) -> None:
        """limits: of a card that kernels are compiled for and that is not there; None: the device's."""
        keep_keys_stable()
        self._picker = TilePicker(limits or card_limits(device), tiles)
        self._activations, self._few_rows = Activations(device, max_tokens), FewRows(device, self._picker)
        self._left = self._placed = self._pairs = None
        self._addresses = {}

    def use_tiles(self, choices: Iterable[TileChoice]) -> None:
        """See `TiledKernels.use_tiles`."""
        self._picker.use(choices)

    def tiles_of(self, kernel: str, qtype: str, tokens: int) -> tuple[Tile, ...]:
        """See `TiledKernels.tiles_of`."""
        return self._picker.known(kernel, qtype, tokens)

    def try_tile(self, choice: TileChoice) -> None:
        """See `TiledKernels.try_tile`."""
        self._picker.try_tile(choice)

    @property
    def limits(self) -> CardLimits:
        """See `TiledKernels`."""
        return self._picker.limits

    @property
    def passed_over(self) -> tuple[str, ...]:
        """See `TiledKernels`."""
        return tuple(self._picker.passed_over)

    @property
    def scratch_nbytes(self) -> int:
        """Bytes this object holds on the device."""
        return self._activations.nbytes + self._few_rows.nbytes

    def sum_rms_norm(
        self,
        sums: PendingSum,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        rounded: torch.Tensor | None = None,
    ) -> None:
        """See `SumKernels.sum_rms_norm`."""
        ready, norm = self._activations.hand_over(out), (weight, eps, out)
        left, self._pairs, self._placed = self._pairs, None, None
        part, given = sums.part, (sums.part, hidden, sums.wire, True, norm)
        if part.shape[0] > SMALL_BATCH:
            pairs = left[1] if left and left[0].data_ptr() == part.data_ptr() else None
            sums.exchange.sum_many_rows(*given, rounded, pairs, sums.norm)
            self._placed = None if rounded is None else (out, rounded)
        else:
            sums.exchange.sum_rows(*given, ready or NOT_QUANTISED, sums.norm)

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
        if x.shape[0] > SMALL_BATCH or weight.qtype in BY_ROWS:
            self.linear(x, weight, part, tile, bias)
        else:
            quantised, push = self._activations.quantise(x), exchange.push(part, wire)
            self._few_rows.multiply(quantised, (weight,), part, (bias,), False, push)

    def look_up(self, table: Packed, ids: torch.Tensor, out: torch.Tensor) -> None:
        """See `Kernels.look_up`."""
        self._activations.ready = None
        many_rows.look_up(table, ids, out)

    def linear(
        self,
        x: torch.Tensor,
        weight: Packed,
        out: torch.Tensor,
        tile: torch.Tensor,
        bias: torch.Tensor | None = None,
        accumulate: bool = False,
        following: NextNorm | None = None,
    ) -> None:
        """See `Kernels.linear` and `NormKernels`."""
        tokens = x.shape[0]
        if tokens > SMALL_BATCH:
            self._activations.ready = None
            many_rows.multiply(x, (Target(weight, out, bias),), tile, self._picker, accumulate)
        elif weight.qtype in BY_ROWS:
            self._activations.ready = None
            self._few_rows.multiply_plain(x, weight, out, bias, accumulate)
        else:
            quantised, fits = self._activations.quantise(x), self._few_rows.leaves_norm(weight, tokens)
            left = self._room_for_norm(out, following, accumulate and fits)
            self._few_rows.multiply(quantised, (weight,), out, (bias,), accumulate, following=left)

    def linear_group(
        self,
        x: torch.Tensor,
        weights: tuple[Packed, ...],
        out: torch.Tensor,
        tile: torch.Tensor,
        biases: tuple[torch.Tensor | None, ...],
    ) -> None:
        """See `Kernels.linear_group`. One launch for up to SMALL_BATCH rows and three weights of one type."""
        if x.shape[0] > SMALL_BATCH:
            self._activations.ready = None
            each = [weight.rows for weight in weights]
            parts = out[:, : sum(each)].split(each, dim=1)
            many_rows.multiply(x, tuple(map(Target, weights, parts, biases)), tile, self._picker)
            return
        at, quantised = 0, None
        for run in find_runs([(w.qtype, w.rows, b is not None) for w, b in zip(weights, biases, strict=True)]):
            together, theirs = tuple(weights[i] for i in run), tuple(biases[i] for i in run)
            part = out[:, at : at + sum(weight.rows for weight in together)]
            if is_packed(together[0].qtype):
                quantised = quantised or self._activations.quantise(x)  # once for all that take it
                self._few_rows.multiply(quantised, together, part, theirs, False)
            else:
                self._few_rows.multiply_plain(x, together[0], part, theirs[0], False)
            at += part.shape[1]
        if not all(is_packed(weight.qtype) for weight in weights):
            self._activations.ready = None

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
        """See `Kernels.gate_up`."""
        limited = limit_of(activation) > 0  # which the kernel of few rows does not know
        if x.shape[0] <= SMALL_BATCH and gate.qtype == up.qtype and gate.qtype not in BY_ROWS and not limited:
            quantised = self._activations.quantise(x)
            self._few_rows.gate_up(quantised, gate, up, out, self._activations.hand_over(out), activation)
            return
        gates, ups = both[:, : gate.rows], both[:, gate.rows : 2 * gate.rows]
        if x.shape[0] > SMALL_BATCH:
            self._activations.ready = None
            targets = Target(gate, gates, None), Target(up, ups, None)
            if many_rows.gate_up(x, targets, out, tile, self._picker, activation):
                return
        else:
            self.linear_group(x, (gate, up), both[:, : 2 * gate.rows], tile, (None, None))
        self.gate_mul(gates, ups, out, activation)

    def ffn(self, *arguments: Any, **settings: Any) -> bool:
        """See `Kernels.ffn`: it would save nothing."""
        return False

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
        """See `Kernels.rope_store`. Numbers of a cell are contiguous. Codes take a launch more for each of k and v."""
        self._activations.ready = None
        n_heads, groups, d = heads
        half = rope.cos.shape[1]
        block = 8 if qkv.shape[0] > SMALL_BATCH else 2
        grid = (triton.cdiv(n_heads + 2 * groups, block), qkv.shape[0])
        norms = (q_norm, k_norm, eps)
        index = (rows.begin, rows.position, rows.blocks)
        cells = (kv.k, kv.v, *kv.k.stride()[:2], *kv.v.stride()[:2])
        triton_rows.rope_store_kernel[grid](
            qkv, qkv.stride(0), *norms, rope.cos, rope.sin, *index, *cells, HEADS=n_heads, GROUPS=groups, D=d,
            HALF=half, HP=triton.next_power_of_2(half),
            TP=triton.next_power_of_2(d - 2 * half) if d > 2 * half else 0, HB=block, CELLS=kv.k.shape[1],
            ADJACENT=rope.pairing == "adjacent", Q_NORM=q_norm is not None, K_NORM=k_norm is not None,
            V_NORM=values, num_warps=max(1, block // 2),
        )  # fmt: skip
        for cache, column in ((kv.k, n_heads * d), (kv.v, (n_heads + groups) * d)):
            if groups and cache.dtype in CODES:
                triton_cells.store_cells_kernel[(qkv.shape[0],)](
                    qkv, qkv.stride(0), column, cache, *cache.stride()[:2], *index, WIDTH=groups * d,
                    BLOCKS=triton.next_power_of_2(groups * d // 32), CELLS=cache.shape[1], num_warps=4,
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
        """See `Kernels.attention`. Without `partial` every batch goes the way of prompts, segment by segment."""
        self._activations.ready = None
        if partial is not None and qkv.shape[0] <= SMALL_BATCH:
            attend_rows(
                qkv, heads, kv, rows, scale, out, partial, picker=self._picker, activations=self._activations,
                sinks=sinks, bent=bent,
            )  # fmt: skip
        else:
            attend_prompts(qkv, heads, kv, rows, scale, out, partial, picker=self._picker, sinks=sinks, bent=bent)

    def dequantise(self, weight: Packed, first_row: int, out: torch.Tensor) -> None:
        """out[n, cols], contiguous, bfloat16 or float32 = rows first_row..first_row + n; first_row a multiple of 16."""
        self._activations.ready = None
        many_rows.dequantise(weight, first_row, out)
