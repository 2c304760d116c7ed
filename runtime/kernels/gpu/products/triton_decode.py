"""Reading packed weights inside a Triton kernel (docs/packed-layout.md): words of four int8 codes, float32 scales.

A tile is [chunks, rows]: a chunk is 32 columns, rows are consecutive. `rec` is the record's distance from the start of
the matrix in 32-bit words, `lane` the row in its record; both are [1, rows]. Plane offsets are in bytes, see `places`.
"""

from dataclasses import dataclass
from functools import lru_cache

import triton
import triton.language as tl

from pshard.quant import plane_offsets, record_nbytes
from pshard.runtime.kernels.gpu.products.triton_books import load_book_codes, load_later_scales


@dataclass(frozen=True)
class Encoding:
    """How codes of a type are built: `low` bits in codes8/4/2/1, `high` bits above them in codes1 or codes2.

    With a codebook `high` is SIGNED_BOOK or PLAIN_BOOK, and `low` the bits of its indices by weight.
    """

    low: int
    high: int
    high_plane: str = ""
    halves: bool = False  # two scales per chunk, one for each 16 columns


SIGNED_BOOK, PLAIN_BOOK = 3, 4  # whose signs are in a plane of their own, or which has them

ENCODINGS = {
    "Q4_0": Encoding(4, 0),
    "Q4_1": Encoding(4, 0),
    "Q5_0": Encoding(4, 1, "codes1"),
    "Q5_1": Encoding(4, 1, "codes1"),
    "Q8_0": Encoding(8, 0),
    "MXFP4": Encoding(4, 0),
    "Q2_K": Encoding(2, 0, halves=True),
    "Q3_K": Encoding(2, 1, "codes1", halves=True),
    "Q4_K": Encoding(4, 0),
    "Q5_K": Encoding(4, 1, "codes1"),
    "Q6_K": Encoding(4, 2, "codes2", halves=True),
    "IQ4_NL": Encoding(4, 0),
    "IQ4_XS": Encoding(4, 0),
    "IQ3_S": Encoding(2, SIGNED_BOOK, "signs"),
    "IQ3_XXS": Encoding(2, SIGNED_BOOK, "signs"),
    "IQ2_S": Encoding(1, SIGNED_BOOK, "signs", halves=True),
    "IQ2_XS": Encoding(1, SIGNED_BOOK, "signs", halves=True),
    "IQ2_XXS": Encoding(1, SIGNED_BOOK, "signs"),
    "IQ1_S": Encoding(1, PLAIN_BOOK),
    "IQ1_M": Encoding(1, PLAIN_BOOK, halves=True),
    "NVFP4": Encoding(4, 0, halves=True),
    "Q1_0": Encoding(1, 0),
    "Q2_0": Encoding(2, 0),
    "TQ1_0": Encoding(1, 0),
    "TQ2_0": Encoding(2, 0),
}


@lru_cache
def plane_places(qtype: str, cols: int) -> tuple[int, int, int, int, int, int]:
    """(words of a record, offsets of the high codes, scales, mins or more, d or e8m0 or factor, dmin or m); 0 for a
    plane not there."""
    offsets = {name: at for name, (at, _) in plane_offsets(qtype, cols).items()}
    high = offsets.get(ENCODINGS[qtype].high_plane, 0)
    d = offsets.get("d", offsets.get("e8m0", offsets.get("factor", 0)))
    dmin = offsets.get("dmin", offsets.get("m", 0))
    return (
        record_nbytes(qtype, cols) // 4,
        high,
        offsets.get("scales", 0),
        offsets.get("mins", offsets.get("more", 0)),
        d,
        dmin,
    )


@triton.jit
def _bits(word, LEFT: tl.constexpr, MASK: tl.constexpr):
    """The bits of MASK after moving the word LEFT places (right if negative)."""
    if LEFT > 0:
        moved = word << LEFT
    elif LEFT < 0:
        moved = word >> -LEFT
    else:
        moved = word
    return moved & MASK


