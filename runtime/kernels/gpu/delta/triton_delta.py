"""The gated delta net in Triton: token by token in one launch, or in chunks. See plain_delta.py for the formulas.

States stay float32. Chunks go through four kernels: convolutions of all rows, with norms of q and k; what else does not
need the state, of all chunks at once; the states, chunk after chunk, with columns of values apart; norms and gates of
all rows. A fifth stores the tails. HALF: products of bfloat16, with sums in float32, where the rows come as bfloat16;
else each product is three of TF32, as good as float32.
"""

import triton
import triton.language as tl

from pshard.runtime.kernels.gpu.products.triton_matvec import arrive
from pshard.runtime.kernels.gpu.products.triton_quantise import store_quantised


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _bend_gate(x, SIGMOID: tl.constexpr):
    """What multiplies normalised outputs."""
    return 1.0 / (1.0 + tl.exp(-x)) if SIGMOID else _silu(x)


@triton.jit
def _softplus(x):
    """log(1 + e^x), as exact where it is tiny: log(1 + e) = 2 atanh(e / (2 + e)) of an e that is at most 1."""
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    n = s * s
    p = 1.0 / 13.0 + n * (1.0 / 15.0)
    p = 1.0 / 9.0 + n * (1.0 / 11.0 + n * p)
    p = 1.0 / 5.0 + n * (1.0 / 7.0 + n * p)
    p = 1.0 + n * (1.0 / 3.0 + n * p)
    return tl.maximum(x, 0.0) + 2.0 * s * p


@triton.jit
def _key_head(head, KEYS: tl.constexpr, VALUES: tl.constexpr, TILED: tl.constexpr):
    """The key head that a value head uses."""
    if TILED:
        return head % KEYS
    else:
        return head // (VALUES // KEYS)


@triton.jit
def _add_outer(state, k, u, D: tl.constexpr):
    """state + k u^T, rounded once, wherever a compiler would fuse what."""
    return tl.fma(tl.broadcast_to(k[:, None], (D, D)), tl.broadcast_to(u[None, :], (D, D)), state)


@triton.jit
def _weigh(conv, channel, old, older, oldest, new):
    """silu of the convolution of a channel's last four inputs."""
    w = conv + channel * 4
    mixed = oldest * tl.load(w) + older * tl.load(w + 1) + old * tl.load(w + 2) + new * tl.load(w + 3)
    return _silu(mixed)


