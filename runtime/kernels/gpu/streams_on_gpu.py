"""Several residual streams, n-grams and an index of cells on a GPU: operators of torch, whose sizes depend on shapes
and `RowIndex.cells` alone, so that a captured graph may hold them."""

import torch

from pshard.runtime.kernels.api import RopeTable, RowIndex
from pshard.runtime.kernels.gpu.activations import Activations
from pshard.runtime.kernels.plain_index import find_index, spell_words
from pshard.runtime.kernels.plain_streams import PlainStreams

KEYS_AT_ONCE = 1 << 23  # numbers of keys that are gathered: 32 MiB


class StreamsOnGpu(PlainStreams):
    """See `StreamKernels` and `IndexKernels`."""

    _activations: Activations

    def norm_streams(
        self, streams: torch.Tensor, weight: torch.Tensor, count: int, eps: float, out: torch.Tensor
    ) -> None:
        """See `StreamKernels.norm_streams`."""
        self._activations.ready = None
        super().norm_streams(streams, weight, count, eps, out)

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
