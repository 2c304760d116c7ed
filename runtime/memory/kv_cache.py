"""KV cache of every layer: a pool of blocks of cells, in the arena from the right or in host memory."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from pshard.model import ModelSpec
from pshard.quant import BUFFER_ALIGN, align
from pshard.runtime.kernels.api import LayerKV
from pshard.runtime.kernels.kv_codec import gather_cells
from pshard.runtime.memory.kv_blocks import pool_spans
from pshard.units.kv_cells import CODED, KV_BLOCK, kv_blocks, kv_nbytes
from pshard.units.state import CellState, StateShape

JOIN_BYTES = 512 << 10  # what the link moves while one more copy is issued (10 us at 50 GB/s)
KV_DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "q8_0": torch.int8,
    "q4_0": torch.uint8,
}


def view_layer(
    memory: torch.Tensor, n_kv_heads: int, head_dim: int, shape: StateShape, window: int = 0, index: int = 0
) -> LayerKV:
    """k, v and an index as views of uint8 memory, as long as CellState says: LayerKV's tensors."""
    law = CellState(n_kv_heads * head_dim, shape.type_k, shape.type_v, window, index)
    views, at, blocks = [], 0, law.blocks(shape)
    for number, (kind, width) in enumerate(law.parts):
        cell = kv_nbytes(kind, width)
        nbytes = blocks * KV_BLOCK * cell
        extents = (width,) if number > 1 else (cell,) if kind in CODED else (n_kv_heads, head_dim)
        views.append(memory[at : at + nbytes].view(KV_DTYPES[kind]).view(blocks, KV_BLOCK, *extents))
        at += align(nbytes, BUFFER_ALIGN)
    return LayerKV(*views)


def view_cells(memory: torch.Tensor, width: int, shape: StateShape) -> torch.Tensor:
    """Cells of latents as views of uint8 memory, as long as LatentState says: see `Kernels.store_latent`."""
    nbytes, blocks = kv_nbytes(shape.type_k, width), kv_blocks(shape.context, shape.sequences)
    extents = (nbytes,) if shape.type_k == "q8_0" else (1, width)
    cells = memory[: blocks * KV_BLOCK * nbytes].view(KV_DTYPES[shape.type_k])
    return cells.view(blocks, KV_BLOCK, *extents)


def cell_nbytes(spec: ModelSpec, shape: StateShape) -> int:
    """Bytes of one token's cell in a layer; 0 where no unit keeps cells."""
    laws = (unit.state(spec.config, shape) for unit in spec.units)
    return next((law.cell for law in laws if law and law.cell), 0)


def read_cells(kv: LayerKV | torch.Tensor, blocks: Sequence[int], cells: int) -> dict[str, torch.Tensor]:
    """A copy on the host of the first cells in these blocks of a layer: "k", "v" and "index", [cells, ...] as in
    LayerKV. Latents are keys, and values of no number."""
    found = {what: gather_cells(c, blocks, cells).to("cpu", copy=True) for what, c in _caches(kv).items()}
    return found | {"v": torch.empty(cells, 1, 0)} if isinstance(kv, torch.Tensor) else found


def write_cells(kv: LayerKV | torch.Tensor, blocks: Sequence[int], cells: dict[str, torch.Tensor]) -> None:
    """Fill the first cells in these blocks of a layer with what `read_cells` gave."""
    for cache, values in ((cache, cells[what]) for what, cache in _caches(kv).items()):
        done = 0
        for start, stop in pool_spans(blocks, 0, len(values)):
            cache.flatten(0, 1)[start:stop] = values[done : done + stop - start].to(cache.device)
            done += stop - start


def _caches(kv: LayerKV | torch.Tensor) -> dict[str, torch.Tensor]:
    """What cells lie in."""
    if isinstance(kv, torch.Tensor):
        return {"k": kv}
    index = {} if kv.index is None else {"index": kv.index[:, :, None]}
    return {"k": kv.k, "v": kv.v, **index}


@dataclass(frozen=True)
class CellRun:
    """`rows` times `cells` cells of a pool, `stride` cells from the start of one to that of the next."""

    start: int
    cells: int
    rows: int = 1
    stride: int = 0


def find_cell_runs(
    spans: Iterable[tuple[int, int]], most: int, ours: Collection[int] | None = None
) -> tuple[CellRun, ...]:
    """Runs that cover the cells [from, to) of a pool, so that copying them is fast.

    A run more costs as much as `most` cells. What pays more of two ways is taken: to make one run of neighbours and
    the cells between them, where all of these lie in the blocks `ours` (None: in any), or one of equal distant spans.
    """
    whole: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if whole and start <= whole[-1][1]:  # neighbours, or cells that sequences share
            whole[-1] = (whole[-1][0], max(stop, whole[-1][1]))
        elif start < stop:
            whole.append((start, stop))
    return min((_join(whole, most, ours), _fold(whole)), key=lambda runs: _cost(runs, most))


def _cost(runs: tuple[CellRun, ...], most: int) -> int:
    return sum(run.cells * run.rows + most for run in runs)


def _join(spans: list[tuple[int, int]], most: int, ours: Collection[int] | None) -> tuple[CellRun, ...]:
    joined: list[list[int]] = []
    for start, stop in spans:
        if joined and start - joined[-1][1] <= most and _all_ours(joined[-1][1], start, ours):
            joined[-1][1] = stop
        else:
            joined.append([start, stop])
    return tuple(CellRun(start, stop - start) for start, stop in joined)


def _all_ours(start: int, stop: int, ours: Collection[int] | None) -> bool:
    return ours is None or all(block in ours for block in range(start // KV_BLOCK, (stop - 1) // KV_BLOCK + 1))


def _fold(spans: list[tuple[int, int]]) -> tuple[CellRun, ...]:
    folded: list[CellRun] = []
    for start, stop in spans:
        last = folded[-1] if folded else None
        if last and last.cells == stop - start:
            stride = last.stride or start - last.start
            if start == last.start + last.rows * stride:
                folded[-1] = CellRun(last.start, last.cells, last.rows + 1, stride)
                continue
        folded.append(CellRun(start, stop - start))
    return tuple(folded)
