"""Packed records times quantised activations on the int8 tensor cores: 32 rows for each warp, up to 32 tokens.

Weights are read once, in 16-byte pieces that never leave the registers: they lie in memory as the tensor cores want
them (triton_fragments). Scales are applied in float32 to the exact integer sums, or those of Q2_K and Q3_K to the codes
before. One token costs as much as eight.
"""

import triton
import triton.language as tl

from pshard.runtime.kernels.gpu.products.triton_fragments import (
    EXCESS_Q3,
    decode,
    decode_scaled,
    load_codes,
    load_exponents,
    load_halves,
    scale_words_q3,
)
from pshard.runtime.kernels.gpu.products.triton_mma import (
    MAGIC,
    MAGIC_BITS,
    add_products,
    byte_of,
    dot16,
    dot32,
    dot_unsigned,
    fetch_line,
    load1,
    load4,
    load_long,
    signed_byte_of,
    start_less,
)

LINE: tl.constexpr = tl.constexpr(64)  # bytes that one access to DRAM brings


@triton.jit
def within(n, last, MASKED: tl.constexpr):
    """Chunk n, or the last one before `last`: what is loaded of a chunk that is not there is multiplied by zero.

    Loads that hang on masks take registers for their zeros, and cannot be put in one order with others."""
    return tl.minimum(n, last - 1) if MASKED else n


