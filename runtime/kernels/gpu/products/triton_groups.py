"""Types with a codebook, and NVFP4, in the registers where the tensor cores want them; for `triton_columns`.

Thread (g, q) holds four rows as in triton_fragments. With a codebook it has the neighbouring words 2q and 2q + 1 of
every chunk: an entry of eight columns is then gathered once, and a row's signs are completed for one eight. Of NVFP4 it
has the words q and 4 + q, as they share their bytes. A word's bytes may come in another order than its columns, and
activations are put into that order (`order_operand`), as they are loaded far less often.

`record` int32*: the thread's record; `four` its first row in it; `n` the chunk. All are one number per thread.
"""

import triton
import triton.language as tl

from pshard.runtime.kernels.gpu.products.triton_books import (
    H1,
    H2,
    H3S,
    H3XXS,
    L1,
    L2,
    L3S,
    L3XXS,
)
from pshard.runtime.kernels.gpu.products.triton_mma import (
    and_xor,
    byte_of,
    count_bits,
    gather,
    load1,
    load4,
    multiply_add,
    permute,
)

_SIGNS: tl.constexpr = tl.constexpr(0xBA98)  # of `permute`: all bits of a byte as its highest
_EVEN: tl.constexpr = tl.constexpr(0xFEFEFEFE - (1 << 32))
_BIASED: tl.constexpr = tl.constexpr(0x80808080 - (1 << 32))  # 128 more for each of four bytes
_TOP: tl.constexpr = tl.constexpr(-(1 << 31))
# of E2M1 codes 0 to 7: four times the value, and 128 less twice the value
_FP4_LOW: tl.constexpr = tl.constexpr(0x06040200)
_FP4_HIGH: tl.constexpr = tl.constexpr(0x18100C08)
_FP4_LESS_LOW: tl.constexpr = tl.constexpr(0x7D7E7F80)
_FP4_LESS_HIGH: tl.constexpr = tl.constexpr(0x74787A7C)


@triton.constexpr_function  # of a jit function Triton 3.6 takes the answer for a tensor
def is_biased(QTYPE: str) -> bool:
    """Whether `decode_rows` gives unsigned bytes, 128 more than the values."""
    return QTYPE == "IQ3_XXS" or QTYPE == "NVFP4"


@triton.constexpr_function  # of a jit function Triton 3.6 takes the answer for a tensor
def has_parity(QTYPE: str) -> bool:
    """Whether every eighth sign makes the number of minus signs even; its bit holds something else."""
    return QTYPE == "IQ3_XXS" or QTYPE == "IQ2_XXS" or QTYPE == "IQ2_XS"


