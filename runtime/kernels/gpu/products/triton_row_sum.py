"""Sums of few rows between GPUs in one hop, with the norm that follows: what a decode step exchanges.

`words` of the exchange memory (triton_exchange.py): int32 [3, RANKS, ROWS, MAX_COLS], zero where nothing has come. A
part travels as the inverted bits of its float32, so that a word is its own flag: it arrives whole, and none is zero
(the one NaN that would be is sent as another). Who reads a word that is not zero has the number; order is not needed.

Exchange e of a row uses third e % 3. While it waits it zeroes the third of e - 1, for e + 2: a peer comes there when it
has this rank's part of e + 1, which leaves after exchange e has ended. So no second meeting is needed.

A row is cut into slices, one program each, as what one SM can send over NVLink is the bound (about 20 GB/s). Programs
of a row tell each other their sums of squares in `squares`, int64 [2, ROWS, slices]: epoch << 32 | bits of a float32;
first of what the ranks have summed, where that is normalised, then of what it is added to.

A matrix whose product is a part may push it as its programs end (`push_part`): what is left to wait for when the sum's
launch begins is then on its way already.
"""

import triton
import triton.language as tl

from pshard.runtime.kernels.gpu.products.triton_quantise import store_quantised

ROWS = 32  # rows that `sum_rows_kernel` can take
MAX_COLS = 8192  # columns of such a row
SLICE = 512  # columns of a program
WARPS = 4  # of a program
EPOCHS = 3 << 28  # then counts begin anew, long before an int32 ends
_ROWS, _MAX_COLS = tl.constexpr(ROWS), tl.constexpr(MAX_COLS)
_EPOCHS = tl.constexpr(EPOCHS)


def words_nbytes(ranks: int) -> int:
    """Bytes of `words`."""
    return 4 * 3 * ranks * ROWS * MAX_COLS


