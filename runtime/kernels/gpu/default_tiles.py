"""Tiles of the Triton kernels: those used where no profile chose others, and which ones a profile tries. No torch."""

from dataclasses import replace

from pshard.runtime.kernels.gpu.card_limits import CardLimits
from pshard.times.gpu_tiles import INT8_EXPERTS, INT8_GATED, INT8_KERNEL, Tile

PROCESSORS = 132  # of the card that the defaults' programs are counted for; others run their share of these
MANY_ROWS = 16384  # of gate and up; below, as in a rank's slice, programs of two warps do not fill a GPU
# types that take so many registers to decode for the tensor cores that dp4a is faster for up to 4 tokens
DP4A_TYPES = ("Q2_K", "Q3_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K")
# types of triton_columns, of which many threads at work hide more than many loads of each: books lie in L1
COLUMN_TYPES = ("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M", "NVFP4")
# types of which 16 tokens take more than 128 registers of a thread: with fewer it spills, which costs more than the
# warps that more of them leave no room for
WIDE_TYPES = ("MXFP4", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0")
# limits of 8 tokens and more on sm_100 and sm_120, for which the assembler takes more
_MORE_REGISTERS: dict[int | None, int] = {112: 128, 128: 144, 168: 200}
# of gate and up of more than 16 tokens on sm_90, where it spills little. On GeForces it spills 700 bytes: they take two
# warps, which were not timed on sm_90
_ONE_WARP = Tile(32, 8, 1, 1)
# Keyed by (kernel, bucket of tokens). "kernel type" comes before "kernel".
TUNING: dict[tuple[str, int], Tile] = {
    **{("matvec", m): Tile(32, 16, 2, 1, 800, 144) for m in (1, 2, 4, 8)},
    ("matvec Q4_1", 1): Tile(32, 32, 4, 1, 800, 80),
    ("matvec Q8_0", 1): Tile(32, 32, 4, 1, 800, 72),
    **{("matvec MXFP4", m): Tile(32, 32, 4, 1, 800) for m in (1, 2, 4, 8)},
    **{("matvec Q4_K", m): Tile(32, 16, 2, 1, 800) for m in (2, 4)},
    **{(f"matvec {qtype}", m): Tile(16, 32, 4, 1, 1056) for qtype in DP4A_TYPES for m in (1, 2, 4)},
    **{(f"matvec {qtype}", 1): Tile(16, 32, 4, 1, 1056, 56) for qtype in ("Q2_K", "Q3_K")},
    **{(f"matvec {qtype}", m): Tile(32, 16, 2, 1, 800, 128) for qtype in ("Q2_K", "Q3_K") for m in (4, 8)},
    ("matvec Q6_K", 1): Tile(32, 16, 2, 1, 800, 128),
    **{(f"matvec {qtype}", 8): Tile(32, 16, 2, 1, 800, 112) for qtype in ("Q4_K", "Q6_K")},
    ("matvec Q5_K", 8): Tile(32, 16, 2, 1, 800),
    **{(f"matvec {qtype}", m): Tile(32, 16, 2, 1, 800, 96) for qtype in COLUMN_TYPES for m in (1, 2, 4)},
    **{(f"matvec {qtype}", 8): Tile(32, 16, 2, 1, 800, 112) for qtype in COLUMN_TYPES},
    ("matvec IQ1_M", 8): Tile(32, 16, 2, 2, 800, 128),
    ("matvec", 16): Tile(32, 16, 2, 1, 800, 128),
    **{(f"matvec {qtype}", 16): Tile(32, 16, 2, 2, 800, 168) for qtype in WIDE_TYPES},
    **{(f"matvec {qtype}", 16): Tile(32, 16, 2, 1, 800, 144) for qtype in ("Q4_1", "Q8_0")},
    **{("matvec", m): Tile(32, 8, 1, 1, 800) for m in (32, 64)},
    # of these the assembler chooses fewer registers where there is no limit, and spills
    **{(f"matvec {q}", m): Tile(32, 8, 1, 1, 800, 255) for q in ("Q4_0", "Q2_K", "NVFP4", "Q1_0") for m in (32, 64)},
    ("matvec Q4_0", 64): Tile(32, 16, 2, 1, 800, 144, tokens=16),
    **{("gated", m): Tile(32, 16, 2, 1, registers=144) for m in (1, 2, 4)},
    ("gated few", 1): Tile(32, 32, 4, 1, registers=144),
    **{(f"gated {qtype}", 1): Tile(16, 32, 4, 1, registers=56) for qtype in DP4A_TYPES},
    **{(f"gated {qtype}", m): Tile(16, 32, 4, 1) for qtype in DP4A_TYPES for m in (2, 4)},
    **{(f"gated {qtype}", 4): Tile(32, 16, 2, 1, registers=128) for qtype in ("Q2_K", "Q3_K")},
    **{(f"gated {qtype}", m): Tile(32, 16, 2, 1, registers=96) for qtype in COLUMN_TYPES for m in (1, 2, 4)},
    **{(f"gated few {qtype}", 1): Tile(32, 32, 4, 1, registers=96) for qtype in COLUMN_TYPES},
    ("gated", 8): Tile(32, 16, 2, 1, registers=128),
    ("gated Q3_K", 8): Tile(32, 16, 2, 1),
    ("gated", 16): Tile(32, 16, 2, 2, registers=168),
    **{(f"gated {qtype}", 16): Tile(32, 16, 2, 1) for qtype in ("Q2_K", "Q3_K")},  # no limit spills less than 200
    ("gated IQ4_XS", 16): Tile(32, 16, 2, 1, registers=200),
    # a thread of one warp would keep twice as many sums of gate
    **{("gated", m): Tile(32, 16, 2, 1) for m in (32, 64)},
    **{(f"gated {q}", m): Tile(32, 16, 2, 2, 1, 168, tokens=16) for q in ("Q5_K", "Q6_K") for m in (32, 64)},
    **{(f"gated {q}", m): Tile(32, 16, 2, 1, tokens=16) for q in ("Q2_K", "Q3_K") for m in (32, 64)},
    **{("gated IQ4_XS", m): Tile(32, 16, 2, 1, registers=200, tokens=16) for m in (32, 64)},
    **{(f"gated {q}", m): Tile(32, 16, 4, 1) for q in ("TQ1_0", "TQ2_0") for m in (32, 64)},
    ("rows", 16): Tile(32, 128, 4, 4, 528),
    ("rows", 32): Tile(32, 128, 4, 4, 528),
    ("rows", 64): Tile(64, 128, 4, 3, 528),
    ("dequantise", 0): Tile(16, 16, 4, 1),
    ("pairs gate", 1): Tile(32, 32, 4, 1, registers=168),
    ("pairs down", 1): Tile(32, 32, 4, 1, registers=168),
    **{
        (f"pairs {part} {qtype}", 1): Tile(32, 32, 4, 1, registers=96)
        for qtype in COLUMN_TYPES
        for part in ("gate", "down")
    },
    # Products of pairs by expert, keyed by the pairs of a tile; here `depth` is rows of the weight, `tokens` columns.
    # depth * tokens is at least 64 times the threads: with one chunk a thread the compiler stores number by number
    ("grouped gate", 16): Tile(16, 64, 4, 3, tokens=128),
    ("grouped gate", 64): Tile(64, 64, 4, 2, tokens=128),
    ("grouped gate", 128): Tile(128, 64, 4, 2, tokens=128),
    ("grouped down", 16): Tile(16, 64, 4, 3, tokens=128),
    ("grouped down", 64): Tile(64, 128, 4, 3, tokens=64),
    ("grouped down", 128): Tile(128, 128, 4, 3, tokens=64),
}
_FEW_PAIRS = (Tile(16, 64, 4, 2, tokens=128), Tile(16, 128, 4, 3, tokens=64))
_LARGE = Tile(128, 64, 4, 3, tokens=128)
_GROUPED: dict[tuple[str, int], tuple[Tile, ...]] = {  # besides the defaults; see there
    ("grouped gate", 16): _FEW_PAIRS,
    ("grouped gate", 64): (Tile(64, 64, 4, 3, tokens=128), Tile(64, 128, 8, 2, tokens=128)),
    ("grouped gate", 128): (),
    ("grouped down", 16): (*_FEW_PAIRS, Tile(16, 64, 4, 4, tokens=128)),
    ("grouped down", 64): (Tile(64, 128, 4, 2, tokens=64), Tile(64, 64, 4, 3, tokens=128)),
    ("grouped down", 128): (Tile(128, 128, 4, 2, tokens=64), _LARGE),
}
# Of products of many rows in int8: `depth` chunks are loaded at once, with two stages before the last are multiplied
INT8_TILES = (
    Tile(64, 1, 4, 1, tokens=128),
    Tile(64, 1, 2, 1, tokens=64),
    Tile(128, 1, 4, 1, tokens=64),
    Tile(128, 1, 4, 1, tokens=128),
    Tile(128, 1, 4, 2, tokens=64),
    Tile(128, 2, 4, 1, tokens=64),
    Tile(128, 1, 8, 1, registers=128, tokens=128),
)
# Of gate and up at once, each warp for a group of tokens. With up to 168 registers a processor holds 12 warps.
INT8_PAIR_TILES = (
    Tile(64, 1, 4, 1, registers=168, tokens=64),
    Tile(32, 1, 2, 1, registers=168, tokens=64),
    Tile(64, 1, 2, 1, registers=168, tokens=32),
    Tile(128, 1, 8, 1, registers=168, tokens=64),
)
# Without a stage: one after the other.
INT8_GATED_TILES = (*INT8_PAIR_TILES[:2], *(replace(tile, stages=0) for tile in INT8_TILES[:3]))
INT8_WAYS = {INT8_KERNEL: INT8_TILES, INT8_GATED: INT8_GATED_TILES, INT8_EXPERTS: INT8_PAIR_TILES}
_ROOMY = 160 << 10  # bytes of shared memory a block of cards that have room for these too: up to 131072 with BF16
_GROUPED_ROOMY: dict[tuple[str, int], tuple[Tile, ...]] = {
    ("grouped gate", 16): (Tile(16, 64, 4, 4, tokens=128),),
    ("grouped gate", 128): (_LARGE, Tile(128, 128, 8, 2, tokens=128)),
}
_MORE_STAGED = ("IQ3_S", "IQ3_XXS")  # of these the large tile has 106496 bytes on their way
# of matvec, about, to be tried on every card: other numbers of pieces cost no other kernel where they round up alike
PROGRAMS = (200, 400, 800, 1600)


def row_warps(block: int) -> int:
    """Of a program that has a row of so many columns, or a part of one."""
    return min(16, max(1, block // 512))


def share_programs(programs: int, limits: CardLimits) -> int:
    """As many programs for each processor of a card as `programs` are on one with PROCESSORS."""
    return max(1, round(programs * limits.processors / PROCESSORS))


def default_tile(kernel: str, qtype: str, tokens: int, limits: CardLimits) -> Tile:
    """The tile where no profile chose one; `tokens` a power of two."""
    tile = TUNING.get((f"{kernel} {qtype}", tokens)) or TUNING[kernel, tokens]
    if kernel == "gated" and tokens > 16 and limits.capability == 90:
        tile = _ONE_WARP
    more = _MORE_REGISTERS if limits.capability >= 100 and tokens >= 8 else {}
    registers = more.get(tile.registers, tile.registers)
    return replace(tile, programs=share_programs(tile.programs, limits), registers=registers)


def gated_kernel(qtype: str, tokens: int, rows: int) -> str:
    """Which tiles gate and up of so many rows take: "gated" or "gated few"."""
    return "gated few" if tokens == 1 and rows < MANY_ROWS and qtype not in DP4A_TYPES else "gated"


def grouped_tiles(kernel: str, qtype: str, together: int, limits: CardLimits) -> tuple[Tile, ...]:
    """Tiles of "grouped gate" or "grouped down" that fit, the default first; see `pairs_together`."""
    ways = TUNING[kernel, together], *_GROUPED[kernel, together]
    if limits.shared_block >= _ROOMY:
        return *ways, *_GROUPED_ROOMY.get((kernel, together), ())
    return tuple(tile for tile in ways if qtype not in _MORE_STAGED or tile != _LARGE)


def candidate_tiles(kernel: str, qtype: str, tokens: int, limits: CardLimits) -> tuple[Tile, ...]:
    """What may be the fastest for batches of up to `tokens`, a power of two; the default first, then what is likeliest.

    All give the same sums but for their order, whatever the numbers of rows and columns. A limit of registers also
    changes how the compiler orders loads; a scheduler of the GPU has 512 for each thread of a warp: 128 let four run.
    """
    default = default_tile(kernel, qtype, tokens, limits)
    ways = [replace(tile, programs=share_programs(tile.programs, limits)) for tile in _ways(qtype, tokens)]
    if kernel == "matvec":
        ways += [replace(default, programs=programs) for programs in PROGRAMS]
    else:  # these are not cut into pieces, and 16 rows of theirs need all tokens in one program, see `matvec_kernel`
        ways = [replace(tile, programs=1) for tile in ways if tile.rows == 32 or tile.tokens >= tokens]
    return tuple(dict.fromkeys((default, *ways)))


def _ways(qtype: str, tokens: int) -> list[Tile]:
    """Tiles of 32 rows on the tensor cores and of 16 rows with dp4a; which of them is faster depends on the type."""
    if qtype in COLUMN_TYPES and tokens <= 8:  # with dp4a these take two to four times the instructions
        return [Tile(32, 16, 2, 1, 800, 96), Tile(32, 16, 2, 1, 800, 112), Tile(32, 16, 2, 1, 800, 144),
                Tile(32, 16, 2, 1, 800), Tile(32, 16, 2, 2, 800, 96), Tile(32, 16, 2, 2, 800, 128),
                Tile(32, 32, 4, 1, 800, 96), Tile(32, 32, 4, 1, 800, 128), Tile(32, 32, 4, 2, 800, 96),
                Tile(32, 8, 1, 1, 1600, 96), Tile(16, 32, 4, 1, 1056, tokens=4)]  # fmt: skip
    if tokens <= 4:
        return [Tile(32, 16, 2, 1, 800, 144), Tile(32, 16, 2, 1, 800, 128), Tile(16, 32, 4, 1, 1056, 56),
                Tile(16, 64, 8, 1, 1056), Tile(32, 16, 2, 2, 800, 128), Tile(16, 32, 4, 1, 1056),
                Tile(32, 32, 4, 1, 800, 72), Tile(32, 32, 4, 1, 800), Tile(16, 16, 2, 1, 1600)]  # fmt: skip
    if tokens == 8:
        return [Tile(32, 16, 2, 1, 800, 112), Tile(32, 16, 2, 2, 800, 112), Tile(32, 16, 2, 1, 800, 144),
                Tile(32, 16, 2, 2, 800, 144), Tile(32, 16, 2, 1, 800, 128), Tile(32, 16, 2, 2, 800, 128),
                Tile(32, 16, 2, 1, 800, 96), Tile(32, 16, 2, 1, 800), Tile(32, 32, 4, 2, 800),
                Tile(32, 32, 4, 1, 800, 72), Tile(16, 32, 4, 1, 1056, tokens=4)]  # fmt: skip
    if tokens == 16:
        return [Tile(32, 16, 2, 1, 800, 128), Tile(32, 16, 2, 2, 800, 128), Tile(32, 16, 2, 1, 800, 168),
                Tile(32, 16, 2, 2, 800, 168), Tile(32, 16, 2, 1, 800, 112, tokens=8), Tile(32, 16, 2, 1, 800, 200),
                Tile(32, 16, 2, 2, 800, 112, tokens=8), Tile(32, 16, 2, 1, 800, 112), Tile(32, 16, 2, 2, 4000, 128),
                Tile(32, 8, 1, 1, 800)]  # fmt: skip
    return [Tile(32, 16, 2, 1, 800, 128, tokens=16), Tile(32, 8, 1, 1, 800), Tile(32, 16, 2, 1, 800, 144, tokens=16),
            Tile(32, 16, 2, 2, 800, 128, tokens=16), Tile(32, 16, 2, 1, 800, 168), Tile(32, 8, 1, 2, 800),
            Tile(32, 16, 2, 1, 800, 112, tokens=8)]  # fmt: skip
