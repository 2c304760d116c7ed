"""Tiles of attention, by how much shared memory a card has. No torch.

`rows` of a tile are rows of queries, `depth` is cells. The bytes are what Triton 3.6 and 3.7 allocate at most, found by
compiling (`scripts/cards`); the first tile of a list that fits is a card's default.
"""

import math

from pshard.errors import KernelRefused
from pshard.runtime.kernels.gpu.card_limits import CardLimits
from pshard.times.gpu_tiles import Tile
from pshard.units.kv_cells import kv_nbytes

LARGEST_HEAD = 512  # numbers, of attention's kernels
_HELD = 1 << 17  # cells of a tile times heads times numbers of one, of q8_0, that 128 threads hold without spilling
_FRUGAL = (86, 89)  # cards whose threads hold 32 cells of latents of q8_0; those of sm_80 and sm_90 spill 192 bytes
_MARGIN = 2048  # barriers and the like of cards that multiply asynchronously

_PROMPT = {  # by numbers of a head, a power of two
    128: (Tile(128, 128, 8, 3), Tile(64, 64, 4, 2), Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)),
    256: (
        Tile(64, 64, 8, 2),
        Tile(64, 64, 4, 2),
        Tile(128, 32, 8, 2),
        Tile(64, 32, 8, 2),
        Tile(64, 16, 4, 2),
        Tile(32, 16, 4, 2),
    ),
    512: (Tile(32, 32, 8, 2), Tile(32, 16, 8, 2), Tile(16, 16, 4, 2)),
}
_DECODE = (Tile(16, 64, 4, 3), Tile(16, 32, 4, 3), Tile(16, 64, 4, 2), Tile(16, 32, 4, 2), Tile(16, 16, 4, 2))
_LATENT_PROMPT = (Tile(32, 32, 8, 1), Tile(32, 32, 8, 2), Tile(16, 32, 8, 2), Tile(16, 16, 8, 2))
_LATENT_DECODE = (Tile(16, 32, 8, 1), Tile(16, 32, 8, 2), Tile(16, 16, 8, 2))


def number_bytes(kind: str) -> float:
    """Bytes of a number in a cell of that type."""
    return kv_nbytes(kind, 32) / 32


def prompt_tiles(limits: CardLimits, padded: int, cells: float) -> tuple[Tile, ...]:
    """Tiles of a prompt's attention that fit, the default first. padded: numbers of a head, a power of two; cells:
    bytes of a number of k and of one of v. Raises KernelRefused for heads that are too large."""
    check_head(padded)
    ways = _PROMPT[max(128, padded)]
    return tuple(t for t in ways if attention_bytes(t, t.rows, padded, cells, limits) <= limits.shared_block)


def decode_tiles(limits: CardLimits, padded: int, cells: float, share: int) -> tuple[Tile, ...]:
    """The same of decoding; share: heads that share a KV head, a power of two."""
    check_head(padded)
    fitting = tuple(t for t in _DECODE if attention_bytes(t, share, padded, cells, limits) <= limits.shared_block)
    return tuple(sorted(fitting, key=lambda t: t.depth * padded * share > _held_in_decoding(t, cells, limits)))


def latent_prompt_tiles(limits: CardLimits, padded: int, tail: int, cells: float) -> tuple[Tile, ...]:
    """The same of a prompt over latents of `padded` numbers and keys of `tail`, both powers of two."""
    return tuple(
        t for t in _LATENT_PROMPT if latent_bytes(t, t.rows, padded, tail, cells, limits) <= limits.shared_block
    )


def latent_decode_tiles(limits: CardLimits, padded: int, tail: int, cells: float, share: int) -> tuple[Tile, ...]:
    """The same of decoding; share: heads that one program computes."""
    fitting = tuple(
        t for t in _LATENT_DECODE if latent_bytes(t, share, padded, tail, cells, limits) <= limits.shared_block
    )
    held = math.inf if cells >= 2 or limits.capability in _FRUGAL else _HELD
    return tuple(sorted(fitting, key=lambda t: t.depth * padded * share > held))


