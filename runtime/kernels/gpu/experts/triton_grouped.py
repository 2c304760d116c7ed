"""Experts of many tokens: pairs (token, chosen expert) sorted by expert, and products of tiles of them.

A pair is the number token * k + place among the token's k. A tile is up to BM pairs of one expert; there is a slot for
every tile that there could be, pairs // BM + experts, so no launch size depends on the routes. Expert e's tiles begin
at slot s // BM + e, with s pairs of experts before it: never where another one's are.
"""

import triton
import triton.language as tl

from pshard.runtime.kernels.gpu.experts.triton_tiles import load_tile
from pshard.runtime.kernels.gpu.products.triton_gates import activate


@triton.jit(do_not_specialize=["pairs", "slots"], do_not_specialize_on_alignment=["order", "tiles"])
def sort_kernel(
    ids, pairs, addresses, order, tiles, slots, BM: tl.constexpr, LINES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Program (expert): its pairs in rising order into order[pairs], its tiles into tiles[3, slots].

    Of a tile: the expert, the first place in `order`, and the end of the expert's. The expert is -1 where there is no
    tile, or no expert on this side. Pairs without an expert (-1) come first, and are in no tile. Pairs are read as
    LINES of EACH: what is added up over all threads is one number a line.
    """
    expert = tl.program_id(0)
    at = tl.arange(0, LINES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    before = tl.zeros((LINES, EACH), tl.int32)
    own = tl.zeros((LINES, EACH), tl.int32)
    for start in range(0, pairs, LINES * EACH):
        one = tl.load(ids + start + at, mask=start + at < pairs, other=0x7FFFFFFF)
        before += (one < expert).to(tl.int32)
        own += (one == expert).to(tl.int32)
    first = tl.sum(tl.sum(before, axis=1), axis=0)
    end = first + tl.sum(tl.sum(own, axis=1), axis=0)
    here = tl.load(addresses + expert) != 0
    begin = first // BM + expert
    for slot in range(0, tl.where(expert == 0, begin, 0)):
        tl.store(tiles + slot, -1)
    for slot in range(begin, end // BM + expert + 1):
        place = first + (slot - begin) * BM
        tl.store(tiles + slot, tl.where(here & (place < end), expert, -1))
        tl.store(tiles + slots + slot, place)
        tl.store(tiles + 2 * slots + slot, end)
    for start in range(0, pairs, LINES * EACH):
        hit = (tl.load(ids + start + at, mask=start + at < pairs, other=0x7FFFFFFF) == expert).to(tl.int32)
        line = tl.sum(hit, axis=1)
        lines = tl.cumsum(line, axis=0)
        place = first + (lines - line)[:, None] + tl.cumsum(hit, axis=1) - 1
        tl.store(order + place, start + at, mask=hit != 0)
        first += tl.sum(line, axis=0)


@triton.jit(do_not_specialize=["slots", "used"], do_not_specialize_on_alignment=["order", "tiles"])
def products_kernel(
    x, x_stride, addresses, second_addresses, order, tiles, slots, used, bias, second_bias, out, out_stride, rows, cols,
    places, second_places,
    QTYPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SECOND_QTYPE: tl.constexpr, SECOND_LOW: tl.constexpr,
    SECOND_HIGH: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, MASKED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (BN rows, slot): the products of a tile of pairs with its expert's rows.

    GATED: out[place in `order`] = act(gate . x[token] + bias, up . x[token] + bias), of two matrices. Otherwise
    out[pair] = down . x[place in `order`] + bias.
    """
    slot = tl.program_id(1)
    expert = tl.load(tiles + slot)
    if expert < 0:
        return
    place = tl.load(tiles + slots + slot) + tl.arange(0, BM)
    there = place < tl.load(tiles + 2 * slots + slot)
    pair = tl.load(order + place, mask=there, other=0)
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    address = tl.load(addresses + expert)
    source = x + ((pair // used) if GATED else place).to(tl.int64)[:, None] * x_stride
    first = tl.zeros((BM, BN), tl.float32)
    second = tl.zeros((BM, BN), tl.float32)
    if GATED:
        second_address = tl.load(second_addresses + expert)
    for start in tl.range(0, cols, BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)
        mask = there[:, None]
        if MASKED:
            mask &= (k < cols)[None, :]
        xs = tl.load(source + k[None, :], mask=mask, other=0.0)
        w = load_tile(address, row, rows, start, cols, places, QTYPE, LOW, HIGH, BK, MASKED)
        first = tl.dot(xs, tl.trans(w), first)
        if GATED:
            v = load_tile(second_address, row, rows, start, cols, second_places, SECOND_QTYPE, SECOND_LOW, SECOND_HIGH,
                          BK, MASKED)  # fmt: skip
            second = tl.dot(xs, tl.trans(v), second)
    if bias is not None:
        first += tl.load(bias + expert * rows + row, mask=row < rows, other=0.0)[None, :]
    if GATED:
        if bias is not None:
            second += tl.load(second_bias + expert * rows + row, mask=row < rows, other=0.0)[None, :]
        first = activate(first, second, ACTIVATION)
        target = place
    else:
        target = pair
    at = out + target.to(tl.int64)[:, None] * out_stride + row[None, :]
    tl.store(at, first.to(out.dtype.element_ty), mask=there[:, None] & (row < rows)[None, :])


@triton.jit
def sum_pairs(
    picked, row, known, column, there, cols, ids, ids_stride, weights, weights_stride, addresses, USED: tl.constexpr
):
    """Rows `row` [ROWS] of the sums by weight of each token's pairs' rows of `picked`, in their order; float32
    [ROWS, columns]. Of rows that are not `known` nothing is read, nor where not `there` [ROWS, columns]."""
    total = tl.zeros(there.shape, tl.float32)
    for i in tl.static_range(USED):  # whose loads do not wait for each other
        expert = tl.load(ids + row * ids_stride + i, mask=known, other=-1)
        here = tl.load(addresses + expert, mask=expert >= 0, other=0) != 0
        weight = tl.load(weights + row * weights_stride + i, mask=here, other=0.0)
        at = picked + ((row * USED + i) * cols)[:, None] + column
        total += weight[:, None] * tl.load(at, mask=there & here[:, None], other=0.0).to(tl.float32)
    return total


@triton.jit
def sum_kernel(
    picked, ids, ids_stride, weights, weights_stride, addresses, out, out_stride, cols, USED: tl.constexpr,
    ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK columns, token): out (+)= the sum by weight of its pairs' rows of `picked`, in their order."""
    row = tl.program_id(1).to(tl.int64) + tl.arange(0, 1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = column < cols
    total = sum_pairs(picked, row, row >= 0, column, there, cols, ids, ids_stride, weights, weights_stride, addresses,
                      USED)  # fmt: skip
    at = out + (row * out_stride)[:, None] + column
    if ACCUMULATE:
        total += tl.load(at, mask=there, other=0.0)
    tl.store(at, total, mask=there)
