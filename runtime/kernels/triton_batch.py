"""Products of up to 64 rows with weights read in place, on the tensor cores: tiles become bfloat16 in registers.

The sum over columns may run in any order. Byte t of code word c holds column 4c + t of each chunk, so a tile of one
(c, t) is a matrix [chunks, rows] as it stands; the activations are put in the same order first, and no byte moves.
"""

import triton
import triton.language as tl

from pshard.runtime.kernels.triton_decode import load_codes, load_scales

if triton.knobs.runtime.interpret:  # the interpreter has no inline assembly

    @triton.jit
    def small_values(word, s, a, MIDDLE: tl.constexpr):
        """Four bfloat16 tiles s * (byte - MIDDLE) + a for the bytes (0..127) of the words; s and a are bfloat16."""
        tiles = ()
        for t in tl.static_range(4):
            code = (((word >> (8 * t)) & 255) - MIDDLE).to(tl.float32)
            tiles = tiles + ((code * s.to(tl.float32) + a.to(tl.float32)).to(tl.bfloat16),)  # noqa: RUF005
        return tiles

else:

    @triton.jit
    def small_values(word, s, a, MIDDLE: tl.constexpr):
        """Four bfloat16 tiles s * (byte - MIDDLE) + a for the bytes (0..127) of the words; s and a are bfloat16.

        Two words at a time. A byte under the exponent 0x43 is the bfloat16 128 + byte; less 128 + MIDDLE it is exact.
        """
        less: tl.constexpr = MIDDLE * 0x00010001 - 0x3CFF3D00  # twice the bfloat16 -(128 + MIDDLE), as int32
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 p, q, one;
            mov.b32 one, 0x3F803F80;
            prmt.b32 p, $4, $5, 0x5140;
            prmt.b32 q, $4, $5, 0x7362;
            prmt.b32 $0, p, 0x43434343, 0x4140;
            prmt.b32 $1, p, 0x43434343, 0x4342;
            prmt.b32 $2, q, 0x43434343, 0x4140;
            prmt.b32 $3, q, 0x43434343, 0x4342;
            fma.rn.bf16x2 $0, $0, one, $8;
            fma.rn.bf16x2 $1, $1, one, $8;
            fma.rn.bf16x2 $2, $2, one, $8;
            fma.rn.bf16x2 $3, $3, one, $8;
            fma.rn.bf16x2 $0, $0, $6, $7;
            fma.rn.bf16x2 $1, $1, $6, $7;
            fma.rn.bf16x2 $2, $2, $6, $7;
            fma.rn.bf16x2 $3, $3, $6, $7;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r",
            [word, s, a, less],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def signed_values(word, s):
    """Four bfloat16 tiles s * value, one for each signed byte of the words; s is float32."""
    tiles = ()
    for t in tl.static_range(4):
        value = ((word << (24 - 8 * t)) >> 24).to(tl.float32)
        tiles = tiles + ((value * s).to(tl.bfloat16),)  # noqa: RUF005
    return tiles


@triton.jit(do_not_specialize=["tokens"])
def permute_kernel(x, x_stride, tokens, out, chunks, TOKENS: tl.constexpr, BC: tl.constexpr):
    """x [tokens, 32 * chunks] -> bf16 out[32, TOKENS, chunks]: column k of every chunk side by side; zeros below."""
    m = tl.program_id(1)
    chunk = tl.program_id(0) * BC + tl.arange(0, BC)
    k = tl.arange(0, 32)
    there = (chunk < chunks)[:, None]
    column = chunk[:, None] * 32 + k[None, :]
    value = tl.load(x + m.to(tl.int64) * x_stride + column, mask=there & (m < tokens), other=0.0).to(tl.bfloat16)
    at = k[:, None] * (TOKENS * chunks) + m * chunks + chunk[None, :]
    tl.store(out + at, tl.trans(value), mask=tl.trans(there))


