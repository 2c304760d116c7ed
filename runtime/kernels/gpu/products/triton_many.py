"""Products of many rows in int8, straight from packed weights: no tile is ever dequantised.

A warp multiplies two records, 32 rows, by groups of 32 tokens. Weights are in the registers where the tensor cores want
them as they lie in memory (triton_fragments), and `quantise_many_kernel` leaves the activations so: neither passes
shared memory. Every sum of 32 is exact; it becomes a float32 and is added with its scales.

Of a group of 32 tokens, token 8b + g is column g of product b. Its chunk n of 32 columns is 256 words, those of two
products b at a time for each thread; a float32 for each token, 8 q + 2 b + side for token 8b + 2q + side; and the sum
of its codes times that scale at 4 g + b.
"""

import triton
import triton.language as tl

from pshard.runtime.kernels.gpu.products.triton_fragments import decode, load_codes, load_floats, load_halves
from pshard.runtime.kernels.gpu.products.triton_gates import activate
from pshard.runtime.kernels.gpu.products.triton_mma import (
    MAGIC,
    add_products,
    fused,
    load4,
    raised_dot16,
    raised_dot32,
    signed_byte_of,
)
from pshard.runtime.kernels.gpu.products.triton_quantise import round_codes
from pshard.runtime.kernels.gpu.products.triton_records import addends, scales_of_rows

GROUP: tl.constexpr = tl.constexpr(32)


@triton.jit
def quantise_many_kernel(x, x_stride, words, scale, sums, tokens, chunks):
    """x [tokens, 32 * chunks] as `many_rows_kernel` reads it; program (chunk, group of 32 tokens)."""
    n = tl.program_id(0)
    group = tl.program_id(1)
    t = tl.arange(0, 32)
    m = group * 32 + t
    column = n * 32 + tl.arange(0, 32)
    at = x + m.to(tl.int64)[:, None] * x_stride + column[None, :]
    value = tl.load(at, mask=(m < tokens)[:, None], other=0.0).to(tl.float32)
    store_group(value, (group * chunks + n).to(tl.int64), words, scale, sums)


