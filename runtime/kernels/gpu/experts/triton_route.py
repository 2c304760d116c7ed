"""Which experts a token takes: the router's product in float32, and the choice among its scores, on the device.

The columns of the product are cut into pieces, so that one token's router is read by many programs; pieces are added up
in their order. Of one token the last program to arrive chooses too, so that routing is one launch.
"""

import triton
import triton.language as tl

from pshard.runtime.kernels.gpu.next_norm import factor_of
from pshard.runtime.kernels.gpu.products.triton_matvec import arrive

_TOGETHER: tl.constexpr = tl.constexpr(4)
_LOWEST: tl.constexpr = tl.constexpr(-(1 << 63))
_NONE: tl.constexpr = tl.constexpr(-(1 << 31))  # in the order below every number


@triton.jit
def _order_of(value):
    """int32 that orders as the float32 does, NaN above all."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return tl.where(value != value, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _number_of(order):
    """The float32 of an order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key_of(value, index):
    """int64 that orders as the float32 does, NaN above all, and of equal ones the lower index first (it is larger)."""
    return (_order_of(value).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _allow_groups(choice, group, member, groups, per, GROUPS_USED: tl.constexpr, GP: tl.constexpr, PP: tl.constexpr):
    """choice [GP, PP] with -inf outside of the best groups; a group's score is the sum of its best two."""
    there = (group < groups) & (member < per)
    keys = tl.where(there, _key_of(choice, member + tl.zeros_like(group)), _LOWEST)
    best = tl.max(keys, axis=1)[:, None]
    score = tl.sum(tl.where(keys == best, choice, 0.0), axis=1)
    if PP > 1:
        rest = tl.where(keys == best, _LOWEST, keys)
        second = tl.max(rest, axis=1)[:, None]
        score += tl.sum(tl.where((rest == second) & there & (rest != _LOWEST), choice, 0.0), axis=1)
    number = tl.arange(0, GP)
    left = tl.where(number < groups, _key_of(score, number), _LOWEST)
    allowed = number < 0
    for _ in tl.static_range(GROUPS_USED):
        chosen = left == tl.max(left, axis=0)
        allowed |= chosen
        left = tl.where(chosen, _LOWEST, left)
    return tl.where(allowed[:, None], choice, float("-inf"))


@triton.jit
def _choose(
    partial, pieces, m, tokens, bias, choice_bias, factors, begin, ids, ids_stride, weights, weights_stride, groups,
    per, used, scale,
    SCORES: tl.constexpr, NORMED: tl.constexpr, GROUPS_USED: tl.constexpr, GP: tl.constexpr, PP: tl.constexpr,
    KP: tl.constexpr,
):  # fmt: skip
    """ids and weights of token m from partial[pieces, tokens, groups * per], by the rule of `Experts`, weights times
    `factors`; ids of -1 where its `begin` is below 0."""
    group = tl.arange(0, GP)[:, None]
    member = tl.arange(0, PP)[None, :]
    index = group * per + member
    there = (group < groups) & (member < per)
    experts = groups * per
    logits = tl.zeros((GP, PP), tl.float32)
    for start in range(0, pieces, _TOGETHER):  # their loads do not wait for each other
        piece = start + tl.arange(0, _TOGETHER)[:, None, None]
        at = partial + (piece * tokens + m).to(tl.int64) * experts + index[None, :, :]
        part = tl.load(at, mask=(piece < pieces) & there[None, :, :], other=0.0, cache_modifier=".cg")
        logits += tl.sum(part, axis=0)
    if bias is not None:
        logits += tl.load(bias + index, mask=there, other=0.0)
    if SCORES == "chosen":
        scores = logits
    elif SCORES == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        tl.static_assert(SCORES == "softmax")
        e = tl.where(there, tl.exp(logits - tl.max(tl.max(tl.where(there, logits, float("-inf")), 1), 0)), 0.0)
        scores = e / tl.sum(tl.sum(e, 1), 0)
    if choice_bias is not None:
        choice = scores + tl.load(choice_bias + index, mask=there, other=0.0)
    else:
        choice = scores
    if GROUPS_USED > 0:
        choice = _allow_groups(choice, group, member, groups, per, GROUPS_USED, GP, PP)
    order = tl.where(there, _order_of(choice), _NONE)
    place = tl.arange(0, KP)
    chosen = tl.zeros((KP,), tl.int32)
    weight = tl.full((KP,), float("-inf"), tl.float32)
    for i in range(used):
        best = tl.max(tl.max(order, 1), 0)  # of 32 bits: one instruction reduces a warp's
        first = tl.min(tl.min(tl.where(order == best, index, 0x7FFFFFFF), 1), 0)
        taken = (order == best) & (index == first)
        if choice_bias is None and GROUPS_USED == 0:  # then the choice is by the scores themselves
            score = _number_of(best)
        else:
            score = tl.sum(tl.sum(tl.where(taken, scores, 0.0), 1), 0)
        chosen = tl.where(place == i, first, chosen)
        weight = tl.where(place == i, score, weight)
        order = tl.where(taken, _NONE, order)
    if SCORES == "chosen":
        weight = tl.exp(weight - tl.max(weight, 0))
        weight = weight / tl.sum(weight, 0)
    elif NORMED:
        weight = weight / tl.sum(tl.where(place < used, weight, 0.0), 0)
    if factors is not None:
        weight *= tl.load(factors + chosen, mask=place < used, other=0.0)
    if begin is not None:
        chosen = tl.where(tl.load(begin + m) >= 0, chosen, -1)
    tl.store(ids + m.to(tl.int64) * ids_stride + place, chosen, mask=place < used)
    tl.store(weights + m.to(tl.int64) * weights_stride + place, weight * scale, mask=place < used)


@triton.jit(do_not_specialize=["tokens", "pieces", "used", "groups"])
def route_kernel(
    x, x_stride, router, partial, counters, squares, norm, eps, normed, normed_stride, cols, per_piece, tokens, pieces,
    bias, choice_bias, factors, begin, ids, ids_stride,
    weights, weights_stride, groups, per, used, scale,
    SCORES: tl.constexpr, NORMED: tl.constexpr, GROUPS_USED: tl.constexpr, GP: tl.constexpr, PP: tl.constexpr,
    KP: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, UNSCALED: tl.constexpr,
):  # fmt: skip
    """Program (BE experts, piece, token): partial sums; the last one of a token chooses. For few tokens.

    UNSCALED > 0, a power of two >= cols / 32: x is `Unscaled.hidden`, and its norm is left in `normed` as well."""
    m = tl.program_id(2)
    experts = groups * per
    expert = tl.program_id(0) * BE + tl.arange(0, BE)
    first = tl.program_id(1) * per_piece
    last = tl.minimum(first + per_piece, cols)
    acc = tl.zeros((BE, BK), tl.float32)
    factor = tl.full((1,), 1.0, tl.float32)
    if UNSCALED > 0:
        row = m + tl.arange(0, 1)
        factor = factor_of(squares, row, row >= 0, cols // 32, eps, UNSCALED)
    for start in range(first, last, BK):
        k = start + tl.arange(0, BK)
        w = tl.load(router + expert.to(tl.int64)[:, None] * cols + k[None, :],
                    mask=(expert < experts)[:, None] & (k < last)[None, :], other=0.0)  # fmt: skip
        v = tl.load(x + m.to(tl.int64) * x_stride + k, mask=k < last, other=0.0)
        if UNSCALED > 0:
            v = v * factor * tl.load(norm + k, mask=k < last, other=0.0)
            if tl.program_id(0) == 0:
                tl.store(normed + m.to(tl.int64) * normed_stride + k, v, mask=k < last)
        acc += w.to(tl.float32) * v[None, :]
    at = partial + (tl.program_id(1) * tokens + m).to(tl.int64) * experts + expert
    tl.store(at, tl.sum(acc, axis=1), mask=expert < experts)
    if arrive(counters + m) == tl.num_programs(0) * tl.num_programs(1) - 1:
        _choose(partial, pieces, m, tokens, bias, choice_bias, factors, begin, ids, ids_stride, weights, weights_stride,
                groups, per, used, scale, SCORES, NORMED, GROUPS_USED, GP, PP, KP)  # fmt: skip
        tl.store(counters + m, 0)


@triton.jit(do_not_specialize=["tokens"])
def logits_kernel(
    x, x_stride, router, partial, cols, per_piece, tokens, experts,
    TOKENS: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Program (BE experts, piece, TOKENS tokens): partial[piece, tokens, experts], nearly as exact as float32."""
    expert = tl.program_id(0) * BE + tl.arange(0, BE)
    m = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    first = tl.program_id(1) * per_piece
    last = tl.minimum(first + per_piece, cols)
    acc = tl.zeros((TOKENS, BE), tl.float32)
    for start in range(first, last, BK):
        k = start + tl.arange(0, BK)
        w = tl.load(router + expert.to(tl.int64)[:, None] * cols + k[None, :],
                    mask=(expert < experts)[:, None] & (k < last)[None, :], other=0.0)  # fmt: skip
        v = tl.load(x + m.to(tl.int64)[:, None] * x_stride + k[None, :],
                    mask=(m < tokens)[:, None] & (k < last)[None, :], other=0.0)  # fmt: skip
        acc = tl.dot(v, tl.trans(w.to(tl.float32)), acc, input_precision="tf32x3")
    at = partial + (tl.program_id(1) * tokens + m).to(tl.int64)[:, None] * experts + expert[None, :]
    tl.store(at, acc, mask=(m < tokens)[:, None] & (expert < experts)[None, :])


@triton.jit(do_not_specialize=["pieces", "used", "groups"], do_not_specialize_on_alignment=["begin", "ids", "weights"])
def choose_kernel(
    partial, pieces, bias, choice_bias, factors, begin, ids, ids_stride, weights, weights_stride, groups, per, used,
    scale,
    SCORES: tl.constexpr, NORMED: tl.constexpr, GROUPS_USED: tl.constexpr, GP: tl.constexpr, PP: tl.constexpr,
    KP: tl.constexpr,
):  # fmt: skip
    """Program (token): chooses from what `logits_kernel` left."""
    _choose(partial, pieces, tl.program_id(0), tl.num_programs(0), bias, choice_bias, factors, begin, ids, ids_stride,
            weights, weights_stride, groups, per, used, scale, SCORES, NORMED, GROUPS_USED, GP, PP, KP)  # fmt: skip


@triton.jit(do_not_specialize=["count", "used", "each"])
def choose_chunks_kernel(
    scored, scores, count, ids, weights, used, each, scale, least, EP: tl.constexpr, KP: tl.constexpr
):  # fmt: skip
    """Program (token): the chunks of its first `used` experts, weighed as `Chunks` says."""
    m = tl.program_id(0).to(tl.int64)
    place, every = tl.arange(0, KP), tl.arange(0, EP)
    found = tl.load(scored + m * count + place, mask=place < used, other=-1)
    chunk = tl.where(found >= 0, found // each, -1)
    number = tl.load(scored + m * count + every, mask=every < count, other=-1)
    score = tl.load(scores + m * count + every, mask=every < count, other=0.0)
    weight = tl.sum(tl.where((number[None, :] == chunk[:, None]) & (number >= 0)[None, :], score[None, :], 0.0), 1)
    weight = weight / tl.maximum(tl.sum(weight, 0), least) * scale
    tl.store(ids + m * used + place, chunk, mask=place < used)
    tl.store(weights + m * used + place, weight, mask=place < used)
