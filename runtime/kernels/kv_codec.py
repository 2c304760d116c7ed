"""Cells of the KV cache and the numbers in them. A cell is what one token leaves: [G, d] keys or values.

A q8_0 cell is a row of bytes, int8 [G d + G d / 16]: the codes of all heads, then one f16 scale for every 32 of them,
in order. A q4_0 cell is one too, uint8 [G d / 2 + G d / 16]: of each byte the low half is the code of a number, the
high half that of the next. Sizes and meaning are those of GGUF's Q8_0 and Q4_0, number = scale * code and scale *
(code - 8); here codes lie together, so that kernels read whole vectors, and a cell in one piece, so that cells are
copied like those of any other type.
"""

from collections.abc import Sequence

import torch

BLOCK = 32
CODES = {torch.int8: 1, torch.uint8: 2}  # q8_0 and q4_0: codes of a byte
SCALE_BYTES = 2


def encode_cells(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """values [..., G, d] as cells of that dtype; int8 is q8_0, whose codes are at most half a scale off, uint8
    q4_0, where the largest number of 32, by its size, is -8 scales."""
    if dtype not in CODES:
        return values.to(dtype)
    blocks = values.float().flatten(-2).unflatten(-1, (-1, BLOCK))
    if dtype == torch.uint8:
        high, low = blocks.amax(-1), blocks.amin(-1)
        scales = (torch.where(high >= -low, high, low) / -8).half()
        codes = (blocks / scales.float()[..., None]).round().nan_to_num(0.0).clamp(-8, 7) + 8
        pairs = codes.to(torch.uint8).flatten(-2).unflatten(-1, (-1, 2))
        return torch.cat((pairs[..., 0] | pairs[..., 1] << 4, scales.view(torch.uint8)), -1)
    scales = (blocks.abs().amax(-1) / 127).half()
    codes = (blocks / scales.float()[..., None]).round().nan_to_num(0.0).clamp(-127, 127).to(torch.int8)
    return torch.cat((codes.flatten(-2), scales.view(torch.int8)), -1)


def decode_cells(cells: torch.Tensor, dim: int) -> torch.Tensor:
    """float32 [..., G, d] of what `encode_cells` gave; dim is d."""
    if cells.dtype not in CODES:
        return cells.float()
    end = _code_nbytes(cells)
    scales, codes = cells[..., end:].contiguous().view(torch.float16).float(), cells[..., :end]
    if cells.dtype == torch.uint8:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int8) - 8
    blocks = codes.unflatten(-1, (-1, BLOCK)).float() * scales[..., None]
    return blocks.flatten(-2).unflatten(-1, (-1, dim))


def gather_cells(cache: torch.Tensor, blocks: Sequence[int], cells: int) -> torch.Tensor:
    """The first cells of a sequence, [cells, ...], from a cache [blocks, cells of a block, ...]: a view where its
    blocks follow each other, else a copy."""
    first, n = (blocks[0] if blocks else 0), -(-cells // cache.shape[1])
    if list(blocks[:n]) == list(range(first, first + n)):
        return cache[first : first + n].flatten(0, 1)[:cells]
    return cache[list(blocks[:n])].flatten(0, 1)[:cells]


def take_head(cells: torch.Tensor, head: int, dim: int) -> torch.Tensor:
    """One head's part of [n, ...] cells, contiguous [n, m]: numbers, or bytes of codes and then scales."""
    if cells.dtype not in CODES:
        return cells[:, head].contiguous()
    return torch.cat([cells[:, part] for part in _parts_of(cells, head, dim)], 1)


def put_head(cells: torch.Tensor, head: int, dim: int, values: torch.Tensor) -> None:
    """Write into the cells what `take_head` gave, as flat numbers or bytes."""
    rows = values.view(cells.shape[0], -1)
    if cells.dtype not in CODES:
        cells[:, head] = rows
        return
    at = 0
    for part in _parts_of(cells, head, dim):
        size = part.stop - part.start
        cells[:, part] = rows[:, at : at + size]
        at += size


def _code_nbytes(cells: torch.Tensor) -> int:
    """Bytes of a cell's codes, behind which its scales lie."""
    block = BLOCK // CODES[cells.dtype]
    return cells.shape[-1] // (block + SCALE_BYTES) * block


def _parts_of(cells: torch.Tensor, head: int, dim: int) -> tuple[slice, slice]:
    """Where a head's codes and its scales lie in a cell of codes."""
    codes, scales = dim // CODES[cells.dtype], dim // BLOCK * SCALE_BYTES
    end = _code_nbytes(cells)
    return slice(head * codes, (head + 1) * codes), slice(end + head * scales, end + (head + 1) * scales)
