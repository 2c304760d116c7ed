"""How a GPU's kernels are cut, and what a profile found to be the fastest cut. No torch."""

from dataclasses import dataclass

INT8_KERNEL = "int8"  # products of more than SMALL_BATCH rows; what they are beside is a library's in bfloat16
INT8_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
LEAST_GAIN = 1.03  # below, one way is as fast as another but for noise
ANY_BATCH = 1  # as tokens of a choice: kernels whose tile is the same for batches of every size


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


LIBRARY = Tile(0, 0, 0, 0)  # no tile: a library's product in bfloat16, of weights that are dequantised before


@dataclass(frozen=True)
class TileChoice:
    """The fastest tile of a kernel for matrices of a quant type and batches of up to `tokens`, a power of two.

    `device`: "acc", or "acc1"... for an accelerator unlike the first. `kernel`: "matvec" (a product), "gated" (gate and
    up of an FFN), "gated few" (the same with few rows), "grouped gate" and "grouped down" (experts of many tokens:
    `tokens` are pairs of a tile), "int8" (products of `tokens` or more, SMALL_BATCH left behind); or "prompt 128",
    "decode 128x16", "latent prompt 512", "latent decode 512": attention by numbers of a head and heads that share one,
    where `qtype` is that of cells and `tokens` ANY_BATCH. `seconds`: of
    one product with each of some matrices, or of attention or experts, with this tile and with the one that is used
    without a profile; when that one stayed they are the same.
    """

    device: str
    kernel: str
    qtype: str
    tokens: int
    tile: Tile
    seconds: float
    default_seconds: float

    @property
    def is_faster(self) -> bool:
        """Whether it is to be used: products in int8 are kept with their times where the library is faster, too."""
        return self.kernel != INT8_KERNEL or self.gain > LEAST_GAIN

    @property
    def is_of_a_batch(self) -> bool:
        """Whether batches of other sizes have tiles of their own."""
        return not self.kernel.startswith(("prompt", "decode", "latent"))

    @property
    def gain(self) -> float:
        """Times as fast as the tile that is used without a profile."""
        return self.default_seconds / self.seconds
