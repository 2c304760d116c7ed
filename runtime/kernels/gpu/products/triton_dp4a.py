"""A packed record times a few rows of quantised activations with dp4a: few registers, so many warps are at work.

Each thread has four rows of a chunk for itself, where on the tensor cores (triton_records) four threads share them and
all decode their scales. But every token costs products of its own.
"""

import triton
import triton.language as tl

from pshard.runtime.kernels.gpu.products.triton_decode import load_codes, load_scales

if triton.knobs.runtime.interpret:  # the interpreter has no inline assembly

    @triton.jit
    def dot4(a, b, total):
        """total + sum of the four products of signed bytes of a and b, int32."""
        for t in tl.static_range(4):
            total = total + ((a << (24 - 8 * t)) >> 24) * ((b << (24 - 8 * t)) >> 24)
        return total

else:

    @triton.jit
    def dot4(a, b, total):
        """total + sum of the four products of signed bytes of a and b, int32."""
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def dot_record(
    weight, words, scale, sums, width, first, last, high, scales, mins, d, dmin,
    TOKENS: tl.constexpr, BC: tl.constexpr, QTYPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """TOKENS tiles f32 [1, 16]: the record at `weight` times each row of activations over chunks first..last.

    Activations as `store_quantised` leaves them; `width`: chunks that a row of them has room for. HALVES: two scales
    in a chunk.
    """
    lane = tl.arange(0, 16)[None, :]
    pairs = words.to(tl.pointer_type(tl.int64), bitcast=True)  # words c and c + 4 of a chunk are neighbours
    totals = ()
    for _ in tl.static_range(TOKENS):
        totals = totals + (tl.zeros((BC, 16), tl.float32),)  # noqa: RUF005
    for start in range(first, last, BC):
        chunk = start + tl.arange(0, BC)
        there = chunk < last
        mask = there[:, None]
        codes = load_codes(weight, 0, lane, chunk[:, None], mask, high, mins, dmin, QTYPE, LOW, HIGH)
        s0, a0, s1, a1 = load_scales(weight, 0, lane, chunk[:, None], mask, high, scales, mins, d, dmin, QTYPE, HIGH)
        new = ()
        for m in tl.static_range(TOKENS):
            at = m * width + chunk
            place = m * width * 4 + chunk // 2 * 8 + chunk % 2
            dots = tl.zeros((BC, 16), tl.int32)
            more = tl.zeros((BC, 16), tl.int32)
            for c in tl.static_range(4):
                both = tl.load(pairs + (place + 2 * c), mask=there, other=0)[:, None]
                dots = dot4(codes[c], both.to(tl.int32), dots)
                if HALVES:
                    more = dot4(codes[4 + c], (both >> 32).to(tl.int32), more)
                else:
                    dots = dot4(codes[4 + c], (both >> 32).to(tl.int32), dots)
            xs = tl.load(scale + at, mask=there, other=0.0)[:, None]
            x0 = tl.load(sums + 2 * at, mask=there, other=0.0)[:, None]
            x1 = tl.load(sums + 2 * at + 1, mask=there, other=0.0)[:, None]
            if HALVES:
                part = (s0 * dots.to(tl.float32) + s1 * more.to(tl.float32)) * xs + a0 * x0 + a1 * x1
            else:
                part = (s0 * xs) * dots.to(tl.float32) + a0 * (x0 + x1)
            new = new + (totals[m] + part,)  # noqa: RUF005
        totals = new
    results = ()
    for m in tl.static_range(TOKENS):
        results = results + (tl.sum(totals[m], axis=0)[None, :],)  # noqa: RUF005
    return results
