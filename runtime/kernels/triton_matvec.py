"""Products of a few rows with packed weights, in int8: activations are quantised per 32 columns, dp4a does the rest.

Weights are read once from memory in 16-byte pieces and never leave the registers; a few rows of activations
share the unpacking. Sums are taken in a fixed order, so a repeated run gives the same bits.
"""

import triton
import triton.language as tl

from pshard.runtime.kernels.triton_decode import load_codes, load_scales

if triton.knobs.runtime.interpret:  # the interpreter has no inline assembly

    @triton.jit
    def dot4(a, b, total):
        """total + sum of the four products of signed bytes of a and b, int32."""
        for t in tl.static_range(4):
            total = total + ((a << (24 - 8 * t)) >> 24) * ((b << (24 - 8 * t)) >> 24)
        return total

else:

    @triton.jit
    def dot4(a, b, total):
        """total + sum of the four products of signed bytes of a and b, int32."""
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def store_quantised(value, chunk, there, m, words, scale, sums, chunks, TOKENS: tl.constexpr, BC: tl.constexpr):
    """Row m's chunks, value f32 [BC, 32], as int8 codes with their scales and sums.

    words int32 [8, TOKENS, chunks]: number c holds columns 4c..4c+3; scale f32 [TOKENS, chunks] = max |x| / 127;
    sums f32 [2, TOKENS, chunks] = scale * sum of the codes of each half chunk. Only chunks that are `there` [BC].
    """
    peak = tl.max(tl.abs(value), axis=1)
    inverse = tl.where(peak > 0.0, 127.0 / peak, 0.0)
    # adding 1.5 * 2^23 leaves no fraction bits: rounds to nearest even
    code = ((value * inverse[:, None] + 12582912.0) - 12582912.0).to(tl.int32)
    place = tl.arange(0, 4)[None, None, :] * 8
    word = tl.sum((tl.reshape(code, (BC, 8, 4)) & 255) << place, axis=2)
    at = tl.arange(0, 8)[None, :] * (TOKENS * chunks) + m * chunks + chunk[:, None]
    tl.store(words + at, word, mask=there[:, None])
    tl.store(scale + m * chunks + chunk, peak / 127.0, mask=there)
    half = tl.sum(tl.reshape(code, (BC, 2, 16)), axis=2).to(tl.float32) * (peak / 127.0)[:, None]
    at = tl.arange(0, 2)[None, :] * (TOKENS * chunks) + m * chunks + chunk[:, None]
    tl.store(sums + at, half, mask=there[:, None])


@triton.jit
def quantise_kernel(x, x_stride, words, scale, sums, chunks, TOKENS: tl.constexpr, BC: tl.constexpr):
    """x [M, 32 * chunks] as `store_quantised` leaves it; program (BC chunks, row). TOKENS >= M rows have room."""
    m = tl.program_id(1)
    chunk = tl.program_id(0) * BC + tl.arange(0, BC)
    there = chunk < chunks
    column = chunk[:, None] * 32 + tl.arange(0, 32)[None, :]
    value = tl.load(x + m.to(tl.int64) * x_stride + column, mask=there[:, None], other=0.0).to(tl.float32)
    store_quantised(value, chunk, there, m, words, scale, sums, chunks, TOKENS, BC)


