"""Row-wise kernels in Triton: RMS norm, gate and product, bias, and rope with the store into the KV cache."""

import triton
import triton.language as tl

from pshard.runtime.kernels.gpu.products.triton_gates import activate, gate_mul
from pshard.runtime.kernels.gpu.products.triton_quantise import store_quantised
from pshard.runtime.kernels.gpu.triton_cells import are_codes


@triton.jit
def rms_norm_kernel(
    hidden, hidden_stride, weight, out, out_stride, cols, eps, words, scale, sums, again, again_stride, times,
    BLOCK: tl.constexpr, ADD: tl.constexpr, ROUND: tl.constexpr, QUANTISE: tl.constexpr,
):  # fmt: skip
    """Program m: out[m] = hidden[m] * rsqrt(mean(hidden[m]^2) + eps) * weight, in float32. BLOCK >= cols.

    ADD: it is added to what is there. times: the sum is multiplied by it. ROUND: it is left in `again` as well, in
    another type. QUANTISE: out[m], as rounded, is also quantised for `matvec_kernel` (cols a multiple of 32).
    """
    m = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < cols
    value = tl.load(hidden + m * hidden_stride + column, mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, axis=0) / cols + eps)
    value = value * factor * tl.load(weight + column, mask=mask, other=0.0)
    if ADD:
        value += tl.load(out + m * out_stride + column, mask=mask, other=0.0).to(tl.float32)
    if times is not None:
        value *= tl.load(times)
    rounded = value.to(out.dtype.element_ty)
    tl.store(out + m * out_stride + column, rounded, mask=mask)
    if ROUND:
        tl.store(again + m * again_stride + column, value.to(again.dtype.element_ty), mask=mask)
    if QUANTISE:
        chunk = tl.arange(0, BLOCK // 32)
        tile = tl.reshape(rounded.to(tl.float32), (BLOCK // 32, 32))
        store_quantised(tile, chunk, chunk < cols // 32, m, words, scale, sums, cols // 32, BLOCK // 32)


@triton.jit
def add_normed_kernel(
    x, x_stride, own, beside, beside_stride, its, inner, inner_eps, times, hidden, hidden_stride, weight, out,
    out_stride, cols, eps, words, scale, sums, again, again_stride, BLOCK: tl.constexpr, QUANTISE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program m: hidden[m] = (hidden[m] + norm(x[m]) * inner) * times, where norm is as in `rms_norm_kernel`; then out,
    `again` and what is quantised of norm(hidden[m]) * weight, all as there. weight None: none of these.

    beside: instead of x[m] it is norm(x[m]) * own + norm(beside[m]) * its. EARLY: weights are read before the first
    sum, so that one wait is for all; that takes registers, and of many rows other programs compute meanwhile.
    """
    m = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < cols
    value = tl.load(x + m * x_stride + column, mask=mask, other=0.0)
    before = tl.load(hidden + m * hidden_stride + column, mask=mask, other=0.0)
    if beside is not None:
        second = tl.load(beside + m * beside_stride + column, mask=mask, other=0.0)
    if EARLY:
        within = tl.load(inner + column, mask=mask, other=0.0)
        if beside is not None:
            first_weight = tl.load(own + column, mask=mask, other=0.0)
            second_weight = tl.load(its + column, mask=mask, other=0.0)
        if weight is not None:
            following = tl.load(weight + column, mask=mask, other=0.0)
    if beside is not None:
        value *= tl.rsqrt(tl.sum(value * value, axis=0) / cols + inner_eps)
        second *= tl.rsqrt(tl.sum(second * second, axis=0) / cols + inner_eps)
        if not EARLY:
            first_weight = tl.load(own + column, mask=mask, other=0.0)
            second_weight = tl.load(its + column, mask=mask, other=0.0)
        value = value * first_weight + second * second_weight
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / cols + inner_eps)
    if not EARLY:
        within = tl.load(inner + column, mask=mask, other=0.0)
    value = before + value * within
    if times is not None:
        value *= tl.load(times)
    tl.store(hidden + m * hidden_stride + column, value, mask=mask)
    if weight is not None:
        value *= tl.rsqrt(tl.sum(value * value, axis=0) / cols + eps)
        if not EARLY:
            following = tl.load(weight + column, mask=mask, other=0.0)
        value *= following
        rounded = value.to(out.dtype.element_ty)
        tl.store(out + m * out_stride + column, rounded, mask=mask)
        if again is not None:
            tl.store(again + m * again_stride + column, value.to(again.dtype.element_ty), mask=mask)
        if QUANTISE:
            chunk = tl.arange(0, BLOCK // 32)
            tile = tl.reshape(rounded.to(tl.float32), (BLOCK // 32, 32))
            store_quantised(tile, chunk, chunk < cols // 32, m, words, scale, sums, cols // 32, BLOCK // 32)


@triton.jit
def centre_rows_kernel(x, x_stride, cols, BLOCK: tl.constexpr):
    """Program m: x[m] -= mean(x[m]). BLOCK >= cols."""
    row = x + tl.program_id(0).to(tl.int64) * x_stride + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < cols
    value = tl.load(row, mask=mask, other=0.0)
    tl.store(row, value - tl.sum(value, axis=0) / cols, mask=mask)


@triton.jit
def bend_rows_kernel(x, x_stride, numbers, count, limit, cols, HOW: tl.constexpr, BLOCK: tl.constexpr):
    """x[m, c] as bent in HOW, one of `BENDS`; program (piece of the columns, m)."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, mask = x + tl.program_id(1).to(tl.int64) * x_stride + column, column < cols
    value = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    if HOW == "times":
        bent = value * tl.load(numbers + column % count, mask=mask, other=0.0)
    elif HOW == "plus":
        bent = value + tl.load(numbers + column % count, mask=mask, other=0.0)
    elif HOW == "clamp":
        bent = tl.minimum(tl.maximum(value, -limit), limit)
    elif HOW == "relu2":
        bent = tl.maximum(value, 0.0) * tl.maximum(value, 0.0)
    elif HOW == "gelu" or HOW == "gelu16":
        bent = gate_mul(value, 1.0, True)
    else:
        tl.static_assert(HOW == "xielu")
        above = tl.load(numbers) * value * value
        below = tl.load(numbers + 1) * (tl.exp(tl.minimum(value, tl.load(numbers + 3))) - 1.0 - value)
        bent = tl.where(value > 0, above, below) + tl.load(numbers + 2) * value
    tl.store(row, bent.to(x.dtype.element_ty), mask=mask)


@triton.jit
def order_rows_kernel(x, x_stride, order, cols, BLOCK: tl.constexpr):
    """x[m, i] = what x[m, order[i]] was; program (m). BLOCK >= cols."""
    row, column = x + tl.program_id(0).to(tl.int64) * x_stride, tl.arange(0, BLOCK)
    mask = column < cols
    value = tl.load(row + tl.load(order + column, mask=mask, other=0.0).to(tl.int32), mask=mask)
    tl.debug_barrier()  # all threads have what they take before one stores
    tl.store(row + column, value, mask=mask)


@triton.jit
def norm_heads_kernel(x, x_stride, weight, head, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
    """Program (h, m): head h of x[m] over its root mean square, less its mean before where CENTRED, times its weight.
    BLOCK >= head."""
    at = tl.arange(0, BLOCK)
    mask, own = at < head, tl.program_id(0) * head + at
    row = x + tl.program_id(1).to(tl.int64) * x_stride + own
    value = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    if CENTRED:
        value = tl.where(mask, value - tl.sum(value, axis=0) / head, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, axis=0) / head + eps)
    value = value * tl.load(weight + own, mask=mask, other=0.0)
    tl.store(row, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def sum_squares_kernel(x, x_stride, first, cols, out, BLOCK: tl.constexpr):
    """Program (part, m): out[m, part] = the squares of x[m]'s columns up to `first`, or from there on, added up in
    float32. BLOCK >= either part."""
    part, m = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin = tl.where(part == 0, 0, first)
    column = begin + tl.arange(0, BLOCK)
    mask = column < tl.where(part == 0, first, cols)
    value = tl.load(x + m * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + 2 * m + part, tl.sum(value * value, axis=0))


@triton.jit
def norm_wide_kernel(
    x, x_stride, q_norm, k_norm, sums, first, rest, first_of, rest_of, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    """x[m, c] over the root mean square that sums[m] has of its part, the first columns or the rest, times its weight;
    program (piece of the columns, m)."""
    column, m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    row, mask, is_q = x + m * x_stride + column, column < first + rest, column < first
    q = tl.rsqrt(tl.load(sums + 2 * m) / first_of + eps)
    k = tl.rsqrt(tl.load(sums + 2 * m + 1) / rest_of + eps)
    weight = tl.load(q_norm + column, mask=mask & is_q, other=0.0)
    weight += tl.load(k_norm + (column - first), mask=mask & (column >= first), other=0.0)
    value = tl.load(row, mask=mask, other=0.0).to(tl.float32) * tl.where(is_q, q, k) * weight
    tl.store(row, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def gate_mul_kernel(
    gate, gate_stride, up, up_stride, out, out_stride, cols, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[m, c] = act(gate[m, c]) * up[m, c]; program (piece of the columns, m). out may be gate."""
    m = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < cols
    g = tl.load(gate + m * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + m * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + m * out_stride + column, activate(g, u, ACTIVATION).to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_rows_kernel(
    x, x_stride, gate, gate_stride, cols, words, scale, sums,
    EACH: tl.constexpr, SOFTPLUS: tl.constexpr, BLOCK: tl.constexpr, QUANTISE: tl.constexpr,
):  # fmt: skip
    """Program m: x[m] *= sigmoid(gate[m]), or SOFTPLUS, in float32; EACH columns share a gate. BLOCK >= cols.
    QUANTISE: as `rms_norm_kernel` does."""
    m = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < cols
    g = tl.load(gate + m * gate_stride + column // EACH, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + m * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if SOFTPLUS:
        value *= tl.maximum(g, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(g)))
    else:
        value /= 1.0 + tl.exp(-g)
    rounded = value.to(x.dtype.element_ty)
    tl.store(x + m * x_stride + column, rounded, mask=mask)
    if QUANTISE:
        chunk = tl.arange(0, BLOCK // 32)
        tile = tl.reshape(rounded.to(tl.float32), (BLOCK // 32, 32))
        store_quantised(tile, chunk, chunk < cols // 32, m, words, scale, sums, cols // 32, BLOCK // 32)


@triton.jit
def scale_rows_kernel(
    x, x_stride, hidden, hidden_stride, weight, cols, width, words, scale, sums,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, QUANTISE: tl.constexpr,
):  # fmt: skip
    """Program m: x[m] *= sigmoid(hidden[m] . weight), in float32. BLOCK >= cols, DEPTH >= width. QUANTISE: as
    `rms_norm_kernel` does."""
    m = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, DEPTH)
    h = tl.load(hidden + m * hidden_stride + at, mask=at < width, other=0.0)
    gate = tl.sum(h * tl.load(weight + at, mask=at < width, other=0.0), axis=0)
    column = tl.arange(0, BLOCK)
    mask = column < cols
    value = tl.load(x + m * x_stride + column, mask=mask, other=0.0).to(tl.float32) / (1.0 + tl.exp(-gate))
    rounded = value.to(x.dtype.element_ty)
    tl.store(x + m * x_stride + column, rounded, mask=mask)
    if QUANTISE:
        chunk = tl.arange(0, BLOCK // 32)
        tile = tl.reshape(rounded.to(tl.float32), (BLOCK // 32, 32))
        store_quantised(tile, chunk, chunk < cols // 32, m, words, scale, sums, cols // 32, BLOCK // 32)


@triton.jit
def add_bias_kernel(out, out_stride, bias, cols, BLOCK: tl.constexpr):
    """out[m, c] += bias[c]; program (piece of the columns, m)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = out + tl.program_id(1).to(tl.int64) * out_stride + at
    value = tl.load(row, mask=at < cols, other=0.0).to(tl.float32) + tl.load(bias + at, mask=at < cols, other=0.0)
    tl.store(row, value.to(out.dtype.element_ty), mask=at < cols)


@triton.jit
def rope_store_kernel(
    qkv, stride, q_norm, k_norm, eps, cos, sin, begin, position, blocks, k, v, k_block, k_cell, v_block, v_cell,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr,
    TP: tl.constexpr, HB: tl.constexpr, CELLS: tl.constexpr, ADJACENT: tl.constexpr, Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr, V_NORM: tl.constexpr,
):  # fmt: skip
    """Program (HB heads of q, k and v, row). A thread owns both numbers of a pair, so q turns in place safely.

    CELLS are a block of the cache.
    HALF pairs are rotated (HP: HALF rounded up to a power of two); the D - 2 HALF numbers behind them pass (TP).
    Keys for cells of codes turn in place too, and values for them stay, normed where these are:
    `store_cells_kernel` does the rest.
    Of rows whose `begin` is below 0 nothing is stored.
    """
    m = tl.program_id(1)
    head = tl.program_id(0) * HB + tl.arange(0, HB)[:, None]
    there = head < HEADS + 2 * GROUPS
    at_row = tl.load(position + m)
    pair = tl.arange(0, HP)[None, :]
    paired = there & (pair < HALF)
    source = qkv + m.to(tl.int64) * stride + head * D
    if ADJACENT:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + HALF
    x0 = tl.load(source + first, mask=paired, other=0.0).to(tl.float32)
    x1 = tl.load(source + second, mask=paired, other=0.0).to(tl.float32)
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + GROUPS)
    is_v = (head >= HEADS + GROUPS) & there
    squares = tl.sum(x0 * x0 + x1 * x1, axis=1)
    if TP > 0:
        tail = 2 * HALF + tl.arange(0, TP)[None, :]
        passing = there & (tail < D)
        rest = tl.load(source + tail, mask=passing, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, axis=1)
    factor = tl.rsqrt(squares / D + eps)[:, None]
    if Q_NORM:
        x0 = tl.where(is_q, x0 * factor * tl.load(q_norm + first, mask=pair < HALF, other=0.0), x0)
        x1 = tl.where(is_q, x1 * factor * tl.load(q_norm + second, mask=pair < HALF, other=0.0), x1)
    if K_NORM:
        x0 = tl.where(is_k, x0 * factor * tl.load(k_norm + first, mask=pair < HALF, other=0.0), x0)
        x1 = tl.where(is_k, x1 * factor * tl.load(k_norm + second, mask=pair < HALF, other=0.0), x1)
    if V_NORM:
        x0 = tl.where(is_v, x0 * factor, x0)
        x1 = tl.where(is_v, x1 * factor, x1)
    c = tl.load(cos + at_row * HALF + pair, mask=pair < HALF, other=0.0)
    s = tl.load(sin + at_row * HALF + pair, mask=pair < HALF, other=0.0)
    turned0 = tl.where(is_v, x0, x0 * c - x1 * s)
    turned1 = tl.where(is_v, x1, x1 * c + x0 * s)
    kind = qkv.dtype.element_ty
    k_kind = k.dtype.element_ty
    v_kind = v.dtype.element_ty
    turns = is_q | is_k if are_codes(k_kind) else is_q
    if V_NORM and are_codes(v_kind):
        turns = turns | is_v
    own = tl.load(begin + m)
    at_block = tl.load(blocks + tl.maximum(own, 0) + at_row // CELLS).to(tl.int64)
    keeps_k, keeps_v = is_k & (own >= 0), is_v & (own >= 0)
    to_k = k + at_block * k_block + at_row % CELLS * k_cell + (head - HEADS) * D
    to_v = v + at_block * v_block + at_row % CELLS * v_cell + (head - HEADS - GROUPS) * D
    tl.store(source + first, turned0.to(kind), mask=paired & turns)
    tl.store(source + second, turned1.to(kind), mask=paired & turns)
    if not are_codes(k_kind):
        tl.store(to_k + first, turned0.to(k_kind), mask=paired & keeps_k)
        tl.store(to_k + second, turned1.to(k_kind), mask=paired & keeps_k)
    if not are_codes(v_kind):
        tl.store(to_v + first, turned0.to(v_kind), mask=paired & keeps_v)
        tl.store(to_v + second, turned1.to(v_kind), mask=paired & keeps_v)
    if TP > 0:
        if Q_NORM:
            rest = tl.where(is_q, rest * factor * tl.load(q_norm + tail, mask=tail < D, other=0.0), rest)
        if K_NORM:
            rest = tl.where(is_k, rest * factor * tl.load(k_norm + tail, mask=tail < D, other=0.0), rest)
        if V_NORM:
            rest = tl.where(is_v, rest * factor, rest)
        tl.store(source + tail, rest.to(kind), mask=passing & turns)
        if not are_codes(k_kind):
            tl.store(to_k + tail, rest.to(k_kind), mask=passing & keeps_k)
        if not are_codes(v_kind):
            tl.store(to_v + tail, rest.to(v_kind), mask=passing & keeps_v)
