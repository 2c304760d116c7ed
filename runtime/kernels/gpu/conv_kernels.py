"""Short convolutions in Triton, and their launches: what `CudaKernels` has of them."""

import torch
import triton
import triton.language as tl

from pshard.runtime.kernels.gpu.activations import Activations

STEPS = 8  # tokens of a sequence that one program takes in turn; of more each block of rows has one
CHANNELS, ROWS = 128, 32


@triton.jit
def conv_steps_kernel(
    x, x_stride, taps, tails, slots, offsets, out, opened, opened_stride, out_stride, channels,
    TAPS: tl.constexpr, WRITES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Program (channels, sequence): its tokens in turn, then what the tail becomes; without WRITES that alone, of the
    last tokens. Of open rows what they give and their inputs, always."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    here = channel < channels
    sequence = tl.program_id(1)
    row = tl.load(offsets + sequence)
    last = tl.load(offsets + sequence + 1)
    if row < last:
        number = tl.load(slots + sequence).to(tl.int64)
        is_open = number < 0
        tail = tails + tl.where(is_open, -1 - number, number) * (TAPS - 1) * channels + channel
        kept = ()
        for j in tl.static_range(TAPS - 1):
            kept = kept + (tl.load(tail + j * channels, mask=here, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        writes = here & is_open
        if WRITES:
            writes = here
        else:
            row = tl.where(is_open, row, tl.maximum(row, last - (TAPS - 1)))
        source = x + row.to(tl.int64) * x_stride + channel
        target = out + row.to(tl.int64) * out_stride + channel
        left = opened + row.to(tl.int64) * opened_stride + channel
        for _ in range(row, last):
            value = tl.load(source, mask=here, other=0.0).to(tl.float32)
            value *= tl.load(source + 2 * channels, mask=here, other=0.0).to(tl.float32)
            mixed = value * tl.load(taps + channel * TAPS + TAPS - 1, mask=writes, other=0.0)
            for j in tl.static_range(TAPS - 1):
                mixed += kept[j] * tl.load(taps + channel * TAPS + j, mask=writes, other=0.0)
            mixed *= tl.load(source + channels, mask=writes, other=0.0).to(tl.float32)
            tl.store(target, mixed.to(out.dtype.element_ty), mask=writes)
            tl.store(left, value, mask=here & is_open)
            moved = ()
            for j in tl.static_range(TAPS - 2):
                moved = moved + (kept[j + 1],)  # type: ignore[assignment]  # noqa: RUF005
            kept = moved + (value,)  # type: ignore[assignment]  # noqa: RUF005
            source += x_stride
            target += out_stride
            left += opened_stride
        for j in tl.static_range(TAPS - 1):
            tl.store(tail + j * channels, kept[j], mask=here & (number >= 0))


@triton.jit
def conv_rows_kernel(
    x, x_stride, taps, tails, slots, offsets, out, out_stride, channels,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (channels, ROWS tokens, sequence): what these give unless they are open; tails stay as they are."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    sequence = tl.program_id(2)
    first = tl.load(offsets + sequence)
    tokens = tl.load(offsets + sequence + 1) - first
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + sequence).to(tl.int64)
    if (tl.program_id(1) * ROWS < tokens) & (slot >= 0):
        tail = tails + slot * (TAPS - 1) * channels
        here = (channel < channels)[None, :]
        there = (token < tokens)[:, None] & here
        mixed = tl.zeros((ROWS, CHANNELS), tl.float32)
        for j in tl.static_range(TAPS):
            at = token - (TAPS - 1 - j)
            source = x + (first + at).to(tl.int64)[:, None] * x_stride + channel[None, :]
            new = there & (at >= 0)[:, None]
            value = tl.load(source, mask=new, other=0.0).to(tl.float32)
            value *= tl.load(source + 2 * channels, mask=new, other=0.0).to(tl.float32)
            old = there & (at < 0)[:, None]
            kept = tail + (at + TAPS - 1)[:, None] * channels + channel[None, :]
            value += tl.load(kept, mask=old, other=0.0)
            mixed += value * tl.load(taps + channel[None, :] * TAPS + j, mask=here, other=0.0)
        row = (first + token).to(tl.int64)[:, None]
        mixed *= tl.load(x + row * x_stride + channels + channel[None, :], mask=there, other=0.0).to(tl.float32)
        tl.store(out + row * out_stride + channel[None, :], mixed.to(out.dtype.element_ty), mask=there)


class ConvOnGpu:
    """See `Kernels`. Launch sizes depend on shapes and `longest` alone."""

    _activations: Activations

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
        """See `Kernels.short_conv`. Up to STEPS tokens of a sequence take one launch, more of them two."""
        self._activations.ready = None
        channels, few = out.shape[1], longest <= STEPS
        given = x, x.stride(0), taps, tails, slots, offsets, out
        blocks, sequences = triton.cdiv(channels, CHANNELS), slots.shape[0]
        how = {"out_stride": out.stride(0), "channels": channels, "TAPS": taps.shape[1], "CHANNELS": CHANNELS}
        if not few:
            conv_rows_kernel[(blocks, triton.cdiv(longest, ROWS), sequences)](*given, **how, ROWS=ROWS, num_warps=4)
        place = tails if opened is None else opened  # without: no row is open
        conv_steps_kernel[(blocks, sequences)](*given, place, place.stride(0), **how, WRITES=few, num_warps=4)
