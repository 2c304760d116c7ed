"""Tiles of packed weights as bfloat16, for the float tensor cores: [rows, columns] in the order of the matrix.

A thread decodes the 32 columns of a chunk for a row, so nothing is exchanged between threads before the tile goes to
shared memory. All that is loaded is words of 32 bits: the compiler fetches those ahead, smaller ones it does not.
"""

import triton
import triton.language as tl

from pshard.runtime.kernels.gpu.products.triton_books import load_later_scales
from pshard.runtime.kernels.gpu.products.triton_decode import load_codes
from pshard.runtime.kernels.gpu.products.triton_float import e4m3_values, fp8_row, fp8_scale

if triton.knobs.runtime.interpret:  # the interpreter has no inline assembly

    @triton.jit
    def _lifted(word, at: tl.constexpr):
        """2^23 + byte number `at` of the word, float32."""
        return (((word >> (8 * at)) & 255) | 0x4B000000).to(tl.float32, bitcast=True)

else:

    @triton.jit
    def _lifted(word, at: tl.constexpr):
        """2^23 + byte number `at` of the word, float32: one instruction; a conversion takes four times as long."""
        bits = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0x4B000000, $2;", "=r,r,r", [word, 0x7440 + at], dtype=tl.int32, is_pure=True, pack=1
        )
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def _half_at(words, at, lane, mask):
    """The float16 of a row as float32; those of the record's 16 rows begin at byte `at`."""
    word = tl.load(words + at // 4 + lane // 2, mask=mask, other=0)
    return (word >> (lane % 2 * 16)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _byte_at(words, at, lane, mask):
    """The byte of a row, unsigned; those of the record's 16 rows begin at byte `at`."""
    return (tl.load(words + at // 4 + lane // 4, mask=mask, other=0) >> (lane % 4 * 8)) & 255


@triton.jit
def _load_scales(words, lane, chunk, mask, high, scales, mins, d, dmin, QTYPE: tl.constexpr, HIGH: tl.constexpr):
    """(s0, a0, s1, a1), float32: weight = s * code + a, the first pair for columns 0..15 of the chunk."""
    if HIGH >= 3 or QTYPE == "NVFP4" or QTYPE == "Q1_0" or QTYPE == "Q2_0" or QTYPE == "TQ1_0" or QTYPE == "TQ2_0":
        return load_later_scales(words, lane, chunk, mask, high, scales, mins, d, QTYPE)
    elif QTYPE == "MXFP4":
        e = _byte_at(words, d + chunk * 16, lane, mask)
        s0 = tl.where(e < 2, 0x00200000 << tl.minimum(e, 1), (e - 1) << 23).to(tl.float32, bitcast=True)
        return s0, s0 * 0.0, s0, s0 * 0.0
    elif (
        QTYPE == "Q4_0" or QTYPE == "Q5_0" or QTYPE == "Q8_0" or QTYPE == "Q4_1" or QTYPE == "Q5_1" or QTYPE == "IQ4_NL"
    ):
        s0 = _half_at(words, d + chunk * 32, lane, mask)
        if QTYPE == "Q4_0":
            a0 = s0 * -8.0
        elif QTYPE == "Q5_0":
            a0 = s0 * -16.0
        elif QTYPE == "Q8_0" or QTYPE == "IQ4_NL":
            a0 = s0 * 0.0
        else:
            a0 = _half_at(words, dmin + chunk * 32, lane, mask)
        return s0, a0, s0, a0
    else:
        whole = _half_at(words, d + chunk // 8 * 32, lane, mask)
        if QTYPE == "Q4_K" or QTYPE == "Q5_K":
            s0 = whole * _byte_at(words, scales + chunk * 16, lane, mask).to(tl.float32)
            low = _half_at(words, dmin + chunk // 8 * 32, lane, mask)
            a0 = -low * _byte_at(words, mins + chunk * 16, lane, mask).to(tl.float32)
            return s0, a0, s0, a0
        elif QTYPE == "IQ4_XS":
            s0 = whole * (_byte_at(words, scales + chunk * 16, lane, mask) - 32).to(tl.float32)
            return s0, s0 * 0.0, s0, s0 * 0.0
        elif QTYPE == "Q6_K":
            first = _byte_at(words, scales + chunk * 32, lane, mask).to(tl.int8).to(tl.float32)
            second = _byte_at(words, scales + chunk * 32 + 16, lane, mask).to(tl.int8).to(tl.float32)
            return whole * first, whole * first * -32.0, whole * second, whole * second * -32.0
        elif QTYPE == "Q2_K":
            low = _half_at(words, dmin + chunk // 8 * 32, lane, mask)
            first = _byte_at(words, scales + chunk * 32, lane, mask)
            second = _byte_at(words, scales + chunk * 32 + 16, lane, mask)
            return (whole * (first & 15).to(tl.float32), -low * (first >> 4).to(tl.float32),
                    whole * (second & 15).to(tl.float32), -low * (second >> 4).to(tl.float32))  # fmt: skip
        else:
            tl.static_assert(QTYPE == "Q3_K")
            place = scales + chunk // 8 * 192
            j = 2 * (chunk % 8)  # the chunk's scales are numbers j and j + 1 of its superblock
            first = _byte_at(words, place + j % 8 * 16, lane, mask) >> (j // 8 * 4)
            second = _byte_at(words, place + j % 8 * 16 + 16, lane, mask) >> (j // 8 * 4)
            high0 = _byte_at(words, place + 128 + j % 4 * 16, lane, mask) >> (j // 4 * 2)
            high1 = _byte_at(words, place + 144 + j % 4 * 16, lane, mask) >> (j // 4 * 2)
            s0 = whole * (((first & 15) | ((high0 & 3) << 4)) - 32).to(tl.float32)
            s1 = whole * (((second & 15) | ((high1 & 3) << 4)) - 32).to(tl.float32)
            return s0, s0 * -4.0, s1, s1 * -4.0


@triton.jit
def load_tile(
    address, row, rows, first, cols, places, QTYPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    BK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """bfloat16 [rows of `row`, BK columns from `first` on] of the matrix [rows, cols] at `address`; zeros beyond it.

    places: see `triton_decode.plane_places`. MASKED: where the columns are not whole BK.
    """
    if LOW == 0:
        k = first + tl.arange(0, BK)
        mask = (row < rows)[:, None]
        if MASKED:
            mask &= (k < cols)[None, :]
        if QTYPE == "FP8":
            lines = address.to(tl.pointer_type(tl.uint8)) + row.to(tl.int64)[:, None] * fp8_row(cols)
            codes = tl.load(lines + k[None, :], mask=mask, other=0)
            tl.static_assert(BK <= 128)  # so that a row's columns share a scale; one for each would take shared memory
            scale = tl.load(fp8_scale(lines, first, cols), mask=(row < rows)[:, None], other=0.0)
            return (e4m3_values(codes) * scale).to(tl.bfloat16)
        if QTYPE == "F32":
            source = address.to(tl.pointer_type(tl.float32))
        elif QTYPE == "F16":
            source = address.to(tl.pointer_type(tl.float16))
        else:
            source = address.to(tl.pointer_type(tl.bfloat16))
        at = row.to(tl.int64)[:, None] * cols + k[None, :]
        return tl.load(tl.multiple_of(source, 16) + at, mask=mask, other=0.0).to(tl.bfloat16)
    else:
        record, high, scales, mins, d, dmin = places
        chunk = (first // 32 + tl.arange(0, BK // 32))[None, :]
        lane = (row % 16)[:, None]
        mask = (row < rows)[:, None]
        if MASKED:
            mask &= chunk < cols // 32
        matrix = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
        rec = (row // 16 * record)[:, None]
        codes = load_codes(matrix, rec, lane, chunk, mask, high, mins, dmin, QTYPE, LOW, HIGH)
        words = matrix.to(tl.pointer_type(tl.int32), bitcast=True) + rec
        s0, a0, s1, a1 = _load_scales(words, lane, chunk, mask, high, scales, mins, d, dmin, QTYPE, HIGH)
        columns = ()
        for k in tl.static_range(32):
            if (
                QTYPE == "Q8_0"
                or QTYPE == "MXFP4"
                or QTYPE == "NVFP4"
                or QTYPE == "IQ4_NL"
                or QTYPE == "IQ4_XS"
                or HIGH >= 3
            ):  # signed
                code = _lifted(codes[k // 4] ^ -0x7F7F7F80, k % 4) - 8388736.0
            else:
                code = _lifted(codes[k // 4], k % 4) - 8388608.0
            if k < 16:
                value = code * s0 + a0
            else:
                value = code * s1 + a1
            columns = columns + (value,)  # noqa: RUF005
        for level in tl.static_range(5):  # each join makes a new last dimension: of bit 4 of k, then of bit 3...
            joined = ()
            for i in tl.static_range(16 >> level):
                joined = joined + (tl.join(columns[i], columns[i + (16 >> level)]),)  # noqa: RUF005
            columns = joined
        # rounded only here: the compiler of Triton 3.6 fails where a reshape goes straight to shared memory
        return tl.reshape(columns[0], (row.shape[0], BK)).to(tl.bfloat16)
