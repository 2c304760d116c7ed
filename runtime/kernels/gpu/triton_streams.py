"""Several residual streams side by side, in Triton: what blocks have given goes into them, norms, and their mix."""

import triton
import triton.language as tl

from pshard.runtime.kernels.gpu.products.triton_quantise import store_quantised


@triton.jit
def enter_streams_kernel(
    given, given_stride, streams, streams_stride, weight, eps, out, out_stride, width, words, scale, sums,
    COUNT: tl.constexpr, GIVES: tl.constexpr, NORMS: tl.constexpr, BLOCK: tl.constexpr, QUANTISE: tl.constexpr,
):  # fmt: skip
    """Program (stream, row): the stream becomes what is given ("spread"), has it added by twice the sigmoid of its
    share behind the COUNT streams ("inject"), or stays (""). NORMS: out has it as RMS-normalised, times its weights,
    over COUNT. BLOCK >= width. QUANTISE: as `rms_norm_kernel` does (width a multiple of 32)."""
    s, m = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    row = streams + m * streams_stride
    own = row + s * width + column
    if GIVES == "spread":
        value = tl.load(given + m * given_stride + column, mask=mask, other=0.0)
    else:
        value = tl.load(own, mask=mask, other=0.0)
    if GIVES == "inject":
        share = 2.0 / (1.0 + tl.exp(-tl.load(row + COUNT * width + s)))
        value += share * tl.load(given + m * given_stride + column, mask=mask, other=0.0)
    if GIVES != "":
        tl.store(own, value, mask=mask)
    if NORMS:
        factor = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps) / COUNT
        value = value * factor * tl.load(weight + s * width + column, mask=mask, other=0.0)
        rounded = value.to(out.dtype.element_ty)
        tl.store(out + m * out_stride + s * width + column, rounded, mask=mask)
        if QUANTISE:
            chunk = tl.arange(0, BLOCK // 32)
            tile = tl.reshape(rounded.to(tl.float32), (BLOCK // 32, 32))
            each = width // 32
            store_quantised(tile, s * each + chunk, chunk < each, m, words, scale, sums, COUNT * each, BLOCK // 32)


@triton.jit
def mix_streams_kernel(
    x, x_stride, gates, gates_stride, out, out_stride, cleared, cleared_stride, width,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK columns, row): out = the sum over COUNT streams in x, times the sigmoids of their gates; cleared
    becomes zeros."""
    column, m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    mask = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(COUNT):
        gate = tl.load(gates + m * gates_stride + s * width + column, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + m * x_stride + s * width + column, mask=mask, other=0.0).to(tl.float32)
        total += value / (1.0 + tl.exp(-gate))
    tl.store(out + m * out_stride + column, total, mask=mask)
    if cleared is not None:
        tl.store(cleared + m * cleared_stride + column, tl.zeros((BLOCK,), tl.float32), mask=mask)