@triton.jit
def words_of(address, source, third, row, WORDS: tl.constexpr, RANKS: tl.constexpr):
    """Where `source` leaves a row in the memory at `address`."""
    place = address + WORDS + ((third * RANKS + source) * _ROWS + row).to(tl.int64) * (4 * _MAX_COLS)
    return tl.multiple_of(place.to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def as_words(value, WIRE: tl.constexpr):
    """Numbers float32 as they travel."""
    word = ~value.to(WIRE).to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(word == 0, -2147483648, word)


@triton.jit
def push_part(
    value, m, column, mask, epoch, peers, WORDS: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr,
    WIRE: tl.constexpr,
):  # fmt: skip
    """Bring value float32 [M, N], rows m and columns `column` of this rank's part, to the peers for these rows' sum.

    epoch int32 [M]: the rows' first counters, see `sum_rows_kernel`.
    """
    word = as_words(value, WIRE)
    third = (epoch + 1) % _EPOCHS % 3
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            there = words_of(peers[peer], RANK, third, m, WORDS, RANKS)
            tl.store(there[:, None] + column[None, :], word, mask=mask)


@triton.jit
def read_parts(here, column, mask, own, RANKS: tl.constexpr, RANK: tl.constexpr):
    """(own and the other ranks' parts, added in rank order; 0 when all of them were there). here: of rank 0."""
    words: tl.tuple = ()
    for source in tl.static_range(RANKS):
        at = here + source * (_ROWS * _MAX_COLS) + column
        words += (tl.load(at, mask=mask & (source != RANK), other=-1, volatile=True),)
    added = tl.zeros_like(own)
    lacking = column < 0
    for source in tl.static_range(RANKS):
        if source == RANK:
            added += own
        else:
            lacking |= words[source] == 0
            added += (~words[source]).to(tl.float32, bitcast=True)
    return added, tl.max(lacking.to(tl.int32), axis=0)


@triton.jit
def sum_rows_kernel(
    part, hidden, within, times, weight, out, out_stride, cols, eps, words, scale, sums, peers, epochs, squares, failed,
    late, patience, WORDS: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr, WIRE: tl.constexpr,
    SLICE: tl.constexpr, PUSHED: tl.constexpr, ACCUMULATE: tl.constexpr, NORM: tl.constexpr, QUANTISE: tl.constexpr,
):  # fmt: skip
    """Program (m, slice of MAX_COLS): hidden[m] (+)= sum of the ranks' part[m]. Programs beyond `cols` count along.

    PUSHED: the peers have this rank's part already, see `push_part`. within: weights [cols] by which the sum is
    RMS-normalised before it is added; times: hidden[m] is multiplied by it then.

    part, hidden float32, contiguous. NORM: then out[m] = RMS norm of hidden[m] times weight; QUANTISE: quantised too
    (both as in `rms_norm_kernel`). peers: a tuple of the memories' addresses.
    """
    m, piece = tl.program_id(0), tl.program_id(1)
    SLICES: tl.constexpr = _MAX_COLS // SLICE
    column = piece * SLICE + tl.arange(0, SLICE)
    mask = column < cols
    at = m.to(tl.int64) * cols + column
    counter = epochs + m * SLICES + piece
    epoch = (tl.load(counter) + 1) % _EPOCHS
    hopeless = tl.load(failed) > 0
    own = tl.load(part + at, mask=mask, other=0.0).to(WIRE).to(tl.float32)
    if not PUSHED:
        word = as_words(own, WIRE)
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                tl.store(words_of(peers[peer], RANK, epoch % 3, m, WORDS, RANKS) + column, word, mask=mask)
    if ACCUMULATE:
        before = tl.load(hidden + at, mask=mask, other=0.0)
    if within is not None:
        inner = tl.load(within + column, mask=mask, other=0.0)
    if NORM:
        factor = tl.load(weight + column, mask=mask, other=0.0)
    for source in tl.static_range(RANKS):
        if source != RANK:
            tl.store(words_of(peers[RANK], source, (epoch + 2) % 3, m, WORDS, RANKS) + column, tl.zeros_like(column))
    tl.debug_barrier()  # all threads have read the counter
    tl.store(counter, epoch)
    if piece * SLICE < cols:
        here = words_of(peers[RANK], 0, epoch % 3, m, WORDS, RANKS)
        left = tl.where(hopeless, 0, patience)
        added, missing = read_parts(here, column, mask, own, RANKS, RANK)
        while (missing > 0) & (left > 0):
            added, missing = read_parts(here, column, mask, own, RANKS, RANK)
            left -= 1
        if missing > 0:
            tl.store(failed, 1)
            for source in tl.static_range(RANKS):
                if source != RANK:
                    got = tl.load(here + source * (_ROWS * _MAX_COLS) + column, mask=mask, other=-1, volatile=True)
                    if tl.max((got == 0).to(tl.int32), axis=0) > 0:
                        tl.store(late, source + 1)
        if within is not None:
            square = _sum_squares(added, squares + m * SLICES, piece, cols, epoch, patience, SLICES)
            added = added * tl.rsqrt(square / cols + eps) * inner
        if ACCUMULATE:
            added = before + added
        if times is not None:
            added *= tl.load(times)
        if NORM:
            square = _sum_squares(added, squares + (_ROWS + m) * SLICES, piece, cols, epoch, patience, SLICES)
            normed = added * tl.rsqrt(square / cols + eps) * factor
            rounded = normed.to(out.dtype.element_ty)
            tl.store(out + m.to(tl.int64) * out_stride + column, rounded, mask=mask)
            if QUANTISE:
                CHUNKS: tl.constexpr = SLICE // 32
                chunk = piece * CHUNKS + tl.arange(0, CHUNKS)
                tile = tl.reshape(rounded.to(tl.float32), (CHUNKS, 32))
                store_quantised(tile, chunk, chunk < cols // 32, m, words, scale, sums, cols // 32, CHUNKS)
        tl.store(hidden + at, added, mask=mask)


@triton.jit
def _sum_squares(added, places, piece, cols, epoch, patience, SLICES: tl.constexpr):
    """The sum of squares over a row, of which this program has `added` [slice]; its programs run at the same time, and
    all add in one order."""
    square = tl.sum(added * added, axis=0)
    if SLICES > 1:
        pieces = tl.cdiv(cols, added.shape[0])
        stamp = epoch.to(tl.int64)
        tl.store(places + piece, (square.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (stamp << 32))
        each = tl.arange(0, SLICES)
        got = tl.load(places + each, mask=each < pieces, other=0, volatile=True)
        while (tl.max(((each < pieces) & ((got >> 32) != stamp)).to(tl.int32), axis=0) > 0) & (patience > 0):
            got = tl.load(places + each, mask=each < pieces, other=0, volatile=True)
            patience -= 1
        square = tl.sum((got & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True), axis=0)
    return square
