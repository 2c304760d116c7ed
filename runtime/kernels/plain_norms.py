"""Plain torch norms of rows: the oracle of the fast ones."""

import torch

from pshard.runtime.kernels.api import InnerNorm


class PlainNorms:
    """See `Kernels`."""

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
        normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps) * weight
        out.copy_(out + normed if accumulate else normed)
        if scale is not None:
            out.mul_(scale)

    def add_normed(
        self,
        inner: InnerNorm,
        hidden: torch.Tensor,
        norm: tuple[torch.Tensor, float, torch.Tensor] | None = None,
        rounded: torch.Tensor | None = None,
    ) -> None:
        for i, (part, weight) in enumerate(inner.parts):
            self.rms_norm(part, weight, inner.eps, inner.x, accumulate=i > 0)
        self.rms_norm(inner.x, inner.weight, inner.eps, hidden, accumulate=True, scale=inner.factor)
        if norm is not None:
            weight, eps, out = norm
            self.rms_norm(hidden, weight, eps, out, rounded=rounded)
