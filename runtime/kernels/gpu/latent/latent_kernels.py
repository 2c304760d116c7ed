"""Launches of latent attention's kernels: what `CudaKernels` has of it."""

import torch
import triton

from pshard.batch_sizes import SMALL_BATCH
from pshard.quant import packed_nbytes
from pshard.runtime.kernels.api import Packed, RopeTable, RowIndex
from pshard.runtime.kernels.gpu import triton_cells
from pshard.runtime.kernels.gpu.activations import Activations
from pshard.runtime.kernels.gpu.attend import NAMES
from pshard.runtime.kernels.gpu.default_tiles import share_programs
from pshard.runtime.kernels.gpu.latent import triton_latent
from pshard.runtime.kernels.gpu.products.places import places
from pshard.runtime.kernels.gpu.products.triton_decode import ENCODINGS
from pshard.runtime.kernels.gpu.tiles.attention_tiles import (
    latent_decode_tiles,
    latent_piece,
    latent_prompt_tiles,
    number_bytes,
)
from pshard.runtime.kernels.gpu.tiles.pick_tiles import TilePicker
from pshard.runtime.kernels.row_index import part_rows
from pshard.times.gpu_tiles import ANY_BATCH, Tile
from pshard.units.attention import DECODE_PROGRAMS
from pshard.units.latent_attention import HEADS_TOGETHER, latent_pieces

COLS_TOGETHER, HEAD_ROWS = 64, 64


class LatentOnGpu:
    """See `Kernels`. Launch sizes depend on shapes and `RowIndex.cells` alone."""

    _activations: Activations
    _picker: TilePicker

    def head_products(self, x: torch.Tensor, stack: Packed, out: torch.Tensor) -> None:
        """See `Kernels.head_products`. Sums in float32 of bfloat16, for any number of tokens."""
        self._activations.ready = None
        tokens, heads, cols = x.shape
        rows, encoding = stack.rows // heads, ENCODINGS.get(stack.qtype)
        together = 16 if tokens <= 16 else 64
        grid = (triton.cdiv(rows, HEAD_ROWS), heads, triton.cdiv(tokens, together))
        triton_latent.head_products_kernel[grid](
            x, *x.stride()[:2], stack.data, packed_nbytes(stack.qtype, rows, cols), out, *out.stride()[:2],
            tokens=tokens, rows=rows, cols=cols, places=places(stack, x.device) if encoding else (0,) * 6,
            QTYPE=stack.qtype, LOW=encoding.low if encoding else 0, HIGH=encoding.high if encoding else 0,
            MASKED=cols % COLS_TOGETHER != 0, BM=together, BN=HEAD_ROWS, BK=COLS_TOGETHER, num_warps=4, num_stages=2,
        )  # fmt: skip

    def store_latent(
        self,
        kv: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        rope: RopeTable,
        rows: RowIndex,
        cells: torch.Tensor,
    ) -> None:
        """See `Kernels.store_latent`. q8_0 takes a launch more."""
        self._activations.ready = None
        (tokens, heads, _), half, rank, together = q.shape, rope.cos.shape[1], norm.shape[0], 8
        index, each = (rows.begin, rows.position, rows.blocks), cells.shape[1]
        triton_latent.store_latent_kernel[(tokens, 1 + triton.cdiv(heads, together))](
            kv, kv.stride(0), q, *q.stride()[:2], out, *out.stride()[:2], norm=norm, eps=eps, cos=rope.cos,
            sin=rope.sin, begin=rows.begin, position=rows.position, blocks=rows.blocks, cells=cells,
            cell_block=cells.stride(0), cell_stride=cells.stride(1), HEADS=heads, R=rank,
            RP=triton.next_power_of_2(rank), HALF=half, HP=triton.next_power_of_2(half), HB=together, CELLS=each,
            ADJACENT=rope.pairing == "adjacent", num_warps=4,
        )  # fmt: skip
        if cells.dtype == torch.int8:
            width = rank + 2 * half
            triton_cells.store_cells_kernel[(tokens,)](
                kv, kv.stride(0), 0, cells, *cells.stride()[:2], *index, WIDTH=width,
                BLOCKS=triton.next_power_of_2(width // 32), CELLS=each, num_warps=4,
            )  # fmt: skip

    def attend_latent(
        self,
        q: torch.Tensor,
        rank: int,
        cells: torch.Tensor,
        rows: RowIndex,
        scale: float,
        out: torch.Tensor,
        partial: torch.Tensor | None,
    ) -> None:
        """See `Kernels.attend_latent`. Without `partial` every batch goes the way of prompts, segment by segment."""
        self._activations.ready = None
        tokens, heads, width = q.shape
        padded, tail = max(16, triton.next_power_of_2(rank)), max(16, triton.next_power_of_2(width - rank))
        sizes = {"HEADS": heads, "W": width, "R": rank, "RP": padded}
        fixed = {**sizes, "TP": tail, "CELLS": cells.shape[1]}
        at, picker = (cells, *cells.stride()[:2]), self._picker
        kind = NAMES[cells.dtype]
        each = number_bytes(kind)
        fixed["PIECE"] = latent_piece(padded, each, picker.limits)
        if partial is None or tokens > SMALL_BATCH:
            runs, prompts = part_rows(rows, partial is not None)
            for new, own in runs:
                self.attend_latent(q[new], rank, cells, own, scale, out[new], partial)

            def read(tile: Tile) -> None:
                for new, begin in prompts:
                    count = new.stop - new.start
                    triton_latent.prompt_latent_kernel[(triton.cdiv(count * heads, tile.rows),)](
                        q[new], *at, rows.blocks, begin, rows.position[new], out[new], count, scale, **fixed,
                        BM=tile.rows, BLOCK=tile.depth, STAGES=tile.stages, num_warps=tile.warps,
                    )  # fmt: skip

            key = f"latent prompt {padded}", kind, ANY_BATCH
            if prompts:
                ways = picker.ways(key, lambda: latent_prompt_tiles(picker.limits, padded, tail, each))
                picker.launch(key, ways, read)
            return
        programs = share_programs(DECODE_PROGRAMS, picker.limits)
        groups = triton.cdiv(heads, HEADS_TOGETHER)
        most, splits = min(latent_pieces(tokens, heads), max(1, programs // (tokens * groups))), 1
        index = (rows.begin, rows.position, rows.blocks)

        def decode(tile: Tile) -> None:
            nonlocal splits
            splits = min(most, triton.cdiv(rows.cells, tile.depth))
            triton_latent.decode_latent_kernel[(splits, groups, tokens)](
                q, *at, *index, partial, scale, splits, **fixed, SHARE=HEADS_TOGETHER, BLOCK=tile.depth,
                STAGES=tile.stages, num_warps=tile.warps,
            )  # fmt: skip

        key = f"latent decode {padded}", kind, ANY_BATCH
        ways = picker.ways(key, lambda: latent_decode_tiles(picker.limits, padded, tail, each, HEADS_TOGETHER))
        picker.launch(key, ways, decode)
        triton_latent.combine_latent_kernel[(heads, tokens)](
            partial, out, splits, **sizes, SPLITS=triton.next_power_of_2(splits), num_warps=4
        )