if triton.knobs.runtime.interpret:  # the interpreter has no inline assembly

    @triton.jit
    def _fp4_bytes(code):
        """Four E2M1 codes -> four int8 of twice their value: 0 1 2 3 4 6 8 12 and the negatives, byte by byte."""
        b0 = code & 0x01010101
        b1 = (code >> 1) & 0x01010101
        b2 = (code >> 2) & 0x01010101
        negative = (code >> 3) & (b0 | b1 | b2)  # -0 stays 0, so that no byte carries into the next
        low = b0 & b2
        high = b1 & b2
        value = (code & 0x07070707) + low + ((high + (high & low)) << 1)
        return (value ^ ((negative << 8) - negative)) + negative

    @triton.jit
    def fp4_values(word):
        """Doubled E2M1 values (int8) of the low nibbles, and of the high nibbles, of the word's four bytes."""
        return _fp4_bytes(word & 0x0F0F0F0F), _fp4_bytes((word >> 4) & 0x0F0F0F0F)

    @triton.jit
    def _iq4_bytes(code):
        """Four codes -> four int8 of what they stand for, byte by byte: thresholds that a code reaches add steps."""
        value = tl.zeros_like(code)
        for t in tl.static_range(4):
            own = (code >> (8 * t)) & 15
            byte = own * 0 - 127
            byte += tl.where(own >= 1, 23, 0) + tl.where(own >= 2, 21, 0) + tl.where(own >= 3, 18, 0)
            byte += tl.where(own >= 4, 16, 0) + tl.where(own >= 5, 14, 0) + tl.where(own >= 6, 13, 0)
            byte += tl.where(own >= 7, 12, 0) + tl.where(own >= 8, 11, 0) + tl.where(own >= 9, 12, 0)
            byte += tl.where(own >= 10, 12, 0) + tl.where(own >= 11, 13, 0) + tl.where(own >= 12, 15, 0)
            byte += tl.where(own >= 13, 16, 0) + tl.where(own >= 14, 20, 0) + tl.where(own >= 15, 24, 0)
            value |= (byte & 255) << (8 * t)
        return value

    @triton.jit
    def iq4_values(word):
        """Values (int8) of IQ4 codes: of the low nibbles, and of the high nibbles, of the word's four bytes."""
        return _iq4_bytes(word), _iq4_bytes(word >> 4)

