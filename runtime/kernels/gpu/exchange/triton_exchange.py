"""Sums and gathers between GPUs that write into each other's memory (NVLink or PCIe peers; no multicast).

Every rank owns one exchange memory that all ranks have mapped; `peers` holds its address for each rank:

    flags  int32 [RANKS, PROGRAMS]                 the last epoch that a rank's program has brought its part for
    words  int32 [3, RANKS, ROWS, MAX_COLS]        parts of few rows, see triton_row_sum.py
    parts  bytes [2, RANKS, PROGRAMS, 4 * BLOCK]   parts of everything else

A rank pushes its part into its own place in each peer's memory, and reads the others' from its own memory. Program b
of one rank meets only program b of the others, so programs may run in any number at once, in order. `state` int32
(local): [PROGRAMS] epochs, then whether some rank was late. A place alternates between two halves: who has seen all
flags of epoch e knows that all ranks have read what was written for e - 1, so e + 1 may overwrite it.

Parts are rounded to the wire's type, then added in rank order in float32: the same bits on all ranks and in all runs.
"""

import triton
import triton.language as tl

from pshard.collectives import EXCHANGED
from pshard.runtime.kernels.gpu.products.triton_row_sum import words_nbytes

BLOCK = EXCHANGED // 4  # elements of four bytes that a program exchanges at once
PROGRAMS = 512  # that there are places for
LAUNCHED = PROGRAMS  # of one launch, at most
FAILED = PROGRAMS  # place in `state`
_HELD = tl.constexpr(4)  # ranks, up to which registers hold all of what a round adds to
_BLOCK, _PROGRAMS, _FAILED = tl.constexpr(BLOCK), tl.constexpr(PROGRAMS), tl.constexpr(FAILED)
_WARP = tl.constexpr(32)  # threads, and most ranks


def words_at(ranks: int) -> int:
    """Byte offset of `words`."""
    return 4 * ranks * PROGRAMS


def parts_at(ranks: int) -> int:
    """Byte offset of `parts`."""
    return words_at(ranks) + words_nbytes(ranks)


def exchange_nbytes(ranks: int) -> int:
    """Bytes of one rank's exchange memory."""
    return parts_at(ranks) + 4 * 2 * ranks * PROGRAMS * BLOCK


def warps_for(elements: int) -> int:
    """Warps of a program that exchanges so many elements at once: eight elements a thread."""
    return elements // 256


@triton.jit
def place_of(peers, owner, source, epoch, program, PARTS: tl.constexpr, RANKS: tl.constexpr, KIND: tl.constexpr):
    """Address of what `source` leaves in `owner`'s memory for one program and epoch."""
    index = ((epoch & 1) * RANKS + source) * _PROGRAMS + program
    place = (tl.load(peers + owner) + PARTS + index.to(tl.int64) * (4 * _BLOCK)).to(tl.pointer_type(KIND))
    return tl.multiple_of(place, 16)  # bytes: wide stores


@triton.jit
def meet(peers, state, late, epoch, program, patience, RANKS: tl.constexpr, RANK: tl.constexpr):
    """Tell all ranks that this one's part of `epoch` is there, and wait for theirs."""
    tl.debug_barrier()  # the releases below are a few threads': the others' stores come before them
    rank = tl.arange(0, _WARP)  # a thread for each, as every release waits for the stores before it
    others = (rank < RANKS) & (rank != RANK)
    flags = tl.load(peers + rank, mask=others, other=0).to(tl.pointer_type(tl.int32)) + RANK * _PROGRAMS + program
    tl.atomic_xchg(flags, epoch + tl.zeros_like(rank), mask=others, sem="release", scope="sys")
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            flag = tl.load(peers + RANK).to(tl.pointer_type(tl.int32)) + peer * _PROGRAMS + program
            left = tl.where(tl.load(state + _FAILED) > 0, 0, patience)
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            while (seen < epoch) & (left > 0):
                seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                left -= 1
            if seen < epoch:
                tl.store(state + _FAILED, 1)
                tl.store(late, peer + 1)
    tl.debug_barrier()