def _held_in_decoding(tile: Tile, cells: float, limits: CardLimits) -> float:
    """The most cells of a tile times heads times numbers of one of which a thread's numbers stay in registers; tiles
    with more come last. Cells of two bytes go on as they come, all others through registers.

    A third stage of q8_0 takes as many again: heads of 256 with 64 cells spill up to 80 bytes a thread on sm_90 and are
    slower than 32, of 512 with 32 cells 232. For sm_100 and sm_120 the assembler takes more registers: heads of 256
    with 64 cells spill 176, 64 heads of 128 with as many 1432 (Triton 3.6, 3.7).
    """
    if cells == 4:
        return math.inf
    if limits.capability >= 100:
        return _HELD
    if have_four(cells):
        return 2 * _HELD
    return math.inf if cells > 4 else 2 * _HELD / (tile.stages - 1)


def have_four(cells: float) -> bool:
    """Whether k or v, of so many bytes a number of each together, are q4_0: no others have 18 for 32."""
    return cells < 2 * number_bytes("q8_0") or cells % 1 > 0.5


def check_head(numbers: int) -> None:
    """Raise KernelRefused for heads that attention's kernels are not written for."""
    if numbers > LARGEST_HEAD:
        raise KernelRefused(
            f"attention heads of {numbers} numbers: the GPU's kernels take up to {LARGEST_HEAD}; "
            "use --kernels plain (slow)"
        )


def attention_bytes(tile: Tile, rows: int, padded: int, cells: float, limits: CardLimits) -> int:
    """Most bytes of shared memory of attention: `rows` of queries, cells on their way, and what is exchanged between
    warps. cells: see `prompt_tiles`."""
    wide, plain = multiplies_wide(rows, limits), cells == 4  # both k and v of two bytes: they go on as they come
    stages = tile.stages if wide and plain else tile.stages - 1
    found = 2 * rows * padded + stages * tile.depth * padded * cells
    if wide:
        found += (0 if plain else 4 * tile.depth * padded) + (_MARGIN if limits.capability >= 100 else 0)
    else:
        found += 2 * rows * tile.depth if rows < max(sum_piece(tile, rows, padded, limits), 16 * tile.warps) else 0
        found += (4 if have_four(cells) else 1 if cells < 4 else 0) * tile.depth * padded
    return int(found)


def sum_piece(tile: Tile, rows: int, padded: int, limits: CardLimits) -> int:
    """Numbers of a value that a prompt's attention sums at once. Where each warp has 16 rows of its own, no more than
    there are rows: of wider sums Triton gives each warp some columns instead, and all warps exchange what cells weigh.
    """
    own = rows >= 16 * tile.warps and not multiplies_wide(rows, limits)
    return min(rows, padded) if own else padded


def latent_bytes(tile: Tile, rows: int, padded: int, tail: int, cells: float, limits: CardLimits) -> int:
    """The same of attention over latents. cells: bytes of a number."""
    width = padded + tail
    if multiplies_wide(rows, limits):
        return int(2 * rows * width + 2 * tile.depth * width * max(2, cells)) + _MARGIN
    if tile.stages == 1:
        return int(2 * rows * width + 2 * tile.depth * width * cells)
    more = tile.depth * padded if cells < 2 else 0
    return int(2 * rows * width + (tile.stages - 1) * tile.depth * width * cells + 2 * rows * tile.depth + more)


def latent_piece(padded: int, cells: float, limits: CardLimits) -> int:
    """Numbers of a latent that are decoded and multiplied at once: on an RTX 50 a quarter, where whole ones of q8_0
    would make a thread spill 144 bytes in decoding and 824 in prompts (48 and 200 so; Triton 3.7)."""
    return padded // 4 if cells < 2 and limits.capability >= 120 and padded >= 128 else padded


def multiplies_wide(rows: int, limits: CardLimits) -> bool:
    """Whether Triton multiplies so many rows from shared memory (wgmma, tcgen05), which GeForce cards cannot."""
    return rows >= 64 and 90 <= limits.capability < 120
