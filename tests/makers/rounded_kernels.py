"""Plain kernels that round to bfloat16 wherever a device with bfloat16 activations must: what that type alone costs."""

import torch
import torch.nn.functional as F

from pshard.runtime.kernels.kv_codec import gather_cells
from pshard.runtime.kernels.plain import PlainKernels, gate_of
from pshard.runtime.kernels.unpack import unpack


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x as bfloat16 keeps it."""
    return x.bfloat16().float()


class RoundedKernels(PlainKernels):
    """Float32 arithmetic between bfloat16 activations: norms, every product (the CPU's library GEMM returns bfloat16),
    gate times up, attention's output and its weights as they enter the tensor cores."""

    def rms_norm(self, hidden, weight, eps, out, accumulate=False, **_):
        super().rms_norm(hidden, weight, eps, out, accumulate)
        out.copy_(rounded(out))

    def linear(self, x, weight, out, tile, bias=None, accumulate=False):
        result = rounded(F.linear(x, unpack(weight), bias))
        out.copy_(out + result if accumulate else result)

    def linear_group(self, x, weights, out, tile, biases):
        super().linear_group(x, weights, out, tile, biases)  # by `linear`: rounded

    def gate_up(self, x, gate, up, out, both, tile, activation="silu"):
        first, second = (rounded(F.linear(x, unpack(w))) for w in (gate, up))
        out.copy_(rounded(gate_of(activation)(first) * second))

    def attention(self, qkv, heads, kv, rows, scale, out, partial, sinks=None, bent=None):
        assert sinks is None and not (bent and bent.changes), "no model of these tests has such"
        n_heads, groups, dim = heads
        for s in rows.segments:
            cells, new = s.past + s.tokens, slice(s.start, s.start + s.tokens)
            q = rounded(qkv[new, : n_heads * dim]).unflatten(1, (n_heads, dim)).transpose(0, 1)
            k, v = (
                gather_cells(cache, s.blocks, cells).float().transpose(0, 1).repeat_interleave(n_heads // groups, 0)
                for cache in (kv.k, kv.v)
            )
            seen = torch.arange(cells) <= torch.arange(s.past, cells)[:, None]
            scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
            chance = torch.exp(scores - scores.max(-1, keepdim=True).values)
            mixed = rounded(chance) @ v / chance.sum(-1, keepdim=True)
            out[new] = rounded(mixed.transpose(0, 1).flatten(1))