@triton.jit
def delta_steps_kernel(
    qkv, qkv_stride, z, z_stride, beta, beta_stride, alpha, alpha_stride, conv, dt_bias, decay, norm, eps, states,
    tails, slots, offsets, out, out_stride, opened, opened_stride, counters, words, scale, sums,
    KEYS: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr, TILED: tl.constexpr, QUANTISE: tl.constexpr,
    ONLY_OPEN: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """Program (value head, sequence): its tokens one after the other, the state in registers meanwhile. The last of a
    key head's programs to come writes the tails of q and k, which all of them read. counters: 0, one a key head of a
    sequence. QUANTISE: rows of out are also quantised for `matvec_kernel`. ONLY_OPEN: only sequences whose rows are
    open. A row of opened: its channels, k of every key head, u and `left` of every value head. SIGMOID: gates are."""
    head, i = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(offsets + i), tl.load(offsets + i + 1)
    number = tl.load(slots + i).to(tl.int64)
    is_open = number < 0
    is_live = end > begin
    if ONLY_OPEN:
        is_live &= is_open
    if is_live:
        slot = tl.where(is_open, -1 - number, number)
        key = _key_head(head, KEYS, VALUES, TILED)
        CHANNELS: tl.constexpr = (2 * KEYS + VALUES) * D
        dim = tl.arange(0, D)
        at_q, at_k, at_v = key * D + dim, (KEYS + key) * D + dim, (2 * KEYS + head) * D + dim
        tail = tails + slot * 3 * CHANNELS
        q3, q2, q1 = tl.load(tail + at_q), tl.load(tail + CHANNELS + at_q), tl.load(tail + 2 * CHANNELS + at_q)
        k3, k2, k1 = tl.load(tail + at_k), tl.load(tail + CHANNELS + at_k), tl.load(tail + 2 * CHANNELS + at_k)
        v3, v2, v1 = tl.load(tail + at_v), tl.load(tail + CHANNELS + at_v), tl.load(tail + 2 * CHANNELS + at_v)
        at_state = states + (slot * VALUES + head) * D * D + dim[:, None] * D + dim[None, :]
        state = tl.load(at_state)
        slope, bias = tl.load(decay + head), tl.load(dt_bias + head)
        weight = tl.load(norm + dim)
        first = begin.to(tl.int64)
        for t in range(0, end - begin):
            m = first + t
            new_q = tl.load(qkv + m * qkv_stride + at_q).to(tl.float32)
            new_k = tl.load(qkv + m * qkv_stride + at_k).to(tl.float32)
            new_v = tl.load(qkv + m * qkv_stride + at_v).to(tl.float32)
            q = _weigh(conv, at_q, q1, q2, q3, new_q)
            k = _weigh(conv, at_k, k1, k2, k3, new_k)
            v = _weigh(conv, at_v, v1, v2, v3, new_v)
            q3, q2, q1 = q2, q1, new_q
            k3, k2, k1 = k2, k1, new_k
            v3, v2, v1 = v2, v1, new_v
            q *= tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * (D**-0.5)
            k *= tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
            share = 1.0 / (1.0 + tl.exp(-tl.load(beta + m * beta_stride + head).to(tl.float32)))
            left = tl.exp(slope * _softplus(tl.load(alpha + m * alpha_stride + head).to(tl.float32) + bias))
            state *= left
            u = share * (v - tl.sum(state * k[:, None], axis=0))
            state = _add_outer(state, k, u, D)
            if is_open:
                row = opened + m * opened_stride
                tl.store(row + at_q, new_q)
                tl.store(row + at_k, new_k)
                tl.store(row + at_v, new_v)
                tl.store(row + CHANNELS + key * D + dim, k)
                tl.store(row + CHANNELS + (KEYS + head) * D + dim, u)
                tl.store(row + CHANNELS + (KEYS + VALUES) * D + head, left)
            o = tl.sum(state * q[:, None], axis=0)
            gate = tl.load(z + m * z_stride + head * D + dim).to(tl.float32)
            o *= tl.rsqrt(tl.sum(o * o, axis=0) / D + eps) * weight * _bend_gate(gate, SIGMOID)
            rounded = o.to(out.dtype.element_ty)
            tl.store(out + m * out_stride + head * D + dim, rounded)
            if QUANTISE:
                chunk = head * (D // 32) + tl.arange(0, D // 32)
                tile = tl.reshape(rounded.to(tl.float32), (D // 32, 32))
                store_quantised(tile, chunk, chunk >= 0, m, words, scale, sums, VALUES * D // 32, D // 32)
        if not is_open:
            tl.store(at_state, state)
            tl.store(tail + at_v, v3)
            tl.store(tail + CHANNELS + at_v, v2)
            tl.store(tail + 2 * CHANNELS + at_v, v1)
            counter = counters + i * KEYS + key
            if arrive(counter) == VALUES // KEYS - 1:
                tl.store(tail + at_q, q3)
                tl.store(tail + CHANNELS + at_q, q2)
                tl.store(tail + 2 * CHANNELS + at_q, q1)
                tl.store(tail + at_k, k3)
                tl.store(tail + CHANNELS + at_k, k2)
                tl.store(tail + 2 * CHANNELS + at_k, k1)
                tl.store(counter, 0)


@triton.jit(do_not_specialize=["slot", "begin", "end"])
def settle_states_kernel(
    nets, opened_stride, slot, begin, end,
    KEYS: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """Program (value head, net): what `delta_steps_kernel` left of open rows into a sequence's state. nets, int64
    [nets, 3]: where states, tails and open rows of each are."""
    head, net = tl.program_id(0), nets + tl.program_id(1) * 3
    states = tl.load(net).to(tl.pointer_type(tl.float32))
    opened = tl.load(net + 2).to(tl.pointer_type(tl.float32))
    key = _key_head(head, KEYS, VALUES, TILED)
    CHANNELS: tl.constexpr = (2 * KEYS + VALUES) * D
    dim = tl.arange(0, D)
    place = slot.to(tl.int64)
    at_state = states + (place * VALUES + head) * D * D + dim[:, None] * D + dim[None, :]
    state = tl.load(at_state)
    first = begin.to(tl.int64)
    for t in range(0, end - begin):
        row = opened + (first + t) * opened_stride + CHANNELS
        k, u = tl.load(row + key * D + dim), tl.load(row + (KEYS + head) * D + dim)
        state *= tl.load(row + (KEYS + VALUES) * D + head)
        state = _add_outer(state, k, u, D)
    if end > begin:
        tl.store(at_state, state)


@triton.jit(do_not_specialize=["slot", "begin", "end"])
def settle_tails_kernel(
    nets, opened_stride, slot, begin, end, channels, TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (channels, net): the inputs of open rows into a sequence's tail; nets as in `settle_states_kernel`."""
    net, channel = nets + tl.program_id(1) * 3, tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tail = tl.load(net + 1).to(tl.pointer_type(tl.float32)) + slot.to(tl.int64) * TAIL * channels + channel
    opened = tl.load(net + 2).to(tl.pointer_type(tl.float32)) + channel
    here, tokens = channel < channels, (end - begin).to(tl.int64)
    kept = ()
    for j in tl.static_range(TAIL):
        at = tokens - TAIL + j  # of the rows; in the old tail where it is negative
        old = tl.load(tail + (at + TAIL) * channels, mask=here & (at < 0), other=0.0)
        new = tl.load(opened + (begin + at) * opened_stride, mask=here & (at >= 0), other=0.0)
        kept = kept + (tl.where(at < 0, old, new),)  # type: ignore[assignment]  # noqa: RUF005
    for j in tl.static_range(TAIL):
        tl.store(tail + j * channels, kept[j], mask=here)


@triton.jit
def _dot(a, b, HALF: tl.constexpr):
    if HALF:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    else:
        return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _invert(a, C: tl.constexpr, HALF: tl.constexpr):
    """(I + a)^-1 of a strictly lower a [C, C], all by products: from blocks' inverses to those of twice the size,
    X - X R X with what R of a lies in the larger blocks and not in the smaller."""
    i = tl.arange(0, C)
    row, column = i[:, None], i[None, :]
    x = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, a, 0.0)
    kept = a.to(tl.bfloat16) if HALF else a  # half of the registers
    size = 2
    while size < C:  # not unrolled, as that takes more registers
        rest = tl.where((row // size) ^ 1 == column // size, kept, 0.0)
        x -= _dot(_dot(x, rest, HALF), x, HALF)
        size *= 2
    return x


@triton.jit
def _live_rows(slots, offsets, i):
    """From where to where rows of sequence i lie that go in chunks: none of open ones."""
    begin, end = tl.load(offsets + i), tl.load(offsets + i + 1)
    return begin, tl.where(tl.load(slots + i) < 0, begin, end)


@triton.jit(do_not_specialize=["start", "together"])
def convolve_rows_kernel(
    qkv, qkv_stride, conv, tails, slots, offsets, start, together, keys, u,
    KEYS: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (ROWS rows, head of q, k or v, sequence): silu of the convolution of `together` rows a sequence from its
    row `start` on, up to the end of the last chunk of C, with 0 in rows that the sequence lacks. q and k, normed, into
    keys, v into u: see `prepare_chunks_kernel`."""
    head, i = tl.program_id(1), tl.program_id(2)
    begin, end = _live_rows(slots, offsets, i)
    shift = tl.program_id(0) * ROWS
    if begin + start + shift // C * C < end:
        rows = tl.num_programs(2).to(tl.int64) * together
        first = begin + start + shift
        place, dim = tl.arange(0, ROWS), tl.arange(0, D)
        row = first + place
        live = row < end
        CHANNELS: tl.constexpr = (2 * KEYS + VALUES) * D
        channel = head * D + dim
        taps = tl.reshape(tl.load(conv + head * D * 4 + tl.arange(0, 4 * D)), (D, 2, 2))
        even, odd = tl.split(taps)
        tap0, tap2 = tl.split(even)
        tap1, tap3 = tl.split(odd)
        at = qkv + row.to(tl.int64)[:, None] * qkv_stride + channel[None, :]
        x3 = tl.load(at, mask=live[:, None], other=0.0)
        x2 = tl.load(at - qkv_stride, mask=(live & (row - 1 >= begin))[:, None], other=0.0)
        x1 = tl.load(at - 2 * qkv_stride, mask=(live & (row - 2 >= begin))[:, None], other=0.0)
        x0 = tl.load(at - 3 * qkv_stride, mask=(live & (row - 3 >= begin))[:, None], other=0.0)
        mixed = x0.to(tl.float32) * tap0[None, :]
        mixed += x1.to(tl.float32) * tap1[None, :]
        mixed += x2.to(tl.float32) * tap2[None, :]
        mixed += x3.to(tl.float32) * tap3[None, :]
        if first == begin:
            tail = tails + tl.load(slots + i).to(tl.int64) * 3 * CHANNELS
            for t in range(3):
                before = row + t - begin
                at_tail = tail + before[:, None] * CHANNELS + channel[None, :]
                old = tl.load(at_tail, mask=(live & (before < 3))[:, None], other=0.0)
                mixed += old * tl.load(conv + channel * 4 + t)[None, :]
        mixed = _silu(mixed)
        at_row = (i.to(tl.int64) * together + shift + place)[:, None] * D + dim[None, :]
        if head < 2 * KEYS:
            scale = tl.where(head < KEYS, D**-0.5, 1.0)
            mixed *= (tl.rsqrt(tl.sum(mixed * mixed, axis=1) + 1e-6) * scale)[:, None]
            tl.store(keys + head * rows * D + at_row, mixed.to(keys.dtype.element_ty))
        else:
            tl.store(u + (head - 2 * KEYS) * rows * D + at_row, mixed.to(u.dtype.element_ty))


@triton.jit(do_not_specialize=["start", "together"])
def prepare_chunks_kernel(
    beta, beta_stride, alpha, alpha_stride, dt_bias, decay, slots, offsets, start, together, keys, w, u, p, c,
    KEYS: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr, TILED: tl.constexpr, C: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Program (chunk, value head, sequence): of `together` rows a sequence from its row `start` on, what chunks need
    not wait for. With R = sequences * together: keys [2, KEYS, R, D], q and k, normed; w, u [VALUES, R, D], where u
    comes as v; p [VALUES, R, C], Q K^T * D; c [VALUES, R], the sums of g, in float64 but where products are HALF: they
    reach -1000, and the differences of the last ones count."""
    head, i = tl.program_id(1), tl.program_id(2)
    begin, end = _live_rows(slots, offsets, i)
    first = begin + start + tl.program_id(0) * C
    if first < end:
        rows = tl.num_programs(2).to(tl.int64) * together
        place, dim = tl.arange(0, C), tl.arange(0, D)
        row = first + place
        live = row < end
        at = i.to(tl.int64) * together + tl.program_id(0) * C
        key = _key_head(head, KEYS, VALUES, TILED)
        kind = keys.dtype.element_ty
        tile = place[:, None] * D + dim[None, :]
        at_q, mine = keys + (key * rows + at) * D, head * rows + at
        k = tl.load(at_q + KEYS * rows * D + tile)
        a = tl.load(alpha + row.to(tl.int64) * alpha_stride + head, mask=live, other=0.0).to(tl.float32)
        b = tl.load(beta + row.to(tl.int64) * beta_stride + head, mask=live, other=0.0).to(tl.float32)
        share = tl.where(live, 1.0 / (1.0 + tl.exp(-b)), 0.0)
        g = tl.load(decay + head) * _softplus(a + tl.load(dt_bias + head))
        sums = tl.cumsum(tl.where(live, g, 0.0).to(c.dtype.element_ty), axis=0)
        tl.store(c + mine + place, sums)
        seen = place[:, None] >= place[None, :]
        between = tl.where(seen, tl.exp(tl.where(seen, sums[:, None] - sums[None, :], 0.0).to(tl.float32)), 0.0)
        scores = _dot(tl.load(at_q + tile), tl.trans(k), HALF) * between
        tl.store(p + mine * C + place[:, None] * C + place[None, :], scores.to(kind))
        system = _dot(k, tl.trans(k), HALF) * between * share[:, None]
        system = tl.where(place[:, None] > place[None, :], system, 0.0)
        inverse = _invert(system, C, HALF)
        tl.store(w + mine * D + tile, _dot(inverse * (share * tl.exp(sums.to(tl.float32)))[None, :], k, HALF).to(kind))
        v = tl.load(u + mine * D + tile)
        tl.store(u + mine * D + tile, _dot(inverse * share[None, :], v, HALF).to(kind))


@triton.jit(do_not_specialize=["start", "together"])
def advance_states_kernel(
    keys, w, u, p, c, states, slots, offsets, start, together, out, out_stride,
    KEYS: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr, TILED: tl.constexpr, C: tl.constexpr,
    COLUMNS: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (COLUMNS of the values, value head, sequence): the state through the same rows, chunk after chunk, and o
    of every row into out, not normed yet."""
    head, i = tl.program_id(1), tl.program_id(2)
    begin, end = _live_rows(slots, offsets, i)
    begin += start
    end = tl.minimum(end, begin + together)
    if end > begin:
        rows = tl.num_programs(2).to(tl.int64) * together
        key = _key_head(head, KEYS, VALUES, TILED)
        slot = tl.load(slots + i).to(tl.int64)
        dim, place = tl.arange(0, D), tl.arange(0, C)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        at_state = states + (slot * VALUES + head) * D * D + dim[:, None] * D + column[None, :]
        state = tl.load(at_state)
        at_q = keys + key * rows * D + dim[None, :]
        at_k = at_q + KEYS * rows * D
        at_w = w + head * rows * D + dim[None, :]
        at_u = u + head * rows * D + column[None, :]
        at_p = p + head * rows * C + place[None, :]
        for chunk in tl.range(0, tl.cdiv(end - begin, C), num_stages=STAGES):
            at = i.to(tl.int64) * together + chunk * C + place
            ws = tl.load(at_w + at[:, None] * D)
            qs = tl.load(at_q + at[:, None] * D)
            ks = tl.load(at_k + at[:, None] * D)
            ps = tl.load(at_p + at[:, None] * C)
            sums = tl.load(c + head * rows + at)
            whole = tl.load(c + head * rows + i.to(tl.int64) * together + chunk * C + (C - 1))
            new = tl.load(at_u + at[:, None] * D).to(tl.float32) - _dot(ws, state, HALF)
            o = _dot(qs, state, HALF) * tl.exp(sums.to(tl.float32))[:, None] + _dot(ps, new, HALF)
            row = begin + chunk * C + place
            at_out = out + row.to(tl.int64)[:, None] * out_stride + head * D + column[None, :]
            tl.store(at_out, o.to(out.dtype.element_ty), mask=(row < end)[:, None])
            left = new * tl.exp((whole - sums).to(tl.float32))[:, None]
            state = state * tl.exp(whole.to(tl.float32)) + _dot(tl.trans(ks), left, HALF)
        tl.store(at_state, state)


@triton.jit
def gate_rows_kernel(
    out, out_stride, z, z_stride, norm, eps, offsets, sequences, D: tl.constexpr, ROWS: tl.constexpr,
    SIGMOID: tl.constexpr,
):  # fmt: skip
    """Program (ROWS rows, value head): out = RMSNorm(out) * gate(z), in place, of rows that belong to a sequence."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < tl.load(offsets + sequences)
    dim = tl.arange(0, D)
    column = tl.program_id(1) * D + dim[None, :]
    at = out + row.to(tl.int64)[:, None] * out_stride + column
    o = tl.load(at, mask=live[:, None], other=0.0).to(tl.float32)
    gate = tl.load(z + row.to(tl.int64)[:, None] * z_stride + column, mask=live[:, None], other=0.0).to(tl.float32)
    o *= tl.rsqrt(tl.sum(o * o, axis=1) / D + eps)[:, None] * tl.load(norm + dim)[None, :] * _bend_gate(gate, SIGMOID)
    tl.store(at, o.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def store_tails_kernel(qkv, qkv_stride, tails, slots, offsets, channels, BLOCK: tl.constexpr):
    """Program (BLOCK channels, sequence): the last three inputs, some of which are the old tail's where the sequence
    has fewer than three rows."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = channel < channels
    begin, end = _live_rows(slots, offsets, tl.program_id(1))
    tail = tails + tl.load(slots + tl.program_id(1)).to(tl.int64) * 3 * channels + channel
    if end > begin:
        tokens = end - begin
        at = qkv + (end - 3).to(tl.int64) * qkv_stride + channel
        first = tl.load(at, mask=there & (tokens > 2), other=0.0).to(tl.float32)
        second = tl.load(at + qkv_stride, mask=there & (tokens > 1), other=0.0).to(tl.float32)
        third = tl.load(at + 2 * qkv_stride, mask=there, other=0.0).to(tl.float32)
        first += tl.load(tail + tokens * channels, mask=there & (tokens < 3), other=0.0)
        second += tl.load(tail + 2 * channels, mask=there & (tokens == 1), other=0.0)
        tl.store(tail, first, mask=there)
        tl.store(tail + channels, second, mask=there)
        tl.store(tail + 2 * channels, third, mask=there)