@triton.jit
def scales_of_rows(record, n, four, scales, d, QTYPE: tl.constexpr, HOLD: tl.constexpr = True):
    """Scales of the four rows in chunk n, float32; for Q4_K and Q5_K without the superblock's. HOLD: see
    `load_halves`."""
    if QTYPE == "TQ1_0" or QTYPE == "TQ2_0":
        return 1.0, 1.0, 1.0, 1.0
    elif QTYPE == "Q1_0":
        return load_halves(record.to(tl.pointer_type(tl.float16), bitcast=True) + d // 2 + n // 4 * 16 + four, HOLD)
    elif QTYPE == "Q2_0":
        return load_halves(record.to(tl.pointer_type(tl.float16), bitcast=True) + d // 2 + n // 2 * 16 + four, HOLD)
    elif QTYPE == "MXFP4":
        return load_exponents(record + (d + four) // 4 + n * 4, HOLD)
    elif QTYPE == "Q4_K" or QTYPE == "Q5_K":
        word = load1(record + (scales + four) // 4 + n * 4)
        return (byte_of(word, 0).to(tl.float32), byte_of(word, 1).to(tl.float32),
                byte_of(word, 2).to(tl.float32), byte_of(word, 3).to(tl.float32))  # fmt: skip
    elif QTYPE == "IQ4_XS":
        word = load1(record + (scales + four) // 4 + n * 4)
        return ((byte_of(word, 0) - 32).to(tl.float32), (byte_of(word, 1) - 32).to(tl.float32),
                (byte_of(word, 2) - 32).to(tl.float32), (byte_of(word, 3) - 32).to(tl.float32))  # fmt: skip
    else:
        halves = record.to(tl.pointer_type(tl.float16), bitcast=True)
        return load_halves(halves + d // 2 + n * 16 + four, HOLD)


@triton.jit
def addends(record, n, four, scales, mins, dmin, QTYPE: tl.constexpr, HOLD: tl.constexpr = True):
    """What chunk n adds to a weight of the four rows, float32; for K-quants without the superblock's factor.

    Q2_K: eight, those of the second 16 columns behind those of the first. HOLD: see `load_halves`.
    """
    if QTYPE == "Q2_K":
        word = record + (scales + four) // 4 + n * 8
        first = (load1(word) >> 4) & 0x0F0F0F0F
        second = (load1(word + 4) >> 4) & 0x0F0F0F0F
        return (byte_of(first, 0).to(tl.float32), byte_of(first, 1).to(tl.float32),
                byte_of(first, 2).to(tl.float32), byte_of(first, 3).to(tl.float32),
                byte_of(second, 0).to(tl.float32), byte_of(second, 1).to(tl.float32),
                byte_of(second, 2).to(tl.float32), byte_of(second, 3).to(tl.float32))  # fmt: skip
    elif QTYPE == "Q4_K" or QTYPE == "Q5_K":
        word = load1(record + (mins + four) // 4 + n * 4)
        return (byte_of(word, 0).to(tl.float32), byte_of(word, 1).to(tl.float32),
                byte_of(word, 2).to(tl.float32), byte_of(word, 3).to(tl.float32))  # fmt: skip
    else:
        halves = record.to(tl.pointer_type(tl.float16), bitcast=True)
        return load_halves(halves + dmin // 2 + n * 16 + four, HOLD)


@triton.jit
def _float4(pointer, chunk, last, MASKED: tl.constexpr):
    """Scales of activations of four chunks from `chunk` on; zeros from `last` on."""
    words = load4(pointer.to(tl.pointer_type(tl.int32), bitcast=True), True)
    values = ()
    for k in tl.static_range(4):
        value = words[k].to(tl.float32, bitcast=True)
        if MASKED:
            value = tl.where(chunk + k < last, value, 0.0)
        values = values + (value,)  # noqa: RUF005
    return values


@triton.jit
def _scaled_operands(pointer, xs, q, QTYPE: tl.constexpr, WIDE: tl.constexpr):
    """(words 2q and 2q + 1 of four chunks, where their four sums start, what the starts add to each side, negative).

    `pointer`: the first of 8 words of activations, see `store_quantised`; `xs`: scales of the four chunks, of each
    side. For types of `decode_scaled`. WIDE: load all 8 words of two chunks.
    """
    words = ()
    starts = ()
    for k in tl.static_range(4):
        if WIDE:
            if k % 2 == 0:
                one = load4(pointer + k // 2 * 16, True)
                other = load4(pointer + k // 2 * 16 + 4, True)
            pair = (tl.where(q < 2, one[k % 2 * 2], one[k % 2 * 2 + 1]),
                    tl.where(q < 2, other[k % 2 * 2], other[k % 2 * 2 + 1]))  # fmt: skip
        else:
            at = pointer + k // 2 * 16 + k % 2 * 2 + q // 2
            pair = (load1(at), load1(at + 4))
        if QTYPE == "Q3_K":
            start = start_less(EXCESS_Q3, pair[0], pair[1])
        else:
            even = tl.full(pair[0].shape, MAGIC_BITS, tl.int32)
            start = (even, even, even, even)
        words = words + pair
        starts = starts + (start,)  # noqa: RUF005
    offsets = ()
    for side in tl.static_range(len(xs)):
        offset = xs[side][0] * -MAGIC
        for k in tl.static_range(1, 4):
            offset -= xs[side][k] * MAGIC
        offsets = offsets + (offset,)  # noqa: RUF005
    return words, starts, offsets


@triton.jit
def _sum_pair(pointer, mask, MASKED: tl.constexpr):
    """Two consecutive float32 at a multiple of 8 bytes; zeros where not `mask`."""
    both = load_long(pointer)
    if MASKED:
        both = tl.where(mask, both, 0)
    return both.to(tl.int32).to(tl.float32, bitcast=True), (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _fetch_plane(record, at, lane, mask, NBYTES: tl.constexpr):
    """Have NBYTES from byte `at` of each thread's record brought into L2 by its 16 lanes."""
    for first in tl.static_range(0, NBYTES, 16 * LINE):
        place = first + lane * LINE
        fetch_line(record + (at + place) // 4, mask & (place < NBYTES))


@triton.jit
def fetch_chunks(
    record, n, thread, mask, high, scales, mins, d, dmin, UNIT: tl.constexpr, QTYPE: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr,
):  # fmt: skip
    """Have UNIT (8) chunks from n on brought into L2: all planes of both records, by the warp that will read them."""
    lane = thread % 16
    _fetch_plane(record, n * (64 * LOW), lane, mask, UNIT * 64 * LOW)
    if HIGH == 3:
        _fetch_plane(record, high + n * 64, lane, mask, UNIT * 64)
    elif HIGH == 1 or HIGH == 2:
        _fetch_plane(record, high + n * (64 * HIGH), lane, mask, UNIT * 64 * HIGH)
    if HIGH >= 3 or QTYPE == "TQ1_0" or QTYPE == "TQ2_0":
        _fetch_plane(record, d + n * 4, lane, mask, UNIT * 4)
        if QTYPE == "IQ3_S" or QTYPE == "IQ2_S":
            _fetch_plane(record, mins + n * 16, lane, mask, UNIT * 16)
        elif HIGH == 4:
            _fetch_plane(record, mins + n * 32, lane, mask, UNIT * 32)
        if QTYPE == "IQ3_S":
            _fetch_plane(record, scales + n * 8, lane, mask, UNIT * 8)
        elif QTYPE == "IQ2_S" or QTYPE == "IQ2_XS":
            _fetch_plane(record, scales + n * 16, lane, mask, UNIT * 16)
        elif QTYPE == "IQ1_M":
            _fetch_plane(record, scales + n * 12, lane, mask, UNIT * 12)
    if QTYPE == "Q2_K" or QTYPE == "Q3_K" or QTYPE == "Q4_K" or QTYPE == "Q5_K" or QTYPE == "Q6_K" or QTYPE == "IQ4_XS":
        _fetch_plane(record, d + n * 4, lane, mask, UNIT * 4)
    if QTYPE == "Q2_K" or QTYPE == "Q4_K" or QTYPE == "Q5_K":
        _fetch_plane(record, dmin + n * 4, lane, mask, UNIT * 4)
    if QTYPE == "Q2_K" or QTYPE == "Q6_K":
        _fetch_plane(record, scales + n * 32, lane, mask, UNIT * 32)
    elif QTYPE == "Q3_K":
        _fetch_plane(record, scales + n * 24, lane, mask, UNIT * 24)
    elif QTYPE == "Q4_K" or QTYPE == "Q5_K":
        _fetch_plane(record, scales + n * 16, lane, mask, UNIT * 16)
        _fetch_plane(record, mins + n * 16, lane, mask, UNIT * 16)
    elif QTYPE == "NVFP4":
        _fetch_plane(record, scales + n * 32, lane, mask, UNIT * 32)
    elif QTYPE == "Q1_0":
        _fetch_plane(record, d + n * 8, lane, mask, UNIT * 8)
    elif QTYPE == "Q2_0" or QTYPE == "MXFP4":
        _fetch_plane(record, d + n * 16, lane, mask, UNIT * 16)
    elif QTYPE == "IQ4_XS":
        _fetch_plane(record, scales + n * 16, lane, mask, UNIT * 16)
    elif not (HIGH >= 3 or QTYPE == "TQ1_0" or QTYPE == "TQ2_0"):
        _fetch_plane(record, d + n * 32, lane, mask, UNIT * 32)
        if QTYPE == "Q4_1" or QTYPE == "Q5_1":
            _fetch_plane(record, dmin + n * 32, lane, mask, UNIT * 32)


@triton.jit
def dot_records(
    record, thread, words, scale, sums, width, first, last, high, scales, mins, d, dmin,
    TOKENS: tl.constexpr, WARPS: tl.constexpr, UNIT: tl.constexpr, QTYPE: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, FACTOR: tl.constexpr, MASKED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Tiles f32 [8 tokens, 32 rows], one for every 8 tokens: the pair of records times chunks first..last.

    A warp takes UNIT (8) chunks in turn, four at a time; warps share the columns. AHEAD: those that it will take so
    many turns later are brought into L2 meanwhile, which costs no registers. TOKENS == 1: the tile is [4, 32] and
    has the token's sums four times. `record`: of each thread. `width`: chunks that a row of activations has
    room for.
    """
    SUPER: tl.constexpr = (
        QTYPE == "Q2_K" or QTYPE == "Q3_K" or QTYPE == "Q4_K" or QTYPE == "Q5_K" or QTYPE == "Q6_K" or QTYPE == "IQ4_XS"
        or QTYPE == "TQ1_0" or QTYPE == "TQ2_0"
    )  # fmt: skip
    FOLDED: tl.constexpr = QTYPE == "Q2_K" or QTYPE == "Q3_K"  # integer scales are multiplied into the codes
    # activations of FOLDED types 16 bytes at once, of which a thread wants 8, or word by word in fewer registers
    WIDE: tl.constexpr = QTYPE == "Q2_K" or TOKENS <= 8
    HALVES: tl.constexpr = QTYPE == "Q6_K"  # integer scales of 16 columns each
    ADDED: tl.constexpr = QTYPE == "Q2_K" or QTYPE == "Q4_K" or QTYPE == "Q5_K" or QTYPE == "Q4_1" or QTYPE == "Q5_1"
    lane = thread % 32
    warp = thread // 32
    g = lane // 4
    q = lane % 4
    four = g % 4 * 4
    SIDES: tl.constexpr = 1 if TOKENS == 1 else 2  # columns 2q and 2q + 1 of a product
    COLUMNS: tl.constexpr = 8 if TOKENS > 8 else TOKENS  # of the 8 of a product; fewer tokens are there repeatedly
    BLOCKS: tl.constexpr = (TOKENS + 7) // 8
    column = words + g % COLUMNS * width * 8 + (q % 2 * 8 if FOLDED else q * 4)
    row_sums = sums + g % COLUMNS * width * 2
    halves = record.to(tl.pointer_type(tl.float16), bitcast=True)
    totals = ()  # of a block of 8 tokens, of the four rows: both sides
    for _ in tl.static_range(BLOCKS * 4 * SIDES):
        totals = totals + (tl.zeros((32 * WARPS,), tl.float32),)  # noqa: RUF005
    for start in range(first, last, WARPS * UNIT):
        chunk = (start + warp * UNIT).to(tl.int64)
        here = chunk  # of a turn with nothing left the chunks of the last one that has some, times zero
        if MASKED:
            here = tl.minimum(chunk, (last - 1) // 8 * 8)
        if AHEAD > 0:
            later = chunk + AHEAD * WARPS * UNIT
            fetch_chunks(record, later, thread, later + UNIT <= last, high, scales, mins, d, dmin, UNIT,
                          QTYPE, LOW, HIGH)  # fmt: skip
        if SUPER:
            whole = load_halves(halves + d // 2 + here // 8 * 16 + four)
        if QTYPE == "Q3_K":
            inner = scale_words_q3(record, scales, here // 8, four, q)
        for quarter in tl.static_range(UNIT // 4):
            raws = ()
            for k in tl.static_range(4):  # all loads first
                n = within(here + (4 * quarter + k), last, MASKED)
                raw = load_codes(record, n, q, four, high, mins, QTYPE, LOW, HIGH)
                raws = raws + (raw,)  # noqa: RUF005
            codes = ()
            row_scales = ()
            for k in tl.static_range(4):
                n = within(here + (4 * quarter + k), last, MASKED)
                row_scale = ()
                row_codes = ()
                if FOLDED:
                    if QTYPE == "Q3_K":
                        word = inner[4 * quarter + k]
                    else:
                        at = record + (scales + four) // 4 + n * 8 + q // 2 * 4
                        word = load1(at) & 0x0F0F0F0F
                    for row in tl.static_range(4):
                        row_codes = row_codes + (decode_scaled(raws[k], row, q, word, QTYPE),)  # noqa: RUF005
                else:
                    if HALVES:
                        low_word = load1(record + (scales + four) // 4 + n * 8)
                        up_word = load1(record + (scales + four) // 4 + n * 8 + 4)
                        for row in tl.static_range(4):
                            both = (signed_byte_of(low_word, row), signed_byte_of(up_word, row))
                            row_scale = row_scale + (both,)  # noqa: RUF005
                    else:
                        row_scale = scales_of_rows(record, n, four, scales, d, QTYPE, quarter == 0 and k == 0)
                    for row in tl.static_range(4):
                        row_codes = row_codes + (decode(raws[k], row, q, QTYPE),)  # noqa: RUF005
                codes = codes + (row_codes,)  # noqa: RUF005
                row_scales = row_scales + (row_scale,)  # noqa: RUF005
            grown_totals = ()
            for block in tl.static_range(BLOCKS):
                xs = ()
                for side in tl.static_range(SIDES):
                    at = scale + (8 * block + (2 * q + side) % COLUMNS) * width + here + 4 * quarter
                    xs = xs + (_float4(at, chunk + 4 * quarter, last, MASKED),)  # noqa: RUF005
                at = column + 64 * block * width + (here // 2 + 2 * quarter) * 16
                if FOLDED:
                    x, starts, offsets = _scaled_operands(at, xs, q, QTYPE, WIDE)
                else:
                    x = load4(at, True) + load4(at + 16, True)
                for pair in tl.static_range(2):
                    part = ()
                    for i in tl.static_range(2 * SIDES):
                        if FOLDED:
                            part = part + (offsets[i % SIDES],)  # noqa: RUF005
                        elif SUPER:
                            part = part + (tl.zeros((32 * WARPS,), tl.float32),)  # noqa: RUF005
                        else:
                            part = part + (totals[(4 * block + 2 * pair) * SIDES + i],)  # noqa: RUF005
                    for k in tl.static_range(4):
                        a0, a2 = codes[k][2 * pair]
                        a1, a3 = codes[k][2 * pair + 1]
                        grown = ()
                        if FOLDED:
                            c0, c1, c2, c3 = starts[k]
                            dots = dot_unsigned(a0, a1, a2, a3, x[2 * k], x[2 * k + 1], c0, c1, c2, c3)
                        elif HALVES:
                            dots = dot16(a0, a1, x[2 * k])
                            other = dot16(a2, a3, x[2 * k + 1])
                        else:
                            dots = dot32(a0, a1, a2, a3, x[2 * k], x[2 * k + 1])
                        for i in tl.static_range(2):
                            for side in tl.static_range(SIDES):
                                value = dots[2 * i + side]
                                if HALVES:
                                    s0, s1 = row_scales[k][2 * pair + i]
                                    value = (value * s0 + other[2 * i + side] * s1).to(tl.float32) * xs[side][k]
                                elif FOLDED:
                                    value = value * xs[side][k]
                                else:
                                    value = value * (row_scales[k][2 * pair + i] * xs[side][k])
                                grown = grown + (part[i * SIDES + side] + value,)  # noqa: RUF005
                        part = grown
                    for i in tl.static_range(2 * SIDES):
                        if SUPER:
                            total = totals[(4 * block + 2 * pair) * SIDES + i] + whole[2 * pair + i // SIDES] * part[i]
                        else:
                            total = part[i]
                        grown_totals = grown_totals + (total,)  # noqa: RUF005
            totals = grown_totals
        if ADDED:  # the addends times the sums of the activations: a product over 8 chunks
            n = here + q
            there = chunk + q < last
            beyond = chunk + q + 4 < last
            first_added = addends(record, within(n, last, MASKED), four, scales, mins, dmin, QTYPE, False)
            second_added = addends(record, within(n + 4, last, MASKED), four, scales, mins, dmin, QTYPE, False)
            if SUPER:
                less = load_halves(halves + dmin // 2 + here // 8 * 16 + four, False)
            zero = tl.zeros((32 * WARPS,), tl.float32)
            more = ()
            for block in tl.static_range(BLOCKS):
                at = row_sums + 16 * block * width + n * 2
                low, up = _sum_pair(at, there, MASKED)
                next_low, next_up = _sum_pair(at + 8, beyond, MASKED)
                for pair in tl.static_range(2):
                    f0, f1 = first_added[2 * pair], first_added[2 * pair + 1]
                    s0, s1 = second_added[2 * pair], second_added[2 * pair + 1]
                    old = ()
                    for i in tl.static_range(2 * SIDES):
                        old = old + (totals[(4 * block + 2 * pair) * SIDES + i],)  # noqa: RUF005
                    if QTYPE == "Q2_K":
                        r = add_products(f0, f1, s0, s1, low, next_low, zero, zero, zero, zero)
                        r = add_products(
                            first_added[4 + 2 * pair], first_added[5 + 2 * pair], second_added[4 + 2 * pair],
                            second_added[5 + 2 * pair], up, next_up, r[0], r[1], r[2], r[3],
                        )  # fmt: skip
                    elif SUPER:
                        r = add_products(f0, f1, s0, s1, low + up, next_low + next_up, zero, zero, zero, zero)
                    elif SIDES == 1:
                        r = add_products(f0, f1, s0, s1, low + up, next_low + next_up, old[0], zero, old[1], zero)
                    else:
                        r = add_products(f0, f1, s0, s1, low + up, next_low + next_up, old[0], old[1], old[2], old[3])
                    for i in tl.static_range(2 * SIDES):
                        product = r[2 * (i // SIDES) + i % SIDES]
                        if SUPER:
                            product = old[i] - less[2 * pair + i // SIDES] * product
                        more = more + (product,)  # noqa: RUF005
            totals = more
    results = ()
    for block in tl.static_range(BLOCKS):
        if TOKENS == 1:
            tile = tl.join(tl.join(totals[0], totals[1]), tl.join(totals[2], totals[3]))
            tile = tl.sum(tl.reshape(tile, (WARPS, 2, 4, 4, 2, 2)), axis=0)
            tile = tl.reshape(tl.trans(tile, 2, 0, 1, 4, 3), (4, 32))
        else:
            row0 = tl.join(totals[8 * block], totals[8 * block + 1])
            row1 = tl.join(totals[8 * block + 2], totals[8 * block + 3])
            row2 = tl.join(totals[8 * block + 4], totals[8 * block + 5])
            row3 = tl.join(totals[8 * block + 6], totals[8 * block + 7])
            tile = tl.join(tl.join(row0, row1), tl.join(row2, row3))
            tile = tl.sum(tl.reshape(tile, (WARPS, 2, 4, 4, 2, 2, 2)), axis=0)
            tile = tl.reshape(tl.trans(tile, 2, 3, 0, 1, 5, 4), (8, 32))
        results = results + (tile * (1.0 / FACTOR),)  # noqa: RUF005
    return results
