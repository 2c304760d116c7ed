"""Quant types: bytes in a model file and bytes in the packed layout (docs/packed-layout.md). No torch, no gguf."""

from dataclasses import dataclass
from functools import lru_cache

ROW_BLOCK = 16  # rows interleaved in one record of the packed layout: the SIMD lanes
PLANE_ALIGN = 64  # bytes; each plane of a record starts at a cache line
BUFFER_ALIGN = 256  # bytes; each buffer of the arena starts here
TENSOR_ALIGN = 256  # bytes; each tensor of a unit's blob starts here


@dataclass(frozen=True)
class Plane:
    """One plane of a packed record: `nbytes` for every `cols` columns of the record's 16 rows; 0: for all of them."""

    name: str
    cols: int
    nbytes: int


@dataclass(frozen=True)
class QuantType:
    """A weight encoding: a GGUF block holds `block` weights of one row in `nbytes` bytes.

    `planes` describe the packed layout; none means plain rows.
    """

    name: str
    block: int
    nbytes: int
    planes: tuple[Plane, ...] = ()


_CODES4 = Plane("codes4", 32, 256)
_CODES2 = Plane("codes2", 32, 128)
_CODES1 = Plane("codes1", 32, 64)
_D32 = Plane("d", 32, 32)
_M32 = Plane("m", 32, 32)
_D256 = Plane("d", 256, 32)
_INDEX4, _INDEX8 = Plane("index", 32, 128), Plane("index", 32, 64)  # a byte for every 4 or 8 columns
_SIGNS = Plane("signs", 32, 64)
_MORE8, _MORE16 = Plane("more", 32, 16), Plane("more", 32, 32)  # the indices' high bits
_DMIN256 = Plane("dmin", 256, 32)

# Block sizes are those of the GGUF format (gguf.GGML_QUANT_SIZES; a test compares them).
QUANT_TYPES: dict[str, QuantType] = {
    q.name: q
    for q in (
        QuantType("F32", 1, 4),
        QuantType("F16", 1, 2),
        QuantType("BF16", 1, 2),
        QuantType("Q4_0", 32, 18, (_CODES4, _D32)),
        QuantType("Q4_1", 32, 20, (_CODES4, _D32, _M32)),
        QuantType("Q5_0", 32, 22, (_CODES4, _CODES1, _D32)),
        QuantType("Q5_1", 32, 24, (_CODES4, _CODES1, _D32, _M32)),
        QuantType("Q8_0", 32, 34, (Plane("codes8", 32, 512), _D32)),
        QuantType("MXFP4", 32, 17, (_CODES4, Plane("e8m0", 32, 16))),
        QuantType("Q2_K", 256, 84, (_CODES2, Plane("scales", 256, 256), _D256, _DMIN256)),
        QuantType("Q3_K", 256, 110, (_CODES2, _CODES1, Plane("scales", 256, 192), _D256)),
        # 6-bit sub-scales are unpacked to bytes where the 3% limit of the layout allows it
        QuantType("Q4_K", 256, 144, (_CODES4, Plane("scales", 256, 128), Plane("mins", 256, 128), _D256, _DMIN256)),
        QuantType(
            "Q5_K", 256, 176, (_CODES4, _CODES1, Plane("scales", 256, 128), Plane("mins", 256, 128), _D256, _DMIN256)
        ),
        QuantType("Q6_K", 256, 210, (_CODES4, _CODES2, Plane("scales", 256, 256), _D256)),
        QuantType("IQ4_NL", 32, 18, (_CODES4, _D32)),
        QuantType("IQ4_XS", 256, 136, (_CODES4, Plane("scales", 256, 128), _D256)),
        QuantType("IQ3_S", 256, 110, (_INDEX4, _SIGNS, Plane("scales", 256, 64), _MORE8, _D256)),
        QuantType("IQ3_XXS", 256, 98, (_INDEX4, _SIGNS, _D256)),
        QuantType("IQ2_S", 256, 82, (_INDEX8, _SIGNS, Plane("scales", 256, 128), _MORE8, _D256)),
        QuantType("IQ2_XS", 256, 74, (_INDEX8, _SIGNS, Plane("scales", 256, 128), _D256)),
        QuantType("IQ2_XXS", 256, 66, (_INDEX8, _SIGNS, _D256)),
        QuantType("IQ1_S", 256, 50, (_INDEX8, _MORE16, _D256)),
        QuantType("IQ1_M", 256, 56, (_INDEX8, Plane("scales", 256, 96), _MORE16, _D256)),
        QuantType("NVFP4", 64, 36, (_CODES4, Plane("scales", 64, 64), Plane("factor", 0, 64))),
        QuantType("Q1_0", 128, 18, (_CODES1, Plane("d", 128, 32))),
        QuantType("Q2_0", 64, 18, (_CODES2, Plane("d", 64, 32))),
        QuantType("TQ1_0", 256, 54, (Plane("trits", 256, 832), _D256)),
        QuantType("TQ2_0", 256, 66, (_CODES2, _D256)),
        # of folders: plain rows of E4M3 codes, each followed by the row's float32 scales for every 128 of them
        QuantType("FP8", 128, 132),
    )
}


def align(n: int, to: int) -> int:
    """Round n up to a multiple of `to`."""
    return -(-n // to) * to


def file_nbytes(qtype: str, rows: int, cols: int) -> int:
    """Bytes of a [rows, cols] tensor in a model file. Raises KeyError for an unknown quant type."""
    q = QUANT_TYPES[qtype]
    return rows * (cols // q.block) * q.nbytes


def plane_nbytes(plane: Plane, cols: int) -> int:
    """Bytes of a plane in one record of `cols` columns."""
    return cols // plane.cols * plane.nbytes if plane.cols else plane.nbytes


def plane_offsets(qtype: str, cols: int) -> dict[str, tuple[int, int]]:
    """Offset and size in bytes of each plane inside one 16-row record of `cols` columns."""
    offsets, at = {}, 0
    for plane in QUANT_TYPES[qtype].planes:
        size = plane_nbytes(plane, cols)
        offsets[plane.name] = (at, size)
        at += align(size, PLANE_ALIGN)
    return offsets


def record_nbytes(qtype: str, cols: int) -> int:
    """Bytes of one record (16 rows) of the packed layout. Only for types with planes."""
    return sum(align(plane_nbytes(p, cols), PLANE_ALIGN) for p in QUANT_TYPES[qtype].planes)


@lru_cache(1 << 14)  # every layer of every rank and cut asks the same
def packed_nbytes(qtype: str, rows: int, cols: int) -> int:
    """Bytes of a [rows, cols] tensor in the packed layout; rows are padded to a multiple of 16."""
    if not QUANT_TYPES[qtype].planes:
        return file_nbytes(qtype, rows, cols)
    return -(-rows // ROW_BLOCK) * record_nbytes(qtype, cols)
