"""What takes and leaves states of a fixed size, by the C++ library."""

from collections.abc import Sequence

import torch

from pshard.runtime.kernels.api import DeltaWeights, OpenNet
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.plain import PlainKernels


class StatesOnHost(PlainKernels):
    """See `StateKernels`."""

    def delta_net(
        self,
        qkv: torch.Tensor,
        z: torch.Tensor,
        beta: torch.Tensor,
        alpha: torch.Tensor,
        weights: DeltaWeights,
        states: torch.Tensor,
        tails: torch.Tensor,
        slots: torch.Tensor,
        offsets: torch.Tensor,
        out: torch.Tensor,
        longest: int,
        scratch: torch.Tensor | None = None,
        opened: torch.Tensor | None = None,
    ) -> None:
        """Which form is faster for a sequence the library knows, and where it needs room."""
        rows, kept = (qkv, z, beta, alpha), (states, tails)
        if not _are_known(weights.head, *kept) or any(x.dtype != torch.float32 for x in (*rows, out)):
            super().delta_net(
                qkv, z, beta, alpha, weights, states, tails, slots, offsets=offsets, out=out, longest=longest,
                opened=opened,
            )  # fmt: skip
            return
        index, left = (slots, offsets, slots.shape[0]), (opened, 0 if opened is None else opened.stride(0))
        native.delta_net([(x, x.stride(0)) for x in rows], weights, kept, index, (out, out.stride(0)), left)

    def settle_states(self, nets: Sequence[OpenNet], slot: int, rows: slice) -> None:
        for net in nets:
            if _are_known(net.heads[2], net.tails, net.tails if net.states is None else net.states):
                native.settle_states(net, slot, rows)
            else:
                super().settle_states([net], slot, rows)

    def short_conv(
        self,
        x: torch.Tensor,
        taps: torch.Tensor,
        tails: torch.Tensor,
        slots: torch.Tensor,
        offsets: torch.Tensor,
        out: torch.Tensor,
        longest: int,
        opened: torch.Tensor | None = None,
    ) -> None:
        index, left = (slots, offsets, slots.shape[0]), (opened, 0 if opened is None else opened.stride(0))
        shape = (taps.shape[0], taps.shape[1])
        native.short_conv((x, x.stride(0)), taps, shape, tails, index, (out, out.stride(0)), left)


def _are_known(head: int, *kept: torch.Tensor) -> bool:
    """Whether the library knows states and tails as these are kept, of heads of so many elements."""
    return head % 16 == 0 and all(x.dtype == torch.float32 and x.is_contiguous() for x in kept)
