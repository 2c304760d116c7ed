"""Packed weights -> plain rows: bfloat16 for batches that a library GEMM handles best, float32 by token id."""

import triton
import triton.language as tl

from pshard.runtime.kernels.gpu.products.triton_decode import load_codes, load_scales
from pshard.runtime.kernels.gpu.products.triton_float import e4m3_values, fp8_row, fp8_scale


@triton.jit
def _decode_rows(
    weight, lane, chunk, mask, high, scales, mins, d, dmin, KIND: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr,
    QTYPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """KIND [ROWS, 32 * BC]: rows `lane` [1, ROWS] of the record at `weight`, its chunks `chunk` [BC, 1]."""
    codes = load_codes(weight, 0, lane, chunk, mask, high, mins, dmin, QTYPE, LOW, HIGH)
    s0, a0, s1, a1 = load_scales(weight, 0, lane, chunk, mask, high, scales, mins, d, dmin, QTYPE, HIGH)
    columns = ()
    for k in tl.static_range(32):
        if (
            QTYPE == "Q8_0"
            or QTYPE == "MXFP4"
            or QTYPE == "NVFP4"
            or QTYPE == "IQ4_NL"
            or QTYPE == "IQ4_XS"
            or HIGH >= 3
        ):
            code = (codes[k // 4] << (24 - 8 * (k % 4))) >> 24
        else:
            code = (codes[k // 4] >> (8 * (k % 4))) & 255
        if k < 16:
            value = code.to(tl.float32) * s0 + a0
        else:
            value = code.to(tl.float32) * s1 + a1
        columns = columns + (value.to(KIND),)  # noqa: RUF005
    # join pairs that differ in bit 0 of k, then in bit 1, ...: a new last dimension each time, so bit 4 comes last
    for level in tl.static_range(5):
        joined = ()
        for i in tl.static_range(16 >> level):
            joined = joined + (tl.join(columns[2 * i], columns[2 * i + 1]),)  # noqa: RUF005
        columns = joined
    return tl.reshape(tl.permute(columns[0], (1, 0, 6, 5, 4, 3, 2)), (ROWS, BC * 32))


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
    tile = _decode_rows(weight, lane, chunk, mask, high, scales, mins, d, dmin, out.dtype.element_ty, 16, BC, QTYPE,
                        LOW, HIGH)  # fmt: skip
    row = tl.program_id(1) * 16 + tl.arange(0, 16)[:, None]
    column = tl.program_id(0) * BC * 32 + tl.arange(0, BC * 32)[None, :]
    tl.store(out + row.to(tl.int64) * cols + column, tile, mask=(row < rows) & (column < cols))


@triton.jit
def look_up_kernel(
    weight, ids, out, out_stride, cols, record, high, scales, mins, d, dmin,
    BC: tl.constexpr, QTYPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """Program (BC chunks, m): out[m] = row ids[m] of packed records, float32, of these columns. ids int64."""
    m = tl.program_id(1)
    row = tl.load(ids + m)
    weight += row // 16 * record * 4
    lane = (row % 16).to(tl.int32) + tl.zeros((1, 1), tl.int32)
    chunk = tl.program_id(0) * BC + tl.arange(0, BC)[:, None]
    mask = (chunk < cols // 32) & (lane < 16)
    tile = _decode_rows(weight, lane, chunk, mask, high, scales, mins, d, dmin, tl.float32, 1, BC, QTYPE, LOW, HIGH)
    column = tl.program_id(0) * BC * 32 + tl.arange(0, BC * 32)[None, :]
    tl.store(out + m.to(tl.int64) * out_stride + column, tile, mask=column < cols)


@triton.jit
def look_up_plain_kernel(table, ids, out, out_stride, cols, BLOCK: tl.constexpr):
    """Program (piece of the columns, m): out[m] = row ids[m] of a table of plain numbers, float32. ids int64."""
    m = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(table + tl.load(ids + m) * cols + column, mask=column < cols, other=0.0)
    tl.store(out + m.to(tl.int64) * out_stride + column, value.to(tl.float32), mask=column < cols)


@triton.jit
def _fp8_numbers(line, column, cols):
    """float32: columns of the row of FP8 at `line`; zeros beyond its end."""
    mask = column < cols
    code = tl.load(line + column, mask=mask, other=0)
    return e4m3_values(code) * tl.load(fp8_scale(line, column, cols), mask=mask, other=0.0)


@triton.jit
def convert_fp8_kernel(weight, out, first_row, cols, BLOCK: tl.constexpr):
    """Program (piece of the columns, m): out[m] = row first_row + m of FP8, in out's type."""
    m = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = _fp8_numbers(weight + (first_row + m) * fp8_row(cols), column, cols)
    tl.store(out + m * cols + column, value.to(out.dtype.element_ty), mask=column < cols)


@triton.jit
def look_up_fp8_kernel(table, ids, out, out_stride, cols, BLOCK: tl.constexpr):
    """Program (piece of the columns, m): out[m] = row ids[m] of a table of FP8, float32. ids int64."""
    m = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = _fp8_numbers(table + tl.load(ids + m) * fp8_row(cols), column, cols)
    tl.store(out + m.to(tl.int64) * out_stride + column, value, mask=column < cols)


@triton.jit
def convert_kernel(weight, out, count, BLOCK: tl.constexpr):
    """count numbers of a plain float type -> out's type."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(weight + at, mask=at < count, other=0.0).to(out.dtype.element_ty), mask=at < count)
