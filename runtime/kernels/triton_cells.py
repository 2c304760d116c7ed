"""Reading and writing KV cells inside Triton kernels: plain numbers, or q8_0 as runtime/kernels/kv_codec.py has it."""

import triton
import triton.language as tl


@triton.jit
def store_cells_kernel(
    qkv, stride, column, cache, cache_sequence, cache_cell, sequence, position,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Program m: WIDTH numbers of row m of qkv, from `column` on, as a q8_0 cell of the row's sequence and position.

    Strides of the cache are in bytes. BLOCKS >= WIDTH / 32, a power of two. Rounds to nearest even.
    """
    m = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    value = tl.load(qkv + m.to(tl.int64) * stride + column + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    scale = (tl.max(tl.abs(value), axis=1) / 127.0).to(tl.float16)
    kept = scale.to(tl.float32)
    code = tl.where(kept > 0.0, 1.0, 0.0)[:, None] * value / tl.where(kept > 0.0, kept, 1.0)[:, None]
    code = tl.minimum(tl.maximum((code + 12582912.0) - 12582912.0, -127.0), 127.0)  # 1.5 * 2^23: no fraction bits left
    cell = cache + tl.load(sequence + m).to(tl.int64) * cache_sequence + tl.load(position + m).to(tl.int64) * cache_cell
    tl.store(cell + at, code.to(tl.int8), mask=at < WIDTH)
    tl.store((cell + WIDTH).to(tl.pointer_type(tl.float16), bitcast=True) + block, scale, mask=block * 32 < WIDTH)


@triton.constexpr_function
def product_type(k, v):
    """What cells of types k and v are multiplied in: float16, which loses least, unless one needs bfloat16's range."""
    return tl.bfloat16 if any(t in (tl.bfloat16, tl.float32) for t in (k, v)) else tl.float16


@triton.jit
def scales_of(cells, head, GROUPS: tl.constexpr, D: tl.constexpr):
    """Pointer to the first scale of a KV head in the q8_0 cell at `cells`; `cells` itself where these are plain."""
    if cells.dtype.element_ty == tl.int8:
        return (cells + GROUPS * D).to(tl.pointer_type(tl.float16), bitcast=True) + head * (D // 32)
    else:
        return cells


@triton.jit
def load_cells(
    cells, scales, stride, start, last,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One head's numbers [BLOCK, DP] of the cells from `start` on as KIND; with MASKED zeros beyond `last` and D.

    cells, scales: where the head's numbers and scales are in cell 0; stride: from cell to cell, in elements.
    """
    cell = tl.arange(0, BLOCK)
    dim = tl.arange(0, DP)
    first = start * stride.to(tl.int64)
    at = cells + first + (cell[:, None] * stride + dim[None, :])
    if MASKED:
        there = (start + cell < last)[:, None]
        raw = tl.load(at, mask=there & (dim < D)[None, :], other=0)
    else:
        raw = tl.load(at)
    if cells.dtype.element_ty == tl.int8:
        block = tl.arange(0, DP // 32)
        at = scales + first // 2 + (cell[:, None] * (stride // 2) + block[None, :])
        if MASKED:
            scale = tl.load(at, mask=there & (block < D // 32)[None, :], other=0.0)
        else:
            scale = tl.load(at)
        numbers = tl.reshape(raw.to(tl.float32), (BLOCK, DP // 32, 32)) * scale.to(tl.float32)[:, :, None]
        return tl.reshape(numbers, (BLOCK, DP)).to(KIND)
    else:
        return raw.to(KIND)
