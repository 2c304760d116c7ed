"""Several residual streams on a GPU, in Triton; n-grams and an index of cells by operators of torch, whose sizes depend
on shapes and `RowIndex.cells` alone, so that a captured graph may hold them."""

import torch
import triton

from pshard.runtime.kernels.api import RopeTable, RowIndex
from pshard.runtime.kernels.gpu import triton_streams
from pshard.runtime.kernels.gpu.activations import NOT_QUANTISED, Activations
from pshard.runtime.kernels.plain_index import find_index, spell_words
from pshard.runtime.kernels.plain_streams import PlainStreams

MIXED = 1024  # columns of a program
KEYS_AT_ONCE = 1 << 23  # numbers of keys that are gathered: 32 MiB


class StreamsOnGpu(PlainStreams):
    """See `StreamKernels` and `IndexKernels`."""

    _activations: Activations

    def spread_stream(self, x: torch.Tensor, streams: torch.Tensor, count: int) -> None:
        """See `StreamKernels.spread_stream`."""
        self._enter(x, streams, "spread", (count, x.shape[1]))

    def inject_stream(self, x: torch.Tensor, streams: torch.Tensor, count: int) -> None:
        """See `StreamKernels.inject_stream`."""
        self._enter(x, streams, "inject", (count, x.shape[1]))

    def norm_streams(
        self, streams: torch.Tensor, weight: torch.Tensor, count: int, eps: float, out: torch.Tensor
    ) -> None:
        """See `StreamKernels.norm_streams`. Up to SMALL_BATCH rows are left quantised as well."""
        self._enter(None, streams, "", (count, weight.shape[0] // count), (weight, eps, out))

    def enter_streams(
        self,
        x: torch.Tensor,
        streams: torch.Tensor,
        spreads: bool,
        weight: torch.Tensor,
        count: int,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        """See `StreamKernels.enter_streams`. Up to SMALL_BATCH rows are left quantised as well."""
        self._enter(x, streams, "spread" if spreads else "inject", (count, x.shape[1]), (weight, eps, out))

    def _enter(
        self,
        x: torch.Tensor | None,
        streams: torch.Tensor,
        gives: str,
        sizes: tuple[int, int],
        norm: tuple[torch.Tensor, float, torch.Tensor] | None = None,
    ) -> None:
        (weight, eps, out), (count, width) = norm or (None, 0.0, None), sizes
        block = triton.next_power_of_2(width)
        self._activations.ready = None
        ready = self._activations.hand_over(out) if out is not None and width % 32 == 0 else None
        triton_streams.enter_streams_kernel[(count, streams.shape[0])](
            given=x, given_stride=0 if x is None else x.stride(0), streams=streams, streams_stride=streams.stride(0),
            weight=weight, eps=eps, out=out, out_stride=0 if out is None else out.stride(0), width=width,
            **dict(zip(("words", "scale", "sums"), ready or NOT_QUANTISED)), COUNT=count, GIVES=gives,
            NORMS=out is not None, BLOCK=block, QUANTISE=ready is not None, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip

    def mix_streams(
        self, x: torch.Tensor, gates: torch.Tensor, count: int, out: torch.Tensor, cleared: torch.Tensor | None = None
    ) -> None:
        """See `StreamKernels.mix_streams`."""
        self._activations.ready = None
        tokens, width = out.shape
        triton_streams.mix_streams_kernel[(triton.cdiv(width, MIXED), tokens)](
            x, x.stride(0), gates, gates.stride(0), out, out.stride(0), cleared=cleared,
            cleared_stride=0 if cleared is None else cleared.stride(0), width=width, COUNT=count, BLOCK=MIXED,
            num_warps=4,
        )  # fmt: skip

    def store_index(
        self,
        q: torch.Tensor,
        key: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor],
        each: int,
        eps: float,
        rope: RopeTable,
        rows: RowIndex,
        index: torch.Tensor,
    ) -> None:
        """See `IndexKernels.store_index`. Rows that only fill a micro-batch store what the first row does."""
        self._activations.ready = None
        (block, cell), found = find_index(q, key, norms, each, eps, rope=rope, rows=rows, index=index)
        kept = rows.begin >= 0
        places = torch.where(kept, block, block[0]), torch.where(kept, cell, cell[0])
        index[places] = torch.where(kept[:, None], found, found[0])

    def choose_cells(
        self,
        q: torch.Tensor,
        index: torch.Tensor,
        rule: tuple[int, int],
        rows: RowIndex,
        scores: torch.Tensor,
        seen: torch.Tensor,
    ) -> None:
        """See `IndexKernels.choose_cells`."""
        self._activations.ready = None
        (each, most), (_, n, head), tokens = rule, index.shape, q.shape[0]
        blocks = min(seen.shape[1], -(-rows.cells // n))
        if blocks * (n // each) <= most:
            seen.fill_(-1)
            return
        at_once = max(1, min(scores.shape[0], KEYS_AT_ONCE // (blocks * n // each * head)))
        begin, number = rows.begin.long().clamp(min=0), torch.arange(blocks * (n // each), device=q.device)
        for first in range(0, tokens, at_once):
            own = slice(first, first + at_once)
            held = (begin[own, None] + torch.arange(blocks, device=q.device)).clamp(max=rows.blocks.shape[0] - 1)
            keys = index[:, each - 1 :: each][rows.blocks[held].long()].flatten(1, 2)
            complete = (rows.position[own, None].long() + 1) // each
            found = torch.einsum("mhd,mbd->mhb", q[own].float().unflatten(1, (-1, head)), keys).relu().sum(1)
            found = found.masked_fill(number >= complete, -torch.inf)
            best = found.sort(stable=True, dim=1, descending=True).indices[:, :most]
            seen[own, :blocks] = spell_words(best, complete, blocks, n // each)
