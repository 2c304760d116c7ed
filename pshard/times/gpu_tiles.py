"""How a GPU's kernels are cut, and what a profile found to be the fastest cut. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """How a kernel is cut: rows and columns (or chunks of 32 columns) of a tile, warps, pipeline stages.

    matvec, gated: 32 rows go to the tensor cores, 8 chunks for each warp, and their weights come into L2 `stages` - 1
    steps before they are due; 16 rows go to dp4a.

    `programs`: the columns are cut into pieces until about this many programs run. `registers`: most that a thread
    may use, where the compiler's own choice would let fewer programs run at once. `tokens`: most of one program.
    """

    rows: int
    depth: int
    warps: int
    stages: int
    programs: int = 1
    registers: int | None = None
    tokens: int = 32


@dataclass(frozen=True)
class TileChoice:
    """The fastest tile of a kernel for matrices of a quant type and batches of up to `tokens`, a power of two.

    `device`: "acc", or "acc1"... for an accelerator unlike the first. `kernel`: "matvec" (a product), "gated" (gate and
    up of an FFN) or "gated few" (the same with few rows). `seconds`: of one product with each of some matrices, with
    this tile and with the one that is used without a profile; when that one stayed they are the same.
    """

    device: str
    kernel: str
    qtype: str
    tokens: int
    tile: Tile
    seconds: float
    default_seconds: float

    @property
    def gain(self) -> float:
        """Times as fast as the tile that is used without a profile."""
        return self.default_seconds / self.seconds