@triton.jit(do_not_specialize=["tokens"])
def batch_kernel(
    weight, x, out, bias, tokens, rows, chunks, out_stride, per_split, record, high, scales, mins, d, dmin,
    TOKENS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, QTYPE: tl.constexpr, LOW: tl.constexpr,
    HIGH: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Program (BN rows of the packed weight, piece of the columns, TOKENS rows of x) -> out[TOKENS, BN].

    x as permute_kernel left it, with room for the rows of all programs.
    Pieces write [pieces, tokens, rows] (out_stride = rows): `combine_kernel` adds them up.
    """
    piece = tl.program_id(1)
    first = piece * per_split
    last = tl.minimum(first + per_split, chunks)
    weight += (tl.program_id(0) * (BN // 16)).to(tl.int64) * record * 4
    local = tl.arange(0, BN)[None, :]
    rec = (local // 16) * record
    lane = local % 16
    stored = tl.program_id(0) * BN + local < (rows + 15) // 16 * 16
    room = tl.num_programs(2) * TOKENS
    m = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    acc = tl.zeros((TOKENS, BN), tl.float32)
    for start in tl.range(first, last, BC, num_stages=STAGES):
        chunk = start + tl.arange(0, BC)
        mask = (chunk < last)[:, None] & stored
        codes = load_codes(weight, rec, lane, chunk[:, None], mask, high, QTYPE, LOW, HIGH)
        s0, a0, s1, a1 = load_scales(weight, rec, lane, chunk[:, None], mask, scales, mins, d, dmin, QTYPE)
        # around the middle code the addend is small (0 for Q4_0), and so is what bfloat16 loses of s and a
        middle: tl.constexpr = 1 << (LOW + HIGH - 1) if QTYPE != "MXFP4" else 16
        if QTYPE != "MXFP4":
            a0 += middle * s0
            a1 += middle * s1
        at = x + m[:, None] * chunks + chunk[None, :]
        for c in tl.static_range(8):
            if QTYPE == "Q8_0":
                tiles = signed_values(codes[c], s0)
            elif QTYPE == "MXFP4":  # values -12..12 as bytes 4..28: no byte borrows from the next
                shifted = (codes[c] ^ -0x7F7F7F80) - 0x70707070
                tiles = small_values(shifted, s0.to(tl.bfloat16), a0.to(tl.bfloat16), middle)
            elif c < 4:
                tiles = small_values(codes[c], s0.to(tl.bfloat16), a0.to(tl.bfloat16), middle)
            else:
                tiles = small_values(codes[c], s1.to(tl.bfloat16), a1.to(tl.bfloat16), middle)
            for t in tl.static_range(4):
                xs = tl.load(at + (4 * c + t) * (room * chunks), mask=(chunk < last)[None, :], other=0.0)
                acc = tl.dot(xs, tiles[t], acc)
    row = tl.program_id(0) * BN + tl.arange(0, BN)[None, :]
    mask = (row < rows) & (m[:, None] < tokens)
    if BIAS:
        acc += tl.load(bias + row, mask=row < rows, other=0.0)
    at = out + (piece * tokens + m[:, None]).to(tl.int64) * out_stride + row
    if ACCUMULATE:
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def rows_kernel(
    weight, x, x_stride, out, bias, tokens, rows, cols, out_stride, per_split,
    TOKENS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """The same for a plain row-major weight [rows, cols] of a float type, rounded to bfloat16 (x is bfloat16)."""
    piece = tl.program_id(1)
    first = piece * per_split
    last = tl.minimum(first + per_split, cols)
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, TOKENS)
    base = weight + row.to(tl.int64)[:, None] * cols
    source = x + m.to(tl.int64)[:, None] * x_stride
    acc = tl.zeros((TOKENS, BN), tl.float32)
    for start in tl.range(first, last, BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)
        tile = tl.load(base + k[None, :], mask=(row < rows)[:, None] & (k < last)[None, :], other=0.0)
        xs = tl.load(source + k[None, :], mask=(m < tokens)[:, None] & (k < last)[None, :], other=0.0)
        acc = tl.dot(xs.to(tl.bfloat16), tl.trans(tile.to(tl.bfloat16)), acc)
    mask = (row < rows)[None, :] & (m < tokens)[:, None]
    if BIAS:
        acc += tl.load(bias + row, mask=row < rows, other=0.0)[None, :]
    at = out + (piece * tokens + m[:, None]).to(tl.int64) * out_stride + row[None, :]
    if ACCUMULATE:
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, acc.to(out.dtype.element_ty), mask=mask)