@triton.jit
def store_group(value, base, words, scale, sums):
    """A chunk of 32 tokens, f32 [32, 32], as number `base` of those there are."""
    t = tl.arange(0, 32)
    peak = tl.max(tl.abs(value), axis=1)
    inverse = tl.div_rn(127.0, tl.maximum(peak, 1e-30))  # of nothing but zeros: some number
    code, word = round_codes(value, inverse, 32)
    b, g = t // 8, t % 8
    word = tl.permute(tl.reshape(word, (2, 2, 8, 2, 4)), (0, 2, 4, 1, 3))  # b // 2, g, c % 4, b % 2, c // 4
    tl.store(words + base * 256 + tl.arange(0, 256), tl.reshape(word, (256,)))
    s = peak / 127.0
    tl.store(scale + base * 32 + g // 2 * 8 + b * 2 + g % 2, s)
    tl.store(sums + base * 32 + g * 4 + b, tl.sum(code, axis=1).to(tl.float32) * s)


@triton.jit
def _take(mine, second, words, scale, n, q, four, per_group, high, mins, GROUPS: tl.constexpr, QTYPE: tl.constexpr,
          LOW: tl.constexpr, HIGH: tl.constexpr):  # fmt: skip
    """Chunk n as it lies in memory: (words of the weights, those of the second matrix, words of the activations, their
    scales)."""
    raw = load_codes(mine, n, q, four, high, mins, QTYPE, LOW, HIGH)
    other = raw if second is None else load_codes(second, n, q, four, high, mins, QTYPE, LOW, HIGH)
    x: tl.tuple = ()
    xs: tl.tuple = ()
    for group in tl.static_range(GROUPS):
        at = words + group * per_group * 256 + n * 256
        x = x + load4(at, True) + load4(at + 128, True)
        at = scale + group * per_group * 32 + n * 32
        xs = xs + load_floats(at) + load_floats(at + 4)
    return raw, other, x, xs


@triton.jit
def _weight_scales(record, n, four, whole, scales, d, QTYPE: tl.constexpr):
    """Scales of the four rows in chunk n, of the first and of the second 16 columns; of most types they are one."""
    found: tl.tuple = ()
    if QTYPE == "Q6_K":
        first = tl.load(record + (scales + four) // 4 + n * 8)
        second = tl.load(record + (scales + four) // 4 + n * 8 + 4)
        for row in tl.static_range(4):
            found = found + (signed_byte_of(first, row).to(tl.float32) * whole[row],)  # noqa: RUF005
        for row in tl.static_range(4):
            found = found + (signed_byte_of(second, row).to(tl.float32) * whole[row],)  # noqa: RUF005
    else:
        plain = scales_of_rows(record, n, four, scales, d, QTYPE)
        for row in tl.static_range(4):
            if QTYPE == "Q4_K" or QTYPE == "Q5_K" or QTYPE == "IQ4_XS":
                found = found + (plain[row] * whole[row],)  # noqa: RUF005
            else:
                found = found + (plain[row],)  # noqa: RUF005
    return found


@triton.jit
def _add_chunk(totals, FIRST: tl.constexpr, raw, x, xs, record, n, q, four, whole, scales, d, GROUPS: tl.constexpr,
               QTYPE: tl.constexpr):  # fmt: skip
    """The sums from number FIRST on, of a matrix, with those of chunk n."""
    codes: tl.tuple = ()
    for row in tl.static_range(4):
        codes = codes + (decode(raw, row, q, QTYPE),)  # noqa: RUF005
    ws = _weight_scales(record, n, four, whole, scales, d, QTYPE)
    lower: tl.tuple = ()
    for i in tl.static_range(8 if QTYPE == "Q6_K" else 4):
        lower = lower + (ws[i] * -MAGIC,)  # noqa: RUF005
    grown: tl.tuple = ()
    for block in tl.static_range(4 * GROUPS):
        b0, b1 = x[2 * block], x[2 * block + 1]
        for pair in tl.static_range(2):
            a0, a2 = codes[2 * pair]
            a1, a3 = codes[2 * pair + 1]
            if QTYPE == "Q6_K":
                dots, others = raised_dot16(a0, a1, b0), raised_dot16(a2, a3, b1)
            else:
                dots = raised_dot32(a0, a1, a2, a3, b0, b1)
            for i in tl.static_range(4):
                x_scale = xs[2 * block + i % 2]
                value = totals[FIRST + 8 * block + 4 * pair + i]
                value = fused(fused(dots[i], ws[2 * pair + i // 2], lower[2 * pair + i // 2]), x_scale, value)
                if QTYPE == "Q6_K":
                    more = fused(others[i], ws[4 + 2 * pair + i // 2], lower[4 + 2 * pair + i // 2])
                    value = fused(more, x_scale, value)
                grown = grown + (value,)  # noqa: RUF005
    return grown


@triton.jit
def _add_addends(totals, FIRST: tl.constexpr, mine, start, sums, chunks, q, four, scales, mins, dmin,
                 THREADS: tl.constexpr, GROUPS: tl.constexpr, QTYPE: tl.constexpr):  # fmt: skip
    """The sums from number FIRST on, of a matrix, with what its 8 chunks from `start` on add to every weight."""
    SUPER: tl.constexpr = QTYPE == "Q4_K" or QTYPE == "Q5_K"
    added = addends(mine, start + q, four, scales, mins, dmin, QTYPE)
    later = addends(mine, start + q + 4, four, scales, mins, dmin, QTYPE)
    if SUPER:
        less = load_halves(mine.to(tl.pointer_type(tl.float16), bitcast=True) + dmin // 2 + start // 8 * 16 + four)
    zero = tl.zeros((THREADS,), tl.float32)
    more: tl.tuple = ()
    for part in tl.static_range(GROUPS):
        at = sums + part * chunks * 32 + (start + q) * 32
        low, up = load_floats(at), load_floats(at + 128)
        for b in tl.static_range(4):
            for pair in tl.static_range(2):
                r = add_products(added[2 * pair], added[2 * pair + 1], later[2 * pair], later[2 * pair + 1], low[b],
                                 up[b], zero, zero, zero, zero)  # fmt: skip
                for i in tl.static_range(4):
                    old = totals[FIRST + 32 * part + 8 * b + 4 * pair + i]
                    if SUPER:
                        more = more + (old - less[2 * pair + i // 2] * r[i],)  # noqa: RUF005
                    else:
                        more = more + (old + r[i],)  # noqa: RUF005
    return more


@triton.jit
def _whole_scales(mine, start, d, four, SUPER: tl.constexpr):
    """Scales of the four rows' superblock; of types without, nothing."""
    if SUPER:
        return load_halves(mine.to(tl.pointer_type(tl.float16), bitcast=True) + d // 2 + start // 8 * 16 + four)
    else:
        return ()


@triton.jit
def sum_chunks(
    mine, second, words, scale, sums, chunks, g, q, four, high, scales, mins, d, dmin,
    THREADS: tl.constexpr, GROUPS: tl.constexpr, UNIT: tl.constexpr, AHEAD: tl.constexpr, QTYPE: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """Sums over all chunks of 32 rows times GROUPS groups of tokens: of token 8b + 2q + side of all, that of row
    4 (g % 4) + r of the thread's record is number 8b + 2r + side. Behind them those of a `second` matrix.

    mine, second: the thread's record, int32*; words, scale, sums: of the first of the groups, whose chunks lie one
    after the other.
    """
    words += (g * 4 + q) * 4
    scale += q * 8
    sums += g * 4
    MATRICES: tl.constexpr = 1 if second is None else 2
    COUNT: tl.constexpr = GROUPS * 32
    totals: tl.tuple = ()
    for _ in tl.static_range(MATRICES * COUNT):
        totals = totals + (tl.zeros((THREADS,), tl.float32),)  # noqa: RUF005
    SUPER: tl.constexpr = QTYPE == "Q4_K" or QTYPE == "Q5_K" or QTYPE == "Q6_K" or QTYPE == "IQ4_XS"
    ADDED: tl.constexpr = QTYPE == "Q4_K" or QTYPE == "Q5_K" or QTYPE == "Q4_1" or QTYPE == "Q5_1"
    TURN: tl.constexpr = 8 if SUPER or ADDED else UNIT
    if AHEAD:
        next_ = _take(mine, second, words, scale, 0, q, four, chunks, high, mins, GROUPS, QTYPE, LOW, HIGH)
    for start in range(0, chunks, TURN):
        whole = _whole_scales(mine, start, d, four, SUPER)
        other_whole = whole
        if second is not None:
            other_whole = _whole_scales(second, start, d, four, SUPER)
        if ADDED:
            grown = _add_addends(totals, 0, mine, start, sums, chunks, q, four, scales, mins, dmin, THREADS, GROUPS,
                                 QTYPE)  # fmt: skip
            if second is not None:
                grown = grown + _add_addends(totals, COUNT, second, start, sums, chunks, q, four, scales, mins, dmin,
                                             THREADS, GROUPS, QTYPE)  # fmt: skip
            totals = grown
        for inner in range(start, start + TURN, UNIT):
            taken: tl.tuple = ()
            for k in tl.static_range(UNIT):
                if AHEAD:
                    taken = taken + (next_,)  # noqa: RUF005
                    following = tl.minimum(inner + k + 1, chunks - 1)
                    next_ = _take(mine, second, words, scale, following, q, four, chunks, high, mins, GROUPS, QTYPE,
                                  LOW, HIGH)  # fmt: skip
                else:
                    one = _take(mine, second, words, scale, inner + k, q, four, chunks, high, mins, GROUPS, QTYPE, LOW,
                                HIGH)  # fmt: skip
                    taken = taken + (one,)  # noqa: RUF005
            for k in tl.static_range(UNIT):
                raw, other, x, xs = taken[k]
                grown = _add_chunk(totals, 0, raw, x, xs, mine, inner + k, q, four, whole, scales, d, GROUPS,
                                   QTYPE)  # fmt: skip
                if second is not None:
                    grown = grown + _add_chunk(totals, COUNT, other, x, xs, second, inner + k, q, four, other_whole,
                                               scales, d, GROUPS, QTYPE)  # fmt: skip
                totals = grown
    return totals


@triton.jit
def four_of(totals, block: tl.constexpr, side: tl.constexpr, factor, COUNT: tl.constexpr, ACTIVATION: tl.constexpr):
    """What the thread has of token 8 block + 2q + side: four rows; with an ACTIVATION of COUNT gates and of ups."""
    four: tl.tuple = ()
    for row in tl.static_range(4):
        value = totals[8 * block + 2 * row + side] * factor
        if ACTIVATION != "":
            value = activate(value, totals[COUNT + 8 * block + 2 * row + side] * factor, ACTIVATION)
        four = four + (value,)  # noqa: RUF005
    return four


@triton.jit
def as_columns(four, THREADS: tl.constexpr):
    """Four numbers a thread as [THREADS, 4]."""
    return tl.reshape(tl.join(tl.join(four[0], four[2]), tl.join(four[1], four[3])), (THREADS, 4))


@triton.jit
def many_rows_kernel(
    weight, second, words, scale, sums, out, tokens, rows, chunks, out_stride, record, high, scales, mins, d, dmin,
    WR: tl.constexpr, WT: tl.constexpr, GROUPS: tl.constexpr, UNIT: tl.constexpr, AHEAD: tl.constexpr,
    BAND: tl.constexpr, QTYPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, FACTOR: tl.constexpr,
    ACCUMULATE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """out[tokens, rows] (+)= activations @ weight.T: a program takes WR * 32 rows and WT * GROUPS * 32 tokens.

    With a `second` matrix of that type: out = act(activations @ weight.T) * (activations @ second.T).

    UNIT chunks are loaded at once, a divisor of `chunks`; of types with superblocks or addends, of 8. AHEAD: those of
    the next turn are loaded before this turn's are multiplied. BAND: so many tiles of rows next to each other share
    their activations in L2.
    """
    thread = tl.arange(0, 32 * WR * WT)
    lane, warp = thread % 32, thread // 32
    g, q = lane // 4, lane % 4
    four = g % 4 * 4
    tiles = tl.cdiv(rows, WR * 32)
    columns = tl.cdiv(tokens, WT * GROUPS * 32)
    program = tl.program_id(0)
    band = program // (BAND * columns)
    wide = tl.minimum(tiles - band * BAND, BAND)
    inside = program - band * BAND * columns
    tile = band * BAND + inside % wide
    first_group = (inside // wide * WT + warp // WR) * GROUPS
    group = (tile * WR + warp % WR) * 2 + lane // 16
    exists = group * 16 < rows
    place = tl.where(exists, group, 0).to(tl.int64) * record
    there = first_group.to(tl.int64) * chunks
    words += there * 256
    scale += there * 32
    sums += there * 32
    mine = weight.to(tl.pointer_type(tl.int32), bitcast=True) + place
    other = None
    if second is not None:
        other = second.to(tl.pointer_type(tl.int32), bitcast=True) + place
    totals = sum_chunks(mine, other, words, scale, sums, chunks, g, q, four, high, scales, mins, d, dmin, 32 * WR * WT,
                        GROUPS, UNIT, AHEAD, QTYPE, LOW, HIGH)  # fmt: skip
    row = (group * 16 + four)[:, None] + tl.arange(0, 4)[None, :]
    for block in tl.static_range(4 * GROUPS):
        for side in tl.static_range(2):
            m = (first_group + block // 4) * 32 + block % 4 * 8 + 2 * q + side
            value = as_columns(four_of(totals, block, side, 1.0 / FACTOR, 32 * GROUPS, ACTIVATION), 32 * WR * WT)
            at = out + m.to(tl.int64)[:, None] * out_stride + row
            mask = (m < tokens)[:, None] & (row < rows)
            if ACCUMULATE:
                value += tl.load(at, mask=mask, other=0.0).to(tl.float32)
            tl.store(at, value.to(out.dtype.element_ty), mask=mask)
