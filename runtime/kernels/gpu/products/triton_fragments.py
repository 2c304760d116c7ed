"""Packed weights (docs/packed-layout.md) in the registers where the tensor cores want them; see triton_mma.

A word of codes is four consecutive columns of one row, and so is a register of the left matrix: codes need no
exchange between threads. A warp computes 32 rows, two records. Thread (g, q) holds the four rows 4 (g % 4)..4 (g % 4)
+ 3 of record g // 4, so 16 bytes of a plane are a load, and of every chunk of 32 columns the words c = q and c = 4 + q.
The first two of the four rows are rows g and g + 8 of one product, the others those of a second. Q2_K and Q3_K
have their integer scales multiplied into the codes: there it is the words c = 2 q and 2 q + 1, which share one scale.

`record` int32*: the thread's record; `four` its first row in it; `n` the chunk. All are one number per thread.
"""

import triton
import triton.language as tl

from pshard.runtime.kernels.codebooks import BOOK_TYPES
from pshard.runtime.kernels.gpu.products.triton_decode import fp4_values, iq4_values, trits_of
from pshard.runtime.kernels.gpu.products.triton_mma import (
    and_xor,
    byte_of,
    load1,
    load4,
    load_long,
    signed_byte_of,
    turn,
)

# of every byte the highest 1, 2 or 4 bits
_TOP1: tl.constexpr = tl.constexpr(0x80808080 - (1 << 32))
_TOP2: tl.constexpr = tl.constexpr(0xC0C0C0C0 - (1 << 32))
_TOP4: tl.constexpr = tl.constexpr(0xF0F0F0F0 - (1 << 32))


