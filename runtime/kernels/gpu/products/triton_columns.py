"""Records of types with a codebook, and of NVFP4, times quantised activations on the int8 tensor cores.

As in triton_records a warp takes 32 rows. But there one token fills all eight columns of a product, so four threads
apply the same scales, and for these types that costs as many instructions as the codes. Here a product's columns are
(token, chunk, half): with fewer than eight tokens the right operand of a chunk has zeros in the columns of others, so
that sums of several chunks and of both halves come apart in one product, and every thread scales what it alone has.
"""

import triton
import triton.language as tl

from pshard.runtime.kernels.gpu.products.triton_fragments import load_floats, load_halves
from pshard.runtime.kernels.gpu.products.triton_groups import (
    decode_rows,
    is_biased,
    keep_half,
    load_operand,
    load_raw,
    load_scales,
    lookup_tables,
)
from pshard.runtime.kernels.gpu.products.triton_mma import add_dot, load1
from pshard.runtime.kernels.gpu.products.triton_records import fetch_chunks, within

_BIASES: tl.constexpr = tl.constexpr(0x80808080 - (1 << 32))  # -128, four times


@triton.jit
def dot_columns(
    record, thread, words, scale, width, first, last, high, scales, mins, d, book,
    TOKENS: tl.constexpr, WARPS: tl.constexpr, QTYPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    FACTOR: tl.constexpr, MASKED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """As `triton_records.dot_records`, with 8 chunks of a warp in turn.

    A token has OF_TOKEN columns: SPAN chunks, with HALVES both halves of each. With eight tokens in a product, halves
    have one of their own.
    """
    HALVES: tl.constexpr = QTYPE == "IQ2_S" or QTYPE == "IQ2_XS" or QTYPE == "IQ1_M" or QTYPE == "NVFP4"
    BLOCKS: tl.constexpr = (TOKENS + 7) // 8
    OF_TOKEN: tl.constexpr = 1 if TOKENS > 8 else 8 // TOKENS
    PARTS: tl.constexpr = 2 if HALVES and OF_TOKEN > 1 else 1
    SPAN: tl.constexpr = OF_TOKEN // PARTS
    SIDES: tl.constexpr = 2 if OF_TOKEN == 1 else 1  # tokens that a thread has sums of, in a block
    lane, warp = thread % 32, thread // 32
    g, q = lane // 4, lane % 4
    four = g % 4 * 4
    of_column = g % OF_TOKEN // PARTS  # which chunk of SPAN a column of the right operand holds
    own = 2 * q % OF_TOKEN // PARTS  # of which the thread has the sums
    row = words + g // OF_TOKEN * width * 8
    row_scale = scale + 2 * q // OF_TOKEN * width
    tables = lookup_tables((record.to(tl.int64) >> 60).to(tl.int32), QTYPE)
    totals: tl.tuple = ()  # of a block of tokens, of the four rows: the sides
    for _ in tl.static_range(BLOCKS * 4 * SIDES):
        totals = totals + (tl.zeros((32 * WARPS,), tl.float32),)  # noqa: RUF005
    for start in range(first, last, WARPS * 8):
        chunk = (start + warp * 8).to(tl.int64)
        here = tl.minimum(chunk, (last - 1) // 8 * 8) if MASKED else chunk
        if AHEAD > 0:
            later = chunk + AHEAD * WARPS * 8
            fetch_chunks(record, later, thread, later + 8 <= last, high, scales, mins, d, 0, 8, QTYPE, LOW, HIGH)
        if QTYPE == "NVFP4":
            whole = load_floats(record + d // 4 + four)
        else:
            whole = load_halves(record.to(tl.pointer_type(tl.float16), bitcast=True) + d // 2 + here // 8 * 16 + four)
        parts: tl.tuple = ()
        for _ in tl.static_range(BLOCKS * 4 * SIDES):
            parts = parts + (tl.zeros((32 * WARPS,), tl.float32),)  # noqa: RUF005
        for turn in tl.static_range(8 // SPAN):
            xs = _operands(row + here * 8, turn * SPAN + of_column, g, q, width, BLOCKS, PARTS, HALVES, QTYPE)
            sums = _start_sums(xs, len(xs) // 2, 32 * WARPS, QTYPE)
            for step in tl.static_range(0, SPAN, 4):
                raws: tl.tuple = ()
                for k in tl.static_range(min(SPAN, 4)):  # all loads first
                    n = _at(here + (turn * SPAN + step + k), last, MASKED, QTYPE)
                    raws = raws + (load_raw(record, n, q, four, high, mins, QTYPE),)  # noqa: RUF005
                for k in tl.static_range(min(SPAN, 4)):
                    rows = decode_rows(raws[k], q, tables, book, QTYPE)
                    sums = _add_chunk(rows, xs, sums, of_column == step + k, SPAN, QTYPE)
            n = here + (turn * SPAN + own)
            next_ = _at(n + 1, last, MASKED, QTYPE) if SPAN > 1 and PARTS == 1 else n
            n = _at(n, last, MASKED, QTYPE)
            ws = load_scales(record, n, four, high, scales, mins, QTYPE)
            more = load_scales(record, next_, four, high, scales, mins, QTYPE) if SPAN > 1 and PARTS == 1 else ws
            at = turn * SPAN + own
            parts = _scale_sums(parts, sums, ws, more, row_scale + here + at, chunk + at, last, width, BLOCKS, SPAN,
                                PARTS, SIDES, HALVES, MASKED)  # fmt: skip
        grown: tl.tuple = ()
        for i in tl.static_range(BLOCKS * 4 * SIDES):
            grown = grown + (totals[i] + whole[i // SIDES % 4] * parts[i],)  # noqa: RUF005
        totals = grown
    results: tl.tuple = ()
    for block in tl.static_range(BLOCKS):
        tile = _gather_tile(totals, 4 * SIDES * block, TOKENS, WARPS, SIDES)
        results = results + (tile * ((128.0 if QTYPE == "NVFP4" else 1.0) / FACTOR),)  # noqa: RUF005
    return results


@triton.jit
def _at(n, last, MASKED: tl.constexpr, QTYPE: tl.constexpr):
    """See `within`. Of types with a codebook 8 chunks are there or none."""
    return within(n, last, MASKED and QTYPE == "NVFP4")


@triton.jit
def _operands(row, c, g, q, width, BLOCKS: tl.constexpr, PARTS: tl.constexpr, HALVES: tl.constexpr,
              QTYPE: tl.constexpr):  # fmt: skip
    """Words of activations, two for each product: of the blocks of tokens, of each half where it has its own."""
    found: tl.tuple = ()
    for block in tl.static_range(BLOCKS):
        low, up = load_operand(row + 64 * block * width, c, q, QTYPE)
        if PARTS == 2:
            found = found + (keep_half(low, g % 2, q, QTYPE), keep_half(up, g % 2, q, QTYPE))  # noqa: RUF005
        elif HALVES:
            for half in tl.static_range(2):
                found = found + (keep_half(low, half, q, QTYPE), keep_half(up, half, q, QTYPE))  # noqa: RUF005
        else:
            found = found + (low, up)  # noqa: RUF005
    return found


@triton.jit
def _start_sums(xs, COUNT: tl.constexpr, THREADS: tl.constexpr, QTYPE: tl.constexpr):
    """Where sums start, two products of 16 rows for each pair of words: zero, or what biased codes add too much."""
    none = tl.zeros((THREADS,), tl.int32)
    sums: tl.tuple = ()
    for i in tl.static_range(COUNT):
        start = (none, none, none, none)
        if is_biased(QTYPE):
            less = none + _BIASES
            start = add_dot(less, less, less, less, xs[2 * i], xs[2 * i + 1], start, False)
        sums = sums + (start, start)  # noqa: RUF005
    return sums


@triton.jit
def _add_chunk(rows, xs, sums, mine, SPAN: tl.constexpr, QTYPE: tl.constexpr):
    """The sums with those of a chunk's rows. mine: which columns it goes to."""
    grown: tl.tuple = ()
    for i in tl.static_range(len(xs) // 2):
        low, up = xs[2 * i], xs[2 * i + 1]
        if SPAN > 1:
            low, up = tl.where(mine, low, 0), tl.where(mine, up, 0)
        for pair in tl.static_range(2):
            a0, a2 = rows[2 * pair]
            a1, a3 = rows[2 * pair + 1]
            more = add_dot(a0, a1, a2, a3, low, up, sums[2 * i + pair], is_biased(QTYPE))
            grown = grown + (more,)  # noqa: RUF005
    return grown


@triton.jit
def _scale_sums(parts, sums, ws, more, xs, chunk, last, width, BLOCKS: tl.constexpr, SPAN: tl.constexpr,
                PARTS: tl.constexpr, SIDES: tl.constexpr, HALVES: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """The parts with these sums times their scales. ws, more: of the chunk at `xs` and of the next one, two for each
    row."""
    grown: tl.tuple = ()
    for block in tl.static_range(BLOCKS):
        first = _x_scale(xs + 8 * block * width, chunk < last, MASKED)
        second = first
        if SIDES == 2:
            second = _x_scale(xs + (8 * block + 1) * width, chunk < last, MASKED)
        elif PARTS == 1:
            second = _x_scale(xs + 1, chunk + 1 < last, MASKED)
        for row in tl.static_range(4):
            if SIDES == 2:
                for side in tl.static_range(2):
                    value = sums[(2 if HALVES else 1) * 2 * block + row // 2][row % 2 * 2 + side] * ws[0][row]
                    if HALVES:
                        value += sums[4 * block + 2 + row // 2][row % 2 * 2 + side] * ws[1][row]
                    added = value.to(tl.float32) * (second if side == 1 else first)
                    grown = grown + (parts[(4 * block + row) * 2 + side] + added,)  # noqa: RUF005
            else:
                one, two = sums[row // 2][row % 2 * 2], sums[row // 2][row % 2 * 2 + 1]
                if PARTS == 2:
                    added = (one * ws[0][row] + two * ws[1][row]).to(tl.float32) * first
                else:
                    added = (one * ws[0][row]).to(tl.float32) * first + (two * more[0][row]).to(tl.float32) * second
                grown = grown + (parts[row] + added,)  # noqa: RUF005
    return grown


@triton.jit
def _x_scale(pointer, there, MASKED: tl.constexpr):
    """A scale of activations; zero of a chunk that is not there."""
    value = load1(pointer).to(tl.float32, bitcast=True)
    return tl.where(there, value, 0.0) if MASKED else value


@triton.jit
def _gather_tile(totals, FIRST: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr, SIDES: tl.constexpr):
    """The tile of a block as `triton_records.dot_records` gives it, of the warps' and the threads' sums."""
    if SIDES == 2:
        row0 = tl.join(totals[FIRST], totals[FIRST + 1])
        row1 = tl.join(totals[FIRST + 2], totals[FIRST + 3])
        row2 = tl.join(totals[FIRST + 4], totals[FIRST + 5])
        row3 = tl.join(totals[FIRST + 6], totals[FIRST + 7])
        tile = tl.join(tl.join(row0, row1), tl.join(row2, row3))
        tile = tl.sum(tl.reshape(tile, (WARPS, 2, 4, 4, 2, 2, 2)), axis=0)
        return tl.reshape(tl.trans(tile, 2, 3, 0, 1, 5, 4), (8, 32))
    else:
        tile = tl.join(tl.join(totals[0], totals[1]), tl.join(totals[2], totals[3]))
        tile = tl.sum(tl.reshape(tile, (WARPS, 2, 4, TOKENS, 4 // TOKENS, 2, 2)), axis=4)
        tile = tl.reshape(tl.trans(tl.sum(tile, axis=0), 2, 0, 1, 4, 3), (1, TOKENS, 32))
        TIMES: tl.constexpr = 4 if TOKENS == 1 else 8 // TOKENS
        return tl.reshape(tl.broadcast_to(tile, (TIMES, TOKENS, 32)), (TIMES * TOKENS, 32))
