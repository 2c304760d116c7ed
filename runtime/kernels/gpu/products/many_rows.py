"""Products of more than SMALL_BATCH rows: in int8 where the picker says so, else weights are dequantised tile by tile,
and a library GEMM does the rest."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import triton

from pshard.quant import ROW_BLOCK, align
from pshard.runtime.kernels.api import Packed
from pshard.runtime.kernels.gpu import triton_rows
from pshard.runtime.kernels.gpu.default_tiles import TUNING
from pshard.runtime.kernels.gpu.products import int8_rows, triton_dequant
from pshard.runtime.kernels.gpu.products.int8_rows import Target
from pshard.runtime.kernels.gpu.products.places import places
from pshard.runtime.kernels.gpu.products.triton_decode import ENCODINGS
from pshard.runtime.kernels.gpu.tiles.pick_tiles import Key, TilePicker
from pshard.runtime.kernels.unpack import PLAIN
from pshard.times.gpu_tiles import LIBRARY, Tile


def multiply(
    x: torch.Tensor, targets: Sequence[Target], scratch: torch.Tensor, picker: TilePicker, accumulate: bool = False
) -> None:
    """out[M, rows] (+)= x @ W.T + bias for each of the targets. `scratch`: uint8, see `Kernels.linear`."""
    together: dict[tuple[Key, tuple[Tile, ...]], list[Target]] = {}
    for target in targets:
        key, ways = picker.many_rows(target.weight.qtype, x.shape[0])
        ways = tuple(tile for tile in ways if tile == LIBRARY or int8_rows.fits(target.weight, tile, scratch))
        together.setdefault((key, ways or (LIBRARY,)), []).append(target)
    for (key, ways), some in together.items():
        picker.launch(key, ways, partial(_multiply_by, x, some, scratch, accumulate))
    for target in targets:
        if target.bias is not None:
            out, rows = target.out, target.weight.rows
            triton_rows.add_bias_kernel[(triton.cdiv(rows, 1024), out.shape[0])](
                out, out.stride(0), target.bias, rows, BLOCK=1024, num_warps=4
            )


def gate_up(
    x: torch.Tensor,
    targets: tuple[Target, Target],
    out: torch.Tensor,
    scratch: torch.Tensor,
    picker: TilePicker,
    activation: str,
) -> bool:
    """out[M, rows] = act(x @ gate.T) * (x @ up.T), of matrices of one type and shape. False where `targets` have both
    products instead."""
    gate, up = targets[0].weight, targets[1].weight
    key, ways = picker.many_rows_gated(gate.qtype, x.shape[0])
    alike = int8_rows.are_alike(gate, up)
    ways = tuple(t for t in ways if t == LIBRARY or (alike and int8_rows.fits(gate, t, scratch)))

    def start(tile: Tile) -> bool:
        if tile == LIBRARY:  # each as it is the fastest alone
            multiply(x, targets, scratch, picker)
        elif tile.stages:
            int8_rows.multiply_gated(x, gate, up, out, tile, scratch, activation)
        else:
            int8_rows.multiply(x, targets, tile, scratch)
        return tile.stages > 0

    return picker.launch(key, ways or (LIBRARY,), start)


def _multiply_by(
    x: torch.Tensor, targets: Sequence[Target], scratch: torch.Tensor, accumulate: bool, tile: Tile
) -> None:
    """One way of all of these products."""
    if tile != LIBRARY:
        int8_rows.multiply(x, targets, tile, scratch, accumulate)
        return
    for target in targets:
        _multiply_tiles(x, target, scratch, accumulate)


def _multiply_tiles(x: torch.Tensor, target: Target, tile: torch.Tensor, accumulate: bool) -> None:
    """Tile by tile of rows: dequantise, then a GEMM into columns of `out`; even tiles, whole 256 where they fit."""
    weight, out = target.weight, target.out
    if weight.qtype == "BF16":
        step = weight.rows
    else:
        most = tile.numel() // (2 * weight.cols) // ROW_BLOCK * ROW_BLOCK
        even = -(-weight.rows // -(-weight.rows // most))
        step = min(most, align(even, 256))
    for first in range(0, weight.rows, step):
        n = min(step, weight.rows - first)
        if weight.qtype == "BF16":
            w = weight.data.view(torch.bfloat16).view(weight.rows, weight.cols)
        else:
            w = tile[: 2 * n * weight.cols].view(torch.bfloat16).view(n, weight.cols)
            dequantise(weight, first, w)
        _multiply_by_library(x, w, out[:, first : first + n], accumulate)


def dequantise(weight: Packed, first_row: int, out: torch.Tensor) -> None:
    """out[n, cols], contiguous, bfloat16 or float32 = rows first_row..first_row + n; first_row a multiple of 16."""
    n, cols = out.shape
    if weight.qtype == "FP8":
        grid = triton.cdiv(cols, 1024), n
        triton_dequant.convert_fp8_kernel[grid](weight.data, out, first_row, cols, BLOCK=1024)
        return
    if weight.qtype in PLAIN:
        source = weight.data.view(PLAIN[weight.qtype])[first_row * cols :]
        triton_dequant.convert_kernel[(triton.cdiv(n * cols, 2048),)](source, out, n * cols, BLOCK=2048)
        return
    encoding, tile = ENCODINGS[weight.qtype], TUNING["dequantise", 0]
    grid = (triton.cdiv(cols // 32, tile.depth), triton.cdiv(n, ROW_BLOCK))
    triton_dequant.dequantise_kernel[grid](
        weight.data, out, first_row, n, cols, *places(weight, out.device), BC=tile.depth,
        QTYPE=weight.qtype, LOW=encoding.low, HIGH=encoding.high, num_warps=tile.warps,
    )  # fmt: skip


def look_up(table: Packed, ids: torch.Tensor, out: torch.Tensor) -> None:
    """See `Kernels.look_up`."""
    tokens, cols = out.shape
    if table.qtype == "FP8":
        grid = triton.cdiv(cols, 1024), tokens
        triton_dequant.look_up_fp8_kernel[grid](table.data, ids, out, out.stride(0), cols, BLOCK=1024, num_warps=4)
        return
    if table.qtype in PLAIN:
        triton_dequant.look_up_plain_kernel[(triton.cdiv(cols, 1024), tokens)](
            table.data.view(PLAIN[table.qtype]), ids, out, out.stride(0), cols, BLOCK=1024, num_warps=4
        )
        return
    encoding, chunks = ENCODINGS[table.qtype], min(64, triton.next_power_of_2(cols // 32))
    triton_dequant.look_up_kernel[(triton.cdiv(cols // 32, chunks), tokens)](
        table.data, ids, out, out.stride(0), cols, *places(table, out.device), BC=chunks, QTYPE=table.qtype,
        LOW=encoding.low, HIGH=encoding.high, num_warps=max(1, chunks // 32),
    )  # fmt: skip


def _multiply_nothing(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    """Stands for the next one."""


@contextmanager
def library_left_out() -> Iterator[None]:
    """Meanwhile the library multiplies nothing: for walks that only note which kernels they would start."""
    global _multiply_by_library
    before = _multiply_by_library
    _multiply_by_library = _multiply_nothing
    try:
        yield
    finally:
        _multiply_by_library = before


def _multiply_by_library(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    """out (+)= x @ w.T, in place: bfloat16 inputs, float32 sums, out bfloat16 or float32."""
    if out.dtype == x.dtype:
        torch.addmm(out, x, w.T, out=out) if accumulate else torch.mm(x, w.T, out=out)
    elif accumulate:
        torch.ops.aten.addmm.dtype_out(out, x, w.T, out.dtype, out=out)
    else:
        torch.ops.aten.mm.dtype_out(x, w.T, out.dtype, out=out)
