"""An index of cells on a GPU: launches of its kernels."""

import torch
import triton

from pshard.runtime.kernels.api import RopeTable, RowIndex
from pshard.runtime.kernels.gpu import triton_index
from pshard.runtime.kernels.gpu.activations import Activations

SCORED, PICKED = 64, 1024  # blocks of tokens that a program scores, and that it picks from in one go


class IndexOnGpu:
    """See `IndexKernels`. Launch sizes depend on shapes and `RowIndex.cells` alone."""

    _activations: Activations

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
        """See `IndexKernels.store_index`. A block's keys are added up in the order of its tokens, whoever of them come
        together."""
        self._activations.ready = None
        tokens, head = key.shape
        heads, given = q.shape[1] // head, (q, q.stride(0), key, key.stride(0), *norms, eps, rope.cos, rope.sin)
        places, sizes = (rows.begin, rows.position, rows.blocks, index), (heads, head, index.shape[1])
        triton_index.store_index_kernel[(heads + 1, tokens)](
            *given, *places, *sizes, TURNED=rope.cos.shape[1], ADJACENT=rope.pairing == "adjacent", EACH=each,
            BLOCK=triton.next_power_of_2(head), num_warps=1,
        )  # fmt: skip

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
        word, heads = n // each, q.shape[1] // head
        count = min(seen.shape[1], -(-rows.cells // n)) * word
        if count <= most:
            seen.fill_(-1)
            return
        picked, held = min(PICKED, triton.next_power_of_2(count + 1)), (rows.blocks, rows.blocks.shape[0])
        given, into = (q, q.stride(0), index, rows.begin, rows.position, *held), (scores, scores.stride(0))
        for first in range(0, tokens, scores.shape[0]):
            at_once = min(scores.shape[0], tokens - first)
            triton_index.score_cells_kernel[(triton.cdiv(count, SCORED), at_once)](
                *given, *into, heads, head, n, first, count, EACH=each, NUMBERS=SCORED, num_warps=4,
                HEADS=max(16, triton.next_power_of_2(heads)), BLOCK=max(16, triton.next_power_of_2(head)),
            )  # fmt: skip
            triton_index.choose_cells_kernel[(at_once,)](
                *into, rows.position, seen, seen.stride(0), first, count, most, EACH=each, WORD=word, num_warps=4,
                NUMBERS=max(word, picked),
            )  # fmt: skip
