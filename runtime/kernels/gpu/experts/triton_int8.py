"""Experts of many tokens in int8: tiles of pairs (see triton_grouped) times packed weights, as in triton_many.

A tile of BM pairs is BM / 32 groups of tokens, slot after slot, whose activations lie as `quantise_many_kernel` leaves
them. What gate and up give is left so too, for down: the 32 rows of a warp are a chunk of down's columns.
"""

import triton
import triton.language as tl

from pshard.runtime.kernels.gpu.products.triton_many import as_columns, four_of, store_group, sum_chunks


@triton.jit(do_not_specialize=["slots", "used"], do_not_specialize_on_alignment=["order", "tiles"])
def quantise_pairs_kernel(x, x_stride, order, tiles, slots, used, words, scale, sums, chunks, BM: tl.constexpr,
                          SPAN: tl.constexpr):  # fmt: skip
    """Each pair's row of x [tokens, 32 * chunks], beyond a tile's zeros; program (SPAN chunks, group of 32 pairs)."""
    group = tl.program_id(1)
    slot = group // (BM // 32)
    if tl.load(tiles + slot) >= 0:
        place = tl.load(tiles + slots + slot) + group % (BM // 32) * 32 + tl.arange(0, 32)
        there = place < tl.load(tiles + 2 * slots + slot)
        token = tl.load(order + place, mask=there, other=0) // used
        row = x + token.to(tl.int64)[:, None] * x_stride
        first = tl.program_id(0) * SPAN
        for n in range(first, tl.minimum(first + SPAN, chunks)):
            column = n * 32 + tl.arange(0, 32)[None, :]
            value = tl.load(row + column, mask=there[:, None], other=0.0).to(tl.float32)
            store_group(value, (group * chunks + n).to(tl.int64), words, scale, sums)


@triton.jit
def _of_eight(value, LARGEST: tl.constexpr, THREADS: tl.constexpr):
    """The largest, or the sum, of the numbers of the eight threads of a warp with one q, to each of them."""
    parts = tl.reshape(value, (THREADS // 32, 8, 4))
    found = tl.max(parts, axis=1) if LARGEST else tl.sum(parts, axis=1)
    return tl.reshape(tl.broadcast_to(found[:, None, :], (THREADS // 32, 8, 4)), (THREADS,))


@triton.jit
def _store_quantised(four, base, there, block: tl.constexpr, side: tl.constexpr, g, q, c, words, scale, sums,
                     THREADS: tl.constexpr):  # fmt: skip
    """Four rows of a token as a word of the chunk at `base`, which the eight threads of that q share; where `there`."""
    peak = tl.maximum(tl.maximum(tl.abs(four[0]), tl.abs(four[1])), tl.maximum(tl.abs(four[2]), tl.abs(four[3])))
    peak = _of_eight(peak, True, THREADS)
    inverse = tl.div_rn(127.0, tl.maximum(peak, 1e-30))
    word = tl.zeros((THREADS,), tl.int32)
    total = tl.zeros((THREADS,), tl.int32)
    for row in tl.static_range(4):
        code = ((four[row] * inverse + 12582912.0) - 12582912.0).to(tl.int32)  # to nearest even
        total += code
        word |= (code & 255) << (8 * row)
    total = _of_eight(total, False, THREADS)
    b = block % 4
    token = 2 * q + side
    tl.store(words + base * 256 + b // 2 * 128 + (token * 4 + c % 4) * 4 + b % 2 * 2 + c // 4, word, mask=there)
    s = peak / 127.0
    tl.store(scale + base * 32 + q * 8 + b * 2 + side, s, mask=there & (g == 0))
    tl.store(sums + base * 32 + token * 4 + b, total.to(tl.float32) * s, mask=there & (g == 0))


@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=["order", "tiles"])
def pairs_many_kernel(
    words, scale, sums, addresses, second_addresses, order, tiles, slots, bias, second_bias, out, out_stride, out_scale,
    out_sums, rows, chunks, places,
    WR: tl.constexpr, WT: tl.constexpr, GROUPS: tl.constexpr, UNIT: tl.constexpr, AHEAD: tl.constexpr,
    QTYPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, FACTOR: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Program (WR * 32 rows, slot): the products of a tile of WT * GROUPS * 32 pairs with its expert's rows.

    With an ACTIVATION of two matrices, quantised into out, out_scale and out_sums, in place of the tile's; rows are
    whole 32. Otherwise out[pair] = down . x[pair] + bias.
    """
    THREADS: tl.constexpr = 32 * WR * WT
    slot = tl.program_id(1)
    expert = tl.load(tiles + slot)
    if expert < 0:
        return
    record, high, scales, mins, d, dmin = places
    thread = tl.arange(0, THREADS)
    lane, warp = thread % 32, thread // 32
    g, q = lane // 4, lane % 4
    four = g % 4 * 4
    part = warp // WR * GROUPS
    group = (tl.program_id(0) * WR + warp % WR) * 2 + lane // 16
    exists = group * 16 < rows
    place = tl.where(exists, group, 0).to(tl.int64) * record
    first_group = slot * (WT * GROUPS) + part
    there = first_group.to(tl.int64) * chunks
    words += there * 256
    scale += there * 32
    sums += there * 32
    matrix = tl.load(addresses + expert).to(tl.pointer_type(tl.int32))
    other = None
    if ACTIVATION != "":
        other = tl.multiple_of(tl.load(second_addresses + expert).to(tl.pointer_type(tl.int32)), 16) + place
    totals = sum_chunks(tl.multiple_of(matrix, 16) + place, other, words, scale, sums, chunks, g, q, four, high, scales,
                        mins, d, dmin, THREADS, GROUPS, UNIT, AHEAD, QTYPE, LOW, HIGH)  # fmt: skip
    row = group * 16 + four
    more = _with_bias(totals, 0, bias, expert, row, rows, 1.0 / FACTOR, GROUPS)
    if ACTIVATION != "":
        more = more + _with_bias(totals, 32 * GROUPS, second_bias, expert, row, rows, 1.0 / FACTOR, GROUPS)
    totals = more
    begin = tl.load(tiles + slots + slot)
    end = tl.load(tiles + 2 * slots + slot)
    for block in tl.static_range(4 * GROUPS):
        for side in tl.static_range(2):
            found = four_of(totals, block, side, 1.0, 32 * GROUPS, ACTIVATION)
            if ACTIVATION != "":
                chunk = tl.program_id(0) * WR + warp % WR
                base = (first_group + block // 4).to(tl.int64) * (rows // 32) + chunk
                _store_quantised(found, base, exists, block, side, g, q, lane // 16 * 4 + g % 4, out, out_scale,
                                 out_sums, THREADS)  # fmt: skip
            else:
                at = begin + (part + block // 4) * 32 + block % 4 * 8 + 2 * q + side
                pair = tl.load(order + at, mask=at < end, other=0)
                column = row[:, None] + tl.arange(0, 4)[None, :]
                mask = (at < end)[:, None] & (column < rows)
                tl.store(out + pair.to(tl.int64)[:, None] * out_stride + column,
                         as_columns(found, THREADS).to(out.dtype.element_ty), mask=mask)  # fmt: skip


@triton.jit
def _with_bias(totals, FIRST: tl.constexpr, bias, expert, row, rows, factor, GROUPS: tl.constexpr):
    """The sums from number FIRST on times a factor, and the expert's bias of their rows added."""
    found: tl.tuple = ()
    if bias is not None:
        more: tl.tuple = ()
        for r in tl.static_range(4):
            more = more + (tl.load(bias + expert * rows + row + r, mask=row + r < rows, other=0.0),)  # noqa: RUF005
        for i in tl.static_range(32 * GROUPS):
            found = found + (totals[FIRST + i] * factor + more[i // 2 % 4],)  # noqa: RUF005
    else:
        for i in tl.static_range(32 * GROUPS):
            found = found + (totals[FIRST + i] * factor,)  # noqa: RUF005
    return found
