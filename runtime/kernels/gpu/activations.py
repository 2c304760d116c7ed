"""Activations as int8 for the products of few rows, and the memory that they are quantised into."""

from typing import NamedTuple

import torch
import triton

from pshard.batch_sizes import SMALL_BATCH
from pshard.quant import align
from pshard.runtime.kernels.gpu.early import launch_early
from pshard.runtime.kernels.gpu.products import triton_quantise

MAX_COLS = 65536  # widest input of a matrix for up to SMALL_BATCH rows: sizes the memory
CHUNK_NBYTES = 32 + 4 + 8  # of 32 activations: codes, scale, two sums


class Quantised(NamedTuple):
    """Activations as `store_quantised` leaves them for the matvec kernel: room for a power of two of rows."""

    words: torch.Tensor
    scale: torch.Tensor
    sums: torch.Tensor


NOT_QUANTISED = (None, None, None)  # in place of one, where a kernel shall not quantise


class Activations:
    """Quantises what products of few rows take, unless the kernel that wrote it has done so already.

    Two outputs fit: what a kernel reads stays while it quantises its own. The memory is allocated here and never again.

    Attributes:
        ready: the last output that was handed over, and itself quantised. Whoever writes activations in another way,
            or is not followed by such a product, sets it to None.
    """

    def __init__(self, device: torch.device | str, max_tokens: int) -> None:
        tokens = 1 << (max(16, min(max_tokens, SMALL_BATCH)) - 1).bit_length()
        self._memory = torch.empty(2 * tokens * MAX_COLS // 32 * CHUNK_NBYTES, dtype=torch.uint8, device=device)
        self._turn = 0  # which half of the memory is quantised into next
        self.ready: tuple[torch.Tensor, Quantised] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._memory.numel()

    def hand_over(self, out: torch.Tensor) -> Quantised | None:
        """Where the kernel that writes `out` shall quantise it too, for the calls that follow; None where it cannot."""
        self.ready = None
        tokens, cols = out.shape
        if tokens > SMALL_BATCH or cols % 32 or cols > MAX_COLS:
            return None
        self.ready = out, self._room(tokens, cols)
        return self.ready[1]

    def quantise(self, x: torch.Tensor) -> Quantised:
        """x quantised: as it was handed over, or now."""
        if self.ready is not None:
            out, ready = self.ready
            if out.data_ptr() == x.data_ptr() and out.shape == x.shape and out.stride() == x.stride():
                return ready
        self.ready = None
        tokens, chunks = x.shape[0], _chunks_of(x.shape[1])
        room = self._room(tokens, x.shape[1])
        triton_quantise.quantise_kernel[(triton.cdiv(chunks, 32), tokens)](
            x, x.stride(0), *room, chunks, BC=32, **launch_early(), num_warps=4
        )
        return room

    def spare(self, rows: int, cols: int) -> Quantised | None:
        """Room for [rows, cols] beside what was quantised last, until the next call; None where there is too little."""
        return self._half(1 - self._turn, rows, cols)

    def _room(self, tokens: int, cols: int) -> Quantised:
        """Room for quantised activations [tokens, cols] in the half of the memory whose turn it is."""
        self._turn = 1 - self._turn
        room = self._half(self._turn, bucket_of(tokens), cols)
        assert room is not None  # the memory is for so many tokens of MAX_COLS
        return room

    def _half(self, which: int, rows: int, cols: int) -> Quantised | None:
        n, half = rows * align(_chunks_of(cols), 8), self._memory.numel() // 2
        if CHUNK_NBYTES * n > half:
            return None
        room = self._memory[which * half :][: CHUNK_NBYTES * n]
        return Quantised(room[: 32 * n].view(torch.int32), room[32 * n : 36 * n].view(torch.float32),
                         room[36 * n :].view(torch.float32))  # fmt: skip


def bucket_of(tokens: int) -> int:
    """Rows that a kernel for few rows is compiled for."""
    return triton.next_power_of_2(tokens)


def _chunks_of(cols: int) -> int:
    if cols > MAX_COLS:
        raise ValueError(f"a matrix with {cols} columns; the scratch for activations holds {MAX_COLS}")
    return cols // 32
