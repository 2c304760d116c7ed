"""Packed weights (docs/packed-layout.md) in the registers where the tensor cores want them; see triton_mma.

A word of codes is four consecutive columns of one row, and so is a register of the left matrix: codes need no
exchange between threads. A warp computes 32 rows, two records. Thread (g, q) holds the four rows 4 (g % 4)..4 (g % 4)
+ 3 of record g // 4, so 16 bytes of a plane are a load, and of every chunk of 32 columns the words c = q and c = 4 + q.
The first two of the four rows are rows g and g + 8 of one product, the others those of a second.

`record` int32*: the thread's record; `four` its first row in it; `n` the chunk. All are one number per thread.
"""

import triton
import triton.language as tl

from pshard.runtime.kernels.triton_decode import fp4_values
from pshard.runtime.kernels.triton_mma import and_xor, byte_of, load4, turn

# of every byte the highest 1, 2 or 4 bits
_TOP1: tl.constexpr = tl.constexpr(0x80808080 - (1 << 32))
_TOP2: tl.constexpr = tl.constexpr(0xC0C0C0C0 - (1 << 32))
_TOP4: tl.constexpr = tl.constexpr(0xF0F0F0F0 - (1 << 32))


@triton.jit
def load_codes(record, n, q, four, high, mask, QTYPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
               MASKED: tl.constexpr):  # fmt: skip
    """What `decode` needs of chunk n as it lies in memory: 4, 8 or 12 words, of four rows each."""
    if LOW == 8:
        at = record + n * 128 + q * 16 + four
        words = load4(at, mask, MASKED, False) + load4(at + 64, mask, MASKED, False)
    elif LOW == 4:
        words = load4(record + n * 64 + q * 16 + four, mask, MASKED, False)
    else:
        at = record + n * 32 + four
        words = load4(at, mask, MASKED, False) + load4(at + 16, mask, MASKED, False)
    if HIGH == 1:
        words = words + load4(record + high // 4 + n * 16 + four, mask, MASKED, False)
    elif HIGH == 2:
        at = record + high // 4 + n * 32 + four
        words = words + load4(at, mask, MASKED, False) + load4(at + 16, mask, MASKED, False)
    return words


@triton.jit
def decode(words, row: tl.constexpr, q, QTYPE: tl.constexpr):
    """(columns 4q.., columns 16 + 4q..) of the row: words of four int8, `FACTORS[QTYPE]` times what they stand for.

    What a format subtracts from its codes becomes the sign: with the highest bit of the code at the top of the byte
    and inverted, the byte is a multiple of the code less half its range.
    """
    w = words[row]
    if QTYPE == "Q8_0":
        return w, words[4 + row]
    elif QTYPE == "MXFP4":
        return fp4_values(w)
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
    elif QTYPE == "Q6_K":
        return and_xor(turn(words[4 + row], 6 - 2 * q), _TOP2, and_xor(w << 2, 0x3C3C3C3C, _TOP1)), \
            and_xor(turn(words[8 + row], 6 - 2 * q), _TOP2, and_xor(w >> 2, 0x3C3C3C3C, _TOP1))  # fmt: skip
    elif QTYPE == "Q2_K":
        return turn(w, -2 * q) & 0x03030303, turn(words[4 + row], -2 * q) & 0x03030303
    else:
        tl.static_assert(QTYPE == "Q3_K")
        e, u = words[8 + row], words[4 + row]
        return and_xor(turn(e, 7 - q), _TOP1, and_xor(turn(w, 5 - 2 * q), 0x60606060, _TOP1)), \
            and_xor(turn(e, 3 - q), _TOP1, and_xor(turn(u, 5 - 2 * q), 0x60606060, _TOP1))  # fmt: skip


FACTORS = {"Q4_0": 16, "Q5_0": 8, "Q6_K": 4, "Q3_K": 32 * 4}  # Q3_K: scales come four times too large


@triton.jit
def load_halves(pointer, mask, MASKED: tl.constexpr):
    """Four consecutive float16 at a multiple of 8 bytes, as float32; zeros where not `mask`."""
    where = pointer.to(tl.pointer_type(tl.int64), bitcast=True)
    if MASKED:
        both = tl.load(where, mask=mask, other=0)
    else:
        both = tl.load(where)
    first, second = both.to(tl.int32), (both >> 32).to(tl.int32)
    return (
        first.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),
        (first >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),
        second.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),
        (second >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),
    )


@triton.jit
def load_word(pointer, mask, MASKED: tl.constexpr):
    """An int32, zero where not `mask`."""
    if MASKED:
        return tl.load(pointer, mask=mask, other=0)
    else:
        return tl.load(pointer)


@triton.jit
def load_exponents(pointer, mask, MASKED: tl.constexpr):
    """Four consecutive E8M0 bytes -> float32 halves of the powers they stand for; zeros where not `mask`."""
    word = load_word(pointer, mask, MASKED)
    powers = ()
    for k in tl.static_range(4):
        e = byte_of(word, k)
        bits = tl.where(e < 2, 0x00200000 << tl.minimum(e, 1), (e - 1) << 23)
        if MASKED:
            bits = tl.where(mask, bits, 0)
        powers = powers + (bits.to(tl.float32, bitcast=True),)  # noqa: RUF005
    return powers


@triton.jit
def scale_words_q3(record, scales, s, four, mask, MASKED: tl.constexpr):
    """Sixteen words of four int8: four times the scales less 32 of superblock s, one word for every 16 columns."""
    raw = ()
    for i in tl.static_range(12):
        raw = raw + (load_word(record + (scales + four) // 4 + s * 48 + i * 4, mask, MASKED),)  # noqa: RUF005
    words = ()
    for j in tl.static_range(16):
        low = (raw[j % 8] >> (4 * (j // 8) - 2)) if j >= 8 else (raw[j % 8] << 2)
        high = raw[8 + j % 4]
        top = (high << (6 - 2 * (j // 4))) if j < 12 else high
        words = words + (((low & 0x3C3C3C3C) | _TOP1) ^ (top & _TOP2),)  # noqa: RUF005
    return words
