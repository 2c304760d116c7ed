"""Plain kernels that round products of many tokens as a GPU's do, by the same integers; all else stays as it is."""

import torch
import torch.nn.functional as F
from rounded_kernels import rounded

from pshard.batch_sizes import SMALL_BATCH
from pshard.runtime.kernels.api import Packed
from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.kernels.plain_experts import activate
from pshard.runtime.kernels.plain_rows import gate_of
from pshard.runtime.kernels.unpack import unpack


def quantise(x: torch.Tensor, fused: bool = False) -> torch.Tensor:
    """x [M, cols] as int8 codes times a scale for each 32 columns, as `triton_many.store_group` has them: float64.
    fused: as a GPU multiplies and rounds at once; Triton's interpreter rounds the product first."""
    blocks = x.float().view(x.shape[0], -1, 32)
    peak = blocks.abs().amax(2, keepdim=True)
    inverse = torch.full_like(peak, 127.0) / peak.clamp_min(1e-30)  # a number over a tensor is no division in torch
    codes = ((blocks.double() * inverse.double()) if fused else blocks * inverse).round()
    return (codes.double() * (peak / 127.0).double()).view(x.shape)


class RoundedProducts(PlainKernels):
    """`way`: "int8", or "bf16" for a library's products; sums are exact, which those of float32 nearly are.

    Activations between kernels are bfloat16. In int8 gate and up are one launch, which leaves neither of them, and
    experts quantise what both give as it is.
    """

    def __init__(self, way: str, vocab: int) -> None:
        self._way, self._vocab = way, vocab

    def _product(self, x: torch.Tensor, weight: Packed) -> torch.Tensor:
        values = unpack(weight)
        if self._bf16(weight):
            x, values = x.to(torch.bfloat16), values.to(torch.bfloat16)
        else:
            x = quantise(x)
        return F.linear(x.double(), values.double()).float()

    def _bf16(self, weight: Packed) -> bool:
        return self._way == "bf16" or weight.never_int8

    def _rounds(self, x: torch.Tensor, weight: Packed) -> bool:
        return x.shape[0] > SMALL_BATCH and weight.rows != self._vocab  # of few rows either way is the same

    def linear(self, x, weight, out, tile, bias=None, accumulate=False) -> None:
        if self._rounds(x, weight):
            found = self._product(rounded(x), weight)
        else:
            found = F.linear(x.double(), unpack(weight).double()).float()
        found += 0.0 if bias is None else bias
        out.copy_(out + found if accumulate else rounded(found))

    def gate_up(self, x, gate, up, out, both, tile, activation="silu") -> None:
        if not self._rounds(x, gate):
            super().gate_up(x, gate, up, out, both, tile, activation)
            return
        first, second = (self._product(rounded(x), w) for w in (gate, up))
        if self._bf16(gate):
            first, second = rounded(first), rounded(second)
        out.copy_(rounded(gate_of(activation)(first) * second))

    def experts(self, x, routes, weights, rule, out, scratch, accumulate) -> None:
        if x.shape[0] <= SMALL_BATCH:
            super().experts(x, routes, weights, rule, out, scratch, accumulate)
            return
        assert weights.biases is None and not weights.bring, "no model of these tests has such"
        if not accumulate:
            out.zero_()
        for number in range(len(weights.gate)):
            rows, place = (routes.ids == number).nonzero(as_tuple=True)
            if rows.numel():
                gate, up, down = weights.matrices(number)
                taken = rounded(x[rows])
                inner = activate(self._product(taken, gate), self._product(taken, up), rule.activation)
                found = rounded(self._product(rounded(inner) if self._bf16(down) else inner, down))
                out[rows] += routes.weights[rows, place][:, None] * found
