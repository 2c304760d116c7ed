"""Sums of many rows between two GPUs, with the norm that follows: what a prompt's micro-batch exchanges.

Parts go to every rank at once as in `sum_one_shot_kernel`, through the same places and flags. A program takes whole
rows, so that it can normalise what it has added while that is in registers. A part of experts may still be lying there
as what each chosen expert gave: it is made as it leaves, while the link carries what left before.

A row longer than a place takes those of two programs, which lie side by side.
"""

import triton
import triton.language as tl

from pshard.collectives import elements_at_once, widest_row
from pshard.runtime.kernels.gpu.exchange.triton_exchange import add_parts, meet, push
from pshard.runtime.kernels.gpu.experts.triton_grouped import sum_pairs

REGISTERS, PAIRS_REGISTERS = 64, 64  # of a thread, at most: two programs run beside each other then


def rows_at_once(cols: int, wire: str) -> int:
    """Rows of so many columns that a program exchanges at once, in a wire's type; 0 where not even one fits."""
    return max(elements_at_once(wire) // triton.next_power_of_2(cols), int(cols <= widest_row(wire)))


def places_of_row(cols: int, wire: str) -> int:
    """How many places of the exchange memory a row of so many columns takes; 1 of several rows that share one."""
    return max(1, triton.next_power_of_2(cols) // elements_at_once(wire))


@triton.jit
def _load_part(
    part, start, rows, cols, ids, ids_stride, weights, weights_stride, addresses, WIRE: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, USED: tl.constexpr,
):  # fmt: skip
    """Rows from `start` on of this rank's part, as they travel. USED > 0: `part` has what the experts gave, see
    `sum_pairs`."""
    row = start.to(tl.int64) + tl.arange(0, ROWS)
    column = tl.arange(0, WIDE)[None, :]
    there = (row < rows)[:, None] & (column < cols)
    if USED > 0:
        value = sum_pairs(part, row, row < rows, column, there, cols, ids, ids_stride, weights, weights_stride,
                          addresses, USED)  # fmt: skip
    else:
        value = tl.load(part + (row * cols)[:, None] + column, mask=there, other=0.0)
    return value.to(WIRE), there


@triton.jit
def sum_many_rows_kernel(
    part, target, within, times, rows, cols, peers, state, late, patience, weight, out, out_stride, rounded,
    rounded_stride, eps, ids, ids_stride, weights, weights_stride, addresses,
    PARTS: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr, WIRE: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr, PLACES: tl.constexpr, USED: tl.constexpr, ACCUMULATE: tl.constexpr, NORM: tl.constexpr,
    ROUND: tl.constexpr,
):  # fmt: skip
    """target[m] (+)= sum of the ranks' part[m], float32. NORM: then out[m] = RMS norm of target[m] times weight.

    ROWS at once, of up to WIDE columns, a power of two. part, target contiguous. ROUND: out is left in `rounded` too.
    USED: see `_load_part`. within, times: see `sum_rows_kernel`. PLACES: it takes the places of so many
    neighbouring programs and the flags of the first. They may be at different epochs: it goes on from the latest. A
    rank may still read there what an earlier launch has brought, so all meet before anything is written.
    """
    program = tl.program_id(0) * PLACES
    epoch = tl.load(state + program) + 1
    start = tl.program_id(0) * ROWS
    column = tl.arange(0, WIDE)[None, :]
    place = (tl.arange(0, ROWS) * WIDE)[:, None] + column
    value, there = _load_part(part, start, rows, cols, ids, ids_stride, weights, weights_stride, addresses, WIRE, ROWS,
                              WIDE, USED)  # fmt: skip
    if PLACES > 1:
        epoch = tl.max(tl.load(state + program + tl.arange(0, PLACES)), axis=0) + 1
        meet(peers, state, late, epoch, program, patience, RANKS, RANK)
        epoch += 1
    push(value, place, there, peers, epoch, program, PARTS, RANKS, RANK, WIRE)
    while start < rows:
        following = start + tl.num_programs(0) * ROWS
        coming, then = _load_part(part, following, rows, cols, ids, ids_stride, weights, weights_stride, addresses,
                                  WIRE, ROWS, WIDE, USED)  # fmt: skip
        row = start.to(tl.int64) + tl.arange(0, ROWS)
        onto = target + (row * cols)[:, None] + column
        before = tl.zeros([ROWS, WIDE], tl.float32)
        if ACCUMULATE:
            before = tl.load(onto, mask=there, other=0.0)
        meet(peers, state, late, epoch, program, patience, RANKS, RANK)
        push(coming, place, then, peers, epoch + 1, program, PARTS, RANKS, RANK, WIRE)
        added = add_parts(value, place, there, peers, epoch, program, PARTS, RANKS, RANK, WIRE)
        if within is not None:
            factor = tl.rsqrt(tl.sum(added * added, axis=1) / cols + eps)[:, None]
            added = added * factor * tl.load(within + column, mask=column < cols, other=0.0)
        if ACCUMULATE:
            added = before + added
        if times is not None:
            added *= tl.load(times)
        tl.store(onto, added, mask=there)
        if NORM:
            factor = tl.rsqrt(tl.sum(added * added, axis=1) / cols + eps)[:, None]
            normed = added * factor * tl.load(weight + column, mask=column < cols, other=0.0)
            tl.store(out + (row * out_stride)[:, None] + column, normed.to(out.dtype.element_ty), mask=there)
            if ROUND:
                again = rounded + (row * rounded_stride)[:, None] + column
                tl.store(again, normed.to(rounded.dtype.element_ty), mask=there)
        value = coming
        there = then
        epoch += 1
        start = following
    if PLACES > 1:
        tl.store(state + program + tl.arange(0, PLACES), epoch - 1 + tl.zeros([PLACES], tl.int32))
    else:
        tl.store(state + program, epoch - 1)
