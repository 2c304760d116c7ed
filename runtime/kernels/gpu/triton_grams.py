"""N-grams added to several residual streams, in Triton: their gates, their convolution, and what it keeps."""

import triton
import triton.language as tl


@triton.jit
def gate_grams_kernel(
    key, key_stride, value, value_stride, streams, streams_stride, norm, own_norm, eps, out, out_stride, width, least,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (stream, row): see `StreamKernels.gate_grams`. BLOCK >= width; least: of which a root is taken."""
    s, m = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask, part = column < width, s * width + column
    gram = _normed(key + m * key_stride + part, norm + part, mask, width, eps)
    own = _normed(streams + m * streams_stride + part, own_norm + part, mask, width, eps)
    score = tl.sum(gram * own, axis=0) / tl.sqrt(width.to(tl.float32))
    root = tl.sqrt(tl.maximum(tl.abs(score), least))
    root = tl.where(score > 0, root, tl.where(score < 0, -root, 0.0))
    given = tl.load(value + m * value_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + m * out_stride + part, given / (1.0 + tl.exp(-root)), mask=mask)


@triton.jit(do_not_specialize=["each"])  # else the loop is unrolled, which takes more registers than there are
def add_grams_kernel(
    x, x_stride, norm, taps, apart, eps, streams, streams_stride, tails, reach, wide, slots, offsets, sequences, opened,
    opened_stride, open_rows, width, each, BLOCK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Program (stream, row): see `StreamKernels.add_grams`, but for what the tails become. BLOCK >= width, MOST >=
    sequences. A row's inputs are normalised again for each tap, which costs less than keeping them."""
    s, m = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    mask, part = column < width, s * width + column
    number = tl.arange(0, MOST)
    begins = tl.load(offsets + number, mask=number < sequences, other=2147483647)
    of = tl.maximum(tl.sum((begins <= m).to(tl.int32), axis=0) - 1, 0)
    slot, first = tl.load(slots + of).to(tl.int64), tl.load(offsets + of)
    tail = tails + tl.where(slot < 0, -1 - slot, slot) * reach * wide + part
    mixed = tl.zeros((BLOCK,), tl.float32)
    new = mixed
    for tap in range(each):
        at = m - (each - 1 - tap) * apart
        kept = tl.minimum(tl.maximum(reach + at - first, 0), reach - 1).to(tl.int64)
        row = tl.maximum(at, 0).to(tl.int64)
        new = _normed(x + row * x_stride + part, norm + part, mask & (at >= first), width, eps)
        value = new + tl.load(tail + kept * wide, mask=mask & (at < first), other=0.0)
        mixed += value * tl.load(taps + part * each + tap, mask=mask, other=0.0)
    if m < open_rows:
        tl.store(opened + m.to(tl.int64) * opened_stride + part, new, mask=mask)  # of the last tap: the row's own
    own = streams + m.to(tl.int64) * streams_stride + part
    given = tl.load(x + m.to(tl.int64) * x_stride + part, mask=mask, other=0.0)
    tl.store(own, tl.load(own, mask=mask, other=0.0) + given + mixed / (1.0 + tl.exp(-mixed)), mask=mask)


@triton.jit
def keep_grams_kernel(
    x, x_stride, norm, eps, tails, reach, wide, slots, offsets, width, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (stream, sequence): its tail becomes the last inputs, unless its rows are open. A place is written after
    those before it, and what it becomes lies behind it, so nothing is lost."""
    s, i = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    mask, part = column < width, s * width + column
    slot, begin, end = tl.load(slots + i).to(tl.int64), tl.load(offsets + i), tl.load(offsets + i + 1)
    tail = tails + slot * reach * wide + part
    if (slot >= 0) & (end > begin):
        for j in range(reach):
            at = end - begin + j
            old = tl.load(tail + at.to(tl.int64) * wide, mask=mask & (at < reach), other=0.0)
            row = tl.maximum(begin + at - reach, 0).to(tl.int64)
            new = _normed(x + row * x_stride + part, norm + part, mask & (at >= reach), width, eps)
            tl.store(tail + j * wide, tl.where(at < reach, old, new), mask=mask)


@triton.jit
def _normed(pointer, weight, mask, width, eps):
    """A part of a row as RMS-normalised, times its weights; zeros where the mask is not set."""
    value = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    return value * factor * tl.load(weight, mask=mask, other=0.0)
