"""Activations as int8 for the products of few rows, and the memory that they are quantised into."""

from typing import NamedTuple

import torch
import triton

from pshard.batch_sizes import SMALL_BATCH
from pshard.quant import align
from pshard.runtime.kernels.gpu.next_norm import FEW, Unscaled
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
        self._squares = torch.empty(FEW * MAX_COLS // 32, dtype=torch.float32, device=device)
        self._turn = 0  # which half of the memory is quantised into next
        self.ready: tuple[torch.Tensor, Quantised, Unscaled | None] | None = None  # see `find`

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._memory.numel() + 4 * self._squares.numel()

    def hand_over(self, out: torch.Tensor) -> Quantised | None:
        """Where the kernel that writes `out` shall quantise it too, for the calls that follow; None where it cannot."""
        self.ready = None
        tokens, cols = out.shape
        if tokens > SMALL_BATCH or cols % 32 or cols > MAX_COLS:
            return None
        room = self._room(tokens, cols)
        self.ready = out, room, None
        return room

    def leave_norm(
        self, hidden: torch.Tensor, weight: torch.Tensor, eps: float, beside_spare: bool
    ) -> tuple[Quantised, Unscaled] | None:
        """Where the kernel that adds to `hidden` leaves it quantised for the norm that follows; None where it cannot.
        beside_spare: it reads what `spare` gave room to, and nothing of the other half."""
        tokens, cols = hidden.shape
        if tokens > FEW or cols % 32 or cols > MAX_COLS:
            return None
        room = self._half(self._turn, bucket_of(tokens), cols) if beside_spare else self._room(tokens, cols)
        return None if room is None else (room, Unscaled(hidden, weight, self._squares, eps))

    def take_norm(self, out: torch.Tensor, left: tuple[Quantised, Unscaled]) -> None:
        """From now on `out` is what `leave_norm` gave room to."""
        self.ready = out, *left

    def find(self, x: torch.Tensor) -> tuple[Quantised | None, Unscaled | None]:
        """x as it was handed over quantised, and what it is still to be multiplied by, if so."""
        if self.ready is not None:
            out, ready, unscaled = self.ready
            if out.data_ptr() == x.data_ptr() and out.shape == x.shape and out.stride() == x.stride():
                return ready, unscaled
        return None, None

    def quantise(self, x: torch.Tensor) -> tuple[Quantised, Unscaled | None]:
        """As `find`; x is quantised now if it was not handed over so."""
        ready, unscaled = self.find(x)
        if ready is not None:
            return ready, unscaled
        self.ready = None
        tokens, chunks = x.shape[0], _chunks_of(x.shape[1])
        room = self._room(tokens, x.shape[1])
        triton_quantise.quantise_kernel[(triton.cdiv(chunks, 32), tokens)](
            x, x.stride(0), *room, chunks, BC=32, num_warps=4
        )
        return room, None

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
