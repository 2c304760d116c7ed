"""Launches of norms, or none where the product ahead has left what they would make: what `CudaKernels` has of it."""

import torch
import triton

from pshard.batch_sizes import SMALL_BATCH
from pshard.runtime.kernels.api import InnerNorm, NextNorm
from pshard.runtime.kernels.gpu import triton_rows
from pshard.runtime.kernels.gpu.activations import NOT_QUANTISED, Activations, Quantised
from pshard.runtime.kernels.gpu.default_tiles import row_warps
from pshard.runtime.kernels.gpu.next_norm import Unscaled

REGISTERS = 64  # of a thread, where rows are many: two programs or more run beside each other then


class NormsOnGpu:
    """See `Kernels` and `NormKernels`."""

    _activations: Activations
    _left: tuple[Quantised, Unscaled] | None  # what a product has left for the norm that comes next
    _placed: tuple[torch.Tensor, torch.Tensor] | None  # the last norm that was rounded, and where

    def forget(self) -> None:
        """See `Kernels.forget`."""
        self._activations.ready = self._left = self._placed = None

    def _room_for_norm(
        self, out: torch.Tensor, following: NextNorm | None, fits: bool, beside_spare: bool = False
    ) -> tuple[Quantised, Unscaled] | None:
        """Where a product that is added to `out` leaves it for the norm that follows, if one does."""
        self._left = self._activations.leave_norm(out, *following, beside_spare) if following and fits else None
        return self._left

    def _takes_left(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> bool:
        """Whether a product has left what this norm would make: then `out` is that, and has numbers only once `route`
        has made them."""
        left, self._left = self._left, None
        if left is None:
            return False
        of = left[1]
        if of.hidden.data_ptr() != hidden.data_ptr() or of.hidden.shape != hidden.shape or of.eps != eps:
            return False
        if of.weight.data_ptr() != weight.data_ptr():
            return False
        self._activations.take_norm(out, left)
        return True

    def rms_norm(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        accumulate: bool = False,
        rounded: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        """See `Kernels.rms_norm`."""
        (tokens, cols), self._placed = hidden.shape, None
        if not accumulate and self._takes_left(hidden, weight, eps, out):
            return
        block = triton.next_power_of_2(cols)
        if accumulate:
            self._activations.ready = self._left = None
        ready = None if accumulate else self._activations.hand_over(out)
        triton_rows.rms_norm_kernel[(tokens,)](
            hidden, hidden.stride(0), weight, out, out.stride(0), cols, eps, *(ready or NOT_QUANTISED),
            again=rounded, again_stride=0 if rounded is None else rounded.stride(0), BLOCK=block, ADD=accumulate,
            ROUND=rounded is not None, times=scale, QUANTISE=ready is not None,
            num_warps=row_warps(block),
        )  # fmt: skip
        self._placed = None if rounded is None else (out, rounded)

    def add_normed(
        self,
        inner: InnerNorm,
        hidden: torch.Tensor,
        norm: tuple[torch.Tensor, float, torch.Tensor] | None = None,
        rounded: torch.Tensor | None = None,
    ) -> None:
        """See `Kernels.add_normed`."""
        (tokens, cols), (weight, eps, out) = hidden.shape, norm or (None, 0.0, None)
        self._activations.ready = self._left = self._placed = None
        ready = None if out is None else self._activations.hand_over(out)
        quantised: tuple[torch.Tensor | None, ...] = ready or NOT_QUANTISED
        (x, own), (beside, its) = inner.parts or ((inner.x, None), (None, None))
        block = triton.next_power_of_2(cols)
        few, warps = tokens <= SMALL_BATCH, row_warps(block)
        triton_rows.add_normed_kernel[(tokens,)](
            x, x.stride(0), own=own, beside=beside, beside_stride=0 if beside is None else beside.stride(0), its=its,
            inner=inner.weight, inner_eps=inner.eps, times=inner.factor, hidden=hidden, hidden_stride=hidden.stride(0),
            weight=weight, out=out, out_stride=0 if out is None else out.stride(0), cols=cols, eps=eps,
            words=quantised[0], scale=quantised[1], sums=quantised[2], again=rounded,
            again_stride=0 if rounded is None else rounded.stride(0), BLOCK=block, QUANTISE=ready is not None,
            EARLY=few, num_warps=warps, maxnreg=None if few or block > 512 * warps else REGISTERS,
        )  # fmt: skip
        self._placed = None if out is None or rounded is None else (out, rounded)
