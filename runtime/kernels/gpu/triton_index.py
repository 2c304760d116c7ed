"""An index by which tokens choose the cells that they attend to, in Triton."""

import triton
import triton.language as tl


@triton.jit
def store_index_kernel(
    q, q_stride, key, key_stride, q_norm, k_norm, eps, cos, sin, begin, position, blocks, index, heads, head, cells,
    TURNED: tl.constexpr, ADJACENT: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (head, row): see `IndexKernels.store_index`; that behind the last head stores the key. cells: of a block
    of the cache. TURNED: half of what is rotated. BLOCK >= head."""
    h, m = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    partner, mask = _partner(column, TURNED, ADJACENT), column < head
    place = tl.load(position + m)
    first = tl.load(begin + m)
    if h < heads:
        row = q + m.to(tl.int64) * q_stride + h * head
        value = tl.load(row + column, mask=mask, other=0.0).to(tl.float32)
        other = tl.load(row + partner, mask=mask, other=0.0).to(tl.float32)
        found = _rotate(value, other, column, partner, place, q_norm, eps, cos, sin, mask, head, TURNED, ADJACENT)
        tl.debug_barrier()  # all threads have their partners before one stores
        tl.store(row + column, found.to(q.dtype.element_ty), mask=mask)
    elif first >= 0:
        inside = place % EACH
        together = 1  # rows of the block here, its own the last
        for back in tl.static_range(1, EACH):
            at = tl.maximum(m - back, 0)
            alike = (m >= back) & (inside >= back) & (tl.load(begin + at) == first)
            together += (alike & (tl.load(position + at) == place - back)).to(tl.int32)
        before = tl.maximum(place - together, 0)
        cell = tl.load(blocks + first + before // cells).to(tl.int64) * cells + before % cells
        kept = index + cell * head
        value = tl.load(kept + column, mask=mask & (together <= inside), other=0.0)
        other = tl.load(kept + partner, mask=mask & (together <= inside), other=0.0)
        for step in tl.static_range(EACH):  # in the order of the tokens
            back = EACH - 1 - step
            row = key + tl.maximum(m - back, 0).to(tl.int64) * key_stride
            there = mask & (together > back)
            value += tl.load(row + column, mask=there, other=0.0).to(tl.float32)
            other += tl.load(row + partner, mask=there, other=0.0).to(tl.float32)
        if inside == EACH - 1:
            value, other = value / EACH, other / EACH
            start = place - inside
            value = _rotate(value, other, column, partner, start, k_norm, eps, cos, sin, mask, head, TURNED, ADJACENT)
        cell = tl.load(blocks + first + place // cells).to(tl.int64) * cells + place % cells
        tl.store(index + cell * head + column, value, mask=mask)


@triton.jit
def _partner(column, TURNED: tl.constexpr, ADJACENT: tl.constexpr):
    """The column that each is rotated with, or itself."""
    if ADJACENT:
        other = column ^ 1
    else:
        other = tl.where(column < TURNED, column + TURNED, column - TURNED)
    return tl.where(column < 2 * TURNED, other, column)


@triton.jit
def _rotate(
    value, other, column, partner, place, norm, eps, cos, sin, mask, head, TURNED: tl.constexpr, ADJACENT: tl.constexpr,
):  # fmt: skip
    """A head as RMS-normalised and rotated; other: what its columns are rotated with."""
    factor = tl.rsqrt(tl.sum(value * value, axis=0) / head + eps)
    value = value * factor * tl.load(norm + column, mask=mask, other=0.0)
    other = other * factor * tl.load(norm + partner, mask=mask, other=0.0)
    turned = column < 2 * TURNED
    if ADJACENT:
        pair, is_first = column // 2, column % 2 == 0
    else:
        pair, is_first = column % TURNED, column < TURNED
    at = place.to(tl.int64) * TURNED + pair
    c, s = tl.load(cos + at, mask=turned, other=1.0), tl.load(sin + at, mask=turned, other=0.0)
    return value * c + tl.where(is_first, -other, other) * s


@triton.jit
def score_cells_kernel(
    q, q_stride, index, begin, position, blocks, block_count, scores, scores_stride, heads, head, cells, first, count,
    EACH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Program (NUMBERS blocks of EACH tokens, row from `first` on): scores of those that are complete, see
    `IndexKernels.choose_cells`. HEADS >= heads, BLOCK >= head: 16 at least, for the tensor cores."""
    row = tl.program_id(1)
    m = first + row
    complete = (tl.load(position + m) + 1) // EACH
    start = tl.program_id(0) * NUMBERS
    if start < complete:
        h, column, number = tl.arange(0, HEADS), tl.arange(0, BLOCK), start + tl.arange(0, NUMBERS)
        there = number < tl.minimum(complete, count)
        cell = number * EACH + EACH - 1
        held = tl.maximum(tl.load(begin + m), 0) + cell // cells
        block = tl.load(blocks + tl.minimum(held, block_count - 1), mask=there, other=0).to(tl.int64)
        key = index + (block * cells + cell % cells)[:, None] * head + column[None, :]
        keys = tl.load(key, mask=there[:, None] & (column < head)[None, :], other=0.0)
        mine = q + m.to(tl.int64) * q_stride + h[:, None] * head + column[None, :]
        rows = tl.load(mine, mask=(h < heads)[:, None] & (column < head)[None, :], other=0.0).to(tl.float32)
        found = tl.dot(rows, tl.trans(keys), input_precision="tf32x3")
        total = tl.sum(tl.maximum(found, 0.0), axis=0)
        tl.store(scores + row.to(tl.int64) * scores_stride + number, total, mask=there)


@triton.jit
def choose_cells_kernel(
    scores, scores_stride, position, seen, seen_stride, first, count, most,
    EACH: tl.constexpr, WORD: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Program (row from `first` on): bits of its `most` best complete blocks, and of that which follows them. The least
    score that is chosen is found bit by bit: positive floats are in the order of their bits. WORD: bits of a word."""
    row = tl.program_id(0)
    m = first + row
    complete = tl.minimum((tl.load(position + m) + 1) // EACH, count)
    wanted = tl.minimum(most, complete)
    own = scores + row.to(tl.int64) * scores_stride
    least = 0
    if complete > most:
        for bit in range(31):
            tried = least | (1 << (30 - bit))
            least = tl.where(_count(own, tried, complete, NUMBERS) >= wanted, tried, least)
    equals = wanted - _count(own, least + 1, complete, NUMBERS)  # so many of those that have the least score, the first
    before = 0
    for start in range(0, count + 1, NUMBERS):
        number = start + tl.arange(0, NUMBERS)
        found = tl.load(own + number, mask=number < complete, other=-1.0).to(tl.int32, bitcast=True)
        alike = ((found == least) & (number < complete)).to(tl.int32)
        rank = before + tl.cumsum(alike, axis=0) - alike
        chosen = ((found > least) & (number < complete)) | ((alike > 0) & (rank < equals)) | (number == complete)
        before += tl.sum(alike, axis=0)
        bits = tl.reshape(chosen.to(tl.int32), (NUMBERS // WORD, WORD)) << tl.arange(0, WORD)[None, :]
        word = start // WORD + tl.arange(0, NUMBERS // WORD)
        tl.store(seen + m.to(tl.int64) * seen_stride + word, tl.sum(bits, axis=1), mask=word < count // WORD)


@triton.jit
def _count(own, least, complete, NUMBERS: tl.constexpr):
    """How many complete blocks have at least this score, as bits."""
    total = 0
    for start in range(0, complete, NUMBERS):
        number = start + tl.arange(0, NUMBERS)
        found = tl.load(own + number, mask=number < complete, other=-1.0).to(tl.int32, bitcast=True)
        total += tl.sum(((found >= least) & (number < complete)).to(tl.int32), axis=0)
    return total
