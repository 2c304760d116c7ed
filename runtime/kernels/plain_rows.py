"""Products with weights, and norm and rotation of heads, in plain torch."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from pshard.model_config import limit_of
from pshard.runtime.kernels.api import Packed
from pshard.runtime.kernels.unpack import unpack

PIECE = 1 << 17  # weights that are made float64 at once: they stay in a processor's cache


def product(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x[M, cols] @ W.T + bias[rows], float32 [M, rows], of sums in float64 that are rounded once.

    In float32 libraries add up in orders of their own, for many tokens one column after the other: 256 columns cost
    2.9e-7 of the results' deviation, and more where a norm of small numbers follows.
    """
    wide = x.double()
    parts = unpack(weight).split(max(1, PIECE // weight.cols))
    found = torch.cat([F.linear(wide, part.double()) for part in parts], 1)
    return (found if bias is None else found + bias).float()


def gate_of(activation: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a gate's product passes before it multiplies the other: "silu", "relu", "gelu" approximated by tanh, or
    "gelu16" (llama.cpp's ggml_vec_gelu_f32: a table of half-precision numbers by such numbers within +-10)."""
    if activation == "gelu16":
        return _gelu16
    return {"silu": F.silu, "relu": F.relu}.get(activation) or partial(F.gelu, approximate="tanh")


def bend_gate(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up; of "silu<7" the first is at most 7, the second within it: see `limit_of`."""
    if not (limit := limit_of(activation)):
        return gate_of(activation)(gate) * up
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def resize_heads(x: torch.Tensor, out: torch.Tensor, heads: int, by: float) -> None:
    """See `Kernels.resize_heads`."""
    given, made = x.unflatten(1, (heads, -1)), out.unflatten(1, (heads, -1))
    both = min(given.shape[2], made.shape[2])
    torch.mul(given[..., :both], by, out=made[..., :both])
    if both < made.shape[2]:
        made[..., both:].zero_()


def _gelu16(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    table = F.gelu(wide.half().float(), approximate="tanh").half().float()
    return table.where(wide.abs() < 10, wide.clamp(min=0)).to(x.dtype)


def head_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMS-normalise each head of [M, heads, d] where there is a weight (qwen3's q/k norm)."""
    if weight is None:
        return x
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairing: str) -> torch.Tensor:
    """Rotate the first 2 * cos.shape[-1] elements of each head of [M, heads, d] (RoFormer, arXiv 2104.09864)."""
    half = cos.shape[-1]
    head, rest = x[..., : 2 * half], x[..., 2 * half :]
    if pairing == "halves":
        a, b = head[..., :half], head[..., half:]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    else:
        a, b = head[..., 0::2], head[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return torch.cat((turned, rest), -1)
