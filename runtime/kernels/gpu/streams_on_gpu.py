"""Several residual streams and n-grams on a GPU: launches of their kernels."""

import torch
import triton

from pshard.runtime.kernels.gpu import triton_grams, triton_streams
from pshard.runtime.kernels.gpu.activations import NOT_QUANTISED, Activations
from pshard.runtime.kernels.gpu.default_tiles import row_warps
from pshard.runtime.kernels.plain_streams import LEAST_SCORE

MIXED = 1024  # columns of a program


class StreamsOnGpu:
    """See `StreamKernels`."""

    _activations: Activations

    def spread_stream(self, x: torch.Tensor, streams: torch.Tensor, count: int) -> None:
        """See `StreamKernels.spread_stream`."""
        self._enter(x, streams, "spread", (count, x.shape[1]))

    def inject_stream(self, x: torch.Tensor, streams: torch.Tensor, count: int) -> None:
        """See `StreamKernels.inject_stream`."""
        self._enter(x, streams, "inject", (count, x.shape[1]))

    def norm_streams(
        self, streams: torch.Tensor, weight: torch.Tensor, count: int, eps: float, out: torch.Tensor
    ) -> None:
        """See `StreamKernels.norm_streams`. Up to SMALL_BATCH rows are left quantised as well."""
        self._enter(None, streams, "", (count, weight.shape[0] // count), (weight, eps, out))

    def enter_streams(
        self,
        x: torch.Tensor,
        streams: torch.Tensor,
        spreads: bool,
        weight: torch.Tensor,
        count: int,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        """See `StreamKernels.enter_streams`. Up to SMALL_BATCH rows are left quantised as well."""
        self._enter(x, streams, "spread" if spreads else "inject", (count, x.shape[1]), (weight, eps, out))

    def _enter(
        self,
        x: torch.Tensor | None,
        streams: torch.Tensor,
        gives: str,
        sizes: tuple[int, int],
        norm: tuple[torch.Tensor, float, torch.Tensor] | None = None,
    ) -> None:
        (weight, eps, out), (count, width) = norm or (None, 0.0, None), sizes
        block = triton.next_power_of_2(width)
        self._activations.ready = None
        ready = self._activations.hand_over(out) if out is not None and width % 32 == 0 else None
        triton_streams.enter_streams_kernel[(count, streams.shape[0])](
            given=x, given_stride=0 if x is None else x.stride(0), streams=streams, streams_stride=streams.stride(0),
            weight=weight, eps=eps, out=out, out_stride=0 if out is None else out.stride(0), width=width,
            **dict(zip(("words", "scale", "sums"), ready or NOT_QUANTISED)), COUNT=count, GIVES=gives,
            NORMS=out is not None, BLOCK=block, QUANTISE=ready is not None, num_warps=row_warps(block),
        )  # fmt: skip

    def mix_streams(
        self, x: torch.Tensor, gates: torch.Tensor, count: int, out: torch.Tensor, cleared: torch.Tensor | None = None
    ) -> None:
        """See `StreamKernels.mix_streams`."""
        self._activations.ready = None
        tokens, width = out.shape
        triton_streams.mix_streams_kernel[(triton.cdiv(width, MIXED), tokens)](
            x, x.stride(0), gates, gates.stride(0), out, out.stride(0), cleared=cleared,
            cleared_stride=0 if cleared is None else cleared.stride(0), width=width, COUNT=count, BLOCK=MIXED,
            num_warps=4,
        )  # fmt: skip

    def gate_grams(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        streams: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor],
        count: int,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        """See `StreamKernels.gate_grams`."""
        self._activations.ready = None
        tokens, width = value.shape
        read, into = (key, key.stride(0), value, value.stride(0)), (out, out.stride(0))
        block = triton.next_power_of_2(width)
        triton_grams.gate_grams_kernel[(count, tokens)](
            *read, streams, streams.stride(0), *norms, eps, *into, width, LEAST_SCORE, BLOCK=block,
            num_warps=row_warps(block),
        )  # fmt: skip

    def add_grams(
        self,
        x: torch.Tensor,
        norm: torch.Tensor,
        taps: torch.Tensor,
        sizes: tuple[int, int],
        eps: float,
        streams: torch.Tensor,
        tails: torch.Tensor,
        slots: torch.Tensor,
        offsets: torch.Tensor,
        opened: torch.Tensor | None = None,
    ) -> None:
        """See `StreamKernels.add_grams`."""
        self._activations.ready = None
        (count, apart), (wide, each), sequences = sizes, taps.shape, slots.shape[0]
        width, place = wide // count, x if opened is None else opened  # without: no row is open
        kept = place, place.stride(0), 0 if opened is None else min(x.shape[0], opened.shape[0])
        block, state = triton.next_power_of_2(width), (tails, tails.shape[1], wide, slots, offsets)
        given, mixing, into = (x, x.stride(0), norm), (taps, apart, eps), (streams, streams.stride(0))
        triton_grams.add_grams_kernel[(count, x.shape[0])](
            *given, *mixing, *into, *state, sequences, *kept, width, each, BLOCK=block,
            MOST=triton.next_power_of_2(sequences), num_warps=row_warps(block),
        )  # fmt: skip
        triton_grams.keep_grams_kernel[(count, sequences)](
            *given, eps, *state, width, BLOCK=block, num_warps=row_warps(block)
        )