else:

    def _write_lookup(low: tuple[int, int], high: tuple[int, int]) -> str:
        """PTX that looks up the eight nibbles of $2: those of the low ones of its bytes into $0, the others into $1.

        A byte permutation looks up four nibbles at a time, in a table of what codes 0 to 7 mean (`low`, four bytes
        each) and in one of codes 8 to 15; another makes masks of the highest bits, which choose.
        """
        return f"""{{
            .reg .b32 signs, select, mask, p, q, n, p03, p47, n03, n47;
            mov.b32 p03, {low[0]:#010x};
            mov.b32 p47, {low[1]:#010x};
            mov.b32 n03, {high[0]:#010x};
            mov.b32 n47, {high[1]:#010x};
            shl.b32 signs, $2, 4;
            and.b32 select, $2, 0x77777777;
            prmt.b32 p, p03, p47, select;
            prmt.b32 n, n03, n47, select;
            prmt.b32 mask, signs, $2, 0xD9C8;
            lop3.b32 p, p, n, mask, 0xD8;
            shr.u32 select, select, 16;
            prmt.b32 q, p03, p47, select;
            prmt.b32 n, n03, n47, select;
            prmt.b32 mask, signs, $2, 0xFBEA;
            lop3.b32 q, q, n, mask, 0xD8;
            prmt.b32 $0, p, q, 0x6420;
            prmt.b32 $1, p, q, 0x7531;
            }}"""

    FP4: tl.constexpr = tl.constexpr(_write_lookup((0x03020100, 0x0C080604), (0xFDFEFF00, 0xF4F8FAFC)))
    IQ4: tl.constexpr = tl.constexpr(_write_lookup((0xBFAD9881, 0xF6EADDCF), (0x26190D01, 0x71594535)))

    @triton.jit
    def _look_up(word, PTX: tl.constexpr):
        return tl.inline_asm_elementwise(PTX, "=&r,=&r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)

    @triton.jit
    def fp4_values(word):
        """Doubled E2M1 values (int8) of the low nibbles, and of the high nibbles, of the word's four bytes."""
        return _look_up(word, FP4)

    @triton.jit
    def iq4_values(word):
        """Values (int8) of IQ4 codes: of the low nibbles, and of the high nibbles, of the word's four bytes."""
        return _look_up(word, IQ4)


@triton.jit
def trits_of(bytes_, TURNS: tl.constexpr):
    """Digit number TURNS (0 to 2) of each of four bytes of five: see `layout._merge_trits`."""
    low = bytes_ & 0x00FF00FF  # two bytes a word, with room above each
    high = (bytes_ >> 8) & 0x00FF00FF
    for _ in tl.static_range(TURNS):
        low = (low * 3) & 0x00FF00FF
        high = (high * 3) & 0x00FF00FF
    return (((low * 3) >> 8) & 0x00030003) | ((high * 3) & 0x03000300)


@triton.jit
def later_trits(words, block, m, mask):
    """Digits of word m = 0..23 of those that a block of 8 chunks has behind the first five of each."""
    raw = tl.load(words + (block * 208 + (8 + m // 5) * 16), mask=mask, other=0)
    turns = m % 5
    found = trits_of(raw, 0)
    for i in tl.static_range(1, 5):
        found = tl.where(turns == i, trits_of(raw, i), found)
    return found


@triton.jit
def _load_trits(words, chunk, mask):
    """The codes of TQ1_0: see `load_codes`. words: of each row."""
    block = chunk // 8
    c = chunk % 8
    raw = tl.load(words + (block * 208 + c * 16), mask=mask, other=0)
    codes: tl.tuple = ()
    for i in tl.static_range(5):
        codes = codes + (trits_of(raw, i),)  # noqa: RUF005
    for i in tl.static_range(3):
        codes = codes + (later_trits(words, block, 3 * c + i, mask),)  # noqa: RUF005
    return codes


@triton.jit
def load_codes(
    weight, rec, lane, chunk, mask, high, mins, dmin, QTYPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr
):
    """Eight int32 tensors [chunks, rows]: byte t of number c is the code of column 4c + t of the chunk.

    Unsigned codes, except those of types `are_signed`. What the code means is in `load_scales`.
    """
    words = weight.to(tl.pointer_type(tl.int32), bitcast=True) + rec + lane
    if HIGH >= 3:
        return load_book_codes(words - lane, lane, chunk, mask, high, mins, dmin, QTYPE)
    if QTYPE == "TQ1_0":
        return _load_trits(words, chunk, mask)
    codes = ()
    if LOW == 1:
        bits = tl.load(words + chunk * 16, mask=mask, other=0)
        for c in tl.static_range(8):  # 0 or 2
            codes = codes + (_bits(bits, 1 - c, 0x02020202),)  # noqa: RUF005
    if LOW == 8:
        for c in tl.static_range(8):
            codes = codes + (tl.load(words + (chunk * 128 + c * 16), mask=mask, other=0),)  # noqa: RUF005
    if LOW == 4:
        raw = ()
        for c in tl.static_range(4):
            raw = raw + (tl.load(words + (chunk * 64 + c * 16), mask=mask, other=0),)  # noqa: RUF005
        if QTYPE == "MXFP4" or QTYPE == "NVFP4" or QTYPE == "IQ4_NL" or QTYPE == "IQ4_XS":
            later = ()
            for c in tl.static_range(4):
                if QTYPE == "MXFP4" or QTYPE == "NVFP4":
                    low, upper = fp4_values(raw[c])
                else:
                    low, upper = iq4_values(raw[c])
                codes = codes + (low,)  # noqa: RUF005
                later = later + (upper,)  # noqa: RUF005
            codes = codes + later
        else:
            for c in tl.static_range(8):
                codes = codes + (_bits(raw[c % 4], -4 * (c // 4), 0x0F0F0F0F),)  # noqa: RUF005
    if LOW == 2:
        raw = ()
        for v in tl.static_range(2):
            raw = raw + (tl.load(words + (chunk * 32 + v * 16), mask=mask, other=0),)  # noqa: RUF005
        for c in tl.static_range(8):
            codes = codes + (_bits(raw[c // 4], -2 * (c % 4), 0x03030303),)  # noqa: RUF005
    full = ()
    if HIGH == 1:
        extra = tl.load(words + (high // 4 + chunk * 16), mask=mask, other=0)
        for c in tl.static_range(8):
            full = full + (codes[c] | _bits(extra, LOW - c, 0x01010101 << LOW),)  # noqa: RUF005
    elif HIGH == 2:
        raw = ()
        for v in tl.static_range(2):
            raw = raw + (tl.load(words + (high // 4 + chunk * 32 + v * 16), mask=mask, other=0),)  # noqa: RUF005
        for c in tl.static_range(8):
            full = full + (codes[c] | _bits(raw[c // 4], LOW - 2 * (c % 4), 0x03030303 << LOW),)  # noqa: RUF005
    else:
        full = codes
    return full


@triton.jit
def _six_bits(low, high, HALF: tl.constexpr, j):
    """Scale j = 2 * (chunk in superblock) + HALF of Q3_K from its byte of nibbles and its byte of high pairs."""
    nibble = (low >> (4 * (j // 8))) & 15
    return (nibble | (((high >> (2 * (j // 4))) & 3) << 4)) - 32


@triton.jit
def load_scales(weight, rec, lane, chunk, mask, high, scales, mins, d, dmin, QTYPE: tl.constexpr, HIGH: tl.constexpr):
    """(s0, a0, s1, a1), float32 [chunks, rows]: weight = s * code + a, the first pair for columns 0..15 of the chunk.

    An offset of the code is folded into `a`: s * (code - 8) = s * code - 8 s, exact because 8 is a power of two.
    """
    halves = weight.to(tl.pointer_type(tl.float16), bitcast=True) + 2 * rec + lane
    raw = weight + 4 * rec + lane
    if HIGH >= 3 or QTYPE == "NVFP4" or QTYPE == "Q1_0" or QTYPE == "Q2_0" or QTYPE == "TQ1_0" or QTYPE == "TQ2_0":
        words = weight.to(tl.pointer_type(tl.int32), bitcast=True) + rec
        return load_later_scales(words, lane, chunk, mask, high, scales, mins, d, QTYPE)
    elif QTYPE == "MXFP4":
        e = tl.load(raw + (d + chunk * 16), mask=mask, other=0).to(tl.int32)
        bits = tl.where(e < 2, 0x00200000 << tl.minimum(e, 1), (e - 1) << 23)
        s = bits.to(tl.float32, bitcast=True)
        return s, s * 0.0, s, s * 0.0
    elif QTYPE == "Q4_1" or QTYPE == "Q5_1":
        s = tl.load(halves + (d // 2 + chunk * 16), mask=mask, other=0.0).to(tl.float32)
        a = tl.load(halves + (dmin // 2 + chunk * 16), mask=mask, other=0.0).to(tl.float32)
        return s, a, s, a
    elif QTYPE == "Q4_0" or QTYPE == "Q5_0" or QTYPE == "Q8_0" or QTYPE == "IQ4_NL":
        s = tl.load(halves + (d // 2 + chunk * 16), mask=mask, other=0.0).to(tl.float32)
        if QTYPE == "Q4_0":
            a = s * -8.0
        elif QTYPE == "Q5_0":
            a = s * -16.0
        else:
            a = s * 0.0
        return s, a, s, a
    else:
        block = chunk // 8
        whole = tl.load(halves + (d // 2 + block * 16), mask=mask, other=0.0).to(tl.float32)
        if QTYPE == "Q4_K" or QTYPE == "Q5_K":
            low = tl.load(halves + (dmin // 2 + block * 16), mask=mask, other=0.0).to(tl.float32)
            s = whole * tl.load(raw + (scales + chunk * 16), mask=mask, other=0).to(tl.float32)
            a = -low * tl.load(raw + (mins + chunk * 16), mask=mask, other=0).to(tl.float32)
            return s, a, s, a
        elif QTYPE == "IQ4_XS":
            s = whole * (tl.load(raw + (scales + chunk * 16), mask=mask, other=0).to(tl.float32) - 32.0)
            return s, s * 0.0, s, s * 0.0
        elif QTYPE == "Q6_K":
            first = tl.load(raw + (scales + chunk * 32), mask=mask, other=0).to(tl.int8, bitcast=True)
            second = tl.load(raw + (scales + chunk * 32 + 16), mask=mask, other=0).to(tl.int8, bitcast=True)
            s0 = whole * first.to(tl.float32)
            s1 = whole * second.to(tl.float32)
            return s0, s0 * -32.0, s1, s1 * -32.0
        elif QTYPE == "Q2_K":
            low = tl.load(halves + (dmin // 2 + block * 16), mask=mask, other=0.0).to(tl.float32)
            first = tl.load(raw + (scales + chunk * 32), mask=mask, other=0).to(tl.int32)
            second = tl.load(raw + (scales + chunk * 32 + 16), mask=mask, other=0).to(tl.int32)
            s0 = whole * (first & 15).to(tl.float32)
            s1 = whole * (second & 15).to(tl.float32)
            return s0, -low * (first >> 4).to(tl.float32), s1, -low * (second >> 4).to(tl.float32)
        else:
            tl.static_assert(QTYPE == "Q3_K")
            packed = raw + (scales + block * 192)
            j = 2 * (chunk % 8)
            first = tl.load(packed + (j % 8) * 16, mask=mask, other=0).to(tl.int32)
            second = tl.load(packed + (j % 8 + 1) * 16, mask=mask, other=0).to(tl.int32)
            high0 = tl.load(packed + (8 + j % 4) * 16, mask=mask, other=0).to(tl.int32)
            high1 = tl.load(packed + (9 + j % 4) * 16, mask=mask, other=0).to(tl.int32)
            s0 = whole * _six_bits(first, high0, 0, j).to(tl.float32)
            s1 = whole * _six_bits(second, high1, 1, j).to(tl.float32)
            return s0, s0 * -4.0, s1, s1 * -4.0
