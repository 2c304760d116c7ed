"""How a GPU's kernels are cut, and what a profile found to be the fastest cut. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

AUTO, BF16 = "auto", "bf16"
PROMPT_MATHS = (AUTO, BF16, "int8")  # how products of more than SMALL_BATCH rows are multiplied; auto: the faster
INT8_KERNEL = "int8"  # products of more than SMALL_BATCH rows; what they are beside is a library's in bfloat16
INT8_GATED = "int8 gated"  # the same, of gate and up of an FFN with their activation function
INT8_EXPERTS = "int8 experts"  # a layer's experts of many tokens; `tokens` are pairs of a tile in bfloat16
INT8_KERNELS = INT8_KERNEL, INT8_GATED, INT8_EXPERTS
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
    `tokens` are pairs of a tile), "int8" (products of `tokens` or more, SMALL_BATCH left behind), "int8 gated", "int8
    experts"; or "prompt 128", "decode 128x16", "latent prompt 512", "latent decode 512": attention by numbers of a head
    and heads that share one, where `qtype` is that of cells and `tokens` ANY_BATCH. `seconds`: of one product with each
    of some matrices, or of attention or experts, with this tile and with the one that is used without a profile; when
    that one stayed they are the same.
    """

    device: str
    kernel: str
    qtype: str
    tokens: int
    tile: Tile
    seconds: float
    default_seconds: float

    @property
    def is_int8(self) -> bool:
        """Whether it is of products in int8: kept with the times of both ways where bfloat16 is faster, too."""
        return self.kernel in INT8_KERNELS

    @property
    def is_of_a_batch(self) -> bool:
        """Whether batches of other sizes have tiles of their own."""
        return not self.kernel.startswith(("prompt", "decode", "latent"))

    @property
    def gain(self) -> float:
        """Times as fast as the tile that is used without a profile."""
        return self.default_seconds / self.seconds


def experts_type(gate: str, down: str) -> str:
    """The quant type of experts as a choice has it: of gate and up, and of down where that is another."""
    return gate if gate == down else f"{gate}+{down}"


def pairs_together(pairs: int, experts: int) -> int:
    """Pairs (token, chosen expert) of a tile in bfloat16, of so many in all: with room for twice an expert's even
    share, as decoding an expert's weights for a second tile takes longer than rows that are empty. 64 pairs go to the
    tensor cores in larger pieces than 32, and take less time."""
    room = -(-2 * pairs // experts)
    return 16 if room <= 16 else 64 if room <= 64 else 128


def holds_pairs(tile: Tile, pairs: int, experts: int) -> bool:
    """Whether quantised inputs of so many pairs, in whole tiles of one expert, take no more room than bfloat16 results:
    1.25 bytes a number instead of 2."""
    return 5 * (pairs // tile.tokens + experts) * tile.tokens <= 8 * pairs


def settle_math(choices: Iterable[TileChoice], math: str) -> tuple[TileChoice, ...]:
    """The choices under one of PROMPT_MATHS: LIBRARY is the tile of products in int8 that are not to be used."""
    return tuple(c if not c.is_int8 or _uses_int8(c, math) else replace(c, tile=LIBRARY) for c in choices)


def scale_math(choice: TileChoice, math: str) -> float:
    """How many times as long a product takes under one of PROMPT_MATHS as under "auto", with which it was timed."""
    before, now = _uses_int8(choice, AUTO), _uses_int8(choice, math)
    return 1.0 if before == now else choice.gain if before else 1 / choice.gain


def choose_bucket(counts: Iterable[int], tokens: int) -> int:
    """Of the numbers of tokens that products in int8 were timed with the largest of up to `tokens`, else the least;
    0 where there are none."""
    counts = tuple(counts)
    return max((n for n in counts if n <= tokens), default=min(counts, default=0))


def _uses_int8(choice: TileChoice, math: str) -> bool:
    return math == "int8" or (math == AUTO and choice.gain > LEAST_GAIN)