@triton.jit
def _dot_record(
    weight, words, scale, sums, chunks, first, last, high, scales, mins, d, dmin,
    TOKENS: tl.constexpr, BC: tl.constexpr, QTYPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    HALVES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """TOKENS vectors f32 [16]: the record at `weight` times each row of activations over chunks first..last."""
    lane = tl.arange(0, 16)[None, :]
    totals = ()
    for _ in tl.static_range(TOKENS):
        totals = totals + (tl.zeros((BC, 16), tl.float32),)  # noqa: RUF005
    for start in tl.range(first, last, BC, num_stages=STAGES):
        chunk = start + tl.arange(0, BC)
        there = chunk < last
        mask = there[:, None]
        codes = load_codes(weight, 0, lane, chunk[:, None], mask, high, QTYPE, LOW, HIGH)
        s0, a0, s1, a1 = load_scales(weight, 0, lane, chunk[:, None], mask, scales, mins, d, dmin, QTYPE)
        new = ()
        for m in tl.static_range(TOKENS):
            at = m * chunks + chunk
            step = TOKENS * chunks
            dots = tl.zeros((BC, 16), tl.int32)
            for c in tl.static_range(4):
                dots = dot4(codes[c], tl.load(words + c * step + at, mask=there, other=0)[:, None], dots)
            more = dots if not HALVES else tl.zeros((BC, 16), tl.int32)
            for c in tl.static_range(4, 8):
                more = dot4(codes[c], tl.load(words + c * step + at, mask=there, other=0)[:, None], more)
            xs = tl.load(scale + at, mask=there, other=0.0)[:, None]
            x0 = tl.load(sums + at, mask=there, other=0.0)[:, None]
            x1 = tl.load(sums + step + at, mask=there, other=0.0)[:, None]
            if HALVES:
                part = (s0 * dots.to(tl.float32) + s1 * more.to(tl.float32)) * xs + a0 * x0 + a1 * x1
            else:
                part = (s0 * xs) * more.to(tl.float32) + a0 * (x0 + x1)
            new = new + (totals[m] + part,)  # noqa: RUF005
        totals = new
    results = ()
    for m in tl.static_range(TOKENS):
        results = results + (tl.sum(totals[m], axis=0),)  # noqa: RUF005
    return results


@triton.jit
def _arrive(counter):
    """How many programs came here before, once all that this one has stored can be seen by those that come later."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel")


@triton.jit
def _part(first, second, third, group, end, next_end, PARTS: tl.constexpr):
    """Which of up to three pointers serves the record `group` of matrices side by side, given where they end."""
    if PARTS == 1:
        return first
    else:
        return tl.where(group < end, first, tl.where(group < next_end, second, third))


@triton.jit(do_not_specialize=["tokens", "pieces", "end", "next_end"])
def matvec_kernel(
    weight, second, third, end, next_end, words, scale, sums, out, bias, second_bias, third_bias, partial, counters,
    new_words, new_scale, new_sums, tokens, rows, chunks, out_stride, pieces, per_piece,
    record, high, scales, mins, d, dmin,
    TOKENS: tl.constexpr, BC: tl.constexpr, QTYPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    HALVES: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr, PIECES: tl.constexpr, QUANTISE: tl.constexpr,
):  # fmt: skip
    """Program (record, piece of the columns) -> out[m, 16 rows] (+)= weight . x + bias.

    PARTS matrices side by side: records 0..end are `weight`, up to next_end `second`, then `third`; likewise the
    biases. GATED: silu(weight . x) * (second . x), and with QUANTISE the second program of a chunk of 32 results also
    quantises it. PIECES > 1 (a power of two >= pieces): each piece leaves its sums in partial[pieces, tokens, rows],
    and the last to arrive adds them up, in an order of its own that no timing changes. Counters return to zero.
    """
    group = tl.program_id(0)
    piece = tl.program_id(1)
    first = piece * per_piece
    last = tl.minimum(first + per_piece, chunks)
    lane = tl.arange(0, 16)
    row = group * 16 + lane
    source = _part(weight, second, third, group, end, next_end, PARTS)
    local = group - _part(0, end, next_end, group, end, next_end, PARTS)
    start = local.to(tl.int64) * record * 4
    results = _dot_record(source + start, words, scale, sums, chunks, first, last, high, scales, mins, d, dmin,
                          TOKENS, BC, QTYPE, LOW, HIGH, HALVES, STAGES)  # fmt: skip
    if GATED:
        others = _dot_record(second + start, words, scale, sums, chunks, first, last, high, scales, mins, d, dmin,
                             TOKENS, BC, QTYPE, LOW, HIGH, HALVES, STAGES)  # fmt: skip
    if PIECES > 1:
        for m in tl.static_range(TOKENS):
            at = partial + (piece * tokens + m).to(tl.int64) * rows + row
            tl.store(at, results[m], mask=(row < rows) & (m < tokens))
        finish = _arrive(counters + group) == pieces - 1
    else:
        finish = True
    if finish:
        for m in tl.static_range(TOKENS):
            mask = (row < rows) & (m < tokens)
            if PIECES > 1:
                each = tl.arange(0, PIECES)[:, None]
                left = partial + (each * tokens + m).to(tl.int64) * rows + row[None, :]
                there = (each < pieces) & mask[None, :]
                value = tl.sum(tl.load(left, mask=there, other=0.0, cache_modifier=".cg"), axis=0)
            else:
                value = results[m]
            if GATED:
                value = value / (1.0 + tl.exp(-value)) * others[m]
            if BIAS:
                addend = _part(bias, second_bias, third_bias, group, end, next_end, PARTS)
                value += tl.load(addend + local * 16 + lane, mask=mask, other=0.0)
            target = out + m * out_stride + row
            if ACCUMULATE:
                value += tl.load(target, mask=mask, other=0.0).to(tl.float32)
            tl.store(target, value.to(out.dtype.element_ty), mask=mask)
        if PIECES > 1:
            tl.store(counters + group, 0)
    if QUANTISE:
        chunk = group // 2
        if _arrive(counters + chunk) == 1:
            for m in tl.static_range(TOKENS):
                column = chunk * 32 + tl.arange(0, 32)[None, :]
                whole = tl.load(out + m * out_stride + column, mask=(column < rows) & (m < tokens), other=0.0,
                                cache_modifier=".cg")  # fmt: skip
                one = chunk + tl.arange(0, 1)
                store_quantised(whole.to(tl.float32), one, one < rows // 32, m, new_words, new_scale, new_sums,
                                rows // 32, TOKENS, 1)  # fmt: skip
            tl.store(counters + chunk, 0)


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
