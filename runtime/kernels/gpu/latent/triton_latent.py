"""Latent attention in Triton: products of heads, the store of cells, attention whose keys are its values.

A row of queries is one head of one token: all of them read the same cells. Softmax works in powers of two.
"""

import triton
import triton.language as tl

from pshard.runtime.kernels.gpu.experts.triton_tiles import load_tile
from pshard.runtime.kernels.gpu.triton_cells import find_blocks, load_cells, locate_cells, product_type, scales_of


@triton.jit
def head_products_kernel(
    x, x_stride, x_head, stack, each, out, out_stride, out_head, tokens, rows, cols, places,
    QTYPE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, MASKED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Program (BN rows, head, BM tokens): out[m, h] = x[m, h] @ W_h.T; matrix h begins `each` bytes after the one
    before it. places: see `triton_decode.plane_places`."""
    head = tl.program_id(1)
    token = tl.program_id(2) * BM + tl.arange(0, BM)
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    address = (stack + head.to(tl.int64) * each).to(tl.int64)
    x += token.to(tl.int64)[:, None] * x_stride + head * x_head
    acc = tl.zeros((BM, BN), tl.float32)
    for first in tl.range(0, cols, BK):
        k = first + tl.arange(0, BK)
        xs = tl.load(x + k[None, :], mask=(token < tokens)[:, None] & (k < cols)[None, :], other=0.0)
        ws = load_tile(address, row, rows, first, cols, places, QTYPE, LOW, HIGH, BK, MASKED)
        acc = tl.dot(xs.to(tl.bfloat16), tl.trans(ws), acc)
    at = out + token.to(tl.int64)[:, None] * out_stride + head * out_head + row[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & (row < rows)[None, :])


@triton.jit
def store_latent_kernel(
    kv, kv_stride, q, q_stride, q_head, out, out_stride, out_head, norm, eps, cos, sin, begin, position, blocks,
    cells, cell_block, cell_stride, HEADS: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, HALF: tl.constexpr,
    HP: tl.constexpr, HB: tl.constexpr, CELLS: tl.constexpr, ADJACENT: tl.constexpr,
):  # fmt: skip
    """Program (row, i): with i = 0 the row's latent, normed, and its key, turned, into its cell; else HB heads'
    queries, turned. For q8_0 cells latent and key stay in kv, and `store_cells_kernel` does the rest. Of rows whose
    `begin` is below 0 nothing is stored in cells."""
    m = tl.program_id(0).to(tl.int64)
    at_row = tl.load(position + m)
    pair = tl.arange(0, HP)[None, :]
    if ADJACENT:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + HALF
    c = tl.load(cos + at_row * HALF + pair, mask=pair < HALF, other=0.0)
    s = tl.load(sin + at_row * HALF + pair, mask=pair < HALF, other=0.0)
    if tl.program_id(1) > 0:
        head = (tl.program_id(1) - 1) * HB + tl.arange(0, HB)[:, None]
        there = (head < HEADS) & (pair < HALF)
        source = q + m * q_stride + head * q_head
        a = tl.load(source + first, mask=there, other=0.0).to(tl.float32)
        b = tl.load(source + second, mask=there, other=0.0).to(tl.float32)
        to = out + m * out_stride + head * out_head
        tl.store(to + first, (a * c - b * s).to(out.dtype.element_ty), mask=there)
        tl.store(to + second, (b * c + a * s).to(out.dtype.element_ty), mask=there)
    else:  # names of its own, as the compiler wants both branches' alike
        dim = tl.arange(0, RP)
        left = kv + m * kv_stride
        value = tl.load(left + dim, mask=dim < R, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(value * value, axis=0) / R + eps)
        value = value * factor * tl.load(norm + dim, mask=dim < R, other=0.0)
        x = tl.load(left + R + first, mask=pair < HALF, other=0.0).to(tl.float32)
        y = tl.load(left + R + second, mask=pair < HALF, other=0.0).to(tl.float32)
        own = tl.load(begin + m)
        if cells.dtype.element_ty == tl.int8:
            cell = left
        else:
            block = tl.load(blocks + tl.maximum(own, 0) + at_row // CELLS).to(tl.int64)
            cell = cells + block * cell_block + at_row % CELLS * cell_stride
        kind = cell.dtype.element_ty
        tl.store(cell + dim, value.to(kind), mask=(dim < R) & (own >= 0))
        tl.store(cell + R + first, (x * c - y * s).to(kind), mask=(pair < HALF) & (own >= 0))
        tl.store(cell + R + second, (y * c + x * s).to(kind), mask=(pair < HALF) & (own >= 0))


@triton.jit
def _load_queries(
    q, row, there, KIND: tl.constexpr, W: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, TP: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """The absorbed part, in pieces [rows, PIECE], and the turned part [rows, TP] of rows of queries of W numbers."""
    dim, tail = tl.arange(0, PIECE), tl.arange(0, TP)
    at = q + row.to(tl.int64)[:, None] * W
    absorbed = ()
    for i in tl.static_range(0, RP, PIECE):
        part = tl.load(at + i + dim[None, :], mask=there[:, None] & (dim < R - i)[None, :], other=0.0)
        absorbed = absorbed + (part.to(KIND),)  # noqa: RUF005
    turned = tl.load(at + R + tail[None, :], mask=there[:, None] & (tail < W - R)[None, :], other=0.0)
    return absorbed, turned.to(KIND)


@triton.jit
def _attend(
    absorbed, turned, seen, cells, cell_block, cell_stride, blocks, first, last, scale,
    ROWS: tl.constexpr, W: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, TP: tl.constexpr, BLOCK: tl.constexpr,
    CELLS: tl.constexpr, STAGES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """(weighted sum, in pieces [ROWS, PIECE], sum of exponentials, maximum) of rows of which each sees the first `seen`
    cells, over cells first..last. A latent of q8_0 is decoded PIECE numbers at a time: whole, it takes more registers
    than a thread has."""
    kind: tl.constexpr = turned.dtype
    scales = scales_of(cells, 0, 1, W)
    tail_scales = scales
    if cells.dtype.element_ty == tl.int8:
        tail_scales += R // 32
    peak = tl.full((ROWS,), -1e30, tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    sums = ()
    for _ in tl.static_range(0, RP, PIECE):
        sums = sums + (tl.zeros((ROWS, PIECE), tl.float32),)  # noqa: RUF005
    one, two = find_blocks(blocks, first, last, BLOCK, CELLS)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        cell = start + tl.arange(0, BLOCK)
        at, behind = locate_cells(one, two, start, cell_block, cell_stride, BLOCK, CELLS)
        scores = tl.zeros((ROWS, BLOCK), tl.float32)
        latents = ()
        for i in tl.static_range(RP // PIECE):
            part = load_cells(cells + i * PIECE, scales + i * PIECE // 32, at, behind, last - start, R - i * PIECE,
                              PIECE, BLOCK, True, kind)  # fmt: skip
            scores = tl.dot(absorbed[i], tl.trans(part), scores)
            latents = latents + (part,)  # noqa: RUF005
        keys = load_cells(cells + R, tail_scales, at, behind, last - start, W - R, TP, BLOCK, True, kind)
        one, two = find_blocks(blocks, start + BLOCK, last, BLOCK, CELLS)
        scores = tl.dot(turned, tl.trans(keys), scores)
        visible = (cell[None, :] < seen[:, None]) & (cell < last)[None, :]
        scores = tl.where(visible, scores * scale, -1e30)
        top = tl.maximum(peak, tl.max(scores, axis=1))
        shrink = tl.exp2(peak - top)
        p = tl.where(visible, tl.exp2(scores - top[:, None]), 0.0)
        weight = weight * shrink + tl.sum(p, axis=1)
        summed = ()
        for i in tl.static_range(RP // PIECE):
            summed = summed + (tl.dot(p.to(kind), latents[i], sums[i] * shrink[:, None]),)  # noqa: RUF005
        sums = summed
        peak = top
    return sums, weight, peak


@triton.jit(do_not_specialize=["splits"])
def decode_latent_kernel(
    q, cells, cell_block, cell_stride, begin, position, blocks, partial, scale, splits,
    HEADS: tl.constexpr, SHARE: tl.constexpr, W: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, TP: tl.constexpr,
    BLOCK: tl.constexpr, CELLS: tl.constexpr, STAGES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Program (split, SHARE heads, token): against its share of the cells, which follows from the token's own place, so
    one captured launch serves any length. Writes partial[token, head, split] = (weighted sum [R], maximum, sum)."""
    split, m = tl.program_id(0), tl.program_id(2)
    head = tl.program_id(1) * SHARE + tl.arange(0, SHARE)
    length = tl.load(position + m) + 1
    share = tl.cdiv(tl.cdiv(length, splits), BLOCK) * BLOCK
    first = split * share
    last = tl.minimum(first + share, length)
    kind: tl.constexpr = product_type(cells.dtype.element_ty, cells.dtype.element_ty)
    absorbed, turned = _load_queries(q, m * HEADS + head, head < HEADS, kind, W, R, RP, TP, PIECE)
    seen = tl.full((SHARE,), 0, tl.int32) + length
    blocks += tl.maximum(tl.load(begin + m), 0)  # a row that only fills the batch looks at what is there
    sums, weight, peak = _attend(
        absorbed, turned, seen, cells, cell_block, cell_stride, blocks, first, last,
        scale * 1.4426950408889634, SHARE, W, R, RP, TP, BLOCK, CELLS, STAGES, PIECE,
    )  # fmt: skip
    row = partial + ((m * HEADS + head).to(tl.int64) * splits + split) * (R + 2)
    for i in tl.static_range(RP // PIECE):
        dim = i * PIECE + tl.arange(0, PIECE)
        tl.store(row[:, None] + dim[None, :], sums[i], mask=(head < HEADS)[:, None] & (dim < R)[None, :])
    tl.store(row + R, peak, mask=head < HEADS)
    tl.store(row + R + 1, weight, mask=head < HEADS)


@triton.jit(do_not_specialize=["splits"])
def combine_latent_kernel(
    partial, out, splits, HEADS: tl.constexpr, W: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (head, token): out[token, head] [R of W] from the partial results, split by split. A split without cells
    has maximum -1e30 and no weight, so it adds nothing. SPLITS >= splits, a power of two."""
    row = tl.program_id(1) * HEADS + tl.program_id(0)
    base = partial + row.to(tl.int64) * splits * (R + 2)
    split = tl.arange(0, SPLITS)
    peaks = tl.load(base + split * (R + 2) + R, mask=split < splits, other=-1e30)
    sums = tl.load(base + split * (R + 2) + R + 1, mask=split < splits, other=0.0)
    top = tl.max(peaks, axis=0)
    total = tl.sum(sums * tl.exp2(peaks - top), axis=0)
    dim = tl.arange(0, RP)
    acc = tl.zeros((RP,), tl.float32)
    for i in tl.range(0, splits):
        factor = tl.exp2(tl.load(base + i * (R + 2) + R) - top)
        acc += factor * tl.load(base + i * (R + 2) + dim, mask=dim < R, other=0.0)
    tl.store(out + row.to(tl.int64) * W + dim, (acc / total).to(out.dtype.element_ty), mask=dim < R)


@triton.jit(do_not_specialize=["begin", "position", "tokens"])
def prompt_latent_kernel(
    q, cells, cell_block, cell_stride, blocks, begin, position, out, tokens, scale,
    HEADS: tl.constexpr, W: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, TP: tl.constexpr, BM: tl.constexpr,
    BLOCK: tl.constexpr, CELLS: tl.constexpr, STAGES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Program (BM rows) of one segment, rows token by token: token i sees cells 0..past + i. `blocks` of the segment
    start at `begin`; position[0] is `past`, read here so that one captured launch serves all of a prompt."""
    past = tl.load(position)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest ones first, for an even finish
    row = tile * BM + tl.arange(0, BM)
    there = row < tokens * HEADS
    kind: tl.constexpr = product_type(cells.dtype.element_ty, cells.dtype.element_ty)
    absorbed, turned = _load_queries(q, row, there, kind, W, R, RP, TP, PIECE)
    last = past + tl.minimum((tile * BM + BM - 1) // HEADS + 1, tokens)
    sums, weight, _ = _attend(
        absorbed, turned, past + row // HEADS + 1, cells, cell_block, cell_stride, blocks + begin, 0,
        last, scale * 1.4426950408889634, BM, W, R, RP, TP, BLOCK, CELLS, STAGES, PIECE,
    )  # fmt: skip
    for i in tl.static_range(RP // PIECE):
        dim = i * PIECE + tl.arange(0, PIECE)
        at = out + row.to(tl.int64)[:, None] * W + dim[None, :]
        tl.store(at, (sums[i] / weight[:, None]).to(out.dtype.element_ty), mask=there[:, None] & (dim < R)[None, :])
