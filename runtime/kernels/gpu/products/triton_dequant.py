"""Packed weights -> bfloat16 rows, for batches that a library GEMM handles best."""

import triton
import triton.language as tl

from pshard.runtime.kernels.gpu.products.triton_decode import load_codes, load_scales


@triton.jit
def dequantise_kernel(
    weight, out, first_row, rows, cols, record, high, scales, mins, d, dmin,
    BC: tl.constexpr, QTYPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """Program (BC chunks, record) writes out[16 rows, 32 * BC columns]; out [rows, cols] starts at `first_row`."""
    group = first_row // 16 + tl.program_id(1)
    weight += group.to(tl.int64) * record * 4
    lane = tl.arange(0, 16)[None, :]
    chunk = tl.program_id(0) * BC + tl.arange(0, BC)[:, None]
    mask = (chunk < cols // 32) & (lane < 16)
    codes = load_codes(weight, 0, lane, chunk, mask, high, QTYPE, LOW, HIGH)
    s0, a0, s1, a1 = load_scales(weight, 0, lane, chunk, mask, scales, mins, d, dmin, QTYPE)
    columns = ()
    for k in tl.static_range(32):
        if QTYPE == "Q8_0" or QTYPE == "MXFP4" or QTYPE == "IQ4_NL" or QTYPE == "IQ4_XS":
            code = (codes[k // 4] << (24 - 8 * (k % 4))) >> 24
        else:
            code = (codes[k // 4] >> (8 * (k % 4))) & 255
        if k < 16:
            value = code.to(tl.float32) * s0 + a0
        else:
            value = code.to(tl.float32) * s1 + a1
        columns = columns + (value.to(out.dtype.element_ty),)  # noqa: RUF005
    # join pairs that differ in bit 0 of k, then in bit 1, ...: a new last dimension each time, so bit 4 comes last
    for level in tl.static_range(5):
        joined = ()
        for i in tl.static_range(16 >> level):
            joined = joined + (tl.join(columns[2 * i], columns[2 * i + 1]),)  # noqa: RUF005
        columns = joined
    tile = tl.permute(columns[0], (1, 0, 6, 5, 4, 3, 2))
    tile = tl.reshape(tile, (16, BC * 32))
    row = tl.program_id(1) * 16 + tl.arange(0, 16)[:, None]
    column = tl.program_id(0) * BC * 32 + tl.arange(0, BC * 32)[None, :]
    tl.store(out + row.to(tl.int64) * cols + column, tile, mask=(row < rows) & (column < cols))


@triton.jit
def convert_kernel(weight, out, count, BLOCK: tl.constexpr):
    """count numbers of a plain float type -> out's type."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(weight + at, mask=at < count, other=0.0).to(out.dtype.element_ty), mask=at < count)