@triton.jit
def push(
    value, at, mask, peers, epoch, program, PARTS: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Store the same into this rank's place in every peer's memory, at offsets `at` there."""
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            tl.store(place_of(peers, peer, RANK, epoch, program, PARTS, RANKS, KIND) + at, value, mask=mask)


@triton.jit
def add_parts(
    own, at, mask, peers, epoch, program, PARTS: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr,
    WIRE: tl.constexpr,
):  # fmt: skip
    """The sum of this rank's part and those that have come, from offsets `at` on, in rank order, float32."""
    added = tl.zeros_like(own).to(tl.float32)
    for source in tl.static_range(RANKS):
        if source == RANK:
            added += own.to(tl.float32)
        else:
            here = place_of(peers, RANK, source, epoch, program, PARTS, RANKS, WIRE)
            added += tl.load(here + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    return added


@triton.jit
def sum_one_shot_kernel(
    part, target, n, peers, state, late, patience, PARTS: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr,
    WIRE: tl.constexpr, EACH: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """target[n] (+)= sum of the ranks' part[n], float32: every part goes to every rank, which adds them all. EACH:
    elements at once, see `elements_at_once`.

    While the others' parts of a round come, memory is read; the next round's leave before these are added.
    """
    program = tl.program_id(0)
    epoch = tl.load(state + program) + 1
    start = program.to(tl.int64) * EACH
    column = tl.arange(0, EACH)
    there = column < tl.minimum(n - start, EACH).to(tl.int32)
    value = tl.load(part + start + column, mask=there, other=0.0).to(WIRE)
    push(value, column, there, peers, epoch, program, PARTS, RANKS, RANK, WIRE)
    while start < n:
        following = start + tl.num_programs(0) * EACH
        then = column < tl.minimum(n - following, EACH).to(tl.int32)
        coming = tl.load(part + following + column, mask=then, other=0.0).to(WIRE)
        onto = target + start + column
        before = tl.zeros([EACH], tl.float32)
        if ACCUMULATE:
            before = tl.load(onto, mask=there, other=0.0)
        meet(peers, state, late, epoch, program, patience, RANKS, RANK)
        push(coming, column, then, peers, epoch + 1, program, PARTS, RANKS, RANK, WIRE)
        added = add_parts(value, column, there, peers, epoch, program, PARTS, RANKS, RANK, WIRE)
        if ACCUMULATE:
            added = before + added
        tl.store(onto, added, mask=there)
        value = coming
        there = then
        epoch += 1
        start = following
    tl.store(state + program, epoch - 1)


@triton.jit
def sum_two_shot_kernel(
    part, target, n, peers, state, late, patience, PARTS: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr,
    WIRE: tl.constexpr, EACH: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """The same with 2 (RANKS - 1) / RANKS of the bytes: each rank adds one of RANKS pieces and hands its sum round.

    The sum is rounded to the wire's type once more.
    """
    program = tl.program_id(0)
    epoch = tl.load(state + program)
    start = program.to(tl.int64) * (RANKS * EACH)
    column = tl.arange(0, EACH)
    while start < n:
        epoch += 1
        left = tl.minimum(n - start, RANKS * EACH).to(tl.int32)
        mask = column < left - RANK * EACH
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                theirs = column < left - peer * EACH
                value = tl.load(part + start + peer * EACH + column, mask=theirs, other=0.0).to(WIRE)
                there = place_of(peers, peer, RANK, epoch, program, PARTS, RANKS, WIRE)
                tl.store(there + column, value, mask=theirs)
        own = tl.load(part + start + RANK * EACH + column, mask=mask, other=0.0).to(WIRE)
        before: tl.tuple = ()  # read while the others' pieces come
        for source in tl.static_range(RANKS):
            if ACCUMULATE and RANKS <= _HELD:
                onto = target + start + source * EACH + column
                before += (tl.load(onto, mask=column < left - source * EACH, other=0.0),)
        meet(peers, state, late, epoch, program, patience, RANKS, RANK)
        added = add_parts(own, column, mask, peers, epoch, program, PARTS, RANKS, RANK, WIRE)
        epoch += 1
        ours = added.to(WIRE)
        push(ours, column, mask, peers, epoch, program, PARTS, RANKS, RANK, WIRE)
        meet(peers, state, late, epoch, program, patience, RANKS, RANK)
        for source in tl.static_range(RANKS):
            theirs = column < left - source * EACH
            onto = target + start + source * EACH + column
            if source == RANK:
                total = ours.to(tl.float32)
            else:
                here = place_of(peers, RANK, source, epoch, program, PARTS, RANKS, WIRE)
                total = tl.load(here + column, mask=theirs, other=0.0, cache_modifier=".cg").to(tl.float32)
            if ACCUMULATE:
                if RANKS <= _HELD:
                    total = before[source] + total
                else:
                    total = tl.load(onto, mask=theirs, other=0.0) + total
            tl.store(onto, total, mask=theirs)
        start += tl.num_programs(0) * (RANKS * EACH)
    tl.store(state + program, epoch)


@triton.jit
def gather_kernel(
    table, rows, most, bounds, peers, state, late, patience, PARTS: tl.constexpr, RANKS: tl.constexpr,
    RANK: tl.constexpr,
):  # fmt: skip
    """table float32 [rows, bounds[RANKS]]: this rank's columns bounds[RANK]..bounds[RANK + 1] go to all, and theirs
    come here. bounds int32 [RANKS + 1]; most: elements of the rank that has most."""
    program = tl.program_id(0)
    epoch = tl.load(state + program)
    column = tl.arange(0, _BLOCK)
    total = tl.load(bounds + RANKS).to(tl.int64)
    start = program.to(tl.int64) * _BLOCK
    while start < most:
        epoch += 1
        at = start + column
        first = tl.load(bounds + RANK).to(tl.int64)
        width = tl.load(bounds + RANK + 1).to(tl.int64) - first
        own = at // tl.maximum(width, 1) * total + first + at % tl.maximum(width, 1)
        value = tl.load(table + own, mask=at < rows * width, other=0.0)
        push(value, column, at < rows * width, peers, epoch, program, PARTS, RANKS, RANK, tl.float32)
        meet(peers, state, late, epoch, program, patience, RANKS, RANK)
        for source in tl.static_range(RANKS):
            if source != RANK:
                first = tl.load(bounds + source).to(tl.int64)
                width = tl.load(bounds + source + 1).to(tl.int64) - first
                here = place_of(peers, RANK, source, epoch, program, PARTS, RANKS, tl.float32)
                value = tl.load(here + column, mask=at < rows * width, other=0.0, cache_modifier=".cg")
                place = at // tl.maximum(width, 1) * total + first + at % tl.maximum(width, 1)
                tl.store(table + place, value, mask=at < rows * width)
        start += tl.num_programs(0) * _BLOCK
    tl.store(state + program, epoch)
