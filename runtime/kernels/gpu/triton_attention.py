"""Attention in Triton: decode split over the context and combined in a fixed order, and causal attention of prompts.

Softmax works in powers of two: `scale` times log2(e) is multiplied into the scores once.
"""

import triton
import triton.language as tl

from pshard.runtime.kernels.gpu.products.triton_quantise import store_quantised
from pshard.runtime.kernels.gpu.triton_cells import (
    are_codes,
    elements_of,
    find_blocks,
    load_cells,
    locate_cells,
    product_type,
    scales_of,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _bend_scores(scores, scale, cap, slope, back, CAPPED: tl.constexpr, SLOPED: tl.constexpr):
    """Scores times `scale`, as `Scoring` has them, in powers of two as the scale is; `back`: how far cells lie back."""
    scores = scores * scale
    if CAPPED:
        limit = cap * LOG2_E
        scores = limit - 2.0 * limit / (1.0 + tl.exp2(scores * (2.0 / cap)))
    if SLOPED:
        scores -= slope * LOG2_E * back
    return scores


@triton.jit
def _are_chosen(words, cell, start, last, TILE: tl.constexpr, CELLS: tl.constexpr, EACH: tl.constexpr):
    """Whether bits say so of the TILE cells from `start` on, where some lie before `last`: a word of a row for each
    block of CELLS, a bit of it for EACH. cell: those cells, words: a pointer, or a column of them. Loaded cell by cell,
    words would take a GPU's shared memory."""
    word = tl.load(words + start // CELLS)
    if TILE > CELLS:
        word = tl.where(
            cell < start + CELLS, word, tl.load(words + start // CELLS + 1, mask=start + CELLS < last, other=0)
        )
    return ((word >> (cell % CELLS // EACH)) & 1) != 0


@triton.jit(do_not_specialize=["splits"])
def decode_kernel(
    q, q_stride, k, v, k_block, k_cell, v_block, v_cell, begin, position, blocks, partial, scale, splits, cap, slopes,
    words, words_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, CELLS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr,
    CHUNKED: tl.constexpr, EACH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (split, KV head, row): the row's HEADS / GROUPS query heads against its share of the cells.

    The share follows from the row's own length, read here, so one captured launch serves any length. Writes
    partial[row, head, split] = (weighted sum of v [D], maximum, sum of exponentials); SHARE >= heads per group. BLOCK
    cells are a tile, CELLS a block of the cache. With a WINDOW the row sees its last so many cells, CHUNKED
    those of its chunk; the shares begin with the block where these do. Scores are as `Scoring` has them; of EACH cells,
    where that is not 0, a bit of `words` says if the row sees them; others are not read.
    """
    split, group, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    per_group: tl.constexpr = HEADS // GROUPS
    length = tl.load(position + m) + 1
    seen = 0  # the first cell that the row sees
    origin = 0
    if WINDOW:
        seen = (length - 1) // WINDOW * WINDOW if CHUNKED else tl.maximum(length - WINDOW, 0)
        origin = seen // CELLS * CELLS
    share = tl.cdiv(tl.cdiv(length - origin, splits), BLOCK) * BLOCK
    first = origin + split * share
    last = tl.minimum(first + share, length)
    blocks += tl.maximum(tl.load(begin + m), 0)  # a row that only fills the batch looks at what is there
    k_scales = scales_of(k, group, GROUPS, D)
    v_scales = scales_of(v, group, GROUPS, D)
    k += group * elements_of(D, k.dtype.element_ty)
    v += group * elements_of(D, v.dtype.element_ty)
    dim = tl.arange(0, DP)
    head = tl.arange(0, SHARE)
    inside = (head < per_group)[:, None] & (dim < D)[None, :]
    qs = tl.load(q + m.to(tl.int64) * q_stride + (group * per_group + head[:, None]) * D + dim[None, :],
                 mask=inside, other=0.0)  # fmt: skip
    kind: tl.constexpr = product_type(k.dtype.element_ty, v.dtype.element_ty)
    qs = qs.to(kind)  # the scale goes to the scores: scaled here, q would be rounded twice
    scale = scale * LOG2_E
    slope = 0.0
    if SLOPED:
        slope = tl.load(slopes + group * per_group + head, mask=head < per_group, other=0.0)[:, None]
    peak = tl.full((SHARE,), -1e30, tl.float32)
    weight = tl.zeros((SHARE,), tl.float32)
    acc = tl.zeros((SHARE, DP), tl.float32)
    one, two = find_blocks(blocks, first, last, BLOCK, CELLS)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        cell = start + tl.arange(0, BLOCK)
        chosen = None
        if EACH:
            chosen = _are_chosen(words + m.to(tl.int64) * words_stride, cell, start, last, BLOCK, CELLS, EACH)
        at_k, behind = locate_cells(one, two, start, k_block, k_cell, BLOCK, CELLS)
        ks = load_cells(k, k_scales, at_k, behind, last - start, D, DP, BLOCK, True, kind, chosen)
        at_v, behind = locate_cells(one, two, start, v_block, v_cell, BLOCK, CELLS)
        vs = load_cells(v, v_scales, at_v, behind, last - start, D, DP, BLOCK, True, kind, chosen)
        one, two = find_blocks(blocks, start + BLOCK, last, BLOCK, CELLS)
        scores = tl.dot(qs, tl.trans(ks))
        visible = cell < last
        if WINDOW:
            visible = visible & (cell >= seen)
        if EACH:
            visible = visible & chosen
        scores = _bend_scores(scores, scale, cap, slope, (length - 1 - cell)[None, :], CAPPED, SLOPED)
        scores = tl.where(visible[None, :], scores, -1e30)
        top = tl.maximum(peak, tl.max(scores, axis=1))
        shrink = tl.exp2(peak - top)
        p = tl.exp2(scores - top[:, None])
        if WINDOW or EACH:  # a tile may have nothing that the row sees
            p = tl.where(visible[None, :], p, 0.0)
        weight = weight * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(kind), vs, acc * shrink[:, None])
        peak = top
    row = partial + ((m * HEADS + group * per_group + head).to(tl.int64) * splits + split) * (D + 2)
    tl.store(row[:, None] + dim[None, :], acc, mask=inside)
    tl.store(row + D, peak, mask=head < per_group)
    tl.store(row + D + 1, weight, mask=head < per_group)


@triton.jit(do_not_specialize=["splits"])
def decode_combine_kernel(
    partial, out, out_stride, splits, sinks, words, scale, sums,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
    QUANTISE: tl.constexpr,
):  # fmt: skip
    """out[row, head] from the row's partial results; program (head, row). SPLITS >= splits, a power of two.

    QUANTISE: out, as rounded, is also quantised for `matvec_kernel` (D = DP, a multiple of 32).

    A split without cells has maximum -1e30 and zero weight, so it adds nothing. With SINKS the head's takes part.
    """
    head, m = tl.program_id(0), tl.program_id(1)
    dim = tl.arange(0, DP)
    split = tl.arange(0, SPLITS)
    row = partial + (m * HEADS + head).to(tl.int64) * splits * (D + 2) + split * (D + 2)
    there = split < splits
    peak = tl.load(row + D, mask=there, other=-1e30)
    weight = tl.load(row + D + 1, mask=there, other=0.0)
    top = tl.max(peak, axis=0)
    if SINKS:
        sink = tl.load(sinks + head) * LOG2_E
        top = tl.maximum(top, sink)
    factor = tl.exp2(peak - top)
    total = tl.sum(weight * factor, axis=0)
    if SINKS:
        total += tl.exp2(sink - top)
    parts = tl.load(row[:, None] + dim[None, :], mask=there[:, None] & (dim < D)[None, :], other=0.0)
    result = tl.sum(parts * factor[:, None], axis=0) / total
    at = out + m.to(tl.int64) * out_stride + head * D + dim
    rounded = result.to(out.dtype.element_ty)
    tl.store(at, rounded, mask=dim < D)
    if QUANTISE:
        per_head: tl.constexpr = D // 32
        chunk = head * per_head + tl.arange(0, per_head)
        tile = tl.reshape(rounded.to(tl.float32), (per_head, 32))
        store_quantised(tile, chunk, chunk >= 0, m, words, scale, sums, HEADS * per_head, per_head)


@triton.jit
def _attend(
    sums, weight, peak, qs, k, v, k_scales, v_scales, k_block, k_cell, v_block, v_cell, blocks, row, first, last, cells,
    scale, cap, slope, words, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CELLS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr, CHUNKED: tl.constexpr,
    EACH: tl.constexpr, MASKED: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """One pass of the online softmax over cells first..last; with MASKED a row sees only cells up to its own, and with
    a WINDOW only the last so many of these, CHUNKED those of its chunk, and of EACH in a row those of which its `words`
    say so. sums: of values, PIECE numbers of each at once."""
    one, two = find_blocks(blocks, first, cells, BN, CELLS)
    for start in tl.range(first, last, BN):
        cell = start + tl.arange(0, BN)
        at_k, behind = locate_cells(one, two, start, k_block, k_cell, BN, CELLS)
        ks = load_cells(k, k_scales, at_k, behind, cells - start, D, DP, BN, MASKED or D != DP, qs.dtype)
        scores = tl.dot(qs, tl.trans(ks))
        bends: tl.constexpr = CAPPED or SLOPED
        if bends or MASKED:
            scores = _bend_scores(scores, scale, cap, slope, row[:, None] - cell[None, :], CAPPED, SLOPED)
        if MASKED:
            visible = row[:, None] >= cell[None, :]
            if CHUNKED:
                visible = visible & (cell[None, :] >= (row // WINDOW * WINDOW)[:, None])
            elif WINDOW:
                visible = visible & (row[:, None] < cell[None, :] + WINDOW)
            if EACH:
                visible = visible & _are_chosen(words[:, None], cell[None, :], start, cells, BN, CELLS, EACH)
            scores = tl.where(visible, scores, -1e30)
            top = tl.maximum(peak, tl.max(scores, axis=1))
            p = tl.exp2(scores - top[:, None])
            if WINDOW or EACH:  # a tile may have nothing that a row sees
                p = tl.where(visible, p, 0.0)
        elif bends:
            top = tl.maximum(peak, tl.max(scores, axis=1))
            p = tl.exp2(scores - top[:, None])
        else:
            top = tl.maximum(peak, tl.max(scores, axis=1) * scale)
            p = tl.exp2(scores * scale - top[:, None])
        shrink = tl.exp2(peak - top)
        weight = weight * shrink + tl.sum(p, axis=1)
        p = p.to(qs.dtype)
        at_v, behind = locate_cells(one, two, start, v_block, v_cell, BN, CELLS)
        added = ()
        for i in tl.static_range(DP // PIECE):
            scales = v_scales + i * PIECE // 32 if are_codes(v.dtype.element_ty) else v_scales
            part = v + i * elements_of(PIECE, v.dtype.element_ty)
            vs = load_cells(part, scales, at_v, behind, cells - start, D - i * PIECE, PIECE, BN, MASKED or D != DP,
                            qs.dtype)  # fmt: skip
            added = added + (tl.dot(p, vs, sums[i] * shrink[:, None]),)  # noqa: RUF005
        sums = added
        peak = top
        one, two = find_blocks(blocks, start + BN, cells, BN, CELLS)
    return sums, weight, peak


@triton.jit(do_not_specialize=["begin", "position", "tokens"])
def prefill_kernel(
    q, q_stride, k, v, k_block, k_cell, v_block, v_cell, blocks, begin, position, out, out_stride, sinks, tokens, scale,
    cap, slopes, words, words_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CELLS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr,
    CHUNKED: tl.constexpr, EACH: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Program (BM new tokens, head) of one segment: token i sees cells 0..past + i, with a WINDOW the last so many of
    these, with EACH those that its words say, and with SINKS the head's. `blocks` of the segment start at `begin`;
    position[0] is `past`, read here so that a captured launch serves every micro-batch of a prompt. Of a value PIECE
    numbers are summed at once: no more than BM, so that weights of cells stay with the warp that made them (see
    `attention_tiles.prompt_piece`)."""
    blocks += begin
    past = tl.load(position)
    head = tl.program_id(1)
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest blocks first, for an even finish
    token = block * BM + tl.arange(0, BM)
    dim = tl.arange(0, DP)
    inside = (token < tokens)[:, None] & (dim < D)[None, :]
    qs = tl.load(q + token.to(tl.int64)[:, None] * q_stride + head * D + dim[None, :], mask=inside, other=0.0)
    kind: tl.constexpr = product_type(k.dtype.element_ty, v.dtype.element_ty)
    qs = qs.to(kind)
    group = head // (HEADS // GROUPS)
    k_scales = scales_of(k, group, GROUPS, D)
    v_scales = scales_of(v, group, GROUPS, D)
    k += group * elements_of(D, k.dtype.element_ty)
    v += group * elements_of(D, v.dtype.element_ty)
    peak = tl.full((BM,), -1e30, tl.float32)
    weight = tl.zeros((BM,), tl.float32)
    sums = ()
    for _ in tl.static_range(DP // PIECE):
        sums = sums + (tl.zeros((BM, PIECE), tl.float32),)  # noqa: RUF005
    cells = past + tokens
    row = past + token
    scale = scale * LOG2_E
    slope = 0.0
    if SLOPED:
        slope = tl.load(slopes + head)
    own = words
    if EACH:
        own = words + tl.minimum(token, tokens - 1).to(tl.int64) * words_stride
    if WINDOW:  # some row or other lacks cells of nearly every tile
        first = past + block * BM
        first = first // WINDOW * WINDOW if CHUNKED else tl.maximum(first + 1 - WINDOW, 0)
        seen = first // CELLS * CELLS
    elif EACH:
        seen = 0
    else:
        seen = (past + block * BM) // BN * BN  # every row of the block sees these
        sums, weight, peak = _attend(sums, weight, peak, qs, k, v, k_scales, v_scales, k_block, k_cell, v_block, v_cell,
                                     blocks, row, 0, seen, cells, scale, cap, slope, own, D, DP, BM, BN, CELLS, 0,
                                     CAPPED, SLOPED, False, 0, False, PIECE)  # fmt: skip
    last = tl.minimum(past + (block + 1) * BM, cells)
    sums, weight, peak = _attend(sums, weight, peak, qs, k, v, k_scales, v_scales, k_block, k_cell, v_block, v_cell,
                                blocks, row, seen, last, cells, scale, cap, slope, own, D, DP, BM, BN, CELLS, WINDOW,
                                CAPPED, SLOPED, CHUNKED, EACH, True, PIECE)  # fmt: skip
    shrink = tl.full((BM,), 1.0, tl.float32)
    if SINKS:
        sink = tl.load(sinks + head) * LOG2_E
        top = tl.maximum(peak, sink)
        shrink = tl.exp2(peak - top)
        weight = weight * shrink + tl.exp2(sink - top)
    for i in tl.static_range(DP // PIECE):
        part = i * PIECE + tl.arange(0, PIECE)
        result = sums[i] * shrink[:, None] / weight[:, None]
        at = out + token.to(tl.int64)[:, None] * out_stride + head * D + part[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & (part < D)[None, :])
