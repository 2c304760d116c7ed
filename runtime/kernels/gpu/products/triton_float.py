"""Products of up to 64 rows with float weights, plain rows, on the tensor cores in bfloat16."""

import triton
import triton.language as tl


@triton.jit
def e4m3_values(byte):
    """float32: what bytes stand for as weights of FP8. A float16 of the same bits is 2^8 times smaller."""
    word = byte.to(tl.int32)
    bits = ((word & 0x80) << 8) | ((word & 0x7F) << 7)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def fp8_row(cols):
    """Bytes of a row of FP8: its codes, then float32 scales for every 128 of them."""
    return cols + cols // 32


@triton.jit
def fp8_scale(rows, k, cols):
    """Scales of columns k, of rows that begin at the pointers `rows` (uint8)."""
    return (rows + cols + k // 128 * 4).to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit(do_not_specialize=["tokens"])
def rows_kernel(
    weight, x, x_stride, out, bias, tokens, rows, cols, out_stride, per_split,
    TOKENS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Program (BN rows of the weight, piece of the columns) -> out[TOKENS, BN]; weight [rows, cols] of a float type.

    Weight and x are rounded to bfloat16. Pieces write [pieces, tokens, rows] (out_stride = rows): `combine_kernel` adds
    them up. FP8: bytes, and BK columns share a scale.
    """
    piece = tl.program_id(1)
    first = piece * per_split
    last = tl.minimum(first + per_split, cols)
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, TOKENS)
    stride = fp8_row(cols) if FP8 else cols
    base = weight + row.to(tl.int64)[:, None] * stride
    source = x + m.to(tl.int64)[:, None] * x_stride
    acc = tl.zeros((TOKENS, BN), tl.float32)
    for start in tl.range(first, last, BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)
        tile = tl.load(base + k[None, :], mask=(row < rows)[:, None] & (k < last)[None, :], other=0)
        xs = tl.load(source + k[None, :], mask=(m < tokens)[:, None] & (k < last)[None, :], other=0.0)
        if FP8:
            scale = tl.load(fp8_scale(weight + row.to(tl.int64) * stride, start, cols), mask=row < rows, other=0.0)
            acc += tl.dot(xs.to(tl.bfloat16), tl.trans(e4m3_values(tile).to(tl.bfloat16))) * scale[None, :]
        else:
            acc = tl.dot(xs.to(tl.bfloat16), tl.trans(tile.to(tl.bfloat16)), acc)
    mask = (row < rows)[None, :] & (m < tokens)[:, None]
    if BIAS:
        acc += tl.load(bias + row, mask=row < rows, other=0.0)[None, :]
    at = out + (piece * tokens + m[:, None]).to(tl.int64) * out_stride + row[None, :]
    if ACCUMULATE:
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["pieces"])
def combine_kernel(
    partial, out, bias, rows, out_stride, pieces,
    BLOCK: tl.constexpr, BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """out[m, rows] (+)= sum over pieces of partial[pieces, tokens, rows] + bias, in the order of the pieces."""
    m = tl.program_id(1)
    tokens = tl.num_programs(1)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    total = tl.zeros((BLOCK,), tl.float32)
    for piece in range(pieces):
        total += tl.load(partial + (piece * tokens + m).to(tl.int64) * rows + row, mask=mask, other=0.0)
    if BIAS:
        total += tl.load(bias + row, mask=mask, other=0.0)
    at = out + m.to(tl.int64) * out_stride + row
    if ACCUMULATE:
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=mask)
