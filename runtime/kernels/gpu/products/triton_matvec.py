"""Products of up to 64 rows with packed weights, in int8; activations are quantised per 32 columns.

Two ways to multiply: pairs of records on the tensor cores (triton_records, triton_columns), or one record with dp4a
(triton_dp4a), faster for very few tokens where decoding takes long. Sums have a fixed order, so a repeated run gives
the same bits.
"""

import triton
import triton.language as tl

from pshard.runtime.kernels.gpu.next_norm import factor_of
from pshard.runtime.kernels.gpu.products.triton_columns import dot_columns
from pshard.runtime.kernels.gpu.products.triton_dp4a import dot_record
from pshard.runtime.kernels.gpu.products.triton_gates import gate_mul
from pshard.runtime.kernels.gpu.products.triton_quantise import padded, store_quantised
from pshard.runtime.kernels.gpu.products.triton_records import dot_records
from pshard.runtime.kernels.gpu.products.triton_row_sum import push_part


@triton.jit
def arrive(counter):
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


@triton.jit
def multiply_chunks(
    matrix, record_at, exists, thread, words, scale, sums, width, first, last, record, high, scales, mins, d, dmin,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, WARPS: tl.constexpr, QTYPE: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, FACTOR: tl.constexpr, MASKED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Tiles f32 [tokens, ROWS], see `tokens_of`: record number `record_at` of the matrix times chunks first..last.

    ROWS == 32: `matrix`, `record_at` and `exists` are of each thread; what does not exist has the rows of record 0.
    """
    start = (tl.where(exists, record_at, 0) if MASKED else record_at).to(tl.int64) * record
    if ROWS == 16:
        HALVES: tl.constexpr = (
            QTYPE == "Q2_K" or QTYPE == "Q3_K" or QTYPE == "Q6_K" or QTYPE == "IQ2_S" or QTYPE == "IQ2_XS"
            or QTYPE == "IQ1_M" or QTYPE == "NVFP4"
        )  # fmt: skip
        return dot_record(matrix + start * 4, words, scale, sums, width, first, last, high, scales, mins, d, dmin,
                          TOKENS, DEPTH, QTYPE, LOW, HIGH, HALVES)  # fmt: skip
    elif HIGH >= 3 or QTYPE == "NVFP4":
        tl.static_assert(DEPTH == 8 * WARPS)
        mine = matrix.to(tl.pointer_type(tl.int32), bitcast=True) + start
        return dot_columns(mine, thread, words, scale, width, first, last, high, scales, mins, d, dmin, TOKENS, WARPS,
                           QTYPE, LOW, HIGH, FACTOR, MASKED, AHEAD)  # fmt: skip
    else:
        mine = matrix.to(tl.pointer_type(tl.int32), bitcast=True) + start
        return dot_records(mine, thread, words, scale, sums, width, first, last, high, scales, mins, d, dmin,
                           TOKENS, WARPS, DEPTH // WARPS, QTYPE, LOW, HIGH, FACTOR, MASKED, AHEAD)  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "pieces", "end", "next_end"])
def matvec_kernel(
    weight, second, third, end, next_end, words, scale, sums, out, bias, second_bias, third_bias, partial, counters,
    new_words, new_scale, new_sums, squares, norm, eps, tokens, rows, chunks, out_stride, pieces, per_piece,
    record, high, scales, mins, d, dmin, peers, epochs,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, WARPS: tl.constexpr, QTYPE: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, FACTOR: tl.constexpr, MASKED: tl.constexpr, AHEAD: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, PIECES: tl.constexpr,
    QUANTISE: tl.constexpr, UNSCALED: tl.constexpr, NEXT: tl.constexpr,
    WORDS: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr, WIRE: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Program (TOKENS tokens, ROWS rows, piece of the columns) -> out[m, ROWS rows] (+)= weight . x + bias.

    ROWS == 32: a pair of records on the tensor cores; 16: a record with dp4a. DEPTH chunks at a time by WARPS warps.
    PARTS matrices side by side: records 0..end are `weight`, up to next_end `second`, then `third`; likewise the
    biases. GATED: silu(weight . x) * (second . x), or GELU's, and with QUANTISE these results are also quantised.
    PIECES > 1 (a power of two >= pieces): each piece leaves its sums in partial[pieces, tokens, rows], and the last to
    arrive adds them up, in an order of its own that no timing changes. Counters return to zero.
    MASKED: where a piece is not whole steps of DEPTH chunks, or the rows are not whole tiles. AHEAD (32 rows): weights
    are brought into L2 so many steps before they are due.
    UNSCALED > 0, a power of two >= chunks: the activations are `Unscaled`. NEXT (32 rows): so are the results left, for
    the norm of weights `norm`.
    RANKS > 0: the results, a part of a sum over ranks, are also brought to the `peers` (`push_part`); epochs int32
    [tokens, SLICES]. Neighbouring programs share their weights.
    """
    first_token = tl.program_id(0) * TOKENS
    tile = tl.program_id(1)
    piece = tl.program_id(2)
    counter = counters + tile * tl.num_programs(0) + tl.program_id(0)
    first = piece * per_piece
    last = tl.minimum(first + per_piece, chunks)
    width = padded(chunks)
    words += first_token * width * 8
    scale += first_token * width
    sums += first_token * width * 2
    thread = tl.arange(0, 32 * WARPS)
    group = tile if ROWS == 16 else 2 * tile + thread % 32 // 16
    source = _part(weight, second, third, group, end, next_end, PARTS)
    local = group - _part(0, end, next_end, group, end, next_end, PARTS)
    exists = group * 16 < rows
    BLOCKS: tl.constexpr = TOKENS if ROWS == 16 else (TOKENS + 7) // 8
    epoch: tl.tuple = ()
    if RANKS > 0:
        for block in tl.static_range(BLOCKS):  # here, as at the end it would be waited for
            epoch += (tl.load(epochs + (first_token + tokens_of(block, TOKENS, ROWS)) * SLICES),)
    results = multiply_chunks(source, local, exists, thread, words, scale, sums, width, first, last, record, high,
                              scales, mins, d, dmin, TOKENS, ROWS, DEPTH, WARPS, QTYPE, LOW, HIGH, FACTOR, MASKED,
                              AHEAD)  # fmt: skip
    if GATED:
        others = multiply_chunks(second, local, exists, thread, words, scale, sums, width, first, last, record, high,
                                 scales, mins, d, dmin, TOKENS, ROWS, DEPTH, WARPS, QTYPE, LOW, HIGH, FACTOR, MASKED,
                                 AHEAD)  # fmt: skip
    row = tile * ROWS + tl.arange(0, ROWS)
    if PIECES > 1:
        for block in tl.static_range(BLOCKS):
            m = first_token + tokens_of(block, TOKENS, ROWS)
            mask = (m < tokens)[:, None] & (row < rows)[None, :]
            left = partial + (piece * tokens + m).to(tl.int64)[:, None] * rows + row[None, :]
            tl.store(left, results[block], mask=mask)
        finish = arrive(counter) == pieces - 1
    else:
        finish = True
    if finish:
        for block in tl.static_range(BLOCKS):
            m = first_token + tokens_of(block, TOKENS, ROWS)
            mask = (m < tokens)[:, None] & (row < rows)[None, :]
            if PIECES > 1:
                each = tl.arange(0, PIECES)[:, None, None]
                parts = partial + (each * tokens + m[None, :, None]).to(tl.int64) * rows + row[None, None, :]
                there = (each < pieces) & mask[None, :, :]
                value = tl.sum(tl.load(parts, mask=there, other=0.0, cache_modifier=".cg"), axis=0)
            else:
                value = results[block]
            if UNSCALED > 0:
                value *= factor_of(squares, m, m < tokens, chunks, eps, UNSCALED)[:, None]
            if GATED:
                value = gate_mul(value, others[block], GELU)
            value = _finish(value, m, row, mask, out, out_stride, bias, second_bias, third_bias, end, next_end, PARTS,
                            BIAS, ACCUMULATE)  # fmt: skip
            if RANKS > 0:
                push_part(value.to(tl.float32), m, row, mask, epoch[block], peers, WORDS, RANKS, RANK, WIRE)
            if NEXT:
                there = m < tokens
                tl.store(squares + m * (rows // 32) + tile, tl.sum(value * value, axis=1), mask=there)
                value *= tl.load(norm + row)[None, :]
                store_quantised(value, tile + tl.zeros_like(m), there, m, new_words, new_scale, new_sums, rows // 32,
                                m.shape[0])  # fmt: skip
            if QUANTISE and ROWS == 32:
                chunk = tile + tl.zeros_like(m)
                there = (m < tokens) & (tile < rows // 32)
                store_quantised(value.to(tl.float32), chunk, there, m, new_words, new_scale, new_sums, rows // 32,
                                m.shape[0])  # fmt: skip
        if PIECES > 1:
            tl.store(counter, 0)
    if QUANTISE and ROWS == 16:
        second_of_chunk = arrive(counters + tile // 2) == 1
        if second_of_chunk:  # quantises the 32 results of both programs
            chunk = tile // 2 + tl.arange(0, 1)
            for m in tl.static_range(TOKENS):
                column = chunk[:, None] * 32 + tl.arange(0, 32)[None, :]
                value = tl.load(out + m * out_stride + column, mask=(column < rows) & (m < tokens), other=0.0,
                                cache_modifier=".cg")  # fmt: skip
                store_quantised(value.to(tl.float32), chunk, chunk < rows // 32, m, new_words, new_scale, new_sums,
                                rows // 32, 1)  # fmt: skip
            tl.store(counters + tile // 2, 0)


@triton.jit
def tokens_of(block: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """Tokens of the rows of a tile of `multiply_chunks`; beyond TOKENS where they are there only to fill it."""
    if ROWS == 16:
        return block + tl.arange(0, 1)
    elif TOKENS == 1:
        return tl.arange(0, 4) * 2
    else:
        return 8 * block + tl.arange(0, 8)


@triton.jit
def _finish(
    value, m, row, mask, out, out_stride, bias, second_bias, third_bias, end, next_end, PARTS: tl.constexpr,
    BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """out[m, row] (+)= value + bias; the result as rounded."""
    if BIAS:
        group = row // 16
        addend = _part(bias, second_bias, third_bias, group, end, next_end, PARTS)
        local = group - _part(0, end, next_end, group, end, next_end, PARTS)
        there = tl.max(mask.to(tl.int32), axis=0) > 0
        value += tl.load(addend + local * 16 + row % 16, mask=there, other=0.0)[None, :]
    target = out + m[:, None].to(tl.int64) * out_stride + row[None, :]
    if ACCUMULATE:
        value += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    rounded = value.to(out.dtype.element_ty)
    tl.store(target, rounded, mask=mask)
    return rounded
