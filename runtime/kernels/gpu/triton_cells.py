"""Reading and writing KV cells inside Triton kernels: plain numbers, or codes as kv_codec.py has them."""

import triton
import triton.language as tl


@triton.constexpr_function
def are_codes(kind):
    """Whether cells of elements of this type hold codes and scales: int8 is q8_0, uint8 q4_0."""
    return kind in (tl.int8, tl.uint8)


@triton.constexpr_function
def elements_of(count, kind):
    """Elements that so many numbers take."""
    return count // 2 if kind == tl.uint8 else count


@triton.jit
def store_cells_kernel(
    qkv, stride, column, cache, cache_block, cache_cell, begin, position, blocks,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """Program m: WIDTH numbers of row m of qkv, from `column` on, as its cell of codes; none where `begin` is below 0.

    Strides of the cache are in bytes, CELLS its block. BLOCKS >= WIDTH / 32, a power of two. Rounds to nearest even.
    """
    m = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    value = tl.load(qkv + m.to(tl.int64) * stride + column + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    FOUR: tl.constexpr = cache.dtype.element_ty == tl.uint8
    if FOUR:
        high, low = tl.max(value, axis=1), tl.min(value, axis=1)
        scale = (tl.where(high >= -low, high, low) / -8.0).to(tl.float16)
    else:
        scale = (tl.max(tl.abs(value), axis=1) / 127.0).to(tl.float16)
    kept = scale.to(tl.float32)
    code = tl.where(kept != 0.0, 1.0, 0.0)[:, None] * value / tl.where(kept != 0.0, kept, 1.0)[:, None]
    code = (code + 12582912.0) - 12582912.0  # 1.5 * 2^23: no fraction bits left
    place = tl.load(position + m)
    own = tl.load(begin + m)
    block_of_cell = tl.load(blocks + tl.maximum(own, 0) + place // CELLS).to(tl.int64)
    cell = cache + block_of_cell * cache_block + place % CELLS * cache_cell
    if FOUR:
        four = (tl.minimum(tl.maximum(code, -8.0), 7.0) + 8.0).to(tl.int32)
        even, odd = tl.split(tl.reshape(four, (BLOCKS, 16, 2)))
        byte = block[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(cell + byte, (even | (odd << 4)).to(tl.uint8), mask=(byte < WIDTH // 2) & (own >= 0))
    else:
        code = tl.minimum(tl.maximum(code, -127.0), 127.0)
        tl.store(cell + at, code.to(tl.int8), mask=(at < WIDTH) & (own >= 0))
    scales = (cell + elements_of(WIDTH, cache.dtype.element_ty)).to(tl.pointer_type(tl.float16), bitcast=True) + block
    tl.store(scales, scale, mask=(block * 32 < WIDTH) & (own >= 0))


@triton.constexpr_function
def product_type(k, v):
    """What cells of types k and v are multiplied in: float16, which loses least, unless one needs bfloat16's range."""
    return tl.bfloat16 if any(t in (tl.bfloat16, tl.float32) for t in (k, v)) else tl.float16


@triton.jit
def scales_of(cells, head, GROUPS: tl.constexpr, D: tl.constexpr):
    """Pointer to the first scale of a KV head in the cell of codes at `cells`; `cells` itself where these are plain."""
    kind: tl.constexpr = cells.dtype.element_ty
    if are_codes(kind):
        at = cells + elements_of(GROUPS * D, kind)
        return at.to(tl.pointer_type(tl.float16), bitcast=True) + head * (D // 32)
    else:
        return cells


@triton.jit
def find_blocks(blocks, start, last, TILE: tl.constexpr, CELLS: tl.constexpr):
    """The numbers of the one or two blocks, of CELLS cells each, that the tile of cells from `start` on lies in.

    `blocks` are the sequence's own. Loops carry the numbers of their next tile: of a number and cells that are loaded
    in one turn, the compiler would load both ahead, and the cells later.
    """
    tl.static_assert(TILE <= 2 * CELLS)
    one = tl.load(blocks + start // CELLS, mask=start < last, other=0)
    two = one
    if TILE > CELLS:
        two = tl.load(blocks + start // CELLS + 1, mask=start + CELLS < last, other=0)
    return one, two


@triton.jit
def locate_cells(one, two, start, block_stride, cell_stride, TILE: tl.constexpr, CELLS: tl.constexpr):
    """Where a tile's cells lie, in elements: (that of the first, how far behind it the others [TILE] are)."""
    cell = tl.arange(0, TILE)
    first = one.to(tl.int64) * block_stride + start % CELLS * cell_stride
    behind = cell % CELLS * cell_stride
    if TILE > CELLS:
        behind = tl.where(cell < CELLS, behind, two.to(tl.int64) * block_stride - first + behind)
    return first, behind


@triton.jit
def load_cells(
    cells, scales, first, behind, left,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, KIND: tl.constexpr, seen=None,
):  # fmt: skip
    """One head's numbers [BLOCK, DP] of cells as KIND; with MASKED zeros beyond `left` of them and beyond D,
    and in place of those that `seen` [BLOCK] says nobody sees, which are not read.

    cells, scales: where the head's numbers and scales are in cell 0 of the cache; first, behind: see `locate_cells`.
    """
    FOUR: tl.constexpr = cells.dtype.element_ty == tl.uint8
    cell = tl.arange(0, BLOCK)
    dim = tl.arange(0, elements_of(DP, cells.dtype.element_ty))
    at = cells + first + (behind[:, None] + dim[None, :])
    if MASKED:
        there = (cell < left)[:, None]
        if seen is not None:
            there = there & seen[:, None]
        raw = tl.load(at, mask=there & (dim < elements_of(D, cells.dtype.element_ty))[None, :], other=0)
    else:
        raw = tl.load(at)
    if are_codes(cells.dtype.element_ty):
        block = tl.arange(0, DP // 32)
        at = scales + first // 2 + (behind[:, None] // 2 + block[None, :])
        if MASKED:
            scale = tl.load(at, mask=there & (block < D // 32)[None, :], other=0.0)
        else:
            scale = tl.load(at)
        if FOUR:
            code = tl.join((raw & 15).to(tl.float32) - 8.0, (raw >> 4).to(tl.float32) - 8.0)
        else:
            code = raw.to(tl.float32)
        numbers = tl.reshape(code, (BLOCK, DP // 32, 32)) * scale.to(tl.float32)[:, :, None]
        return tl.reshape(numbers, (BLOCK, DP)).to(KIND)
    else:
        return raw.to(KIND)
