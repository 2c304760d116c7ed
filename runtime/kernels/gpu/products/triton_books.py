"""Types with a codebook inside a Triton kernel, and the scales of NVFP4 and of types of one or two bits.

A book on the device says of every column of an entry which of the type's levels it is, in a nibble of three bits; a
byte permutation makes four int8 of four nibbles. An entry of four columns is int16. One of eight is int32: the nibbles
of columns 0, 2, 1, 3 are in its lower half, those of 4, 6, 5, 7 in its upper half, one place higher, where signs find
them (`triton_groups`). A book goes where other types have the place of `dmin`.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from pshard.runtime.kernels.codebooks import BOOK_TYPES, list_levels, load_book
from pshard.runtime.kernels.gpu.products.triton_mma import permute

_EIGHT_PLACES = (0, 8, 4, 12, 17, 25, 21, 29)  # bits of an entry where the columns' nibbles begin


@lru_cache
def book_on(qtype: str, device: torch.device) -> torch.Tensor:
    """The type's book, int16 or int32 [entries], on a device."""
    width = BOOK_TYPES[qtype].width
    book = torch.from_numpy(load_book(qtype))
    nibbles = torch.searchsorted(torch.tensor(list_levels(qtype), dtype=torch.int8), book)
    places = torch.tensor((0, 4, 8, 12) if width == 4 else _EIGHT_PLACES)
    words = (nibbles << places).sum(1).to(torch.int32)
    return (words.to(torch.int16) if width == 4 else words).to(device)


def _level_words(qtype: str) -> tuple[int, int]:
    """int8 of nibbles 0..3 and of 4..7; of IQ1 those with a positive delta and those with a negative one, of IQ2 those
    with either sign."""
    levels = list(list_levels(qtype))
    if BOOK_TYPES[qtype].step > 1:
        levels = [level + 1 for level in levels] + [0] + [level - 1 for level in levels]
    elif BOOK_TYPES[qtype].width == 8:
        levels = [*levels, 0, *(-level for level in levels)]
    levels += [0] * (8 - len(levels))
    low, high = (
        int.from_bytes(bytes(v & 255 for v in part), "little", signed=True) for part in (levels[:4], levels[4:])
    )
    return low, high


_3S = [tl.constexpr(word) for word in _level_words("IQ3_S")]
_3XXS = [tl.constexpr(word) for word in _level_words("IQ3_XXS")]
_2 = [tl.constexpr(word) for word in _level_words("IQ2_S")]
_1 = [tl.constexpr(word) for word in _level_words("IQ1_S")]
L3S: tl.constexpr = _3S[0]
H3S: tl.constexpr = _3S[1]
L3XXS: tl.constexpr = _3XXS[0]
H3XXS: tl.constexpr = _3XXS[1]
L2: tl.constexpr = _2[0]
H2: tl.constexpr = _2[1]
L1: tl.constexpr = _1[0]
H1: tl.constexpr = _1[1]


@triton.jit
def levels_of(entry, QTYPE: tl.constexpr):
    """Four int8 of an entry of four columns."""
    if QTYPE == "IQ3_S":
        return permute(L3S, H3S, entry)
    else:
        return permute(L3XXS, H3XXS, entry)


@triton.jit
def levels_of_half(entry, SECOND: tl.constexpr, QTYPE: tl.constexpr):
    """Four int8 of an entry of eight columns: of the first or of the last four."""
    nibbles = (entry >> (17 * SECOND)) & 0x7777
    if QTYPE == "IQ1_S" or QTYPE == "IQ1_M":
        swapped = permute(L1, H1, nibbles)
    else:
        swapped = permute(L2, H2, nibbles)
    return permute(swapped, 0, 0x3120)


@triton.jit
def complete_signs(word, QTYPE: tl.constexpr):
    """Signs of a row's 32 columns: bit j of byte t is of column 4j + t. Where the type has a parity, with the eighth
    sign of each eight, in bits 1, 3, 5, 7 of byte 3."""
    if QTYPE == "IQ3_XXS" or QTYPE == "IQ2_XXS" or QTYPE == "IQ2_XS":
        s = word & 0x55FFFFFF
        p = s ^ (s >> 16)
        p = p ^ (p >> 8)
        p = p ^ (p >> 1)
        return s | ((p & 0x55) << 25)
    else:
        return word


@triton.jit
def hidden_scale(word):
    """The four bits in the places of the eighth signs."""
    return ((word >> 25) & 1) | ((word >> 26) & 2) | ((word >> 27) & 4) | ((word >> 28) & 8)


@triton.jit
def with_signs(word, signs):
    """Four int8, none of them zero, negative where the lowest bit of a byte of `signs` says so."""
    minus = signs & 0x01010101
    return (word ^ (minus * 255)) + minus