@triton.jit
def load_codes(record, n, q, four, high, mins, QTYPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """What `decode` or `decode_scaled` needs of chunk n as it lies in memory: 4, 8 or 12 words, of four rows each."""
    if QTYPE == "TQ1_0":
        words = _load_trits(record, n, q, four)
    elif LOW == 1:
        words = load4(record + n * 16 + four, False)
    elif QTYPE == "Q2_0" or QTYPE == "TQ2_0":
        words = load4(record + n * 32 + four, False) + load4(record + n * 32 + 16 + four, False)
    elif LOW == 8:
        at = record + n * 128 + q * 16 + four
        words = load4(at, False) + load4(at + 64, False)
    elif LOW == 4:
        words = load4(record + n * 64 + q * 16 + four, False)
    else:
        words = load4(record + n * 32 + q // 2 * 16 + four, False)
    if HIGH == 1:
        words = words + load4(record + high // 4 + n * 16 + four, False)
    elif HIGH == 2:
        at = record + high // 4 + n * 32 + four
        words = words + load4(at, False) + load4(at + 16, False)
    return words


@triton.jit
def _load_trits(record, n, q, four):
    """Eight words: digits of the words q and 4 + q of chunk n, of four rows each."""
    block = n // 8
    m = 3 * (n % 8) + q - 1  # of word 4 + q, among those that are not the first five of their chunk
    first = load4(record + block * 208 + n % 8 * 16 + four, False)
    second = load4(record + block * 208 + tl.where(q == 0, n % 8, 8 + tl.maximum(m, 0) // 5) * 16 + four, False)
    turns = tl.where(q == 0, 4, tl.maximum(m, 0) % 5)
    words = ()
    for row in tl.static_range(4):
        words = words + (_digit(first[row], q),)  # noqa: RUF005
    for row in tl.static_range(4):
        words = words + (_digit(second[row], turns),)  # noqa: RUF005
    return words


@triton.jit
def _digit(word, turns):
    found = trits_of(word, 0)
    for i in tl.static_range(1, 5):
        found = tl.where(turns == i, trits_of(word, i), found)
    return found


@triton.jit
def _less_one(codes):
    """Four codes, 0 to 3, less 1: int8 each."""
    return ((codes | _TOP1) - 0x01010101) ^ _TOP1


@triton.jit
def decode(words, row: tl.constexpr, q, QTYPE: tl.constexpr):
    """(columns 4q.., columns 16 + 4q..) of the row: words of four int8, `FACTORS[QTYPE]` times what they stand for.

    What a format subtracts from its codes becomes the sign: with the highest bit of the code at the top of the byte
    and inverted, the byte is a multiple of the code less half its range.
    """
    w = words[row]
    if QTYPE == "Q1_0":  # 1 or -1
        return ((w >> q) & 0x01010101) * 254 ^ -1, ((w >> (4 + q)) & 0x01010101) * 254 ^ -1
    elif QTYPE == "Q2_0" or QTYPE == "TQ2_0":
        return _less_one((w >> (2 * q)) & 0x03030303), _less_one((words[4 + row] >> (2 * q)) & 0x03030303)
    elif QTYPE == "TQ1_0":
        return _less_one(w), _less_one(words[4 + row])
    elif QTYPE == "Q8_0":
        return w, words[4 + row]
    elif QTYPE == "MXFP4":
        return fp4_values(w)
    elif QTYPE == "IQ4_NL" or QTYPE == "IQ4_XS":
        return iq4_values(w)
    elif QTYPE == "Q4_0":
        return and_xor(w << 4, _TOP4, _TOP1), and_xor(w, _TOP4, _TOP1)
    elif QTYPE == "Q4_1" or QTYPE == "Q4_K":
        return w & 0x0F0F0F0F, (w >> 4) & 0x0F0F0F0F
    elif QTYPE == "Q5_1" or QTYPE == "Q5_K":
        e = words[4 + row]
        return and_xor(turn(e, 4 - q), 0x10101010, w & 0x0F0F0F0F), \
            and_xor(turn(e, -q), 0x10101010, (w >> 4) & 0x0F0F0F0F)  # fmt: skip
    elif QTYPE == "Q5_0":
        e = words[4 + row]
        return and_xor(turn(e, 7 - q), _TOP1, and_xor(w << 3, 0x78787878, _TOP1)), \
            and_xor(turn(e, 3 - q), _TOP1, and_xor(w >> 1, 0x78787878, _TOP1))  # fmt: skip
    else:
        tl.static_assert(QTYPE == "Q6_K")
        return and_xor(turn(words[4 + row], 6 - 2 * q), _TOP2, and_xor(w << 2, 0x3C3C3C3C, _TOP1)), \
            and_xor(turn(words[8 + row], 6 - 2 * q), _TOP2, and_xor(w >> 2, 0x3C3C3C3C, _TOP1))  # fmt: skip


EXCESS_Q3: tl.constexpr = tl.constexpr(124)


@triton.jit
def decode_scaled(words, row: tl.constexpr, q, scales, QTYPE: tl.constexpr):
    """(columns 8q.., columns 8q + 4..) of the row: words of four uint8, what a weight is before d; Q3_K: + EXCESS_Q3.

    `scales`: of the four rows, a byte each, of Q3_K signed. No result leaves its byte (0..3 * 15, and
    124 + (-32..31) * (-4..3)), so that one multiplication of words is four of bytes.
    """
    w = words[row]
    low, up = turn(w, -4 * (q % 2)), turn(w, -4 * (q % 2) - 2)
    if QTYPE == "Q2_K":
        scale = byte_of(scales, row)
        return (low & 0x03030303) * scale, (up & 0x03030303) * scale
    else:
        tl.static_assert(QTYPE == "Q3_K")
        e = words[4 + row]
        scale = signed_byte_of(scales, row)
        start = 0x7C7C7C7C - 0x04040404 * scale
        return and_xor(low, 0x03030303, turn(e, 2 - 2 * q) & 0x04040404) * scale + start, \
            and_xor(up, 0x03030303, turn(e, 1 - 2 * q) & 0x04040404) * scale + start  # fmt: skip


FACTORS = {"Q4_0": 16, "Q5_0": 8, "Q6_K": 4} | {qtype: kind.eighths for qtype, kind in BOOK_TYPES.items()}


@triton.jit
def load_halves(pointer, HOLD: tl.constexpr = True):
    """Four consecutive float16 at a multiple of 8 bytes, as float32. HOLD: by the load that `load1` tells of."""
    both = tl.load(pointer.to(tl.pointer_type(tl.int64), bitcast=True)) if HOLD else load_long(pointer)
    first, second = both.to(tl.int32), (both >> 32).to(tl.int32)
    return (
        first.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),
        (first >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),
        second.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),
        (second >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),
    )


@triton.jit
def load_floats(pointer):
    """Four consecutive float32 at a multiple of 16 bytes."""
    words = load4(pointer.to(tl.pointer_type(tl.int32), bitcast=True), True)
    return (words[0].to(tl.float32, bitcast=True), words[1].to(tl.float32, bitcast=True),
            words[2].to(tl.float32, bitcast=True), words[3].to(tl.float32, bitcast=True))  # fmt: skip


@triton.jit
def load_exponents(pointer, HOLD: tl.constexpr = True):
    """Four consecutive E8M0 bytes -> float32 halves of the powers they stand for. HOLD: see `load_halves`."""
    word = tl.load(pointer) if HOLD else load1(pointer)
    powers = ()
    for k in tl.static_range(4):
        e = byte_of(word, k)
        bits = tl.where(e < 2, 0x00200000 << tl.minimum(e, 1), (e - 1) << 23)
        powers = powers + (bits.to(tl.float32, bitcast=True),)  # noqa: RUF005
    return powers


@triton.jit
def scale_words_q3(record, scales, s, four, q):
    """Eight words of four int8: the scales less 32 in superblock s, one word for the thread's half of every chunk."""
    at = record + (scales + four) // 4 + s * 48 + q // 2 * 4
    raw = ()
    for i in tl.static_range(6):
        raw = raw + (load1(at + 8 * i),)  # noqa: RUF005
    words = ()
    for k in tl.static_range(8):
        low = raw[k % 4] >> (4 * (k // 4))
        high = raw[4 + k % 2]
        top = (high << (4 - 2 * (k // 2))) if k < 4 else (high >> (2 * (k // 2) - 4))
        six = (low & 0x0F0F0F0F) | (top & 0x30303030)
        words = words + ((six + 0x60606060) ^ _TOP1,)  # noqa: RUF005
    return words
