"""Plain kernels that round products of many tokens as a GPU's do, by the same integers; all else stays as it is."""

import torch
import torch.nn.functional as F
from rounded_kernels import rounded

from pshard.batch_sizes import SMALL_BATCH
from pshard.runtime.kernels.api import Packed
from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.kernels.plain_rows import gate_of
from pshard.runtime.kernels.unpack import unpack


def quantise(x: torch.Tensor, fused: bool = False) -> torch.Tensor:
    """x [M, cols] as int8 codes times a scale for each 32 columns, as `triton_many.store_group` has them: float64.
    fused: as a GPU multiplies and rounds at once; Triton's interpreter rounds the product first."""
    blocks = rounded(x).view(x.shape[0], -1, 32)
    peak = blocks.abs().amax(2, keepdim=True)
    inverse = torch.full_like(peak, 127.0) / peak.clamp_min(1e-30)  # a number over a tensor is no division in torch
    codes = ((blocks.double() * inverse.double()) if fused else blocks * inverse).round()
    return (codes.double() * (peak / 127.0).double()).view(x.shape)


class RoundedProducts(PlainKernels):
    """`way`: "int8", or "bf16" for a library's products; sums are exact, which those of float32 nearly are."""

    def __init__(self, way: str, vocab: int) -> None:
        self._way, self._vocab = way, vocab

    def _product(self, x: torch.Tensor, weight: Packed) -> torch.Tensor:
        values = unpack(weight)
        if x.shape[0] <= SMALL_BATCH or weight.rows == self._vocab:  # of few rows either way is the same
            return F.linear(x.double(), values.double()).float()
        if self._way == "bf16":
            x, values = x.to(torch.bfloat16), values.to(torch.bfloat16)
        else:
            x = quantise(x)
        return F.linear(x.double(), values.double()).float()

    def linear(self, x, weight, out, tile, bias=None, accumulate=False) -> None:
        found = self._product(x, weight) + (0.0 if bias is None else bias)
        out.copy_(out + found if accumulate else rounded(found))

    def gate_up(self, x, gate, up, out, both, tile, activation="silu") -> None:
        out.copy_(rounded(gate_of(activation)(rounded(self._product(x, gate))) * rounded(self._product(x, up))))