@triton.jit
def _byte_at(words, at, lane, mask):
    """The byte of a row, unsigned; those of the record's 16 rows begin at byte `at`."""
    return (tl.load(words + at // 4 + lane // 4, mask=mask, other=0) >> (lane % 4 * 8)) & 255


@triton.jit
def _word16_at(words, at, lane, mask):
    """The same of 16 bits each."""
    return (tl.load(words + at // 4 + lane // 2, mask=mask, other=0) >> (lane % 2 * 16)) & 0xFFFF


@triton.jit
def _half_at(words, at, lane, mask):
    """The same of float16, as float32."""
    return _word16_at(words, at, lane, mask).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_book_codes(words, lane, chunk, mask, high, mins, book, QTYPE: tl.constexpr):
    """Eight int32 tensors: see `triton_decode.load_codes`. words: int32*, the record."""
    codes: tl.tuple = ()
    if QTYPE == "IQ1_S" or QTYPE == "IQ1_M":
        more = _word16_at(words, mins + chunk * 32, lane, mask)
        signs = more
    else:
        raw = tl.load(words + (high // 4 + chunk * 16) + lane, mask=mask, other=0)
        signs = complete_signs(raw, QTYPE)
        if QTYPE == "IQ3_S" or QTYPE == "IQ2_S":
            more = _byte_at(words, mins + chunk * 16, lane, mask)
        else:
            more = raw
    if QTYPE == "IQ3_S" or QTYPE == "IQ3_XXS":
        for j in tl.static_range(8):
            index = _byte_at(words, (chunk * 8 + j) * 16, lane, mask)
            if QTYPE == "IQ3_S":
                index |= ((more >> j) & 1) << 8
            entry = tl.load(book + index, mask=mask, other=0).to(tl.int32)
            codes = codes + (with_signs(levels_of(entry, QTYPE), signs >> j),)  # noqa: RUF005
    else:
        for g in tl.static_range(4):
            index = _byte_at(words, (chunk * 4 + g) * 16, lane, mask)
            minus = tl.zeros_like(index)
            if QTYPE == "IQ2_S":
                index |= ((more >> (2 * g)) & 3) << 8
            elif QTYPE == "IQ2_XS":
                index |= (more >> (17 + 2 * g)) & 256
            elif QTYPE == "IQ1_S":
                index |= ((more >> (3 * g)) & 7) << 8
                minus = more >> 15
            elif QTYPE == "IQ1_M":
                index |= ((more >> (4 * g)) & 7) << 8
                minus = (more >> (4 * g + 3)) & 1
            entry = tl.load(book + index, mask=mask, other=0) | (minus * (0x88884444 - (1 << 32)))
            for i in tl.static_range(2):
                word = levels_of_half(entry, i, QTYPE)
                if not (QTYPE == "IQ1_S" or QTYPE == "IQ1_M"):
                    word = with_signs(word, signs >> (2 * g + i))
                codes = codes + (word,)  # noqa: RUF005
    return codes


@triton.jit
def six_bits_iq1_m(words, lane, chunk, mask, scales):
    """The two scales of three bits of IQ1_M's chunk, one above the other."""
    at = scales + chunk // 8 * 96
    c = chunk % 8
    low = _byte_at(words, at + c // 2 * 16, lane, mask) >> (c % 2 * 4)
    high = _byte_at(words, at + (4 + c // 4) * 16, lane, mask) >> (c % 4 * 2)
    return (low & 15) | ((high & 3) << 4)


@triton.jit
def e4m3_half(byte):
    """float32, half of what a byte stands for as a scale of NVFP4. A float16 of the same bits is 2^8 times smaller."""
    bits = tl.where(byte == 0x7F, 0, (byte & 0x7F) << 7)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 128.0


@triton.jit
def load_later_scales(words, lane, chunk, mask, high, scales, mins, d, QTYPE: tl.constexpr):
    """(s0, a0, s1, a1) as `triton_decode.load_scales`, of the types in this file. words: int32*, the record."""
    if QTYPE == "Q1_0" or QTYPE == "Q2_0" or QTYPE == "TQ1_0" or QTYPE == "TQ2_0":
        if QTYPE == "Q1_0":
            block = chunk // 4
        elif QTYPE == "Q2_0":
            block = chunk // 2
        else:
            block = chunk // 8
        s = _half_at(words, d + block * 32, lane, mask)
        return s, -s, s, -s
    elif QTYPE == "NVFP4":
        factor = tl.load(words + d // 4 + lane, mask=mask, other=0).to(tl.float32, bitcast=True)
        s = e4m3_half(_byte_at(words, scales + chunk * 32, lane, mask)) * factor
        t = e4m3_half(_byte_at(words, scales + chunk * 32 + 16, lane, mask)) * factor
        return s, s * 0.0, t, t * 0.0
    else:
        whole = _half_at(words, d + chunk // 8 * 32, lane, mask)
        if QTYPE == "IQ3_S":
            n = (_byte_at(words, scales + chunk // 2 * 16, lane, mask) >> (chunk % 2 * 4)) & 15
            m = n
        elif QTYPE == "IQ2_S" or QTYPE == "IQ2_XS":
            both = _byte_at(words, scales + chunk * 16, lane, mask)
            n = both & 15
            m = both >> 4
        elif QTYPE == "IQ1_S":
            n = (_word16_at(words, mins + chunk * 32, lane, mask) >> 12) & 7
            m = n
        elif QTYPE == "IQ1_M":
            six = six_bits_iq1_m(words, lane, chunk, mask, scales)
            n = six & 7
            m = six >> 3
        else:
            n = hidden_scale(tl.load(words + (high // 4 + chunk * 16) + lane, mask=mask, other=0))
            m = n
        if QTYPE == "IQ3_XXS":
            whole *= 0.25
        elif QTYPE != "IQ3_S":
            whole *= 0.125
        s = whole * (2 * n + 1).to(tl.float32)
        t = whole * (2 * m + 1).to(tl.float32)
        return s, s * 0.0, t, t * 0.0
