"""Experts of few tokens: a matrix-vector product for every pair (token, chosen expert), in int8 as in triton_matvec.

Pair p is token p // used and the expert in place p % used of its choice. Ids and addresses are read on the device, so
one launch serves whatever was chosen. An expert that is not on this side, or -1, costs its programs nothing but their
start.
"""

import triton
import triton.language as tl

from pshard.runtime.kernels.gpu.next_norm import factor_of
from pshard.runtime.kernels.gpu.products.triton_gates import activate
from pshard.runtime.kernels.gpu.products.triton_matvec import arrive, multiply_chunks
from pshard.runtime.kernels.gpu.products.triton_quantise import padded, store_quantised


@triton.jit
def _multiply_row(
    address, words, scale, sums, row, tile, rows, chunks, places,
    DEPTH: tl.constexpr, WARPS: tl.constexpr, QTYPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    FACTOR: tl.constexpr, MASKED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """f32 [4, 32], four times the same: the 32 rows `tile` of the matrix at `address` times a row of activations."""
    record, high, scales, mins, d, dmin = places
    width = padded(chunks)
    thread = tl.arange(0, 32 * WARPS)
    group = 2 * tile + thread % 32 // 16
    matrix = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
    results = multiply_chunks(matrix, group, group * 16 < rows, thread, words + row * width * 8, scale + row * width,
                              sums + row * width * 2, width, 0, chunks, record, high, scales, mins, d, dmin, 1, 32,
                              DEPTH, WARPS, QTYPE, LOW, HIGH, FACTOR, MASKED, AHEAD)  # fmt: skip
    return results[0]


@triton.jit(do_not_specialize=["used"])
def gate_up_pairs_kernel(
    words, scale, sums, ids, ids_stride, used, addresses, up_addresses, bias, up_bias, new_words, new_scale, new_sums,
    squares, eps, rows, chunks, places, up_places,
    DEPTH: tl.constexpr, WARPS: tl.constexpr, QTYPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    FACTOR: tl.constexpr, MASKED: tl.constexpr, AHEAD: tl.constexpr, ACTIVATION: tl.constexpr,
    UNSCALED: tl.constexpr, UP_QTYPE: tl.constexpr, UP_LOW: tl.constexpr, UP_HIGH: tl.constexpr,
    UP_FACTOR: tl.constexpr,
):  # fmt: skip
    """Program (32 rows, pair): act(gate . x + bias, up . x + bias), quantised: row `pair` of the new activations.

    UP_*: how up's rows are read, whose type may be another than the gate's. UNSCALED > 0, a power of two >= chunks: the
    activations are `Unscaled`."""
    tile = tl.program_id(0)
    pair = tl.program_id(1)
    token = pair // used
    expert = tl.load(ids + token * ids_stride + pair % used)
    address = tl.load(addresses + expert, mask=expert >= 0, other=0)
    if address == 0:
        return
    up_address = tl.load(up_addresses + expert)
    gate = _multiply_row(address, words, scale, sums, token, tile, rows, chunks, places, DEPTH, WARPS, QTYPE, LOW, HIGH,
                         FACTOR, MASKED, AHEAD)  # fmt: skip
    up = _multiply_row(up_address, words, scale, sums, token, tile, rows, chunks, up_places, DEPTH, WARPS, UP_QTYPE,
                       UP_LOW, UP_HIGH, UP_FACTOR, MASKED, AHEAD)  # fmt: skip
    if UNSCALED > 0:
        m = token + tl.arange(0, 1)
        factor = factor_of(squares, m, m >= 0, chunks, eps, UNSCALED)[:, None]
        gate *= factor
        up *= factor
    if bias is not None:
        row = tile * 32 + tl.arange(0, 32)
        gate += tl.load(bias + expert * rows + row)[None, :]
        up += tl.load(up_bias + expert * rows + row)[None, :]
    value = activate(gate, up, ACTIVATION)
    first = tl.arange(0, 4) == 0
    none = tl.zeros((4,), tl.int32)
    store_quantised(value, tile + none, first, pair + none, new_words, new_scale, new_sums, rows // 32, 4)


@triton.jit(do_not_specialize=["used", "tokens"])
def down_pairs_kernel(
    words, scale, sums, ids, ids_stride, weights, weights_stride, tokens, used, addresses, bias, partial, counters,
    out, out_stride, new_words, new_scale, new_sums, squares, norm, rows, chunks, places,
    DEPTH: tl.constexpr, WARPS: tl.constexpr, QTYPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    FACTOR: tl.constexpr, MASKED: tl.constexpr, AHEAD: tl.constexpr, ACCUMULATE: tl.constexpr, PLACES: tl.constexpr,
    NEXT: tl.constexpr,
):  # fmt: skip
    """Program (32 rows, pair): weight * (down . activations + bias) into partial[pairs, rows].

    The last one of a token's rows adds these up, always in one order, into out. PLACES: a power of two >= used.
    Counters return to zero. NEXT: the sums are also left as `Unscaled`, for the norm of weights `norm`.
    """
    tile = tl.program_id(0)
    pair = tl.program_id(1)
    token = pair // used
    expert = tl.load(ids + token * ids_stride + pair % used)
    address = tl.load(addresses + expert, mask=expert >= 0, other=0)
    row = tile * 32 + tl.arange(0, 32)
    value = tl.zeros((4, 32), tl.float32)
    if address != 0:
        value = _multiply_row(address, words, scale, sums, pair, tile, rows, chunks, places, DEPTH, WARPS, QTYPE, LOW,
                              HIGH, FACTOR, MASKED, AHEAD)  # fmt: skip
        if bias is not None:
            value += tl.load(bias + expert * rows + row, mask=row < rows, other=0.0)[None, :]
        value *= tl.load(weights + token * weights_stride + pair % used)
    copies = tl.zeros((4,), tl.int32)[:, None]
    first = (tl.arange(0, 4) == 0)[:, None]
    tl.store(partial + (pair * rows + row)[None, :] + copies, value, mask=first & (row < rows)[None, :])
    counter = counters + tile * tokens + token
    if arrive(counter) == used - 1:
        place = tl.arange(0, PLACES)[:, None]
        there = (place < used) & (row < rows)[None, :]
        parts = partial + (token * used + place) * rows + row[None, :]
        total = tl.sum(tl.load(parts, mask=there, other=0.0, cache_modifier=".cg"), axis=0)
        target = out + token.to(tl.int64) * out_stride + row
        if ACCUMULATE:
            total += tl.load(target, mask=row < rows, other=0.0)
        tl.store(target, total, mask=row < rows)
        if NEXT:
            tl.store(squares + token * (rows // 32) + tile, tl.sum(total * total, axis=0))
            chunk = tile + tl.arange(0, 1)
            scaled = (total * tl.load(norm + row))[None, :]
            store_quantised(scaled, chunk, chunk >= 0, token, new_words, new_scale, new_sums, rows // 32, 1)
        tl.store(counter, 0)
