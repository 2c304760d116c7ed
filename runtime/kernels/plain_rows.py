"""Norm and rotation of heads in plain torch."""

import torch


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
