"""Sums of many rows between two GPUs with the norm that follows: what a prompt's micro-batch exchanges.

Parts go to every rank at once as in `sum_one_shot_kernel`, through the same places and flags. A program takes whole
rows, so that it can normalise what it has added while that is in registers.
"""

import triton
import triton.language as tl

from pshard.runtime.kernels.gpu.exchange.triton_exchange import add_parts, elements_at_once, meet, push


def rows_at_once(cols: int, wire: str) -> int:
    """Rows of so many columns that a program exchanges at once, in a wire's type; 0 where not even one fits."""
    return elements_at_once(wire) // triton.next_power_of_2(cols)


@triton.jit
def sum_norm_kernel(
    part, hidden, weight, out, out_stride, rows, cols, peers, state, late, patience, eps, rounded, rounded_stride,
    PARTS: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr, WIRE: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """hidden[m] += sum of the ranks' part[m], float32; out[m] = RMS norm of hidden[m] times weight.

    ROWS at once, of up to WIDE columns, a power of two. part, hidden contiguous. ROUND: out is left in `rounded` too.
    """
    program = tl.program_id(0)
    epoch = tl.load(state + program) + 1
    start = program * ROWS
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDE)[None, :]
    place = row * WIDE + column
    there = (start + row < rows) & (column < cols)
    value = tl.load(part + (start + row).to(tl.int64) * cols + column, mask=there, other=0.0).to(WIRE)
    push(value, place, there, peers, epoch, program, PARTS, RANKS, RANK, WIRE)
    while start < rows:
        following = start + tl.num_programs(0) * ROWS
        then = (following + row < rows) & (column < cols)
        coming = tl.load(part + (following + row).to(tl.int64) * cols + column, mask=then, other=0.0).to(WIRE)
        at = (start + row).to(tl.int64)
        before = tl.load(hidden + at * cols + column, mask=there, other=0.0)
        meet(peers, state, late, epoch, program, patience, RANKS, RANK)
        push(coming, place, then, peers, epoch + 1, program, PARTS, RANKS, RANK, WIRE)
        added = before + add_parts(value, place, there, peers, epoch, program, PARTS, RANKS, RANK, WIRE)
        tl.store(hidden + at * cols + column, added, mask=there)
        factor = tl.rsqrt(tl.sum(added * added, axis=1) / cols + eps)[:, None]
        normed = added * factor * tl.load(weight + column, mask=column < cols, other=0.0)
        tl.store(out + at * out_stride + column, normed.to(out.dtype.element_ty), mask=there)
        if ROUND:
            tl.store(rounded + at * rounded_stride + column, normed.to(rounded.dtype.element_ty), mask=there)
        value = coming
        there = then
        epoch += 1
        start = following
    tl.store(state + program, epoch - 1)
