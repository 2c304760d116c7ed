"""Cells of the KV cache and the numbers in them. A cell is what one token leaves: [G, d] keys or values.

A q8_0 cell is a row of bytes, int8 [G d + G d / 16]: the codes of all heads, then one f16 scale for every 32 of them,
in order. Sizes and meaning are those of GGUF's Q8_0, number = scale * code; here codes lie together, so that kernels
read whole vectors, and a cell in one piece, so that cells are copied like those of any other type.
"""

from collections.abc import Sequence

import torch

BLOCK = 32
SCALE_BYTES = 2


def encode_cells(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """values [..., G, d] as cells of that dtype; int8 is q8_0, whose codes are at most half a scale off."""
    if dtype != torch.int8:
        return values.to(dtype)
    blocks = values.float().flatten(-2).unflatten(-1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1) / 127).half()
    codes = (blocks / scales.float()[..., None]).round().nan_to_num(0.0).clamp(-127, 127).to(torch.int8)
    return torch.cat((codes.flatten(-2), scales.view(torch.int8)), -1)


def decode_cells(cells: torch.Tensor, dim: int) -> torch.Tensor:
    """float32 [..., G, d] of what `encode_cells` gave; dim is d."""
    if cells.dtype != torch.int8:
        return cells.float()
    width = _width(cells)
    scales = cells[..., width:].contiguous().view(torch.float16).float()
    blocks = cells[..., :width].unflatten(-1, (-1, BLOCK)).float() * scales[..., None]
    return blocks.flatten(-2).unflatten(-1, (-1, dim))


def gather_cells(cache: torch.Tensor, blocks: Sequence[int], cells: int) -> torch.Tensor:
    """The first cells of a sequence, [cells, ...], from a cache [blocks, cells of a block, ...]: a view where its
    blocks follow each other, else a copy."""
    first, n = (blocks[0] if blocks else 0), -(-cells // cache.shape[1])
    if list(blocks[:n]) == list(range(first, first + n)):
        return cache[first : first + n].flatten(0, 1)[:cells]
    return cache[list(blocks[:n])].flatten(0, 1)[:cells]


def take_head(cells: torch.Tensor, head: int, dim: int) -> torch.Tensor:
    """One head's part of [n, ...] cells, contiguous [n, m]: numbers, or codes and then scales of q8_0."""
    if cells.dtype != torch.int8:
        return cells[:, head].contiguous()
    return torch.cat([cells[:, part] for part in _parts_of(cells, head, dim)], 1)


def put_head(cells: torch.Tensor, head: int, dim: int, values: torch.Tensor) -> None:
    """Write into the cells what `take_head` gave, as flat numbers (or bytes of q8_0)."""
    rows = values.view(cells.shape[0], -1)
    if cells.dtype != torch.int8:
        cells[:, head] = rows
        return
    at = 0
    for part in _parts_of(cells, head, dim):
        size = part.stop - part.start
        cells[:, part] = rows[:, at : at + size]
        at += size


def _width(cells: torch.Tensor) -> int:
    """G d of q8_0 cells."""
    return cells.shape[-1] * BLOCK // (BLOCK + SCALE_BYTES)


def _parts_of(cells: torch.Tensor, head: int, dim: int) -> tuple[slice, slice]:
    """Where a head's codes and its scales lie in a q8_0 cell."""
    width, scales = _width(cells), dim // BLOCK * SCALE_BYTES
    return slice(head * dim, (head + 1) * dim), slice(width + head * scales, width + (head + 1) * scales)