@triton.jit
def load_raw(record, n, q, four, high, mins, QTYPE: tl.constexpr):
    """What `decode_rows` needs of chunk n as it lies in memory."""
    if QTYPE == "NVFP4":
        return load4(record + n * 64 + q * 16 + four, False)
    elif QTYPE == "IQ1_S" or QTYPE == "IQ1_M":
        at = record + mins // 4 + n * 8 + four // 2
        return (load1(record + n * 16 + q * 4 + four // 4), load1(at), load1(at + 1))
    else:
        raw = load4(record + high // 4 + n * 16 + four, False)
        if QTYPE == "IQ3_S" or QTYPE == "IQ3_XXS":
            at = record + n * 32 + q * 8 + four // 4
            raw = raw + (load1(at), load1(at + 4))  # noqa: RUF005
        else:
            raw = raw + (load1(record + n * 16 + q * 4 + four // 4),)  # noqa: RUF005
        if QTYPE == "IQ3_S" or QTYPE == "IQ2_S":
            raw = raw + (load1(record + (mins + four) // 4 + n * 4),)  # noqa: RUF005
        return raw


@triton.jit
def decode_rows(raw, q, tables, book, QTYPE: tl.constexpr):
    """Of each of the four rows both words: four int8 each, or uint8 of types that `is_biased`."""
    if QTYPE == "NVFP4":
        return _fp4_words(raw[0], tables), _fp4_words(raw[1], tables), _fp4_words(raw[2], tables), \
            _fp4_words(raw[3], tables)  # fmt: skip
    elif QTYPE == "IQ1_S" or QTYPE == "IQ1_M":
        return _decode_plain(raw, q, tables, book, QTYPE)
    elif QTYPE == "IQ3_S" or QTYPE == "IQ3_XXS":
        return _decode_fours(raw, q, tables, book, QTYPE)
    else:
        return _decode_eights(raw, q, tables, book, QTYPE)


@triton.jit
def lookup_tables(nothing, QTYPE: tl.constexpr):
    """Two words of each thread: the lower halves of tables for `permute`.

    nothing: zero, of which the compiler does not know it. It would else move a constant into a register for every use.
    """
    if QTYPE == "NVFP4":
        return nothing + _FP4_LOW, nothing + _FP4_LESS_LOW
    elif QTYPE == "IQ1_S" or QTYPE == "IQ1_M":
        return nothing + L1, nothing
    elif QTYPE == "IQ3_S":
        return nothing + L3S, nothing
    elif QTYPE == "IQ3_XXS":
        return nothing + (L3XXS ^ _BIASED), nothing
    else:
        return nothing + L2, nothing


@triton.jit
def _index(low, more, row: tl.constexpr):
    """The byte `row` of `low`, and above it that of `more`, whose bytes are below 128."""
    return permute(low, more, 0xCC40 + 0x11 * row)


@triton.jit
def _shifted(word, places):
    """The word moved right by `places`, zeros behind it."""
    return (word.to(tl.uint32, bitcast=True) >> places.to(tl.uint32)).to(tl.int32, bitcast=True)


@triton.jit
def _later(entry):
    """An entry of eight columns so moved that its second four are read, of which 15 bits are there."""
    return (entry.to(tl.uint32, bitcast=True) >> 17).to(tl.int32, bitcast=True)


@triton.jit
def _eight_of(word, q):
    """Of a word of signs those of the thread's eight columns, in their places."""
    return word & (0x03030303 << (2 * q))


@triton.jit
def _decode_fours(raw, q, tables, book, QTYPE: tl.constexpr):
    """Books of four columns: levels first, then signs, which a byte of all ones stands for."""
    more, later = raw[0] * 0, raw[0] * 0
    if QTYPE == "IQ3_S":
        more, later = _shifted(raw[6], 2 * q) & 0x01010101, _shifted(raw[6], 2 * q + 1) & 0x01010101
    place = 1 << (6 - 2 * q)
    rows: tl.tuple = ()
    for row in tl.static_range(4):
        second = multiply_add(raw[row], place, 0)  # signs of the second word are now the highest bits of bytes
        if QTYPE == "IQ3_XXS":  # a sum's bit 31 is changed where the number is odd
            second = multiply_add(count_bits(_eight_of(raw[row], q)), _TOP, second)
            low, up = byte_of(raw[4], row), byte_of(raw[5], row)
        else:
            low, up = _index(raw[4], more, row), _index(raw[5], later, row)
        minus, next_minus = permute(second + second, 0, _SIGNS), permute(second, 0, _SIGNS)
        low, up = gather(book, low), gather(book, up)
        if QTYPE == "IQ3_S":  # odd numbers: all bits but the lowest change
            pair = (
                and_xor(minus, _EVEN, permute(tables[0], H3S, low)),
                and_xor(next_minus, _EVEN, permute(tables[0], H3S, up)),
            )
        else:
            pair = (_less_twice(permute(tables[0], H3XXS ^ _BIASED, low), minus),
                    _less_twice(permute(tables[0], H3XXS ^ _BIASED, up), next_minus))  # fmt: skip
        rows = rows + (pair,)  # noqa: RUF005
    return rows


@triton.jit
def _less_twice(biased, minus):
    """128 plus a level, or less it: four bytes, none of which leaves 0 to 255."""
    return multiply_add(biased & minus & 0x7F7F7F7F, -2, biased)


@triton.jit
def _decode_eights(raw, q, tables, book, QTYPE: tl.constexpr):
    """Books of eight columns with three levels: beside its sign a level is the number of one of six bytes."""
    if QTYPE == "IQ2_S":
        more = _shifted(raw[5], 2 * q) & 0x03030303
    elif QTYPE == "IQ2_XS":
        tops = permute(permute(raw[0], raw[1], 0x0073), permute(raw[2], raw[3], 0x0073), 0x5410)
        more = _shifted(tops, 2 * q + 1) & 0x01010101
    rows: tl.tuple = ()
    for row in tl.static_range(4):
        if QTYPE == "IQ2_XXS":
            index = byte_of(raw[4], row)
        else:
            index = _index(raw[4], more, row)
        entry = gather(book, index)
        signs = _eight_of(raw[row], q)
        # into the upper half, a nibble for each of columns 0, 2, 1, 3: bit 2 is its sign, bit 3 that of 4, 6, 5, 7
        moved = signs * (0x1001 << (6 - 2 * q))
        if has_parity(QTYPE):
            moved = multiply_add(count_bits(signs), _TOP, moved)
        first = ((moved >> 16) & 0x4444) | entry
        second = _later((moved & (0x88880000 - (1 << 32))) | entry)
        rows = rows + ((permute(tables[0], H2, first), permute(tables[0], H2, second)),)  # noqa: RUF005
    return rows


@triton.jit
def _decode_plain(raw, q, tables, book, QTYPE: tl.constexpr):
    """IQ1, whose delta takes the place of a sign."""
    BITS: tl.constexpr = 3 if QTYPE == "IQ1_S" else 4
    rows: tl.tuple = ()
    for row in tl.static_range(4):
        more = raw[1 + row // 2]
        index = permute(raw[0], _shifted(more, BITS * q) & 0x00070007, 0x5540 + 0x20 * (row % 2) + row)
        if QTYPE == "IQ1_M":
            more = more << (12 - 4 * q)
        minus = permute(more, 0, 0x9999 + 0x2222 * (row % 2))
        entry = gather(book, index) | (minus & (0x88884444 - (1 << 32)))
        rows = rows + ((permute(tables[0], H1, entry), permute(tables[0], H1, _later(entry))),)  # noqa: RUF005
    return rows


@triton.jit
def _fp4_words(word, tables):
    """128 plus twice the value: of the nibbles 0 to 3, and 4 to 7, of the word.

    A nibble of 8 or more, which `permute` takes for a byte's sign, gives 0 beside 128 less the value.
    """
    size = word & 0x77777777
    first = permute(tables[0], _FP4_HIGH, word) + permute(tables[1], _FP4_LESS_HIGH, size)
    next_, next_size = word >> 16, size >> 16
    return first, permute(tables[0], _FP4_HIGH, next_) + permute(tables[1], _FP4_LESS_HIGH, next_size)


@triton.jit
def load_operand(row, c, q, QTYPE: tl.constexpr):
    """What meets the two words of `decode_rows`: activations of chunk c. row: of them, see `store_quantised`."""
    at = row + (c // 2 * 16 + c % 2 * 2)
    if QTYPE == "NVFP4":
        low, up = load1(at + q * 4), load1(at + q * 4 + 1)
        return permute(low, up, 0x5140), permute(low, up, 0x7362)
    else:
        at += q % 2 * 8 + q // 2
        low, up = load1(at), load1(at + 4)
        if QTYPE == "IQ3_S" or QTYPE == "IQ3_XXS":
            return low, up
        else:
            return permute(low, 0, 0x3120), permute(up, 0, 0x3120)


@triton.jit
def keep_half(word, half, q, QTYPE: tl.constexpr):
    """A word of `load_operand` with zeros in the other half of the chunk."""
    if QTYPE == "NVFP4":
        return word & tl.where(half == 0, 0x00FF00FF, 0xFF00FF00 - (1 << 32))
    else:
        return tl.where(q // 2 == half, word, 0)


@triton.jit
def load_scales(record, n, four, high, scales, mins, QTYPE: tl.constexpr):
    """Scales of the four rows in chunk n, of the first and of the second 16 columns, or twice the same.

    int32, of NVFP4 float32 in 128ths of half a scale.
    """
    if QTYPE == "NVFP4":
        at = record + (scales + four) // 4 + n * 8
        return _e4m3_scales(tl.load(at)), _e4m3_scales(load1(at + 4))  # the first holds the layout: see `load1`
    else:
        first, second = _odd_words(record, n, four, high, scales, mins, QTYPE)
        return (byte_of(first, 0), byte_of(first, 1), byte_of(first, 2), byte_of(first, 3)), \
            (byte_of(second, 0), byte_of(second, 1), byte_of(second, 2), byte_of(second, 3))  # fmt: skip


@triton.jit
def _odd_words(record, n, four, high, scales, mins, QTYPE: tl.constexpr):
    """2n + 1 of the four rows, a byte each."""
    at = record + (scales + four) // 4
    if QTYPE == "IQ3_S":
        first = (load1(at + n // 2 * 4) >> (n % 2 * 4).to(tl.int32)) & 0x0F0F0F0F
        second = first
    elif QTYPE == "IQ2_S" or QTYPE == "IQ2_XS":
        both = load1(at + n * 4)
        first, second = both & 0x0F0F0F0F, (both >> 4) & 0x0F0F0F0F
    elif QTYPE == "IQ1_M":
        c = (n % 8).to(tl.int32)
        at += n // 8 * 24
        low = load1(at + c // 2 * 4) >> (c % 2 * 4)
        up = (load1(at + (4 + c // 4) * 4) >> (c % 4 * 2)) << 4
        first, second = low & 0x07070707, ((low & 0x08080808) | (up & 0x30303030)) >> 3
    elif QTYPE == "IQ1_S":
        more = record + mins // 4 + n * 8 + four // 2
        first = (permute(load1(more), load1(more + 1), 0x7531) >> 4) & 0x07070707
        second = first
    else:  # in the places of the eighth signs: every other bit of the highest bytes
        w = load4(record + high // 4 + n * 16 + four, True)
        tops = permute(permute(w[0], w[1], 0x0073), permute(w[2], w[3], 0x0073), 0x5410)
        first = (tops >> 1) & 0x55555555
        first = (first | (first >> 1)) & 0x33333333
        first = (first | (first >> 2)) & 0x0F0F0F0F
        second = first
    return 2 * first + 0x01010101, 2 * second + 0x01010101


@triton.jit
def _e4m3_scales(word):
    """Of four bytes: see `triton_books.e4m3_half`."""
    size = word & 0x7F7F7F7F
    nothing = permute((size + 0x01010101) & (word ^ -1), 0, _SIGNS)  # 0x7F is zero
    size = size & (nothing ^ -1)
    even, odd = (size & 0x007F007F) << 7, (size & 0x7F007F00) >> 1
    return (even.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),
            odd.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),
            (even >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),
            (odd >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))  # fmt: skip
