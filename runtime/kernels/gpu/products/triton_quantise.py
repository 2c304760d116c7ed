"""Activations as int8, 32 columns with one scale, in the order in which `matvec_kernel` reads them."""

import triton
import triton.language as tl


@triton.jit
def padded(chunks):
    """Chunks for which every row of activations has room: a multiple of 8."""
    return (chunks + 7) // 8 * 8


@triton.jit
def round_codes(value, inverse, N: tl.constexpr):
    """value f32 [N, 32] times inverse [N] to nearest even: int32 [N, 32], and four of these a word, [N, 8]."""
    code = ((value * inverse[:, None] + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2^23: no fraction bits left
    place = tl.arange(0, 4)[None, None, :] * 8
    return code, tl.sum((tl.reshape(code, (N, 8, 4)) & 255) << place, axis=2)


@triton.jit
def store_quantised(value, chunk, there, m, words, scale, sums, chunks, N: tl.constexpr):
    """N chunks, value f32 [N, 32], as int8 with their scales and sums; only those `there` [N]. Chunk and row m: [N].

    Every row has room for `padded(chunks)`, n below counts chunks from the first row on.
    words int32: columns 4c..4c+3 of chunk n are word 16 (n // 2) + 4 (c % 4) + 2 (n % 2) + c // 4: a thread of
    `matvec_kernel` reads c = q and 4 + q of two chunks at once. scale f32 [n] = max |x| / 127. sums f32 [n, 2]: scale
    times the sum of the codes of each half chunk.
    """
    n = m * padded(chunks) + chunk
    peak = tl.max(tl.abs(value), axis=1)
    inverse = tl.where(peak > 0.0, 127.0 / peak, 0.0)
    code, word = round_codes(value, inverse, N)
    c = tl.arange(0, 8)[None, :]
    at = (n // 2 * 16 + n % 2 * 2)[:, None] + (c % 4 * 4 + c // 4)
    tl.store(words + at, word, mask=there[:, None])
    tl.store(scale + n, peak / 127.0, mask=there)
    half = tl.sum(tl.reshape(code, (N, 2, 16)), axis=2).to(tl.float32) * (peak / 127.0)[:, None]
    tl.store(sums + n[:, None] * 2 + tl.arange(0, 2)[None, :], half, mask=there[:, None])


@triton.jit
def quantise_kernel(x, x_stride, words, scale, sums, chunks, BC: tl.constexpr):
    """x [M, 32 * chunks] as `store_quantised` leaves it; program (BC chunks, row)."""
    m = tl.program_id(1)
    chunk = tl.program_id(0) * BC + tl.arange(0, BC)
    there = chunk < chunks
    column = chunk[:, None] * 32 + tl.arange(0, 32)[None, :]
    value = tl.load(x + m.to(tl.int64) * x_stride + column, mask=there[:, None], other=0.0).to(tl.float32)
    store_quantised(value, chunk, there, m, words, scale, sums, chunks, BC)
