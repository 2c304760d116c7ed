"""RMS norms that are made by the product ahead of them, where few rows are added to the residual stream.

A norm multiplies a row by its weights and by one number of the whole row. Int8 codes of 32 columns do not depend on
that number, so the product that completes these columns leaves their codes, and the sum of their squares. Who
multiplies the codes makes the number of the sums, and multiplies its results by it. No program waits for a whole row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

FEW = 4  # rows, up to which norms are made so, and a router that makes one is one launch
NO_NORM = (None, None, 0.0)  # in place of squares, weights and eps


class Unscaled(NamedTuple):
    """What quantised rows are still to be multiplied by: rsqrt(mean of squares + eps), of the rows of `hidden`, which
    have been multiplied by `weight`. squares: float32 [M, D / 32], the sums of 32 columns."""

    hidden: torch.Tensor
    weight: torch.Tensor
    squares: torch.Tensor
    eps: float


@triton.jit
def factor_of(squares, m, there, chunks, eps, CP: tl.constexpr):
    """rsqrt(mean of squares + eps) of rows m [N], those that are there. CP: a power of two >= chunks."""
    chunk = tl.arange(0, CP)[None, :]
    parts = tl.load(squares + m[:, None] * chunks + chunk, mask=there[:, None] & (chunk < chunks), other=0.0)
    return tl.rsqrt(tl.sum(parts, axis=1) / (chunks * 32) + eps)
